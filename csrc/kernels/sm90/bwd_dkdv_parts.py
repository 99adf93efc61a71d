"""dK and dV on Hopper in Gluon for head dims at which the sums of 64 keys fill all registers of a
multiprocessor (512): the same results as `backward_sm90` of sm90/bwd.py without dQ.

A program computes 64 keys of one key/value head and one of two parts of the columns: 256 columns of
dK and of dV. Both parts compute S and dP over all columns. One warp group computes dV, the other dK
(sm90/bwd_split_consumer.py). In the tensor maps, a part is a head with half the columns.

Keys and values take 128 of 227 KiB of shared memory, so a block is 32 rows. Of its queries and
cotangents, only the program's part of the columns, which a second product also reads, has two
stages. The rest of the columns has one stage, which is free as soon as the scores have been
computed. The last 64 columns of the rest of the keys are in the first warp group's registers, and
the tiles of P overwrite them in shared memory.
"""

from sm90.args import (
    Exchange,
    KernelScalars,
    KeyTile,
    KeyTileMask,
    KeyTileShared,
    Maps,
    RowStats,
    StepRange,
)
from sm90.bwd_producer import allocate_row_stats, load_dout, next_block, row_of, row_range_64
from sm90.bwd_split_consumer import KEYS, Rest, SplitArgs, consume_gradients, consume_scores
from sm90.common import place_of_tile, position_row, split
from sm90.config import constants
from sm90.parts import PARTS, load_columns
from sm90.tiles import barriers, init_barriers, load_chunks, load_line
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(32)  # per block


@gluon.jit
def tile_of_program(mask, kv_order, scalars):
    """As bwd_producer.tile_of_program, for 64 keys, one part of the columns and blocks of ROWS
    rows."""
    q_len = scalars.q_len
    kv_len = scalars.kv_len
    group = scalars.heads // scalars.kv_heads
    part = gl.program_id(0) % PARTS
    _, kv_head, b, mask_b, first_key = place_of_tile(
        gl.program_id(0) // PARTS, kv_order, scalars.batch, scalars.mask_batch,
        (kv_len + 127) // 128, 1, scalars.kv_heads, KEYS, 128 // KEYS,
    )  # fmt: skip
    start, end, full_lo, full_hi = row_range_64(mask.kv_blocks, mask_b, first_key, kv_len)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, ROWS)
    row_blocks = (q_len + 63) // 64
    mask_row = mask_b.to(gl.int64) * q_len
    mask_key = mask_b.to(gl.int64) * kv_len
    mask = KeyTileMask(
        mask.q_ids + mask_row, mask.kv_ids + mask_key,
        mask.q_pos + position_row(mask_row, scalars.mask_mode), mask.kv_pos + mask_key,
        mask.q_blocks + mask_b.to(gl.int64) * (5 * row_blocks), mask.kv_blocks,
    )  # fmt: skip
    bh = b * scalars.heads + kv_head * group
    padded = row_blocks * 64
    tile = KeyTile(mask_b, b, first_key, kv_head, group, bh, mask_b * padded, padded)
    q_range = StepRange(start, steps, steps - full_end + full_begin, full_begin, full_end)
    return tile, part, q_range, mask


@gluon.jit
def load_keys(args, config: gl.constexpr):
    """Loads the tile of keys and its values."""
    maps = args.maps
    shared = args.shared
    tile = args.tile
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    row = tile.first_key
    part_head = tile.kv_head * PARTS + args.part
    rest_head = tile.kv_head * PARTS + 1 - args.part
    full = shared.kv_full.index(0)
    q_rest = args.q_rest
    mbarrier.expect(full, PARTS * KEYS * (config.QK_DIM + config.V_DIM) * 2)
    load_chunks(maps.key, tile.b, row, part_head, full, shared.k_s, 0, CHUNKS)
    column = rest_head * config.QK_DIM
    load_columns(maps.key, tile.b, row, column, full, q_rest.left_s, 0, CHUNKS - 1)
    column += (CHUNKS - 1) * QK_CHUNK
    load_columns(maps.key, tile.b, row, column, full, q_rest.last_s, 0, 1)
    load_chunks(maps.value, tile.b, row, part_head, full, shared.v_s, 0, V_CHUNKS)
    load_chunks(maps.value, tile.b, row, rest_head, full, args.do_rest.left_s, 0, V_CHUNKS)


@gluon.jit
def load_rest(source, b, row, head, rest, stage, DIM: gl.constexpr, CHUNKS: gl.constexpr):
    """Loads the rest of the columns of a block. They have a single stage, whose phase flips with
    every block."""
    mbarrier.wait(rest.empty.index(0), stage ^ 1)
    full = rest.full.index(0)
    mbarrier.expect(full, ROWS * DIM * 2)
    load_chunks(source, b, row, head, full, rest.tiles_s, 0, CHUNKS)


@gluon.jit
def produce(args, config: gl.constexpr):
    maps = args.maps
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    row_stats = args.row_stats
    group = tile.group
    CHUNKS: gl.constexpr = config.CHUNKS
    load_keys(args, config)
    total = q_range.steps * group
    g = 0
    n = 0
    # as in bwd_producer.produce, one extra block, whose scores are dropped
    for i in range(0, gl.where(total > 0, total + 1, 0)):
        stage = i % 2
        phase = (i // 2) & 1
        in_partial = i < q_range.partial * group
        row = row_of(n, in_partial, q_range, ROWS)
        stat = (tile.bh + g) * tile.padded + row
        mask_row = tile.mask_row + row
        head = tile.kv_head * group + g
        part_head = head * PARTS + args.part
        rest_head = head * PARTS + 1 - args.part

        # as bwd_producer.load_queries, but addresses are computed in another order
        mbarrier.wait(shared.q_empty.index(stage), phase ^ 1)
        full = shared.q_full.index(stage)
        mbarrier.expect(full, ROWS * (config.QK_DIM * 2 + 12))
        column = part_head * config.QK_DIM
        load_columns(maps.query, tile.b, row, column, full, shared.q_s, stage * CHUNKS, CHUNKS)
        load_line(row_stats.lse2, shared.row_stats.lse2.index(stage), stat, full)
        load_line(row_stats.lo, shared.row_stats.lo.index(stage), mask_row, full)
        load_line(row_stats.hi, shared.row_stats.hi.index(stage), mask_row, full)

        load_dout(args, part_head, row, stat, stage, phase, (), config)
        load_rest(maps.query, tile.b, row, rest_head, args.q_rest, stage, config.QK_DIM, CHUNKS)
        load_rest(
            maps.dout, tile.b, row, rest_head, args.do_rest, stage, config.V_DIM, config.V_CHUNKS
        )
        n, g = next_block(n, g, in_partial, q_range, group)


@gluon.jit
def backward_dkdv_sm90_parts(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As bwd.backward_sm90 without dQ and options, with two programs for every 64 keys. Boxes of
    query, dout and the row statistics have 32 rows."""
    CHUNKS: gl.constexpr = QK_DIM // PARTS // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // PARTS // V_CHUNK
    config: gl.constexpr = constants(  # of a part
        QK_DIM=QK_DIM // PARTS, V_DIM=V_DIM // PARTS, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK,
        CHUNKS=CHUNKS, V_CHUNKS=V_CHUNKS, PARTS=PARTS, LSE_BY_MMA=False, SOFT_CAP=False,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    get_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for
    q_tile: gl.constexpr = get_layout([ROWS, QK_CHUNK], dtype)
    k_tile: gl.constexpr = get_layout([KEYS, QK_CHUNK], dtype)
    v_tile: gl.constexpr = get_layout([KEYS, V_CHUNK], dtype)
    do_tile: gl.constexpr = get_layout([ROWS, V_CHUNK], dtype)
    p_tile: gl.constexpr = get_layout([KEYS, ROWS], dtype)
    gl.static_assert(QK_CHUNK == 2 * ROWS, "two tiles of P take the place of a chunk of keys")
    last_s = gl.allocate_shared_memory(dtype, [1, KEYS, QK_CHUNK], k_tile)
    shared = KeyTileShared(
        q_s=gl.allocate_shared_memory(dtype, [2 * CHUNKS, ROWS, QK_CHUNK], q_tile),
        k_s=gl.allocate_shared_memory(dtype, [CHUNKS, KEYS, QK_CHUNK], k_tile),
        v_s=gl.allocate_shared_memory(dtype, [V_CHUNKS, KEYS, V_CHUNK], v_tile),
        do_s=gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, ROWS, V_CHUNK], do_tile),
        row_stats=allocate_row_stats(ROWS),
        lse_parts=None, delta_parts=None, row_stats_full=None,
        kv_full=barriers(1), q_full=barriers(2), q_empty=barriers(2),
        do_full=barriers(2), do_empty=barriers(2),
    )  # fmt: skip
    q_rest = Rest(
        left_s=gl.allocate_shared_memory(dtype, [CHUNKS - 1, KEYS, QK_CHUNK], k_tile),
        last_s=last_s, tiles_s=gl.allocate_shared_memory(dtype, [CHUNKS, ROWS, QK_CHUNK], q_tile),
        full=barriers(1), empty=barriers(1),
    )  # fmt: skip
    do_rest = Rest(
        left_s=gl.allocate_shared_memory(dtype, [V_CHUNKS, KEYS, V_CHUNK], v_tile),
        last_s=None, tiles_s=gl.allocate_shared_memory(dtype, [V_CHUNKS, ROWS, V_CHUNK], do_tile),
        full=barriers(1), empty=barriers(1),
    )  # fmt: skip
    p_s = last_s.reinterpret(dtype, [2, KEYS, ROWS], p_tile)
    p = Exchange(p_s, full=barriers(2), empty=barriers(2))
    init_barriers(
        1, (shared.kv_full, q_rest.full, do_rest.full, q_rest.empty, do_rest.empty), (1, 1, 1, 4, 4)
    )
    init_barriers(
        2,
        (shared.q_full, shared.do_full, shared.q_empty, shared.do_empty, p.full, p.empty),
        (1, 1, 8, 8, 1, 4),
    )

    scalars = KernelScalars(
        mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap=None
    )
    mask = KeyTileMask(q_ids, kv_ids, q_pos, kv_pos, q_blocks, kv_blocks)
    tile, part, q_range, mask = tile_of_program(mask, kv_order, scalars)
    args = SplitArgs(
        maps=Maps(query, key, value, dout, None), row_stats=RowStats(lse2, delta, lo, hi),
        dk=dk, dv=dv, mask=mask, shared=shared, p=p, blocks=None,
        tile=tile, q_range=q_range, scalars=scalars,
        part=part, q_rest=q_rest, do_rest=do_rest, bias=None,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume_scores, (args, config)), (consume_gradients, (args, config)),
            (produce, (args, config))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
