"""Forward attention with all that changes scores, any head dim up to a compiled one (logits.py),
and maps of blocks (block_map.py).

For every GPU that Triton serves. As forward.py, which serves what needs none of this. Beside output
and log-sum-exp: `top`, the largest logit of every row.
"""

import triton
import triton.language as tl
from portable.block_lists import keep_in_map, map_of_tile, step_at
from portable.kv_ranges import (
    columns,
    elements_of,
    keep,
    key_range,
    masked_step,
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
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_general(
    acc, m, l, q, k, v, inside, far, scale2, cap2, slope2, bias_batch, MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One block of keys. k (N, Dqk), v (N, Dv); `inside` (M, N) where MASKED."""
    _, x = logits(dot(q, tl.trans(k), None, EXACT), far, scale2, cap2, slope2, bias_batch)
    if MASKED:
        x = tl.where(inside, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        # a row that has met no key yet: 2^(-inf - 0) = 0, not NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_new = tl.maximum(m, tl.max(x, 1))
        base = m_new
    p = tl.exp2(x - base[:, None])
    alpha = tl.exp2(m - base)
    l = l * alpha + tl.sum(p, 1)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None], EXACT)
    return acc, m_new, l


@triton.jit
def forward_fallback(
    query, key, value, out, lse, top, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order,
    map_bits, q_entries, scales, slopes, q_places, kv_places,
    scale, soft_cap, element_test, batch, mask_batch, scales_batch, bias_batch,
    map_batch, map_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
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
    q_ids, kv_ids, q_pos, kv_pos = elements_of(
        q_ids, kv_ids, q_pos, kv_pos, mask_b, q_len, kv_len, element_test
    )

    scale2 = scale_of(scales, scale, scales_batch, b) * LOG2E
    cap2 = soft_cap * LOG2E
    slope2 = slope_of(slopes, bias_batch, b, heads, head)
    q_places, placed_rows = places_of(q_places, bias_batch, b, q_len)
    kv_places, placed_keys = places_of(kv_places, bias_batch, b, kv_len)
    q_at = tl.load(q_places + rows, mask=rows < placed_rows, other=0)

    qk_dims = columns(QK_DIM)
    v_dims = columns(V_DIM)
    first = (b.to(tl.int64) * q_len + row) * heads + head
    local = tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * heads
    # rows that attend nothing are not read
    q = load_part(
        query + first * qk_dim + local * qk_dim + qk_dims[None, :],
        (hi > lo)[:, None],
        qk_dim,
        QK_DIM,
    )

    cols, k_ptr, v_ptr, k_row, v_row = keys_of(
        key, value, b, kv_head, kv_len, kv_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_N
    )

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, v_dims.shape[0]], tl.float32)
    for i in tl.range(0, edges, num_stages=1):
        ranged = start + masked_step(i, core_begin, core_end) * BLOCK_N
        at = step_at(listed, i, edges, map_heads, ranged, BLOCK_N)
        keys = at + cols
        # keys past the end of the tile's range are not read: their values never meet this tile
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
        acc, m, l = attend_general(
            acc, m, l, q, k, v, inside, far, scale2, cap2, slope2, bias_batch, True, EXACT
        )
    at = step_at(listed, edges, edges + core, map_heads, start + core_begin * BLOCK_N, BLOCK_N)
    for i in tl.range(0, core, num_stages=STAGES):
        keys = at + cols
        k = load_part(k_ptr + at * k_row, None, qk_dim, QK_DIM)
        v = load_part(v_ptr + at * v_row, None, v_dim, V_DIM)
        far = distances(q_at, tl.load(kv_places + keys, mask=keys < placed_keys, other=0))
        acc, m, l = attend_general(
            acc, m, l, q, k, v, None, far, scale2, cap2, slope2, bias_batch, False, EXACT
        )
        # carried from step to step: loads of an address loaded in the same one are not pipelined as
        # far ahead
        at = step_at(listed, edges + i + 1, edges + core, map_heads, at + BLOCK_N, BLOCK_N)

    # none of a row's keys may be in the map; a NaN is attended: it must reach the result
    attended = (hi > lo) & (l != 0.0)
    result = tl.where(attended[:, None], acc / tl.where(attended, l, 1.0)[:, None], 0.0)
    store_part(
        out + first * v_dim + local * v_dim + v_dims[None, :],
        result.to(out.dtype.element_ty),
        there[:, None],
        v_dim,
        V_DIM,
    )
    stat = (b.to(tl.int64) * heads + head) * q_len + rows
    logsumexp = tl.where(attended, (m + tl.log2(l)) * LN2, float("-inf"))
    tl.store(lse + stat, logsumexp, mask=there)
    tl.store(top + stat, tl.where(attended, m * LN2, float("-inf")), mask=there)
