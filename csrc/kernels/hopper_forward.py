"""Forward attention on Hopper in Gluon: the same arguments and results as forward.py, its checked twin.

One program is WARP_GROUPS x 64 rows of one head. A producer warp streams keys and values through TMA into rings of STAGES tiles; each
warp group of consumers multiplies 64 rows by wgmma. In step i a consumer issues s_i = q k_i^T and acc += p_(i-1) v_(i-1) together and runs
the softmax of step i under the second product (FlashAttention-3, arXiv 2407.08608, section 3.2); named barriers make the groups take turns
at issuing (section 3.1). Masked steps come first, then one mask-free loop.

The softmax is inline assembly on a thread's own registers: P is packed to pairs of 16 bits at once, the row sum stays a partial sum of each
thread until the end, and the maximum moves only when it grows by more than 2^8 (the result is the same: p and l share the factor).
"""

from hopper import (
    LN2,
    LOG2E,
    accumulator,
    element_bits,
    key_range,
    named_barrier,
    nth_step,
    program_tile,
    quad_sum_asm,
    range_bits_asm,
    select_bits,
    split,
    warp_arrive,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def softmax_asm(n, half):
    """One thread's share of a softmax step. Operands: n / 2 packed P, m (2), l (2), alpha (2), then n scores, m (2), l (2), scale.

    Score register i belongs to row 8 * (i >> 1 & 1). The maximum is reduced over the quad; alpha is the same in the whole quad.
    """
    while hasattr(n, "value"):
        n = n.value
    while hasattr(half, "value"):
        half = half.value
    o = n // 2
    m_out, l_out, a_out, s = [o, o + 1], [o + 2, o + 3], [o + 4, o + 5], o + 6
    m_in, l_in, scale = [s + n, s + n + 1], [s + n + 2, s + n + 3], s + n + 4
    t = [f"{{ .reg .f32 x<4>, w<4>, g<2>, k<2>, e<{n}>; .reg .pred q;"]
    for r in (0, 1):
        mine = [i for i in range(n) if (i >> 1) & 1 == r]
        for c in (0, 1):
            part = mine[c::2]
            t.append(f"max.f32 x{2 * r + c}, ${s + part[0]}, ${s + part[1]};")
            t += [f"max.f32 x{2 * r + c}, x{2 * r + c}, ${s + i};" for i in part[2:]]
        t.append(f"max.f32 g{r}, x{2 * r}, x{2 * r + 1};")
    for d in (1, 2):
        t += [f"shfl.sync.bfly.b32 k{r}, g{r}, {d}, 31, -1;" for r in (0, 1)]
        t += [f"max.f32 g{r}, g{r}, k{r};" for r in (0, 1)]
    for r in (0, 1):
        t.append(
            f"mul.f32 g{r}, g{r}, ${scale}; add.f32 k{r}, ${m_in[r]}, 0f41000000; setp.gt.f32 q, g{r}, k{r};"
            f"selp.f32 ${m_out[r]}, g{r}, ${m_in[r]}, q; sub.f32 k{r}, ${m_in[r]}, ${m_out[r]};"
            f"ex2.approx.ftz.f32 ${a_out[r]}, k{r}; neg.f32 g{r}, ${m_out[r]};"
        )
    for i in range(n):
        t.append(
            f"fma.rn.f32 e{i}, ${s + i}, ${scale}, g{(i >> 1) & 1}; ex2.approx.ftz.f32 e{i}, e{i};"
        )
        if i & 1:
            t.append(f"cvt.rn.{half}x2.f32 ${i // 2}, e{i}, e{i - 1};")
    for r in (0, 1):
        mine = [i for i in range(n) if (i >> 1) & 1 == r]
        for c in (0, 1):
            part = mine[c::2]
            t.append(f"add.f32 w{2 * r + c}, e{part[0]}, e{part[1]};")
            t += [f"add.f32 w{2 * r + c}, w{2 * r + c}, e{i};" for i in part[2:]]
        t.append(
            f"add.f32 w{2 * r}, w{2 * r}, w{2 * r + 1}; fma.rn.f32 ${l_out[r]}, ${l_in[r]}, ${a_out[r]}, w{2 * r};"
        )
    return " ".join(t) + " }"


@gluon.constexpr_function
def half_name(dtype):
    while hasattr(dtype, "value"):
        dtype = dtype.value
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.jit
def softmax(s, m, l, scale2, N: gl.constexpr, half: gl.constexpr):
    """P as pairs of 16 bits (int32 [64, N / 2]: carried 16-bit values would cost a PRMT each), new m, partial l, alpha."""
    packed: gl.constexpr = gl.distributed_type(gl.int32, [64, N // 2], accumulator(N // 2))
    return gl.inline_asm(
        softmax_asm(N // 2, half),
        ("=&r", "=&f", "=&f", "=&f", "f", "f", "f", "f"),
        (s, m, l, scale2),
        (packed, m.type, l.type, m.type),
        is_pure=True,
    )


@gluon.constexpr_function
def unpack_asm(outputs, inputs):
    (o,) = outputs
    (x,) = inputs
    return " ".join(f"mov.b32 {{{o[2 * i]}, {o[2 * i + 1]}}}, {x[i]};" for i in range(len(x)))


@gluon.jit
def unpack(p, N: gl.constexpr, layout: gl.constexpr, dtype: gl.constexpr):
    bits = gl.inline_asm(
        unpack_asm, ("=h", "r"), (p,), gl.distributed_type(gl.int16, [64, N], layout), is_pure=True
    )
    return bits.to(dtype, bitcast=True)


@gluon.constexpr_function
def rescale_asm(n):
    """acc *= alpha, skipped by a warp in which every alpha is 1. Operands: n acc, n tied acc, alpha (2)."""
    while hasattr(n, "value"):
        n = n.value
    t = [
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 1}, 0f3F800000, p;"
        " vote.sync.any.pred q, p, -1; @!q bra DONE;"
    ]
    t += [f"mul.f32 ${i}, ${i}, ${2 * n + ((i >> 1) & 1)};" for i in range(n)]
    return " ".join(t) + " DONE: }"


@gluon.constexpr_function
def rescale_constraints(n):
    while hasattr(n, "value"):
        n = n.value
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f", "f"])


@gluon.jit
def produce(
    query, key, value, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    b, row, q_col, k_col, v_col, start, steps, edges, core_begin, core_end,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query.dtype
    for w in gl.static_range(WARP_GROUPS):
        mbarrier.expect(q_full.index(w), 64 * QK_DIM * 2)
        tma.async_load(query, [b, row + w * 64, q_col], q_full.index(w),
                       q_s.index(w).reinterpret(dtype, [1, 64, QK_DIM], query.layout))  # fmt: skip
    stage = 0
    phase = 0
    for i in range(0, steps):
        at = start + nth_step(i, edges, core_begin, core_end) * BLOCK_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BLOCK_N * QK_DIM * 2)
        tma.async_load(key, [b, at, k_col], k_full.index(stage),
                       k_s.index(stage).reinterpret(dtype, [1, BLOCK_N, QK_DIM], key.layout))  # fmt: skip
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BLOCK_N * V_DIM * 2)
        tma.async_load(value, [b, at, v_col], v_full.index(stage),
                       v_s.index(stage).reinterpret(dtype, [1, BLOCK_N, V_DIM], value.layout))  # fmt: skip
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def masked(
    s,
    rows,
    start,
    q_lo,
    q_hi,
    q_ids,
    kv_ids,
    q_pos,
    kv_pos,
    tested,
    element_test,
    q_len,
    kv_len,
    N: gl.constexpr,
):
    there = rows < q_len
    lo = gl.load(q_lo + rows, mask=there, other=0)
    hi = gl.load(q_hi + rows, mask=there, other=0)
    bits = gl.inline_asm(
        range_bits_asm, ("=&r", "r", "r", "r"), (lo, hi, start), lo.type, is_pure=True
    )
    if tested != 0:
        q_id = gl.load(q_ids + rows, mask=there, other=-1)
        bits = bits & element_bits(q_id, kv_ids, start, kv_len, N, "eq")
        if element_test > 1:
            q_at = gl.load(q_pos + rows, mask=there, other=0)
            bits = bits & element_bits(q_at, kv_pos, start, kv_len, N, "le")
    return select_bits(s, bits, float("-inf"))


@gluon.jit
def turn_wait(W: gl.constexpr):
    gl.inline_asm(named_barrier("sync", W, 256), "", (), ())


@gluon.jit
def turn_pass(W: gl.constexpr, WARP_GROUPS: gl.constexpr):
    gl.inline_asm(named_barrier("arrive", (W + 1) % WARP_GROUPS, 256), "", (), ())


@gluon.jit
def consume(
    W: gl.constexpr, out, lse, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, tested, element_test,
    q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    b, row, o_col, start, steps, edges, core_begin, core_end, scale2, q_len, kv_len,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype
    half: gl.constexpr = half_name(dtype)
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    o_layout: gl.constexpr = accumulator(V_DIM)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    if W == 0:
        gl.inline_asm(named_barrier("arrive", 0, 256), "", (), ())
    rows = row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([64, V_DIM], gl.float32, o_layout)
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(q_full.index(W), 0)
    q = q_s.index(W)

    # the first step has no second product to run beside
    mbarrier.wait(k_full.index(0), 0)
    turn_wait(W)
    s = warpgroup_mma(q, k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    turn_pass(W, WARP_GROUPS)
    s = warpgroup_mma_wait(0, deps=(s,))
    warp_arrive(k_empty.index(0))
    at = start + nth_step(0, edges, core_begin, core_end) * BLOCK_N
    s = masked(
        s,
        rows,
        at,
        q_lo,
        q_hi,
        q_ids,
        kv_ids,
        q_pos,
        kv_pos,
        tested,
        element_test,
        q_len,
        kv_len,
        BLOCK_N,
    )
    m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
    l = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    p, m, l, alpha = softmax(s, m, l, scale2, BLOCK_N, half)
    stage = 1
    phase = 0
    for part in gl.static_range(2):  # masked steps, then the core
        first = 1 if part == 0 else gl.maximum(edges, 1)
        last = edges if part == 0 else steps
        for i in range(first, last):
            before = gl.where(stage == 0, STAGES - 1, stage - 1)
            before_phase = gl.where(stage == 0, phase ^ 1, phase)
            mbarrier.wait(k_full.index(stage), phase)
            turn_wait(W)
            s_token = warpgroup_mma(
                q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(before), before_phase)
            acc_token = warpgroup_mma(
                unpack(p, BLOCK_N, p_layout, dtype), v_s.index(before), acc, is_async=True
            )
            turn_pass(W, WARP_GROUPS)
            s = warpgroup_mma_wait(1, deps=(s_token,))
            warp_arrive(k_empty.index(stage))
            if part == 0:
                at = start + nth_step(i, edges, core_begin, core_end) * BLOCK_N
                s = masked(
                    s,
                    rows,
                    at,
                    q_lo,
                    q_hi,
                    q_ids,
                    kv_ids,
                    q_pos,
                    kv_pos,
                    tested,
                    element_test,
                    q_len,
                    kv_len,
                    BLOCK_N,
                )
            p, m, l, alpha = softmax(s, m, l, scale2, BLOCK_N, half)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            warp_arrive(v_empty.index(before))
            acc = gl.inline_asm(
                rescale_asm(V_DIM // 2),
                rescale_constraints(V_DIM // 2),
                (acc, alpha),
                acc.type,
                is_pure=True,
            )
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
    before = gl.where(stage == 0, STAGES - 1, stage - 1)
    before_phase = gl.where(stage == 0, phase ^ 1, phase)
    mbarrier.wait(v_full.index(before), before_phase)
    acc = warpgroup_mma(unpack(p, BLOCK_N, p_layout, dtype), v_s.index(before), acc, is_async=True)
    l = gl.inline_asm(quad_sum_asm, ("=&f", "f"), (l,), l.type, is_pure=True)
    there = rows < q_len
    attended = (l > 0) & (
        gl.load(q_hi + rows, mask=there, other=0) > gl.load(q_lo + rows, mask=there, other=0)
    )
    gl.store(lse + rows, gl.where(attended, (m + gl.log2(l)) * LN2, float("-inf")), mask=there)
    inverse = gl.where(attended, 1.0 / l, 0.0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o_layout)), 1)
    # select, not multiply: a row that attends nothing may have met garbage in the core
    acc = gl.where(inverse != 0.0, acc * inverse, 0.0)
    o = q_s.index(W).reinterpret(dtype, [64, V_DIM], v_s.index(0).layout)
    o.store(acc.to(dtype))
    fence_async_shared()
    gl.barrier()
    tma.async_store(out, [b, row + W * 64, o_col], o.reinterpret(dtype, [1, 64, V_DIM], out.layout))
    tma.store_wait(0)


@gluon.jit
def forward_hopper(
    query, key, value, out, lse, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """query, key, value, out are tensor maps (batch, length, heads * dim) with boxes of 64 or BLOCK_N rows of one head."""
    dtype: gl.constexpr = query.dtype
    ROWS: gl.constexpr = 64 * WARP_GROUPS
    qk_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, QK_DIM], dtype)
    v_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, V_DIM], dtype)
    q_s = gl.allocate_shared_memory(dtype, [WARP_GROUPS, 64, QK_DIM], qk_tile)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, QK_DIM], qk_tile)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, V_DIM], v_tile)
    q_full = gl.allocate_shared_memory(gl.int64, [WARP_GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(WARP_GROUPS):
        mbarrier.init(q_full.index(j), 1)
    for j in gl.static_range(STAGES):
        mbarrier.init(k_full.index(j), 1)
        mbarrier.init(v_full.index(j), 1)
        mbarrier.init(k_empty.index(j), WARP_GROUPS * 4)
        mbarrier.init(v_empty.index(j), WARP_GROUPS * 4)

    group = heads // kv_heads
    tiles = (q_len + ROWS - 1) // ROWS
    head, kv_head, b, mask_b, row = program_tile(q_order, batch, mask_batch, tiles, group, ROWS)
    start, end, core_lo, core_hi, tested = key_range(q_blocks, mask_b, row, q_len, ROWS)
    steps, core_begin, core_end = split(start, end, core_lo, core_hi, BLOCK_N)
    edges = steps - core_end + core_begin
    mask_row = mask_b.to(gl.int64) * q_len
    mask_key = mask_b.to(gl.int64) * kv_len
    lse_row = lse + (b.to(gl.int64) * heads + head) * q_len
    scale2 = scale * LOG2E
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (0, out, lse_row, q_lo + mask_row, q_hi + mask_row, q_ids + mask_row, kv_ids + mask_key, q_pos + mask_row, kv_pos + mask_key, tested, element_test, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, b, row, head * V_DIM, start, steps, edges, core_begin, core_end, scale2, q_len, kv_len, QK_DIM, V_DIM, WARP_GROUPS, BLOCK_N, STAGES)),
                (consume, (1, out, lse_row, q_lo + mask_row, q_hi + mask_row, q_ids + mask_row, kv_ids + mask_key, q_pos + mask_row, kv_pos + mask_key, tested, element_test, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, b, row, head * V_DIM, start, steps, edges, core_begin, core_end, scale2, q_len, kv_len, QK_DIM, V_DIM, WARP_GROUPS, BLOCK_N, STAGES)),
                (produce, (query, key, value, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, b, row, head * QK_DIM, kv_head * QK_DIM, kv_head * V_DIM, start, steps, edges, core_begin, core_end, QK_DIM, V_DIM, WARP_GROUPS, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, out, lse_row, q_lo + mask_row, q_hi + mask_row, q_ids + mask_row, kv_ids + mask_key, q_pos + mask_row, kv_pos + mask_key, tested, element_test, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, b, row, head * V_DIM, start, steps, edges, core_begin, core_end, scale2, q_len, kv_len, QK_DIM, V_DIM, WARP_GROUPS, BLOCK_N, STAGES)),
                (consume, (1, out, lse_row, q_lo + mask_row, q_hi + mask_row, q_ids + mask_row, kv_ids + mask_key, q_pos + mask_row, kv_pos + mask_key, tested, element_test, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, b, row, head * V_DIM, start, steps, edges, core_begin, core_end, scale2, q_len, kv_len, QK_DIM, V_DIM, WARP_GROUPS, BLOCK_N, STAGES)),
                (consume, (2, out, lse_row, q_lo + mask_row, q_hi + mask_row, q_ids + mask_row, kv_ids + mask_key, q_pos + mask_row, kv_pos + mask_key, tested, element_test, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, b, row, head * V_DIM, start, steps, edges, core_begin, core_end, scale2, q_len, kv_len, QK_DIM, V_DIM, WARP_GROUPS, BLOCK_N, STAGES)),
                (produce, (query, key, value, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, b, row, head * QK_DIM, kv_head * QK_DIM, kv_head * V_DIM, start, steps, edges, core_begin, core_end, QK_DIM, V_DIM, WARP_GROUPS, BLOCK_N, STAGES)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
