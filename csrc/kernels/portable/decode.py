"""Decoding: attention of a few new rows over a long key/value cache, split over keys and merged.

`decode` (FlashAttention-2's recurrence, arXiv 2307.08691, split over keys as in Flash-Decoding,
pytorch.org/blog/flash-decoding): a program processes one key/value head of one sequence, a tile of
the rows of its group (rows of one query token are adjacent), and a share of the keys that those
rows attend to. `decode_tall` is the same function with a taller tile. A program writes the
normalised float32 output and the base-2 log-sum-exp of its share. A share without keys writes -inf,
and its values are never read. Each sequence has `splits` equal shares or, if `shares` is not 0, a
number that depends on its length: every program then derives its sequence and share from the row
ranges. Keys that all rows of the tile attend to come first, without a mask. `decode_combine` merges
the shares of a row, adds the sink to the denominator and writes the results.

With `tile_rows` above 0, the new tokens of all sequences are packed, and `workspace` lists the
work: two numbers for each token, then ITEM for each item (packax/_src/ops/packed_rows.py). An item
is at most `tile_rows` tokens of one sequence and a share of their keys, for each key/value head. If
the GPU has a tall kernel, it computes the items with more than FEW rows, and the other kernel the
rest. Results of a share are at the item's index, and the numbers of a token say where its shares
begin, and how many there are. With `chunks_elsewhere`, another kernel computes the items that are
marked as parts of a long chunk, and after the `room` items there is a list of the other tokens, and
then numbers of which the second and the third bound the tokens that are not padding.

A cache is contiguous, (batch, kv_len, ...) with page_size 0, or consists of pages listed in
`block_table`. Head dims are run-time arguments in units of 8, which tells the compiler that rows
are 16-byte aligned; the tile's columns past the head dim are not read. A row is NaN if its range
ends past the cache or includes a missing page.

Keys and values in float8_e4m3fn (`decode_fp8` and `decode_tall_fp8`; with pages, `decode_fp8_pages`
and `decode_tall_fp8_pages`) are loaded as pairs of elements, which become two float16 tiles in
registers (fp8.py): the even and the odd columns. The query and the accumulators have the same two
parts; with other dtypes there is one part. Scales are (scale_rows, kv_heads): one row for all keys,
one per sequence or, with pages, one per page. Scales of sequences multiply scores and outputs.
Scales of pages multiply the score and the probability of each key.

With V_PARTS above 1, values and accumulators are split into V_PARTS tiles of adjacent columns, each
no wider than BLOCK_M: Triton then assigns rows to each warp, instead of columns of all rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.arithmetic import LOG2E, dot, tanh
from portable.fp8 import pairs_to_float16, rows_to_float16, unit_of_bytes
from portable.kv_ranges import EMPTY_MIN, columns

LN2 = tl.constexpr(0.6931471805599453)
ENTRIES = tl.constexpr(128)  # block table entries checked at once
SEQUENCES = tl.constexpr(64)  # maximum batch size of `deal`: csrc/launch/decode_shares.cc
ROWS = tl.constexpr(16)  # maximum q_len of `deal`
FEW = tl.constexpr(16)  # rows of a group, per tile of `decode`: csrc/launch/decode_shares.cc
ITEM = tl.constexpr(8)  # numbers of an item: packax/_src/ops/packed_rows.py
CLEARED = tl.constexpr(1024)  # elements at once
LEAST = tl.constexpr(128)  # minimum keys per share: with fewer, a program costs more than its keys
TINY = tl.constexpr(2.0**-100)  # lower bound of `top`; smaller weights do not matter


@triton.jit
def load_columns(pointers, valid, dim, DIM: tl.constexpr):
    """A tile (rows, columns(DIM)) of rows with `dim` columns. Columns past `dim`, and rows whose
    mask `valid` is False (None: no mask), are 0."""
    real = columns(DIM)[None, :] < dim
    if valid is not None:
        real = valid[:, None] & real
    return tl.load(pointers, mask=real, other=0.0)


@triton.jit
def load_scales(pointers, valid):
    """The scales, 0 where the mask `valid` is False (None: no mask)."""
    if valid is None:
        scales = tl.load(pointers)
    else:
        scales = tl.load(pointers, mask=valid, other=0.0)
    return scales


@triton.jit
def attended(kv_start, kv_end, at, valid, kv_len):
    """The key ranges [lo, hi) of the rows at offsets `at`. A range that ends past the cache becomes
    empty, and decode_combine sets its row to NaN."""
    lo = tl.maximum(tl.load(kv_start + at, mask=valid, other=0), 0)
    hi = tl.load(kv_end + at, mask=valid, other=0)
    return lo, tl.where(hi <= kv_len, hi, 0)


@triton.jit
def deal(kv_start, kv_end, place, batch, q_len, kv_len, shares, splits, STEP: tl.constexpr):
    """The sequence and the share with the global index `place`, and the number of shares of that
    sequence.

    Shares have about the same length. A sequence has at least one and at most `splits` of them, so
    there are at most `shares` + batch. For indices past the last share, the sequence is `batch`.
    """
    sequences = tl.arange(0, SEQUENCES)
    rows = tl.arange(0, ROWS)[None, :]
    valid = (sequences < batch)[:, None] & (rows < q_len)
    lo, hi = attended(kv_start, kv_end, sequences[:, None] * q_len + rows, valid, kv_len)
    start = tl.min(tl.where(lo < hi, lo, EMPTY_MIN), 1)
    end = tl.max(tl.where(lo < hi, hi, 0), 1)
    steps = tl.cdiv(tl.maximum(end - start, 0), STEP)
    length = tl.cdiv(tl.sum(steps.to(tl.int64), 0), shares).to(tl.int32)
    length = tl.maximum(length, tl.cdiv(tl.max(steps, 0), splits))
    length = tl.maximum(length, tl.cdiv(LEAST, STEP))
    parts = tl.where(sequences < batch, tl.maximum(tl.cdiv(steps, length), 1), 0)
    ends = tl.cumsum(parts, 0)
    before = (ends <= place) & (sequences < batch)
    b = tl.sum(before.to(tl.int32), 0)
    split = place - tl.max(tl.where(before, ends, 0), 0)
    return b, split, tl.sum(tl.where(sequences == b, parts, 0), 0)


@triton.jit
def share_of_keys(start, end, split, splits, STEP: tl.constexpr):
    """Share number `split` of the keys [start, end), as a range [begin, stop). It consists of whole
    steps counted from `start`, except that the last step stops at `end`."""
    steps = tl.cdiv(tl.maximum(end - start, 0), STEP)
    part = tl.cdiv(steps, splits)
    begin = tl.minimum(split * part, steps)
    stop = tl.minimum(begin + part, steps)
    # the length first: start + stop * STEP may exceed 2^31 if there are no keys
    length = tl.minimum(stop * STEP, tl.maximum(end - start, 0)) - begin * STEP
    begin = start + begin * STEP
    return begin, begin + length


@triton.jit
def pages_valid(block_table, begin, stop, pages, page_size):
    """Whether all pages of the keys [begin, stop) exist."""
    entries = tl.arange(0, ENTRIES)
    lost = tl.zeros([ENTRIES], tl.int32)
    last = tl.cdiv(stop, page_size)
    for first in tl.range(begin // page_size, last, ENTRIES):
        page = tl.load(block_table + first + entries, mask=first + entries < last, other=0)
        lost |= ((page < 0) | (page >= pages)).to(tl.int32)
    return tl.max(lost, 0) == 0


@triton.constexpr_function
def parts_of(native_fp8):
    """The number of parts of a tile of the cache: two for FP8, even and odd columns."""
    return 1 if native_fp8 is None else 2


class Cache(NamedTuple):
    """One key/value head of a sequence's cache. Key j is row first_row + j or, with pages, a row of
    the page given by `block_table`; there are `pages` pages in total. With FP8, qk_dim and v_dim
    count pairs of elements."""

    key: tl.tensor
    value: tl.tensor
    block_table: tl.tensor
    first_row: tl.tensor
    kv_head: tl.tensor
    pages: tl.tensor
    page_size: tl.tensor
    kv_heads: tl.tensor
    qk_dim: tl.tensor
    v_dim: tl.tensor
    key_scale: tl.tensor  # this head's, of page 0; None if the cache is not in FP8
    value_scale: tl.tensor
    scale_stride: tl.tensor  # from one page's scale to the next; 0: all pages share one


@triton.jit
def attend(
    acc, m, l, top, q, cache, lo, hi, begin, stop, skip, skipped, scale, soft_cap,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr, NATIVE: tl.constexpr, V_PARTS: tl.constexpr,
    PAGED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Processes the keys [begin, stop), except `skipped` keys from `skip` on. Without MASKED, these
    must be whole steps of keys that all rows attend to, in existing pages, and the first keys that
    the rows process; there must be no soft cap, and no scale that is negative or near 0.

    `q` and `acc` are tuples of a tile's parts. `scale` is one number, or one per row for a cache in
    FP8 (NATIVE is not None). With scales of pages, `acc` is divided by `top`, the row's largest
    weight so far, because float16 cannot represent weights below 2^-24."""
    # with pages, half of the stages fetch block table entries ahead of the rows
    DEPTH: tl.constexpr = 2 * STAGES - 1 if PAGED else STAGES
    BY_KEY: tl.constexpr = NATIVE is not None and PAGED
    PARTS: tl.constexpr = parts_of(NATIVE)
    scale2 = scale * LOG2E
    of_scores = scale2
    if NATIVE is not None:
        of_scores = scale2[:, None]
    cap2 = tl.where(soft_cap > 0, soft_cap, 1.0) * LOG2E
    cols = tl.arange(0, BLOCK_N)
    qk_dims = columns(QK_DIM // PARTS)
    V_COLUMNS: tl.constexpr = V_DIM // V_PARTS // PARTS
    v_dims = columns(V_COLUMNS)
    k_ptr = cache.key + cache.kv_head.to(tl.int64) * cache.qk_dim + qk_dims[None, :]
    v_ptr = cache.value + cache.kv_head.to(tl.int64) * cache.v_dim + v_dims[None, :]
    k_row = cache.kv_heads.to(tl.int64) * cache.qk_dim
    v_row = cache.kv_heads.to(tl.int64) * cache.v_dim
    for place in tl.range(begin, stop - skipped, BLOCK_N, num_stages=DEPTH):
        at = place
        if MASKED:
            at = tl.where(place < skip, place, place + skipped)
        keys = at + cols
        row = cache.first_row + keys
        readable = None
        if MASKED:
            readable = keys < stop
        if PAGED:
            entry = keys // cache.page_size
            if MASKED:
                page = tl.load(cache.block_table + entry, mask=readable, other=0)
                readable = readable & (page >= 0) & (page < cache.pages)
            else:
                page = tl.load(cache.block_table + entry)
            row = page.to(tl.int64) * cache.page_size + (keys - entry * cache.page_size)
        k = load_columns(k_ptr + row[:, None] * k_row, readable, cache.qk_dim, QK_DIM // PARTS)
        v = ()
        for i in tl.static_range(V_PARTS):
            at_part = v_ptr + i * V_COLUMNS + row[:, None] * v_row
            part = load_columns(at_part, readable, cache.v_dim - i * V_COLUMNS, V_COLUMNS)
            v = v + (part,)  # noqa: RUF005
        if NATIVE is not None:
            k = pairs_to_float16(k, NATIVE)
            v = pairs_to_float16(v[0], NATIVE)
        else:
            k = (k,)
        s = None
        for i in tl.static_range(PARTS):
            s = dot(q[i], tl.trans(k[i]), s, FLOAT32_PRODUCTS)
        if BY_KEY:
            of_page = page.to(tl.int64) * cache.scale_stride
            s *= load_scales(cache.key_scale + of_page, readable)[None, :]
        if MASKED:
            s = s * of_scores
            # a select instead of a branch: ptxas serialises wgmma around a branch
            s = tl.where(soft_cap > 0, tanh(s / cap2) * cap2, s)
            if PAGED:
                s = tl.where(readable[None, :], s, float("nan"))
            inside = (keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None])
            s = tl.where(inside, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # for a row without a key so far, 2^(-inf - 0) = 0 and not NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        if MASKED:
            p = tl.exp2(s - base[:, None])
            alpha = tl.exp2(m - base)
        else:
            # m is in units of s here. With a scaled m, the fused s * scale2 - m would contain the
            # rounding error of m, and the power would overflow for m beyond 2^31.
            exponents = (s - base[:, None]) * of_scores
            if BY_KEY:  # the maximum is a rounded product, so differences may exceed 0
                exponents = tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL)
            p = tl.exp2(exponents)
            alpha = tl.exp2((m - base) * scale2)
        l = l * alpha + tl.sum(p, 1)
        if BY_KEY:
            p *= load_scales(cache.value_scale + of_page, readable)[None, :]
            old_top = top * alpha
            top = tl.maximum(tl.maximum(old_top, tl.max(tl.abs(p), 1)), TINY)
            p *= (1.0 / top)[:, None]
            alpha = old_top / top
        sums = ()
        for i in tl.static_range(len(v)):
            part = dot(p.to(v[i].dtype), v[i], acc[i] * alpha[:, None], FLOAT32_PRODUCTS)
            sums = sums + (part,)  # noqa: RUF005
        acc = sums
        m = m_new
    if not MASKED:
        m = tl.where(m == float("-inf"), m, m * scale2)
    return acc, m, l, top


@triton.jit
def decode(
    query, key, value, kv_start, kv_end, block_table, key_scale, value_scale, workspace, partial,
    sums, scale, soft_cap, batch, q_len, kv_len, pages, page_size, table_width, heads, kv_heads,
    qk_eighths, v_eighths, splits, shares, tile_rows, has_tall, chunks_elsewhere, scale_rows,
    bfloat16_query,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr, NATIVE_FP8: tl.constexpr,
    PAGED: tl.constexpr, V_PARTS: tl.constexpr,
):  # fmt: skip
    """One share of one tile of rows. Programs that run at the same time read the keys of
    neighbouring heads."""
    group = heads // kv_heads
    FP8: tl.constexpr = NATIVE_FP8 is not None
    PARTS: tl.constexpr = parts_of(NATIVE_FP8)
    if FP8:  # head dims are multiples of 16, so that rows are 16-byte aligned
        qk_part = qk_eighths // 2 * 8
        v_part = v_eighths // 2 * 8
    else:
        qk_part = qk_eighths * 8
        v_part = v_eighths * 8
    qk_dim = qk_part * PARTS
    v_dim = v_part * PARTS
    SHORT: tl.constexpr = BLOCK_M <= FEW
    most = tl.where(tile_rows > 0, tile_rows, q_len) * group
    if SHORT:
        most = tl.where((tile_rows > 0) & (has_tall != 0), tl.minimum(most, FEW), most)
    tiles = tl.cdiv(most, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % tiles
    rest = pid // tiles
    kv_head = rest % kv_heads
    rest = rest // kv_heads
    tokens = q_len
    if tile_rows > 0:
        item = workspace + 2 * q_len.to(tl.int64) + rest.to(tl.int64) * ITEM
        b, tokens = tl.load(item), tl.load(item + 2)
        split, parts = tl.load(item + 3), tl.load(item + 4)
        first = tl.load(item + 1).to(tl.int64)
        short = tokens * group <= FEW
        elsewhere = (has_tall != 0) & (short != SHORT)
        elsewhere |= (chunks_elsewhere != 0) & (tl.load(item + 5) != 0)
        if elsewhere | (tile * BLOCK_M >= tokens * group):  # or no item
            return
    else:
        if shares > 0:
            b, split, parts = deal(
                kv_start, kv_end, rest, batch, q_len, kv_len, shares, splits, BLOCK_N
            )
        else:
            b, split, parts = rest // splits, rest % splits, splits
        if b >= batch:
            return
        first = b.to(tl.int64) * q_len

    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = member < tokens * group
    token = member // group
    bounds = first + token
    lo, hi = attended(kv_start, kv_end, bounds, valid, kv_len)
    some = lo < hi
    start = tl.min(tl.where(some, lo, EMPTY_MIN), 0)
    end = tl.max(tl.where(some, hi, 0), 0)
    begin, stop = share_of_keys(start, end, split, parts, BLOCK_N)

    # rows of the query are (batch, q_len, heads); `sums` and `partial` have these rows per split
    row = bounds * heads + kv_head * group + member % group
    rows = batch.to(tl.int64) * q_len * heads
    left = split * rows + row
    if tile_rows > 0:
        left += (rest.to(tl.int64) * tile_rows - first) * heads - split * rows
    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if split == parts - 1:  # for the splits that this sequence does not use
        for other in tl.range(parts, splits):
            tl.store(sums + other * rows + row, nothing, mask=valid)
    if begin >= stop:
        tl.store(sums + left, nothing, mask=valid)
    else:
        q_ptr = query + row[:, None] * qk_dim + PARTS * columns(QK_DIM // PARTS)[None, :]
        # column c of part i is column PARTS * c + i of the cache, or c + i * V_COLUMNS
        V_COLUMNS: tl.constexpr = V_DIM // V_PARTS // PARTS
        v_dims = PARTS * columns(V_COLUMNS)
        PART_STEP: tl.constexpr = V_COLUMNS if V_PARTS > 1 else 1
        q = ()
        for i in tl.static_range(PARTS):
            part = load_columns(q_ptr + i, some, qk_part, QK_DIM // PARTS)
            q = q + (part,)  # noqa: RUF005
        acc = ()
        for _ in tl.static_range(PARTS * V_PARTS):
            zero = tl.zeros([BLOCK_M, v_dims.shape[0]], tl.float32)
            acc = acc + (zero,)  # noqa: RUF005
        of_rows = scale
        scale_stride = None
        if FP8:
            q, unit = rows_to_float16(q, bfloat16_query)
            scale_stride = tl.where(scale_rows > 1, kv_heads, 0)
            key_scale += kv_head
            value_scale += kv_head
            of_sums = unit_of_bytes(NATIVE_FP8)
            scale *= unit_of_bytes(NATIVE_FP8)
            if page_size == 0:
                scale *= tl.load(key_scale + b.to(tl.int64) * scale_stride)
                of_sums *= tl.load(value_scale + b.to(tl.int64) * scale_stride)
            of_rows = scale * unit
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        full_lo = tl.max(tl.where(some, lo, 0), 0)
        full_hi = tl.min(tl.where(some, hi, EMPTY_MIN), 0)
        before = tl.cdiv(tl.maximum(full_lo - begin, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(begin + before, stop)
        full_keys = tl.maximum(tl.minimum(full_hi, stop) - full_begin, 0)
        full_end = full_begin + full_keys // BLOCK_N * BLOCK_N
        if FP8:
            full_end = tl.where((soft_cap > 0) | ~(scale > 0), full_begin, full_end)  # NaN, too
        else:  # with smaller scales, differences of scores may overflow before they are scaled
            full_end = tl.where((soft_cap > 0) | (scale < 1e-30), full_begin, full_end)
        if FLOAT32_PRODUCTS:  # two loops with float32 products would not fit in registers
            full_end = full_begin
        paged = page_size > 0 if PAGED is None else PAGED
        if paged:
            table = block_table + b.to(tl.int64) * table_width
            cache = Cache(
                key, value, table, b.to(tl.int64) * 0, kv_head, pages, page_size, kv_heads,
                qk_part, v_part, key_scale, value_scale, scale_stride,
            )  # fmt: skip
            top = None
            if FP8:
                top = tl.full([BLOCK_M], TINY, tl.float32)
            if not FLOAT32_PRODUCTS:
                if not pages_valid(table, full_begin, full_end, pages, page_size):
                    full_end = full_begin
                acc, m, l, top = attend(
                    acc, m, l, top, q, cache, lo, hi, full_begin, full_end, full_begin, 0, of_rows,
                    soft_cap, QK_DIM, V_DIM, BLOCK_N, STAGES, FLOAT32_PRODUCTS, NATIVE_FP8,
                    V_PARTS, True, False,
                )  # fmt: skip
            acc, m, l, top = attend(
                acc, m, l, top, q, cache, lo, hi, begin, stop, full_begin, full_end - full_begin,
                of_rows, soft_cap, QK_DIM, V_DIM, BLOCK_N, STAGES, FLOAT32_PRODUCTS, NATIVE_FP8,
                V_PARTS, True, True,
            )  # fmt: skip
            if FP8:
                acc = (acc[0] * top[:, None], acc[1] * top[:, None])
        else:
            cache = Cache(
                key, value, block_table, b.to(tl.int64) * kv_len, kv_head, pages, page_size,
                kv_heads, qk_part, v_part, key_scale, value_scale, scale_stride,
            )  # fmt: skip
            if not FLOAT32_PRODUCTS:
                acc, m, l, _ = attend(
                    acc, m, l, None, q, cache, lo, hi, full_begin, full_end, full_begin, 0, of_rows,
                    soft_cap, QK_DIM, V_DIM, BLOCK_N, STAGES, FLOAT32_PRODUCTS, NATIVE_FP8,
                    V_PARTS, False, False,
                )  # fmt: skip
            acc, m, l, _ = attend(
                acc, m, l, None, q, cache, lo, hi, begin, stop, full_begin, full_end - full_begin,
                of_rows, soft_cap, QK_DIM, V_DIM, BLOCK_N, STAGES, FLOAT32_PRODUCTS, NATIVE_FP8,
                V_PARTS, False, True,
            )  # fmt: skip
        has_keys = some & (l != 0.0)  # True for NaN, so that it reaches the result
        for i in tl.static_range(len(acc)):
            result = acc[i] / tl.where(has_keys, l, 1.0)[:, None]
            if FP8:
                result *= of_sums
            column = v_dims + i * PART_STEP
            # v_dim is even with FP8: one comparison serves a pair, in fewer registers
            inside = column < v_dim if V_PARTS > 1 else v_dims < v_dim
            tl.store(
                partial + left[:, None] * v_dim + column[None, :],
                result,
                mask=valid[:, None] & inside[None, :],
            )
        tl.store(sums + left, tl.where(has_keys, m + tl.log2(l), float("-inf")), mask=valid)


@triton.jit
def decode_combine(
    partial, sums, sinks, kv_start, kv_end, workspace, out, lse, has_sinks, batch, sink_batch,
    q_len, kv_len, heads, v_eighths, splits, tile_rows, chunks_elsewhere, room,
    V_DIM: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merges the shares of one row of (batch, q_len, heads). With chunks_elsewhere, the programs
    take turns at the heads of the listed tokens, and at tokens that are padding."""
    place = tl.program_id(0).to(tl.int64)
    row = place
    listed = workspace + 2 * q_len.to(tl.int64) + room.to(tl.int64) * ITEM
    if chunks_elsewhere != 0:
        row = row_of_token(listed, place, q_len, heads)
    while row >= 0:
        merge(
            partial, sums, sinks, kv_start, kv_end, workspace, out, lse, has_sinks, batch,
            sink_batch, q_len, kv_len, heads, v_eighths, splits, tile_rows, row, V_DIM, SPLITS,
            STEP,
        )  # fmt: skip
        row = tl.full([], -1, tl.int64)
        if chunks_elsewhere != 0:
            place += tl.num_programs(0)
            row = row_of_token(listed, place, q_len, heads)
    if chunks_elsewhere != 0:
        header = workspace + 3 * q_len.to(tl.int64) + room.to(tl.int64) * ITEM
        clear_padding(header, out, lse, q_len, heads, v_eighths * 8)


@triton.jit
def clear_padding(header, out, lse, q_len, heads, v_dim):
    """Writes the results of tokens outside of [header[1], header[2]), which no sequence has."""
    first = tl.load(header + 1)
    end = tl.load(header + 2)
    elements = tl.arange(0, CLEARED)
    nth = tl.program_id(0)
    while nth < q_len - (end - first):
        token = tl.where(nth < first, nth, nth + end - first)
        size = heads * v_dim
        for at in tl.range(0, size, CLEARED):
            zeros = tl.zeros_like(elements).to(out.dtype.element_ty)
            place = token.to(tl.int64) * size + at + elements
            tl.store(out + place, zeros, mask=at + elements < size)
        for at in tl.range(0, heads, CLEARED):
            place = (at + elements).to(tl.int64) * q_len + token
            tl.store(lse + place, float("-inf"), mask=at + elements < heads)
        nth += tl.num_programs(0)


@triton.jit
def row_of_token(listed, place, q_len, heads):
    """The row of the place-th head of all listed tokens; negative beyond them."""
    token = tl.load(listed + place // heads, mask=place < q_len.to(tl.int64) * heads, other=-1)
    return token.to(tl.int64) * heads + place % heads


@triton.jit
def merge(
    partial, sums, sinks, kv_start, kv_end, workspace, out, lse, has_sinks, batch, sink_batch,
    q_len, kv_len, heads, v_eighths, splits, tile_rows, row,
    V_DIM: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merges the shares of a row: at most SPLITS, STEP at a time. A row that attends to nothing,
    such as padding, reads none."""
    v_dim = v_eighths * 8
    rows = batch.to(tl.int64) * q_len * heads  # per split
    head = row % heads
    bounds = row // heads
    b = bounds // q_len
    token = bounds % q_len
    lo = tl.maximum(tl.load(kv_start + bounds), 0)
    hi = tl.load(kv_end + bounds)
    v_dims = columns(V_DIM)
    out += row * v_dim + v_dims
    lse += (b * heads + head) * q_len + token
    if lo >= hi:
        tl.store(out, tl.zeros_like(v_dims).to(out.dtype.element_ty), mask=v_dims < v_dim)
        tl.store(lse, float("-inf"))
    else:
        step = rows
        place = row
        count = splits
        if tile_rows > 0:
            step = tile_rows.to(tl.int64) * heads
            place = tl.load(workspace + 2 * bounds).to(tl.int64) * heads + head
            count = tl.load(workspace + 2 * bounds + 1)
        sums += place
        partial += place * v_dim
        every = tl.arange(0, SPLITS)
        parts = tl.load(sums + every * step, mask=every < count, other=float("-inf"))
        row_max = tl.max(parts, 0)
        has_keys = tl.max((parts != float("-inf")).to(tl.int32), 0) > 0  # True for NaN
        sink = float("-inf")
        if has_sinks != 0:
            sink = tl.load(sinks + (b % sink_batch) * heads + head) * LOG2E
        row_max = tl.maximum(row_max, sink)
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        # a sink of +inf takes all the weight; inf - inf would be NaN
        of_sink = tl.where(sink == base, 1.0, tl.exp2(sink - base))
        total = tl.sum(tl.exp2(parts - base), 0) + of_sink

        acc = tl.zeros([v_dims.shape[0]], tl.float32)
        for first in tl.range(0, tl.max(tl.where(parts != float("-inf"), every + 1, 0), 0), STEP):
            some = first + tl.arange(0, STEP)
            part = tl.load(sums + some * step, mask=some < count, other=float("-inf"))
            full = part != float("-inf")
            values = tl.load(
                partial + (some * step)[:, None] * v_dim + v_dims[None, :],
                mask=full[:, None] & (v_dims[None, :] < v_dim),
                other=0.0,
            )
            acc += tl.sum(values * tl.exp2(part - base)[:, None], 0)
        result = tl.where(has_keys, acc / tl.where(has_keys, total, 1.0), 0.0)
        logsumexp = tl.where(has_keys, (base + tl.log2(total)) * LN2, float("-inf"))
        result = tl.where(hi > kv_len, float("nan"), result)
        logsumexp = tl.where(hi > kv_len, float("nan"), logsumexp)
        tl.store(out, result.to(out.dtype.element_ty), mask=v_dims < v_dim)
        tl.store(lse, logsumexp)
