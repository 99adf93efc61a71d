"""Replacements for functions with inline assembly, which Triton's interpreter cannot run, and
kernels that call device functions of other kernels for their tests."""

import triton
import triton.language as tl
from portable.decode import ROWS, attended, deal, share_of_keys
from portable.kv_ranges import EMPTY_MIN, tile_of_program


@triton.jit
def to_tf32(x):
    """Replaces arithmetic.to_tf32: adds half of the last kept bit to the magnitude, truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def unrounded(x):
    """Replaces to_tf32 where float32 operands stand for 16-bit ones."""
    return x


@triton.jit
def pairs_to_float16(pairs, IS_NATIVE: tl.constexpr):
    """Replaces fp8.pairs_to_float16 for GPUs without a native conversion: the number / 256."""
    parts = ()
    for i in tl.static_range(2):
        bits = (pairs >> (8 * i)) & 0xFF
        magnitude = (bits & 0x7F) << 7
        bits = magnitude | ((magnitude + 0x80) & 0x4000) | ((bits & 0x80) << 8)
        parts = parts + (bits.to(tl.float16, bitcast=True),)  # noqa: RUF005
    return parts


@triton.jit
def dealt_share(kv_start, kv_end, found, batch, q_len, kv_len, shares, splits, STEP: tl.constexpr):
    """(programs, 5): the sequence of each program, the index of its share, the sequence's number of
    shares, and the first and end key of the share, as `decode` computes them."""
    place = tl.program_id(0)
    b, split, parts = deal(kv_start, kv_end, place, batch, q_len, kv_len, shares, splits, STEP)
    tokens = tl.arange(0, ROWS)
    lo, hi = attended(
        kv_start, kv_end, b * q_len + tokens, tokens < tl.where(b < batch, q_len, 0), kv_len
    )
    start = tl.min(tl.where(lo < hi, lo, EMPTY_MIN), 0)
    end = tl.max(tl.where(lo < hi, hi, 0), 0)
    begin, stop = share_of_keys(start, end, split, tl.maximum(parts, 1), STEP)
    tl.store(found + place * 5, b)
    tl.store(found + place * 5 + 1, split)
    tl.store(found + place * 5 + 2, parts)
    tl.store(found + place * 5 + 3, begin)
    tl.store(found + place * 5 + 4, stop)


@triton.jit
def places(order, found, batch, mask_batch, tiles, group, kv_heads, BLOCK_SIZE: tl.constexpr):
    """(programs, 4): head, key/value head, batch row and first row of every program, from
    `kv_ranges.tile_of_program`."""
    head, kv_head, b, _, first = tile_of_program(
        order, batch, mask_batch, tiles, group, kv_heads, BLOCK_SIZE
    )
    place = tl.program_id(0) * 4
    tl.store(found + place, head)
    tl.store(found + place + 1, kv_head)
    tl.store(found + place + 2, b)
    tl.store(found + place + 3, first)
