"""Computes the bounds of blocks of 64 rows from row ranges, their transpose for blocks of 64 keys,
and the orders of tiles.

docs/internals/mask_format.md has the definitions. The kernels run once per mask, and the last two
read and write only a few integers per block.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
EMPTY_MIN = tl.constexpr(2147483647)
NOTHING = tl.constexpr(-(2**62))  # sorts after all documents


@triton.jit
def blocks_rows(kv_start, kv_end, segment_checked, q_blocks, q_len, GROUP: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(q_len, BLOCK)
    t = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    rows = t[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_bounds = rows < q_len
    lo = tl.load(kv_start + b * q_len + rows, mask=in_bounds, other=0)
    hi = tl.load(kv_end + b * q_len + rows, mask=in_bounds, other=0)
    full = hi > lo
    test = tl.max(
        (full & (tl.load(segment_checked + b * q_len + rows, mask=in_bounds, other=0) != 0)).to(
            tl.int32
        ),
        1,
    )
    holes = tl.max((~full).to(tl.int32), 1)
    lo_min = tl.min(tl.where(full, lo, EMPTY_MIN), 1)
    lo_max = tl.max(tl.where(full, lo, 0), 1)
    hi_min = tl.min(tl.where(full, hi, EMPTY_MIN), 1)
    hi_max = tl.max(tl.where(full, hi, 0), 1)
    # a block with a segment-checked row has no full part
    lo_max = tl.where(test != 0, hi_max, lo_max)
    hi_min = tl.where(test != 0, lo_min, hi_min)
    out = q_blocks + b * 5 * blocks + t
    tl.store(out, lo_min, mask=t < blocks)
    tl.store(out + blocks, lo_max, mask=t < blocks)
    tl.store(out + 2 * blocks, hi_min, mask=t < blocks)
    tl.store(out + 3 * blocks, hi_max, mask=t < blocks)
    tl.store(out + 4 * blocks, test + 2 * holes, mask=t < blocks)


@triton.jit
def full_blocks(base, blocks, t, in_bounds, first_key):
    """Whether all rows of block t attend to all 64 keys from `first_key` on: (GROUP, STEP)."""
    lo_max = tl.load(base + blocks + t, mask=in_bounds, other=0)[None, :]
    hi_min = tl.load(base + 2 * blocks + t, mask=in_bounds, other=0)[None, :]
    flags = tl.load(base + 4 * blocks + t, mask=in_bounds, other=2)[None, :]
    return (flags == 0) & (lo_max <= first_key) & (hi_min >= first_key + BLOCK)


@triton.jit
def blocks_keys(q_blocks, kv_blocks, q_len, kv_len, GROUP: tl.constexpr, STEP: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    q_count = tl.cdiv(q_len, BLOCK)
    kv_count = tl.cdiv(kv_len, BLOCK)
    base = q_blocks + b * 5 * q_count
    c = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    first_key = (c * BLOCK)[:, None]
    last_key = tl.minimum(first_key + BLOCK, kv_len)

    # running bounds per lane, reduced over lanes once at the end
    first = tl.full([GROUP, STEP], EMPTY_MIN, tl.int32)
    last = tl.full([GROUP, STEP], -1, tl.int32)
    full_first = tl.full([GROUP, STEP], EMPTY_MIN, tl.int32)
    for i in range(0, q_count, STEP):
        t = i + tl.arange(0, STEP)
        in_bounds = t < q_count
        lo_min = tl.load(base + t, mask=in_bounds, other=EMPTY_MIN)[None, :]
        hi_max = tl.load(base + 3 * q_count + t, mask=in_bounds, other=0)[None, :]
        touch = (lo_min < last_key) & (hi_max > first_key)
        first = tl.minimum(first, tl.where(touch, t[None, :], EMPTY_MIN))
        last = tl.maximum(last, tl.where(touch, t[None, :], -1))
        inside = full_blocks(base, q_count, t, in_bounds, first_key)
        full_first = tl.minimum(full_first, tl.where(inside, t[None, :], EMPTY_MIN))
    first = tl.min(first, 1)
    last = tl.max(last, 1)
    full_first = tl.min(full_first, 1)

    full_end = tl.zeros([GROUP, STEP], tl.int32) + q_count
    for i in range(0, q_count, STEP):
        t = i + tl.arange(0, STEP)
        in_bounds = t < q_count
        stop = (
            ~full_blocks(base, q_count, t, in_bounds, first_key)
            & (t[None, :] > full_first[:, None])
            & in_bounds[None, :]
        )
        full_end = tl.minimum(full_end, tl.where(stop, t[None, :], EMPTY_MIN))
    full_end = tl.min(full_end, 1)

    some = last >= 0
    some_full = full_first < EMPTY_MIN
    out = kv_blocks + b * 4 * kv_count + c
    mask = c < kv_count
    tl.store(out, tl.where(some, first * BLOCK, EMPTY_MIN), mask=mask)
    tl.store(out + kv_count, tl.where(some, tl.minimum((last + 1) * BLOCK, q_len), 0), mask=mask)
    tl.store(out + 2 * kv_count, tl.where(some_full, full_first * BLOCK, EMPTY_MIN), mask=mask)
    tl.store(out + 3 * kv_count, tl.where(some_full, full_end * BLOCK, 0), mask=mask)


@triton.jit
def merged(lows, highs, blocks, i, PER_TILE: tl.constexpr):
    """The hull of tile i, merged from its blocks: low > high if it is empty."""
    low = tl.full(i.shape, EMPTY_MIN, tl.int32)
    high = tl.zeros(i.shape, tl.int32)
    for j in tl.static_range(0, PER_TILE):
        t = PER_TILE * i + j
        low = tl.minimum(low, tl.load(lows + t, mask=t < blocks, other=EMPTY_MIN))
        high = tl.maximum(high, tl.load(highs + t, mask=t < blocks, other=0))
    return low, high


@triton.jit
def priority(lows, highs, blocks, q_lows, i, KEYS: tl.constexpr, PER_TILE: tl.constexpr):
    """The sort keys of tile i, for a descending sort: its document (0 for tiles of rows) and its
    work."""
    low, high = merged(lows, highs, blocks, i, PER_TILE)
    some = low < high
    work = tl.where(some, high - low, 0)
    document = work.to(tl.int64) * 0
    if KEYS:
        # the last row in the hull gives the first key of the document
        first_key = tl.load(q_lows + tl.maximum(high - 1, 0) // BLOCK, mask=some, other=0)
        span = (high - first_key).to(tl.int64)
        document = tl.where(some, (span << 32) + high, NOTHING)
    return document, work


@triton.jit
def sort(
    lows, highs, order, blocks, q_lows,
    KEYS: tl.constexpr, PER_TILE: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Stores the tiles in sorted order. A tile's index is the number of tiles before it; this is
    quadratic, but negligible compared with attention."""
    tiles = tl.cdiv(blocks, PER_TILE)
    mine = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    document, work = priority(lows, highs, blocks, q_lows, mine, KEYS, PER_TILE)
    document, work = document[:, None], work[:, None]
    count = tl.zeros([GROUP, STEP], tl.int32)
    for i in range(0, tiles, STEP):
        other = i + tl.arange(0, STEP)
        documents, works = priority(lows, highs, blocks, q_lows, other, KEYS, PER_TILE)
        documents, works = documents[None, :], works[None, :]
        earlier = (works > work) | ((works == work) & (other[None, :] < mine[:, None]))
        before = (documents > document) | ((documents == document) & earlier)
        count += (before & (other[None, :] < tiles)).to(tl.int32)
    tl.store(order + tl.sum(count, 1), mine, mask=mine < tiles)


@triton.jit
def blocks_order(
    q_blocks, kv_blocks, q_order, q_order_192, kv_order, q_len, kv_len,
    GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Tiles of rows are sorted by work, so that the last programs are short. Tiles of keys are
    sorted by document, longest first, and by work inside a document, so that tiles that run at the
    same time share rows and gradients in the L2 cache."""
    b = tl.program_id(1).to(tl.int64)
    q_count = tl.cdiv(q_len, BLOCK)
    kv_count = tl.cdiv(kv_len, BLOCK)
    low = q_blocks + b * 5 * q_count
    high = low + 3 * q_count
    row_low = kv_blocks + b * 4 * kv_count
    row_high = row_low + kv_count
    two = q_order + b * tl.cdiv(q_count, 2)
    three = q_order_192 + b * tl.cdiv(q_count, 3)
    keys = kv_order + b * tl.cdiv(kv_count, 2)
    sort(low, high, two, q_count, low, False, 2, GROUP, STEP)
    sort(low, high, three, q_count, low, False, 3, GROUP, STEP)
    sort(row_low, row_high, keys, kv_count, low, True, 2, GROUP, STEP)
