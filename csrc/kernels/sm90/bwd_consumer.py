"""What a warp group of `backward_sm90` and its kin (sm90/bwd.py) computes: dK and dV of 64 keys,
and its part of dQ."""

from sm90.alibi import with_bias
from sm90.block_lists import bits_of_rows, list_of_keys, mask_of_head
from sm90.bwd_producer import ROWS, mask_bits, rows_of_half
from sm90.common import (
    LOG2E,
    accumulator,
    named_barrier,
    rematerialized_zero,
    select_bits,
    warp_arrive,
)
from sm90.dq_reduce import add_staged, hand_on, keys_read
from sm90.lse_by_mma import less, lse_scale
from sm90.soft_cap import tanh_of_scores
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
def ping_pong_wait(W: gl.constexpr):
    """The warp groups take turns at issuing dK, dQ and the next scores: one's softmax runs under
    the other's products."""
    gl.inline_asm(named_barrier("sync", 4 + W, 256), "~{memory}", ())


@gluon.jit
def ping_pong_pass(W: gl.constexpr):
    gl.inline_asm(named_barrier("arrive", 5 - W, 256), "~{memory}", ())


@gluon.jit
def scores(k, q_t, lse_parts, stage, LSE_BY_MMA: gl.constexpr):
    """S^T of a block of rows, started; with LSE_BY_MMA LSE is taken off it, in its units."""
    zero = gl.zeros([64, ROWS], gl.float32, accumulator(ROWS))
    s = warpgroup_mma(k, q_t, zero, use_acc=False, is_async=True)
    return less(s, lse_parts[0].index(stage)) if LSE_BY_MMA else s


@gluon.jit
def step(
    W: gl.constexpr, sums, s, row, i, stage, phase, before, args, k_part, keys, head_mask,
    slope2,
    MASKED: gl.constexpr, LIVE: gl.constexpr, config: gl.constexpr,
):  # fmt: skip
    """One block of rows, the i-th: adds to dk and dv, hands on dS, adds dQ of the block `before`,
    makes the next scores.

    LIVE: there may be a pair of this warp group's keys and these rows.
    """
    dk_sum, dv_sum = sums
    grads, mask, _, _, _, shared, barriers, ds_barriers, _, _, scalars = args
    dq_sum = grads[2]
    tiles_s, row_stats_s, lse_parts, ds_s, dq_s = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    PING_PONG: gl.constexpr = config.PING_PONG
    DQ: gl.constexpr = config.DQ
    REMATERIALIZE: gl.constexpr = config.REMATERIALIZE
    LSE_BY_MMA: gl.constexpr = config.LSE_BY_MMA
    SOFT_CAP: gl.constexpr = config.SOFT_CAP
    ALIBI: gl.constexpr = config.ALIBI
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    q_s, k_s, v_s, do_s = tiles_s
    k_left = k_s.index(rematerialized_zero(i, REMATERIALIZE)).slice(W * 64, 64, dim=0)
    v_left = v_s.index(W + rematerialized_zero(i, REMATERIALIZE))
    lse_s, delta_s, lo_s, hi_s = row_stats_s
    _, q_full, q_empty, do_full, do_empty = barriers
    ds_full, ds_empty = ds_barriers
    scale, soft_cap = scalars[3:]
    NEW: gl.constexpr = 2 if LSE_BY_MMA else 1  # groups of products that the next scores are
    scale2 = lse_scale(scale) if LSE_BY_MMA else (soft_cap if SOFT_CAP else scale) * LOG2E
    dtype: gl.constexpr = q_s.dtype
    PART: gl.constexpr = QK_DIM // 2
    CELLS: gl.constexpr = ROWS * PART
    s_layout: gl.constexpr = accumulator(ROWS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(V_DIM), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(QK_DIM), 2)
    zero_dq = gl.zeros([ROWS, PART], gl.float32, accumulator(PART))
    other = stage ^ 1
    if LIVE and not LSE_BY_MMA:
        lse = lse_s.index(stage).load(gl.SliceLayout(0, s_layout))
    mbarrier.wait(do_full.index(stage), phase)
    if LIVE:
        zero = gl.zeros([64, ROWS], gl.float32, s_layout)
        do_t = do_s.index(stage).permute((1, 0))
        dp_token = warpgroup_mma(v_left, do_t, zero, use_acc=False, is_async=True)
        if LSE_BY_MMA:
            dp_token = less(dp_token, lse_parts[1].index(stage))
        if SOFT_CAP:
            s = tanh_of_scores(s, scale / soft_cap, ROWS)
            dtanh = 1.0 - s * s  # the derivative of tanh
        if ALIBI:
            s = with_bias(s, keys, row, scale2, slope2, ROWS)
            scale2 = 1.0
        if MASKED:
            bits = mask_bits(keys, row, lo_s.index(stage), hi_s.index(stage), mask, scalars)
            if BLOCK_LISTS:
                bits = bits & bits_of_rows(head_mask, keys, row, scalars[1])
            s = select_bits(s, bits, float("-inf"))
        p = gl.exp2(s * scale2 if LSE_BY_MMA else s * scale2 - lse[None, :])
        p_half = gl.convert_layout(p.to(dtype), p_layout)
        if SOFT_CAP:
            p = p * dtanh
        dp = warpgroup_mma_wait(0, deps=(dp_token,))
        dv_token = warpgroup_mma(p_half, do_s.index(stage), dv_sum, is_async=True)
        if LSE_BY_MMA:
            ds32 = p * dp
        else:
            dl = delta_s.index(stage).load(gl.SliceLayout(0, s_layout))
            ds32 = p * (dp - dl[None, :])
        if MASKED:
            ds32 = select_bits(ds32, bits, 0.0)
        ds = ds32.to(dtype)
    else:
        ds = gl.zeros([64, ROWS], dtype, s_layout)
    if DQ:
        free = phase if DQ == 2 else phase ^ stage
        mbarrier.wait(ds_empty.index(stage), free ^ 1)
        hand_on(ds, ds_s.index(stage).slice(W * 64, 64, dim=0), ds_full.index(stage))
    if PING_PONG:
        ping_pong_wait(W)
    if LIVE:
        ds_half = gl.convert_layout(ds, ds_layout)
        dk_token = warpgroup_mma(ds_half, q_s.index(stage), dk_sum, is_async=True)
    if DQ == 1:
        mbarrier.wait(ds_full.index(other), phase)
        ds_t = ds_s.index(other).permute((1, 0))
        dq_token = warpgroup_mma(ds_t, k_part, zero_dq, use_acc=False, is_async=True)
        if LIVE:
            dv_sum, dk_sum = warpgroup_mma_wait(1, deps=(dv_token, dk_token))
        warp_arrive(do_empty.index(stage))
        warp_arrive(q_empty.index(stage))
    phase = phase ^ stage
    mbarrier.wait(q_full.index(other), phase)
    q_t = q_s.index(other).permute((1, 0))
    s_token = scores(k_left, q_t, lse_parts, other, LSE_BY_MMA)
    if PING_PONG:
        ping_pong_pass(W)
    if DQ == 1:
        dq = warpgroup_mma_wait(NEW, deps=(dq_token,))
        warp_arrive(ds_empty.index(other))
        add_staged(dq, dq_sum + before.to(gl.int64) * CELLS, dq_s.index(W), CELLS)
    else:
        if LIVE:
            dv_sum, dk_sum = warpgroup_mma_wait(NEW, deps=(dv_token, dk_token))
        warp_arrive(do_empty.index(stage))
        warp_arrive(q_empty.index(stage))
    s = warpgroup_mma_wait(0, deps=(s_token,))
    return dk_sum, dv_sum, s, phase


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    grads, _, own_blocks, listing, slopes, shared, barriers, ds_barriers, tile, q_range, scalars = (
        args
    )
    tiles_s, _, lse_parts, ds_s, dq_s = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    PING_PONG: gl.constexpr = config.PING_PONG
    SKIP: gl.constexpr = config.SKIP
    DQ: gl.constexpr = config.DQ
    LSE_BY_MMA: gl.constexpr = config.LSE_BY_MMA
    ALIBI: gl.constexpr = config.ALIBI
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    dk, dv, dq_sum = grads
    q_s, k_s, v_s, _ = tiles_s
    kv_full, q_full, _, _, _ = barriers
    ds_full, _ = ds_barriers
    b, first_key, kv_head, group, bh, _mask_row, padded = tile
    start, steps, partial, full_begin, full_end = q_range
    _mask_mode, _q_len, kv_len, scale, _soft_cap = scalars
    # of dQ this warp group makes half of the columns
    PART: gl.constexpr = QK_DIM // 2
    CELLS: gl.constexpr = ROWS * PART
    row_blocks = padded // ROWS
    dtype: gl.constexpr = dk.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    keys = first_key + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    dv_sum = gl.zeros([64, V_DIM], gl.float32, accumulator(V_DIM))
    dk_sum = gl.zeros([64, QK_DIM], gl.float32, accumulator(QK_DIM))
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    k = k_s.index(0).slice(W * 64, 64, dim=0)
    k_part = k_s.index(0).slice(W * PART, PART, dim=1)
    v = v_s.index(W)
    if steps > 0:
        if SKIP:
            own_start, own_end = rows_of_half(own_blocks, first_key // 64 + W, kv_len)
        if PING_PONG and W == 1:
            ping_pong_pass(1)
        mbarrier.wait(q_full.index(0), 0)
        s = scores(k, q_s.index(0).permute((1, 0)), lse_parts, 0, LSE_BY_MMA)
        s = warpgroup_mma_wait(0, deps=(s,))
        if DQ == 1:  # "block -1": adds zero to dQ
            ds_s.index(1).slice(W * 64, 64, dim=0).store(gl.zeros([64, ROWS], dtype, s_layout))
            fence_async_shared()
            mbarrier.arrive(ds_full.index(1))
        stage = 0
        phase = 0
        if BLOCK_LISTS:
            mask_args, mask_b, q_len, _kv_len = listing
            for g in range(0, group):
                head = kv_head * group + g
                listed, masked, full_count = list_of_keys(
                    mask_args, mask_b, head, first_key, q_len, kv_len
                )
                head_mask = mask_of_head(mask_args, mask_b, head, q_len, kv_len)
                for part in gl.static_range(2):
                    for i in range(0, masked if part == 0 else full_count):
                        row = gl.load(listed + i) * ROWS if part == 0 else 0
                        dk_sum, dv_sum, s, phase = step(
                            W, (dk_sum, dv_sum), s, row, i, stage, phase, 0, args, k_part, keys,
                            head_mask,
                            (), part == 0, True, config,
                        )  # fmt: skip
                        stage = stage ^ 1
        # of the block before; zeros are added to the first one
        before = (bh * row_blocks + start // ROWS) * 2 + (W if DQ == 1 else 0)
        # partial blocks of every head, then the full ones
        for part in gl.static_range(0 if BLOCK_LISTS else 2):
            count = partial if part == 0 else full_end - full_begin
            n = 0
            g = 0
            for i in range(0, count * group):
                at = (
                    gl.where(n < full_begin, n, n + full_end - full_begin)
                    if part == 0
                    else full_begin + n
                )
                row = start + at * ROWS
                if ALIBI:
                    slope2 = gl.load(slopes + kv_head * group + g) * -LOG2E
                else:
                    slope2 = ()
                if part == 1:
                    dk_sum, dv_sum, s, phase = step(
                        W, (dk_sum, dv_sum), s, row, i, stage, phase, before, args, k_part,
                        keys, (),
                        slope2, False, True, config,
                    )  # fmt: skip
                elif SKIP:
                    if (row < own_end) & (row + ROWS > own_start):
                        dk_sum, dv_sum, s, phase = step(
                            W, (dk_sum, dv_sum), s, row, i, stage, phase, before, args, k_part,
                            keys, (),
                            slope2, True, True, config,
                        )  # fmt: skip
                    else:
                        dk_sum, dv_sum, s, phase = step(
                            W, (dk_sum, dv_sum), s, row, i, stage, phase, before, args, k_part,
                            keys, (),
                            slope2, True, False, config,
                        )  # fmt: skip
                else:
                    dk_sum, dv_sum, s, phase = step(
                        W, (dk_sum, dv_sum), s, row, i, stage, phase, before, args, k_part,
                        keys, (),
                        slope2, True, True, config,
                    )  # fmt: skip
                stage = stage ^ 1
                block = row // ROWS
                before = ((bh + g) * row_blocks + block) * 2 + (W if DQ == 1 else 0)
                n += 1
                wrap = n == count
                n = gl.where(wrap, 0, n)
                g = gl.where(wrap, g + 1, g)
        if DQ == 1:
            mbarrier.wait(ds_full.index(stage ^ 1), phase)
            ds_t = ds_s.index(stage ^ 1).permute((1, 0))
            zero_dq = gl.zeros([ROWS, PART], gl.float32, accumulator(PART))
            dq = warpgroup_mma(ds_t, k_part, zero_dq, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            add_staged(dq, dq_sum + before.to(gl.int64) * CELLS, dq_s.index(W), CELLS)
            tma.store_wait(0)
        if PING_PONG and W == 0:
            ping_pong_wait(0)
    # other warp groups may still read this one's keys for their part of dQ
    keys_read(W, DQ)
    k.store((dk_sum * scale).to(dtype))
    v.store(dv_sum.to(dtype))
    fence_async_shared()
    gl.barrier()
    dk_tile = k_s.index(0).reinterpret(dtype, [1, 128, QK_DIM], dk.layout).slice(W * 64, 64, dim=1)
    tma.async_store(dk, [b, first_key + W * 64, kv_head * QK_DIM], dk_tile)
    dv_tile = v.reinterpret(dtype, [1, 64, V_DIM], dv.layout)
    tma.async_store(dv, [b, first_key + W * 64, kv_head * V_DIM], dv_tile)
    tma.store_wait(0)
