"""A tile of rows of one query head and the loops over its keys, shared by the forward and dQ."""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.block_lists import HeadMask, keep_in_block_mask, mask_of_head
from portable.kv_ranges import columns, keep, key_range, row_pointers, split
from portable.steps import (
    Steps,
    aligned_start,
    full_place,
    in_one_loop,
    load_pair,
    partial_place,
    partial_steps,
    steps_of,
)


class RowTile(NamedTuple):
    """The tile of `rows`, starting at `first_row`, of query head `head` in batch row `b`. `valid`
    is the mask of rows below `q_len`. `lo` and `hi` are the key ranges of the rows, none of which
    exceeds `end`, and `walk` are the steps over the keys. Query and out have `q_len` rows of
    `row_heads` heads."""

    head: tl.tensor
    b: tl.tensor
    first_row: tl.tensor
    rows: tl.tensor
    valid: tl.tensor
    lo: tl.tensor
    hi: tl.tensor
    end: tl.tensor
    segment_checked: tl.tensor
    walk: Steps
    head_mask: HeadMask
    q_len: tl.tensor
    row_heads: tl.tensor


@triton.jit
def row_tile(
    head, b, mask_b, row, kv_start, kv_end, q_blocks, block_mask, dropout_threshold, bias,
    bias_kind, q_len, kv_len, row_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The tile that starts at `row`, with steps of BLOCK_N keys. `mask_b` is the batch row of the
    mask."""
    start, end, full_lo, full_hi, segment_checked = key_range(q_blocks, mask_b, row, q_len, BLOCK_M)
    start = aligned_start(start, dropout_threshold, bias, bias_kind)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
    head_mask = mask_of_head(block_mask, mask_b, head)
    walk = steps_of(
        start, steps, full_begin, full_end, block_mask, mask_b, head, row // 128,
        tl.cdiv(q_len, 128), tl.cdiv(kv_len, 64), BLOCK_N,
    )  # fmt: skip
    if bias is not None and STAGES == 1:
        walk = in_one_loop(walk)
    rows = row + tl.arange(0, BLOCK_M)
    valid = rows < q_len
    mask_row = mask_b.to(tl.int64) * q_len
    lo = tl.load(kv_start + mask_row + rows, mask=valid, other=0)
    hi = tl.load(kv_end + mask_row + rows, mask=valid, other=0)
    return RowTile(
        head, b, row, rows, valid, lo, hi, end, segment_checked, walk, head_mask, q_len, row_heads
    )


@triton.jit
def tile_pointers(array, tile, dim, DIM: tl.constexpr):
    """Pointers to the tile's rows of query, out, or one of their gradients."""
    cols = columns(DIM)
    first = (tile.b.to(tl.int64) * tile.q_len + tile.first_row) * tile.row_heads + tile.head
    return row_pointers(array, first, tile.row_heads, cols, dim, DIM, tile.rows.shape[0])


@triton.jit
def over_keys(
    step: tl.constexpr, state, operands, tile, segments, pair, scoring, QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Calls `step` for every block of keys and returns the last `state`. The steps that need a mask
    come first, with the mask as `inside` (rows, keys). For the others, `inside` is None."""
    walk = tile.walk
    cols = tl.arange(0, BLOCK_N)
    for i in tl.range(0, partial_steps(walk), num_stages=1):
        place = partial_place(walk, i, BLOCK_N)
        first_key = walk.origin + place * walk.unit
        keys = first_key + cols
        # keys past the end of the tile's range are not read: values there may not be finite
        valid = (keys < tile.end)[:, None]
        kv = load_pair(pair, place, None, valid, QK_DIM, V_DIM)
        checked = tile.segment_checked
        inside = keep(tile.rows, keys, tile.lo, tile.hi, checked, segments, 0)
        inside = keep_in_block_mask(
            inside, walk.block_mask, tile.head_mask, tile.rows, keys, first_key, BLOCK_N, 0
        )
        state = step(state, operands, kv, tile, scoring, first_key, inside, FLOAT32_PRODUCTS)
    if walk.full_begin is not None:
        if walk.listed is None:
            for place in tl.range(walk.full_begin, walk.full_end, num_stages=STAGES):
                first_key = walk.origin + place * walk.unit
                kv = load_pair(pair, place, None, None, QK_DIM, V_DIM)
                state = step(state, operands, kv, tile, scoring, first_key, None, FLOAT32_PRODUCTS)
        else:
            place = full_place(walk, 0, walk.start + walk.full_begin * BLOCK_N, BLOCK_N)
            for i in tl.range(0, walk.full, num_stages=STAGES):
                kv = load_pair(pair, place, None, None, QK_DIM, V_DIM)
                state = step(state, operands, kv, tile, scoring, place, None, FLOAT32_PRODUCTS)
                place = full_place(walk, i + 1, place + BLOCK_N, BLOCK_N)
    return state
