"""Backward attention over row ranges, for every GPU that Triton serves: delta, then dK and dV, then
dQ (FlashAttention-2, arXiv 2307.08691).

    p = exp(s * scale - lse),   dv = p^T do,         ds = p * (do v^T - delta)
    dk = scale * ds^T q,        dq = scale * ds k,   delta = sum(do * out) - dlse

Masked elements are selected away, never multiplied: what padding holds may overflow to infinity. No
atomics: the same bits every run.
"""

import triton
import triton.language as tl
from portable.kv_ranges import (
    columns,
    elements_of,
    keep,
    key_range,
    load_rows,
    masked_step,
    row_range,
    split,
    store_rows,
    tile_of_program,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def backward_delta(
    out, dout, dlse, delta, q_lo, q_hi, has_dlse, batch, mask_batch, q_len, heads, row_heads,
    V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta (B, H, Sq). Heads are the fastest index: neighbouring programs read neighbouring
    memory.

    Here and below rows of query, out and their gradients are `row_heads` heads apart, of which this
    is about `heads`.
    """
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
    offset = ((b.to(tl.int64) * q_len + rows) * row_heads + head)[:, None] * V_DIM
    offset += columns(V_DIM)[None, :]
    # the cotangent of an empty row is ignored: it is not even read
    o = load_rows(out + offset, attended[:, None], V_DIM).to(tl.float32)
    do = load_rows(dout + offset, attended[:, None], V_DIM).to(tl.float32)
    at = (b.to(tl.int64) * heads + head) * q_len + rows
    total = tl.sum(o * do, 1)
    if has_dlse != 0:
        total -= tl.load(dlse + at, mask=attended, other=0.0)
    tl.store(delta + at, total, mask=there)


@triton.jit
def dkdv_step(dk, dv, k, v, q, do, lse2, dlt, inside, scale2, MASKED: tl.constexpr):
    """One block of rows, transposed: scores are keys x rows, so that p^T and ds^T are left operands
    in registers."""
    s = tl.dot(k, tl.trans(q))
    p = tl.exp2(s * scale2 - lse2[None, :])
    if MASKED:
        p = tl.where(inside, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - dlt[None, :])
    if MASKED:
        ds = tl.where(inside, ds, 0.0)
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def backward_dkdv(
    query, key, value, dout, lse, delta, dk, dv, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks,
    kv_blocks, kv_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads, row_heads,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
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
    k = load_rows(key + kv_first * QK_DIM + local * QK_DIM + qk_dims[None, :], present, QK_DIM)
    v = load_rows(value + kv_first * V_DIM + local * V_DIM + v_dims[None, :], present, V_DIM)

    mask_row = mask_b.to(tl.int64) * q_len
    q_lo += mask_row
    q_hi += mask_row
    q_ids, kv_ids, q_pos, kv_pos = elements_of(
        q_ids, kv_ids, q_pos, kv_pos, mask_b, q_len, kv_len, element_test
    )
    row_blocks = tl.cdiv(q_len, 64)
    flags = q_blocks + (mask_b.to(tl.int64) * 5 + 4) * row_blocks

    cols = tl.arange(0, BLOCK_M)
    q_first = (b.to(tl.int64) * q_len + start) * row_heads + kv_head * group
    q_ptr = query + q_first * QK_DIM + cols[:, None] * (row_heads * QK_DIM) + qk_dims[None, :]
    do_ptr = dout + q_first * V_DIM + cols[:, None] * (row_heads * V_DIM) + v_dims[None, :]
    stat = (b.to(tl.int64) * heads + kv_head * group) * q_len + start
    lse_ptr = lse + stat + cols
    delta_ptr = delta + stat + cols
    q_step = BLOCK_M * row_heads.to(tl.int64) * QK_DIM
    do_step = BLOCK_M * row_heads.to(tl.int64) * V_DIM
    stat_head = q_len.to(tl.int64)

    scale2 = scale * LOG2E
    dk_acc = tl.zeros([BLOCK_N, qk_dims.shape[0]], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, v_dims.shape[0]], tl.float32)
    edges = steps - core_end + core_begin
    for i in tl.range(0, group * edges, num_stages=1):
        g = i // edges
        step = masked_step(i - g * edges, core_begin, core_end)
        rows = start + step * BLOCK_M + cols
        there = rows < q_len
        lo = tl.load(q_lo + rows, mask=there, other=0)
        hi = tl.load(q_hi + rows, mask=there, other=0)
        # rows past the hull are not read: a block may reach over its end
        attended = (hi > lo) & (rows < end)
        q = load_rows(q_ptr + step * q_step + g * QK_DIM, attended[:, None], QK_DIM)
        do = load_rows(do_ptr + step * do_step + g * V_DIM, attended[:, None], V_DIM)
        lse2 = tl.load(lse_ptr + g * stat_head + step * BLOCK_M, mask=attended, other=0.0) * LOG2E
        dlt = tl.load(delta_ptr + g * stat_head + step * BLOCK_M, mask=attended, other=0.0)
        block = (start + step * BLOCK_M) // 64
        tested = tl.load(flags + block) & 1
        for j in tl.static_range(1, BLOCK_M // 64):
            tested |= tl.load(flags + block + j, mask=block + j < row_blocks, other=0) & 1
        inside = keep(
            rows, keys, lo, hi, tested, q_ids, kv_ids, q_pos, kv_pos, element_test, q_len, kv_len, 1
        )
        dk_acc, dv_acc = dkdv_step(dk_acc, dv_acc, k, v, q, do, lse2, dlt, inside, scale2, True)
    core = core_end - core_begin
    for i in tl.range(0, group * core, num_stages=STAGES):
        g = i // core
        step = core_begin + i - g * core
        q = load_rows(q_ptr + step * q_step + g * QK_DIM, None, QK_DIM)
        do = load_rows(do_ptr + step * do_step + g * V_DIM, None, V_DIM)
        lse2 = tl.load(lse_ptr + g * stat_head + step * BLOCK_M) * LOG2E
        dlt = tl.load(delta_ptr + g * stat_head + step * BLOCK_M)
        dk_acc, dv_acc = dkdv_step(dk_acc, dv_acc, k, v, q, do, lse2, dlt, None, scale2, False)

    dk_out = dk + kv_first * QK_DIM + local * QK_DIM + qk_dims[None, :]
    dv_out = dv + kv_first * V_DIM + local * V_DIM + v_dims[None, :]
    store_rows(dk_out, (dk_acc * scale).to(dk.dtype.element_ty), present, QK_DIM)
    store_rows(dv_out, dv_acc.to(dv.dtype.element_ty), present, V_DIM)


@triton.jit
def dq_step(dq, q, do, k, v, lse2, dlt, inside, scale2, MASKED: tl.constexpr):
    s = tl.dot(q, tl.trans(k))
    p = tl.exp2(s * scale2 - lse2[:, None])
    ds = p * (tl.dot(do, tl.trans(v)) - dlt[:, None])
    if MASKED:
        ds = tl.where(inside, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def backward_dq(
    query, key, value, dout, lse, delta, dq, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks,
    q_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads, row_heads,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    group = heads // kv_heads
    head, kv_head, b, mask_b, row = tile_of_program(
        q_order, batch, mask_batch, tl.cdiv(q_len, 128), group, kv_heads, BLOCK_M
    )
    if row >= q_len:
        return
    start, end, core_lo, core_hi, tested = key_range(q_blocks, mask_b, row, q_len, BLOCK_M)
    steps, core_begin, core_end = split(start, end, core_lo, core_hi, BLOCK_N)

    rows = row + tl.arange(0, BLOCK_M)
    there = rows < q_len
    mask_row = mask_b.to(tl.int64) * q_len
    lo = tl.load(q_lo + mask_row + rows, mask=there, other=0)
    hi = tl.load(q_hi + mask_row + rows, mask=there, other=0)
    attended = hi > lo
    q_ids, kv_ids, q_pos, kv_pos = elements_of(
        q_ids, kv_ids, q_pos, kv_pos, mask_b, q_len, kv_len, element_test
    )

    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    first = (b.to(tl.int64) * q_len + row) * row_heads + head
    local = tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * row_heads
    # rows that attend nothing are not read: zeros keep them finite in the mask-free loop
    q = load_rows(
        query + first * QK_DIM + local * QK_DIM + qk_dims[None, :], attended[:, None], QK_DIM
    )
    do = load_rows(dout + first * V_DIM + local * V_DIM + v_dims[None, :], attended[:, None], V_DIM)
    stat = (b.to(tl.int64) * heads + head) * q_len + rows
    lse2 = tl.load(lse + stat, mask=attended, other=0.0) * LOG2E
    dlt = tl.load(delta + stat, mask=attended, other=0.0)

    kv_first = (b.to(tl.int64) * kv_len + start) * kv_heads + kv_head
    cols = tl.arange(0, BLOCK_N)
    k_ptr = key + kv_first * QK_DIM + cols[:, None] * (kv_heads * QK_DIM) + qk_dims[None, :]
    v_ptr = value + kv_first * V_DIM + cols[:, None] * (kv_heads * V_DIM) + v_dims[None, :]
    k_step = BLOCK_N * kv_heads.to(tl.int64) * QK_DIM
    v_step = BLOCK_N * kv_heads.to(tl.int64) * V_DIM

    scale2 = scale * LOG2E
    acc = tl.zeros([BLOCK_M, qk_dims.shape[0]], tl.float32)
    for i in tl.range(0, steps - core_end + core_begin, num_stages=1):
        step = masked_step(i, core_begin, core_end)
        keys = start + step * BLOCK_N + cols
        present = (keys < end)[:, None]
        k = load_rows(k_ptr + step * k_step, present, QK_DIM)
        v = load_rows(v_ptr + step * v_step, present, V_DIM)
        inside = keep(
            rows, keys, lo, hi, tested, q_ids, kv_ids, q_pos, kv_pos, element_test, q_len, kv_len, 0
        )
        acc = dq_step(acc, q, do, k, v, lse2, dlt, inside, scale2, True)
    for step in tl.range(core_begin, core_end, num_stages=STAGES):
        k = load_rows(k_ptr + step * k_step, None, QK_DIM)
        v = load_rows(v_ptr + step * v_step, None, V_DIM)
        acc = dq_step(acc, q, do, k, v, lse2, dlt, None, scale2, False)

    result = tl.where(attended[:, None], acc * scale, 0.0)
    store_rows(
        dq + first * QK_DIM + local * QK_DIM + qk_dims[None, :],
        result.to(dq.dtype.element_ty),
        there[:, None],
        QK_DIM,
    )
