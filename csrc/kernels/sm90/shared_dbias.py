"""The gradient of a bias that batch rows share, on Hopper in Gluon: the same sums as
portable/bwd_dbias.py, which the tests compare it with.

A program owns a tile of 128 rows and 64 keys of one plane of the bias. The tile of the bias and
the sum of dS stay in registers while the program walks through the batch rows (and, if the bias
has no heads axis, the heads) that read them, so the bias is loaded once and its gradient stored
once, in a fixed order. A producer warp streams the queries, cotangents, keys and values of each
batch row, and leaves out those without a pair in the tile. Each of two warp groups computes 64
rows with two products, S = Q K^T and dP = dO V^T. Those of the next batch row run while dS of this
one is computed.

There are more multiprocessors than tiles, so the batch rows are divided into `dbias_parts` parts,
whose float32 sums portable/sum_dbias.py adds.
"""

from common.kv_ranges import LOG2E, key_range
from sm90.args import KernelScalars, Map, Maps, Mask, Number, RowStats, RowTile, StepRange
from sm90.chunked_mma import left_chunks, scores
from sm90.common import accumulator, select_bits, warp_arrive
from sm90.config import constants
from sm90.pipeline import mask_of_batch_row, next_stage, pair_bits, receive_tile, send_tile
from sm90.tiles import (
    allocate_lines,
    allocate_tiles,
    barriers,
    init_barriers,
    load_chunks,
    load_line,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # per program
ROWS = gl.constexpr(128)


@gluon.aggregate
class WalkShared:
    """Tiles, row statistics and messages in shared memory. A stage is full when all of them have
    arrived (work_full), and empty when they have been read."""

    q_s: gl.shared_memory_descriptor
    do_s: gl.shared_memory_descriptor
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    lse2_s: gl.shared_memory_descriptor
    delta_s: gl.shared_memory_descriptor
    top_s: gl.shared_memory_descriptor
    work_s: gl.shared_memory_descriptor
    work_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.aggregate
class WalkArgs:
    """The tile begins at `row` and `first_key`. The program walks from the `first`-th to the
    `end`-th of the pairs of a batch row, from `first_batch` on, and one of `members` heads, from
    `head` on. `plane`: of the bias; `to`: of the sums."""

    maps: Maps
    row_stats: RowStats
    top: Map
    mask: Mask
    q_blocks: Number
    shared: WalkShared
    scalars: KernelScalars
    bias: Number
    sums: Number
    row: Number
    first_key: Number
    head: Number
    members: Number
    first_batch: Number
    first: Number
    end: Number
    plane: Number
    to: Number


@gluon.jit
def produce(args, config: gl.constexpr):
    shared = args.shared
    scalars = args.scalars
    row_stats = args.row_stats
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    maps = args.maps
    row = args.row
    first_key = args.first_key
    group = scalars.heads // scalars.kv_heads
    padded = (scalars.q_len + 63) // 64 * 64
    stage = 0
    phase = 0
    for n in range(args.first, args.end):
        b = args.first_batch + n // args.members
        head = args.head + n % args.members
        mask_b = gl.where(scalars.mask_batch > 1, b, 0)
        start, end, full_lo, full_hi, checked = key_range(
            args.q_blocks, mask_b, row, scalars.q_len, ROWS
        )
        if (start < first_key + KEYS) & (end > first_key):
            full = (full_lo <= first_key) & (full_hi >= first_key + KEYS)
            mbarrier.wait(shared.empty.index(stage), phase ^ 1)
            step = StepRange(first_key, 1, gl.where(full, 0, 1), 0, 0)
            send_tile(shared.work_s.index(stage), RowTile(row, head, b, step, checked))
            arrived = shared.work_full.index(stage)
            mbarrier.expect(arrived, (ROWS + KEYS) * (QK_DIM + V_DIM) * 2 + 3 * ROWS * 4)
            stat = (b * scalars.heads + head) * padded + row
            for w in gl.static_range(2):
                at = row + w * 64
                tile = stage * 2 + w
                load_chunks(maps.query, b, at, head, arrived, shared.q_s, tile * CHUNKS, CHUNKS)
                load_chunks(maps.dout, b, at, head, arrived, shared.do_s, tile * V_CHUNKS, V_CHUNKS)
                load_line(row_stats.lse2, shared.lse2_s.index(tile), stat + w * 64, arrived)
                load_line(row_stats.delta, shared.delta_s.index(tile), stat + w * 64, arrived)
                load_line(args.top, shared.top_s.index(tile), stat + w * 64, arrived)
            kv_head = head // group
            load_chunks(
                maps.key, b, first_key, kv_head, arrived, shared.k_s, stage * CHUNKS, CHUNKS
            )
            load_chunks(
                maps.value, b, first_key, kv_head, arrived, shared.v_s, stage * V_CHUNKS, V_CHUNKS
            )
            stage, phase = next_stage(stage, phase, config.STAGES)
    # a tile without steps stops the consumers
    mbarrier.wait(shared.empty.index(stage), phase ^ 1)
    send_tile(shared.work_s.index(stage), RowTile(0, 0, 0, StepRange(0, 0, 0, 0, 0), 0))
    mbarrier.arrive(shared.work_full.index(stage))


@gluon.jit
def start_products(shared, w, stage, zero, config: gl.constexpr):
    """Starts S and dP of the batch row in `stage`."""
    q = left_chunks(shared.q_s, stage * 2 + w, config.QK_DIM)
    s = scores(q, shared.k_s, stage, zero)
    do = left_chunks(shared.do_s, stage * 2 + w, config.V_DIM)
    return s, scores(do, shared.v_s, stage, zero)


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    shared = args.shared
    scalars = args.scalars
    q_len = scalars.q_len
    kv_len = scalars.kv_len
    s_layout: gl.constexpr = accumulator(KEYS)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([64, KEYS], gl.float32, s_layout)
    rows = args.row + W * 64 + gl.arange(0, 64, of_rows)
    keys = args.first_key + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    inside = gl.expand_dims(rows < q_len, 1) & gl.expand_dims(keys < kv_len, 0)
    place = gl.expand_dims(rows, 1).to(gl.int64) * kv_len + gl.expand_dims(keys, 0)
    size = q_len.to(gl.int64) * kv_len
    bias = gl.load(args.bias + args.plane * size + place, mask=inside, other=0.0).to(gl.float32)
    total = zero
    stage = 0
    phase = 0
    tile = receive_tile(shared, 0, 0)
    s = zero
    dp = zero
    if tile.kv_range.steps > 0:
        s, dp = start_products(shared, W, 0, zero, config)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    while tile.kv_range.steps > 0:
        top = shared.top_s.index(stage * 2 + W).load(of_rows)
        lse = shared.lse2_s.index(stage * 2 + W).load(of_rows)
        delta = shared.delta_s.index(stage * 2 + W).load(of_rows)
        old = stage
        stage, phase = next_stage(stage, phase, config.STAGES)
        following = receive_tile(shared, stage, phase)
        # after the last batch row, its products are computed again, and dropped
        at = gl.where(following.kv_range.steps > 0, stage, old)
        s_token, dp_token = start_products(shared, W, at, zero, config)
        # see bwd_split_consumer.add_bias
        x = gl.minimum(s * scalars.scale + bias - gl.expand_dims(top, 1), 0.0)
        p = gl.exp2(x * LOG2E - gl.expand_dims(lse, 1))
        ds = p * (dp - gl.expand_dims(delta, 1))
        if tile.kv_range.partial > 0:
            mask_b = gl.where(scalars.mask_batch > 1, tile.b, 0)
            mask = mask_of_batch_row(args.mask, mask_b, scalars)
            bits = pair_bits(rows, args.first_key, mask, tile.checked, scalars, KEYS)
            ds = select_bits(ds, bits, 0.0)
        total = total + ds
        s, dp = warpgroup_mma_wait(0, deps=(s_token, dp_token))
        fence_async_shared()
        warp_arrive(shared.empty.index(old))
        tile = following
    gl.store(args.sums + args.to * size + place, total, mask=inside)


@gluon.jit
def backward_shared_dbias(
    query, key, value, dout, lse2, delta, top, bias, dbias_sums,
    kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks,
    scale, mask_mode, bias_axes, dbias_parts, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """query, key, value and dout are tensor maps (batch, heads, length, dim) with boxes of 64 rows
    of one head; lse2, delta and top are one row each. `bias` is as portable/bias.py describes it,
    with a rows axis. dbias_sums: (dbias_parts, *bias.shape) float32."""
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, CHUNKS=CHUNKS, V_CHUNKS=V_CHUNKS, STAGES=STAGES
    )
    dtype: gl.constexpr = query.dtype
    shared = WalkShared(
        q_s=allocate_tiles(dtype, STAGES * 2 * CHUNKS, 64, QK_CHUNK),
        do_s=allocate_tiles(dtype, STAGES * 2 * V_CHUNKS, 64, V_CHUNK),
        k_s=allocate_tiles(dtype, STAGES * CHUNKS, KEYS, QK_CHUNK),
        v_s=allocate_tiles(dtype, STAGES * V_CHUNKS, KEYS, V_CHUNK),
        lse2_s=allocate_lines(gl.float32, STAGES * 2, 64),
        delta_s=allocate_lines(gl.float32, STAGES * 2, 64),
        top_s=allocate_lines(gl.float32, STAGES * 2, 64),
        work_s=allocate_lines(gl.int32, STAGES, 16),
        work_full=barriers(STAGES), empty=barriers(STAGES),
    )  # fmt: skip
    init_barriers(STAGES, (shared.work_full, shared.empty), (1, 8))

    own_heads = gl.where((bias_axes & 2) != 0, heads, 1)
    members = heads // own_heads
    group_rows = bias_axes >> 3
    row_tiles = (q_len + ROWS - 1) // ROWS
    key_tiles = (kv_len + KEYS - 1) // KEYS
    # tiles of a plane are neighbours: their programs read the same batch rows at the same time
    pid = gl.program_id(0)
    first_key = pid % key_tiles * KEYS
    rest = pid // key_tiles
    row = rest % row_tiles * ROWS
    rest = rest // row_tiles
    planes = batch // group_rows * own_heads
    plane = rest % planes
    part = rest // planes
    walk = group_rows * members
    length = (walk + dbias_parts - 1) // dbias_parts
    first = gl.minimum(part * length, walk)
    args = WalkArgs(
        maps=Maps(query, key, value, dout, None), row_stats=RowStats(lse2, delta, None, None),
        top=top, mask=Mask(kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos), q_blocks=q_blocks,
        shared=shared,
        scalars=KernelScalars(
            mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, None
        ),
        bias=bias, sums=dbias_sums, row=row, first_key=first_key,
        head=gl.where(members == 1, plane % own_heads, 0), members=members,
        first_batch=plane // own_heads * group_rows,
        first=first, end=gl.minimum(first + length, walk), plane=plane,
        to=part * planes + plane,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume, (0, args, config)), (consume, (1, args, config)), (produce, (args, config))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
