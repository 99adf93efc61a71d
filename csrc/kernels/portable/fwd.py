"""Forward attention over row ranges, for every GPU that Triton serves.

Online softmax (FlashAttention-2, arXiv 2307.08691): with m the running maximum of the logits in
base 2 (with a bias array in base e: row_sums.py),
    p = 2^(logit - m),   l = l * alpha + sum(p),   acc = acc * alpha + p v,
    alpha = 2^(m_old - m_new)
The order of the key blocks does not matter, so partial blocks come first and one mask-free loop
does the rest.

One function is all forward kernels of the table. `forward` has a positive scale and nothing else
(the caller moves a sign into the query); `forward_fallback` has all that changes scores
(score_mods.py), block masks, any head dim up to a compiled one, and `row_max`, the largest logit of
every row, unless the pointer is null; `forward_bias` has besides a bias that is an array (bias.py)
and dropout (dropout.py), and one loop for all blocks where its row of the table has one stage. What
a kernel has not is None (csrc/aot/tiles_fallback.py).
"""

import triton
import triton.language as tl
from portable.bias import bias_of, bias_tile
from portable.block_lists import BlockMask, keep_in_block_mask, mask_of_head
from portable.dropout import drop, dropout_of
from portable.kv_ranges import (
    columns,
    keep,
    key_range,
    load_rows,
    segments_of,
    size_of,
    split,
    store_rows,
    tile_of_program,
)
from portable.row_sums import LEAST, power, store_sums
from portable.score_mods import (
    bias_positions_of,
    distances,
    dot,
    load_positions,
    logits,
    score_mods_of,
    slope_of,
)
from portable.steps import (
    aligned_start,
    full_place,
    in_one_loop,
    load_pair,
    pair_of,
    partial_place,
    partial_steps,
    pointers_of,
    steps_of,
)


@triton.jit
def attend(
    acc, m, l, q, kv, inside, far, slope, mods, bias, dropout, head, rows, first_row,
    first_key, cols, MASKED: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """One block of keys. kv: (N, Dqk) and (N, Dv); `inside` (M, N) where MASKED."""
    BLOCK_N: tl.constexpr = cols.shape[0]
    k, v = kv
    added = bias_tile(bias, head, first_row, first_key, rows.shape[0], BLOCK_N, 0)
    x = dot(q, tl.trans(k), None, FLOAT32_PRODUCTS)
    factor = 1.0
    if mods.scales is None and mods.cap is None and far is None:
        if added is None:  # positive: the largest score has the largest logit
            factor = mods.scale
        else:
            x = x * mods.scale + added
    else:
        _, x = logits(x, far, slope, mods)
        if added is not None:
            x += added
    if MASKED:
        x = tl.where(inside, x, float("-inf"))
    m_new = tl.maximum(m, tl.max(x, 1) * factor)
    p = power(x * factor - m_new[:, None], bias.array)
    alpha = power(m - m_new, bias.array)
    l = l * alpha + tl.sum(p, 1)
    p = drop(p, dropout, head, rows, first_key, BLOCK_N, 0)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None], FLOAT32_PRODUCTS)
    return acc, m_new, l


@triton.jit
def forward(
    query, key, value, out, lse, row_max, kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks,
    q_order, block_mask, q_block_lists, scales, slopes, q_bias_pos, kv_bias_pos, bias,
    dropout_streams, dropout_rows, scale, soft_cap, inverse_keep, mask_mode, bias_kind,
    bias_axes, dropout_threshold, dropout_rows_batch, batch, mask_batch, scales_batch, bias_batch,
    block_mask_batch, block_mask_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads,
    row_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Rows of query and out are `row_heads` heads apart (None: `heads`), of which this is about
    `heads`."""
    group = heads // kv_heads
    head, kv_head, b, mask_b, row = tile_of_program(
        q_order, batch, mask_batch, tl.cdiv(q_len, 128), group, kv_heads, BLOCK_M
    )
    if row >= q_len:
        return
    start, end, full_lo, full_hi, segment_checked = key_range(q_blocks, mask_b, row, q_len, BLOCK_M)
    start = aligned_start(start, dropout_threshold, bias, bias_kind)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
    mask = BlockMask(
        block_mask, q_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block, q_len,
        kv_len,
    )  # fmt: skip
    head_mask = mask_of_head(mask, mask_b, head)
    walk = steps_of(
        start, steps, full_begin, full_end, mask, mask_b, head, row // 128, tl.cdiv(q_len, 128),
        tl.cdiv(kv_len, 64), BLOCK_N,
    )  # fmt: skip

    if bias is not None and STAGES == 1:
        walk = in_one_loop(walk)

    rows = row + tl.arange(0, BLOCK_M)
    there = rows < q_len
    mask_row = mask_b.to(tl.int64) * q_len
    lo = tl.load(kv_start + mask_row + rows, mask=there, other=0)
    hi = tl.load(kv_end + mask_row + rows, mask=there, other=0)
    segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)

    qk = size_of(qk_dim, QK_DIM)
    v = size_of(v_dim, V_DIM)
    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    row_heads = size_of(row_heads, heads)
    first = (b.to(tl.int64) * q_len + row) * row_heads + head
    local = tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * row_heads
    # rows that attend nothing are not read
    q = load_rows(
        query + first * qk + local * qk + qk_dims[None, :], (hi > lo)[:, None], qk_dim, QK_DIM
    )

    kv_first = (b.to(tl.int64) * kv_len + walk.origin) * kv_heads + kv_head
    cols = tl.arange(0, BLOCK_N)
    pointers = pointers_of(key, value, kv_first, kv_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_N)
    pair = pair_of(pointers, kv_heads, qk_dim, v_dim, walk.unit, QK_DIM, V_DIM)

    scale, mods = score_mods_of(scale, scales, scales_batch, soft_cap, bias_batch, b, bias)
    slope = slope_of(slopes, bias_batch, b, heads, head, bias)
    bias_pos = bias_positions_of(q_bias_pos, kv_bias_pos, bias_batch, b, q_len, kv_len)
    q_at = load_positions(bias_pos.q, bias_pos.q_count, rows)
    added = bias_of(bias, bias_kind, bias_axes, b, heads, q_len, kv_len)
    dropout = dropout_of(
        dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch, inverse_keep, b,
        heads, q_len,
    )  # fmt: skip

    # where a row has met no key yet, the least number: -inf less that is -inf, not NaN
    m = tl.full([BLOCK_M], LEAST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, v_dims.shape[0]], tl.float32)
    for i in tl.range(0, partial_steps(walk), num_stages=1):
        place = partial_place(walk, mask, i, BLOCK_N)
        first_key = walk.origin + place * walk.unit
        keys = first_key + cols
        # keys past the end of the tile's range are not read: their values never meet this tile
        kv = load_pair(pair, place, (keys < end)[:, None], QK_DIM, V_DIM)
        inside = keep(rows, keys, lo, hi, segment_checked, segments, 0)
        inside = keep_in_block_mask(inside, mask, head_mask, rows, keys, place, BLOCK_N, 0)
        far = distances(q_at, load_positions(bias_pos.kv, bias_pos.kv_count, keys))
        acc, m, l = attend(
            acc, m, l, q, kv, inside, far, slope, mods, added, dropout, head, rows, row,
            first_key, cols, True, FLOAT32_PRODUCTS,
        )  # fmt: skip
    if walk.listed is None:
        if bias is None or STAGES > 1:
            for place in tl.range(full_begin, full_end, num_stages=STAGES):
                first_key = walk.origin + place * walk.unit
                kv = load_pair(pair, place, None, QK_DIM, V_DIM)
                acc, m, l = attend(
                    acc, m, l, q, kv, None, None, None, mods, added, dropout, head, rows, row,
                    first_key, cols, False, FLOAT32_PRODUCTS,
                )  # fmt: skip
    elif bias is None or STAGES > 1:
        place = full_place(walk, mask, 0, start + full_begin * BLOCK_N, BLOCK_N)
        for i in tl.range(0, walk.full, num_stages=STAGES):
            kv = load_pair(pair, place, None, QK_DIM, V_DIM)
            far = distances(q_at, load_positions(bias_pos.kv, bias_pos.kv_count, place + cols))
            acc, m, l = attend(
                acc, m, l, q, kv, None, far, slope, mods, added, dropout, head, rows, row, place,
                cols, False, FLOAT32_PRODUCTS,
            )  # fmt: skip
            place = full_place(walk, mask, i + 1, place + BLOCK_N, BLOCK_N)

    # none of a row's keys may be in a block mask; a NaN is attended: it must reach the result
    attended = (hi > lo) & (l != 0.0)
    result = tl.where(attended[:, None], acc / tl.where(attended, l, 1.0)[:, None], 0.0)
    if dropout_threshold is not None:
        result *= inverse_keep
    out_rows = out + first * v + local * v + v_dims[None, :]
    store_rows(out_rows, result.to(out.dtype.element_ty), there[:, None], v_dim, V_DIM)
    stat = (b.to(tl.int64) * heads + head) * q_len
    store_sums(lse, row_max, stat, rows, there, m, l, attended, bias)
