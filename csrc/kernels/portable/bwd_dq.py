"""Backward attention over row ranges, for every GPU that Triton serves: dQ, and of every row its
part of the gradients of what changes scores. bwd.py has the formulas.

    dscale = sum(ds * s),    dslope = -sum(dlogit * |i - j|)    of every row: `score_grads`

One function is the plain kernel and the fallback one, as in fwd.py. Rows of which the forward says
that they attend nothing (lse -inf) are not read.
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
from portable.row_sums import attending, load_sums, pointer_to_sums, probabilities, row_sums
from portable.score_mods import (
    bias_positions_of,
    distances,
    dot,
    load_positions,
    logits,
    score_mods_of,
    slope_of,
    through_cap,
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
def dq_step(
    dq, grads, q, do, kv, sums, dlt, inside, far, slope, mods, bias, dropout, head, rows,
    first_row, first_key, cols, has_score_grads, MASKED: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """One block of keys. `grads`: of every row, those of scale and of slope."""
    k, v = kv
    BLOCK_N: tl.constexpr = cols.shape[0]
    added = bias_tile(bias, head, first_row, first_key, rows.shape[0], BLOCK_N, 0)
    s = dot(q, tl.trans(k), None, FLOAT32_PRODUCTS)
    capped, x = logits(s, far, slope, mods)
    if added is not None:
        x += added
    p = probabilities(x, sums, 1)
    dp = dot(do, tl.trans(v), None, FLOAT32_PRODUCTS)
    if dropout.threshold is not None:
        dp = drop(dp * dropout.inverse_keep, dropout, head, rows, first_key, BLOCK_N, 0)
    dlogit = p * (dp - dlt[:, None])
    ds = through_cap(dlogit, capped, mods)
    if MASKED:
        ds = tl.where(inside, ds, 0.0)
    dscale, dslope = grads
    if has_score_grads is not None and has_score_grads != 0:
        by_scale = ds * s
        by_slope = dlogit * far
        if MASKED:
            by_scale = tl.where(inside, by_scale, 0.0)
            by_slope = tl.where(inside, by_slope, 0.0)
        dscale += tl.sum(by_scale, 1)
        dslope -= tl.sum(by_slope, 1)
    return dot(ds.to(k.dtype), k, dq, FLOAT32_PRODUCTS), (dscale, dslope)


@triton.jit
def backward_dq(
    query, key, value, dout, lse, delta, dq, score_grads, kv_start, kv_end, q_ids, kv_ids, q_pos,
    kv_pos, q_blocks, q_order, block_mask, q_block_lists, scales, slopes, q_bias_pos, kv_bias_pos,
    bias, dropout_streams, dropout_rows, scale, soft_cap, inverse_keep, mask_mode, has_score_grads,
    bias_kind, bias_axes, dropout_threshold, dropout_rows_batch, batch, mask_batch, scales_batch,
    bias_batch,
    block_mask_batch, block_mask_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads,
    row_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """`score_grads` (B, H, 2, Sq): every row's part of the gradients of scale and slope."""
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
    attended = hi > lo
    stat = (b.to(tl.int64) * heads + head) * q_len + rows
    sums = row_sums(load_sums(pointer_to_sums(lse, bias) + stat, attended, bias), bias)
    if block_mask is not None:  # none of a row's keys may be in it
        attended = attending(sums)
    segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)

    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    qk = size_of(qk_dim, QK_DIM)
    v = size_of(v_dim, V_DIM)
    q_heads = size_of(row_heads, heads)
    first = (b.to(tl.int64) * q_len + row) * q_heads + head
    local = tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * q_heads
    # rows that attend nothing are not read: zeros keep them finite in the mask-free loop
    q = load_rows(
        query + first * qk + local * qk + qk_dims[None, :], attended[:, None], qk_dim, QK_DIM
    )
    do = load_rows(dout + first * v + local * v + v_dims[None, :], attended[:, None], v_dim, V_DIM)
    dlt = tl.load(delta + stat, mask=attended, other=0.0)

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

    acc = tl.zeros([BLOCK_M, qk_dims.shape[0]], tl.float32)
    grads = (tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32))
    for i in tl.range(0, partial_steps(walk), num_stages=1):
        place = partial_place(walk, mask, i, BLOCK_N)
        first_key = walk.origin + place * walk.unit
        keys = first_key + cols
        kv = load_pair(pair, place, (keys < end)[:, None], QK_DIM, V_DIM)
        inside = keep(rows, keys, lo, hi, segment_checked, segments, 0)
        inside = keep_in_block_mask(inside, mask, head_mask, rows, keys, place, BLOCK_N, 0)
        far = distances(q_at, load_positions(bias_pos.kv, bias_pos.kv_count, keys))
        acc, grads = dq_step(
            acc, grads, q, do, kv, sums, dlt, inside, far, slope, mods, added, dropout, head, rows,
            row, first_key, cols, has_score_grads, True, FLOAT32_PRODUCTS,
        )  # fmt: skip
    if walk.listed is None:
        if bias is None or STAGES > 1:
            for place in tl.range(full_begin, full_end, num_stages=STAGES):
                first_key = walk.origin + place * walk.unit
                kv = load_pair(pair, place, None, QK_DIM, V_DIM)
                acc, grads = dq_step(
                    acc, grads, q, do, kv, sums, dlt, None, None, slope, mods, added, dropout, head,
                    rows, row, first_key, cols, has_score_grads, False, FLOAT32_PRODUCTS,
                )  # fmt: skip
    elif bias is None or STAGES > 1:
        place = full_place(walk, mask, 0, start + full_begin * BLOCK_N, BLOCK_N)
        for i in tl.range(0, walk.full, num_stages=STAGES):
            kv = load_pair(pair, place, None, QK_DIM, V_DIM)
            far = distances(q_at, load_positions(bias_pos.kv, bias_pos.kv_count, place + cols))
            acc, grads = dq_step(
                acc, grads, q, do, kv, sums, dlt, None, far, slope, mods, added, dropout, head,
                rows, row, place, cols, has_score_grads, False, FLOAT32_PRODUCTS,
            )  # fmt: skip
            place = full_place(walk, mask, i + 1, place + BLOCK_N, BLOCK_N)

    result = tl.where(attended[:, None], acc * scale, 0.0)
    store_rows(
        dq + first * qk + local * qk + qk_dims[None, :],
        result.to(dq.dtype.element_ty),
        there[:, None],
        qk_dim,
        QK_DIM,
    )
    if score_grads is not None and has_score_grads != 0:
        dscale, dslope = grads
        parts = score_grads + (b.to(tl.int64) * heads + head) * (2 * q_len)
        tl.store(parts + rows, tl.where(attended, dscale, 0.0), mask=there)
        tl.store(parts + q_len + rows, tl.where(attended, dslope, 0.0), mask=there)
