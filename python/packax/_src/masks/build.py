"""`create_attention_mask`: computes the arrays that "The mask format" of the documentation
defines."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from packax._src.context.load_balance import ContextPlan
from packax._src.context.plan_check import check_has_plan, check_ids, check_in_order
from packax._src.core.arguments import described
from packax._src.core.context_mask import ContextMask
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import (
    UNSHARDED,
    AttentionSharding,
    Axes,
    Layout,
    check_divides,
    layout_of,
    shown,
    spec,
    typed_axes,
    typed_mesh,
    vary_together,
)
from packax._src.core.spec import LEAST_ROW_KEYS, MOST_ROW_KEYS, ONE_BLOCK, MaskMode
from packax._src.masks.block_sparse import BlockSparse
from packax._src.masks.documents import Ranges
from packax._src.masks.expressions import (
    And,
    MaskExpression,
    batch_of,
    check_lengths,
    documents_of,
    instead_of_array,
    intervals_of,
)
from packax._src.masks.halo_mask import halo_parts, halos_of, masks_of, specs_of
from packax._src.masks.intervals import warn_of_offsets
from packax._src.masks.local_mask import keeps_local, local_parts, made_of
from packax._src.masks.rank_rows import MaskSpec, RankRows
from packax._src.masks.row_ranges import Document, Rows, mask_mode_of, row_ranges_and_bounds
from packax._src.masks.tree import tree_of
from packax._src.ops.primitives import BLOCK_ARRAYS, Implementation, check_implementation


def create_attention_mask(
    expression: MaskExpression,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    sharding: AttentionSharding | None = None,
    plan: ContextPlan | None = None,
    permuted_keys: bool = True,
    implementation: Implementation | None = None,
) -> AttentionMask:
    """Build the mask that every layer of a step shares.

    Args:
        expression: `causal()`, `documents(...)` or another function of `packax.masks`, or
            several joined by `&` and `|`.
        q_len: number of queries; needed only if no array of the expression determines it.
        kv_len: number of keys; needed only if no array of the expression determines it.
        sharding: how attention is sharded. The arrays of the mask that describe queries are sharded
            like the queries. The mask stores the sharding, so do not pass it to `flash_attention`
            again. With windows and chunks whose sizes are known when tracing, ranks fetch only the
            keys next to their tokens.
        plan: the `ContextPlan` that permuted the queries. Pass the expression with its arrays in
            the original order: this function permutes them. With a plan of kind
            "local", only shared keys are gathered. All keys are gathered if the expression has a
            block_sparse(...) or separate ids of keys, if it has no documents(...), or if
            permuted_keys is False. If a "local" plan was made from other segment ids, and
            ids and plan are numpy arrays, all keys are gathered, too. If either is a jax array, the
            program compares checksums of the ids. If they differ for a row of the batch, its
            log-sum-exp, all gradients and the first element of every head of its output are NaN.
        permuted_keys: whether keys and values are permuted by `plan` too, as in self-attention of
            permuted tokens. False: they are in the order of the sequence.
        implementation: what computes the arrays. None: kernels when lowered for CUDA, and XLA
            elsewhere, or if no GPU of this process has the kernels; "cuda": the kernels or an
            error; "xla": never kernels. The resulting integers are the same. `flash_attention` uses
            its own implementation argument for a mask that it builds from an expression.

    Inside your own `shard_map` over the context axes, the expression still describes whole
    sequences (its arrays are replicated along the context axes), and the returned mask has this
    rank's queries.

    Returns:
        AttentionMask: O(batch * (q_len + kv_len)) int32 values, computed in O(S) for documents.

    Raises:
        ValueError: not an expression; missing or inconsistent lengths, sharding or plan; arrays
            that the plan has already permuted; an unknown implementation.
        NotImplementedError: implementation="cuda", when lowered for another platform.

    Examples:
        >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    """
    if not isinstance(expression, MaskExpression):
        raise ValueError(
            "expression must be causal(), sliding_window(...), chunked(...), prefix(...), full() "
            "or documents(...) from packax, spans(...), ranges(...), block_sparse(...), tree(...) "
            "or shared_prefix(...) from packax.masks, or several joined by `&` and `|`, but is "
            f"{described(expression)}{instead_of_array(expression)}"
        )
    check_implementation(implementation)
    if not isinstance(permuted_keys, (bool, np.bool_)):
        raise ValueError(
            "permuted_keys must be True (keys and values are permuted by the plan, as query is) or "
            f"False, but is {described(permuted_keys)}"
        )
    q_len, kv_len = check_lengths(expression, q_len, kv_len)
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if length is None:
            raise ValueError(f"cannot infer {name} from the arrays of the expression: pass {name}=")
    assert q_len is not None and kv_len is not None
    batch = batch_of(expression)
    if sharding is None:
        sharding = _sharding_of_ids(expression)
    layout = UNSHARDED if sharding is None else layout_of(sharding)
    if plan is not None:
        _check_plan(plan, batch, q_len, kv_len, permuted_keys, layout)
        batch = max(batch, plan.order.shape[0])
    if (layout.on_mesh or plan is not None) and 0 in (batch, q_len, kv_len):
        raise ValueError(
            f"a mask with sharding or plan must not be empty, but is for batch size {batch}, "
            f"{q_len} queries and {kv_len} keys"
        )
    if layout.on_mesh:
        check_divides(layout, "the mask", "number of queries", q_len, layout.context)
        if batch > 1:
            check_divides(layout, "the mask", "batch size", batch, layout.batch)

    parts = expression.parts()
    document = documents_of(expression)
    if plan is not None and plan.moves:
        check_in_order(expression.arrays())
        if document is not None:
            check_ids(plan, document.q_ids, layout)
        if plan.split is None:  # what follows reads the checksum of local plans only
            plan = dataclasses.replace(plan, checksum=None)
    elif document is not None and len(parts) > 1:
        check_has_plan(document)
    for part in expression.walk():
        part.warn_with(document)
    warn_of_offsets(expression, q_len, kv_len)
    sides = Document(None, None, None, None)
    of_plan = None if document is None else made_of(plan, document.q_ids)
    if document is not None:
        given = (document.q_ids, document.kv_ids, document.q_pos, document.kv_pos)
        sides = Document(*(None if x is None else jnp.atleast_2d(x) for x in given))
    ranges = tuple(
        (jnp.atleast_2d(part.lo), jnp.atleast_2d(part.hi))
        for part in parts
        if isinstance(part, Ranges)
    )
    block_mask, block_size = None, None
    for part in parts:
        if isinstance(part, BlockSparse):
            block_mask, block_size = jnp.asarray(part.of_heads()), part.block_size
            if layout.on_mesh and block_mask.shape[1] > 1:
                heads = block_mask.shape[1]
                check_divides(layout, "block_mask", "number of heads", heads, layout.heads)
    tree = tree_of(expression)
    if tree is not None and block_size is None:
        block_size = ONE_BLOCK
    if not layout.on_mesh and plan is None and block_size is not None:
        layout = _layout_of_types(expression)
    halos = halos_of(expression, plan, layout, q_len, kv_len, permuted_keys)
    sizes = (batch, q_len, kv_len, block_size, implementation)
    row_keys = _rounded(expression.row_keys())
    static = MaskSpec(*sizes, sharding, layout, bool(permuted_keys), of_plan, halos, row_keys)
    terms = _Terms(sides, intervals_of(expression), ranges, block_mask, tree)
    build = functools.partial(_build, static=static)
    if any(not is_symbolic_dim(n) and n == 0 for n in (batch, q_len, kv_len)):
        shapes = jax.eval_shape(build, terms, plan)
        mask = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    else:
        mask = build(terms, plan)
    object.__setattr__(mask, "expression", repr(expression))  # the dataclass is frozen
    return mask


def _rounded(row_keys: int | None) -> int:
    """The bound as in AttentionMask.row_keys."""
    if row_keys is None or not 1 <= row_keys <= MOST_ROW_KEYS:
        return 0
    return max(LEAST_ROW_KEYS, 1 << (row_keys - 1).bit_length())


def _sharding_of_ids(expression: MaskExpression) -> AttentionSharding | None:
    """The sharding of attention if the type of an array shards its sequence axis."""
    found: Any = None
    for name, x, side in expression.arrays():
        if side != "q" or not isinstance(x, jax.Array) or not typed_axes(x)[-1]:
            continue
        *batch, context = typed_axes(x)
        if found is None:
            sharding = AttentionSharding(
                spec(*(batch or [()]), context), spec(*batch), typed_mesh(x)
            )
            found = sharding, context, name, x
        elif context != found[1]:
            raise ValueError(
                f"{name} is {jax.typeof(x)}: its sequence axis is sharded over {shown(context)}, "
                f"but {found[2]} is {jax.typeof(found[3])}, sharded over {shown(found[1])}. "
                "Reshard one like the other (jax.sharding.reshard)"
            )
    return None if found is None else found[0]


def _layout_of_types(expression: MaskExpression) -> Layout:
    """The layout if the types of arrays shard the batch, or the heads of a block mask. jax has no
    sharding rule for some operations on such arrays, so each rank builds its part of the mask."""
    batch: Axes = ()
    heads: Axes = ()
    mesh: Any = None
    for _, x, side in expression.arrays():
        if isinstance(x, jax.Array) and any(typed_axes(x)):
            mesh, axes = typed_mesh(x), typed_axes(x)
            batch = batch or (axes[0] if x.ndim > 1 or side == "batch" else ())
            heads = axes[1] if x.ndim == 4 else heads
    if mesh is None:
        return UNSHARDED
    heads = tuple(axis for axis in heads if axis not in batch)
    return layout_of(AttentionSharding(spec(batch, (), heads), spec(batch), mesh))


def _check_plan(
    plan: Any, batch: int, q_len: int, kv_len: int, permuted_keys: Any, layout: Layout
) -> None:
    if not isinstance(plan, ContextPlan):
        raise ValueError(f"plan must come from context_plan, but is {described(plan)}")
    if plan.length != q_len:
        raise ValueError(f"plan was made for {plan.length} queries, but there are {q_len}")
    if permuted_keys and kv_len != q_len:
        raise ValueError(
            f"plan permutes {q_len} queries, but there are {kv_len} keys: pass "
            "permuted_keys=False, with keys and values in the order of the sequence"
        )
    plans = plan.order.shape[0]
    if plans not in (1, batch) and batch != 1:
        raise ValueError(f"plan has batch size {plans}, but the expression has batch size {batch}")
    if layout.on_mesh and plan.ranks != layout.size(layout.context):
        raise ValueError(
            f"plan was made for {plan.ranks} ranks, but the context axes of sharding have size "
            f"{layout.size(layout.context)}"
        )


class _Terms(NamedTuple):
    """The arrays of an expression."""

    document: Document
    interval: And  # of all intervals
    ranges: tuple[tuple[Any, Any], ...]
    block_mask: Any
    tree: Any


@functools.partial(jax.jit, static_argnames="static", inline=True)
def _build(terms: _Terms, plan: ContextPlan | None, *, static: MaskSpec) -> AttentionMask:
    """Computes all arrays of the mask.

    A tree narrows the row ranges, and reuses the position check of documents for the rest. The ids
    are those of documents(...), or all equal, and a row attends to a key if row index + 1 <= end of
    the key's subtree. Both sides are stored negated, because kernels check key position <= row
    position. Permuted rows keep the values that they have in the original order.
    """
    layout, kv_len = static.layout, static.kv_len
    block_size: Any = static.block_size
    ranks = RankRows(static, plan).with_placed_plan()
    if ranks.is_unsharded:
        (terms,) = vary_together(terms)
    document, interval, ranges, block_mask, tree = terms
    document = jax.tree.map(ranks.keys, document)
    with_documents = None if tree is None else document.q_ids is not None
    if tree is None:
        low, high = ranks.limits(document, interval)
        mode = mask_mode_of(document, low, high)
    else:
        lo, hi, end = (ranks.keys(x) for x in ranks.tree_rows(tree, document.q_ids, interval))
        ranges = (*ranges, (lo, hi))
        after = -1 - jax.lax.broadcasted_iota(jnp.int32, end.shape, 1)
        ids = jnp.zeros_like(end) if document.q_ids is None else document.q_ids
        document = Document(ids, document.kv_ids, after, -end)
        low, high, mode = None, after, MaskMode.UPPER_LIMIT
    kv_ids, kv_pos = document.keys()
    # In self-attention without a permutation, keys share the ids and positions of rows, which are
    # then stored once. The limits of causal() are the positions themselves.
    shared_ids = ranks.is_unsharded and document.kv_ids is None
    causal = mode == MaskMode.UPPER_LIMIT and high is document.q_pos
    shared_pos = ranks.is_unsharded and document.kv_pos is None and causal
    sequences = Rows(document.q_ids, low, high, ranges)
    row_values = jax.tree.map(ranks.rows, sequences)

    own_batch, own_rows = ranks.sizes()
    axes: tuple[Any, Any] = (), ()
    if block_mask is not None:
        block_mask, block_size, axes = ranks.block_mask(block_mask, block_size)

    def arrays(numbers: Any, row_values: Rows, kv_ids: Any, *others: Any) -> dict[str, Any]:
        parts = None
        if static.halos is not None:
            parts = halo_parts(static.halos, ranks, numbers, row_values.ids, kv_ids)
        return whole(row_values, kv_ids, *others, parts=parts)

    whole: Any = functools.partial(
        row_ranges_and_bounds,
        mode=mode,
        batch=own_batch,
        q_len=own_rows,
        kv_len=kv_len,
        implementation=static.implementation,
        block_size=block_size,
        tree=with_documents,
    )
    made = ["kv_start", "kv_end", *BLOCK_ARRAYS]
    made += ["q_pos"] if mode >= MaskMode.UPPER_LIMIT else []
    made += [] if block_size is None else ["q_block_lists", "kv_block_lists"]
    rows, keys = (ranks.spec(x, mode) for x in ("kv_start", "kv_ids"))
    bits = ranks.spec("block_mask", mode, axes[1], batch=axes[0])
    out = {x: ranks.spec(x, mode, axes[1]) for x in made}
    out |= {} if block_size is None else {"block_mask": bits}
    numbers = None
    if static.halos is not None:
        out |= specs_of(static.halos, ranks, mode)
        numbers = ranks.chunks()
    run = layout.shard_map(arrays, (ranks.chunks_spec, rows, keys, keys, bits), out)
    computed: dict[str, Any] = {"q_pos": None}
    computed |= run(numbers, row_values, kv_ids, kv_pos, block_mask)
    parts = computed.pop("parts", None)
    without_ids = kv_ids is None or shared_ids
    without_pos = kv_pos is None or mode < MaskMode.UPPER_LIMIT or shared_pos
    computed |= {
        "q_ids": row_values.ids,
        "kv_ids": None if without_ids else ranks.replicated(kv_ids, ranks.mask_batch),
        "kv_pos": None if without_pos else ranks.replicated(kv_pos, ranks.mask_batch),
        "q_len": static.q_len,
        "kv_len": kv_len,
        "mask_mode": mode,
        "block_size": block_size,
        "row_keys": static.row_keys,
    }
    if static.sharding is None and plan is None:
        return AttentionMask(**computed)
    fields = _context_fields(ranks, mode, document, sequences, parts)
    return ContextMask(**computed, **fields)


def _context_fields(
    ranks: RankRows, mode: MaskMode, document: Document, sequences: Rows, parts: Any
) -> dict[str, Any]:
    """What a sharding or a plan adds to a mask. parts: the arrays of masks for halos."""
    static, plan, halos = ranks.static, ranks.plan, ranks.static.halos
    fields: dict[str, Any] = {"sharding": static.sharding, "shards": ranks.pieces}
    fields["permuted"] = plan is not None
    sources = ranks.layout.size(ranks.layout.kv_context)
    fetched: Any = static.kv_len - static.kv_len // sources if sources > 1 else 0
    if halos is not None:
        fields |= masks_of(halos, ranks, mode, parts)
        fetched = halos.halo.fetched if halos.known else fetched
    if plan is not None and static.permuted_keys:
        orders = jnp.stack([plan.order, plan.inverse], axis=1)
        fields["kv_plan"] = ranks.replicated(orders, ranks.plan_batch)
        local = static.block_size is None and static.of_plan is not False
        if local and keeps_local(ranks, document):
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                fields |= local_parts(ranks, sequences, document.q_pos, mode)
            fetched = plan.fetched
    return fields | {"fetched": fetched}
