"""Producer warp of the kernels whose programs loop over tiles of rows (forward, dQ).

Finding the next tile takes a warp about as long as computing a tile of one or two steps. With
SCHEDULER, one more warp, `schedule`, therefore does it, up to two tiles ahead, and the producer,
`load`, only loads.
"""

from common.kv_ranges import key_range, place_of_tile, split, tiles_are_near
from sm90.args import RowTile, StepRange
from sm90.block_lists import list_of_rows
from sm90.common import lanes_arrive
from sm90.pipeline import next_stage, receive_tile, send_tile, stage_of_values
from sm90.tiles import load_chunks, load_columns
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def plane_of_bias(axes, b, head, heads):
    """Index of the (q_len, kv_len) plane of a bias array for a batch row and head."""
    has_heads = (axes & 2) != 0
    return b // (axes >> 3) * gl.where(has_heads, heads, 1) + gl.where(has_heads, head, 0)


@gluon.constexpr_function
def bytes_of_bias(bias, query):
    """Bytes of an element of the bias, 0 without one. It has the query's dtype or float32."""
    if bias is None:
        return 0
    return 2 if bias.dtype == query.dtype else 4


@gluon.jit
def draw(args, turn):
    """The tile of a program's turn: the next one of the counter, or without a counter one of as
    many tiles as there are programs, in alternating directions, since the first tiles of an order
    take longest."""
    own = gl.program_id(0)
    if args.counter.to(gl.int64) == 0:
        nth = turn * args.programs + gl.where(turn & 1 == 0, own, args.programs - 1 - own)
    else:
        nth = gl.atomic_add(args.counter, 1, sem="relaxed") + args.programs
    return nth


@gluon.jit
def send(shared, slot, phase, tile):
    """Sends a tile to the other warps as soon as `slot` is empty."""
    mbarrier.wait(shared.work_empty.index(slot), phase ^ 1)
    send_tile(shared.work_s.index(slot), tile)
    mbarrier.arrive(shared.work_full.index(slot))


@gluon.jit
def send_stop(shared, slot, phase):
    """Sends a tile without steps, which stops the other warps."""
    send(shared, slot, phase, RowTile(0, 0, 0, StepRange(0, 0, 0, 0, 0), 0))


@gluon.jit
def load_rows(args, b, row, head, stage, phase, config: gl.constexpr):
    """Loads the queries of a tile to `stage` of Q_STAGES, and with DOUT its cotangents."""
    maps = args.maps
    shared = args.shared
    QK_DIM: gl.constexpr = config.QK_DIM
    WARP_GROUPS: gl.constexpr = config.WARP_GROUPS
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    for w in gl.static_range(WARP_GROUPS):
        q = w if config.Q_STAGES == 1 else stage * WARP_GROUPS + w
        mbarrier.wait(shared.q_empty.index(q), phase ^ 1)
        full = shared.q_full.index(q)
        mbarrier.expect(full, 64 * (QK_DIM + config.V_DIM if config.DOUT else QK_DIM) * 2)
        at = row + w * 64
        load_chunks(maps.query, b, at, head, full, shared.q_s, q * config.SLOTS, CHUNKS)
        if config.DOUT:
            load_chunks(maps.dout, b, at, head, full, shared.do_s, w * V_CHUNKS, V_CHUNKS)


@gluon.jit
def load_keys(args, b, at, kv_head, row, plane, stage, phase, config: gl.constexpr):
    """Loads the keys of a step, and with a bias the tiles of `plane`."""
    maps = args.maps
    shared = args.shared
    CHUNKS: gl.constexpr = config.CHUNKS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BIAS_TILES: gl.constexpr = config.WARP_GROUPS if config.BIAS_BYTES else 0
    mbarrier.wait(shared.k_empty.index(stage), phase ^ 1)
    full = shared.k_full.index(stage)
    mbarrier.expect(full, BLOCK_N * (config.QK_DIM * 2 + BIAS_TILES * 64 * config.BIAS_BYTES))
    load_chunks(maps.key, b, at, kv_head, full, shared.k_s, stage * CHUNKS, CHUNKS)
    for w in gl.static_range(BIAS_TILES):
        tile_s = shared.bias_s.index(stage * BIAS_TILES + w)
        tile_s = tile_s.reinterpret(maps.bias.dtype, [1, 1, 64, BLOCK_N], maps.bias.layout)
        tma.async_load(maps.bias, [plane, 0, row + w * 64, at], full, tile_s)


@gluon.jit
def load_values(args, b, at, kv_head, v_part, stage, phase, config: gl.constexpr):
    """Loads the values of a step, as `load_keys` does."""
    maps = args.maps
    shared = args.shared
    V_PARTS: gl.constexpr = config.V_PARTS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    v_stage, v_phase = stage_of_values(stage, phase, config)
    mbarrier.wait(shared.v_empty.index(v_stage), v_phase ^ 1)
    full = shared.v_full.index(v_stage)
    mbarrier.expect(full, BLOCK_N * (config.V_DIM // V_PARTS) * 2)
    column = v_part * (config.V_DIM // V_PARTS)
    load_columns(maps.value, b, at, kv_head, column, full, shared.v_s, v_stage * V_CHUNKS, V_CHUNKS)


@gluon.jit
def produce(args, config: gl.constexpr):
    """Draws tiles and sends them to the consumers. Loads their queries (with DOUT also cotangents),
    keys and values, and bias tiles with the keys."""
    shared = args.shared
    scalars = args.scalars
    V_PARTS: gl.constexpr = config.V_PARTS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROWS: gl.constexpr = 64 * config.WARP_GROUPS
    group = scalars.heads // scalars.kv_heads
    tiles = (scalars.q_len + ROWS - 1) // ROWS
    total = tiles * scalars.batch * scalars.heads * V_PARTS
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    turn = 0
    nth = gl.program_id(0)
    near = False
    if config.NEAR:
        near = tiles_are_near(tiles, scalars.batch * scalars.kv_heads)
    while nth < total:
        head, kv_head, b, mask_b, row = place_of_tile(
            nth // V_PARTS, args.q_order, scalars.batch, scalars.mask_batch, tiles, group,
            scalars.kv_heads, ROWS, 1, near,
        )  # fmt: skip
        v_part = nth % V_PARTS
        plane = 0
        if config.BIAS_BYTES:
            plane = plane_of_bias(args.bias_axes, b, head, scalars.heads)
        phase_of_rows = q_phase if config.Q_STAGES == 1 else slot_phase
        if config.ROWS_FIRST:
            load_rows(args, b, row, head, slot, phase_of_rows, config)
        start, end, full_lo, full_hi, checked = key_range(
            args.q_blocks, mask_b, row, scalars.q_len, ROWS
        )
        if config.BIAS_BYTES or config.DROPOUT:
            start = start // 8 * 8  # loads of a bias by TMA begin there, and calls of Philox at 4
        steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
        partial = steps - full_end + full_begin
        if config.BLOCK_LISTS:
            listed, partial, full_count = list_of_rows(args.blocks, scalars, mask_b, head, row)
            steps = partial + full_count
            block = gl.load(listed)
        kv_range = StepRange(start, steps, partial, full_begin, full_end)
        # not `send`: at head dim 512, numbers computed before the wait would spill more
        mbarrier.wait(shared.work_empty.index(slot), slot_phase ^ 1)
        send_tile(
            shared.work_s.index(slot), RowTile(row, head * V_PARTS + v_part, b, kv_range, checked)
        )
        mbarrier.arrive(shared.work_full.index(slot))
        if not config.ROWS_FIRST:
            load_rows(args, b, row, head, slot, phase_of_rows, config)
        for i in range(0, steps):
            if config.BLOCK_LISTS:  # the list is read one step ahead
                at = block * BLOCK_N
                block = gl.load(listed + gl.minimum(i + 1, steps - 1))
            else:
                at = kv_range.nth(i, BLOCK_N)
            load_keys(args, b, at, kv_head, row, plane, stage, phase, config)
            load_values(args, b, at, kv_head, v_part, stage, phase, config)
            stage, phase = next_stage(stage, phase, config.STAGES)
        turn += 1
        nth = draw(args, turn)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
    send_stop(shared, slot, slot_phase)


@gluon.jit
def schedule(args, config: gl.constexpr):
    """Draws tiles and sends them to the consumers and to `load`."""
    scalars = args.scalars
    ROWS: gl.constexpr = 64 * config.WARP_GROUPS
    SUB: gl.constexpr = 2 if ROWS == 64 else 1  # tiles of 64 rows are halves of those of 128
    group = scalars.heads // scalars.kv_heads
    tiles = (scalars.q_len + ROWS * SUB - 1) // (ROWS * SUB)
    total = tiles * SUB * scalars.batch * scalars.heads
    slot = 0
    slot_phase = 0
    turn = 0
    nth = gl.program_id(0)
    while nth < total:
        head, _, b, mask_b, row = place_of_tile(
            nth, args.q_order, scalars.batch, scalars.mask_batch, tiles, group, scalars.kv_heads,
            ROWS, SUB,
        )  # fmt: skip
        start, end, full_lo, full_hi, checked = key_range(
            args.q_blocks, mask_b, row, scalars.q_len, ROWS
        )
        steps, full_begin, full_end = split(start, end, full_lo, full_hi, config.BLOCK_N)
        kv_range = StepRange(start, steps, steps - full_end + full_begin, full_begin, full_end)
        send(args.shared, slot, slot_phase, RowTile(row, head, b, kv_range, checked))
        turn += 1
        nth = draw(args, turn)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
    send_stop(args.shared, slot, slot_phase)


@gluon.jit
def load(args, config: gl.constexpr):
    """Loads the queries, keys and values of the tiles that `schedule` sends."""
    gl.static_assert(config.V_PARTS == 1 and not (config.BLOCK_LISTS or config.BIAS))
    shared = args.shared
    group = args.scalars.heads // args.scalars.kv_heads
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    tile = receive_tile(shared, 0, 0)
    while tile.kv_range.steps > 0:
        lanes_arrive(shared.work_empty.index(slot))
        kv_range = tile.kv_range
        kv_head = tile.head_part // group
        phase_of_rows = q_phase if config.Q_STAGES == 1 else slot_phase
        load_rows(args, tile.b, tile.row, tile.head_part, slot, phase_of_rows, config)
        for i in range(0, kv_range.steps):
            at = kv_range.nth(i, config.BLOCK_N)
            load_keys(args, tile.b, at, kv_head, tile.row, 0, stage, phase, config)
            load_values(args, tile.b, at, kv_head, 0, stage, phase, config)
            stage, phase = next_stage(stage, phase, config.STAGES)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
        tile = receive_tile(shared, slot, slot_phase)
