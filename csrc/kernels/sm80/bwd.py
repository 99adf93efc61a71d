"""Backward attention with mma.sync and cp.async: dK, dV and a float32 sum of dQ in one kernel
(FlashAttention-2, arXiv 2307.08691).

    p = exp(logit - lse),    ds = p * (do v^T - delta)
    dv = p^T do,             dk = scale * ds^T q,       dq = scale * ds k

A program processes a tile of keys of one key/value head. p^T and ds^T (keys x rows) go through
shared memory, so each product has a separate warp layout: S_WARPS warps share the keys of p^T and
ds^T, KV_WARPS the keys of dK and dV, and DQ_WARPS the rows of dQ. The more square a warp's part of
a result, the less it reads from shared memory. V_REGISTERS keeps values in registers. dQ is
accumulated in global memory in the order of the accumulator's registers, which
`backward_postprocess_sm80` undoes. `backward_preprocess` runs first. Head
dims that are not powers of two are split into chunks of columns, as in fwd.py.
"""

from common.kv_ranges import (
    BLOCK,
    EMPTY_MIN,
    LOG2E,
    nth_step,
    opaque,
    place_of_tile,
    position_row,
    split,
)
from common.soft_cap import tanh_of_scores
from sm80.common import (
    accumulator,
    chunk_of,
    chunks_of,
    columns_of_tile,
    copy_chunks,
    copy_layout,
    swizzled,
    tile_offsets,
    times_shared,
    times_transposed,
    zeros,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.constexpr_function
def registers_asm(operation, n, threads):
    """Assembly that applies `operation` to each of a thread's n registers and its cell in global
    memory. Cells of the same register number are contiguous over the threads. The operands are the
    registers and a pointer to the first cell."""
    t = [
        f"{{ .reg .u64 p; .reg .u32 t; mov.u32 t, %tid.x; mul.wide.u32 p, t, 4; add.u64 p, p, ${n};"
    ]
    for i in range(n):
        t.append(operation.format(cell=f"[p+{i * threads * 4}]", register=f"${i}"))
    return " ".join(t) + " }"


@gluon.constexpr_function
def add_asm(n, threads):
    return registers_asm("red.global.relaxed.gpu.add.f32 {cell}, {register};", n, threads)


@gluon.constexpr_function
def add_constraints(n):
    return ",".join(["f"] * n + ["l", "~{memory}"])


@gluon.jit
def row_range(kv_blocks, mask_b, key, kv_len, KEYS: gl.constexpr):
    """The rows [start, end) that may attend to keys of a tile, and the rows [full_lo, full_hi) that
    attend to all of them, which is empty if the tile extends past the last key."""
    blocks = (kv_len + BLOCK - 1) // BLOCK
    base = kv_blocks + mask_b.to(gl.int64) * (4 * blocks)
    start = EMPTY_MIN
    end = 0
    full_lo = 0
    full_hi = EMPTY_MIN
    for i in gl.static_range((KEYS + BLOCK - 1) // BLOCK):
        t = gl.minimum(key // BLOCK + i, blocks - 1)  # repeating a block does not change the bounds
        start = gl.minimum(start, gl.load(base + t))
        end = gl.maximum(end, gl.load(base + blocks + t))
        full_lo = gl.maximum(full_lo, gl.load(base + 2 * blocks + t))
        full_hi = gl.minimum(full_hi, gl.load(base + 3 * blocks + t))
    full_hi = gl.where(key + KEYS > kv_len, 0, full_hi)
    return gl.where(end == 0, 0, start), end, full_lo, full_hi


@gluon.jit
def chosen(kept, p, dp):
    """P and dP (keys x rows), set to 0 where `kept` is False. dP, too, because values in padding
    may overflow."""
    return gl.where(kept, p, 0.0), gl.where(kept, dp, 0.0)


@gluon.jit
def attended(p, dp, key, keys, row, rows, lo, hi, segments, first_flag):
    """P and dP of keys that their row attends to, and 0 for the others. Each test is applied
    directly, as in fwd.py."""
    q_ids, kv_ids, q_pos, kv_pos, check, q_len, kv_len = segments
    distance = (keys[:, None] - lo[None, :]).to(gl.uint32, bitcast=True)
    p, dp = chosen(distance < (hi - lo)[None, :].to(gl.uint32, bitcast=True), p, dp)
    if check > 0:  # noqa: SIM102, a flag is loaded only where one is set
        if gl.load(first_flag + row // BLOCK) & 1:
            keys = opaque(key) + gl.arange(0, p.shape[0], keys.type.layout)
            q_in_bounds = rows < q_len
            kv_in_bounds = keys < kv_len
            q_id = gl.load(q_ids + rows, mask=q_in_bounds, other=-1)
            kv_id = gl.load(kv_ids + keys, mask=kv_in_bounds, other=-1)
            p, dp = chosen(q_id[None, :] == kv_id[:, None], p, dp)
            if check > 1:
                q_at = gl.load(q_pos + rows, mask=q_in_bounds, other=0)
                kv_at = gl.load(kv_pos + keys, mask=kv_in_bounds, other=0)
                p, dp = chosen(kv_at[:, None] <= q_at[None, :], p, dp)
                if check > 2:
                    q_from = gl.load(q_pos + (q_len + rows), mask=q_in_bounds, other=0)
                    p, dp = chosen(q_from[None, :] <= kv_at[:, None], p, dp)
    return p, dp


@gluon.jit
def copy_rows(shared, stage, base, at, offsets, rows, row, q_len, DIM: gl.constexpr):
    """Starts copying a block of rows. The first is `row`, at the index `at`, counted in heads."""
    in_bounds = (rows < q_len - row)[:, None]
    copy_chunks(shared, stage, base + at * DIM, offsets, in_bounds, DIM)


@gluon.jit
def copy_lines(lse_s, delta_s, lse2, delta, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Starts copying the statistics of a block of rows, one float per thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    r = gl.arange(0, ROWS, layout)
    async_copy.async_load(lse_s, lse2 + r)
    async_copy.async_load(delta_s, delta + r)


@gluon.jit
def backward_sm80(
    query, key, value, dout, lse2, delta, lo, hi, dq_sum, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order, scale, soft_cap, mask_mode, batch, mask_batch, q_len, kv_len,
    heads, kv_heads, row_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, DO_STAGES: gl.constexpr, V_REGISTERS: gl.constexpr,
    S_WARPS: gl.constexpr, KV_WARPS: gl.constexpr, DQ_WARPS: gl.constexpr,
):  # fmt: skip
    """`soft_cap` is as in the forward. STAGES is the number of buffers of queries, and DO_STAGES
    that of cotangents, LSE and delta."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = accumulator(WARPS, S_WARPS)  # keys x rows
    kv_layout: gl.constexpr = accumulator(WARPS, KV_WARPS)  # keys x columns
    dq_layout: gl.constexpr = accumulator(WARPS, DQ_WARPS)  # rows x columns
    CHUNK: gl.constexpr = chunk_of(QK_DIM)
    V_CHUNK: gl.constexpr = chunk_of(V_DIM)
    CHUNKS: gl.constexpr = chunks_of(QK_DIM)
    V_CHUNKS: gl.constexpr = chunks_of(V_DIM)
    q_copies: gl.constexpr = copy_layout(CHUNK, WARPS)
    v_copies: gl.constexpr = copy_layout(V_CHUNK, WARPS)
    by_key: gl.constexpr = gl.SliceLayout(1, layout)
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = query.dtype.element_ty
    REGISTERS: gl.constexpr = BLOCK_M * CHUNK // (WARPS * 32)
    SCORES: gl.constexpr = BLOCK_M * BLOCK_N // (WARPS * 32)  # per thread

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

    q_lines: gl.constexpr = swizzled(CHUNK)
    v_lines: gl.constexpr = swizzled(V_CHUNK)
    k_s = gl.allocate_shared_memory(dtype, [CHUNKS, BLOCK_N, CHUNK], q_lines)
    q_s = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, BLOCK_M, CHUNK], q_lines)
    do_s = gl.allocate_shared_memory(dtype, [DO_STAGES * V_CHUNKS, BLOCK_M, V_CHUNK], v_lines)
    ds_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    p_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], swizzled(BLOCK_M))
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_s = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], line)
    delta_s = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], line)

    kv_first = (b.to(gl.int64) * kv_len + first_key) * kv_heads + kv_head
    k_in_bounds = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, q_copies)) < kv_len
    k_offsets = tile_offsets(kv_heads * QK_DIM, BLOCK_N, CHUNK, q_copies)
    copy_chunks(k_s, 0, key + kv_first * QK_DIM, k_offsets, k_in_bounds[:, None], QK_DIM)
    v_base = value + kv_first * V_DIM
    if V_REGISTERS:
        v = columns_of_tile(v_base, kv_heads * V_DIM, kv_len - first_key, BLOCK_N, V_DIM, layout)
    else:
        v = gl.allocate_shared_memory(dtype, [V_CHUNKS, BLOCK_N, V_CHUNK], v_lines)
        v_in_bounds = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, v_copies)) < kv_len
        v_offsets = tile_offsets(kv_heads * V_DIM, BLOCK_N, V_CHUNK, v_copies)
        copy_chunks(v, 0, v_base, v_offsets, v_in_bounds[:, None], V_DIM)

    bh = b.to(gl.int64) * heads + kv_head * group
    q_offsets = tile_offsets(row_heads * QK_DIM, BLOCK_M, CHUNK, q_copies)
    do_offsets = tile_offsets(row_heads * V_DIM, BLOCK_M, V_CHUNK, v_copies)
    q_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, q_copies))
    do_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, v_copies))
    rows_0 = gl.arange(0, BLOCK_M, by_row)
    keys = first_key + gl.arange(0, BLOCK_N, by_key)

    scale2 = (scale if soft_cap is None else soft_cap) * LOG2E
    dk_acc = zeros(BLOCK_N, QK_DIM, kv_layout)
    dv_acc = zeros(BLOCK_N, V_DIM, kv_layout)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    dq_zero = zeros(BLOCK_M, QK_DIM, dq_layout)
    total = steps * group

    # One step more than there are blocks: a block is copied while the previous one is multiplied.
    # With one stage, the copy starts after the last read: of cotangents after dV, of queries after
    # dK.
    g = 0
    n = 0
    row = 0
    masked = 0
    stat = bh * padded
    at = stat
    for i in range(0, total + 1):
        async_copy.wait_group(0)
        here, here_masked, here_stat = row, masked, stat
        if i < total:
            row = start + nth_step(n, steps, partial, full_begin, full_end) * BLOCK_M
            masked = gl.where(n < partial, 1, 0)
            at = (b.to(gl.int64) * q_len + row) * row_heads + kv_head * group + g
            stat = (bh + g) * padded + row
            if STAGES > 1 or i == 0:
                copy_rows(q_s, i % STAGES, query, at, q_offsets, q_rows, row, q_len, QK_DIM)
            if DO_STAGES > 1 or i == 0:
                place = i % DO_STAGES
                copy_rows(do_s, place, dout, at, do_offsets, do_rows, row, q_len, V_DIM)
                copy_lines(lse_s.index(place), delta_s.index(place), lse2 + stat, delta + stat,
                    BLOCK_M, WARPS)  # fmt: skip
            n += 1
            if n == steps:
                n = 0
                g += 1
        async_copy.commit_group()
        if i > 0:
            stage = (i - 1) % STAGES
            place = (i - 1) % DO_STAGES
            s = times_transposed(k_s, q_s, stage, zero, QK_DIM)
            dp = times_transposed(v, do_s, place, zero, V_DIM)
            dp -= delta_s.index(place).load(by_row)[None, :]
            if soft_cap is not None:
                s = tanh_of_scores(s, scale / soft_cap, 2 * SCORES)
                dp *= 1.0 - s * s
            p = gl.exp2(s * scale2 - lse_s.index(place).load(by_row)[None, :])
            if here_masked != 0:
                rows = here + rows_0
                p, dp = attended(
                    p, dp, first_key, keys, here, rows, gl.load(lo + rows), gl.load(hi + rows),
                    segments, first_flag,
                )  # fmt: skip
            p_s.store(p.to(dtype))
            ds_s.store((p * dp).to(dtype))
            dv_acc = times_shared(p_s, do_s, place, dv_acc, BLOCK_M, V_DIM)
            if DO_STAGES == 1 and i < total:
                copy_rows(do_s, 0, dout, at, do_offsets, do_rows, row, q_len, V_DIM)
                copy_lines(lse_s.index(0), delta_s.index(0), lse2 + stat, delta + stat, BLOCK_M,
                    WARPS)  # fmt: skip
            dk_acc = times_shared(ds_s, q_s, stage, dk_acc, BLOCK_M, QK_DIM)
            if STAGES == 1 and i < total:
                copy_rows(q_s, 0, query, at, q_offsets, q_rows, row, q_len, QK_DIM)
            if (STAGES == 1 or DO_STAGES == 1) and i < total:
                async_copy.commit_group()
            dq = times_shared(ds_s.permute((1, 0)), k_s, 0, dq_zero, BLOCK_N, QK_DIM)
            for c in gl.static_range(CHUNKS):
                cells = dq_sum + (here_stat * QK_DIM + c * (BLOCK_M * CHUNK))
                gl.inline_asm(
                    add_asm(REGISTERS, WARPS * 32), add_constraints(REGISTERS), (dq[c], cells)
                )

    local = gl.arange(0, BLOCK_N, gl.SliceLayout(1, kv_layout))[:, None]
    columns: gl.constexpr = gl.SliceLayout(0, kv_layout)
    in_bounds = local < kv_len - first_key
    offsets = local * (kv_heads * QK_DIM) + gl.arange(0, CHUNK, columns)[None, :]
    for c in gl.static_range(CHUNKS):
        x = (dk_acc[c] * scale).to(dtype)
        gl.store(dk + kv_first * QK_DIM + c * CHUNK + offsets, x, mask=in_bounds)
    offsets = local * (kv_heads * V_DIM) + gl.arange(0, V_CHUNK, columns)[None, :]
    for c in gl.static_range(V_CHUNKS):
        gl.store(dv + kv_first * V_DIM + c * V_CHUNK + offsets, dv_acc[c].to(dtype), mask=in_bounds)


@gluon.constexpr_function
def load_asm(n, threads):
    return registers_asm("ld.global.f32 {register}, {cell};", n, threads)


@gluon.constexpr_function
def load_constraints(n):
    return ",".join(["=f"] * n + ["l", "~{memory}"])


@gluon.jit
def backward_postprocess_sm80(
    dq_sum, dq, scale, q_len, heads, row_heads,
    QK_DIM: gl.constexpr, ROWS: gl.constexpr, DQ_WARPS: gl.constexpr,
):  # fmt: skip
    """dq = scale * dq_sum, for a block of rows of one head. Rows of dq are `row_heads` heads
    apart."""
    WARPS: gl.constexpr = gl.num_warps()
    CHUNK: gl.constexpr = chunk_of(QK_DIM)
    REGISTERS: gl.constexpr = ROWS * CHUNK // (WARPS * 32)
    layout: gl.constexpr = accumulator(WARPS, DQ_WARPS)
    stores: gl.constexpr = copy_layout(CHUNK, WARPS)
    blocks = (q_len + 63) // 64 * (64 // ROWS)
    pid = gl.program_id(0)
    bh = pid // blocks
    row = pid % blocks * ROWS
    b = bh // heads
    cells = dq_sum + pid.to(gl.int64) * (ROWS * QK_DIM)
    zero = gl.zeros([ROWS, CHUNK], gl.float32, layout)
    first = (b.to(gl.int64) * q_len + row) * row_heads + bh % heads
    in_bounds = row + gl.arange(0, ROWS, gl.SliceLayout(1, stores)) < q_len
    offsets = tile_offsets(row_heads * QK_DIM, ROWS, CHUNK, stores)
    for c in gl.static_range(QK_DIM // CHUNK):
        of_chunk = cells + c * (ROWS * CHUNK)
        x = gl.inline_asm(
            load_asm(REGISTERS, WARPS * 32), load_constraints(REGISTERS), (of_chunk,), zero.type
        )
        x = gl.convert_layout((x * scale).to(dq.dtype.element_ty), stores)
        gl.store(dq + first * QK_DIM + c * CHUNK + offsets, x, mask=in_bounds[:, None])
