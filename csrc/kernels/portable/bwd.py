"""Backward attention over row ranges, for every GPU that Triton supports: delta, then dK and dV,
then dQ (bwd_dq.py; FlashAttention-2, arXiv 2307.08691).

    p = exp(logit - lse),    delta = sum(do * out) - dlse,    dlogit = p * (do v^T - delta)
    ds = dlogit * (1 - (capped / cap)^2)
    dv = p^T do,             dk = scale * ds^T q,             dq = scale * ds k
    dbias = dlogit,          for a bias with one element per logit

Masked elements are removed by a select and never by a product, because values in padding may
overflow to infinity. There are no atomics, so results are bitwise reproducible. As in fwd.py, plain
and fallback kernels are compiled from the same functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.arithmetic import dot
from portable.block_lists import BlockMask, keep_in_block_mask, mask_of_head
from portable.dbias_of_pairs import PairGradients, clear_pairs, pair_gradients_of, store_pairs
from portable.dropout import negative_where_dropped
from portable.kv_ranges import (
    Segments,
    columns,
    keep,
    load_rows,
    row_pointers,
    row_range,
    segments_of,
    size_of,
    split,
    store_rows,
    tile_of_program,
)
from portable.row_sums import attending, load_sums, pointer_to_sums, probabilities, row_sums
from portable.scoring import logits, of_head, scoring_of, terms_of, through_cap
from portable.steps import (
    TilePair,
    full_place,
    full_steps,
    in_one_loop,
    load_pair,
    pair_of,
    partial_place,
    partial_steps,
    pointers_of,
    steps_of,
)


class KeyTile(NamedTuple):
    """A tile of `keys` of one key/value head, starting at `first_key`, and the arrays of its mask.
    `first_head` is the first query head of the group, out of `heads`. `b` is the batch row, and
    `mask_b` the batch row of the mask. `dbias` has the tile's columns of the bias gradient."""

    first_head: tl.tensor
    heads: tl.tensor
    b: tl.tensor
    mask_b: tl.tensor
    first_key: tl.tensor
    keys: tl.tensor
    segments: Segments
    block_mask: BlockMask
    dbias: PairGradients


class RowOperands(NamedTuple):
    """Pointers to what a step loads for its rows. `pair` are query and cotangents. `first_lse` (row
    statistics, row_sums.py) and `first_delta` point to the group's first head at the walk's origin,
    and heads are `stat_head` elements apart. `lo` and `hi` are row ranges. Bit 0 of `flags` marks
    the blocks of 64 rows with segment-checked rows. No row from `end` on attends to the keys."""

    pair: TilePair
    first_lse: tl.tensor
    first_delta: tl.tensor
    stat_head: tl.tensor
    lo: tl.tensor
    hi: tl.tensor
    end: tl.tensor
    flags: tl.tensor
    row_blocks: tl.tensor


@triton.jit
def backward_delta(
    out, dout, dlse, delta, row_delta, kv_start, kv_end, has_dlse, batch, mask_batch, q_len, heads,
    row_heads, v_dim, V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta (B, H, Sq), also in row_delta unless that is null. Heads are the fastest index:
    neighbouring programs read neighbouring memory.

    Here and below, rows of query, out and their gradients are `row_heads` heads apart (None:
    `heads`), and the kernel processes `heads` of them.
    """
    pid = tl.program_id(0)
    head = pid % heads
    tiles = tl.cdiv(q_len, ROWS)
    b = pid // heads // tiles
    rows = (pid // heads % tiles) * ROWS + tl.arange(0, ROWS)
    in_bounds = rows < q_len
    mask_row = tl.where(mask_batch > 1, b, 0).to(tl.int64) * q_len
    attended = tl.load(kv_end + mask_row + rows, mask=in_bounds, other=0) > tl.load(
        kv_start + mask_row + rows, mask=in_bounds, other=0
    )
    row = (b.to(tl.int64) * q_len + rows) * size_of(row_heads, heads) + head
    offset = row[:, None] * size_of(v_dim, V_DIM)
    offset += columns(V_DIM)[None, :]
    # cotangents of empty rows are not read
    o = load_rows(out + offset, attended[:, None], v_dim, V_DIM).to(tl.float32)
    do = load_rows(dout + offset, attended[:, None], v_dim, V_DIM).to(tl.float32)
    at = (b.to(tl.int64) * heads + head) * q_len + rows
    total = tl.sum(o * do, 1)
    if has_dlse != 0:
        total -= tl.load(dlse + at, mask=attended, other=0.0)
    tl.store(delta + at, total, mask=in_bounds)
    if row_delta.to(tl.int64) != 0:
        tl.store(row_delta + at, total, mask=in_bounds)


@triton.jit
def dkdv_step(
    grads, kv, qdo, stats, attended, inside, tile, scoring, first_row, rows,
    FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """One block of rows. Scores are transposed, keys x rows, so that p^T and ds^T are left operands
    in registers. `stats` are pointers to the statistics and delta of the rows; they are loaded at
    their first use, because loading them earlier would take registers. `attended` is the mask of
    these loads (None: all rows). `inside` is None if all rows attend to all keys."""
    dk, dv = grads
    k, v = kv
    q, do = qdo
    lse_ptr, delta_ptr = stats
    bias, dropout = scoring.bias.array, scoring.dropout
    ROWS: tl.constexpr = rows.shape[0]
    KEYS: tl.constexpr = k.shape[0]
    terms = terms_of(scoring, first_row, tile.first_key, rows, ROWS, KEYS, 1)
    capped, x = logits(dot(k, tl.trans(q), None, FLOAT32_PRODUCTS), terms, scoring)
    sums = row_sums(load_sums(lse_ptr, attended, bias), bias)
    p = probabilities(x, sums, 0)
    if inside is not None:
        p = tl.where(inside, p, 0.0)
    if dropout.threshold is None:
        dv = dot(p.to(do.dtype), do, dv, FLOAT32_PRODUCTS)
        dp = dot(v, tl.trans(do), None, FLOAT32_PRODUCTS)
    else:  # the sign marks dropped elements, so that only one tile stays in registers
        p = negative_where_dropped(p, dropout, scoring.head, rows, tile.first_key, KEYS, 1)
        dv = dot(tl.where(p < 0, 0.0, p).to(do.dtype), do, dv, FLOAT32_PRODUCTS)
        dp = dot(v, tl.trans(do), None, FLOAT32_PRODUCTS)
        dp = tl.where(p < 0, 0.0, dp * dropout.inverse_keep)
        p = tl.abs(p)
    dlt = tl.load(delta_ptr, mask=attended, other=None if attended is None else 0.0)
    dlogit = p * (dp - dlt[None, :])
    if tile.dbias.pointers is not None:
        kept = attending(sums)[None, :]
        if inside is not None:
            kept &= inside
        dlogit = tl.where(kept, dlogit, 0.0)
        store_pairs(tile.dbias, dlogit, scoring.head, first_row, tile.dbias.q_len)
    ds = through_cap(dlogit, capped, scoring)
    if inside is not None:
        ds = tl.where(inside, ds, 0.0)
    return dot(ds.to(q.dtype), q, dk, FLOAT32_PRODUCTS), dv


@triton.jit
def checked_rows(operands, first_row, BLOCK_M: tl.constexpr):
    """Whether any row of the block is segment-checked."""
    block = first_row // 64
    checked = tl.load(operands.flags + block) & 1
    for j in tl.static_range(1, BLOCK_M // 64):
        in_bounds = block + j < operands.row_blocks
        checked |= tl.load(operands.flags + block + j, mask=in_bounds, other=0) & 1
    return checked


@triton.jit
def stats_at(operands, g, place, walk):
    """Pointers to the row statistics and delta of a step, for the g-th head of the group."""
    lse = operands.first_lse + g * operands.stat_head + place * walk.unit
    return lse, operands.first_delta + g * operands.stat_head + place * walk.unit


@triton.jit
def over_rows(
    grads, kv, tile, walk, operands, scoring, first_member, members,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of all steps to `grads`, for `members` query heads of the group, from
    `first_member` on. These heads share `walk`."""
    cols = tl.arange(0, BLOCK_M)
    KEYS: tl.constexpr = tile.keys.shape[0]
    bias = scoring.bias.array
    if bias is not None and STAGES == 1:
        walk = in_one_loop(walk)
    partial = partial_steps(walk)
    for i in tl.range(0, members * partial, num_stages=1):
        g = i // partial
        place = partial_place(walk, i - g * partial, BLOCK_M)
        g = first_member + g
        first_row = walk.origin + place * walk.unit
        rows = first_row + cols
        in_bounds = rows < tile.segments.q_len
        lo = tl.load(operands.lo + rows, mask=in_bounds, other=0)
        hi = tl.load(operands.hi + rows, mask=in_bounds, other=0)
        # the last block may extend past the hull; rows there are not read
        attended = (hi > lo) & (rows < operands.end)
        stats = stats_at(operands, g, place, walk)
        if tile.block_mask.bits is not None:  # it may exclude all keys of a row
            attended &= attending(row_sums(load_sums(stats[0], attended, bias), bias))
        qdo = load_pair(operands.pair, place, g, attended[:, None], QK_DIM, V_DIM)
        checked = checked_rows(operands, first_row, BLOCK_M)
        inside = keep(rows, tile.keys, lo, hi, checked, tile.segments, 1)
        head = tile.first_head + g
        head_mask = mask_of_head(tile.block_mask, tile.mask_b, head)
        inside = keep_in_block_mask(
            inside, tile.block_mask, head_mask, rows, tile.keys, tile.first_key, KEYS, 1
        )
        head_scoring = of_head(scoring, tile.b, tile.heads, head)
        grads = dkdv_step(
            grads, kv, qdo, stats, attended, inside, tile, head_scoring, first_row, rows,
            FLOAT32_PRODUCTS,
        )  # fmt: skip
    if walk.full_begin is not None:
        full = full_steps(walk)
        if walk.listed is not None:
            place = full_place(walk, 0, walk.start + walk.full_begin * BLOCK_M, BLOCK_M)
        for i in tl.range(0, members * full, num_stages=STAGES):
            g = i // full
            if walk.listed is None:
                place = walk.full_begin + i - g * full
            g = first_member + g
            qdo = load_pair(operands.pair, place, g, None, QK_DIM, V_DIM)
            stats = stats_at(operands, g, place, walk)
            head_scoring = of_head(scoring, tile.b, tile.heads, tile.first_head + g)
            first_row = walk.origin + place * walk.unit
            grads = dkdv_step(
                grads, kv, qdo, stats, None, None, tile, head_scoring, first_row, first_row + cols,
                FLOAT32_PRODUCTS,
            )  # fmt: skip
            if walk.listed is not None:
                step = (i + 1) % full
                ranged = walk.start + (walk.full_begin + step) * BLOCK_M
                place = full_place(walk, step, ranged, BLOCK_M)
    return grads


@triton.jit
def backward_dkdv(
    query, key, value, dout, lse, delta, dk, dv, dbias, kv_start, kv_end, q_ids, kv_ids, q_pos,
    kv_pos, q_blocks, kv_blocks, kv_order, block_mask, kv_block_lists, scales, slopes, q_bias_pos,
    kv_bias_pos, bias, dropout_streams, dropout_rows, scale, soft_cap, inverse_keep, mask_mode,
    bias_kind, bias_axes, dropout_threshold, dropout_rows_batch, batch, mask_batch, scales_batch,
    bias_batch, block_mask_batch, block_mask_heads, q_block, kv_block, q_len, kv_len, heads,
    kv_heads, row_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys of one key/value head, summed over the group's query heads in
    registers. `dbias` (B, H, Sq, Skv) is the gradient of a bias of that shape, in the query's
    dtype; None in other kernels."""
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
    qk_dims, v_dims = columns(QK_DIM), columns(V_DIM)
    kv_first = (b.to(tl.int64) * kv_len + first_key) * kv_heads + kv_head
    k_ptr = row_pointers(key, kv_first, kv_heads, qk_dims, qk_dim, QK_DIM, BLOCK_N)
    k = load_rows(k_ptr, present, qk_dim, QK_DIM)
    v_ptr = row_pointers(value, kv_first, kv_heads, v_dims, v_dim, V_DIM, BLOCK_N)
    kv = (k, load_rows(v_ptr, present, v_dim, V_DIM))

    mask_row = mask_b.to(tl.int64) * q_len
    kv_start += mask_row
    kv_end += mask_row
    segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)
    row_blocks = tl.cdiv(q_len, 64)
    flags = q_blocks + (mask_b.to(tl.int64) * 5 + 4) * row_blocks
    block_masks = BlockMask(
        block_mask, kv_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block, q_len,
        kv_len,
    )  # fmt: skip
    nth, tiles = first_key // 128, tl.cdiv(kv_len, 128)
    walk = steps_of(
        start, steps, full_begin, full_end, block_masks, mask_b, kv_head * group, nth, tiles,
        row_blocks, BLOCK_M,
    )  # fmt: skip

    q_heads = size_of(row_heads, heads)
    cols = tl.arange(0, BLOCK_M)
    q_first = (b.to(tl.int64) * q_len + walk.origin) * q_heads + kv_head * group
    first_head = kv_head * group
    pairs = pair_gradients_of(dbias, b, heads, first_key, q_len, kv_len, BLOCK_M, keys)
    tile = KeyTile(first_head, heads, b, mask_b, first_key, keys, segments, block_masks, pairs)
    pointers = pointers_of(query, dout, q_first, q_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_M)
    stat = (b.to(tl.int64) * heads + first_head) * q_len + walk.origin
    first_lse = pointer_to_sums(lse, bias) + stat + cols
    first_delta = delta + stat + cols
    pair = pair_of(pointers, q_heads, qk_dim, v_dim, walk.unit, QK_DIM, V_DIM)
    operands = RowOperands(
        pair, first_lse, first_delta, q_len.to(tl.int64), kv_start, kv_end, end, flags, row_blocks
    )
    scoring = scoring_of(
        scale, scales, scales_batch, soft_cap, slopes, bias_batch, q_bias_pos, kv_bias_pos, bias,
        bias_kind, bias_axes, dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch,
        inverse_keep, b, heads, None, keys, q_len, kv_len, 1,
    )  # fmt: skip

    if dbias is not None:
        begin = tl.minimum(start, q_len)  # q_len if no row attends to the keys
        for g in tl.range(0, group, num_stages=1):
            clear_pairs(pairs, first_head + g, 0, begin)
            clear_pairs(pairs, first_head + g, begin + steps * BLOCK_M, q_len)
    dk_acc = tl.zeros([BLOCK_N, qk_dims.shape[0]], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, v_dims.shape[0]], tl.float32)
    grads = (dk_acc, dv_acc)
    if block_mask is None:
        grads = over_rows(
            grads, kv, tile, walk, operands, scoring, 0, group,
            QK_DIM, V_DIM, BLOCK_M, STAGES, FLOAT32_PRODUCTS,
        )  # fmt: skip
    else:
        # heads with separate block masks one after the other, otherwise all in one loop
        per_head = block_mask_heads > 1
        members = tl.where(per_head, 1, group)
        for turn in tl.range(0, tl.where(per_head, group, 1)):
            head_walk = steps_of(
                start, steps, full_begin, full_end, block_masks, mask_b, first_head + turn, nth,
                tiles, row_blocks, BLOCK_M,
            )  # fmt: skip
            grads = over_rows(
                grads, kv, tile, head_walk, operands, scoring, turn, members,
                QK_DIM, V_DIM, BLOCK_M, STAGES, FLOAT32_PRODUCTS,
            )  # fmt: skip

    dk_acc, dv_acc = grads
    if dropout_threshold is not None:
        dv_acc *= inverse_keep
    dk_out = row_pointers(dk, kv_first, kv_heads, qk_dims, qk_dim, QK_DIM, BLOCK_N)
    dv_out = row_pointers(dv, kv_first, kv_heads, v_dims, v_dim, V_DIM, BLOCK_N)
    dk_acc = (dk_acc * scoring.scale).to(dk.dtype.element_ty)
    store_rows(dk_out, dk_acc, present, qk_dim, QK_DIM)
    store_rows(dv_out, dv_acc.to(dv.dtype.element_ty), present, v_dim, V_DIM)
