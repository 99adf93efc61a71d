"""Backward attention with mma.sync and cp.async: dK, dV and a float32 sum of dQ in one kernel
(FlashAttention-2, arXiv 2307.08691).

    p = exp(logit - lse),    ds = p * (do v^T - delta)
    dv = p^T do,             dk = scale * ds^T q,       dq = scale * ds k

A program has a tile of keys of one key/value head. p^T and ds^T (keys x rows) go through shared
memory: two warps share the rows of a tile, so that a warp has 32 keys and reads every query and
cotangent half as often. dQ is added up in global memory in the order of the accumulator's registers
(`backward_postprocess_sm80` undoes it). What runs before is sm90/bwd_prepost.py's
`backward_preprocess`."""

from sm80.common import (
    accumulator,
    copy_layout,
    plain,
    swizzled,
    tile_offsets,
    times_shared,
    times_transposed,
)
from sm90.common import (
    BLOCK,
    EMPTY_MIN,
    LOG2E,
    nth_step,
    opaque,
    place_of_tile,
    position_row,
    split,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.constexpr_function
def registers_asm(operation, n, threads):
    """`operation` on each of a thread's n registers and global memory, where those of one number
    lie side by side over the threads. Operands: registers, the block's first cell."""
    n = plain(n)
    t = [
        f"{{ .reg .u64 p; .reg .u32 t; mov.u32 t, %tid.x; mul.wide.u32 p, t, 4; add.u64 p, p, ${n};"
    ]
    for i in range(n):
        t.append(operation.format(cell=f"[p+{i * plain(threads) * 4}]", register=f"${i}"))
    return " ".join(t) + " }"


@gluon.constexpr_function
def add_asm(n, threads):
    return registers_asm("red.global.relaxed.gpu.add.f32 {cell}, {register};", n, threads)


@gluon.constexpr_function
def add_constraints(n):
    return ",".join(["f"] * plain(n) + ["l", "~{memory}"])


@gluon.jit
def row_range(kv_blocks, mask_b, key, kv_len, KEYS: gl.constexpr):
    """Rows that meet a tile's keys, and rows that attend all of them: none of a tile that reaches
    past the last key."""
    blocks = (kv_len + BLOCK - 1) // BLOCK
    base = kv_blocks + mask_b.to(gl.int64) * (4 * blocks)
    start = EMPTY_MIN
    end = 0
    full_lo = 0
    full_hi = EMPTY_MIN
    for i in gl.static_range(KEYS // BLOCK):
        t = gl.minimum(key // BLOCK + i, blocks - 1)  # a block more than once changes no bound
        start = gl.minimum(start, gl.load(base + t))
        end = gl.maximum(end, gl.load(base + blocks + t))
        full_lo = gl.maximum(full_lo, gl.load(base + 2 * blocks + t))
        full_hi = gl.minimum(full_hi, gl.load(base + 3 * blocks + t))
    full_hi = gl.where(key + KEYS > kv_len, 0, full_hi)
    return gl.where(end == 0, 0, start), end, full_lo, full_hi


@gluon.jit
def inside(key, keys, row, rows, lo, hi, segments, first_flag):
    """Which of its keys (down) a row (across) attends."""
    q_ids, kv_ids, q_pos, kv_pos, check, q_len, kv_len = segments
    distance = keys[:, None] - lo[None, :]
    kept = distance.to(gl.uint32, bitcast=True) < (hi - lo)[None, :].to(gl.uint32, bitcast=True)
    if check > 0:  # noqa: SIM102, a flag is loaded only where one is set
        if gl.load(first_flag + row // BLOCK) & 1:
            keys = opaque(key) + gl.arange(0, kept.shape[0], keys.type.layout)
            q_there = rows < q_len
            kv_there = keys < kv_len
            q_id = gl.load(q_ids + rows, mask=q_there, other=-1)
            kv_id = gl.load(kv_ids + keys, mask=kv_there, other=-1)
            kept &= q_id[None, :] == kv_id[:, None]
            if check > 1:
                q_at = gl.load(q_pos + rows, mask=q_there, other=0)
                kv_at = gl.load(kv_pos + keys, mask=kv_there, other=0)
                kept &= kv_at[:, None] <= q_at[None, :]
                if check > 2:
                    q_from = gl.load(q_pos + (q_len + rows), mask=q_there, other=0)
                    kept &= q_from[None, :] <= kv_at[:, None]
    return kept


@gluon.jit
def copy_lines(lse_s, delta_s, lse2, delta, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Start copying a block's statistics: a float a thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    r = gl.arange(0, ROWS, layout)
    async_copy.async_load(lse_s, lse2 + r)
    async_copy.async_load(delta_s, delta + r)


@gluon.jit
def backward_sm80(
    query, key, value, dout, lse2, delta, lo, hi, dq_sum, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order, scale, mask_mode, batch, mask_batch, q_len, kv_len, heads,
    kv_heads, row_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, DQ_WARPS: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = accumulator(WARPS, 2)  # keys x rows, keys x columns
    dq_layout: gl.constexpr = accumulator(WARPS, DQ_WARPS)  # rows x columns
    q_copies: gl.constexpr = copy_layout(QK_DIM, WARPS)
    v_copies: gl.constexpr = copy_layout(V_DIM, WARPS)
    by_key: gl.constexpr = gl.SliceLayout(1, layout)
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = query.dtype.element_ty
    REGISTERS: gl.constexpr = BLOCK_M * QK_DIM // (WARPS * 32)

    group = heads // kv_heads
    _, kv_head, b, mask_b, first_key = place_of_tile(
        gl.program_id(0), kv_order, batch, mask_batch, (kv_len + 127) // 128, 1, kv_heads, BLOCK_N,
        128 // BLOCK_N,
    )  # fmt: skip
    if first_key >= kv_len:
        return
    start, end, full_lo, full_hi = row_range(kv_blocks, mask_b, first_key, kv_len, BLOCK_N)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_M)
    partial = steps - full_end + full_begin
    row_blocks = (q_len + 63) // 64
    padded = row_blocks * 64
    mask_row = mask_b.to(gl.int64) * q_len
    mask_key = mask_b.to(gl.int64) * kv_len
    first_flag = q_blocks + (mask_b.to(gl.int64) * 5 + 4) * row_blocks
    lo += mask_b.to(gl.int64) * padded
    hi += mask_b.to(gl.int64) * padded
    segments = (
        q_ids + mask_row, kv_ids + mask_key, q_pos + position_row(mask_row, mask_mode),
        kv_pos + mask_key, mask_mode, q_len, kv_len,
    )  # fmt: skip

    k_s = gl.allocate_shared_memory(dtype, [BLOCK_N, QK_DIM], swizzled(QK_DIM))
    v_s = gl.allocate_shared_memory(dtype, [BLOCK_N, V_DIM], swizzled(V_DIM))
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, QK_DIM], swizzled(QK_DIM))
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, V_DIM], swizzled(V_DIM))
    ds_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    p_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], line)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], line)

    kv_first = (b.to(gl.int64) * kv_len + first_key) * kv_heads + kv_head
    k_there = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, q_copies)) < kv_len
    v_there = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, v_copies)) < kv_len
    k_offsets = tile_offsets(kv_heads * QK_DIM, BLOCK_N, QK_DIM, q_copies)
    v_offsets = tile_offsets(kv_heads * V_DIM, BLOCK_N, V_DIM, v_copies)
    async_copy.async_load(k_s, key + kv_first * QK_DIM + k_offsets, k_there[:, None])
    async_copy.async_load(v_s, value + kv_first * V_DIM + v_offsets, v_there[:, None])

    bh = b.to(gl.int64) * heads + kv_head * group
    q_offsets = tile_offsets(row_heads * QK_DIM, BLOCK_M, QK_DIM, q_copies)
    do_offsets = tile_offsets(row_heads * V_DIM, BLOCK_M, V_DIM, v_copies)
    q_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, q_copies))
    do_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, v_copies))
    rows_0 = gl.arange(0, BLOCK_M, by_row)
    keys = first_key + gl.arange(0, BLOCK_N, by_key)

    scale2 = scale * LOG2E
    dk_acc = gl.zeros([BLOCK_N, QK_DIM], gl.float32, layout)
    dv_acc = gl.zeros([BLOCK_N, V_DIM], gl.float32, layout)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    dq_zero = gl.zeros([BLOCK_M, QK_DIM], gl.float32, dq_layout)
    total = steps * group

    # One step more than blocks: a block is copied while the one before it is multiplied.
    g = 0
    n = 0
    row = 0
    masked = 0
    stat = bh * padded
    for i in range(0, total + 1):
        async_copy.wait_group(0)
        here, here_masked, here_stat = row, masked, stat
        if i < total:
            row = start + nth_step(n, steps, partial, full_begin, full_end) * BLOCK_M
            masked = gl.where(n < partial, 1, 0)
            stage = i % STAGES
            at = (b.to(gl.int64) * q_len + row) * row_heads + kv_head * group + g
            q_there = (q_rows < q_len - row)[:, None]
            do_there = (do_rows < q_len - row)[:, None]
            async_copy.async_load(q_s.index(stage), query + at * QK_DIM + q_offsets, q_there)
            async_copy.async_load(do_s.index(stage), dout + at * V_DIM + do_offsets, do_there)
            stat = (bh + g) * padded + row
            copy_lines(lse_s.index(stage), delta_s.index(stage), lse2 + stat, delta + stat,
                BLOCK_M, WARPS)  # fmt: skip
            n += 1
            if n == steps:
                n = 0
                g += 1
        async_copy.commit_group()
        if i > 0:
            stage = (i - 1) % STAGES
            q_here = q_s.index(stage)
            do_here = do_s.index(stage)
            s = times_transposed(k_s, q_here, zero, QK_DIM)
            dp = times_transposed(v_s, do_here, zero, V_DIM)
            dp -= delta_s.index(stage).load(by_row)[None, :]
            p = gl.exp2(s * scale2 - lse_s.index(stage).load(by_row)[None, :])
            if here_masked != 0:
                rows = here + rows_0
                kept = inside(
                    first_key, keys, here, rows, gl.load(lo + rows), gl.load(hi + rows), segments,
                    first_flag,
                )  # fmt: skip
                p = gl.where(kept, p, 0.0)
                dp = gl.where(kept, dp, 0.0)  # what padding holds may overflow
            p_s.store(p.to(dtype))
            ds_s.store((p * dp).to(dtype))
            dv_acc = times_shared(p_s, do_here, dv_acc, BLOCK_M)
            dk_acc = times_shared(ds_s, q_here, dk_acc, BLOCK_M)
            dq = times_shared(ds_s.permute((1, 0)), k_s, dq_zero, BLOCK_N)
            cells = dq_sum + here_stat * QK_DIM
            gl.inline_asm(add_asm(REGISTERS, WARPS * 32), add_constraints(REGISTERS), (dq, cells))

    there = (keys < kv_len)[:, None]
    at = (gl.arange(0, BLOCK_N, by_key) * kv_heads)[:, None]
    columns = gl.arange(0, QK_DIM, by_row)[None, :]
    gl.store(dk + kv_first * QK_DIM + at * QK_DIM + columns, (dk_acc * scale).to(dtype), mask=there)
    columns = gl.arange(0, V_DIM, by_row)[None, :]
    gl.store(dv + kv_first * V_DIM + at * V_DIM + columns, dv_acc.to(dtype), mask=there)


@gluon.constexpr_function
def load_asm(n, threads):
    return registers_asm("ld.global.f32 {register}, {cell};", n, threads)


@gluon.constexpr_function
def load_constraints(n):
    return ",".join(["=f"] * plain(n) + ["l", "~{memory}"])


@gluon.jit
def backward_postprocess_sm80(
    dq_sum, dq, scale, q_len, heads, row_heads,
    QK_DIM: gl.constexpr, ROWS: gl.constexpr, DQ_WARPS: gl.constexpr,
):  # fmt: skip
    """dq = scale * dq_sum, a block of rows of one head. Rows of dq are `row_heads` heads apart."""
    WARPS: gl.constexpr = gl.num_warps()
    REGISTERS: gl.constexpr = ROWS * QK_DIM // (WARPS * 32)
    layout: gl.constexpr = accumulator(WARPS, DQ_WARPS)
    stores: gl.constexpr = copy_layout(QK_DIM, WARPS)
    blocks = (q_len + 63) // 64 * (64 // ROWS)
    pid = gl.program_id(0)
    bh = pid // blocks
    row = pid % blocks * ROWS
    b = bh // heads
    cells = dq_sum + pid.to(gl.int64) * (ROWS * QK_DIM)
    zero = gl.zeros([ROWS, QK_DIM], gl.float32, layout)
    x = gl.inline_asm(
        load_asm(REGISTERS, WARPS * 32), load_constraints(REGISTERS), (cells,), zero.type
    )
    x = gl.convert_layout((x * scale).to(dq.dtype.element_ty), stores)
    first = (b.to(gl.int64) * q_len + row) * row_heads + bh % heads
    there = row + gl.arange(0, ROWS, gl.SliceLayout(1, stores)) < q_len
    offsets = tile_offsets(row_heads * QK_DIM, ROWS, QK_DIM, stores)
    gl.store(dq + first * QK_DIM + offsets, x, mask=there[:, None])
