"""Consumer warp group of the kernels of sm90/bwd.py: computes dK and dV of 64 keys, and its part of
dQ."""

from common.kv_ranges import LOG2E
from common.soft_cap import tanh_of_scores
from sm90.alibi import add_alibi
from sm90.block_lists import bits_of_rows, list_of_keys, mask_of_head
from sm90.bwd_producer import ROWS, mask_bits, rows_of_half
from sm90.chunked_mma import (
    add_products,
    half_of_keys,
    left_chunks,
    products,
    scores,
    wait_products,
    zeros,
)
from sm90.common import accumulator, named_barrier, rematerialized_zero, select_bits, warp_arrive
from sm90.dq_reduce import add_staged, columns_of_dq, keys_of_dq, keys_read, publish_ds
from sm90.dropout import key_keep_bits
from sm90.lse_by_mma import lse_scale, subtract_stats
from sm90.tile_store import store_half
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)


@gluon.jit
def ping_pong_wait(W: gl.constexpr):
    """The warp groups take turns at issuing dK, dQ and the next scores, so that the softmax of one
    runs during the products of the other."""
    gl.inline_asm(named_barrier("sync", 4 + W, 256), "~{memory}", ())


@gluon.jit
def ping_pong_pass(W: gl.constexpr):
    gl.inline_asm(named_barrier("arrive", 5 - W, 256), "~{memory}", ())


@gluon.jit
def start_scores(k, shared, stage, LSE_BY_MMA: gl.constexpr):
    """Starts S^T of a block of rows. With LSE_BY_MMA, LSE in units of S is subtracted from it."""
    zero = gl.zeros([64, ROWS], gl.float32, accumulator(ROWS))
    s = scores(k, shared.q_s, stage, zero)
    return subtract_stats(s, shared.lse_parts.index(stage)) if LSE_BY_MMA else s


@gluon.jit
def wait_both(dv_tokens, dk_tokens, pending: gl.constexpr, V_CHUNKS: gl.constexpr):
    """The sums of both, when at most `pending` later wgmma groups are in flight."""
    sums = warpgroup_mma_wait(pending, deps=dv_tokens + dk_tokens)
    return sums[:V_CHUNKS], sums[V_CHUNKS:]


@gluon.jit
def step(
    W: gl.constexpr, sums, s, row, i, stage, phase, previous, args, k_part, keys, head_mask,
    per_head, MASKED: gl.constexpr, LIVE: gl.constexpr, config: gl.constexpr,
):  # fmt: skip
    """Processes the i-th block of rows: adds to dk and dv, shares dS, adds dQ of the block
    `previous`, and computes the next scores.

    LIVE: there may be a pair of this warp group's keys and these rows. `per_head`: the slope of
    ALiBi, or with dropout the head.
    """
    dk_sum, dv_sum = sums
    shared = args.shared
    ds_shared = args.ds
    scale = args.scalars.scale
    QK_COLUMNS: gl.constexpr = config.QK_COLUMNS
    DQ: gl.constexpr = config.DQ
    LSE_BY_MMA: gl.constexpr = config.LSE_BY_MMA
    SOFT_CAP: gl.constexpr = config.SOFT_CAP
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    REMATERIALIZE: gl.constexpr = config.REMATERIALIZE
    k_left = half_of_keys(shared.k_s, rematerialized_zero(i, REMATERIALIZE), W, QK_COLUMNS)
    v_left = left_chunks(shared.v_s, W + rematerialized_zero(i, REMATERIALIZE), config.V_COLUMNS)
    NEW: gl.constexpr = CHUNKS + (1 if LSE_BY_MMA else 0)  # wgmma groups of the next scores
    if LSE_BY_MMA:
        scale2 = lse_scale(scale)
    else:
        scale2 = (args.scalars.soft_cap if SOFT_CAP else scale) * LOG2E
    dtype: gl.constexpr = shared.q_s.dtype
    FIRST_CELL: gl.constexpr = ROWS * columns_of_dq(W, QK_COLUMNS, config.QK_CHUNK, DQ)[0]
    CELLS: gl.constexpr = ROWS * columns_of_dq(W, QK_COLUMNS, config.QK_CHUNK, DQ)[1]
    s_layout: gl.constexpr = accumulator(ROWS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.V_CHUNK), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.QK_CHUNK), 2)
    other = stage ^ 1
    if LIVE and not LSE_BY_MMA:
        lse = shared.row_stats.lse2.index(stage).load(gl.SliceLayout(0, s_layout))
    mbarrier.wait(shared.do_full.index(stage), phase)
    if LIVE:
        zero = gl.zeros([64, ROWS], gl.float32, s_layout)
        dp_token = scores(v_left, shared.do_s, stage, zero)
        if LSE_BY_MMA:
            dp_token = subtract_stats(dp_token, shared.delta_parts.index(stage))
        if config.DROPOUT:
            keep = key_keep_bits(keys, per_head, row, args)
        if SOFT_CAP:
            s = tanh_of_scores(s, scale / args.scalars.soft_cap, ROWS)
            dtanh = 1.0 - s * s  # the derivative of tanh
        if config.ALIBI:
            s = add_alibi(s, keys, row, scale2, per_head, ROWS)
            scale2 = 1.0
        if MASKED:
            bits = mask_bits(keys, row, stage, args)
            if config.BLOCK_LISTS:
                bits = bits & bits_of_rows(head_mask, keys, row, args.scalars.q_len)
            s = select_bits(s, bits, float("-inf"))
        p = gl.exp2(s * scale2 if LSE_BY_MMA else s * scale2 - lse[None, :])
        kept = select_bits(p, keep, 0.0) if config.DROPOUT else p
        p_half = gl.convert_layout(kept.to(dtype), p_layout)
        if SOFT_CAP:
            p = p * dtanh
        dp = warpgroup_mma_wait(0, deps=(dp_token,))
        dv_tokens = add_products(p_half, shared.do_s, stage, dv_sum)
        if config.DROPOUT:
            dp = select_bits(dp, keep, 0.0) * args.dropout.inverse_keep
        if LSE_BY_MMA:
            ds32 = p * dp
        else:
            dl = shared.row_stats.delta.index(stage).load(gl.SliceLayout(0, s_layout))
            ds32 = p * (dp - dl[None, :])
        if MASKED:
            ds32 = select_bits(ds32, bits, 0.0)
        ds = ds32.to(dtype)
    else:
        ds = gl.zeros([64, ROWS], dtype, s_layout)
    if DQ:
        empty_phase = phase if DQ == 2 else phase ^ stage
        mbarrier.wait(ds_shared.empty.index(stage), empty_phase ^ 1)
        half_s = ds_shared.tiles.index(stage).slice(W * 64, 64, dim=0)
        publish_ds(ds, half_s, ds_shared.full.index(stage))
    if config.PING_PONG:
        ping_pong_wait(W)
    if LIVE:
        ds_half = gl.convert_layout(ds, ds_layout)
        dk_tokens = add_products(ds_half, shared.q_s, stage, dk_sum)
    if DQ == 1:
        mbarrier.wait(ds_shared.full.index(other), phase)
        ds_t = ds_shared.tiles.index(other).permute((1, 0))
        dq_tokens = products(ds_t, k_part)
        if LIVE:
            dv_sum, dk_sum = wait_both(dv_tokens, dk_tokens, len(k_part), V_CHUNKS)
        warp_arrive(shared.do_empty.index(stage))
        warp_arrive(shared.q_empty.index(stage))
    phase = phase ^ stage
    mbarrier.wait(shared.q_full.index(other), phase)
    s_token = start_scores(k_left, shared, other, LSE_BY_MMA)
    if config.PING_PONG:
        ping_pong_pass(W)
    if DQ == 1:
        dq = wait_products(dq_tokens, NEW, len(k_part))
        warp_arrive(ds_shared.empty.index(other))
        add_staged(dq, previous, FIRST_CELL, args.dq_s.index(W), args, CELLS, 0, config)
    else:
        if LIVE:
            dv_sum, dk_sum = wait_both(dv_tokens, dk_tokens, NEW, V_CHUNKS)
        warp_arrive(shared.do_empty.index(stage))
        warp_arrive(shared.q_empty.index(stage))
    s = warpgroup_mma_wait(0, deps=(s_token,))
    return dk_sum, dv_sum, s, phase


@gluon.jit
def consume_half(W: gl.constexpr, args, config: gl.constexpr):
    shared = args.shared
    ds_shared = args.ds
    tile = args.tile
    q_range = args.q_range
    group = tile.group
    QK_COLUMNS: gl.constexpr = config.QK_COLUMNS
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    SKIP: gl.constexpr = config.SKIP
    DQ: gl.constexpr = config.DQ
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    PARTS: gl.constexpr = 0 if BLOCK_LISTS else 2
    FIRST_CELL: gl.constexpr = ROWS * columns_of_dq(W, QK_COLUMNS, config.QK_CHUNK, DQ)[0]
    CELLS: gl.constexpr = ROWS * columns_of_dq(W, QK_COLUMNS, config.QK_CHUNK, DQ)[1]
    row_blocks = tile.padded // ROWS
    dtype: gl.constexpr = args.dk.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    keys = tile.first_key + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    dv_sum = zeros(config.V_COLUMNS, config.V_CHUNK)
    dk_sum = zeros(QK_COLUMNS, config.QK_CHUNK)
    mbarrier.wait(shared.kv_full.index(0), 0)
    mbarrier.wait(shared.kv_full.index(1), 0)
    k = half_of_keys(shared.k_s, 0, W, QK_COLUMNS)
    v = left_chunks(shared.v_s, W, config.V_COLUMNS)
    k_part = ()
    if DQ == 1:
        k_part = keys_of_dq(shared.k_s, W, QK_COLUMNS)
    if q_range.steps > 0:
        if SKIP:
            live_start, live_end = rows_of_half(
                args.mask, tile.first_key // 64 + W, args.scalars.kv_len
            )
        if config.PING_PONG and W == 1:
            ping_pong_pass(1)
        mbarrier.wait(shared.q_full.index(0), 0)
        s = start_scores(k, shared, 0, config.LSE_BY_MMA)
        s = warpgroup_mma_wait(0, deps=(s,))
        if DQ == 1:  # dS of "block -1" is 0: the first step adds 0 to dQ
            half_s = ds_shared.tiles.index(1).slice(W * 64, 64, dim=0)
            half_s.store(gl.zeros([64, ROWS], dtype, s_layout))
            fence_async_shared()
            mbarrier.arrive(ds_shared.full.index(1))
        stage = 0
        phase = 0
        if BLOCK_LISTS:
            for g in range(0, group):
                listed, masked, full_count = list_of_keys(args.blocks, args.scalars, tile, g)
                head_mask = mask_of_head(
                    args.blocks, args.scalars, tile.mask_b, tile.kv_head * group + g
                )
                for part in gl.static_range(2):
                    for i in range(0, masked if part == 0 else full_count):
                        row = gl.load(listed + i) * ROWS if part == 0 else 0
                        dk_sum, dv_sum, s, phase = step(
                            W, (dk_sum, dv_sum), s, row, i, stage, phase, 0, args, k_part, keys,
                            head_mask, (), part == 0, True, config,
                        )  # fmt: skip
                        stage = stage ^ 1
        # dQ of the previous block; the first step adds zeros to that of the first block, or nothing
        previous = -1 if config.COPY_DQ else tile.bh * row_blocks + q_range.start // ROWS
        # partial blocks of every head, then full blocks
        for part in gl.static_range(PARTS):
            count = q_range.partial if part == 0 else q_range.full_end - q_range.full_begin
            n = 0
            g = 0
            for i in range(0, count * group):
                at = q_range.nth_partial(n) if part == 0 else q_range.full_begin + n
                row = q_range.start + at * ROWS
                if config.ALIBI:
                    per_head = gl.load(args.slopes + tile.kv_head * group + g) * -LOG2E
                elif config.DROPOUT:
                    per_head = tile.kv_head * group + g
                else:
                    per_head = ()
                if part == 1 or not SKIP or (row < live_end) & (row + ROWS > live_start):
                    dk_sum, dv_sum, s, phase = step(
                        W, (dk_sum, dv_sum), s, row, i, stage, phase, previous, args, k_part,
                        keys, (), per_head, part == 0, True, config,
                    )  # fmt: skip
                else:
                    dk_sum, dv_sum, s, phase = step(
                        W, (dk_sum, dv_sum), s, row, i, stage, phase, previous, args, k_part,
                        keys, (), per_head, True, False, config,
                    )  # fmt: skip
                stage = stage ^ 1
                block = row // ROWS
                previous = (tile.bh + g) * row_blocks + block
                n += 1
                wrap = n == count
                n = gl.where(wrap, 0, n)
                g = gl.where(wrap, g + 1, g)
        if DQ == 1:
            mbarrier.wait(ds_shared.full.index(stage ^ 1), phase)
            ds_t = ds_shared.tiles.index(stage ^ 1).permute((1, 0))
            dq = wait_products(products(ds_t, k_part), 0, len(k_part))
            add_staged(dq, previous, FIRST_CELL, args.dq_s.index(W), args, CELLS, 0, config)
            tma.store_wait(0)
            if config.TILES > 1:  # the next tile adds to what this one has copied
                gl.inline_asm("cp.async.bulk.wait_group 0;", "~{memory}", ())
        if config.PING_PONG and W == 0:
            ping_pong_wait(0)
    # other warp groups may still read this one's keys for their part of dQ
    keys_read(W, DQ)
    store_half(W, k, v, dk_sum, dv_sum, args, CHUNKS, V_CHUNKS)
