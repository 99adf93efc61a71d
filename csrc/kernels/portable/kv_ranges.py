"""Row ranges in a kernel: the blocks of keys that a tile of rows visits, and the keys that a row
attends to. Also loads and stores of tiles.

docs/internals/mask_format.md defines the arrays of a mask. A tile merges the bounds of its blocks
of 64 rows. The blocks of keys that it visits are its steps, counted from key `start`. The steps
from `full_begin` to `full_end` are full and need no mask.

Arguments that belong together are passed as named tuples. A field that is None is absent from the
kernel being compiled, together with its code.
"""

from typing import NamedTuple

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
TILE = tl.constexpr(128)
EMPTY_MIN = tl.constexpr(2147483647)  # neutral for min: no row, no key
# Minimum number of tiles, over all heads, in the last scheduler phase: 4096 rows of eight heads,
# which fit in an L2 cache.
ALTERNATE = tl.constexpr(256)


class Segments(NamedTuple):
    """What segment-checked rows compare in addition to their ranges, for one batch row of the mask.

    `q_pos` has the highest position of every row, and then, if `check` is 3, the lowest positions.
    `check` is 0 to compare nothing, 1 for ids, 2 for ids and the highest position, and 3 for both
    limits of the position.
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
    """The columns of a tile of head dim DIM, padded to a power of two as Triton requires."""
    return tl.arange(0, triton.next_power_of_2(DIM))


@triton.jit
def size_of(size, otherwise):
    """`size`, or `otherwise` in kernels in which `size` is None."""
    if size is None:
        result = otherwise
    else:
        result = size
    return result


@triton.jit
def load_rows(pointers, valid, dim, DIM: tl.constexpr):
    """A tile (rows, columns(DIM)). Columns from `dim` on (None: DIM), and rows whose mask `valid`
    (N, 1) is False (None: no mask), are 0."""
    PADDED: tl.constexpr = dim is not None or triton.next_power_of_2(DIM) != DIM
    if PADDED:
        real = columns(DIM)[None, :] < size_of(dim, DIM)
        if valid is None:
            tile = tl.load(pointers, mask=real, other=0.0)
        else:
            tile = tl.load(pointers, mask=valid & real, other=0.0)
    elif valid is None:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=valid, other=0.0)
    return tile


@triton.jit
def store_rows(pointers, tile, valid, dim, DIM: tl.constexpr):
    """Stores the rows of a tile (rows, columns(DIM)) whose mask `valid` (N, 1) is True, and of
    these `dim` columns (None: DIM)."""
    if dim is not None or triton.next_power_of_2(DIM) != DIM:
        tl.store(pointers, tile, mask=valid & (columns(DIM)[None, :] < size_of(dim, DIM)))
    else:
        tl.store(pointers, tile, mask=valid)


@triton.jit
def row_pointers(array, first, heads, cols, dim, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to the columns `cols` of ROWS rows that are `heads` heads apart. The first row is at
    the index `first`, counted in heads."""
    size = size_of(dim, DIM)
    local = tl.arange(0, ROWS)[:, None].to(tl.int64) * heads
    return array + first * size + local * size + cols[None, :]


@triton.jit
def scheduler_phases(tiles, heads):
    """The indices, in `tiles` tiles sorted by work, at which the second and the last phase begin.
    `heads` is the number of key/value heads of all batch rows. The second phase may be empty; with
    a single tile, the last one is empty, too."""
    alternating = tl.maximum(tiles // 4, ALTERNATE // heads)
    return tiles - tiles // 2, tiles - tl.minimum(tiles // 2, alternating)


@triton.jit
def tile_of_program(order, batch, mask_batch, tiles, group, kv_heads, BLOCK_SIZE: tl.constexpr):
    """Head, batch row and first row (or key) of this program.

    Tiles are sorted by work, most first. The key/value heads of all batch rows are the slowest
    index, so that programs that run at the same time share keys and values (for tiles of keys: rows
    and their gradients) in the L2 cache. This order is not used for all tiles at once, because the
    long tiles of the last head would start when no short tiles are left to fill the GPU. Instead,
    it is applied in phases: half of the tiles of every head, then up to a quarter, and then the
    rest, in which heads alternate. With a causal mask, the last phase has little of the work. The
    `group` query heads of a tile are consecutive programs (`group` is 1 if a program processes a
    whole group).
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
    """The keys [start, end) that contain the ranges of a tile's rows, the keys [full_lo, full_hi)
    that all its non-empty rows attend to, and whether any row is segment-checked."""
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
        valid = t < blocks
        start = tl.minimum(start, tl.load(base + t, mask=valid, other=EMPTY_MIN))
        full_lo = tl.maximum(full_lo, tl.load(base + blocks + t, mask=valid, other=0))
        full_hi = tl.minimum(full_hi, tl.load(base + 2 * blocks + t, mask=valid, other=EMPTY_MIN))
        end = tl.maximum(end, tl.load(base + 3 * blocks + t, mask=valid, other=0))
        segment_checked |= tl.load(base + 4 * blocks + t, mask=valid, other=0) & 1
    return start, end, full_lo, full_hi, segment_checked


@triton.jit
def row_range(kv_blocks, mask_b, key, kv_len, BLOCK_N: tl.constexpr):
    """The rows [start, end) that may attend to keys of a tile, and the rows [full_lo, full_hi) that
    attend to all of its keys."""
    blocks = tl.cdiv(kv_len, BLOCK)
    first = key // BLOCK
    base = kv_blocks + mask_b.to(tl.int64) * (4 * blocks)
    start = EMPTY_MIN
    end = 0
    full_lo = 0
    full_hi = EMPTY_MIN
    for i in tl.static_range(0, tl.cdiv(BLOCK_N, BLOCK)):
        t = first + i
        valid = t < blocks
        start = tl.minimum(start, tl.load(base + t, mask=valid, other=EMPTY_MIN))
        end = tl.maximum(end, tl.load(base + blocks + t, mask=valid, other=0))
        full_lo = tl.maximum(full_lo, tl.load(base + 2 * blocks + t, mask=valid, other=0))
        full_hi = tl.minimum(full_hi, tl.load(base + 3 * blocks + t, mask=valid, other=EMPTY_MIN))
    return start, end, full_lo, full_hi


@triton.jit
def split(start, end, full_lo, full_hi, STEP: tl.constexpr):
    """The number of steps from `start` to `end`, and the full steps [full_begin, full_end)."""
    steps = tl.where(end > start, (end - start + STEP - 1) // STEP, 0)
    full_lo = tl.minimum(full_lo, end)  # full_lo is INT_MAX if nothing is full
    full_begin = tl.minimum(tl.maximum(full_lo - start + STEP - 1, 0) // STEP, steps)
    full_end = tl.minimum(tl.maximum(full_hi - start, 0) // STEP, steps)
    return steps, full_begin, tl.maximum(full_begin, full_end)


@triton.jit
def partial_step(i, full_begin, full_end):
    """The i-th step that is not full: first the steps before the full ones, then those after."""
    return tl.where(i < full_begin, i, i + full_end - full_begin)


@triton.jit
def position_row(mask_row, mask_mode):
    """The offset of a batch row in q_pos, which has one position per row, or two if `mask_mode` is
    3."""
    return mask_row * tl.where(mask_mode > 2, 2, 1)


@triton.jit
def segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len):
    """The Segments of batch row `mask_b` of the mask."""
    mask_row = mask_b.to(tl.int64) * q_len
    q_ids += mask_row
    q_pos += position_row(mask_row, mask_mode)
    kv_ids += mask_b.to(tl.int64) * kv_len
    kv_pos += mask_b.to(tl.int64) * kv_len
    return Segments(q_ids, kv_ids, q_pos, kv_pos, mask_mode, q_len, kv_len)


@triton.jit
def keep(rows, keys, lo, hi, segment_checked, segments, ROW_AXIS: tl.constexpr):
    """Whether each row attends to each key: rows x keys (ROW_AXIS 0) or keys x rows (ROW_AXIS 1).

    `lo` and `hi` are the ranges of `rows`. One unsigned comparison checks both ends.
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
