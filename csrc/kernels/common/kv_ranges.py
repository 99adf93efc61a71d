"""Shared by the kernels in Gluon: which tile a program computes, and the steps of a tile
(portable/kv_ranges.py in Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(64)
EMPTY_MIN = gl.constexpr(2147483647)
ALTERNATE = gl.constexpr(256)
NEAR_TILES = gl.constexpr(8)
NEAR_HEADS = gl.constexpr(256)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tiles_are_near(tiles, heads):
    """Whether all tiles of a head, and all heads of a batch row, should follow each other. With
    many heads of few tiles, no order leaves much of the GPU idle at the end, and in this one,
    memory is read once: heads of a row may share cache lines."""
    return (tiles > 1) & (tiles <= NEAR_TILES) & (heads >= NEAR_HEADS)


@gluon.jit
def scheduler_phases(tiles, heads):
    """Same as `scheduler_phases` in portable/kv_ranges.py."""
    alternating = gl.maximum(tiles // 4, ALTERNATE // heads)
    return tiles - tiles // 2, tiles - gl.minimum(tiles // 2, alternating)


@gluon.jit
def place_of_tile(
    tile, order, batch, mask_batch, tiles, group, kv_heads, ROWS: gl.constexpr, SUB: gl.constexpr,
    near=False,
):  # fmt: skip
    """Head, key/value head, batch row, mask row and first row (or key) of a tile. Tiles are
    numbered in the order of `tile_of_program` in portable/kv_ranges.py. Each tile in `order` is
    divided into SUB tiles of ROWS rows, which are numbered separately. `near`: all tiles of a head
    follow each other instead, and all heads of a batch row."""
    per_tile = group * SUB
    heads = batch * kv_heads
    at = tile // per_tile
    if near:
        nth = at % tiles
        head = at // tiles
        b = head // kv_heads
        kv_head = head % kv_heads
    else:
        second, last = scheduler_phases(tiles, heads)
        begin = gl.where(at < second * heads, 0, gl.where(at < last * heads, second, last))
        length = gl.where(begin == 0, second, gl.maximum(last - second, 1))
        at -= begin * heads
        head = gl.where(begin == last, at % heads, at // length)
        nth = begin + gl.where(begin == last, at // heads, at % length)
        b = head % batch
        kv_head = head // batch
    rest = tile % per_tile
    member = rest % group
    mask_b = gl.where(mask_batch > 1, b, 0)
    first = gl.load(order + mask_b * tiles + nth) * SUB + rest // group
    return kv_head * group + member, kv_head, b, mask_b, first * ROWS


@gluon.jit
def key_range(q_blocks, mask_b, row, q_len, ROWS: gl.constexpr):
    """Same as `key_range` in portable/kv_ranges.py, except that a tile without keys gets one key,
    which is masked in every row."""
    blocks = (q_len + BLOCK - 1) // BLOCK
    first = row // BLOCK
    base = q_blocks + mask_b.to(gl.int64) * (5 * blocks)
    start = EMPTY_MIN
    full_lo = 0
    full_hi = EMPTY_MIN
    end = 0
    checked = 0
    for i in gl.static_range(ROWS // BLOCK):
        t = gl.minimum(first + i, blocks - 1)  # reading a block twice changes no bound
        start = gl.minimum(start, gl.load(base + t))
        full_lo = gl.maximum(full_lo, gl.load(base + blocks + t))
        full_hi = gl.minimum(full_hi, gl.load(base + 2 * blocks + t))
        end = gl.maximum(end, gl.load(base + 3 * blocks + t))
        checked = checked | (gl.load(base + 4 * blocks + t) & 1)
    start = gl.where(end == 0, 0, start)
    full_lo = gl.where(end == 0, 1, full_lo)
    full_hi = gl.where(end == 0, 0, full_hi)
    return start, gl.maximum(end, 1), full_lo, full_hi, checked


@gluon.jit
def split(start, end, full_lo, full_hi, STEP: gl.constexpr):
    """Same as `split` in portable/kv_ranges.py, for a range that is not empty."""
    steps = (end - start + STEP - 1) // STEP
    full_lo = gl.minimum(full_lo, end)
    full_begin = gl.minimum(gl.maximum(full_lo - start + STEP - 1, 0) // STEP, steps)
    full_end = gl.minimum(gl.maximum(full_hi - start, 0) // STEP, steps)
    return steps, full_begin, gl.maximum(full_begin, full_end)


@gluon.jit
def nth_step(i, steps, partial, full_begin, full_end):
    """Index of the step that is processed i-th: first the partial steps before and after the full
    ones, from the last to the first, then the full steps in ascending order."""
    back = steps - 1 - i
    masked = gl.where(back < full_end, back - full_end + full_begin, back)
    return gl.where(i < partial, masked, full_begin + i - partial)


@gluon.jit
def position_row(mask_row, mask_mode):
    """Same as `position_row` in portable/kv_ranges.py."""
    return mask_row * gl.where(mask_mode > 2, 2, 1)


@gluon.jit
def opaque(x):
    """Returns x, whose value is hidden from the compiler, so that computations with it stay in
    their branch. Hoisted out of the loop, they would cost registers in all tiles."""
    return gl.inline_asm("mov.b32 $0, $1;", "=r,r", (x,), gl.int32)
