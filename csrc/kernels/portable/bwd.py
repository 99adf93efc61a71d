"""Backward attention over row ranges, for every GPU that Triton serves: delta, then dK and dV, then
dQ (bwd_dq.py; FlashAttention-2, arXiv 2307.08691).

    p = exp(logit - lse),    delta = sum(do * out) - dlse,    dlogit = p * (do v^T - delta)
    ds = dlogit * (1 - (capped / cap)^2)
    dv = p^T do,             dk = scale * ds^T q,             dq = scale * ds k

Masked elements are selected away, never multiplied: what padding holds may overflow to infinity. No
atomics: the same bits every run. One function is the plain kernel and the fallback one, as in
fwd.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.bias import bias_of, bias_tile
from portable.block_lists import BlockMask, keep_in_block_mask, mask_of_head
from portable.dropout import dropout_of, negative_where_dropped
from portable.kv_ranges import (
    columns,
    keep,
    load_rows,
    row_range,
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
    full_place,
    full_steps,
    in_one_loop,
    pair_of,
    partial_place,
    partial_steps,
    pointers_of,
    steps_of,
)


class RowOperands(NamedTuple):
    """What a step reads of its rows. `first_lse` (row_sums.py) and `first_delta` are those of the
    group's first head at the walk's origin, one head `stat_head` behind the other; `flags` says of
    a block of 64 rows whether they are segment-checked."""

    first_lse: tl.tensor
    first_delta: tl.tensor
    stat_head: tl.tensor
    lo: tl.tensor
    hi: tl.tensor
    end: tl.tensor
    flags: tl.tensor
    row_blocks: tl.tensor


class Scoring(NamedTuple):
    """What turns scores of the tile's keys into logits, and what is dropped of them."""

    mods: tl.tensor
    slopes: tl.tensor
    bias_pos: tl.tensor
    kv_at: tl.tensor
    bias: tl.tensor
    dropout: tl.tensor


@triton.jit
def backward_delta(
    out, dout, dlse, delta, kv_start, kv_end, has_dlse, batch, mask_batch, q_len, heads, row_heads,
    v_dim, V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta (B, H, Sq). Heads are the fastest index: neighbouring programs read neighbouring
    memory.

    Here and below rows of query, out and their gradients are `row_heads` heads apart (None:
    `heads`), of which this is about `heads`.
    """
    pid = tl.program_id(0)
    head = pid % heads
    tiles = tl.cdiv(q_len, ROWS)
    b = pid // heads // tiles
    rows = (pid // heads % tiles) * ROWS + tl.arange(0, ROWS)
    there = rows < q_len
    mask_row = tl.where(mask_batch > 1, b, 0).to(tl.int64) * q_len
    attended = tl.load(kv_end + mask_row + rows, mask=there, other=0) > tl.load(
        kv_start + mask_row + rows, mask=there, other=0
    )
    row = (b.to(tl.int64) * q_len + rows) * size_of(row_heads, heads) + head
    offset = row[:, None] * size_of(v_dim, V_DIM)
    offset += columns(V_DIM)[None, :]
    # the cotangent of an empty row is ignored: it is not even read
    o = load_rows(out + offset, attended[:, None], v_dim, V_DIM).to(tl.float32)
    do = load_rows(dout + offset, attended[:, None], v_dim, V_DIM).to(tl.float32)
    at = (b.to(tl.int64) * heads + head) * q_len + rows
    total = tl.sum(o * do, 1)
    if has_dlse != 0:
        total -= tl.load(dlse + at, mask=attended, other=0.0)
    tl.store(delta + at, total, mask=there)


@triton.jit
def dkdv_step(
    dk, dv, kv, q, do, stats, attended, inside, far, slope, scoring, head, rows, first_row, keys,
    first_key, MASKED: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """One block of rows, transposed: scores are keys x rows, so that p^T and ds^T are left operands
    in registers. `stats`: pointers to the sums and delta of the rows, which are read where they are
    needed: earlier they would take registers; `attended`: those that are read, None for all."""
    k, v = kv
    lse_ptr, delta_ptr = stats
    mods, bias, dropout = scoring.mods, scoring.bias, scoring.dropout
    KEYS: tl.constexpr = keys.shape[0]
    added = bias_tile(bias, head, first_row, first_key, rows.shape[0], KEYS, 1)
    capped, x = logits(dot(k, tl.trans(q), None, FLOAT32_PRODUCTS), far, slope, mods)
    if added is not None:
        x += added
    p = probabilities(x, row_sums(load_sums(lse_ptr, attended, bias.array), bias.array), 0)
    if MASKED:
        p = tl.where(inside, p, 0.0)
    if dropout.threshold is None:
        dv = dot(p.to(do.dtype), do, dv, FLOAT32_PRODUCTS)
        dp = dot(v, tl.trans(do), None, FLOAT32_PRODUCTS)
    else:  # a sign says what is dropped: one tile to keep
        p = negative_where_dropped(p, dropout, head, rows, first_key, KEYS, 1)
        dv = dot(tl.where(p < 0, 0.0, p).to(do.dtype), do, dv, FLOAT32_PRODUCTS)
        dp = dot(v, tl.trans(do), None, FLOAT32_PRODUCTS)
        dp = tl.where(p < 0, 0.0, dp * dropout.inverse_keep)
        p = tl.abs(p)
    dlt = tl.load(delta_ptr, mask=attended, other=None if attended is None else 0.0)
    ds = through_cap(p * (dp - dlt[None, :]), capped, mods)
    if MASKED:
        ds = tl.where(inside, ds, 0.0)
    dk = dot(ds.to(q.dtype), q, dk, FLOAT32_PRODUCTS)
    return dk, dv


@triton.jit
def checked_rows(operands, first_row, BLOCK_M: tl.constexpr):
    """Whether any of a block's rows is segment-checked."""
    block = first_row // 64
    checked = tl.load(operands.flags + block) & 1
    for j in tl.static_range(1, BLOCK_M // 64):
        there = block + j < operands.row_blocks
        checked |= tl.load(operands.flags + block + j, mask=there, other=0) & 1
    return checked


@triton.jit
def stat_at(first, operands, g, place, walk):
    """Pointers to the LSE or delta of a step's rows, for the g-th head."""
    return first + g * operands.stat_head + place * walk.unit


@triton.jit
def dkdv_of_heads(
    dk, dv, kv, keys, first_key, walk, pair, operands, segments, scoring, mask, mask_b, b,
    first_head, group_head, members, heads, qk, v,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """`members` query heads from the `first_head`-th of the group on, whose walk this is."""
    cols = tl.arange(0, BLOCK_M)
    mods, slopes, bias_pos, kv_at = scoring.mods, scoring.slopes, scoring.bias_pos, scoring.kv_at
    bias = scoring.bias.array
    if bias is not None and STAGES == 1:
        walk = in_one_loop(walk)
    partial = partial_steps(walk)
    for i in tl.range(0, members * partial, num_stages=1):
        g = i // partial
        place = partial_place(walk, mask, i - g * partial, BLOCK_M)
        g = first_head + g
        first_row = walk.origin + place * walk.unit
        rows = first_row + cols
        there = rows < segments.q_len
        lo = tl.load(operands.lo + rows, mask=there, other=0)
        hi = tl.load(operands.hi + rows, mask=there, other=0)
        # rows past the hull are not read: a block may reach over its end
        attended = (hi > lo) & (rows < operands.end)
        lse_ptr = stat_at(operands.first_lse, operands, g, place, walk)
        delta_ptr = stat_at(operands.first_delta, operands, g, place, walk)
        if mask.bits is not None:  # none of a row's keys may be in it
            attended &= attending(row_sums(load_sums(lse_ptr, attended, bias), bias))
        q_ptr = pair.first + place * pair.first_step + g * qk
        q = load_rows(q_ptr, attended[:, None], pair.qk_dim, QK_DIM)
        do_ptr = pair.second + place * pair.second_step + g * v
        do = load_rows(do_ptr, attended[:, None], pair.v_dim, V_DIM)
        checked = checked_rows(operands, first_row, BLOCK_M)
        inside = keep(rows, keys, lo, hi, checked, segments, 1)
        own = mask_of_head(mask, mask_b, group_head + g)
        inside = keep_in_block_mask(inside, mask, own, rows, keys, first_key, BLOCK_N, 1)
        slope = slope_of(slopes, mods.bias_batch, b, heads, group_head + g, bias)
        far = distances(kv_at, load_positions(bias_pos.q, bias_pos.q_count, rows))
        dk, dv = dkdv_step(
            dk, dv, kv, q, do, (lse_ptr, delta_ptr), attended, inside, far, slope, scoring,
            group_head + g, rows, first_row, keys, first_key, True, FLOAT32_PRODUCTS,
        )  # fmt: skip
    if bias is None or STAGES > 1:
        full = full_steps(walk)
        if walk.listed is not None:
            place = full_place(walk, mask, 0, walk.start + walk.full_begin * BLOCK_M, BLOCK_M)
        for i in tl.range(0, members * full, num_stages=STAGES):
            g = i // full
            if walk.listed is None:
                place = walk.full_begin + i - g * full
            g = first_head + g
            q_ptr = pair.first + place * pair.first_step + g * qk
            q = load_rows(q_ptr, None, pair.qk_dim, QK_DIM)
            do_ptr = pair.second + place * pair.second_step + g * v
            do = load_rows(do_ptr, None, pair.v_dim, V_DIM)
            lse_ptr = stat_at(operands.first_lse, operands, g, place, walk)
            delta_ptr = stat_at(operands.first_delta, operands, g, place, walk)
            slope = slope_of(slopes, mods.bias_batch, b, heads, group_head + g, bias)
            first_row = walk.origin + place * walk.unit
            rows = first_row + cols
            far = distances(kv_at, load_positions(bias_pos.q, bias_pos.q_count, rows))
            dk, dv = dkdv_step(
                dk, dv, kv, q, do, (lse_ptr, delta_ptr), None, None, far, slope, scoring,
                group_head + g, rows, first_row, keys, first_key, False, FLOAT32_PRODUCTS,
            )  # fmt: skip
            if walk.listed is not None:
                step = (i + 1) % full
                ranged = walk.start + (walk.full_begin + step) * BLOCK_M
                place = full_place(walk, mask, step, ranged, BLOCK_M)
    return dk, dv


@triton.jit
def backward_dkdv(
    query, key, value, dout, lse, delta, dk, dv, kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order, block_mask, kv_block_lists, scales, slopes, q_bias_pos,
    kv_bias_pos, bias, dropout_streams, dropout_rows, scale, soft_cap, inverse_keep, mask_mode,
    bias_kind, bias_axes, dropout_threshold, dropout_rows_batch, batch, mask_batch, scales_batch,
    bias_batch, block_mask_batch, block_mask_heads, q_block, kv_block, q_len, kv_len, heads,
    kv_heads, row_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one key/value head; its group's query heads are summed in registers."""
    group = heads // kv_heads
    _, kv_head, b, mask_b, first_key = tile_of_program(
        kv_order, batch, mask_batch, tl.cdiv(kv_len, 128), 1, kv_heads, BLOCK_N
    )
    if first_key >= kv_len:
        return
    start, end, full_lo, full_hi = row_range(kv_blocks, mask_b, first_key, kv_len, BLOCK_N)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_M)

    keys = first_key + tl.arange(0, BLOCK_N)
    present = (keys < kv_len)[:, None]
    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    qk = size_of(qk_dim, QK_DIM)
    v = size_of(v_dim, V_DIM)
    kv_first = (b.to(tl.int64) * kv_len + first_key) * kv_heads + kv_head
    local = tl.arange(0, BLOCK_N)[:, None].to(tl.int64) * kv_heads
    k_tile = load_rows(key + kv_first * qk + local * qk + qk_dims[None, :], present, qk_dim, QK_DIM)
    v_tile = load_rows(value + kv_first * v + local * v + v_dims[None, :], present, v_dim, V_DIM)

    mask_row = mask_b.to(tl.int64) * q_len
    kv_start += mask_row
    kv_end += mask_row
    segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)
    row_blocks = tl.cdiv(q_len, 64)
    flags = q_blocks + (mask_b.to(tl.int64) * 5 + 4) * row_blocks

    mask = BlockMask(
        block_mask, kv_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block, q_len,
        kv_len,
    )  # fmt: skip
    tile = first_key // 128
    tiles = tl.cdiv(kv_len, 128)
    walk = steps_of(
        start, steps, full_begin, full_end, mask, mask_b, kv_head * group, tile, tiles, row_blocks,
        BLOCK_M,
    )  # fmt: skip
    cols = tl.arange(0, BLOCK_M)
    q_heads = size_of(row_heads, heads)
    q_first = (b.to(tl.int64) * q_len + walk.origin) * q_heads + kv_head * group
    pointers = pointers_of(query, dout, q_first, q_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_M)
    stat = (b.to(tl.int64) * heads + kv_head * group) * q_len + walk.origin
    first_lse = pointer_to_sums(lse, bias) + stat + cols
    first_delta = delta + stat + cols
    pair = pair_of(pointers, q_heads, qk_dim, v_dim, walk.unit, QK_DIM, V_DIM)
    operands = RowOperands(
        first_lse, first_delta, q_len.to(tl.int64), kv_start, kv_end, end, flags,
        row_blocks,
    )  # fmt: skip

    scale, mods = score_mods_of(scale, scales, scales_batch, soft_cap, bias_batch, b, bias)
    bias_pos = bias_positions_of(q_bias_pos, kv_bias_pos, bias_batch, b, q_len, kv_len)
    kv_at = load_positions(bias_pos.kv, bias_pos.kv_count, keys)
    added = bias_of(bias, bias_kind, bias_axes, b, heads, q_len, kv_len)
    dropout = dropout_of(
        dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch, inverse_keep, b,
        heads, q_len,
    )  # fmt: skip
    scoring = Scoring(mods, slopes, bias_pos, kv_at, added, dropout)

    dk_acc = tl.zeros([BLOCK_N, qk_dims.shape[0]], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, v_dims.shape[0]], tl.float32)
    kv = (k_tile, v_tile)
    if block_mask is None:
        dk_acc, dv_acc = dkdv_of_heads(
            dk_acc, dv_acc, kv, keys, first_key, walk, pair, operands, segments, scoring, mask,
            mask_b, b, 0, kv_head * group, group, heads, qk, v,
            QK_DIM, V_DIM, BLOCK_M, BLOCK_N, STAGES, FLOAT32_PRODUCTS,
        )  # fmt: skip
    else:
        # heads with block masks of their own one after the other, else all in one loop
        alone = block_mask_heads > 1
        members = tl.where(alone, 1, group)
        for turn in tl.range(0, tl.where(alone, group, 1)):
            own_walk = steps_of(
                start, steps, full_begin, full_end, mask, mask_b, kv_head * group + turn, tile,
                tiles, row_blocks, BLOCK_M,
            )  # fmt: skip
            dk_acc, dv_acc = dkdv_of_heads(
                dk_acc, dv_acc, kv, keys, first_key, own_walk, pair, operands, segments, scoring,
                mask, mask_b, b, turn, kv_head * group, members, heads, qk, v,
                QK_DIM, V_DIM, BLOCK_M, BLOCK_N, STAGES, FLOAT32_PRODUCTS,
            )  # fmt: skip

    if dropout_threshold is not None:
        dv_acc *= inverse_keep
    dk_out = dk + kv_first * qk + local * qk + qk_dims[None, :]
    dv_out = dv + kv_first * v + local * v + v_dims[None, :]
    store_rows(dk_out, (dk_acc * scale).to(dk.dtype.element_ty), present, qk_dim, QK_DIM)
    store_rows(dv_out, dv_acc.to(dv.dtype.element_ty), present, v_dim, V_DIM)
