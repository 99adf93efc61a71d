"""Forward attention over row ranges, for every GPU that Triton serves.

Online softmax (FlashAttention-2, arXiv 2307.08691): with m the running maximum of the scaled scores
in base 2,
    p = 2^(s * scale * log2(e) - m),   l = l * alpha + sum(p),   acc = acc * alpha + p v,
    alpha = 2^(m_old - m_new)
The order of the key blocks does not matter, so the blocks that need a mask come first and one
mask-free loop does the rest. `scale` is positive: the caller moves a sign into the query.
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
    split,
    store_rows,
    tile_of_program,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend(acc, m, l, q, k, v, inside, scale2, MASKED: tl.constexpr):
    """One block of keys. k (N, Dqk), v (N, Dv); `inside` (M, N) where MASKED."""
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        s = tl.where(inside, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale2)
        # a row that has met no key yet: 2^(-inf - 0) = 0, not NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * scale2)
        base = m_new
    p = tl.exp2(s * scale2 - base[:, None])
    alpha = tl.exp2(m - base)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, l


@triton.jit
def forward(
    query, key, value, out, lse, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads, row_heads,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of query and out are `row_heads` heads apart, of which this is about `heads`."""
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
    q_ids, kv_ids, q_pos, kv_pos = elements_of(
        q_ids, kv_ids, q_pos, kv_pos, mask_b, q_len, kv_len, element_test
    )

    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    first = (b.to(tl.int64) * q_len + row) * row_heads + head
    local = tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * row_heads
    # rows that attend nothing are not read
    q = load_rows(
        query + first * QK_DIM + local * QK_DIM + qk_dims[None, :], (hi > lo)[:, None], QK_DIM
    )

    kv_first = (b.to(tl.int64) * kv_len + start) * kv_heads + kv_head
    cols = tl.arange(0, BLOCK_N)
    k_ptr = key + kv_first * QK_DIM + cols[:, None] * (kv_heads * QK_DIM) + qk_dims[None, :]
    v_ptr = value + kv_first * V_DIM + cols[:, None] * (kv_heads * V_DIM) + v_dims[None, :]
    k_step = BLOCK_N * kv_heads.to(tl.int64) * QK_DIM
    v_step = BLOCK_N * kv_heads.to(tl.int64) * V_DIM

    scale2 = scale * LOG2E
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, v_dims.shape[0]], tl.float32)
    for i in tl.range(0, steps - core_end + core_begin, num_stages=1):
        step = masked_step(i, core_begin, core_end)
        keys = start + step * BLOCK_N + cols
        # keys past the end of the tile's range are not read: their values never meet this tile
        present = (keys < end)[:, None]
        k = load_rows(k_ptr + step * k_step, present, QK_DIM)
        v = load_rows(v_ptr + step * v_step, present, V_DIM)
        inside = keep(
            rows, keys, lo, hi, tested, q_ids, kv_ids, q_pos, kv_pos, element_test, q_len, kv_len, 0
        )
        acc, m, l = attend(acc, m, l, q, k, v, inside, scale2, True)
    for step in tl.range(core_begin, core_end, num_stages=STAGES):
        k = load_rows(k_ptr + step * k_step, None, QK_DIM)
        v = load_rows(v_ptr + step * v_step, None, V_DIM)
        acc, m, l = attend(acc, m, l, q, k, v, None, scale2, False)

    attended = (hi > lo) & (l != 0.0)  # a NaN is attended: it must reach the result
    result = tl.where(attended[:, None], acc / tl.where(attended, l, 1.0)[:, None], 0.0)
    store_rows(
        out + first * V_DIM + local * V_DIM + v_dims[None, :],
        result.to(out.dtype.element_ty),
        there[:, None],
        V_DIM,
    )
    logsumexp = tl.where(attended, (m + tl.log2(l)) * LN2, float("-inf"))
    tl.store(lse + (b.to(tl.int64) * heads + head) * q_len + rows, logsumexp, mask=there)
