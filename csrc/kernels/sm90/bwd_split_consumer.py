"""Consumer warp groups of programs of 64 keys whose sums of dK and dV do not fit in one warp group:
the first computes S, P and dV, the second dP, dS and dK.

The first passes P (rounded, as its product with dO takes it) to the second through shared memory.
While one computes exponentials, the products of the other run. The next scores or dP start during
the last product of a step. Head dims are divided into chunks of columns, as in sm90/fwd.py.
"""

from common.kv_ranges import LOG2E, opaque
from common.soft_cap import tanh_of_scores
from sm90.args import HeadMask, Number
from sm90.block_lists import bits_of_rows, list_of_keys, mask_of_head
from sm90.bwd_producer import mask_bits, stage_of_bias
from sm90.chunked_mma import add_products, left_chunks, scores, wait_products, zeros
from sm90.common import accumulator, rematerialized_zero, select_bits, warp_arrive
from sm90.dbias_store import clear_rows, end_store, start_store
from sm90.dq_reduce import keys_read
from sm90.tile_store import store_gradient
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # per program


@gluon.aggregate
class Listed:
    """A head's list of blocks, and its block mask."""

    first: Number
    mask: HeadMask


@gluon.jit
def start_scores(left_s, tiles_s, rest, last, zero_index, stage, CHUNKS: gl.constexpr):
    """Starts S or dP of the block in `stage`, and adds the rest of the columns as soon as they have
    been loaded.

    `zero_index` is 0, but in loops the compiler does not know it: descriptors of tiles that never
    move would be hoisted out of the loop and spilled.
    """
    ROWS: gl.constexpr = tiles_s.shape[1]
    zero = gl.zeros([KEYS, ROWS], gl.float32, accumulator(ROWS))
    left = left_chunks(left_s, zero_index, CHUNKS * left_s.shape[2])
    if rest is not None:
        COLUMNS: gl.constexpr = (CHUNKS - len(last)) * left_s.shape[2]
        rest_left = left_chunks(rest.left_s, zero_index, COLUMNS) + last
    s = scores(left, tiles_s, stage, zero)
    if rest is not None:
        mbarrier.wait(rest.full.index(0), stage)  # its phase flips with every block
        for c in gl.static_range(CHUNKS):
            tile_t = rest.tiles_s.index(zero_index * CHUNKS + c).permute((1, 0))
            s = warpgroup_mma(rest_left[c], tile_t, s, is_async=True)
    return s


@gluon.jit
def wait_scores(token, rest):
    s = warpgroup_mma_wait(0, deps=(token,))
    if rest is not None:
        warp_arrive(rest.empty.index(0))
    return s


@gluon.jit
def opaque_zero(i, stage, rest, config: gl.constexpr):
    """`zero_index` in the i-th step of a loop."""
    if rest is None:
        zero = rematerialized_zero(i, config.REMATERIALIZE)
    else:
        zero = opaque(stage * 0)
    return zero


@gluon.jit
def bits_of_masked(n, listed, keys, stage, args):
    """`mask_bits` of a head's n-th partial block, or of the n-th block of `listed`."""
    ROWS: gl.constexpr = args.shared.q_s.shape[1]
    if listed is None:
        row = args.q_range.start + args.q_range.nth_partial(n) * ROWS
        bits = mask_bits(keys, row, stage, args)
    else:
        row = gl.load(listed.first + n) * ROWS
        bits = mask_bits(keys, row, stage, args)
        bits = bits & bits_of_rows(listed.mask, keys, row, args.scalars.q_len)
    return bits


@gluon.jit
def add_blocks(add: gl.constexpr, sums, s, fixed, args, config: gl.constexpr):
    """Adds all blocks of rows to `sums`. `add` takes the scores (or dP) `s` of a block and returns
    those of the next block. `fixed` is the same for all blocks."""
    tile = args.tile
    q_range = args.q_range
    stage = 0
    phase = 0
    if not config.BLOCK_LISTS:  # partial blocks of every head, then full blocks
        for part in gl.static_range(2):
            count = q_range.partial if part == 0 else q_range.full_end - q_range.full_begin
            n = 0
            for i in range(0, count * tile.group):
                sums, s, n, stage, phase = add(
                    sums, s, i, n, count, None, stage, phase, fixed, args, part == 0, config
                )
    else:  # partial blocks of a head, then its full blocks
        for g in range(0, tile.group):
            first, partial, full_count = list_of_keys(args.blocks, args.scalars, tile, g)
            head = tile.kv_head * tile.group + g
            listed = Listed(first, mask_of_head(args.blocks, args.scalars, tile.mask_b, head))
            n = 0
            for part in gl.static_range(2):
                for i in range(0, partial if part == 0 else full_count):
                    sums, s, n, stage, phase = add(
                        sums, s, i, n, partial, listed, stage, phase, fixed, args, part == 0, config
                    )
    return sums


@gluon.jit
def add_bias(s, args, nth):
    """Logits in base e, minus the largest logit of their row. `nth` is the number of the block
    modulo 4. The caller releases the tile after a store or a product has consumed the result: an
    earlier arrival could overtake the loads from shared memory, and TMA would overwrite the
    tile."""
    bias = args.bias
    layout: gl.constexpr = s.type.layout
    stage, phase = stage_of_bias(bias, nth)
    mbarrier.wait(bias.full.index(stage), phase)
    added = bias.tiles_s.index(stage).permute((1, 0)).load(layout).to(gl.float32)
    top = bias.top_s.index(stage).load(gl.SliceLayout(0, layout))
    # Above 0 only where products round differently than in the forward: by 64 at logits of 1e9.
    # The minimum of NaN (-inf minus -inf) and 0 is 0, too.
    return gl.minimum(s * args.scalars.scale + added - top[None, :], 0.0)


@gluon.jit
def add_to_values(
    dv_sum, s, i, n, count, listed, stage, phase, fixed, args, MASKED: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """`add` of add_blocks for S and dV. With MASKED, the block is the n-th of a head's `count`
    partial blocks. `listed` is None without block lists."""
    keys, scale2, last = fixed
    shared = args.shared
    rest = args.q_rest if config.PARTS > 1 else None
    SOFT_CAP: gl.constexpr = config.SOFT_CAP
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    NEW: gl.constexpr = CHUNKS if rest is None else 2 * CHUNKS  # wgmma groups of a block's S
    ROWS: gl.constexpr = shared.q_s.shape[1]
    dtype: gl.constexpr = args.dv.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.V_CHUNK), 2)
    other = stage ^ 1
    lse = shared.row_stats.lse2.index(stage).load(gl.SliceLayout(0, s_layout))
    if SOFT_CAP:
        s = tanh_of_scores(s, args.scalars.scale / args.scalars.soft_cap, ROWS)
        dtanh = 1.0 - s * s  # the derivative of tanh
    if args.bias is not None:
        nth = 2 * phase + stage
        s = add_bias(s, args, nth)
    if MASKED:
        s = select_bits(s, bits_of_masked(n, listed, keys, stage, args), float("-inf"))
        n = gl.where(n + 1 == count, 0, n + 1)
    warp_arrive(shared.q_empty.index(stage))
    p32 = gl.exp2(s * scale2 - lse[None, :])
    p = p32.to(dtype)
    passed = (p32 * dtanh).to(dtype) if SOFT_CAP else p
    mbarrier.wait(args.p.empty.index(stage), phase ^ 1)
    args.p.tiles.index(stage).store(passed)
    if args.bias is not None:
        bias_stage, _ = stage_of_bias(args.bias, nth)
        warp_arrive(args.bias.empty.index(bias_stage))
    mbarrier.arrive(args.p.full.index(stage))
    p_half = gl.convert_layout(p, p_layout)
    mbarrier.wait(shared.do_full.index(stage), phase)
    dv_tokens = add_products(p_half, shared.do_s, stage, dv_sum)
    phase = phase ^ stage
    mbarrier.wait(shared.q_full.index(other), phase)
    zero_index = opaque_zero(i, stage, rest, config)
    s_token = start_scores(shared.k_s, shared.q_s, rest, last, zero_index, other, CHUNKS)
    dv_sum = wait_products(dv_tokens, NEW, V_CHUNKS)
    warp_arrive(shared.do_empty.index(stage))
    s = wait_scores(s_token, rest)
    return dv_sum, s, n, other, phase


@gluon.jit
def consume_scores(args, config: gl.constexpr):
    """Computes S, P and dV."""
    shared = args.shared
    tile = args.tile
    rest = args.q_rest if config.PARTS > 1 else None
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    scale2 = (args.scalars.soft_cap if config.SOFT_CAP else args.scalars.scale) * LOG2E
    if args.bias is not None:
        scale2 = LOG2E
    s_layout: gl.constexpr = accumulator(shared.q_s.shape[1])
    keys = tile.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    dv_sum = zeros(config.V_DIM, config.V_CHUNK)
    mbarrier.wait(shared.kv_full.index(0), 0)
    if rest is None:
        last = ()
    else:
        last = (rest.last_s.index(0).load(gl.DotOperandLayout(0, s_layout, 2)),)
        gl.barrier()  # before P overwrites it
    if args.q_range.steps > 0:
        mbarrier.wait(shared.q_full.index(0), 0)
        s = start_scores(shared.k_s, shared.q_s, rest, last, 0, 0, CHUNKS)
        s = wait_scores(s, rest)
        dv_sum = add_blocks(add_to_values, dv_sum, s, (keys, scale2, last), args, config)
    keys_read(0, 1)
    column = args.part * config.V_DIM
    store_gradient(
        args.dv, dv_sum, None, shared.v_s, tile.b, tile.first_key, tile.kv_head, column, V_CHUNKS
    )


@gluon.jit
def store_block(args, stage, i, count, MASKED: gl.constexpr):
    """Stores dS of the i-th partial (full) block, counted over all heads, each of which has
    `count`."""
    tile = args.tile
    q_range = args.q_range
    g = i // count
    n = i - g * count
    nth = q_range.nth_partial(n) if MASKED else q_range.full_begin + n
    tile_s = args.p.tiles.index(stage)
    plane = tile.b * args.scalars.heads + tile.kv_head * tile.group + g
    row = q_range.start + nth * tile_s.shape[0]
    start_store(tile_s, args.bias.gradient, plane, row, tile.first_key)


@gluon.jit
def add_to_keys(
    dk_sum, dp, i, n, count, listed, stage, phase, fixed, args, MASKED: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """`add` of add_blocks for dP and dK, as add_to_values."""
    keys = fixed[0]
    shared = args.shared
    rest = args.do_rest if config.PARTS > 1 else None
    DBIAS: gl.constexpr = args.bias is not None and args.bias.gradient is not None
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    NEW: gl.constexpr = V_CHUNKS if rest is None else 2 * V_CHUNKS
    dtype: gl.constexpr = args.dk.dtype
    s_layout: gl.constexpr = accumulator(shared.q_s.shape[1])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.QK_CHUNK), 2)
    other = stage ^ 1
    dl = shared.row_stats.delta.index(stage).load(gl.SliceLayout(0, s_layout))
    mbarrier.wait(args.p.full.index(stage), phase)
    p = args.p.tiles.index(stage).load(s_layout)
    ds = p.to(gl.float32) * (dp - dl[None, :])
    mbarrier.wait(shared.q_full.index(stage), phase)
    if MASKED:
        ds = select_bits(ds, bits_of_masked(n, listed, keys, stage, args), 0.0)
        n = gl.where(n + 1 == count, 0, n + 1)
    ds_half = gl.convert_layout(ds.to(dtype), ds_layout)
    if DBIAS:  # all warps read P before dS overwrites it
        gl.barrier()
        args.p.tiles.index(stage).permute((1, 0)).store(ds.to(dtype))
    dk_tokens = add_products(ds_half, shared.q_s, stage, dk_sum)
    # The products have consumed dS, so delta and P have been read. An earlier arrival could
    # overtake their loads.
    warp_arrive(shared.do_empty.index(stage))
    if not DBIAS:
        warp_arrive(args.p.empty.index(stage))
    phase = phase ^ stage
    mbarrier.wait(shared.do_full.index(other), phase)
    zero_index = opaque_zero(i, stage, rest, config)
    dp_token = start_scores(shared.v_s, shared.do_s, rest, (), zero_index, other, V_CHUNKS)
    if DBIAS:
        store_block(args, stage, i, count, MASKED)
    dk_sum = wait_products(dk_tokens, NEW, CHUNKS)
    warp_arrive(shared.q_empty.index(stage))
    dp = wait_scores(dp_token, rest)
    if DBIAS:
        end_store()
        warp_arrive(args.p.empty.index(stage))
    return dk_sum, dp, n, other, phase


@gluon.jit
def consume_gradients(args, config: gl.constexpr):
    """Computes dP, dS and dK."""
    shared = args.shared
    tile = args.tile
    rest = args.do_rest if config.PARTS > 1 else None
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    s_layout: gl.constexpr = accumulator(shared.q_s.shape[1])
    keys = tile.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    dk_sum = zeros(config.QK_DIM, config.QK_CHUNK)
    mbarrier.wait(shared.kv_full.index(0), 0)
    if args.q_range.steps > 0:
        mbarrier.wait(shared.do_full.index(0), 0)
        dp = start_scores(shared.v_s, shared.do_s, rest, (), 0, 0, V_CHUNKS)
        dp = wait_scores(dp, rest)
        dk_sum = add_blocks(add_to_keys, dk_sum, dp, (keys,), args, config)
    if args.bias is not None and args.bias.gradient is not None:
        clear_rows(args.p.tiles.index(0), args, s_layout)
    keys_read(1, 1)
    column = args.part * config.QK_DIM
    scale = args.scalars.scale
    store_gradient(
        args.dk, dk_sum, scale, shared.k_s, tile.b, tile.first_key, tile.kv_head, column, CHUNKS
    )
