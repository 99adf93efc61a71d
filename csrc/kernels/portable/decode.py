"""Attention of a few new rows over a long cache of keys and values: the keys are split, the parts
merged.

`decode` and `decode_tall` (FlashAttention-2's recurrence, arXiv 2307.08691, split over keys as in
Flash-Decoding, pytorch.org/blog/ flash-decoding): a program takes one key/value head of one
sequence, a tile of the rows of its group (rows of one query token are beside each other), and a
share of the keys that those rows attend. It leaves the normalised float32 sum of the values and the
share's log-sum-exp, base 2. A share without keys leaves -inf and its values are never read. Every
sequence has `splits` equal shares or, where `shares` is not 0, as many as its length needs: every
program works out from the ranges which of whose it is. Keys that all rows of the tile attend come
first, without a mask. `decode_combine` merges the shares of a row, adds the sink to the sum and
writes the results.

A cache is (batch, kv_len, ...), or pages that `block_table` orders; page_size is 0 for the first.
Head dims are known at run time only, in eighths, which tells the compiler that rows begin at
multiples of 16 bytes; the tile's columns behind them are not read. A row whose range ends behind
the cache, or meets a page that is not there, is NaN.

Keys and values in float8_e4m3fn (`decode_fp8`, `decode_tall_fp8`, and of pages
`decode_fp8_pages`, `decode_tall_fp8_pages`) are pairs of elements, which
become two tiles of float16 in registers (fp8.py): the even columns and the odd ones. The query and
the sums have the same two parts; other dtypes have one. Scales are (scale_rows, kv_heads): of all
keys, of a sequence or, of pages, of each page. Those of a sequence multiply its scores and its
sums. Those of pages multiply every key's score and probability.

With V_PARTS above 1, values and their sums are so many tiles of neighbouring columns, each no wider
than BLOCK_M: then Triton gives each warp rows of its own, and not columns of all rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.arithmetic import LOG2E, dot, tanh
from portable.fp8 import pairs_to_float16, rows_to_float16, unit_of_bytes
from portable.kv_ranges import EMPTY_MIN, columns

LN2 = tl.constexpr(0.6931471805599453)
ENTRIES = tl.constexpr(128)  # of a block table, at once
SEQUENCES = tl.constexpr(64)  # that shares are dealt to, at most: csrc/ffi/decode.cc
ROWS = tl.constexpr(16)  # new rows of a sequence, at most
LEAST = tl.constexpr(128)  # keys of a share: below, a program costs more than its keys
TINY = tl.constexpr(2.0**-100)  # what no sum of values that matters is below


@triton.jit
def load_columns(pointers, there, dim, DIM: tl.constexpr):
    """A tile (rows, columns(DIM)) of rows that have `dim` columns: 0 behind them, and in rows that
    are not `there` (None: all are)."""
    real = columns(DIM)[None, :] < dim
    if there is not None:
        real = there[:, None] & real
    return tl.load(pointers, mask=real, other=0.0)


@triton.jit
def load_scales(pointers, there):
    """0 where none is `there` (None: all are)."""
    if there is None:
        scales = tl.load(pointers)
    else:
        scales = tl.load(pointers, mask=there, other=0.0)
    return scales


@triton.jit
def attended(kv_start, kv_end, at, there, kv_len):
    """The keys [lo, hi) of rows of `at`; none of a row that ends behind the cache: decode_combine
    makes NaN of it."""
    lo = tl.maximum(tl.load(kv_start + at, mask=there, other=0), 0)
    hi = tl.load(kv_end + at, mask=there, other=0)
    return lo, tl.where(hi <= kv_len, hi, 0)


@triton.jit
def deal(kv_start, kv_end, place, batch, q_len, kv_len, shares, splits, STEP: tl.constexpr):
    """Which sequence and which of its shares is dealt to `place`, and how many shares the sequence
    has.

    All have about the same length, which makes them at most `shares` + batch: at least one of a
    sequence, at most `splits`. Places behind the last share get sequence `batch`.
    """
    sequences = tl.arange(0, SEQUENCES)
    rows = tl.arange(0, ROWS)[None, :]
    there = (sequences < batch)[:, None] & (rows < q_len)
    lo, hi = attended(kv_start, kv_end, sequences[:, None] * q_len + rows, there, kv_len)
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
    """The split's part [begin, stop) of the keys [start, end), in whole steps from `start` but for
    the last."""
    steps = tl.cdiv(tl.maximum(end - start, 0), STEP)
    part = tl.cdiv(steps, splits)
    begin = tl.minimum(split * part, steps)
    stop = tl.minimum(begin + part, steps)
    # in two steps, since start + stop * STEP may reach over 2^31 where there is no key at all
    length = tl.minimum(stop * STEP, tl.maximum(end - start, 0)) - begin * STEP
    begin = start + begin * STEP
    return begin, begin + length


@triton.jit
def pages_there(block_table, begin, stop, pages, page_size):
    """Whether all pages of the keys [begin, stop) are there."""
    entries = tl.arange(0, ENTRIES)
    lost = tl.zeros([ENTRIES], tl.int32)
    last = tl.cdiv(stop, page_size)
    for first in tl.range(begin // page_size, last, ENTRIES):
        page = tl.load(block_table + first + entries, mask=first + entries < last, other=0)
        lost |= ((page < 0) | (page >= pages)).to(tl.int32)
    return tl.max(lost, 0) == 0


@triton.constexpr_function
def parts_of(native_fp8):
    """How many parts a tile of the cache is cut into."""
    return 1 if native_fp8 is None else 2


class Cache(NamedTuple):
    """One head of a sequence in the cache, or in pages. Key j is row first_row + j, or in the page
    that `block_table` says; `pages` are there in all.
    In FP8, keys and values are pairs, which their dims count."""

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
    key_scale: tl.tensor  # of this head, in page 0; None if the cache is not in FP8
    value_scale: tl.tensor
    scale_stride: tl.tensor  # from a page's scale to the next; 0: all have one


@triton.jit
def attend(
    acc, m, l, top, q, cache, lo, hi, begin, stop, skip, skipped, scale, soft_cap,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr, NATIVE: tl.constexpr, V_PARTS: tl.constexpr,
    PAGED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys [begin, stop), but for `skipped` of them at `skip`. Not MASKED: whole steps of keys
    that all rows attend, of pages that are there, and the first keys of these rows; no soft cap,
    and no scale near 0 or below.

    `q` and `acc` are tuples of a tile's parts. `scale` is one number, or one of each row for a
    cache in FP8 (NATIVE is not None). With scales of keys, `acc` is divided by `top`, a row's
    largest weight so far: float16 holds no weight below 2^-24."""
    DEPTH: tl.constexpr = (
        2 * STAGES - 1 if PAGED else STAGES
    )  # half of them fetch entries of the block table ahead of their rows
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
            # selected and not branched around: ptxas serialises wgmma around a branch
            s = tl.where(soft_cap > 0, tanh(s / cap2) * cap2, s)
            if PAGED:
                s = tl.where(readable[None, :], s, float("nan"))
            inside = (keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None])
            s = tl.where(inside, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # a row that has met no key yet: 2^(-inf - 0) = 0, not NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        if MASKED:
            p = tl.exp2(s - base[:, None])
            alpha = tl.exp2(m - base)
        else:
            # m is in units of s here: a fused s * scale2 - m would keep what m lost by rounding,
            # and overflow behind 2^31
            exponents = (s - base[:, None]) * of_scores
            if BY_KEY:  # here, too, the largest is a rounded product
                exponents = tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL)
            p = tl.exp2(exponents)
            alpha = tl.exp2((m - base) * scale2)
        l = l * alpha + tl.sum(p, 1)
        if BY_KEY:
            p *= load_scales(cache.value_scale + of_page, readable)[None, :]
            fading = top * alpha
            top = tl.maximum(tl.maximum(fading, tl.max(tl.abs(p), 1)), TINY)
            p *= (1.0 / top)[:, None]
            alpha = fading / top
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
def share(
    query, key, value, kv_start, kv_end, block_table, key_scale, value_scale, partial, sums,
    scale, soft_cap, batch, q_len, kv_len, pages, page_size, table_width, heads, kv_heads,
    qk_eighths, v_eighths, splits, shares, scale_rows, bfloat16_query,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr, NATIVE_FP8: tl.constexpr,
    PAGED: tl.constexpr, V_PARTS: tl.constexpr,
):  # fmt: skip
    """One program of `decode`. Programs that run together read neighbouring heads' keys."""
    group = heads // kv_heads
    FP8: tl.constexpr = NATIVE_FP8 is not None
    PARTS: tl.constexpr = parts_of(NATIVE_FP8)
    if FP8:  # multiples of 16, for whole 16 bytes
        qk_part = qk_eighths // 2 * 8
        v_part = v_eighths // 2 * 8
    else:
        qk_part = qk_eighths * 8
        v_part = v_eighths * 8
    qk_dim = qk_part * PARTS
    v_dim = v_part * PARTS
    tiles = tl.cdiv(q_len * group, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % tiles
    rest = pid // tiles
    kv_head = rest % kv_heads
    rest = rest // kv_heads
    if shares > 0:
        b, split, parts = deal(
            kv_start, kv_end, rest, batch, q_len, kv_len, shares, splits, BLOCK_N
        )
    else:
        b, split, parts = rest // splits, rest % splits, splits
    if b >= batch:
        return

    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = member < q_len * group
    token = member // group
    bounds = b.to(tl.int64) * q_len + token
    lo, hi = attended(kv_start, kv_end, bounds, there, kv_len)
    some = lo < hi
    start = tl.min(tl.where(some, lo, EMPTY_MIN), 0)
    end = tl.max(tl.where(some, hi, 0), 0)
    begin, stop = share_of_keys(start, end, split, parts, BLOCK_N)

    # (batch, q_len, heads): rows of the query, of `sums` and, times the number of splits, of
    # `partial`
    row = bounds * heads + kv_head * group + member % group
    rows = batch.to(tl.int64) * q_len * heads
    left = split * rows + row
    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if split == parts - 1:  # for the shares that this sequence has not
        for other in tl.range(parts, splits):
            tl.store(sums + other * rows + row, nothing, mask=there)
    if begin >= stop:
        tl.store(sums + left, nothing, mask=there)
    else:
        q_ptr = query + row[:, None] * qk_dim + PARTS * columns(QK_DIM // PARTS)[None, :]
        # column of part i: PARTS * c + i, or c + i * V_COLUMNS
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
            full_end = tl.where((soft_cap > 0) | ~(scale > 0), full_begin, full_end)  # or NaN
        else:  # of smaller scales, differences of scores may overflow before they are scaled
            full_end = tl.where((soft_cap > 0) | (scale < 1e-30), full_begin, full_end)
        if FLOAT32_PRODUCTS:  # two loops of these products would not fit in registers
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
                if not pages_there(table, full_begin, full_end, pages, page_size):
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
        met = some & (l != 0.0)  # a NaN is met: it must reach the result
        for i in tl.static_range(len(acc)):
            result = acc[i] / tl.where(met, l, 1.0)[:, None]
            if FP8:
                result *= of_sums
            column = v_dims + i * PART_STEP
            inside = column < v_dim if V_PARTS > 1 else v_dims < v_dim  # of pairs: fewer registers
            tl.store(
                partial + left[:, None] * v_dim + column[None, :],
                result,
                mask=there[:, None] & inside[None, :],
            )
        tl.store(sums + left, tl.where(met, m + tl.log2(l), float("-inf")), mask=there)


@triton.jit
def decode(
    query, key, value, kv_start, kv_end, block_table, key_scale, value_scale, partial, sums,
    scale, soft_cap, batch, q_len, kv_len, pages, page_size, table_width, heads, kv_heads,
    qk_eighths, v_eighths, splits, shares, scale_rows, bfloat16_query,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr, NATIVE_FP8: tl.constexpr,
    PAGED: tl.constexpr, V_PARTS: tl.constexpr,
):  # fmt: skip
    share(
        query, key, value, kv_start, kv_end, block_table, key_scale, value_scale, partial, sums,
        scale, soft_cap, batch, q_len, kv_len, pages, page_size, table_width, heads, kv_heads,
        qk_eighths, v_eighths, splits, shares, scale_rows, bfloat16_query, QK_DIM, V_DIM, BLOCK_M,
        BLOCK_N, STAGES, FLOAT32_PRODUCTS, NATIVE_FP8, PAGED, V_PARTS,
    )  # fmt: skip


@triton.jit
def decode_tall(
    query, key, value, kv_start, kv_end, block_table, key_scale, value_scale, partial, sums,
    scale, soft_cap, batch, q_len, kv_len, pages, page_size, table_width, heads, kv_heads,
    qk_eighths, v_eighths, splits, shares, scale_rows, bfloat16_query,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr, NATIVE_FP8: tl.constexpr,
    PAGED: tl.constexpr, V_PARTS: tl.constexpr,
):  # fmt: skip
    """The same for groups of more rows than a tile of `decode` has: another row of the table."""
    share(
        query, key, value, kv_start, kv_end, block_table, key_scale, value_scale, partial, sums,
        scale, soft_cap, batch, q_len, kv_len, pages, page_size, table_width, heads, kv_heads,
        qk_eighths, v_eighths, splits, shares, scale_rows, bfloat16_query, QK_DIM, V_DIM, BLOCK_M,
        BLOCK_N, STAGES, FLOAT32_PRODUCTS, NATIVE_FP8, PAGED, V_PARTS,
    )  # fmt: skip


@triton.jit
def decode_combine(
    partial, sums, sinks, kv_start, kv_end, out, lse, has_sinks, batch, sink_batch, q_len, kv_len,
    heads, v_eighths, splits,
    V_DIM: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One row (batch, q_len, heads): at most SPLITS shares, STEP at once."""
    v_dim = v_eighths * 8
    rows = batch.to(tl.int64) * q_len * heads  # of one split
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    bounds = row // heads
    b = bounds // q_len
    token = bounds % q_len
    lo = tl.maximum(tl.load(kv_start + bounds), 0)
    hi = tl.load(kv_end + bounds)

    every = tl.arange(0, SPLITS)
    parts = tl.load(sums + every * rows + row, mask=every < splits, other=float("-inf"))
    row_max = tl.max(parts, 0)
    met = tl.max((parts != float("-inf")).to(tl.int32), 0) > 0  # NaN included
    sink = float("-inf")
    if has_sinks != 0:
        sink = tl.load(sinks + (b % sink_batch) * heads + head) * LOG2E
    row_max = tl.maximum(row_max, sink)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    # a sink of +inf takes everything: inf - inf would be NaN
    total = tl.sum(tl.exp2(parts - base), 0) + tl.where(sink == base, 1.0, tl.exp2(sink - base))

    v_dims = columns(V_DIM)
    acc = tl.zeros([v_dims.shape[0]], tl.float32)
    for first in tl.range(0, tl.max(tl.where(parts != float("-inf"), every + 1, 0), 0), STEP):
        some = first + tl.arange(0, STEP)
        part = tl.load(sums + some * rows + row, mask=some < splits, other=float("-inf"))
        full = part != float("-inf")
        values = tl.load(
            partial + (some * rows + row)[:, None] * v_dim + v_dims[None, :],
            mask=full[:, None] & (v_dims[None, :] < v_dim),
            other=0.0,
        )
        acc += tl.sum(values * tl.exp2(part - base)[:, None], 0)
    result = tl.where(met, acc / tl.where(met, total, 1.0), 0.0)
    logsumexp = tl.where(met, (base + tl.log2(total)) * LN2, float("-inf"))
    beyond = (lo < hi) & (hi > kv_len)
    result = tl.where(beyond, float("nan"), result)
    logsumexp = tl.where(beyond, float("nan"), logsumexp)
    tl.store(out + row * v_dim + v_dims, result.to(out.dtype.element_ty), mask=v_dims < v_dim)
    tl.store(lse + (b * heads + head) * q_len + token, logsumexp)
