"""Backward attention over row ranges, for every GPU that Triton supports: the gradient of a bias
array (bias.py). bwd.py has the formulas:

    dbias = dlogit, summed over the broadcast axes of the array

A program owns a tile of the array and loops over the batch rows, heads and tiles of rows that read
it, in a fixed order: there are no atomics, and results are bitwise reproducible. Scores are
computed a third time, because no program of the other kernels visits all of these rows.
"""

import triton
import triton.language as tl
from portable.arithmetic import dot
from portable.bias import FLOAT32, as_float32, bias_of, bias_tile
from portable.block_lists import BlockMask, keep_in_block_mask, mask_of_head
from portable.dropout import drop
from portable.kv_ranges import columns, keep, key_range, load_rows, row_pointers, segments_of
from portable.row_sums import attending, load_sums, pointer_to_sums, probabilities, row_sums
from portable.scoring import Terms, distances_of, logits, scoring_of


@triton.jit
def backward_dbias(
    query, key, value, dout, lse, delta, dbias, kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, block_mask, scales, slopes, q_bias_pos, kv_bias_pos, bias, dropout_streams,
    dropout_rows, scale, soft_cap, inverse_keep, mask_mode, bias_kind, bias_axes, dropout_threshold,
    dropout_rows_batch, batch, mask_batch, scales_batch, bias_batch, block_mask_batch,
    block_mask_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Rows that attend to nothing (an empty range, or a log-sum-exp of -inf) contribute nothing."""
    group = heads // kv_heads
    has_heads, has_rows = bias_axes & 2, bias_axes & 4
    row_tiles = tl.cdiv(q_len, BLOCK_M)
    key_tiles = tl.cdiv(kv_len, BLOCK_N)
    own_tiles = tl.where(has_rows != 0, row_tiles, 1)
    own_heads = tl.where(has_heads != 0, heads, 1)
    pid = tl.program_id(0)
    first_key = pid % key_tiles * BLOCK_N
    rest = pid // key_tiles
    own_tile = rest % own_tiles
    rest = rest // own_tiles
    own_head = rest % own_heads
    own_group = rest // own_heads

    # the numbers of batch rows, heads and tiles of rows that read this tile
    batches = bias_axes >> 3
    members = tl.where(has_heads != 0, 1, heads)
    tiles = tl.where(has_rows != 0, 1, row_tiles)

    keys = first_key + tl.arange(0, BLOCK_N)
    present = keys < kv_len
    local_rows = tl.arange(0, BLOCK_M)
    qk_dims, v_dims = columns(QK_DIM), columns(V_DIM)
    block_masks = BlockMask(
        block_mask, block_mask, block_mask_batch, block_mask_heads, q_block, kv_block, q_len,
        kv_len,
    )  # fmt: skip

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, batches * members * tiles, num_stages=1):
        row = (own_tile + i % tiles) * BLOCK_M
        head = own_head + i // tiles % members
        b = own_group * batches + i // tiles // members
        mask_b = tl.where(mask_batch > 1, b, 0)
        start, end, _full_lo, _full_hi, segment_checked = key_range(
            q_blocks, mask_b, row, q_len, BLOCK_M
        )
        if (start < first_key + BLOCK_N) & (end > first_key):
            # No product here sums over rows or keys, so garbage in rows and keys outside the mask
            # stays there until the final select. Loads therefore do not wait for the row ranges.
            rows = row + local_rows
            real = rows < q_len
            mask_row = mask_b.to(tl.int64) * q_len
            lo = tl.load(kv_start + mask_row + rows, mask=real, other=0)
            hi = tl.load(kv_end + mask_row + rows, mask=real, other=0)
            stat = (b.to(tl.int64) * heads + head) * q_len + rows
            sums = load_sums(pointer_to_sums(lse, bias) + stat, real, bias)
            dlt = tl.load(delta + stat, mask=real, other=0.0)
            first = (b.to(tl.int64) * q_len + row) * heads + head
            q_ptr = row_pointers(query, first, heads, qk_dims, qk_dim, QK_DIM, BLOCK_M)
            q = load_rows(q_ptr, real[:, None], qk_dim, QK_DIM)
            do_ptr = row_pointers(dout, first, heads, v_dims, v_dim, V_DIM, BLOCK_M)
            do = load_rows(do_ptr, real[:, None], v_dim, V_DIM)
            kv_first = (b.to(tl.int64) * kv_len + first_key) * kv_heads + head // group
            k_ptr = row_pointers(key, kv_first, kv_heads, qk_dims, qk_dim, QK_DIM, BLOCK_N)
            k = load_rows(k_ptr, present[:, None], qk_dim, QK_DIM)
            if bias_kind is None:
                v_ptr = row_pointers(value, kv_first, kv_heads, v_dims, v_dim, V_DIM, BLOCK_N)
                v = load_rows(v_ptr, present[:, None], v_dim, V_DIM)
            sums = row_sums(sums, bias)
            attended = (hi > lo) & attending(sums)
            added = bias_of(bias, bias_kind, bias_axes, b, heads, q_len, kv_len)
            added = bias_tile(added, head, row, first_key, BLOCK_M, BLOCK_N, 0)
            x = dot(q, tl.trans(k), None, FLOAT32_PRODUCTS)
            scoring = scoring_of(
                scale, scales, scales_batch, soft_cap, slopes, bias_batch, q_bias_pos, kv_bias_pos,
                bias, bias_kind, bias_axes, dropout_streams, dropout_rows, dropout_threshold,
                dropout_rows_batch, inverse_keep, b, heads, head, rows, q_len, kv_len, 0,
            )  # fmt: skip
            terms = Terms(distances_of(scoring.positions, keys), added)
            _capped, x = logits(x, terms, scoring)
            p = probabilities(x, sums, 1)
            if bias_kind is not None:  # loaded late, since float32 would spill registers
                v_ptr = row_pointers(value, kv_first, kv_heads, v_dims, v_dim, V_DIM, BLOCK_N)
                v = load_rows(v_ptr, present[:, None], v_dim, V_DIM)
            dp = dot(do, tl.trans(v), None, FLOAT32_PRODUCTS)
            if dropout_threshold is not None:
                dp *= inverse_keep
            dp = drop(dp, scoring.dropout, head, rows, first_key, BLOCK_N, 0)
            segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)
            inside = keep(rows, keys, lo, hi, segment_checked, segments, 0)
            own = mask_of_head(block_masks, mask_b, head)
            inside = keep_in_block_mask(inside, block_masks, own, rows, keys, first_key, BLOCK_N, 0)
            inside &= attended[:, None]
            acc += tl.where(inside, p * (dp - dlt[:, None]), 0.0)

    own = (own_group.to(tl.int64) * own_heads + own_head) * tl.where(has_rows != 0, q_len, 1)
    if bias_kind is None:  # the compiler sees that rows are 16-byte aligned
        kv_len = kv_len // 8 * 8
        present = keys < kv_len
    if has_rows != 0:
        rows = own_tile * BLOCK_M + local_rows
        offset = (own + rows.to(tl.int64))[:, None] * kv_len + keys[None, :]
        in_bounds = (rows < q_len)[:, None] & present[None, :]
        if bias_kind is not None and bias_kind == FLOAT32:
            tl.store(as_float32(dbias) + offset, acc, mask=in_bounds)
        else:
            tl.store(dbias + offset, acc.to(dbias.dtype.element_ty), mask=in_bounds)
    else:
        total = tl.sum(acc, 0)
        columns_of = own * kv_len + keys
        if bias_kind is not None and bias_kind == FLOAT32:
            tl.store(as_float32(dbias) + columns_of, total, mask=present)
        else:
            tl.store(dbias + columns_of, total.to(dbias.dtype.element_ty), mask=present)
