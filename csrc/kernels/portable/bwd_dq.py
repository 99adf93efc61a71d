"""Backward attention over row ranges, for every GPU that Triton supports: dQ, and each row's part
of the gradients of scale and slopes. bwd.py has the formulas.

    dscale = sum(ds * s),    dslope = -sum(dlogit * |i - j|)    per row, in `score_grads`

As in fwd.py, plain and fallback kernels are compiled from one function. Rows with a log-sum-exp of
-inf, which attend to nothing, are not read.
"""

import triton
import triton.language as tl
from portable.arithmetic import dot
from portable.block_lists import BlockMask
from portable.dropout import drop
from portable.kv_ranges import (
    columns,
    load_rows,
    segments_of,
    size_of,
    store_rows,
    tile_of_program,
)
from portable.row_sums import attending, load_sums, pointer_to_sums, probabilities, row_sums
from portable.row_tile import over_keys, row_tile, tile_pointers
from portable.scoring import logits, scoring_of, terms_of, through_cap
from portable.steps import pair_of, pointers_of


@triton.jit
def dq_step(grads, operands, kv, tile, scoring, first_key, inside, FLOAT32_PRODUCTS: tl.constexpr):
    """One block of keys, as in fwd.py. `grads` are dQ and each row's part of the gradients of scale
    and slope."""
    dq, dscale, dslope = grads
    q, do, sums, delta, has_score_grads = operands
    k, v = kv
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_N: tl.constexpr = k.shape[0]
    keys = first_key + tl.arange(0, BLOCK_N)
    terms = terms_of(scoring, tile.first_row, first_key, keys, BLOCK_M, BLOCK_N, 0)
    s = dot(q, tl.trans(k), None, FLOAT32_PRODUCTS)
    capped, x = logits(s, terms, scoring)
    p = probabilities(x, sums, 1)
    dp = dot(do, tl.trans(v), None, FLOAT32_PRODUCTS)
    if scoring.dropout.threshold is not None:
        dp *= scoring.dropout.inverse_keep
    dp = drop(dp, scoring.dropout, scoring.head, tile.rows, first_key, BLOCK_N, 0)
    dlogit = p * (dp - delta[:, None])
    ds = through_cap(dlogit, capped, scoring)
    if inside is not None:
        ds = tl.where(inside, ds, 0.0)
    if has_score_grads is not None and has_score_grads != 0:
        by_scale = ds * s
        by_slope = dlogit * terms.distances
        if inside is not None:
            by_scale = tl.where(inside, by_scale, 0.0)
            by_slope = tl.where(inside, by_slope, 0.0)
        dscale += tl.sum(by_scale, 1)
        dslope -= tl.sum(by_slope, 1)
    return dot(ds.to(k.dtype), k, dq, FLOAT32_PRODUCTS), dscale, dslope


@triton.jit
def backward_dq(
    query, key, value, dout, lse, delta, dq, score_grads, kv_start, kv_end, q_ids,
    kv_ids, q_pos, kv_pos, q_blocks, q_order, block_mask, q_block_lists, scales, slopes,
    q_bias_pos, kv_bias_pos, bias, dropout_streams, dropout_rows, scale, soft_cap, inverse_keep,
    mask_mode, has_score_grads, bias_kind, bias_axes, dropout_threshold, dropout_rows_batch,
    batch, mask_batch, scales_batch, bias_batch, block_mask_batch, block_mask_heads, q_block,
    kv_block, q_len, kv_len, heads, kv_heads, row_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """`score_grads` (B, H, 2, Sq): each row's part of the gradients of scale and slope."""
    group = heads // kv_heads
    block_masks = BlockMask(
        block_mask, q_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block, q_len,
        kv_len,
    )  # fmt: skip
    head, kv_head, b, mask_b, row = tile_of_program(
        q_order, batch, mask_batch, tl.cdiv(q_len, 128), group, kv_heads, BLOCK_M
    )
    if row >= q_len:
        return
    tile = row_tile(
        head, b, mask_b, row, kv_start, kv_end, q_blocks, block_masks, dropout_threshold, bias,
        bias_kind, q_len, kv_len, size_of(row_heads, heads), BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    attended = tile.hi > tile.lo
    stat = (b.to(tl.int64) * heads + head) * q_len + tile.rows
    sums = row_sums(load_sums(pointer_to_sums(lse, bias) + stat, attended, bias), bias)
    if block_mask is not None:  # it may exclude all keys of a row
        attended = attending(sums)
    segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)
    # rows that attend to nothing are not read; zeros keep them finite in the mask-free loop
    q = load_rows(tile_pointers(query, tile, qk_dim, QK_DIM), attended[:, None], qk_dim, QK_DIM)
    do = load_rows(tile_pointers(dout, tile, v_dim, V_DIM), attended[:, None], v_dim, V_DIM)
    deltas = tl.load(delta + stat, mask=attended, other=0.0)
    kv_first = (b.to(tl.int64) * kv_len + tile.walk.origin) * kv_heads + kv_head
    pointers = pointers_of(key, value, kv_first, kv_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_N)
    pair = pair_of(pointers, kv_heads, qk_dim, v_dim, tile.walk.unit, QK_DIM, V_DIM)
    scoring = scoring_of(
        scale, scales, scales_batch, soft_cap, slopes, bias_batch, q_bias_pos, kv_bias_pos, bias,
        bias_kind, bias_axes, dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch,
        inverse_keep, b, heads, head, tile.rows, q_len, kv_len, 0,
    )  # fmt: skip

    acc = tl.zeros([BLOCK_M, columns(QK_DIM).shape[0]], tl.float32)
    none = tl.zeros([BLOCK_M], tl.float32)
    acc, dscale, dslope = over_keys(
        dq_step, (acc, none, none), (q, do, sums, deltas, has_score_grads), tile,
        segments, pair, scoring, QK_DIM, V_DIM, BLOCK_N, STAGES, FLOAT32_PRODUCTS,
    )  # fmt: skip

    result = tl.where(attended[:, None], acc * scoring.scale, 0.0)
    dq_rows = tile_pointers(dq, tile, qk_dim, QK_DIM)
    store_rows(dq_rows, result.to(dq.dtype.element_ty), tile.valid[:, None], qk_dim, QK_DIM)
    if score_grads is not None and has_score_grads != 0:
        parts = score_grads + (b.to(tl.int64) * heads + head) * (2 * q_len)
        tl.store(parts + tile.rows, tl.where(attended, dscale, 0.0), mask=tile.valid)
        tl.store(parts + q_len + tile.rows, tl.where(attended, dslope, 0.0), mask=tile.valid)
