"""Backward of portable/fwd_fallback.py, for every GPU that Triton serves: delta, then dK and dV,
then dQ, as in backward.py.

    p = exp(logit - lse),    dlogit = p * (do v^T - delta),    ds = dlogit * (1 - (capped / cap)^2)
    dk = scale * ds^T q,     dq = scale * ds k,                delta = sum(do * out) - dlse
    dscale = sum(ds * s),    dslope = -sum(dlogit * |i - j|), of every row, on request: `dnumbers`

Masked elements are selected away, never multiplied; rows of which the forward says that they attend
nothing (lse -inf) are not read. No atomics: the same bits every run.
"""

import triton
import triton.language as tl
from portable.block_lists import keep_in_map, list_of, map_of, map_of_tile, step_at, steps_of
from portable.kv_ranges import (
    columns,
    elements_of,
    keep,
    key_range,
    masked_step,
    row_range,
    split,
    tile_of_program,
)
from portable.score_mods import (
    LOG2E,
    distances,
    dot,
    keys_of,
    load_part,
    logits,
    places_of,
    scale_of,
    slope_of,
    store_part,
    through_cap,
)


@triton.jit
def backward_delta_fallback(
    out, dout, dlse, delta, q_lo, q_hi, has_dlse, batch, mask_batch, q_len, heads, v_dim,
    V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta (B, H, Sq). Heads are the fastest index: neighbouring programs read neighbouring
    memory."""
    pid = tl.program_id(0)
    head = pid % heads
    tiles = tl.cdiv(q_len, ROWS)
    b = pid // heads // tiles
    rows = (pid // heads % tiles) * ROWS + tl.arange(0, ROWS)
    there = rows < q_len
    mask_row = tl.where(mask_batch > 1, b, 0).to(tl.int64) * q_len
    attended = tl.load(q_hi + mask_row + rows, mask=there, other=0) > tl.load(
        q_lo + mask_row + rows, mask=there, other=0
    )
    offset = ((b.to(tl.int64) * q_len + rows) * heads + head)[:, None] * v_dim
    offset += columns(V_DIM)[None, :]
    # the cotangent of an empty row is ignored: it is not even read
    o = load_part(out + offset, attended[:, None], v_dim, V_DIM).to(tl.float32)
    do = load_part(dout + offset, attended[:, None], v_dim, V_DIM).to(tl.float32)
    at = (b.to(tl.int64) * heads + head) * q_len + rows
    total = tl.sum(o * do, 1)
    if has_dlse != 0:
        total -= tl.load(dlse + at, mask=attended, other=0.0)
    tl.store(delta + at, total, mask=there)


@triton.jit
def dkdv_step_general(
    dk, dv, k, v, q, do, lse2, dlt, inside, far, scale2, cap2, slope2, bias_batch,
    MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One block of rows, transposed: scores are keys x rows, so that p^T and ds^T are left operands
    in registers."""
    capped, x = logits(dot(k, tl.trans(q), None, EXACT), far, scale2, cap2, slope2, bias_batch)
    p = tl.exp2(x - lse2[None, :])
    if MASKED:
        p = tl.where(inside, p, 0.0)
    dv = dot(p.to(do.dtype), do, dv, EXACT)
    ds = through_cap(p * (dot(v, tl.trans(do), None, EXACT) - dlt[None, :]), capped, cap2)
    if MASKED:
        ds = tl.where(inside, ds, 0.0)
    dk = dot(ds.to(q.dtype), q, dk, EXACT)
    return dk, dv


@triton.jit
def backward_dkdv_fallback(
    query, key, value, dout, lse, delta, dk, dv, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks,
    kv_blocks, kv_order,
    map_bits, kv_entries, scales, slopes, q_places, kv_places,
    scale, soft_cap, element_test, batch, mask_batch, scales_batch, bias_batch,
    map_batch, map_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one key/value head; its group's query heads are summed in registers."""
    group = heads // kv_heads
    _, kv_head, b, mask_b, first_key = tile_of_program(
        kv_order, batch, mask_batch, tl.cdiv(kv_len, 128), 1, kv_heads, BLOCK_N
    )
    if first_key >= kv_len:
        return
    start, end, core_lo, core_hi = row_range(kv_blocks, mask_b, first_key, kv_len, BLOCK_N)
    steps, core_begin, core_end = split(start, end, core_lo, core_hi, BLOCK_M)

    keys = first_key + tl.arange(0, BLOCK_N)
    present = (keys < kv_len)[:, None]
    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    kv_first = (b.to(tl.int64) * kv_len + first_key) * kv_heads + kv_head
    local = tl.arange(0, BLOCK_N)[:, None].to(tl.int64) * kv_heads
    k = load_part(
        key + kv_first * qk_dim + local * qk_dim + qk_dims[None, :], present, qk_dim, QK_DIM
    )
    v = load_part(value + kv_first * v_dim + local * v_dim + v_dims[None, :], present, v_dim, V_DIM)

    scale = scale_of(scales, scale, scales_batch, b)
    scale2 = scale * LOG2E
    cap2 = soft_cap * LOG2E
    q_places, placed_rows = places_of(q_places, bias_batch, b, q_len)
    kv_places, placed_keys = places_of(kv_places, bias_batch, b, kv_len)
    kv_at = tl.load(kv_places + keys, mask=keys < placed_keys, other=0)

    mask_row = mask_b.to(tl.int64) * q_len
    q_lo += mask_row
    q_hi += mask_row
    q_ids, kv_ids, q_pos, kv_pos = elements_of(
        q_ids, kv_ids, q_pos, kv_pos, mask_b, q_len, kv_len, element_test
    )
    row_blocks = tl.cdiv(q_len, 64)
    flags = q_blocks + (mask_b.to(tl.int64) * 5 + 4) * row_blocks

    cols = tl.arange(0, BLOCK_M)
    q_first = b.to(tl.int64) * q_len * heads + kv_head * group
    q_ptr = query + q_first * qk_dim + cols[:, None] * (heads * qk_dim) + qk_dims[None, :]
    do_ptr = dout + q_first * v_dim + cols[:, None] * (heads * v_dim) + v_dims[None, :]
    stat = (b.to(tl.int64) * heads + kv_head * group) * q_len
    lse_ptr = lse + stat + cols
    delta_ptr = delta + stat + cols
    q_row = heads.to(tl.int64) * qk_dim
    do_row = heads.to(tl.int64) * v_dim
    stat_head = q_len.to(tl.int64)

    dk_acc = tl.zeros([BLOCK_N, qk_dims.shape[0]], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, v_dims.shape[0]], tl.float32)
    # heads with maps of their own one after the other, else all in one loop
    turns = tl.where(map_heads > 1, group, 1)
    members = tl.where(map_heads > 1, 1, group)
    for turn in tl.range(0, turns):
        listed = list_of(
            kv_entries, map_heads, mask_b, kv_head * group + turn, first_key // 128,
            tl.cdiv(kv_len, 128), row_blocks,
        )  # fmt: skip
        edges, core = steps_of(
            listed, map_heads, steps - core_end + core_begin, core_end - core_begin, BLOCK_M
        )
        for i in tl.range(0, members * edges, num_stages=1):
            g = turn + i // edges
            step = i % edges
            ranged = start + masked_step(step, core_begin, core_end) * BLOCK_M
            at = step_at(listed, step, edges, map_heads, ranged, BLOCK_M)
            rows = at + cols
            there = rows < q_len
            lo = tl.load(q_lo + rows, mask=there, other=0)
            hi = tl.load(q_hi + rows, mask=there, other=0)
            # rows past the hull are not read: a block may reach over its end
            attended = (hi > lo) & (rows < end)
            total = tl.load(lse_ptr + g * stat_head + at, mask=attended, other=float("-inf"))
            attended &= total != float("-inf")
            lse2 = tl.where(attended, total, 0.0) * LOG2E
            q = load_part(q_ptr + at * q_row + g * qk_dim, attended[:, None], qk_dim, QK_DIM)
            do = load_part(do_ptr + at * do_row + g * v_dim, attended[:, None], v_dim, V_DIM)
            dlt = tl.load(delta_ptr + g * stat_head + at, mask=attended, other=0.0)
            tested = tl.load(flags + at // 64) & 1
            inside = keep(
                rows, keys, lo, hi, tested, q_ids, kv_ids, q_pos, kv_pos, element_test, q_len,
                kv_len, 1,
            )  # fmt: skip
            if map_heads > 0:
                this_map, map_width = map_of(
                    map_bits, map_batch, map_heads, mask_b, kv_head * group + g, q_len, kv_len,
                    q_block, kv_block,
                )  # fmt: skip
                inside = keep_in_map(
                    inside, this_map, map_width, rows, keys, first_key, q_len, q_block, kv_block,
                    BLOCK_N, 1,
                )  # fmt: skip
            slope2 = slope_of(slopes, bias_batch, b, heads, kv_head * group + g)
            far = distances(kv_at, tl.load(q_places + rows, mask=rows < placed_rows, other=0))
            dk_acc, dv_acc = dkdv_step_general(
                dk_acc, dv_acc, k, v, q, do, lse2, dlt, inside, far, scale2, cap2, slope2,
                bias_batch, True, EXACT,
            )  # fmt: skip
        at = step_at(listed, edges, edges + core, map_heads, start + core_begin * BLOCK_M, BLOCK_M)
        for i in tl.range(0, members * core, num_stages=STAGES):
            g = turn + i // core
            rows = at + cols
            q = load_part(q_ptr + at * q_row + g * qk_dim, None, qk_dim, QK_DIM)
            do = load_part(do_ptr + at * do_row + g * v_dim, None, v_dim, V_DIM)
            lse2 = tl.load(lse_ptr + g * stat_head + at) * LOG2E
            dlt = tl.load(delta_ptr + g * stat_head + at)
            slope2 = slope_of(slopes, bias_batch, b, heads, kv_head * group + g)
            far = distances(kv_at, tl.load(q_places + rows, mask=rows < placed_rows, other=0))
            dk_acc, dv_acc = dkdv_step_general(
                dk_acc, dv_acc, k, v, q, do, lse2, dlt, None, far, scale2, cap2, slope2,
                bias_batch, False, EXACT,
            )  # fmt: skip
            step = (i + 1) % core
            ranged = start + (core_begin + step) * BLOCK_M
            at = step_at(listed, edges + step, edges + core, map_heads, ranged, BLOCK_M)

    dk_out = dk + kv_first * qk_dim + local * qk_dim + qk_dims[None, :]
    dv_out = dv + kv_first * v_dim + local * v_dim + v_dims[None, :]
    store_part(dk_out, (dk_acc * scale).to(dk.dtype.element_ty), present, qk_dim, QK_DIM)
    store_part(dv_out, dv_acc.to(dv.dtype.element_ty), present, v_dim, V_DIM)


@triton.jit
def dq_step_general(
    dq, dscale, dslope, q, do, k, v, lse2, dlt, inside, far, scale2, cap2, slope2, bias_batch,
    has_dnumbers, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    s = dot(q, tl.trans(k), None, EXACT)
    capped, x = logits(s, far, scale2, cap2, slope2, bias_batch)
    p = tl.exp2(x - lse2[:, None])
    dlogit = p * (dot(do, tl.trans(v), None, EXACT) - dlt[:, None])
    ds = through_cap(dlogit, capped, cap2)
    if MASKED:
        ds = tl.where(inside, ds, 0.0)
    if has_dnumbers != 0:
        by_scale = ds * s
        by_slope = dlogit * far
        if MASKED:
            by_scale = tl.where(inside, by_scale, 0.0)
            by_slope = tl.where(inside, by_slope, 0.0)
        dscale += tl.sum(by_scale, 1)
        dslope -= tl.sum(by_slope, 1)
    return dot(ds.to(k.dtype), k, dq, EXACT), dscale, dslope


@triton.jit
def backward_dq_fallback(
    query, key, value, dout, lse, delta, dq, dnumbers, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, q_order,
    map_bits, q_entries, scales, slopes, q_places, kv_places,
    scale, soft_cap, element_test, has_dnumbers, batch, mask_batch, scales_batch, bias_batch,
    map_batch, map_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`dnumbers` (B, H, 2, Sq): every row's part of the gradients of scale and slope."""
    group = heads // kv_heads
    head, kv_head, b, mask_b, row = tile_of_program(
        q_order, batch, mask_batch, tl.cdiv(q_len, 128), group, kv_heads, BLOCK_M
    )
    if row >= q_len:
        return
    start, end, core_lo, core_hi, tested = key_range(q_blocks, mask_b, row, q_len, BLOCK_M)
    steps, core_begin, core_end = split(start, end, core_lo, core_hi, BLOCK_N)
    this_map, map_width, listed, edges, core = map_of_tile(
        map_bits, q_entries, map_batch, map_heads, mask_b, head, row, q_len, kv_len, q_block,
        kv_block, steps, core_begin, core_end, BLOCK_N,
    )  # fmt: skip

    rows = row + tl.arange(0, BLOCK_M)
    there = rows < q_len
    mask_row = mask_b.to(tl.int64) * q_len
    lo = tl.load(q_lo + mask_row + rows, mask=there, other=0)
    hi = tl.load(q_hi + mask_row + rows, mask=there, other=0)
    stat = (b.to(tl.int64) * heads + head) * q_len + rows
    total = tl.load(lse + stat, mask=hi > lo, other=float("-inf"))
    attended = total != float("-inf")
    lse2 = tl.where(attended, total, 0.0) * LOG2E
    q_ids, kv_ids, q_pos, kv_pos = elements_of(
        q_ids, kv_ids, q_pos, kv_pos, mask_b, q_len, kv_len, element_test
    )

    scale = scale_of(scales, scale, scales_batch, b)
    scale2 = scale * LOG2E
    cap2 = soft_cap * LOG2E
    slope2 = slope_of(slopes, bias_batch, b, heads, head)
    q_places, placed_rows = places_of(q_places, bias_batch, b, q_len)
    kv_places, placed_keys = places_of(kv_places, bias_batch, b, kv_len)
    q_at = tl.load(q_places + rows, mask=rows < placed_rows, other=0)

    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    first = (b.to(tl.int64) * q_len + row) * heads + head
    local = tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * heads
    # rows that attend nothing are not read: zeros keep them finite in the mask-free loop
    q = load_part(
        query + first * qk_dim + local * qk_dim + qk_dims[None, :],
        attended[:, None],
        qk_dim,
        QK_DIM,
    )
    do = load_part(
        dout + first * v_dim + local * v_dim + v_dims[None, :], attended[:, None], v_dim, V_DIM
    )
    dlt = tl.load(delta + stat, mask=attended, other=0.0)

    cols, k_ptr, v_ptr, k_row, v_row = keys_of(
        key, value, b, kv_head, kv_len, kv_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_N
    )

    acc = tl.zeros([BLOCK_M, qk_dims.shape[0]], tl.float32)
    dscale = tl.zeros([BLOCK_M], tl.float32)
    dslope = tl.zeros([BLOCK_M], tl.float32)
    for i in tl.range(0, edges, num_stages=1):
        ranged = start + masked_step(i, core_begin, core_end) * BLOCK_N
        at = step_at(listed, i, edges, map_heads, ranged, BLOCK_N)
        keys = at + cols
        present = (keys < end)[:, None]
        k = load_part(k_ptr + at * k_row, present, qk_dim, QK_DIM)
        v = load_part(v_ptr + at * v_row, present, v_dim, V_DIM)
        inside = keep(
            rows, keys, lo, hi, tested, q_ids, kv_ids, q_pos, kv_pos, element_test, q_len, kv_len, 0
        )
        if map_heads > 0:
            inside = keep_in_map(
                inside, this_map, map_width, rows, keys, at, q_len, q_block, kv_block, BLOCK_N, 0
            )
        far = distances(q_at, tl.load(kv_places + keys, mask=keys < placed_keys, other=0))
        acc, dscale, dslope = dq_step_general(
            acc, dscale, dslope, q, do, k, v, lse2, dlt, inside, far, scale2, cap2, slope2,
            bias_batch, has_dnumbers, True, EXACT,
        )  # fmt: skip
    at = step_at(listed, edges, edges + core, map_heads, start + core_begin * BLOCK_N, BLOCK_N)
    for i in tl.range(0, core, num_stages=STAGES):
        keys = at + cols
        k = load_part(k_ptr + at * k_row, None, qk_dim, QK_DIM)
        v = load_part(v_ptr + at * v_row, None, v_dim, V_DIM)
        far = distances(q_at, tl.load(kv_places + keys, mask=keys < placed_keys, other=0))
        acc, dscale, dslope = dq_step_general(
            acc, dscale, dslope, q, do, k, v, lse2, dlt, None, far, scale2, cap2, slope2,
            bias_batch, has_dnumbers, False, EXACT,
        )  # fmt: skip
        at = step_at(listed, edges + i + 1, edges + core, map_heads, at + BLOCK_N, BLOCK_N)

    result = tl.where(attended[:, None], acc * scale, 0.0)
    store_part(
        dq + first * qk_dim + local * qk_dim + qk_dims[None, :],
        result.to(dq.dtype.element_ty),
        there[:, None],
        qk_dim,
        QK_DIM,
    )
    if has_dnumbers != 0:
        parts = dnumbers + (b.to(tl.int64) * heads + head) * (2 * q_len)
        tl.store(parts + rows, tl.where(attended, dscale, 0.0), mask=there)
        tl.store(parts + q_len + rows, tl.where(attended, dslope, 0.0), mask=there)
