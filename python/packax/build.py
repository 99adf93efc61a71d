"""From a mask expression to the arrays of docs/design.md: row ranges, then bounds of blocks."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from packax import masks
from packax.primitives import blocks_p, documents_p, vary_together


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
    ],
    meta_fields=["q_len", "kv_len", "element_test"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask:
    """What `create_attention_mask` returns: a pytree of int32 arrays, O(S) in memory.

    It crosses jit, scan, remat and shard_map, and serves every layer, forward and backward. The
    first axis of every leaf is the batch, or 1 (one mask for all rows of the batch), so under
    shard_map a mask with a batch takes the batch's spec. The leaves are those of docs/design.md,
    section "The mask that create_attention_mask returns"; they are not meant to be written.
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

    def operands(self) -> tuple[jax.Array, ...]:
        """The mask operands: forward_p takes the first nine, backward_p all but q_order_192."""

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
        )


def create_attention_mask(
    expression: masks.MaskExpression, *, q_len: int | None = None, kv_len: int | None = None
) -> AttentionMask:
    """Build the mask that every layer of a step shares.

    Args:
        expression: `causal()`, `full()`, `documents(...)`, `ranges(...)`, or `&` of them.
        q_len: number of query rows; needed only where no array of the expression says it.
        kv_len: number of keys; likewise.

    Returns:
        AttentionMask: O(batch * (q_len + kv_len)) int32 values, made in O(S) work for documents.

    Raises:
        ValueError: not an expression, or lengths that are missing or do not agree.

    >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    """
    if not isinstance(expression, masks.MaskExpression):
        raise ValueError(
            "expression must be causal(), full(), documents(...), ranges(...) or `&` of them, "
            f"but is a {type(expression).__name__}"
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

    parts = expression.parts()
    document = masks.documents_of(expression)
    has_causal = any(isinstance(part, masks.Causal) for part in parts)
    by_position = has_causal and document is not None and document.q_pos is not None
    sides: tuple[masks.Array | None, ...] = ()
    if document is not None:
        sides = (document.q_ids, document.kv_ids)
        if by_position:
            sides += (document.q_pos, document.kv_pos)
    return _build(
        tuple(None if x is None else jnp.atleast_2d(x) for x in sides),
        tuple(
            (jnp.atleast_2d(part.lo), jnp.atleast_2d(part.hi))
            for part in parts
            if isinstance(part, masks.Ranges)
        ),
        by_index=has_causal and not by_position,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
    )


def _length(name: str, length: int | None) -> int | None:
    if length is None:
        return None
    try:
        length = operator.index(length)
    except TypeError:
        raise ValueError(f"{name} must be an integer, but is {length!r}") from None
    if not 1 <= length < 2**31:
        raise ValueError(f"{name} must be from 1 to 2**31 - 1, but is {length}")
    return length


@functools.partial(jax.jit, static_argnames=("by_index", "batch", "q_len", "kv_len"), inline=True)
def _build(document, ranges, *, by_index, batch, q_len, kv_len) -> AttentionMask:
    """document: () or ids or ids and positions, each of queries and of keys (None: the same)."""
    document, ranges = jax.tree.unflatten(
        jax.tree.structure((document, ranges)),
        vary_together(*jax.tree.leaves((document, ranges))),
    )

    def rows(x):
        return None if x is None else jnp.broadcast_to(x, (batch, x.shape[1]))

    sides = [rows(x) for x in document]
    q_ids, kv_ids, q_pos, kv_pos = sides + [None] * (4 - len(sides))
    if q_ids is not None:
        keys = q_ids if kv_ids is None else kv_ids
        if q_pos is None:
            operands = (q_ids, keys, q_ids, keys)
        else:
            operands = (q_ids, keys, q_pos, q_pos if kv_pos is None else kv_pos)
        lo, hi, tested = documents_p.bind(*operands, compare_positions=q_pos is not None)
    else:
        lo = jnp.zeros((batch, q_len), jnp.int32)
        hi = jnp.full((batch, q_len), kv_len, jnp.int32)
        tested = lo

    if by_index:
        hi = jnp.minimum(hi, jnp.arange(1, q_len + 1, dtype=jnp.int32))
    for first, last in ranges:
        lo = jnp.maximum(lo, jnp.clip(first, 0, kv_len))
        hi = jnp.minimum(hi, jnp.clip(last, 0, kv_len))
    empty = lo >= hi
    lo, hi, tested = (jnp.where(empty, 0, x) for x in (lo, hi, tested))

    q_blocks, kv_blocks, q_order, q_order_192, kv_order = blocks_p.bind(
        *vary_together(lo, hi, tested), kv_len=kv_len
    )
    element_test = 0 if q_ids is None else 1 if q_pos is None else 2
    return AttentionMask(
        q_lo=lo,
        q_hi=hi,
        q_ids=q_ids,
        q_pos=q_pos,
        kv_ids=kv_ids,
        kv_pos=kv_pos,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        q_order=q_order,
        q_order_192=q_order_192,
        kv_order=kv_order,
        q_len=q_len,
        kv_len=kv_len,
        element_test=element_test,
    )
