"""dQ on Hopper in Gluon for head dims at which 64 rows of dQ do not fit in a warp group's registers
(512): the same results as sm90/bwd_dq.py.

A program computes 64 rows of one head. Its two warp groups compute 256 columns of dQ each, from the
same dS. The first computes S and P and passes P to the second through shared memory. The second
computes dP and dS and passes dS back. A step is 32 keys.

Queries and cotangents take 128 of 227 KiB of shared memory, two tiles of keys 64, and one tile of
values 32. The values are in two halves of the columns, each of which is loaded again as soon as its
product is done. The last 64 columns of the queries are in the first warp group's registers, and the
tiles of P and dS overwrite them in shared memory.
"""

from common.kv_ranges import LOG2E, key_range, opaque, place_of_tile, split
from sm90.args import Buffer, KernelScalars, Map, Maps, Mask, Number, StepRange
from sm90.chunked_mma import add_products, left_chunks, scores, wait_products, zeros
from sm90.common import accumulator, warp_arrive
from sm90.config import constants
from sm90.pipeline import apply_mask, mask_of_batch_row, next_stage
from sm90.tile_store import store_rows
from sm90.tiles import allocate_tiles, barriers, init_barriers, load_chunks, load_columns
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # per program
PARTS = gl.constexpr(2)  # of the columns of dQ, one per warp group


@gluon.aggregate
class DqPartsShared:
    """last_s: the last chunk of the queries. p_s and ds_s, P and dS of a step, overwrite it. They
    need no *_empty barriers: P of the next step is stored after dS of this step has been read, and
    dS of the next step after P of the next step has arrived. Each half of v_s is a separate
    stage."""

    q_s: Buffer
    last_s: Buffer
    p_s: Buffer
    ds_s: Buffer
    do_s: Buffer
    k_s: Buffer
    v_s: Buffer
    q_full: Buffer
    k_full: Buffer
    k_empty: Buffer
    v_full: Buffer
    v_empty: Buffer
    p_full: Buffer
    ds_full: Buffer


@gluon.aggregate
class RowsOfHead:
    """A program's 64 rows."""

    row: Number
    head: Number
    kv_head: Number
    b: Number
    kv_range: StepRange
    checked: Number


@gluon.aggregate
class DqPartsArgs:
    maps: Maps
    dq: Map
    lse2: Number
    delta: Number
    mask: Mask
    shared: DqPartsShared
    tile: RowsOfHead
    scalars: KernelScalars


@gluon.jit
def rows_of_program(mask, q_blocks, q_order, scalars, BLOCK_N: gl.constexpr):
    """This program's rows and their steps (none past the last row), and the mask's arrays from its
    batch row on."""
    q_len = scalars.q_len
    head, kv_head, b, mask_b, row = place_of_tile(
        gl.program_id(0), q_order, scalars.batch, scalars.mask_batch, (q_len + 127) // 128,
        scalars.heads // scalars.kv_heads, scalars.kv_heads, ROWS, 128 // ROWS,
    )  # fmt: skip
    start, end, full_lo, full_hi, checked = key_range(q_blocks, mask_b, row, q_len, ROWS)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
    in_bounds = row < q_len
    partial = gl.where(in_bounds, steps - full_end + full_begin, 0)
    steps = gl.where(in_bounds, steps, 0)
    kv_range = StepRange(start, steps, partial, full_begin, full_end)
    tile = RowsOfHead(row, head, kv_head, b, kv_range, checked)
    return tile, mask_of_batch_row(mask, mask_b, scalars)


@gluon.jit
def produce(args, config: gl.constexpr):
    maps = args.maps
    shared = args.shared
    tile = args.tile
    kv_range = tile.kv_range
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    BLOCK_N: gl.constexpr = config.BLOCK_N
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    V_PART: gl.constexpr = V_DIM // PARTS
    if kv_range.steps > 0:
        full = shared.q_full.index(0)
        mbarrier.expect(full, ROWS * (QK_DIM + V_DIM) * 2)
        head = tile.head
        load_chunks(maps.query, tile.b, tile.row, head, full, shared.q_s, 0, CHUNKS - 1)
        column = QK_DIM - config.QK_CHUNK
        load_columns(maps.query, tile.b, tile.row, head, column, full, shared.last_s, 0, 1)
        load_chunks(maps.dout, tile.b, tile.row, head, full, shared.do_s, 0, PARTS * V_CHUNKS)
    stage = 0
    phase = 0
    # one extra step: the consumers start its scores and dP, and drop them
    for i in range(0, gl.where(kv_range.steps > 0, kv_range.steps + 1, 0)):
        at = kv_range.nth(gl.minimum(i, kv_range.steps - 1), BLOCK_N)
        mbarrier.wait(shared.k_empty.index(stage), phase ^ 1)
        full = shared.k_full.index(stage)
        mbarrier.expect(full, BLOCK_N * QK_DIM * 2)
        kv_head = tile.kv_head
        load_chunks(maps.key, tile.b, at, kv_head, full, shared.k_s, stage * CHUNKS, CHUNKS)
        for half in gl.static_range(PARTS):
            mbarrier.wait(shared.v_empty.index(half), (i & 1) ^ 1)
            full = shared.v_full.index(half)
            mbarrier.expect(full, BLOCK_N * V_PART * 2)
            load_columns(
                maps.value, tile.b, at, kv_head, half * V_PART, full, shared.v_s, half * V_CHUNKS,
                V_CHUNKS,
            )  # fmt: skip
        stage, phase = next_stage(stage, phase, 2)


@gluon.jit
def rows_of_tile(args, layout: gl.constexpr):
    """Row numbers, in-bounds mask, and indices into the row statistics."""
    tile = args.tile
    scalars = args.scalars
    rows = tile.row + gl.arange(0, ROWS, layout)
    padded = (scalars.q_len + 63) // 64 * 64
    stat = (tile.b.to(gl.int64) * scalars.heads + tile.head) * padded + rows
    return rows, rows < scalars.q_len, stat


@gluon.jit
def store_part(W: gl.constexpr, sums, tiles_s, args, config: gl.constexpr):
    """Stores the W-th part of the columns of dQ through tiles_s, which no other warp group
    reads."""
    tile = args.tile
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    PART_CHUNKS: gl.constexpr = config.CHUNKS // PARTS
    layout: gl.constexpr = gl.SliceLayout(1, accumulator(QK_CHUNK))
    rows, in_bounds, stat = rows_of_tile(args, layout)
    lse = gl.load(args.lse2 + stat, mask=in_bounds, other=float("inf"))
    lo = gl.load(args.mask.kv_start + rows, mask=in_bounds, other=0)
    hi = gl.load(args.mask.kv_end + rows, mask=in_bounds, other=0)
    # also true for a NaN, which must reach the result
    attended = (hi > lo) & (lse != float("inf"))
    column = W * (config.QK_DIM // PARTS)
    scale = args.scalars.scale
    store_rows(
        args.dq, sums, attended, scale, tiles_s, 0, tile.b, tile.row, tile.head, column, PART_CHUNKS
    )


@gluon.jit
def consume_scores(args, config: gl.constexpr):
    """Computes S, P and the first part of dQ."""
    shared = args.shared
    scalars = args.scalars
    tile = args.tile
    kv_range = tile.kv_range
    steps = kv_range.steps
    partial = kv_range.partial
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    BLOCK_N: gl.constexpr = config.BLOCK_N
    CHUNKS: gl.constexpr = config.CHUNKS
    PART_CHUNKS: gl.constexpr = CHUNKS // PARTS
    dtype: gl.constexpr = args.dq.dtype
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    q_layout: gl.constexpr = accumulator(QK_CHUNK)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, q_layout, 2)
    scale2 = scalars.scale * LOG2E
    rows, in_bounds, stat = rows_of_tile(args, gl.SliceLayout(1, s_layout))
    # rows past the end get lse2 +inf and delta 0, as rows that attend to nothing have
    lse = gl.load(args.lse2 + stat, mask=in_bounds, other=float("inf"))
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    dq_sum = zeros(PART_CHUNKS * QK_CHUNK, QK_CHUNK)
    if steps > 0:
        mbarrier.wait(shared.q_full.index(0), 0)
        last = (shared.last_s.index(0).load(gl.DotOperandLayout(0, s_layout, 2)),)
        gl.barrier()  # before P overwrites it
        mbarrier.wait(shared.k_full.index(0), 0)
        q = left_chunks(shared.q_s, 0, (CHUNKS - 1) * QK_CHUNK) + last
        s = scores(q, shared.k_s, 0, zero)
        s = warpgroup_mma_wait(0, deps=(s,))
        stage = 0
        phase = 0
        turn = 0
        for part in gl.static_range(2):  # partial steps, then full steps
            begin = 0 if part == 0 else partial
            stop = partial if part == 0 else steps
            for i in range(begin, stop):
                if part == 0:
                    at = kv_range.nth(i, BLOCK_N)
                    s = apply_mask(s, rows, at, args.mask, tile.checked, scalars, (), config)
                p = gl.exp2(s * scale2 - gl.expand_dims(lse, 1)).to(dtype)
                shared.p_s.store(p)
                mbarrier.arrive(shared.p_full.index(0))
                mbarrier.wait(shared.ds_full.index(0), turn)
                ds = shared.ds_s.load(ds_layout)
                dq_tokens = add_products(ds, shared.k_s, stage * PARTS, dq_sum)
                old = stage
                stage, phase = next_stage(stage, phase, 2)
                mbarrier.wait(shared.k_full.index(stage), phase)
                zero_index = opaque(stage * 0)
                q_left = left_chunks(shared.q_s, zero_index, (CHUNKS - 1) * QK_CHUNK) + last
                s_token = scores(q_left, shared.k_s, stage, zero)
                dq_sum = wait_products(dq_tokens, CHUNKS, PART_CHUNKS)
                warp_arrive(shared.k_empty.index(old))
                s = warpgroup_mma_wait(0, deps=(s_token,))
                turn = turn ^ 1
    store_part(0, dq_sum, shared.q_s, args, config)


@gluon.jit
def begin_dp(zero_index, phase, zero, shared):
    """Starts do v^T, each half of the columns as soon as it has been loaded. `zero_index`: see
    bwd_split_consumer.start_scores."""
    do = left_chunks(shared.do_s, zero_index, PARTS * shared.do_s.shape[2])
    mbarrier.wait(shared.v_full.index(0), phase)
    v_t = shared.v_s.index(zero_index).permute((1, 0))
    dp = warpgroup_mma(do[0], v_t, zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.v_full.index(1), phase)
    v_t = shared.v_s.index(zero_index + 1).permute((1, 0))
    return warpgroup_mma(do[1], v_t, dp, is_async=True)


@gluon.jit
def consume_gradients(args, config: gl.constexpr):
    """Computes dP, dS and the second part of dQ."""
    shared = args.shared
    kv_range = args.tile.kv_range
    steps = kv_range.steps
    partial = kv_range.partial
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    BLOCK_N: gl.constexpr = config.BLOCK_N
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    PART_CHUNKS: gl.constexpr = CHUNKS // PARTS
    gl.static_assert(V_CHUNKS == 1, "a half of the values is one chunk")
    dtype: gl.constexpr = args.dq.dtype
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    q_layout: gl.constexpr = accumulator(QK_CHUNK)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, q_layout, 2)
    _, in_bounds, stat = rows_of_tile(args, gl.SliceLayout(1, s_layout))
    dl = gl.load(args.delta + stat, mask=in_bounds, other=0.0)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    dq_sum = zeros(PART_CHUNKS * QK_CHUNK, QK_CHUNK)
    if steps > 0:
        mbarrier.wait(shared.q_full.index(0), 0)
        dp = begin_dp(0, 0, zero, shared)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        warp_arrive(shared.v_empty.index(0))
        warp_arrive(shared.v_empty.index(1))
        stage = 0
        phase = 0
        turn = 0
        for part in gl.static_range(2):
            begin = 0 if part == 0 else partial
            stop = partial if part == 0 else steps
            for i in range(begin, stop):
                mbarrier.wait(shared.p_full.index(0), turn)
                p = shared.p_s.load(s_layout).to(gl.float32)
                ds = p * (dp - gl.expand_dims(dl, 1))
                if part == 0:  # P is 0 at masked pairs, dP may be anything
                    ds = gl.where(p == 0.0, 0.0, ds)
                rounded = ds.to(dtype)
                shared.ds_s.store(rounded)
                mbarrier.arrive(shared.ds_full.index(0))
                ds_half = gl.convert_layout(rounded, ds_layout)
                mbarrier.wait(shared.k_full.index(stage), phase)
                dq_tokens = add_products(ds_half, shared.k_s, stage * PARTS + 1, dq_sum)
                old = stage
                stage, phase = next_stage(stage, phase, 2)
                turn = turn ^ 1
                zero_index = opaque(stage * 0)
                dp_token = begin_dp(zero_index, turn, zero, shared)
                dq_sum = wait_products(dq_tokens, PARTS, PART_CHUNKS)
                warp_arrive(shared.k_empty.index(old))
                dp_token = warpgroup_mma_wait(1, deps=(dp_token,))
                warp_arrive(shared.v_empty.index(0))
                dp = warpgroup_mma_wait(0, deps=(dp_token,))
                warp_arrive(shared.v_empty.index(1))
    # dQ overwrites the first half of the cotangents, in chunks of a different size
    dq_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, QK_CHUNK], dtype)
    dq_tiles = shared.do_s.reinterpret(dtype, [CHUNKS, ROWS, QK_CHUNK], dq_tile)
    store_part(1, dq_sum, dq_tiles, args, config)


@gluon.jit
def backward_dq_sm90_parts(
    query, key, value, dout, dq, lse2, delta,
    kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order,
    scale, mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As bwd_dq.backward_dq_sm90 without options. A program computes half of a tile of 128 rows."""
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // PARTS // V_CHUNK  # of a half
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK, CHUNKS=CHUNKS,
        V_CHUNKS=V_CHUNKS, BLOCK_N=BLOCK_N, BLOCK_LISTS=False,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    p_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], dtype)
    gl.static_assert(QK_CHUNK == 2 * BLOCK_N, "P and dS take the place of a chunk of queries")
    last_s = allocate_tiles(dtype, 1, ROWS, QK_CHUNK)
    passed_s = last_s.reinterpret(dtype, [2, ROWS, BLOCK_N], p_tile)
    shared = DqPartsShared(
        q_s=allocate_tiles(dtype, CHUNKS - 1, ROWS, QK_CHUNK),
        last_s=last_s, p_s=passed_s.index(0), ds_s=passed_s.index(1),
        do_s=allocate_tiles(dtype, PARTS * V_CHUNKS, ROWS, V_CHUNK),
        k_s=allocate_tiles(dtype, 2 * CHUNKS, BLOCK_N, QK_CHUNK),
        v_s=allocate_tiles(dtype, PARTS * V_CHUNKS, BLOCK_N, V_CHUNK),
        q_full=barriers(1), k_full=barriers(2), k_empty=barriers(2),
        v_full=barriers(2), v_empty=barriers(2), p_full=barriers(1), ds_full=barriers(1),
    )  # fmt: skip
    init_barriers(
        2,
        (
            shared.q_full, shared.p_full, shared.ds_full,
            shared.k_full, shared.k_empty, shared.v_full, shared.v_empty,
        ),
        (1, 1, 1, 1, 8, 1, 4),
    )  # fmt: skip

    scalars = KernelScalars(
        mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap=None
    )
    mask = Mask(kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos)
    tile, mask = rows_of_program(mask, q_blocks, q_order, scalars, BLOCK_N)
    args = DqPartsArgs(
        maps=Maps(query, key, value, dout, None), dq=dq, lse2=lse2, delta=delta, mask=mask,
        shared=shared, tile=tile, scalars=scalars,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume_scores, (args, config)), (consume_gradients, (args, config)),
            (produce, (args, config))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
