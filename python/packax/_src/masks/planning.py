"""`context_plan` and `shard_batch`: assign rows to ranks so that their work is balanced."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from packax._src.context.load_balance import (
    ContextPlan,
    balanced,
    check_zigzag,
    checksum,
    in_order,
    indices,
    positive,
    whole_rows,
    zigzag,
)
from packax._src.context.local_plan import local
from packax._src.context.plan_check import check_in_order
from packax._src.core.arguments import described, plus
from packax._src.core.mask import AttentionMask
from packax._src.core.provenance import is_permuted, mark_permuted
from packax._src.core.sharding import (
    AttentionSharding,
    Layout,
    check_divides,
    layout_of,
    over_auto_axes,
    typed_axes,
)
from packax._src.core.spec import BLOCK, PADDING_SEGMENT_ID, TILE
from packax._src.masks.block_sparse import BlockSparse
from packax._src.masks.build import create_attention_mask
from packax._src.masks.documents import Ranges
from packax._src.masks.expressions import (
    Interval,
    MaskExpression,
    Positions,
    batch_of,
    check_lengths,
    documents_of,
    intervals_of,
)
from packax._src.masks.host_keys import keys_on_host
from packax._src.masks.spans import begins_of, extremes
from packax._src.masks.tree import tree_keys, tree_of
from packax._src.ops.primitives import Implementation

Kind = Literal["zigzag", "balanced", "local"]
Tree = TypeVar("Tree")
Masks = TypeVar("Masks")
Key = TypeVar("Key")

_KINDS = ("zigzag", "balanced", "local")
_WERE = {"head_tail": "zigzag", "area": "balanced"}


def context_plan(
    expression: MaskExpression,
    *,
    sharding: AttentionSharding | None = None,
    ranks: int | tuple[int, ...] | None = None,
    kind: Kind = "balanced",
    chunk: int | None = None,
    shared: float | int | tuple[float | int, ...] | None = None,
    length: int | None = None,
) -> ContextPlan:
    """Assigns chunks of tokens to ranks: the same number to each, with balanced work.

    - "balanced": chunks are sorted by work, the number of attended query-key pairs, and assigned in
      rounds. In each round every rank gets one chunk, and the largest goes to the rank with the
      least work so far (longest processing time first, Graham 1969). The result is the same on the
      host and on the device.
    - "zigzag": rank r gets the chunks r and 2 * ranks - 1 - r of 2 * ranks (Llama 3, arXiv
      2407.21783, section 3.3.2). It does not depend on the expression, and gives equal work for
      one causal document.
    - "local": a document stays on one rank, which then needs no keys from other ranks for it. Only
      documents that would unbalance the ranks are split. The tokens of a rank are a shared part,
      whose keys all ranks gather, and a private part. Several context axes, such as (host, GPU),
      are levels: documents are split inside a host first, one shared part spans all ranks, and
      another spans the ranks of a host. Without `documents(...)`, or with separate ids for the
      keys, all tokens are shared, as in "balanced". A "local" plan is computed on the host, from
      values, so not inside jit.

    Args:
        expression: the expression of the mask, in the order of the sequence. If all its arrays are
            numpy arrays, the plan is made on the host in numpy, as in a data loader; otherwise on
            the device, inside or outside jit ("local": always on the host). The plan counts an id
            that reappears as another document, and assumes that positions increase by one inside a
            document. This affects only the balance.
        sharding: the `AttentionSharding` of the attention: its context axes determine the number of
            ranks.
        ranks: the number of ranks if there is no mesh, as in a data loader; with levels, their
            sizes, such as (4, 8) for 4 hosts with 8 ranks each.
        kind: "balanced", "zigzag" or "local".
        chunk: tokens per chunk, a multiple of 128 (a tile of the kernels), for "balanced". None:
            the largest power of two times 128 that gives a rank at least 16 chunks, or else 128.
            With a window, 4 chunks are enough if the keys to fetch before and after such a chunk
            are at most half as many as its tokens.
        shared: the size of the shared part, for "local": a fraction of a rank's tokens (a float
            from 0.0 to 1.0, rounded up to a multiple of 128 tokens) or a number of tokens (an int).
            With levels, a tuple with one size per level, such as (1 / 16, 1 / 2): first the tokens
            that all ranks share, then those that the ranks of a host share. The second size
            includes the first, so sizes must not decrease. A single size defines one part shared by
            all ranks. None: the smallest of 24 fractions for which the most loaded rank has at most
            1.03 times the mean work. With levels, the size for all ranks is minimized first, then
            the size for a host. If a size that you pass is too small for the documents, all tokens
            are shared, with a warning.
        length: the number of tokens; needed only if no array of the expression determines it.

    Returns:
        ContextPlan, with one order per row of the batch if the expression has a batch. For one rank
        it moves nothing, whatever the length.

    Raises:
        ValueError: not an expression; an unknown kind; neither or both of sharding and ranks; a
            length that does not divide into whole chunks for every rank; a shared= that is out of
            range, or for other levels or another kind; kind="local" inside jit.

    Examples:
        >>> plan = packax.context_plan(expression, sharding=sharding)
        >>> permuted = plan.permute(batch)  # tokens, positions, targets: (B, length, ...)
        >>> mask = packax.create_attention_mask(expression, sharding=sharding, plan=plan)
    """
    if not isinstance(expression, MaskExpression):
        raise ValueError(
            "expression must be that of the mask, such as causal() & documents(segment_ids), but "
            f"is {described(expression)}"
        )
    if not isinstance(kind, str) or kind not in _KINDS:
        new = f', which is "{_WERE[kind]}" now' if isinstance(kind, str) and kind in _WERE else ""
        raise ValueError(f'kind must be "zigzag", "balanced" or "local", but is {kind!r}{new}')
    if shared is not None and kind != "local":
        raise ValueError(f'shared is only for kind="local", but kind is {kind!r}')
    if chunk is not None and kind == "local":
        raise ValueError(f'chunk is not for kind="local", but is {chunk}')
    levels = _levels(sharding, ranks)
    ranks = math.prod(levels)
    q_len, kv_len = check_lengths(expression)
    if length is None and q_len is None:
        raise ValueError("cannot infer length from the arrays of the expression: pass length=")
    rows = q_len if length is None else positive("length", length)
    assert rows is not None
    if q_len not in (None, rows):
        raise ValueError(f"expression is for {q_len} queries, but length says {rows}")
    if ranks == 1 and chunk is None:
        return in_order(kind, rows)
    check_in_order(expression.arrays())
    if kind == "local":
        expression = jax.tree.map(_on_host, expression)
    document = documents_of(expression)
    ids = None if document is None or document.kv_ids is not None else document.q_ids
    if kind == "zigzag":
        check_zigzag(rows, ranks, chunk)
        return _with_checksum(zigzag(ranks, rows), ids)
    keys = _keys(expression, rows, rows if kv_len is None else kv_len)
    if kind == "balanced":
        within = expression if kv_len in (None, rows) else None
        return _with_checksum(balanced(ranks, keys, chunk, within), ids)
    return _with_checksum(local(levels, ids, np.asarray(keys), shared), ids)


def _with_checksum(plan: ContextPlan, ids: Any) -> ContextPlan:
    """The plan with the checksum of the ids that it is for, if there are ids."""
    if ids is None:
        return plan
    on_device = isinstance(ids, jax.Array)
    of_ids = _checksum_on_device(ids) if on_device else checksum(np.atleast_2d(ids))
    return dataclasses.replace(plan, checksum=of_ids)


@functools.partial(jax.jit, inline=True)
def _checksum_on_device(ids: jax.Array) -> jax.Array:
    return checksum(whole_rows(jnp.atleast_2d(ids)))


def _on_host(x: Any) -> Any:
    """An array of an expression as a numpy array."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        raise ValueError(
            'kind="local" plans on the host and needs the values of the expression, but it holds '
            f"{described(x)}: plan on the host, where the batch is packed, and pass the plan to "
            'the program as an argument, or use kind="balanced"'
        )
    return np.asarray(x) if isinstance(x, jax.Array) else x


class ShardedBatch(NamedTuple, Generic[Tree, Masks]):
    """What `shard_batch` returns. The arrays of `batch` are in the order of `plan`, on its mesh."""

    batch: Tree
    mask: Masks
    plan: ContextPlan


if TYPE_CHECKING:

    class _Options(TypedDict, total=False):
        """Arguments of `shard_batch` that do not change the type of the result."""

        sharding: Required[AttentionSharding]
        kind: Kind
        chunk: int | None
        shared: float | int | tuple[float | int, ...] | None
        plan: ContextPlan | None
        implementation: Implementation | None


@overload
def shard_batch(
    batch: Tree, expression: MaskExpression, **options: Unpack[_Options]
) -> ShardedBatch[Tree, AttentionMask]: ...
@overload
def shard_batch(
    batch: Tree, expression: Mapping[Key, MaskExpression], **options: Unpack[_Options]
) -> ShardedBatch[Tree, dict[Key, AttentionMask]]: ...
@overload
def shard_batch(
    batch: Tree, expression: Sequence[MaskExpression], **options: Unpack[_Options]
) -> ShardedBatch[Tree, tuple[AttentionMask, ...]]: ...
def shard_batch(
    batch: Any,
    expression: Any,
    *,
    sharding: AttentionSharding,
    kind: Kind = "balanced",
    chunk: int | None = None,
    shared: float | int | tuple[float | int, ...] | None = None,
    plan: ContextPlan | None = None,
    implementation: Implementation | None = None,
) -> ShardedBatch[Any, Any]:
    """A batch and its masks for context-parallel self-attention, all in the order of one plan.

    It combines `context_plan`, `plan.permute(batch)` and `create_attention_mask(..., plan=plan)`,
    so that no step can be forgotten. Then call `flash_attention(query, key, value, mask)`.

    Args:
        batch: arrays (B, length, ...), or a pytree of them, in the order of the sequence:
            everything with a value per token (tokens, positions, targets, weights).
        expression: the mask in the order of the sequence; do not permute its ids. If layers have
            different masks, pass a tuple or a dict with an expression for each kind. The plan
            balances the work of the first: put the one with the most query-key pairs first.
        sharding: how the attention is sharded.
        kind, chunk, shared: as in `context_plan`.
        plan: a plan that `context_plan` made from this expression, instead of kind, chunk and
            shared: for example, a "local" plan from the data loader, passed to the jitted step.
        implementation: as in `create_attention_mask`.

    Inside your own `shard_map` over the context axes, batch and expression still describe whole
    sequences, replicated along those axes, and the results have this rank's tokens.

    Returns:
        ShardedBatch, a named tuple (batch, mask, plan): the batch is permuted, and sharded over the
        batch and context axes. The mask is a tuple or dict of masks if the expression is one. Do
        not build further masks from the permuted batch: an expression of its arrays raises an error
        when it is used with a plan. `plan.unpermute(x)` returns outputs to the original order.

    Raises:
        ValueError: arrays of another length; a batch that is already permuted; plan= together with
            kind=, chunk= or shared=; or an error of `context_plan` or `create_attention_mask`.

    Examples:
        >>> permuted, mask, plan = packax.context.shard_batch(
        ...     batch, expression, sharding=sharding
        ... )
        >>> document = packax.documents(batch["segment_ids"])
        >>> kinds = {
        ...     "global": packax.causal() & document,
        ...     "window": packax.sliding_window(511) & document,
        ... }
        >>> permuted, masks, plan = packax.context.shard_batch(batch, kinds, sharding=sharding)
    """
    leaves = jax.tree.leaves(batch)
    shapes = {np.shape(x)[1] for x in leaves if np.ndim(x) > 1}
    if not leaves or any(np.ndim(x) < 2 for x in leaves) or len(shapes) > 1:
        raise ValueError(
            "batch must hold arrays (batch, length, ...) of the same length, but holds "
            + (", ".join(str(np.shape(x)) for x in leaves) or "none")
        )
    if any(map(is_permuted, leaves)):
        raise ValueError(
            "batch was already permuted by a plan: pass it in the order of the sequence. For masks "
            "of several kinds, pass all their expressions to one call of shard_batch"
        )
    (length,) = shapes
    expressions = _expressions(expression)
    if plan is None:
        plan = context_plan(
            expressions[0], sharding=sharding, kind=kind, chunk=chunk, shared=shared, length=length
        )
    elif (kind, chunk, shared) != ("balanced", None, None):
        raise ValueError("plan defines the order of tokens: leave kind=, chunk= and shared= out")
    masks = [
        create_attention_mask(
            x,
            q_len=length,
            kv_len=length,
            sharding=sharding,
            plan=plan if plan.moves else None,
            implementation=implementation,
        )
        for x in expressions
    ]
    layout = layout_of(sharding)
    for x in leaves:
        check_divides(layout, "batch", "batch size", np.shape(x)[0], layout.batch)
    moved = jax.tree.map(functools.partial(_own_rows, layout), plan.permute(batch))
    if plan.moves:
        mark_permuted(moved)
    mask: Any = tuple(masks)
    if isinstance(expression, Mapping):
        mask = dict(zip(expression, masks, strict=True))
    elif isinstance(expression, MaskExpression):
        (mask,) = masks
    return ShardedBatch(moved, mask, plan)


def _expressions(given: Any) -> list[Any]:
    """The expressions of `shard_batch`, the first of which determines the plan."""
    if isinstance(given, MaskExpression):
        return [given]
    found = list(given.values()) if isinstance(given, Mapping) else given
    if not isinstance(found, (list, tuple)) or not found:
        raise ValueError(
            "expression must be a mask expression, such as causal() & documents(segment_ids), or a "
            f"tuple or dict of them, but is {described(given)}"
        )
    return list(found)


def _own_rows(layout: Layout, x: Any) -> jax.Array:
    """x sharded over the batch and context axes. In a shard_map over them, this rank's rows."""
    x = layout.own_part(jnp.asarray(x), 1)
    spec: Any = layout.spec(layout.batch, layout.context)
    free = [P.UNCONSTRAINED]  # other axes keep their sharding
    constrain: Any = jax.lax.with_sharding_constraint

    def on_mesh(spec: Any) -> Any:
        return spec if layout.mesh is None else jax.sharding.NamedSharding(layout.mesh, spec)

    if layout.explicit:
        typed = layout.only(layout.explicit, spec)
        x = jax.sharding.reshard(x, on_mesh(P(*typed, *jax.typeof(x).sharding.spec[2:])))
        spec = layout.only(layout.mapped - layout.explicit, spec)
        if not any(spec):
            return x
        spec = P(*(free[0] if axes is None else axes for axes in spec), *free * (x.ndim - 2))
        constrain = jax.jit(constrain, static_argnums=1)  # outside of jit it changes the type
    elif not any(spec):
        return x
    elif isinstance(x, jax.core.Tracer):
        spec = P(*spec, *free * (x.ndim - 2))
    return constrain(x, on_mesh(spec))


def _levels(
    sharding: AttentionSharding | None, ranks: int | tuple[int, ...] | None
) -> tuple[int, ...]:
    """The sizes of the context axes that are larger than 1, or (1,)."""
    if (sharding is None) == (ranks is None):
        raise ValueError(
            "pass either sharding=, whose context axes determine the number of ranks, or ranks=, "
            "but " + ("neither was passed" if ranks is None else "both were passed")
        )
    if sharding is not None:
        layout = layout_of(sharding)
        sizes = [layout.size((axis,)) for axis in layout.context]
    else:
        sizes = [positive("ranks", x) for x in (ranks if isinstance(ranks, tuple) else (ranks,))]
    return tuple(size for size in sizes if size > 1) or (1,)


def _keys(expression: MaskExpression, length: int, kv_len: int) -> Any:
    """(B or 1, length) int32: how many keys each row attends to, or its tile visits."""
    document = documents_of(expression)
    cross = kv_len != length or (document is not None and document.kv_ids is not None)
    parts, tree = expression.parts(), tree_of(expression)
    alone = all(part is tree or isinstance(part, Interval) for part in parts)
    if (
        cross
        or (tree is not None and not alone)
        or any(isinstance(part, BlockSparse) for part in parts)
    ):
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(expression)):
            mask = create_attention_mask(expression, q_len=length, kv_len=kv_len)
            keys: Any = _keys_of_mask(mask)
        else:
            keys = keys_on_host(expression, length, kv_len)
        return keys >> max(0, kv_len.bit_length() - length.bit_length())
    structure: Any
    leaves, structure = jax.tree.flatten(expression)
    on_device = [x for x in leaves if isinstance(x, jax.Array)]
    if not on_device:
        return _keys_of_rows(expression, length, np)
    batch = next(filter(None, (typed_axes(x)[0] for x in on_device if x.ndim > 1)), ())

    def of_leaves(*leaves: Any) -> Any:
        return _keys_on_device(structure.unflatten(leaves), length)

    return over_auto_axes(of_leaves, leaves, (batch,))


def _keys_of_rows(expression: MaskExpression, length: int, xp: ModuleType) -> Any:
    """`_keys` for self-attention if a document is a run of one id with consecutive positions."""
    batch = batch_of(expression)
    tree = tree_of(expression)
    if tree is not None:
        keys = tree_keys(tree, intervals_of(expression))
        return xp.broadcast_to(keys, (max(batch, keys.shape[0]), length))
    on_host = xp is np
    index: Any = (indices(length) if on_host else xp.arange(length, dtype=np.int32))[None]
    first, last = np.int32(0), np.int32(length - 1)
    document = documents_of(expression)
    ids: Any = None
    positions = index
    if document is not None:
        ids = xp.atleast_2d(xp.asarray(document.q_ids))
        first, last = extremes(begins_of(ids, xp), index, by_position=False)
        if document.q_pos is not None:
            positions = xp.atleast_2d(xp.asarray(document.q_pos))
    interval = intervals_of(expression)
    if interval.members:
        by_position = positions is not index
        of_rows = () if ids is None else (ids,)
        low, high = interval.limits(Positions(positions, positions, of_rows, by_position))
        if by_position:  # from a position in the row's document to the index of that key
            ahead = index - positions
            low, high = (None if x is None else plus(x, ahead) for x in (low, high))
        first = first if low is None else _in_place(xp.maximum, first, low)
        last = last if high is None else _in_place(xp.minimum, last, high)
    for part in expression.parts():
        if isinstance(part, Ranges):
            first = xp.maximum(first, xp.clip(xp.atleast_2d(part.lo), 0, length))
            last = xp.minimum(last, xp.clip(xp.atleast_2d(part.hi), 0, length) - 1)
    keys = xp.atleast_2d(_in_place(xp.subtract, last, first))
    keys = _in_place(xp.maximum, _in_place(xp.add, keys, 1), 0).astype(np.int32, copy=False)
    if ids is not None:
        real = ids != PADDING_SEGMENT_ID
        keys = _in_place(xp.multiply, keys, real) if on_host else xp.where(real, keys, 0)
    return xp.broadcast_to(keys, (max(batch, keys.shape[0]), length))


def _in_place(operation: Any, x: Any, y: Any) -> Any:
    """operation(x, y), in place for numpy arrays: allocation costs more than the operation."""
    fits = isinstance(x, np.ndarray) and np.broadcast_shapes(x.shape, np.shape(y)) == x.shape
    return operation(x, y, out=x) if fits else operation(x, y)


_keys_on_device = jax.jit(
    lambda expression, length: _keys_of_rows(expression, length, jnp),
    static_argnums=1,
    inline=True,
)


def _keys_of_mask(mask: AttentionMask) -> jax.Array:
    """The number of keys in each row's range, or in the visited blocks, averaged over heads."""
    if mask.q_block_lists is None:
        lo, hi = (whole_rows(jnp.asarray(x)) for x in (mask.kv_start, mask.kv_end))
        return hi - lo
    counts = whole_rows(mask.q_block_lists[..., :2].sum(axis=3, dtype=jnp.int32).swapaxes(1, 2))
    blocks, heads = counts.sum(axis=2, dtype=jnp.int32), counts.shape[2]
    keys = blocks // heads * BLOCK + blocks % heads * BLOCK // heads
    return jnp.repeat(keys, TILE, axis=1)  # plans have whole chunks, which are whole tiles
