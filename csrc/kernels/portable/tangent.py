"""The tangent of attention (forward-mode derivative) over row ranges, for every GPU that Triton
supports.

With the probabilities p, computed from the forward's log-sum-exp, and the tangents tq, tk and tv:
    tlogit = scale * (tq k^T + q tk^T), times the derivative of the soft cap
    tlse   = sum(p * tlogit)
    tout   = p tv + (p * (tlogit - center)) v - (tlse - center) * out
It is linear in the tangents. Any `center` per row gives the same result. The kernel uses the mean
of tlogit over the first keys with a weight above 0, so that adding a constant to all tlogits of a
row does not cost accuracy: the factors of v are rounded to 16 bits.

If out and lse include a constant sink, so do the results.

As in fwd.py, plain and fallback kernels are compiled from one function. The plain kernel takes the
tangents of query, key and value. `forward_tangent_fallback` takes any of them: `has_tq`, `has_tk`
and `has_tv` say which, and the pointers of the others are never read.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.arithmetic import dot
from portable.block_lists import BlockMask
from portable.kv_ranges import (
    columns,
    load_rows,
    segments_of,
    store_rows,
    tile_of_program,
)
from portable.row_sums import (
    RowSums,
    attending,
    load_sums,
    pointer_to_sums,
    probabilities,
    row_sums,
)
from portable.row_tile import over_keys, row_tile, tile_pointers
from portable.scoring import logits, scoring_of, terms_of, through_cap
from portable.steps import TilePair, pair_of, pointers_of


class Operands(NamedTuple):
    """Rows of the query and of its tangent, and pointers to the tangents of key and value, whose
    places are indices of keys. The flags are None in the plain kernel, which has all tangents."""

    q: tl.tensor
    tq: tl.tensor
    sums: RowSums
    tkv: TilePair
    has_tq: tl.tensor
    has_tk: tl.tensor
    has_tv: tl.tensor


@triton.jit
def tangent_of_scores(x, k, first_key, valid, FLOAT32_PRODUCTS: tl.constexpr):
    """tq k^T + q tk^T for a block of keys. `valid` is the mask of its keys, None for all."""
    QK_DIM: tl.constexpr = k.shape[1]
    tk_pointers = x.tkv.first + first_key * x.tkv.first_step
    if x.has_tq is None:
        tk = load_rows(tk_pointers, valid, x.tkv.qk_dim, QK_DIM)
        ts = dot(x.tq, tl.trans(k), None, FLOAT32_PRODUCTS)
        ts = dot(x.q, tl.trans(tk), ts, FLOAT32_PRODUCTS)
    else:
        ts = tl.zeros([x.q.shape[0], k.shape[0]], tl.float32)
        if x.has_tq != 0:
            ts = dot(x.tq, tl.trans(k), ts, FLOAT32_PRODUCTS)
        if x.has_tk != 0:
            tk = load_rows(tk_pointers, valid, x.tkv.qk_dim, QK_DIM)
            ts = dot(x.q, tl.trans(tk), ts, FLOAT32_PRODUCTS)
    return ts


@triton.jit
def add_tangent_of_values(acc, p, x, v, first_key, valid, FLOAT32_PRODUCTS: tl.constexpr):
    """acc + p tv for a block of keys."""
    V_DIM: tl.constexpr = v.shape[1]
    tv_pointers = x.tkv.second + first_key * x.tkv.second_step
    if x.has_tv is None or x.has_tv != 0:
        tv = load_rows(tv_pointers, valid, x.tkv.v_dim, V_DIM)
        acc = dot(p.to(v.dtype), tv, acc, FLOAT32_PRODUCTS)
    return acc


@triton.jit
def tangent_step(state, x, kv, tile, scoring, first_key, inside, FLOAT32_PRODUCTS: tl.constexpr):
    """One block of keys, as in fwd.py. `state`: the sum of products, and per row tlse, the sum of p
    so far, and `center`."""
    acc, tlse, weight, center = state
    k, v = kv
    BLOCK_M: tl.constexpr = x.q.shape[0]
    BLOCK_N: tl.constexpr = k.shape[0]
    keys = first_key + tl.arange(0, BLOCK_N)
    valid = None
    if inside is not None:
        valid = (keys < tile.end)[:, None]
    terms = terms_of(scoring, tile.first_row, first_key, keys, BLOCK_M, BLOCK_N, 0)
    s = dot(x.q, tl.trans(k), None, FLOAT32_PRODUCTS)
    ts = tangent_of_scores(x, k, first_key, valid, FLOAT32_PRODUCTS)
    capped, logit = logits(s, terms, scoring)
    p = probabilities(logit, x.sums, 1)
    tlogit = through_cap(ts * scoring.scale, capped, scoring)
    if inside is not None:
        p = tl.where(inside, p, 0.0)
        tlogit = tl.where(inside, tlogit, 0.0)
    added = tl.sum(p, 1)
    moved = tl.sum(p * tlogit, 1)
    first = (weight == 0.0) & (added != 0.0)
    center = tl.where(first, moved / tl.where(first, added, 1.0), center)
    dp = (p * (tlogit - center[:, None])).to(v.dtype)
    acc = dot(dp, v, acc, FLOAT32_PRODUCTS)
    acc = add_tangent_of_values(acc, p, x, v, first_key, valid, FLOAT32_PRODUCTS)
    return acc, tlse + moved, weight + added, center


@triton.jit
def forward_tangent(
    query, key, value, out, lse, tq, tk, tv, tout, tlse, kv_start, kv_end, q_ids, kv_ids, q_pos,
    kv_pos, q_blocks, q_order, block_mask, q_block_lists, scales, slopes, q_bias_pos, kv_bias_pos,
    scale, soft_cap, mask_mode, has_tq, has_tk, has_tv, batch, mask_batch, scales_batch, bias_batch,
    block_mask_batch, block_mask_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads, qk_dim,
    v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
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
        head, b, mask_b, row, kv_start, kv_end, q_blocks, block_masks, None, None, None, q_len,
        kv_len, heads, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    stat = (b.to(tl.int64) * heads + head) * q_len + tile.rows
    sums = row_sums(load_sums(pointer_to_sums(lse, None) + stat, tile.hi > tile.lo, None), None)
    attended = attending(sums)  # a block mask may exclude all keys of a row
    segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)
    # rows that attend to nothing are not read; zeros keep them finite in the mask-free loop
    q = load_rows(tile_pointers(query, tile, qk_dim, QK_DIM), attended[:, None], qk_dim, QK_DIM)
    tq_valid = attended
    if has_tq is not None:
        tq_valid = attended & (tile.rows < tl.where(has_tq != 0, q_len, 0))
    tq_rows = tile_pointers(tq, tile, qk_dim, QK_DIM)
    q_tangent = load_rows(tq_rows, tq_valid[:, None], qk_dim, QK_DIM)
    kv_row = b.to(tl.int64) * kv_len
    kv_first = (kv_row + tile.walk.origin) * kv_heads + kv_head
    pointers = pointers_of(key, value, kv_first, kv_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_N)
    pair = pair_of(pointers, kv_heads, qk_dim, v_dim, tile.walk.unit, QK_DIM, V_DIM)
    first = kv_row * kv_heads + kv_head
    pointers = pointers_of(tk, tv, first, kv_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_N)
    tangents = pair_of(pointers, kv_heads, qk_dim, v_dim, 1, QK_DIM, V_DIM)
    scoring = scoring_of(
        scale, scales, scales_batch, soft_cap, slopes, bias_batch, q_bias_pos, kv_bias_pos, None,
        None, None, None, None, None, None, None, b, heads, head, tile.rows, q_len, kv_len, 0,
    )  # fmt: skip
    operands = Operands(q, q_tangent, sums, tangents, has_tq, has_tk, has_tv)

    none = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, columns(V_DIM).shape[0]], tl.float32)
    acc, of_lse, _, center = over_keys(
        tangent_step, (acc, none, none, none), operands, tile, segments, pair, scoring, QK_DIM,
        V_DIM, BLOCK_N, STAGES, FLOAT32_PRODUCTS,
    )  # fmt: skip

    out_rows = tile_pointers(out, tile, v_dim, V_DIM)
    output = load_rows(out_rows, attended[:, None], v_dim, V_DIM).to(tl.float32)
    result = tl.where(attended[:, None], acc - (of_lse - center)[:, None] * output, 0.0)
    tout_rows = tile_pointers(tout, tile, v_dim, V_DIM)
    store_rows(tout_rows, result.to(tout.dtype.element_ty), tile.valid[:, None], v_dim, V_DIM)
    tl.store(tlse + stat, tl.where(attended, of_lse, 0.0), mask=tile.valid)
