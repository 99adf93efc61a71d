"""The consumer warp group of programs of 64 keys that have only one: it computes dK, dV and dQ.

Two such programs fit on a multiprocessor. For few blocks of rows, a program takes about as long to
start and to end as to compute; meanwhile, the other one computes.
"""

from common.kv_ranges import LOG2E
from sm90.bwd_producer import ROWS, mask_bits
from sm90.chunked_mma import add_products, left_chunks, products, scores, wait_products, zeros
from sm90.common import accumulator, select_bits, warp_arrive
from sm90.dq_reduce import add_staged, registers_constraints, store_ds_asm
from sm90.tile_store import store_gradient
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # per program


@gluon.jit
def add_block(
    dk_sum, dv_sum, s, row, block, stage, phase, keys, args, MASKED: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Adds a block of rows with scores `s` to all gradients, and computes the next scores."""
    shared = args.shared
    dtype: gl.constexpr = shared.q_s.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.V_CHUNK), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.QK_CHUNK), 2)
    CHUNKS: gl.constexpr = config.CHUNKS
    k = left_chunks(shared.k_s, 0, config.QK_COLUMNS)
    v = left_chunks(shared.v_s, 0, config.V_COLUMNS)
    zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    lse = shared.row_stats.lse2.index(stage).load(gl.SliceLayout(0, s_layout))
    mbarrier.wait(shared.do_full.index(stage), phase)
    dp_token = scores(v, shared.do_s, stage, zero)
    if MASKED:
        bits = mask_bits(keys, row, stage, args)
        s = select_bits(s, bits, float("-inf"))
    p = gl.exp2(s * (args.scalars.scale * LOG2E) - lse[None, :])
    p_half = gl.convert_layout(p.to(dtype), p_layout)
    dp = warpgroup_mma_wait(0, deps=(dp_token,))
    dv_tokens = add_products(p_half, shared.do_s, stage, dv_sum)
    dl = shared.row_stats.delta.index(stage).load(gl.SliceLayout(0, s_layout))
    ds32 = p * (dp - dl[None, :])
    if MASKED:  # P is 0 at masked pairs, dP may be anything
        ds32 = select_bits(ds32, bits, 0.0)
    ds = ds32.to(dtype)
    ds_s = args.ds.tiles.index(0)
    gl.inline_asm(store_ds_asm, registers_constraints(ROWS // 2, "h"), (ds, ds_s))
    fence_async_shared()
    gl.barrier()
    dk_tokens = add_products(gl.convert_layout(ds, ds_layout), shared.q_s, stage, dk_sum)
    dq_tokens = products(ds_s.permute((1, 0)), k)
    other = stage ^ 1
    mbarrier.wait(shared.q_full.index(other), phase ^ stage)
    s_token = scores(k, shared.q_s, other, zero)
    sums = warpgroup_mma_wait(2 * CHUNKS, deps=dv_tokens + dk_tokens)
    warp_arrive(shared.do_empty.index(stage))
    warp_arrive(shared.q_empty.index(stage))
    dq = wait_products(dq_tokens, CHUNKS, CHUNKS)
    CELLS: gl.constexpr = ROWS * config.QK_COLUMNS
    add_staged(dq, block, 0, args.dq_s.index(0), args, CELLS, 0, config)
    s = warpgroup_mma_wait(0, deps=(s_token,))
    return sums[config.V_CHUNKS :], sums[: config.V_CHUNKS], s


@gluon.jit
def consume_alone(args, config: gl.constexpr):
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    group = tile.group
    row_blocks = tile.padded // ROWS
    keys = tile.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, accumulator(ROWS)))
    dv_sum = zeros(config.V_COLUMNS, config.V_CHUNK)
    dk_sum = zeros(config.QK_COLUMNS, config.QK_CHUNK)
    mbarrier.wait(shared.kv_full.index(0), 0)
    if q_range.steps > 0:
        mbarrier.wait(shared.q_full.index(0), 0)
        zero = gl.zeros([KEYS, ROWS], gl.float32, accumulator(ROWS))
        token = scores(left_chunks(shared.k_s, 0, config.QK_COLUMNS), shared.q_s, 0, zero)
        s = warpgroup_mma_wait(0, deps=(token,))
        stage = 0
        phase = 0
        # partial blocks of every head, then full blocks
        for part in gl.static_range(2):
            count = q_range.partial if part == 0 else q_range.full_end - q_range.full_begin
            g = 0
            n = 0
            for _i in range(0, count * group):
                at = q_range.nth_partial(n) if part == 0 else q_range.full_begin + n
                row = q_range.start + at * ROWS
                block = (tile.bh + g) * row_blocks + row // ROWS
                dk_sum, dv_sum, s = add_block(
                    dk_sum, dv_sum, s, row, block, stage, phase, keys, args, part == 0, config
                )
                phase = phase ^ stage
                stage = stage ^ 1
                n += 1
                wrap = n == count
                n = gl.where(wrap, 0, n)
                g = gl.where(wrap, g + 1, g)
        tma.store_wait(0)
    gl.barrier()  # dK and dV overwrite the keys and values
    b = tile.b
    scale = args.scalars.scale
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    head = tile.kv_head
    store_gradient(args.dk, dk_sum, scale, shared.k_s, b, tile.first_key, head, 0, CHUNKS)
    store_gradient(args.dv, dv_sum, None, shared.v_s, b, tile.first_key, head, 0, V_CHUNKS)
