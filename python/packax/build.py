"""From a mask expression to the arrays of docs/design.md: row ranges, then bounds of blocks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from packax import masks
from packax.assemble import Document, Rows, assemble, element_test_of, limits_of
from packax.block_map import entries, packed
from packax.block_sparse import BlockSparse
from packax.plan import ContextPlan, take_sharded
from packax.primitives import vary_together
from packax.sharding import AttentionSharding, Axes, Layout, check_divides, layout_of


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "q_lo",
        "q_hi",
        "q_ids",
        "q_pos",
        "kv_ids",
        "kv_pos",
        "q_blocks",
        "kv_blocks",
        "q_order",
        "q_order_192",
        "kv_order",
        "kv_plan",
        "map_bits",
        "q_entries",
        "kv_entries",
    ],
    meta_fields=["q_len", "kv_len", "element_test", "context", "shards", "block_size"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask:
    """What `create_attention_mask` returns: a pytree of int32 arrays, O(S) in memory, or O(blocks).

    It crosses jit, scan, remat and shard_map, and serves every layer, forward and backward. The
    first axis of every leaf is the batch, or 1 (one mask for all rows of the batch, or one map of
    blocks), so under
    shard_map a mask with a batch takes the batch's spec; a mask for a context-parallel sharding
    takes `sharding.mask_specs(mask)`. The leaves are those of docs/design.md, section "The mask
    that create_attention_mask returns"; they are not meant to be written.
    """

    q_lo: jax.Array
    q_hi: jax.Array
    q_ids: jax.Array | None
    q_pos: jax.Array | None
    kv_ids: jax.Array | None
    kv_pos: jax.Array | None
    q_blocks: jax.Array
    kv_blocks: jax.Array
    q_order: jax.Array
    q_order_192: jax.Array
    kv_order: jax.Array
    q_len: int
    kv_len: int
    element_test: int
    kv_plan: jax.Array | None = None
    context: tuple[str, ...] = ()
    shards: int = 1
    map_bits: jax.Array | None = None
    q_entries: jax.Array | None = None
    kv_entries: jax.Array | None = None
    block_size: tuple[int, int] | None = None

    def operands(self) -> tuple[jax.Array, ...]:
        """The mask operands, eleven, and those of a map of blocks behind them (partition.py)."""

        # Operands that are not there are never read: q_lo stands in, so that nothing is made.
        def first(*arrays: jax.Array | None) -> jax.Array:
            return next(x for x in arrays if x is not None)

        return (
            self.q_lo,
            self.q_hi,
            first(self.q_ids, self.q_lo),
            first(self.kv_ids, self.q_ids, self.q_lo),
            first(self.q_pos, self.q_lo),
            first(self.kv_pos, self.q_pos, self.q_lo),
            self.q_blocks,
            self.q_order,
            self.q_order_192,
            self.kv_blocks,
            self.kv_order,
            *(x for x in (self.map_bits, self.q_entries, self.kv_entries) if x is not None),
        )


def _serialized(static: Any) -> bytes:
    """An AttentionMask's static fields, for jax.export."""
    if any(is_symbolic_dim(x) for x in static):
        raise NotImplementedError(
            "a mask of symbolic lengths can not be an argument of an exported program, because its "
            "lengths are not those of the mask that a caller has: build the mask in the program, "
            "or pass its leaves (docs/transformations.md)"
        )
    return json.dumps(static).encode()


def _deserialized(static: bytes) -> Any:
    return tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(static))


jax.export.register_pytree_node_serialization(
    AttentionMask,
    serialized_name="packax.AttentionMask",
    serialize_auxdata=_serialized,
    deserialize_auxdata=_deserialized,
)


def create_attention_mask(
    expression: masks.MaskExpression,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    sharding: AttentionSharding | None = None,
    plan: ContextPlan | None = None,
    permuted_keys: bool = True,
) -> AttentionMask:
    """Build the mask that every layer of a step shares.

    Args:
        expression: `causal()`, `documents(...)` or another of docs/masks.md, or `&` and `|` of them.
        q_len: number of query rows; needed only where no array of the expression says it.
        kv_len: number of keys; likewise.
        sharding: the `AttentionSharding` that `flash_attention` gets: the row ranges are sharded as
            the query rows are, and every rank has the block bounds of its own rows.
        plan: the `ContextPlan` by which the query rows were permuted. The expression stays in the
            order of the sequence, as do its arrays: this function permutes the rows.
        permuted_keys: whether keys and values are permuted by `plan` too, as in self-attention of
            permuted tokens. False: they are in the order of the sequence.

    Inside a `shard_map` of your own over the context axes, the expression is still about whole
    sequences (its arrays replicated along the context axes), and the mask that is returned has this
    rank's rows.

    Returns:
        AttentionMask: O(batch * (q_len + kv_len)) int32 values, made in O(S) work for documents.

    Raises:
        ValueError: not an expression, or lengths, sharding and plan that are missing or do not
            agree.

    >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    """
    if not isinstance(expression, masks.MaskExpression):
        raise ValueError(
            "expression must be causal(), sliding_window(...), chunked(...), prefix(...), spans(...), "
            "full(), documents(...), ranges(...), block_sparse(...), or `&` and `|` of them, but is a "
            f"{type(expression).__name__}"
        )
    q_len, kv_len = _length("q_len", q_len), _length("kv_len", kv_len)
    q_len, kv_len = masks.check_lengths(expression, q_len, kv_len)
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if length is None:
            raise ValueError(
                f"{name} is not known: no array of the expression says it, so give {name}="
            )
    assert q_len is not None and kv_len is not None
    batch = masks.batch_of(expression)
    layout = None if sharding is None else layout_of(sharding)
    if plan is not None:
        _check_plan(plan, batch, q_len, kv_len, permuted_keys, layout)
        batch = max(batch, plan.order.shape[0])
    if layout is not None:
        check_divides(layout, "the mask", "number of query rows", q_len, layout.context)
        if batch > 1:
            check_divides(layout, "the mask", "batch size", batch, layout.batch)

    parts = expression.parts()
    document = masks.documents_of(expression)
    sides: tuple[masks.Array | None, ...] = (None,) * 4
    if document is not None:
        sides = (document.q_ids, document.kv_ids, document.q_pos, document.kv_pos)
    sides = tuple(None if x is None else jnp.atleast_2d(x) for x in sides)
    interval = masks.And(tuple(part for part in parts if isinstance(part, masks.Interval)))
    ranges = tuple(
        (jnp.atleast_2d(part.lo), jnp.atleast_2d(part.hi))
        for part in parts
        if isinstance(part, masks.Ranges)
    )
    block_map, block_size = None, None
    for part in parts:
        if isinstance(part, BlockSparse):
            block_map, block_size = jnp.asarray(part.of_heads()), part.block_size
            if layout is not None and block_map.shape[1] > 1:
                heads = block_map.shape[1]
                check_divides(layout, "block_map", "number of heads", heads, layout.heads)
    static = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "block_size": block_size}
    if layout is None and plan is None:
        return _build(sides, interval, ranges, block_map, **static)
    return _build_rows(
        sides,
        interval,
        ranges,
        block_map,
        plan,
        layout=layout,
        permuted_keys=permuted_keys,
        **static,
    )


def _check_plan(
    plan: Any, batch: int, q_len: int, kv_len: int, permuted_keys: Any, layout: Layout | None
) -> None:
    if not isinstance(plan, ContextPlan):
        raise ValueError(f"plan must come from context_plan, but is a {type(plan).__name__}")
    if plan.length != q_len:
        raise ValueError(f"plan was made for {plan.length} query rows, but there are {q_len}")
    if permuted_keys and kv_len != q_len:
        raise ValueError(
            f"plan permutes {q_len} rows, but there are {kv_len} keys: pass permuted_keys=False, "
            "keys and values then being in the order of the sequence"
        )
    plans = plan.order.shape[0]
    if plans not in (1, batch) and batch != 1:
        raise ValueError(
            f"plan has {plans} rows of a batch, but the expression has batch size {batch}"
        )
    if layout is not None and plan.shards != layout.size(layout.context):
        raise ValueError(
            f"plan was made for {plan.shards} ranks, but the context axes of sharding have size "
            f"{layout.size(layout.context)}"
        )


def _length(name: str, length: Any) -> Any:
    if length is None or is_symbolic_dim(length):
        return length
    try:
        length = operator.index(length)
    except TypeError:
        raise ValueError(f"{name} must be an integer, but is {length!r}") from None
    if not 1 <= length < 2**31:
        raise ValueError(f"{name} must be from 1 to 2**31 - 1, but is {length}")
    return length


@functools.partial(
    jax.jit,
    static_argnames=("batch", "q_len", "kv_len", "block_size", "layout", "permuted_keys"),
    inline=True,
)
def _build_rows(
    document, interval, ranges, block_map, plan, *,
    batch, q_len, kv_len, block_size, layout, permuted_keys,
) -> AttentionMask:  # fmt: skip
    """As `_build`, for permuted query rows, each rank for those that it holds."""
    mask_batch: Axes = ()
    context: Axes = ()
    if layout is not None:
        mask_batch, context = layout.batch if batch > 1 else (), layout.context

    def place(x, *dims):
        return x if layout is None else layout.place(x, *dims)

    def pinned(x, *dims):
        """Where the mesh is not in the types: XLA may split an array that every attention then gathers."""
        if layout is None or not layout.mapped:
            return x
        spec = layout.spec(*dims)
        return jax.shard_map(
            lambda x: x,
            mesh=layout.mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names=set(layout.mapped),
        )(x)

    def keys(x):
        return place(jnp.broadcast_to(x, (batch, x.shape[1])), mask_batch)

    def rows(x):
        """From whole sequences to the rows in the plan's order: this rank's, where manual."""
        x = keys(x)
        if plan is not None:
            x = plan.permute(x)
        if layout is not None and layout.outside(context) > 1:
            own = q_len // layout.outside(context)
            x, first = vary_together(x, jax.lax.axis_index(context) * own)
            x = jax.lax.dynamic_slice_in_dim(x, first, own, axis=1)
        return place(x, mask_batch, context)

    if plan is not None:
        plan_batch = mask_batch if plan.order.shape[0] > 1 else ()
        order, inverse = (place(jnp.asarray(x), plan_batch) for x in (plan.order, plan.inverse))
        plan = dataclasses.replace(plan, order=order, inverse=inverse)

    pieces = 1 if layout is None else layout.size(context)
    static = {
        "batch": batch if layout is None else batch // layout.inside(mask_batch),
        "q_len": q_len // pieces,
        "kv_len": kv_len,
    }
    mapped = layout is not None and bool(layout.mapped)

    # Intervals are about the sequence, its indices and its spans: only then rows are moved or cut.
    def limits(document, interval):
        ends = limits_of(document, interval, q_len)
        shape = static["batch"], q_len
        return [None if x is None else jnp.broadcast_to(x, shape) for x in ends]

    document = Document(*(None if x is None else keys(x) for x in document))
    if layout is not None:

        def of_leaf(x):
            return (_batch_axes(batch, mask_batch, x),) if jnp.ndim(x) else ()

        interval = jax.tree.map(lambda x: place(jnp.asarray(x), *of_leaf(x)), interval)
        if mapped:
            key_spec = layout.spec(mask_batch)
            limits = jax.shard_map(
                limits,
                mesh=layout.mesh,
                in_specs=(key_spec, jax.tree.map(lambda x: layout.spec(*of_leaf(x)), interval)),
                out_specs=key_spec,
                axis_names=set(layout.mapped),
            )
    low, high = (None if x is None else rows(x) for x in limits(document, interval))
    # Keys stay whole and in order, so they are no longer "as the query's".
    kv_ids, kv_pos = document.keys()
    level = element_test_of(document, low, high)
    held = Rows(
        None if document.q_ids is None else rows(document.q_ids),
        low,
        high,
        tuple((rows(lo), rows(hi)) for lo, hi in ranges),
    )

    whole: Any = functools.partial(assemble, level=level, **static)
    if mapped:
        row_spec, block_spec = (
            layout.spec(mask_batch, context),
            layout.spec(mask_batch, (), context),
        )
        # Blocks and tiles are each rank's own, beside each other in the last axis.
        out_specs = dict.fromkeys(_COMPUTED, row_spec) | dict.fromkeys(_BLOCKS, block_spec)
        if level >= 2:
            out_specs["q_pos"] = row_spec if level == 2 else block_spec
        whole = jax.shard_map(
            whole,
            mesh=layout.mesh,
            in_specs=(row_spec, key_spec, key_spec),
            out_specs=out_specs,
            axis_names=set(layout.mapped),
        )
    computed: dict[str, Any] = {"q_pos": None, **whole(held, kv_ids, kv_pos)}
    if block_map is not None:
        if plan is not None and plan.order.shape[0] > 1:
            block_map = jnp.broadcast_to(block_map, (batch, *block_map.shape[1:]))
        heads = layout.heads if layout is not None and block_map.shape[1] > 1 else ()
        map_axes = _batch_axes(batch, mask_batch, block_map), heads
        together = q_len // (pieces if plan is None else plan.order.shape[1])
        block_map, block_size = _rows_kept_together(block_map, block_size, q_len, together)
        block_map = place(block_map, *map_axes)
        if plan is not None:
            block_map = take_sharded(plan.order, 2, block_map)
        if layout is not None and layout.outside(context) > 1:
            own = block_map.shape[2] // layout.outside(context)
            block_map, first = vary_together(block_map, jax.lax.axis_index(context) * own)
            block_map = jax.lax.dynamic_slice_in_dim(block_map, first, own, axis=2)
        lists: Any = functools.partial(
            _map_arrays, block_size=block_size, q_len=static["q_len"], kv_len=kv_len
        )
        if mapped:
            map_spec = layout.spec(*map_axes, context)
            lists = jax.shard_map(
                lists,
                mesh=layout.mesh,
                in_specs=(map_spec, block_spec),
                out_specs={
                    "map_bits": map_spec,
                    "q_entries": layout.spec(mask_batch, heads, context),
                    "kv_entries": layout.spec(mask_batch, heads, (), context),
                },
                axis_names=set(layout.mapped),
            )
        computed |= lists(place(block_map, *map_axes, context), computed["q_blocks"])
    kv_plan = None
    if plan is not None and permuted_keys:
        kv_plan = pinned(jnp.stack([plan.order, plan.inverse], axis=1), plan_batch)
    return AttentionMask(
        **computed,
        q_ids=held.ids,
        kv_ids=None if kv_ids is None else pinned(kv_ids, mask_batch),
        kv_pos=None if kv_pos is None or level < 2 else pinned(kv_pos, mask_batch),
        q_len=q_len,
        kv_len=kv_len,
        element_test=level,
        kv_plan=kv_plan,
        context=context,
        shards=pieces,
        block_size=block_size,
    )


_BLOCKS = ("q_blocks", "kv_blocks")
_COMPUTED = ("q_lo", "q_hi", *_BLOCKS, "q_order", "q_order_192", "kv_order")


def _batch_axes(batch: int, mask_batch: Axes, x: Any) -> Axes:
    """The mesh axes over which the first axis of an interval's array lies."""
    return mask_batch if jnp.shape(x)[0] == batch > 1 else ()


def _rows_kept_together(
    block_map: jax.Array, block_size: tuple[int, int], q_len: int, together: int
) -> tuple[jax.Array, tuple[int, int]]:
    """A map of blocks of rows that no rank and no chunk of a plan begins inside of, and its block size."""
    rows = block_size[0]
    if together == q_len or together % rows == 0:
        return block_map, block_size
    fewer = math.gcd(rows, together)
    block_map = jnp.repeat(block_map, rows // fewer, axis=2)[:, :, : q_len // fewer]
    return block_map, (fewer, block_size[1])


def _map_arrays(block_map, q_blocks, *, block_size, q_len, kv_len) -> dict[str, jax.Array]:
    map_bits = packed(block_map)  # one for all rows of the batch may stay that
    block_map, q_blocks = vary_together(block_map, q_blocks)
    q_entries, kv_entries = entries(block_map, block_size, q_blocks, q_len, kv_len)
    return {"map_bits": map_bits, "q_entries": q_entries, "kv_entries": kv_entries}


@functools.partial(jax.jit, static_argnames=("batch", "q_len", "kv_len", "block_size"), inline=True)
def _build(
    document, interval, ranges, block_map, *, batch, q_len, kv_len, block_size
) -> AttentionMask:
    """document: the arrays of `Document`; interval: And of what else narrows the rows."""

    def rows(x):
        return None if x is None else jnp.broadcast_to(x, (batch, x.shape[1]))

    structure: Any
    leaves, structure = jax.tree.flatten((document, interval, ranges, block_map))
    document, interval, ranges, block_map = structure.unflatten(vary_together(*leaves))
    document = Document(*map(rows, document))
    low, high = limits_of(document, interval, q_len)
    level = element_test_of(document, low, high)
    # The limits of causal() are the positions themselves: then the keys' need not be held twice.
    shared = document.kv_pos is None and level == 2 and high is document.q_pos
    kv_ids, kv_pos = document.keys()
    held = Rows(document.q_ids, rows(low), rows(high), ranges)
    arrays = assemble(held, kv_ids, kv_pos, level=level, batch=batch, q_len=q_len, kv_len=kv_len)
    computed: dict[str, Any] = {"q_pos": None, **arrays}
    if block_map is not None:
        computed |= _map_arrays(
            block_map, arrays["q_blocks"], block_size=block_size, q_len=q_len, kv_len=kv_len
        )
    return AttentionMask(
        **computed,
        q_ids=document.q_ids,
        kv_ids=document.kv_ids,
        kv_pos=kv_pos if level >= 2 and not shared else None,
        q_len=q_len,
        kv_len=kv_len,
        element_test=level,
        block_size=block_size,
    )
