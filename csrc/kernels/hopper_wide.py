"""Backward attention on Hopper for head dim 256, whose dK and dV do not fit one warp group's registers:
the same gradients, arguments and workspace as hopper_backward.py.

A program is 64 keys of one key/value head, and its two warp groups divide the work by kind: the first
makes S, P and dV, the second dP, dS and dK, and each of them one half of dQ. P (rounded, as the product
with dO takes it) and dS pass from one to the other through shared memory. While one is at its
exponentials, the other's products run. Tiles of queries and keys are chunks of 64 columns.

`backward_dkdv_hopper` is the same without dQ (DQ 0), for deterministic gradients: nothing passes but P, and
the next scores begin under the product before. It is a trial, whose row is in benchmarks/candidates.py
and not in the table.
"""

from hopper import (
    LOG2E,
    accumulator,
    position_row,
    select_bits,
    split,
    warp_arrive,
)
from hopper_rows import add_direct, mask_bits, produce
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def scores(k_s, q_s, stage, zero, CHUNKS: gl.constexpr):
    """k q^T, started."""
    q_t = q_s.index(stage * CHUNKS).permute((1, 0))
    s = warpgroup_mma(k_s.index(0), q_t, zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, CHUNKS):
        q_t = q_s.index(stage * CHUNKS + c).permute((1, 0))
        s = warpgroup_mma(k_s.index(c), q_t, s, is_async=True)
    return s


@gluon.jit
def add_half(ds, k_s, cells, W: gl.constexpr):
    """This warp group's half of dQ of a block, ds^T k: two chunks of four, one after the other: there are no
    registers for both."""
    ds_t = ds.permute((1, 0))
    zero = gl.zeros([64, 64], gl.float32, accumulator(64))
    for c in gl.static_range(2 * W, 2 * W + 2):
        dq = warpgroup_mma(ds_t, k_s.index(c), zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        add_direct(dq, cells + c * 4096, 4096)


@gluon.jit
def consume_scores(
    grads, mask, tiles_s, lines_s, p_s, ds_s, bars, own_bars, place, range_, numbers,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """S, P, dV and the first half of dQ (of the block before, so as not to wait for its dS)."""
    _dk, dv, dq_sum = grads
    q_s, k_s, v_s, do_s = tiles_s
    lse_s, _delta_s, lo_s, hi_s = lines_s
    kv_full, q_full, q_empty, do_full, do_empty = bars
    p_full, p_empty, ds_full, ds_empty = own_bars
    b, first_key, kv_head, group, bh, _mask_row, padded = place
    start, steps, edges, core_begin, core_end = range_
    _, _, _, scale = numbers
    CHUNKS: gl.constexpr = QK_DIM // 64
    row_blocks = padded // 64
    first_block = bh * row_blocks + start // 64
    scale2 = scale * LOG2E
    dtype: gl.constexpr = dv.dtype
    s_layout: gl.constexpr = accumulator(64)
    v_layout: gl.constexpr = accumulator(V_DIM)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    dv_sum = gl.zeros([64, V_DIM], gl.float32, v_layout)
    mbarrier.wait(kv_full.index(0), 0)
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    if steps > 0:
        mbarrier.wait(q_full.index(0), 0)
        s = scores(k_s, q_s, 0, zero, CHUNKS)
        s = warpgroup_mma_wait(0, deps=(s,))
        stage = 0
        phase = 0
        before = first_block
        for part in gl.static_range(2):  # masked blocks of every head, then the core
            count = edges if part == 0 else core_end - core_begin
            n = 0
            g = 0
            for i in range(0, count * group):
                other = stage ^ 1
                at = (
                    gl.where(n < core_begin, n, n + core_end - core_begin)
                    if part == 0
                    else core_begin + n
                )
                lse = lse_s.index(stage).load(gl.SliceLayout(0, s_layout))
                if part == 0:
                    row = start + at * 64
                    lo = lo_s.index(stage)
                    bits = mask_bits(keys, row, lo, hi_s.index(stage), mask, numbers)
                    s = select_bits(s, bits, float("-inf"))
                warp_arrive(q_empty.index(stage))
                p = gl.exp2(s * scale2 - lse[None, :]).to(dtype)
                mbarrier.wait(p_empty.index(stage), phase ^ 1)
                p_s.index(stage).store(p)
                mbarrier.arrive(p_full.index(stage))
                p_half = gl.convert_layout(p, p_layout)
                mbarrier.wait(do_full.index(stage), phase)
                dv_token = warpgroup_mma(p_half, do_s.index(stage), dv_sum, is_async=True)
                if DQ:
                    mbarrier.wait(ds_full.index(other), phase)
                phase = phase ^ stage
                if DQ:  # no registers for the next scores beside a part of dQ
                    dv_sum = warpgroup_mma_wait(0, deps=(dv_token,))
                    warp_arrive(do_empty.index(stage))
                    cells = dq_sum + before.to(gl.int64) * (64 * QK_DIM)
                    add_half(ds_s.index(other), k_s, cells, 0)
                    warp_arrive(ds_empty.index(other))
                mbarrier.wait(q_full.index(other), phase)
                s_token = scores(k_s, q_s, other, zero, CHUNKS)
                if not DQ:
                    dv_sum = warpgroup_mma_wait(CHUNKS, deps=(dv_token,))
                    warp_arrive(do_empty.index(stage))
                s = warpgroup_mma_wait(0, deps=(s_token,))
                stage = other
                before = first_block + g * row_blocks + at
                n += 1
                wrap = n == count
                n = gl.where(wrap, 0, n)
                g = gl.where(wrap, g + 1, g)
        if DQ:
            mbarrier.wait(ds_full.index(stage ^ 1), phase)
            cells = dq_sum + before.to(gl.int64) * (64 * QK_DIM)
            add_half(ds_s.index(stage ^ 1), k_s, cells, 0)
    # neither reads keys or values any more
    gl.inline_asm("bar.sync 10, 256;", "~{memory}", ())
    v = v_s.index(0)
    v.store(dv_sum.to(dtype))
    fence_async_shared()
    gl.barrier()
    dv_tile = v.reinterpret(dtype, [1, 64, V_DIM], dv.layout)
    tma.async_store(dv, [b, first_key, kv_head * V_DIM], dv_tile)
    tma.store_wait(0)


@gluon.jit
def consume_gradients(
    grads, mask, tiles_s, lines_s, p_s, ds_s, bars, own_bars, place, range_, numbers,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """dP, dS, dK and the second half of dQ."""
    dk, _dv, dq_sum = grads
    q_s, k_s, v_s, do_s = tiles_s
    _lse_s, delta_s, lo_s, hi_s = lines_s
    kv_full, q_full, q_empty, do_full, do_empty = bars
    p_full, p_empty, ds_full, ds_empty = own_bars
    b, first_key, kv_head, group, bh, _mask_row, padded = place
    start, steps, edges, core_begin, core_end = range_
    _, _, _, scale = numbers
    CHUNKS: gl.constexpr = QK_DIM // 64
    row_blocks = padded // 64
    first_block = bh * row_blocks + start // 64
    dtype: gl.constexpr = dk.dtype
    s_layout: gl.constexpr = accumulator(64)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    dk_0 = zero
    dk_1 = zero
    dk_2 = zero
    dk_3 = zero
    mbarrier.wait(kv_full.index(0), 0)
    v = v_s.index(0)
    if steps > 0:
        if DQ:  # dS of "block -1": adds zero to dQ
            ds_s.index(1).store(gl.zeros([64, 64], dtype, s_layout))
            fence_async_shared()
            mbarrier.arrive(ds_full.index(1))
        mbarrier.wait(do_full.index(0), 0)
        do_t = do_s.index(0).permute((1, 0))
        dp = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        stage = 0
        phase = 0
        for part in gl.static_range(2):
            count = edges if part == 0 else core_end - core_begin
            n = 0
            g = 0
            for i in range(0, count * group):
                other = stage ^ 1
                at = (
                    gl.where(n < core_begin, n, n + core_end - core_begin)
                    if part == 0
                    else core_begin + n
                )
                dl = delta_s.index(stage).load(gl.SliceLayout(0, s_layout))
                warp_arrive(do_empty.index(stage))
                mbarrier.wait(p_full.index(stage), phase)
                p = p_s.index(stage).load(s_layout)
                ds32 = p.to(gl.float32) * (dp - dl[None, :])
                warp_arrive(p_empty.index(stage))
                mbarrier.wait(q_full.index(stage), phase)
                if part == 0:
                    row = start + at * 64
                    lo = lo_s.index(stage)
                    bits = mask_bits(keys, row, lo, hi_s.index(stage), mask, numbers)
                    ds32 = select_bits(ds32, bits, 0.0)
                ds = ds32.to(dtype)
                if DQ:
                    mbarrier.wait(ds_empty.index(stage), phase ^ stage ^ 1)
                    ds_s.index(stage).store(ds)
                    fence_async_shared()
                    mbarrier.arrive(ds_full.index(stage))
                ds_half = gl.convert_layout(ds, ds_layout)
                at_q = stage * CHUNKS
                token_0 = warpgroup_mma(ds_half, q_s.index(at_q), dk_0, is_async=True)
                token_1 = warpgroup_mma(ds_half, q_s.index(at_q + 1), dk_1, is_async=True)
                token_2 = warpgroup_mma(ds_half, q_s.index(at_q + 2), dk_2, is_async=True)
                token_3 = warpgroup_mma(ds_half, q_s.index(at_q + 3), dk_3, is_async=True)
                phase = phase ^ stage
                if DQ:  # no registers for the next scores beside a part of dQ
                    dk_0, dk_1, dk_2, dk_3 = warpgroup_mma_wait(
                        0, deps=(token_0, token_1, token_2, token_3)
                    )
                    warp_arrive(q_empty.index(stage))
                    block = first_block + g * row_blocks + at
                    cells = dq_sum + block.to(gl.int64) * (64 * QK_DIM)
                    add_half(ds_s.index(stage), k_s, cells, 1)
                mbarrier.wait(do_full.index(other), phase)
                do_t = do_s.index(other).permute((1, 0))
                dp_token = warpgroup_mma(v, do_t, zero, use_acc=False, is_async=True)
                if not DQ:
                    dk_0, dk_1, dk_2, dk_3 = warpgroup_mma_wait(
                        1, deps=(token_0, token_1, token_2, token_3)
                    )
                    warp_arrive(q_empty.index(stage))
                dp = warpgroup_mma_wait(0, deps=(dp_token,))
                stage = other
                n += 1
                wrap = n == count
                n = gl.where(wrap, 0, n)
                g = gl.where(wrap, g + 1, g)
    gl.inline_asm("bar.sync 10, 256;", "~{memory}", ())
    k_s.index(0).store((dk_0 * scale).to(dtype))
    k_s.index(1).store((dk_1 * scale).to(dtype))
    k_s.index(2).store((dk_2 * scale).to(dtype))
    k_s.index(3).store((dk_3 * scale).to(dtype))
    fence_async_shared()
    gl.barrier()
    for c in gl.static_range(CHUNKS):
        dk_tile = k_s.index(c).reinterpret(dtype, [1, 64, 64], dk.layout)
        tma.async_store(dk, [b, first_key, kv_head * QK_DIM + c * 64], dk_tile)
    tma.store_wait(0)


@gluon.jit
def tile_of_keys(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """One program of the kernels below."""
    dtype: gl.constexpr = query.dtype
    CHUNKS: gl.constexpr = QK_DIM // 64
    qk_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    v_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, V_DIM], dtype)
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    tiles_s = (
        gl.allocate_shared_memory(dtype, [2 * CHUNKS, 64, 64], qk_tile),
        gl.allocate_shared_memory(dtype, [CHUNKS, 64, 64], qk_tile),
        gl.allocate_shared_memory(dtype, [1, 64, V_DIM], v_tile),
        gl.allocate_shared_memory(dtype, [2, 64, V_DIM], v_tile),
    )
    p_s = gl.allocate_shared_memory(dtype, [2, 64, 64], qk_tile)
    if DQ:
        ds_s = gl.allocate_shared_memory(dtype, [2, 64, 64], qk_tile)
    else:  # never touched
        ds_s = p_s
    lines_s = (
        gl.allocate_shared_memory(gl.float32, [2, 64], line),
        gl.allocate_shared_memory(gl.float32, [2, 64], line),
        gl.allocate_shared_memory(gl.int32, [2, 64], line),
        gl.allocate_shared_memory(gl.int32, [2, 64], line),
    )
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), 1)
    for j in gl.static_range(2):
        mbarrier.init(q_full.index(j), 1)
        mbarrier.init(do_full.index(j), 1)
        mbarrier.init(q_empty.index(j), 8)
        mbarrier.init(do_empty.index(j), 8)
        mbarrier.init(p_full.index(j), 1)
        mbarrier.init(ds_full.index(j), 1)
        mbarrier.init(p_empty.index(j), 4)
        mbarrier.init(ds_empty.index(j), 4)

    group = heads // kv_heads
    tiles = (kv_len + 127) // 128
    pid = gl.program_id(0)
    kv_head = pid // (2 * tiles * batch)
    rest = pid % (2 * tiles * batch)
    b = rest // 2 % batch
    mask_b = gl.where(mask_batch > 1, b, 0)
    first_key = gl.load(kv_order + mask_b * tiles + rest // 2 // batch) * 128 + rest % 2 * 64
    start, end, core_lo, core_hi = row_range_64(kv_blocks, mask_b, first_key, kv_len)
    steps, core_begin, core_end = split(start, end, core_lo, core_hi, 64)
    row_blocks = (q_len + 63) // 64
    mask_row = mask_b.to(gl.int64) * q_len
    mask_key = mask_b.to(gl.int64) * kv_len
    flags = q_blocks + mask_b.to(gl.int64) * (5 * row_blocks)

    maps = (query, key, value, dout)
    lines = (lse2, delta, lo, hi)
    grads = (dk, dv, dq_sum)
    q_pos += position_row(mask_row, element_test)
    mask = (q_ids + mask_row, kv_ids + mask_key, q_pos, kv_pos + mask_key, flags)
    bars = (kv_full, q_full, q_empty, do_full, do_empty)
    own_bars = (p_full, p_empty, ds_full, ds_empty)
    bh = b * heads + kv_head * group
    place = (b, first_key, kv_head, group, bh, mask_b * (row_blocks * 64), row_blocks * 64)
    range_ = (start, steps, steps - core_end + core_begin, core_begin, core_end)
    numbers = (element_test, q_len, kv_len, scale)
    gl.warp_specialize(
        [
            (consume_scores, (grads, mask, tiles_s, lines_s, p_s, ds_s, bars, own_bars, place, range_, numbers, QK_DIM, V_DIM, DQ)),
            (consume_gradients, (grads, mask, tiles_s, lines_s, p_s, ds_s, bars, own_bars, place, range_, numbers, QK_DIM, V_DIM, DQ)),
            (produce, (maps, lines, tiles_s, lines_s, bars, place, range_, QK_DIM, V_DIM, QK_CHUNK, 1)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def row_range_64(kv_blocks, mask_b, key, kv_len):
    """As hopper_rows.row_range for 64 keys; a block past the end meets no row."""
    blocks = (kv_len + 63) // 64
    base = kv_blocks + mask_b.to(gl.int64) * (4 * blocks)
    t = gl.minimum(key // 64, blocks - 1)
    end = gl.where(key < kv_len, gl.load(base + blocks + t), 0)
    core_hi = gl.where(key + 64 > kv_len, 0, gl.load(base + 3 * blocks + t))
    start = gl.where(end == 0, 0, gl.load(base + t))
    return start, end, gl.load(base + 2 * blocks + t), core_hi


@gluon.jit
def backward_hopper(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As hopper_backward.backward_hopper, for QK_CHUNK = 64."""
    tile_of_keys(
        query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
        q_blocks, kv_blocks, kv_order,
        scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
        QK_DIM, V_DIM, QK_CHUNK, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 1,
    )  # fmt: skip


@gluon.jit
def backward_dkdv_hopper(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As hopper_backward.backward_dkdv_hopper, for QK_CHUNK = 64."""
    tile_of_keys(
        query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, q_ids, kv_ids, q_pos, kv_pos,
        q_blocks, kv_blocks, kv_order,
        scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
        QK_DIM, V_DIM, QK_CHUNK, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 0,
    )  # fmt: skip
