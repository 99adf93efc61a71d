"""Row ranges inside a kernel: which blocks of keys a tile of rows meets, and which keys a row
keeps. And the columns of a tile.

The only kernel file that knows how a mask is stored (docs/internals/mask_format.md). A tile merges
the bounds of its blocks of 64 rows; the blocks of keys it meets are numbered from `start`, those
from `full_begin` to `full_end` are full: they need no mask.

Arguments that belong together travel as named tuples. One that is None does not exist in the kernel
being compiled, nor does its code.
"""

from typing import NamedTuple

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
TILE = tl.constexpr(128)
EMPTY_MIN = tl.constexpr(2147483647)  # neutral for min: no row, no key
ALTERNATE = tl.constexpr(
    256
)  # tiles of all heads: rows of 4096 tokens of eight heads fit a L2 cache


class Segments(NamedTuple):
    """What a row and a key are compared by beside the row's range: the mask's batch row of it.

    Behind the last limit of `q_pos` begin the lower ones, where there are any. `check`: 0 compares
    nothing, 1 ids, 2 positions too, 3 has lower limits.
    """

    q_ids: tl.tensor
    kv_ids: tl.tensor
    q_pos: tl.tensor
    kv_pos: tl.tensor
    check: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor


@triton.jit
def columns(DIM: tl.constexpr):
    """The columns of a tile of head dim DIM: up to the next power of two, since Triton knows no
    other sizes."""
    return tl.arange(0, triton.next_power_of_2(DIM))


@triton.jit
def size_of(size, otherwise):
    """What is given at run time, or what a kernel knows `otherwise`."""
    if size is None:
        found = otherwise
    else:
        found = size
    return found


@triton.jit
def load_rows(pointers, there, dim, DIM: tl.constexpr):
    """A tile (rows, columns(DIM)): 0 in columns from `dim` on (None: DIM), and in rows that are not
    `there` (N, 1); None: all are."""
    PADDED: tl.constexpr = dim is not None or triton.next_power_of_2(DIM) != DIM
    if PADDED:
        real = columns(DIM)[None, :] < size_of(dim, DIM)
        if there is None:
            tile = tl.load(pointers, mask=real, other=0.0)
        else:
            tile = tl.load(pointers, mask=there & real, other=0.0)
    elif there is None:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=there, other=0.0)
    return tile


@triton.jit
def store_rows(pointers, tile, there, dim, DIM: tl.constexpr):
    """The rows that are `there` (N, 1), of a tile (rows, columns(DIM)) of `dim` columns (None:
    DIM)."""
    if dim is not None or triton.next_power_of_2(DIM) != DIM:
        tl.store(pointers, tile, mask=there & (columns(DIM)[None, :] < size_of(dim, DIM)))
    else:
        tl.store(pointers, tile, mask=there)


@triton.jit
def row_pointers(array, first, heads, cols, dim, DIM: tl.constexpr, ROWS: tl.constexpr):
    """To the columns `cols` of ROWS rows, `heads` heads apart, from the `first`-th on, counted in
    heads."""
    size = size_of(dim, DIM)
    local = tl.arange(0, ROWS)[:, None].to(tl.int64) * heads
    return array + first * size + local * size + cols[None, :]


@triton.jit
def scheduler_phases(tiles, heads):
    """Where the second and the last phase begin, in tiles by work, for so many key/value heads of
    all batch rows. The second may be empty, and of one tile the last is."""
    alternating = tl.maximum(tiles // 4, ALTERNATE // heads)
    return tiles - tiles // 2, tiles - tl.minimum(tiles // 2, alternating)


@triton.jit
def tile_of_program(order, batch, mask_batch, tiles, group, kv_heads, BLOCK_SIZE: tl.constexpr):
    """Head, batch row and first row (or key) of this program.

    Tiles come with most work first. The key/value heads of all batch rows are the slowest index, so
    that programs running together share keys and values, and of key tiles the rows and their
    gradients, in the L2 cache. But not over all tiles: the last head's long tiles must not begin
    when no short ones are left to run beside them. So it goes by phases: half of the tiles of
    every head, then a quarter, then the last quarter, with most of the tiles and little of the work
    of causal rows, where heads alternate. `group` query heads of one tile follow each other (1
    where a program serves a whole group).
    """
    SUB: tl.constexpr = TILE // BLOCK_SIZE
    pid = tl.program_id(0)
    per_tile = group * SUB
    heads = batch * kv_heads
    second, last = scheduler_phases(tiles, heads)
    at = pid // per_tile
    begin = tl.where(at < second * heads, 0, tl.where(at < last * heads, second, last))
    length = tl.where(begin == 0, second, tl.maximum(last - second, 1))
    at -= begin * heads
    head = tl.where(begin == last, at % heads, at // length)
    nth = begin + tl.where(begin == last, at // heads, at % length)
    b = head % batch
    kv_head = head // batch
    rest = pid % per_tile
    member = rest % group
    mask_b = tl.where(mask_batch > 1, b, 0)
    tile = tl.load(order + mask_b * tiles + nth)
    sub = rest // group
    return kv_head * group + member, kv_head, b, mask_b, tile * TILE + sub * BLOCK_SIZE


@triton.jit
def key_range(q_blocks, mask_b, row, q_len, BLOCK_M: tl.constexpr):
    """Keys [start, end) that the rows of a tile meet, keys [full_lo, full_hi) that all its
    non-empty rows attend, segment-checked or not."""
    blocks = tl.cdiv(q_len, BLOCK)
    first = row // BLOCK
    base = q_blocks + mask_b.to(tl.int64) * (5 * blocks)
    start = EMPTY_MIN
    full_lo = 0
    full_hi = EMPTY_MIN
    end = 0
    segment_checked = 0
    for i in tl.static_range(0, tl.cdiv(BLOCK_M, BLOCK)):
        t = first + i
        there = t < blocks
        start = tl.minimum(start, tl.load(base + t, mask=there, other=EMPTY_MIN))
        full_lo = tl.maximum(full_lo, tl.load(base + blocks + t, mask=there, other=0))
        full_hi = tl.minimum(full_hi, tl.load(base + 2 * blocks + t, mask=there, other=EMPTY_MIN))
        end = tl.maximum(end, tl.load(base + 3 * blocks + t, mask=there, other=0))
        segment_checked |= tl.load(base + 4 * blocks + t, mask=there, other=0) & 1
    return start, end, full_lo, full_hi, segment_checked


@triton.jit
def row_range(kv_blocks, mask_b, key, kv_len, BLOCK_N: tl.constexpr):
    """Rows [start, end) that meet the keys of a tile, rows [full_lo, full_hi) that all attend all
    of its keys."""
    blocks = tl.cdiv(kv_len, BLOCK)
    first = key // BLOCK
    base = kv_blocks + mask_b.to(tl.int64) * (4 * blocks)
    start = EMPTY_MIN
    end = 0
    full_lo = 0
    full_hi = EMPTY_MIN
    for i in tl.static_range(0, tl.cdiv(BLOCK_N, BLOCK)):
        t = first + i
        there = t < blocks
        start = tl.minimum(start, tl.load(base + t, mask=there, other=EMPTY_MIN))
        end = tl.maximum(end, tl.load(base + blocks + t, mask=there, other=0))
        full_lo = tl.maximum(full_lo, tl.load(base + 2 * blocks + t, mask=there, other=0))
        full_hi = tl.minimum(full_hi, tl.load(base + 3 * blocks + t, mask=there, other=EMPTY_MIN))
    return start, end, full_lo, full_hi


@triton.jit
def split(start, end, full_lo, full_hi, STEP: tl.constexpr):
    """Number of steps from `start` to `end`, and the steps [full_begin, full_end) that are
    full."""
    steps = tl.where(end > start, (end - start + STEP - 1) // STEP, 0)
    full_lo = tl.minimum(full_lo, end)  # INT_MAX where none is full
    full_begin = tl.minimum(tl.maximum(full_lo - start + STEP - 1, 0) // STEP, steps)
    full_end = tl.minimum(tl.maximum(full_hi - start, 0) // STEP, steps)
    return steps, full_begin, tl.maximum(full_begin, full_end)


@triton.jit
def partial_step(i, full_begin, full_end):
    """The i-th step that is not full: first those before the full ones, then those behind them."""
    return tl.where(i < full_begin, i, i + full_end - full_begin)


@triton.jit
def position_row(mask_row, mask_mode):
    """Where a batch row of q_pos begins: it holds a limit for every query row, or an upper and a
    lower one."""
    return mask_row * tl.where(mask_mode > 2, 2, 1)


@triton.jit
def segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len):
    """Those of the mask's batch row."""
    mask_row = mask_b.to(tl.int64) * q_len
    q_ids += mask_row
    q_pos += position_row(mask_row, mask_mode)
    kv_ids += mask_b.to(tl.int64) * kv_len
    kv_pos += mask_b.to(tl.int64) * kv_len
    return Segments(q_ids, kv_ids, q_pos, kv_pos, mask_mode, q_len, kv_len)


@triton.jit
def keep(rows, keys, lo, hi, segment_checked, segments, ROW_AXIS: tl.constexpr):
    """Whether a row attends a key: a block of rows x keys (ROW_AXIS 0) or of keys x rows (ROW_AXIS
    1).

    `lo` and `hi` are the ranges of `rows`. One unsigned comparison looks at both ends.
    """
    q_len, kv_len = segments.q_len, segments.kv_len
    distance = tl.expand_dims(keys, ROW_AXIS) - tl.expand_dims(lo, 1 - ROW_AXIS)
    length = tl.expand_dims(hi - lo, 1 - ROW_AXIS)
    inside = distance.to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True)
    if segment_checked != 0:
        q_id = tl.load(segments.q_ids + rows, mask=rows < q_len, other=-1)
        kv_id = tl.load(segments.kv_ids + keys, mask=keys < kv_len, other=-1)
        inside &= tl.expand_dims(q_id, 1 - ROW_AXIS) == tl.expand_dims(kv_id, ROW_AXIS)
        if segments.check > 1:
            q_at = tl.load(segments.q_pos + rows, mask=rows < q_len, other=0)
            kv_at = tl.load(segments.kv_pos + keys, mask=keys < kv_len, other=0)
            inside &= tl.expand_dims(kv_at, ROW_AXIS) <= tl.expand_dims(q_at, 1 - ROW_AXIS)
            if segments.check > 2:
                q_from = tl.load(segments.q_pos + (q_len + rows), mask=rows < q_len, other=0)
                inside &= tl.expand_dims(q_from, 1 - ROW_AXIS) <= tl.expand_dims(kv_at, ROW_AXIS)
    return inside
