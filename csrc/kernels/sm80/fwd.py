"""Forward attention with mma.sync and cp.async, for compute capabilities 8.x, 11.0 and 12.x.

This is the portable forward (portable/fwd.py) in Gluon, which controls what stays in shared memory.
Queries stay there and are read again in every step. A warp then has enough registers for 32 rows,
and reads keys and values half as often. Keys and values have one buffer each: values are copied
while scores are computed, and the next keys while values are multiplied (FlashAttention-2,
arXiv 2307.08691). If ROW_WARPS is 2, two warps share 32 rows: each computes half of the keys of S
and half of the output columns, and P goes through shared memory. Keys and values are then read half
as often again. Tile sizes are powers of two, so head dims of 96 and 192 are split into chunks of 32
and 64 columns.
"""

from common.kv_ranges import (
    LOG2E,
    key_range,
    nth_step,
    opaque,
    place_of_tile,
    position_row,
    split,
)
from common.sinks import add_sink, log_sum_exp, sink_of
from common.soft_cap import tanh_of_scores
from sm80.common import (
    accumulator,
    added_columns,
    chunk_of,
    copy_chunks,
    copy_layout,
    scaled,
    swizzled,
    tile_offsets,
    times,
    times_shared,
    times_transposed,
    zeros,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def kept(s, row, rows, keys, ranges, segments, checked):
    """The scores of keys that their row attends to, and -inf for the others. Each test is applied
    to the scores directly: combining the tests in a mask would take a register per score."""
    none = float("-inf")
    lo, hi = ranges
    q_ids, kv_ids, q_pos, kv_pos, check, q_len, kv_len = segments
    distance = (keys[None, :] - lo[:, None]).to(gl.uint32, bitcast=True)
    s = gl.where(distance < (hi - lo)[:, None].to(gl.uint32, bitcast=True), s, none)
    if checked != 0:
        rows = opaque(row) + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        q_in_bounds = rows < q_len
        kv_in_bounds = keys < kv_len
        q_id = gl.load(q_ids + rows, mask=q_in_bounds, other=-1)
        kv_id = gl.load(kv_ids + keys, mask=kv_in_bounds, other=-1)
        s = gl.where(q_id[:, None] == kv_id[None, :], s, none)
        if check > 1:
            q_at = gl.load(q_pos + rows, mask=q_in_bounds, other=0)
            kv_at = gl.load(kv_pos + keys, mask=kv_in_bounds, other=0)
            s = gl.where(kv_at[None, :] <= q_at[:, None], s, none)
            if check > 2:
                q_from = gl.load(q_pos + (q_len + rows), mask=q_in_bounds, other=0)
                s = gl.where(q_from[:, None] <= kv_at[None, :], s, none)
    return s


@gluon.jit
def forward(
    query, key, value, out, lse, sinks, kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks,
    q_order, scale, soft_cap, mask_mode, batch, mask_batch, sink_batch, q_len, kv_len, heads,
    kv_heads, row_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    ROW_WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of query and out are `row_heads` heads apart, and the kernel processes `heads` of them.
    With `soft_cap` (None in kernels without it), scores become tanh, in units of the cap
    (common/soft_cap.py)."""
    WARPS: gl.constexpr = gl.num_warps()
    CHUNK: gl.constexpr = chunk_of(QK_DIM)
    V_CHUNK: gl.constexpr = chunk_of(V_DIM)
    s_layout: gl.constexpr = accumulator(WARPS, ROW_WARPS)
    by_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    copies: gl.constexpr = copy_layout(CHUNK, WARPS)
    v_copies: gl.constexpr = copy_layout(V_CHUNK, WARPS)
    dtype: gl.constexpr = query.dtype.element_ty
    SCORES: gl.constexpr = BLOCK_M * BLOCK_N // (WARPS * 32)  # per thread

    group = heads // kv_heads
    head, kv_head, b, mask_b, row = place_of_tile(
        gl.program_id(0), q_order, batch, mask_batch, (q_len + 127) // 128, group, kv_heads,
        BLOCK_M, 128 // BLOCK_M,
    )  # fmt: skip
    if row >= q_len:
        return
    start, end, full_lo, full_hi, checked = key_range(q_blocks, mask_b, row, q_len, BLOCK_M)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
    partial = steps - full_end + full_begin

    q_s = gl.allocate_shared_memory(dtype, [QK_DIM // CHUNK, BLOCK_M, CHUNK], swizzled(CHUNK))
    k_s = gl.allocate_shared_memory(dtype, [QK_DIM // CHUNK, BLOCK_N, CHUNK], swizzled(CHUNK))
    v_s = gl.allocate_shared_memory(dtype, [V_DIM // V_CHUNK, BLOCK_N, V_CHUNK], swizzled(V_CHUNK))
    if ROW_WARPS > 1:
        p_s = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], swizzled(BLOCK_N))

    mask_row = mask_b.to(gl.int64) * q_len
    mask_key = mask_b.to(gl.int64) * kv_len
    copied = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, copies))
    copied_in_bounds = copied < q_len
    # rows that attend to nothing are not read
    attend = gl.load(kv_end + mask_row + copied, mask=copied_in_bounds, other=0) > gl.load(
        kv_start + mask_row + copied, mask=copied_in_bounds, other=0
    )
    first = (b.to(gl.int64) * q_len + row) * row_heads + head
    q_offsets = tile_offsets(row_heads * QK_DIM, BLOCK_M, CHUNK, copies)
    copy_chunks(q_s, 0, query + first * QK_DIM, q_offsets, attend[:, None], QK_DIM)

    kv_first = (b.to(gl.int64) * kv_len + start) * kv_heads + kv_head
    k_base = key + kv_first * QK_DIM
    v_base = value + kv_first * V_DIM
    k_offsets = tile_offsets(kv_heads * QK_DIM, BLOCK_N, CHUNK, copies)
    v_offsets = tile_offsets(kv_heads * V_DIM, BLOCK_N, V_CHUNK, v_copies)
    k_step = kv_heads.to(gl.int64) * (BLOCK_N * QK_DIM)
    v_step = kv_heads.to(gl.int64) * (BLOCK_N * V_DIM)
    k_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copies))
    v_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, v_copies))

    rows = row + gl.arange(0, BLOCK_M, by_row)
    in_bounds = rows < q_len
    lo = gl.load(kv_start + mask_row + rows, mask=in_bounds, other=0)
    hi = gl.load(kv_end + mask_row + rows, mask=in_bounds, other=0)
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    segments = (
        q_ids + mask_row, kv_ids + mask_key, q_pos + position_row(mask_row, mask_mode),
        kv_pos + mask_key, mask_mode, q_len, kv_len,
    )  # fmt: skip

    scale2 = (scale if soft_cap is None else soft_cap) * LOG2E
    m = gl.full([BLOCK_M], -3e38, gl.float32, by_row)
    l = gl.zeros([BLOCK_M, 8 * ROW_WARPS], gl.float32, s_layout)  # partial sums, reduced at the end
    acc = zeros(BLOCK_M, V_DIM, s_layout)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)

    place = nth_step(0, steps, partial, full_begin, full_end)
    left_keys = end - start - place * BLOCK_N  # keys past the end of the tile's range are not read
    copy_chunks(k_s, 0, k_base + place * k_step, k_offsets, (k_rows < left_keys)[:, None], QK_DIM)
    async_copy.commit_group()
    for i in range(0, steps):
        async_copy.wait_group(0)
        if i < partial:
            left_keys = end - start - place * BLOCK_N
            copy_chunks(
                v_s, 0, v_base + place * v_step, v_offsets, (v_rows < left_keys)[:, None], V_DIM
            )
        else:
            copy_chunks(v_s, 0, v_base + place * v_step, v_offsets, None, V_DIM)
        async_copy.commit_group()
        s = times_transposed(q_s, k_s, 0, zero, QK_DIM)
        async_copy.wait_group(0)
        if soft_cap is not None:
            s = tanh_of_scores(s, scale / soft_cap, 2 * SCORES)
        if i < partial:
            keys = start + place * BLOCK_N + cols
            s = kept(s, row, rows, keys, (lo, hi), segments, checked)
        place = nth_step(i + 1, steps, partial, full_begin, full_end)
        if i + 1 < partial:
            left_keys = end - start - place * BLOCK_N
            copy_chunks(
                k_s, 0, k_base + place * k_step, k_offsets, (k_rows < left_keys)[:, None], QK_DIM
            )
        else:
            if i + 1 < steps:
                copy_chunks(k_s, 0, k_base + place * k_step, k_offsets, None, QK_DIM)
        async_copy.commit_group()
        m_new = gl.maximum(m, gl.max(s, 1) * scale2)
        alpha = gl.exp2(m - m_new)
        p = gl.exp2(s * scale2 - m_new[:, None])
        l = l * alpha[:, None] + added_columns(p, 8 * ROW_WARPS)
        m = m_new
        acc = scaled(acc, alpha[:, None], V_DIM)
        if ROW_WARPS > 1:
            p_s.store(p.to(dtype))
            acc = times_shared(p_s, v_s, 0, acc, BLOCK_N, V_DIM)
        else:
            acc = times(p.to(dtype), v_s, acc, V_DIM)

    l = gl.sum(l, 1)
    attended = (hi > lo) & (l != 0.0)  # True for NaN, so that it reaches the result
    sink = sink_of(sinks, sink_batch, b, heads, head)
    l = add_sink(l, m, sink, False)
    inverse = gl.where(attended, 1.0 / l, 0.0)
    acc = scaled(acc, inverse[:, None], V_DIM)
    natural = gl.where(attended, log_sum_exp(l, m, sink), float("-inf"))
    gl.store(lse + (b.to(gl.int64) * heads + head) * q_len + rows, natural, mask=in_bounds)
    columns = gl.arange(0, V_CHUNK, gl.SliceLayout(0, s_layout))
    local = (rows - row)[:, None] * row_heads
    offsets = local * V_DIM + columns[None, :]
    for c in gl.static_range(V_DIM // V_CHUNK):
        # a select, not a product: rows that attend to nothing may have garbage from full blocks
        x = gl.where(attended[:, None], acc[c], 0.0).to(dtype)
        gl.store(out + first * V_DIM + c * V_CHUNK + offsets, x, mask=in_bounds[:, None])
