"""Computes the mask arrays in jax.numpy, for platforms without kernels.

The integers equal those of csrc/kernels/mask/segments.py and block_bounds.py, as defined in
"The mask format" in the documentation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from packax._src.core.spec import (
    BLOCK,
    INT_MAX,
    PADDING_SEGMENT_ID,
    TILE,
    TILE_192,
    ceil_div,
    fill_up,
    is_symbolic,
)
from packax._src.ops.xla_tiles import select, sized, stack

_IN_BOUNDS = "promise_in_bounds"  # skips index arithmetic
_BATCH = 64  # blocks of keys
_MOST_SLOTS = 1 << 32  # of the tables of a batch: slots are uint32
HASH_MULTIPLIER = 0x9E3779B1  # 2^32 divided by the golden ratio: spreads consecutive ids


def table_size(kv_len: int) -> int:
    """Slots of each id hash table: a power of two, at least twice the maximum number of runs."""
    return max(1024, 2 << (kv_len - 1).bit_length())


def _table(kv_len: Any) -> tuple[Any, Any, Any]:
    """table_size, its base-2 logarithm, and an array size that is at least table_size."""
    if not is_symbolic(kv_len):
        slots = table_size(kv_len)
        return slots, slots.bit_length() - 1, slots
    last = jnp.asarray(kv_len).astype(jnp.int32) - 1
    bits = jnp.maximum(10, 33 - jax.lax.clz(last))
    return jnp.int32(1) << bits, bits, 4 * kv_len + 1024


def document_ranges(
    q_ids: jax.Array,
    kv_ids: jax.Array,
    q_pos: jax.Array,
    kv_pos: jax.Array,
    *,
    compare_positions: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row ranges of documents: lo, hi, segment_checked, each (Bm, Sq) int32.

    compare_positions: 0, 1 (q_pos contains upper limits), or 2 (q_pos (Bm, 2, Sq) contains upper
    limits, then lower limits).
    """
    batch, kv_len = kv_ids.shape
    known = not (is_symbolic(batch) or is_symbolic(kv_len))
    if known and batch > 1 and 2 * batch * table_size(kv_len) >= _MOST_SLOTS:

        def of_row(row: Any) -> Any:
            of_batch = (x[None] for x in row)
            return tuple(
                x[0] for x in document_ranges(*of_batch, compare_positions=compare_positions)
            )

        return lax.map(of_row, (q_ids, kv_ids, q_pos, kv_pos))
    index = lax.broadcasted_iota(jnp.int32, kv_ids.shape, 1)
    left, right = (lax.slice_in_dim(kv_ids, n, kv_len - 1 + n, axis=1) for n in (0, 1))
    change = lax.ne(right, left)
    one = lax.full((batch, 1), True)
    real = lax.ne(kv_ids, np.int32(PADDING_SEGMENT_ID))
    ends = lax.bitwise_and(real, lax.concatenate([change, one], 1))

    # For the keys of a slot: the first key, the end of the first run, the end of the last run. All
    # are minima (the last one negated), so that a single scatter writes all tables.
    columns = [
        select(real, index, INT_MAX),
        select(ends, lax.add(index, np.int32(1)), INT_MAX),
        select(real, lax.bitwise_not(index), 0),  # -1 - index
    ]
    if compare_positions:
        falls = jnp.concatenate([~one, (kv_pos[:, 1:] < kv_pos[:, :-1]) & ~change], axis=1) & real
        columns.append(-falls.astype(jnp.int32))
    nothing = np.asarray([INT_MAX, INT_MAX, 0, 0][: len(columns)], np.int32)

    # All batch rows share one array: with vmap, XLA would compile more small fusions.
    slots, bits, capacity = _table(kv_len)
    tables = lax.broadcast_in_dim(nothing, (batch * 2 * capacity, len(columns)), (1,))
    updates = stack([stack(columns, 2)] * 2, 0)
    updates = lax.reshape(updates, (2 * batch * kv_len, len(columns)))
    tables = lax.scatter_min(
        tables,
        _slots(kv_ids, slots, bits, capacity),
        updates,
        lax.ScatterDimensionNumbers((1,), (0,), (0,)),
        mode=_IN_BOUNDS,
    )
    found = _rows(tables, _slots(q_ids, slots, bits, capacity))
    found = lax.reshape(found, (2, *q_ids.shape, len(columns)))
    found = lax.transpose(found, (3, 0, 1, 2))
    (lo_a, lo_b), (end_a, end_b), (last_a, last_b), *rest = (
        [lax.squeeze(lax.slice(found, (n, of, 0, 0), (n + 1, of + 1, *found.shape[2:])), (0, 1))
         for of in (0, 1)]
        for n in range(len(columns))
    )  # fmt: skip
    lo, hi = lax.max(lo_a, lo_b), lax.neg(lax.max(last_a, last_b))

    # Without a run lo is INT_MAX, so the range is empty.
    of_lo = lax.eq(_take_keys(kv_ids, lo), q_ids)
    end = lax.select(lax.ge(lo_a, lo_b), end_a, end_b)
    segment_checked = lax.bitwise_not(lax.bitwise_and(of_lo, lax.eq(end, hi)))
    if compare_positions:
        segment_checked |= rest[0][0] != 0
        upper = q_pos if compare_positions == 1 else q_pos[:, 0]
        hi = jnp.where(segment_checked, hi, _first_match(jnp.greater, kv_pos, upper, lo, hi))
    if compare_positions == 2:
        first = _first_match(jnp.greater_equal, kv_pos, q_pos[:, 1], lo, hi)
        lo = jnp.where(segment_checked, lo, first)

    some = lax.bitwise_and(lax.ne(q_ids, np.int32(PADDING_SEGMENT_ID)), lax.lt(lo, hi))
    checked = lax.convert_element_type(segment_checked, np.int32)
    return select(some, lo, 0), select(some, hi, 0), select(some, checked, 0)


def _slots(ids, slots, bits, capacity):
    """The slots of all ids in the first table, then in the second: (2 * B * ids, 1)."""
    size, total, bits = (sized(x) for x in (slots, 2 * capacity, bits))
    # A select, because a concatenation would be a separate kernel.
    ids = lax.broadcast_in_dim(ids, (2, *ids.shape), (1, 2))
    a = lax.bitwise_and(ids, lax.full_like(ids, size - np.int32(1)))
    spread = lax.mul(ids, np.uint32(HASH_MULTIPLIER).astype(np.int32))
    b = lax.shift_right_logical(spread, lax.full_like(ids, np.int32(32) - bits))
    first, row = (lax.broadcasted_iota(jnp.int32, ids.shape, n) for n in (0, 1))
    slot = lax.select(lax.eq(first, np.int32(0)), a, lax.add(b, size))
    slot = lax.convert_element_type(lax.add(slot, lax.mul(row, total)), np.uint32)
    return lax.reshape(slot, (ids.shape[0] * ids.shape[1] * ids.shape[2], 1))


def _rows(x, index):
    """x (N, ...) at the indices (M, 1), which must be in bounds: (M, ...)."""
    others = tuple(range(1, x.ndim))
    numbers = lax.GatherDimensionNumbers(others, (0,), (0,))
    return lax.gather(x, index, numbers, (1, *x.shape[1:]), mode=_IN_BOUNDS)


def _take_keys(x, index):
    """x (B, keys) at the indices (B, N) of each batch row, clamped to the last key."""
    row = lax.broadcasted_iota(jnp.uint32, index.shape, 0)
    batch, size = x.shape[0], sized(x.shape[1]).astype(np.uint32)
    index = lax.min(lax.convert_element_type(index, np.uint32), size - np.uint32(1))
    index = lax.reshape(lax.add(lax.mul(row, size), index), (index.shape[0] * index.shape[1], 1))
    return lax.reshape(_rows(lax.reshape(x, (batch * x.shape[1],)), index), row.shape)


def _first_match(compare, kv_pos, limit, lo, hi):
    """The first j in [lo, hi) for which compare(kv_pos[j], limit) is true, or hi.

    A binary search: positions must not decrease in [lo, hi).
    """
    kv_len = kv_pos.shape[1]

    def halve(_, bounds):
        left, right = bounds
        middle = left + (right - left) // 2
        later = compare(_take_keys(kv_pos, middle), limit)
        open_ = left < right
        return (
            jnp.where(open_ & ~later, middle + 1, left),
            jnp.where(open_ & later, middle, right),
        )

    steps = 31 if is_symbolic(kv_len) else kv_len.bit_length()
    left, _ = jax.lax.fori_loop(0, steps, halve, (lo, hi))
    return left


def block_bounds(
    kv_start: jax.Array, kv_end: jax.Array, segment_checked: jax.Array, *, kv_len: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """q_blocks (Bm, 5, NQ), kv_blocks (Bm, 4, NK); q_order, q_order_192, kv_order (Bm, tiles)."""
    q_blocks = query_blocks(kv_start, kv_end, segment_checked)
    kv_blocks = _key_blocks(q_blocks, kv_start.shape[1], kv_len)
    orders = (_query_order(q_blocks, tile) for tile in (TILE, TILE_192))
    return q_blocks, kv_blocks, *orders, _key_order(q_blocks, kv_blocks)


def query_blocks(lo: jax.Array, hi: jax.Array, segment_checked: jax.Array) -> jax.Array:
    """(Bm, 5, NQ), from arrays (Bm, Sq)."""
    count = ceil_div(lo.shape[1], BLOCK)
    lo, hi, segment_checked = (
        lax.reshape(fill_up(x, 1, count * BLOCK), (x.shape[0], count, BLOCK))
        for x in (lo, hi, segment_checked)
    )
    filled = lax.lt(lo, hi)
    lo_min, hi_min = (lax.reduce_min(select(filled, x, INT_MAX), (2,)) for x in (lo, hi))
    lo_max, hi_max = (lax.reduce_max(select(filled, x, 0), (2,)) for x in (lo, hi))
    some_checked = lax.reduce_or(lax.ne(segment_checked, np.int32(0)), (2,))
    some_empty = lax.reduce_or(lax.bitwise_not(filled), (2,))
    checked, empty = (lax.convert_element_type(x, np.int32) for x in (some_checked, some_empty))
    flags = lax.add(checked, lax.mul(empty, np.int32(2)))
    # With a segment-checked row, no key is certain to be attended by every row of the block.
    lo_max = lax.select(some_checked, hi_max, lo_max)
    hi_min = lax.select(some_checked, lo_min, hi_min)
    return stack([lo_min, lo_max, hi_min, hi_max, flags], 1)


def _columns(blocks: jax.Array) -> list[jax.Array]:
    """The numbers of blocks, (Bm, NQ) or (Bm, NK) each."""
    return [lax.index_in_dim(blocks, n, 1, keepdims=False) for n in range(blocks.shape[1])]


def _key_blocks(q_blocks, q_len, kv_len):
    lo_min, lo_max, hi_min, hi_max, flags = (lax.expand_dims(x, (1,)) for x in _columns(q_blocks))
    count = ceil_div(kv_len, BLOCK)
    block_size = np.int32(BLOCK)

    def of_keys(first_key):
        """(Bm, 4, keys), of blocks that begin with these keys (keys,)."""
        first_key = lax.expand_dims(first_key, (0, 2))
        end = lax.add(first_key, block_size)
        touches = lax.lt(lo_min, lax.min(end, lax.full_like(end, sized(kv_len))))
        touches = lax.bitwise_and(touches, lax.gt(hi_max, first_key))
        block = lax.broadcasted_iota(np.int32, touches.shape, 2)
        first = lax.reduce_min(select(touches, block, INT_MAX), (2,))
        last = lax.reduce_max(select(touches, block, -1), (2,))
        row_lo = select(lax.ge(last, np.int32(0)), lax.mul(first, block_size), INT_MAX)
        row_hi = lax.mul(lax.add(last, np.int32(1)), block_size)
        row_hi = lax.min(row_hi, lax.full_like(row_hi, sized(q_len)))

        full = lax.bitwise_and(lax.le(lo_max, first_key), lax.ge(hi_min, end))
        full = lax.bitwise_and(lax.eq(flags, np.int32(0)), full)
        core = lax.reduce_min(select(full, block, INT_MAX), (2,))
        after = lax.bitwise_and(lax.bitwise_not(full), lax.gt(block, lax.expand_dims(core, (2,))))
        beyond = lax.full_like(block, sized(block.shape[2]))
        core_end = lax.reduce_min(lax.select(after, block, beyond), (2,))
        some = lax.ne(core, np.int32(INT_MAX))
        core_lo = select(some, lax.mul(core, block_size), INT_MAX)
        core_hi = select(some, lax.mul(core_end, block_size), 0)
        return stack([row_lo, row_hi, core_lo, core_hi], 1)

    # Each key block is compared with all query blocks, in batches, so that memory stays linear.
    if not is_symbolic(count) and count <= _BATCH:
        return of_keys(lax.mul(lax.iota(np.int32, count), block_size))
    batches = ceil_div(count, _BATCH)
    first_keys = lax.mul(lax.iota(np.int32, batches * _BATCH), block_size)
    found = lax.map(of_keys, lax.reshape(first_keys, (batches, _BATCH)))
    found = lax.transpose(found, (1, 2, 0, 3))
    found = lax.reshape(found, (*found.shape[:2], batches * _BATCH))
    return lax.slice_in_dim(found, 0, count, axis=2)


def _query_order(q_blocks, tile):
    """The order of tiles of `tile` rows: most keys first, ties by index."""
    lo_min, _, _, hi_max, _ = _columns(q_blocks)
    low, high = _merge(lo_min, hi_max, tile)
    return _order(lax.min(lax.sub(low, high), lax.full_like(low, 0)))


def _key_order(q_blocks, kv_blocks):
    """The order of tiles of keys: longest document first, then most rows first, ties by index."""
    row_lo, row_hi, *_ = _columns(kv_blocks)
    low, high = _merge(row_lo, row_hi, TILE)
    some = lax.lt(low, high)
    last_block = lax.div(select(some, lax.sub(high, np.int32(1)), 0), np.int32(BLOCK))
    first_key = _take_keys(_columns(q_blocks)[0], last_block)  # of the last row's block
    keys = (lax.sub(first_key, high), lax.neg(high), lax.sub(low, high))
    none = lax.convert_element_type(lax.bitwise_not(some), np.int32)
    return _order(none, *(select(some, key, 0) for key in keys))


def _order(*keys):
    """The indices that sort each row by the keys, the first one first, then by index."""
    index = lax.broadcasted_iota(np.int32, keys[0].shape, 1)
    return lax.sort((*keys, index), dimension=1, num_keys=len(keys) + 1)[-1]


def _merge(low, high, tile):
    """The hulls of tiles from the ranges of their blocks."""
    blocks = tile // BLOCK
    count = ceil_div(low.shape[1], blocks)
    low, high = (
        lax.reshape(fill_up(x, 1, count * blocks, value), (x.shape[0], count, blocks))
        for x, value in ((low, INT_MAX), (high, 0))
    )
    return lax.reduce_min(low, (2,)), lax.reduce_max(high, (2,))
