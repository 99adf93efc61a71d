"""dK and dV on Hopper in Gluon for head dims whose sums do not fit one warp group's registers
(256, and 192/192): the same arguments and results as `backward_dkdv_sm90` of sm90/bwd.py.

A program is 64 keys of one key/value head, and its two warp groups divide the work by kind: the
first makes S, P and dV, the second dP, dS and dK. P (rounded, as the product with dO takes it)
passes from one to the other through shared memory. While one is at its exponentials, the other's
products run, and the next scores of each begin under its last product. Head dims are cut into
chunks of columns, as in sm90/fwd.py.
"""

from sm90.args import (
    Exchange,
    KernelScalars,
    KeyTileArgs,
    KeyTileMask,
    KeyTileShared,
    Maps,
    RowStats,
)
from sm90.bwd_producer import ROWS, allocate_row_stats, mask_bits, produce, tile_of_program
from sm90.chunked_mma import add_products, finished, left_chunks, scores, zeros
from sm90.common import LOG2E, accumulator, rematerialized_zero, select_bits, warp_arrive
from sm90.config import constants
from sm90.dq_reduce import keys_read
from sm90.soft_cap import tanh_of_scores
from sm90.tiles import barriers, init_barriers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # of a program


@gluon.aggregate
class SplitArgs(KeyTileArgs):
    """p: P of a block of rows, times the derivative of a soft cap."""

    p: Exchange


@gluon.jit
def bits_of_masked(n, keys, stage, args):
    """mask_bits of the n-th partial block of a head."""
    row = args.q_range.start + args.q_range.nth_partial(n) * ROWS
    return mask_bits(keys, row, stage, args)


@gluon.jit
def store_gradient(target, sums, scale, tiles_s, tile, CHUNKS: gl.constexpr):
    """dK or dV, by way of the place of the keys or values."""
    COLUMNS: gl.constexpr = tiles_s.shape[2]
    for c in gl.static_range(CHUNKS):
        result = sums[c] if scale is None else sums[c] * scale
        tiles_s.index(c).store(result.to(target.dtype))
    fence_async_shared()
    gl.barrier()
    for c in gl.static_range(CHUNKS):
        chunk = tiles_s.index(c).reinterpret(target.dtype, [1, KEYS, COLUMNS], target.layout)
        column = tile.kv_head * (CHUNKS * COLUMNS) + c * COLUMNS
        tma.async_store(target, [tile.b, tile.first_key, column], chunk)
    tma.store_wait(0)


@gluon.jit
def consume_scores(args, config: gl.constexpr):
    """S, P and dV."""
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    scale = args.scalars.scale
    SOFT_CAP: gl.constexpr = config.SOFT_CAP
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    scale2 = (args.scalars.soft_cap if SOFT_CAP else scale) * LOG2E
    dtype: gl.constexpr = args.dv.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    v_layout: gl.constexpr = accumulator(V_CHUNK)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    keys = tile.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    dv_sum = zeros(v_layout, V_CHUNK, V_CHUNKS)
    mbarrier.wait(shared.kv_full.index(0), 0)
    k = left_chunks(shared.k_s, 0, CHUNKS)
    zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    if q_range.steps > 0:
        mbarrier.wait(shared.q_full.index(0), 0)
        s = scores(k, shared.q_s, 0, zero, CHUNKS)
        s = warpgroup_mma_wait(0, deps=(s,))
        stage = 0
        phase = 0
        for part in gl.static_range(2):  # partial blocks of every head, then the full ones
            count = q_range.partial if part == 0 else q_range.full_end - q_range.full_begin
            n = 0
            for i in range(0, count * tile.group):
                other = stage ^ 1
                lse = shared.row_stats.lse2.index(stage).load(gl.SliceLayout(0, s_layout))
                if SOFT_CAP:
                    s = tanh_of_scores(s, scale / args.scalars.soft_cap, ROWS)
                    dtanh = 1.0 - s * s  # the derivative of tanh
                if part == 0:
                    s = select_bits(s, bits_of_masked(n, keys, stage, args), float("-inf"))
                    n = gl.where(n + 1 == count, 0, n + 1)
                warp_arrive(shared.q_empty.index(stage))
                p32 = gl.exp2(s * scale2 - lse[None, :])
                p = p32.to(dtype)
                passed = (p32 * dtanh).to(dtype) if SOFT_CAP else p
                mbarrier.wait(args.p.empty.index(stage), phase ^ 1)
                args.p.tiles.index(stage).store(passed)
                mbarrier.arrive(args.p.full.index(stage))
                p_half = gl.convert_layout(p, p_layout)
                mbarrier.wait(shared.do_full.index(stage), phase)
                dv_tokens = add_products(p_half, shared.do_s, stage, dv_sum, V_CHUNKS)
                phase = phase ^ stage
                mbarrier.wait(shared.q_full.index(other), phase)
                zeroth = rematerialized_zero(i, config.REMATERIALIZE)
                k_left = left_chunks(shared.k_s, zeroth, CHUNKS)
                s_token = scores(k_left, shared.q_s, other, zero, CHUNKS)
                dv_sum = finished(dv_tokens, CHUNKS, V_CHUNKS)
                warp_arrive(shared.do_empty.index(stage))
                s = warpgroup_mma_wait(0, deps=(s_token,))
                stage = other
    keys_read(0, 1)
    store_gradient(args.dv, dv_sum, None, shared.v_s, tile, V_CHUNKS)


@gluon.jit
def consume_gradients(args, config: gl.constexpr):
    """dP, dS and dK."""
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    dtype: gl.constexpr = args.dk.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(QK_CHUNK), 2)
    keys = tile.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    dk_sum = zeros(accumulator(QK_CHUNK), QK_CHUNK, CHUNKS)
    mbarrier.wait(shared.kv_full.index(0), 0)
    v = left_chunks(shared.v_s, 0, V_CHUNKS)
    if q_range.steps > 0:
        mbarrier.wait(shared.do_full.index(0), 0)
        dp = scores(v, shared.do_s, 0, zero, V_CHUNKS)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        stage = 0
        phase = 0
        for part in gl.static_range(2):
            count = q_range.partial if part == 0 else q_range.full_end - q_range.full_begin
            n = 0
            for i in range(0, count * tile.group):
                other = stage ^ 1
                dl = shared.row_stats.delta.index(stage).load(gl.SliceLayout(0, s_layout))
                warp_arrive(shared.do_empty.index(stage))
                mbarrier.wait(args.p.full.index(stage), phase)
                p = args.p.tiles.index(stage).load(s_layout)
                ds = p.to(gl.float32) * (dp - dl[None, :])
                warp_arrive(args.p.empty.index(stage))
                mbarrier.wait(shared.q_full.index(stage), phase)
                if part == 0:
                    ds = select_bits(ds, bits_of_masked(n, keys, stage, args), 0.0)
                    n = gl.where(n + 1 == count, 0, n + 1)
                ds_half = gl.convert_layout(ds.to(dtype), ds_layout)
                dk_tokens = add_products(ds_half, shared.q_s, stage, dk_sum, CHUNKS)
                phase = phase ^ stage
                mbarrier.wait(shared.do_full.index(other), phase)
                zeroth = rematerialized_zero(i, config.REMATERIALIZE)
                v_left = left_chunks(shared.v_s, zeroth, V_CHUNKS)
                dp_token = scores(v_left, shared.do_s, other, zero, V_CHUNKS)
                dk_sum = finished(dk_tokens, V_CHUNKS, CHUNKS)
                warp_arrive(shared.q_empty.index(stage))
                dp = warpgroup_mma_wait(0, deps=(dp_token,))
                stage = other
    keys_read(1, 1)
    store_gradient(args.dk, dk_sum, args.scalars.scale, shared.k_s, tile, CHUNKS)


@gluon.jit
def backward_dkdv_sm90(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, soft_cap, mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
):  # fmt: skip
    """As bwd.backward_sm90 without dQ; `soft_cap` may be None."""
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK, CHUNKS=CHUNKS,
        V_CHUNKS=V_CHUNKS, HALVES=1, REMATERIALIZE=REMATERIALIZE, LSE_BY_MMA=False,
        SOFT_CAP=soft_cap is not None,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    get_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for
    qk_tile: gl.constexpr = get_layout([64, QK_CHUNK], dtype)
    v_tile: gl.constexpr = get_layout([64, V_CHUNK], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2 * CHUNKS, ROWS, QK_CHUNK], qk_tile)
    k_s = gl.allocate_shared_memory(dtype, [CHUNKS, KEYS, QK_CHUNK], qk_tile)
    v_s = gl.allocate_shared_memory(dtype, [V_CHUNKS, KEYS, V_CHUNK], v_tile)
    do_s = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, ROWS, V_CHUNK], v_tile)
    p_s = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], get_layout([KEYS, ROWS], dtype))
    shared = KeyTileShared(
        q_s, k_s, v_s, do_s, allocate_row_stats(),
        lse_parts=None, delta_parts=None, row_stats_full=None,
        kv_full=barriers(1), q_full=barriers(2), q_empty=barriers(2),
        do_full=barriers(2), do_empty=barriers(2),
    )  # fmt: skip
    p = Exchange(p_s, full=barriers(2), empty=barriers(2))
    init_barriers(1, (shared.kv_full,), (1,))
    init_barriers(
        2,
        (shared.q_full, shared.do_full, shared.q_empty, shared.do_empty, p.full, p.empty),
        (1, 1, 8, 8, 1, 4),
    )

    scalars = KernelScalars(
        mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap
    )
    mask = KeyTileMask(q_ids, kv_ids, q_pos, kv_pos, q_blocks, kv_blocks)
    tile, q_range, mask = tile_of_program(mask, kv_order, scalars, KEYS)
    args = SplitArgs(
        maps=Maps(query, key, value, dout), row_stats=RowStats(lse2, delta, lo, hi), dk=dk, dv=dv,
        mask=mask, shared=shared, p=p, tile=tile, q_range=q_range, scalars=scalars,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume_scores, (args, config)), (consume_gradients, (args, config)),
            (produce, (args, config))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
