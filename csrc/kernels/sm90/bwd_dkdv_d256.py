"""dK and dV on Hopper in Gluon for head dims whose sums do not fit one warp group's registers
(256, and 192/192): the same arguments and results as `backward_dkdv_sm90` of sm90/bwd.py.

A program is 64 keys of one key/value head, and its two warp groups divide the work by kind: the
first makes S, P and dV, the second dP, dS and dK. P (rounded, as the product with dO takes it)
passes from one to the other through shared memory. While one is at its exponentials, the other's
products run, and the next scores of each begin under its last product. Head dims are cut into
chunks of columns, as in sm90/fwd.py.
"""

from sm90.bwd_producer import ROWS, mask_bits, produce, tile_of_program
from sm90.chunked_mma import add_products, finished, left_chunks, scores, zeros
from sm90.common import LOG2E, accumulator, rematerialized_zero, select_bits, warp_arrive
from sm90.config import constants
from sm90.dq_reduce import keys_read
from sm90.soft_cap import tanh_of_scores
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # of a program


@gluon.jit
def bits_of_masked(n, keys, stage, row_stats_s, mask, q_range, scalars):
    """mask_bits of the n-th partial block of a head: they lie before and behind its full ones."""
    _lse_s, _delta_s, lo_s, hi_s = row_stats_s
    start, _steps, _partial, full_begin, full_end = q_range
    at = gl.where(n < full_begin, n, n + full_end - full_begin)
    row = start + at * ROWS
    return mask_bits(keys, row, lo_s.index(stage), hi_s.index(stage), mask, scalars)


@gluon.jit
def consume_scores(dv, args, config: gl.constexpr):
    """S, P and dV."""
    mask, shared, barriers, p_barriers, tile, q_range, scalars = args
    tiles_s, row_stats_s, p_s = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    SOFT_CAP: gl.constexpr = config.SOFT_CAP
    q_s, k_s, v_s, do_s = tiles_s
    lse_s, _, _, _ = row_stats_s
    kv_full, q_full, q_empty, do_full, do_empty = barriers
    p_full, p_empty = p_barriers
    b, first_key, kv_head, group, _bh, _mask_row, _padded = tile
    _start, steps, partial, full_begin, full_end = q_range
    _, _, _, scale, soft_cap = scalars
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    scale2 = (soft_cap if SOFT_CAP else scale) * LOG2E
    dtype: gl.constexpr = dv.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    v_layout: gl.constexpr = accumulator(V_CHUNK)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    dv_sum = zeros(v_layout, V_CHUNK, V_CHUNKS)
    mbarrier.wait(kv_full.index(0), 0)
    k = left_chunks(k_s, 0, CHUNKS)
    zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    if steps > 0:
        mbarrier.wait(q_full.index(0), 0)
        s = scores(k, q_s, 0, zero, CHUNKS)
        s = warpgroup_mma_wait(0, deps=(s,))
        stage = 0
        phase = 0
        for part in gl.static_range(2):  # partial blocks of every head, then the full ones
            count = partial if part == 0 else full_end - full_begin
            n = 0
            for i in range(0, count * group):
                other = stage ^ 1
                lse = lse_s.index(stage).load(gl.SliceLayout(0, s_layout))
                if SOFT_CAP:
                    s = tanh_of_scores(s, scale / soft_cap, ROWS)
                    dtanh = 1.0 - s * s  # the derivative of tanh
                if part == 0:
                    bits = bits_of_masked(n, keys, stage, row_stats_s, mask, q_range, scalars)
                    s = select_bits(s, bits, float("-inf"))
                    n = gl.where(n + 1 == count, 0, n + 1)
                warp_arrive(q_empty.index(stage))
                p32 = gl.exp2(s * scale2 - lse[None, :])
                p = p32.to(dtype)
                passed = (p32 * dtanh).to(dtype) if SOFT_CAP else p
                mbarrier.wait(p_empty.index(stage), phase ^ 1)
                p_s.index(stage).store(passed)
                mbarrier.arrive(p_full.index(stage))
                p_half = gl.convert_layout(p, p_layout)
                mbarrier.wait(do_full.index(stage), phase)
                dv_tokens = add_products(p_half, do_s, stage, dv_sum, V_CHUNKS)
                phase = phase ^ stage
                mbarrier.wait(q_full.index(other), phase)
                k_left = left_chunks(k_s, rematerialized_zero(i, config.REMATERIALIZE), CHUNKS)
                s_token = scores(k_left, q_s, other, zero, CHUNKS)
                dv_sum = finished(dv_tokens, CHUNKS, V_CHUNKS)
                warp_arrive(do_empty.index(stage))
                s = warpgroup_mma_wait(0, deps=(s_token,))
                stage = other
    keys_read(0, 1)
    for c in gl.static_range(V_CHUNKS):
        v_s.index(c).store(dv_sum[c].to(dtype))
    fence_async_shared()
    gl.barrier()
    for c in gl.static_range(V_CHUNKS):
        dv_tile = v_s.index(c).reinterpret(dtype, [1, KEYS, V_CHUNK], dv.layout)
        tma.async_store(dv, [b, first_key, kv_head * V_DIM + c * V_CHUNK], dv_tile)
    tma.store_wait(0)


@gluon.jit
def consume_gradients(dk, args, config: gl.constexpr):
    """dP, dS and dK."""
    mask, shared, barriers, p_barriers, tile, q_range, scalars = args
    tiles_s, row_stats_s, p_s = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    q_s, k_s, v_s, do_s = tiles_s
    _, delta_s, _, _ = row_stats_s
    kv_full, q_full, q_empty, do_full, do_empty = barriers
    p_full, p_empty = p_barriers
    b, first_key, kv_head, group, _bh, _mask_row, _padded = tile
    _start, steps, partial, full_begin, full_end = q_range
    _, _, _, scale, _ = scalars
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // config.V_CHUNK
    dtype: gl.constexpr = dk.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(QK_CHUNK), 2)
    keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    dk_sum = zeros(accumulator(QK_CHUNK), QK_CHUNK, CHUNKS)
    mbarrier.wait(kv_full.index(0), 0)
    v = left_chunks(v_s, 0, V_CHUNKS)
    if steps > 0:
        mbarrier.wait(do_full.index(0), 0)
        dp = scores(v, do_s, 0, zero, V_CHUNKS)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        stage = 0
        phase = 0
        for part in gl.static_range(2):
            count = partial if part == 0 else full_end - full_begin
            n = 0
            for i in range(0, count * group):
                other = stage ^ 1
                dl = delta_s.index(stage).load(gl.SliceLayout(0, s_layout))
                warp_arrive(do_empty.index(stage))
                mbarrier.wait(p_full.index(stage), phase)
                p = p_s.index(stage).load(s_layout)
                ds = p.to(gl.float32) * (dp - dl[None, :])
                warp_arrive(p_empty.index(stage))
                mbarrier.wait(q_full.index(stage), phase)
                if part == 0:
                    bits = bits_of_masked(n, keys, stage, row_stats_s, mask, q_range, scalars)
                    ds = select_bits(ds, bits, 0.0)
                    n = gl.where(n + 1 == count, 0, n + 1)
                ds_half = gl.convert_layout(ds.to(dtype), ds_layout)
                dk_tokens = add_products(ds_half, q_s, stage, dk_sum, CHUNKS)
                phase = phase ^ stage
                mbarrier.wait(do_full.index(other), phase)
                v_left = left_chunks(v_s, rematerialized_zero(i, config.REMATERIALIZE), V_CHUNKS)
                dp_token = scores(v_left, do_s, other, zero, V_CHUNKS)
                dk_sum = finished(dk_tokens, V_CHUNKS, CHUNKS)
                warp_arrive(q_empty.index(stage))
                dp = warpgroup_mma_wait(0, deps=(dp_token,))
                stage = other
    keys_read(1, 1)
    for c in gl.static_range(CHUNKS):
        k_s.index(c).store((dk_sum[c] * scale).to(dtype))
    fence_async_shared()
    gl.barrier()
    for c in gl.static_range(CHUNKS):
        dk_tile = k_s.index(c).reinterpret(dtype, [1, KEYS, QK_CHUNK], dk.layout)
        tma.async_store(dk, [b, first_key, kv_head * QK_DIM + c * QK_CHUNK], dk_tile)
    tma.store_wait(0)


@gluon.jit
def backward_dkdv_sm90(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, soft_cap, mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
):  # fmt: skip
    """As bwd.backward_sm90 without dQ; `soft_cap` may be None."""
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK, HALVES=1,
        REMATERIALIZE=REMATERIALIZE, LSE_BY_MMA=False, SOFT_CAP=soft_cap is not None,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    get_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    qk_tile: gl.constexpr = get_layout([64, QK_CHUNK], dtype)
    v_tile: gl.constexpr = get_layout([64, V_CHUNK], dtype)
    p_tile: gl.constexpr = get_layout([KEYS, ROWS], dtype)
    tiles_s = (
        gl.allocate_shared_memory(dtype, [2 * CHUNKS, ROWS, QK_CHUNK], qk_tile),
        gl.allocate_shared_memory(dtype, [CHUNKS, KEYS, QK_CHUNK], qk_tile),
        gl.allocate_shared_memory(dtype, [V_CHUNKS, KEYS, V_CHUNK], v_tile),
        gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, ROWS, V_CHUNK], v_tile),
    )
    p_s = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], p_tile)
    row_stats_s = (
        gl.allocate_shared_memory(gl.float32, [2, ROWS], line),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], line),
        gl.allocate_shared_memory(gl.int32, [2, ROWS], line),
        gl.allocate_shared_memory(gl.int32, [2, ROWS], line),
    )
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], bar)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(kv_full.index(0), 1)
    for j in gl.static_range(2):
        mbarrier.init(q_full.index(j), 1)
        mbarrier.init(do_full.index(j), 1)
        mbarrier.init(q_empty.index(j), 8)
        mbarrier.init(do_empty.index(j), 8)
        mbarrier.init(p_full.index(j), 1)
        mbarrier.init(p_empty.index(j), 4)

    orders = (q_blocks, kv_blocks, kv_order)
    pointers = (q_ids, kv_ids, q_pos, kv_pos)
    sizes = (mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads)
    tile, q_range, mask, _ = tile_of_program(orders, pointers, sizes, KEYS)

    maps = (query, key, value, dout)
    row_stats = (lse2, delta, lo, hi)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty)
    p_barriers = (p_full, p_empty)
    if config.SOFT_CAP:
        scalars = (mask_mode, q_len, kv_len, scale, soft_cap)
    else:
        scalars = (mask_mode, q_len, kv_len, scale, scale)
    shared = (tiles_s, row_stats_s, p_s)
    loaded = (tiles_s, row_stats_s)
    consumed = (mask, shared, barriers, p_barriers, tile, q_range, scalars)
    gl.warp_specialize(
        [
            (consume_scores, (dv, consumed, config)),
            (consume_gradients, (dk, consumed, config)),
            (produce, (maps, row_stats, loaded, barriers, tile, q_range, (), scale, config)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
