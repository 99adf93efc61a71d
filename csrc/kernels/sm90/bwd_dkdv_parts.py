"""dK and dV on Hopper in Gluon for head dims at which the sums of 64 keys fill all registers of a
multiprocessor (512): the same results as `backward_dkdv_sm90` of sm90/bwd.py.

A program is 64 keys of one key/value head and one of two parts of the columns: it makes 256 columns
of dK and the same of dV, from S and dP over all columns, which both parts compute. Its warp groups
divide the work as in sm90/bwd_dkdv_d256.py: the first makes S, P and dV, the second dP, dS and dK,
and P passes from one to the other through shared memory.

Keys and values take 128 of 227 KiB of shared memory. So a block is 32 rows, and of its queries and
cotangents only the part's own columns, which a second product reads, have two places. The rest of
the columns have one, which is free as soon as the scores are there. The last 64 columns of the rest
of the keys are in the first warp group's registers; the tiles of P take their place.
"""

from sm90.args import (
    Buffer,
    Exchange,
    KernelScalars,
    KeyTile,
    KeyTileMask,
    Map,
    Maps,
    Number,
    RowStats,
    StepRange,
)
from sm90.bwd_producer import next_block, row_bits_asm, row_range_64
from sm90.chunked_mma import add_products, finished, left_chunks, scores, zeros
from sm90.common import (
    LOG2E,
    accumulator,
    element_bits,
    opaque,
    place_of_tile,
    position_row,
    select_bits,
    split,
    warp_arrive,
)
from sm90.config import constants
from sm90.dq_reduce import keys_read
from sm90.parts import PARTS, load_columns
from sm90.tiles import barriers, init_barriers, load_line
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # of a program
ROWS = gl.constexpr(32)  # of a block


@gluon.aggregate
class PartShared:
    """As args.KeyTileShared. *_s: the part's own columns, which have two places in q_s and do_s.
    *_rest_s: the others. last_s: the last chunk of the rest of the keys, then the tiles of P."""

    q_s: Buffer
    k_s: Buffer
    v_s: Buffer
    do_s: Buffer
    q_rest_s: Buffer
    k_rest_s: Buffer
    v_rest_s: Buffer
    do_rest_s: Buffer
    last_s: Buffer
    row_stats: RowStats
    kv_full: Buffer
    q_full: Buffer
    q_empty: Buffer
    do_full: Buffer
    do_empty: Buffer
    q_rest_full: Buffer
    q_rest_empty: Buffer
    do_rest_full: Buffer
    do_rest_empty: Buffer


@gluon.aggregate
class PartArgs:
    """As args.KeyTileArgs. p: P of a block of rows."""

    maps: Maps
    row_stats: RowStats
    dk: Map
    dv: Map
    mask: KeyTileMask
    shared: PartShared
    p: Exchange
    tile: KeyTile
    part: Number
    q_range: StepRange
    scalars: KernelScalars


@gluon.jit
def tile_of_program(mask, kv_order, scalars):
    """As bwd_producer.tile_of_program, for a part of 64 keys and blocks of ROWS rows."""
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
def bits_of_masked(n, keys, stage, args):
    """As bwd_producer.mask_bits, of the n-th partial block of a head."""
    mask = args.mask
    scalars = args.scalars
    q_len = scalars.q_len
    row = args.q_range.start + args.q_range.nth_partial(n) * ROWS
    lo_s = args.shared.row_stats.lo.index(stage)
    hi_s = args.shared.row_stats.hi.index(stage)
    letters: gl.constexpr = "=&r,=&r,r,r,r,r,~{memory}"
    bits = gl.inline_asm(row_bits_asm(ROWS), letters, (keys, lo_s, hi_s), keys.type)
    if scalars.mask_mode > 0:
        row_blocks = (q_len + 63) // 64
        flags = gl.load(mask.q_blocks + 4 * row_blocks + row // 64)
        if flags & 1:
            there = keys < scalars.kv_len
            kv_id = gl.load(mask.kv_ids + keys, mask=there, other=-1)
            bits = bits & element_bits(kv_id, mask.q_ids, row, q_len, ROWS, "eq")
            if scalars.mask_mode > 1:
                q_pos = mask.q_pos
                kv_at = gl.load(mask.kv_pos + keys, mask=there, other=0)
                bits = bits & element_bits(kv_at, q_pos, row, q_len, ROWS, "ge")
                if scalars.mask_mode > 2:
                    after = opaque(q_len)
                    bits = bits & element_bits(kv_at, q_pos, row + after, q_len + after, ROWS, "le")
    return bits


@gluon.jit
def load_keys(args, config: gl.constexpr):
    """The tile of keys and its values."""
    maps = args.maps
    shared = args.shared
    tile = args.tile
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    row = tile.first_key
    own = tile.kv_head * PARTS + args.part
    rest = tile.kv_head * PARTS + 1 - args.part
    full = shared.kv_full.index(0)
    QK_PART: gl.constexpr = config.QK_DIM // PARTS
    V_PART: gl.constexpr = config.V_DIM // PARTS
    mbarrier.expect(full, KEYS * (config.QK_DIM + config.V_DIM) * 2)
    load_columns(maps.key, tile.b, row, own * QK_PART, full, shared.k_s, 0, CHUNKS)
    load_columns(maps.key, tile.b, row, rest * QK_PART, full, shared.k_rest_s, 0, CHUNKS - 1)
    last = rest * QK_PART + (CHUNKS - 1) * QK_CHUNK
    load_columns(maps.key, tile.b, row, last, full, shared.last_s, 0, 1)
    load_columns(maps.value, tile.b, row, own * V_PART, full, shared.v_s, 0, V_CHUNKS)
    load_columns(maps.value, tile.b, row, rest * V_PART, full, shared.v_rest_s, 0, V_CHUNKS)


@gluon.jit
def produce(args, config: gl.constexpr):
    maps = args.maps
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    row_stats = args.row_stats
    group = tile.group
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    QK_PART: gl.constexpr = config.QK_DIM // PARTS
    V_PART: gl.constexpr = config.V_DIM // PARTS
    load_keys(args, config)
    total = q_range.steps * group
    g = 0
    n = 0
    # as bwd_producer.produce: one block more than there are, whose scores are dropped
    for i in range(0, gl.where(total > 0, total + 1, 0)):
        stage = i % 2
        phase = (i // 2) & 1
        in_partial = i < q_range.partial * group
        nth = gl.where(in_partial, q_range.nth_partial(n), q_range.full_begin + n)
        row = q_range.start + nth * ROWS
        stat = (tile.bh + g) * tile.padded + row
        mask_row = tile.mask_row + row
        head = tile.kv_head * group + g
        own = head * PARTS + args.part
        rest = head * PARTS + 1 - args.part

        mbarrier.wait(shared.q_empty.index(stage), phase ^ 1)
        full = shared.q_full.index(stage)
        mbarrier.expect(full, ROWS * (QK_PART * 2 + 12))
        load_columns(
            maps.query, tile.b, row, own * QK_PART, full, shared.q_s, stage * CHUNKS, CHUNKS
        )
        load_line(row_stats.lse2, shared.row_stats.lse2.index(stage), stat, full)
        load_line(row_stats.lo, shared.row_stats.lo.index(stage), mask_row, full)
        load_line(row_stats.hi, shared.row_stats.hi.index(stage), mask_row, full)

        mbarrier.wait(shared.do_empty.index(stage), phase ^ 1)
        full = shared.do_full.index(stage)
        mbarrier.expect(full, ROWS * (V_PART * 2 + 4))
        load_columns(
            maps.dout, tile.b, row, own * V_PART, full, shared.do_s, stage * V_CHUNKS, V_CHUNKS
        )
        load_line(row_stats.delta, shared.row_stats.delta.index(stage), stat, full)

        # one place: its parity changes with every block
        mbarrier.wait(shared.q_rest_empty.index(0), stage ^ 1)
        full = shared.q_rest_full.index(0)
        mbarrier.expect(full, ROWS * QK_PART * 2)
        load_columns(maps.query, tile.b, row, rest * QK_PART, full, shared.q_rest_s, 0, CHUNKS)

        mbarrier.wait(shared.do_rest_empty.index(0), stage ^ 1)
        full = shared.do_rest_full.index(0)
        mbarrier.expect(full, ROWS * V_PART * 2)
        load_columns(maps.dout, tile.b, row, rest * V_PART, full, shared.do_rest_s, 0, V_CHUNKS)
        n, g = next_block(n, g, in_partial, q_range, group)


@gluon.jit
def add_rest(s, rest, tiles_s, zeroth, full, phase, CHUNKS: gl.constexpr):
    """s + rest tile^T with the rest of the columns, started when they are there.

    `zeroth` is 0, which the compiler does not know in the loops: descriptors of tiles that never
    move, hoisted out of them, would be spilled."""
    mbarrier.wait(full, phase)
    for c in gl.static_range(CHUNKS):
        tile_t = tiles_s.index(zeroth * CHUNKS + c).permute((1, 0))
        s = warpgroup_mma(rest[c], tile_t, s, is_async=True)
    return s


@gluon.jit
def store_gradient(target, sums, scale, tiles_s, args, CHUNKS: gl.constexpr):
    """The part's columns of dK or dV, by way of the place of the keys or values."""
    tile = args.tile
    COLUMNS: gl.constexpr = tiles_s.shape[2]
    for c in gl.static_range(CHUNKS):
        result = sums[c] if scale is None else sums[c] * scale
        tiles_s.index(c).store(result.to(target.dtype))
    fence_async_shared()
    gl.barrier()
    for c in gl.static_range(CHUNKS):
        chunk = tiles_s.index(c).reinterpret(target.dtype, [1, KEYS, COLUMNS], target.layout)
        column = (tile.kv_head * PARTS + args.part) * (CHUNKS * COLUMNS) + c * COLUMNS
        tma.async_store(target, [tile.b, tile.first_key, column], chunk)
    tma.store_wait(0)


@gluon.jit
def consume_scores(args, config: gl.constexpr):
    """S, P and the part's dV."""
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    scale2 = args.scalars.scale * LOG2E
    dtype: gl.constexpr = args.dv.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    v_layout: gl.constexpr = accumulator(V_CHUNK)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    keys = tile.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    dv_sum = zeros(v_layout, V_CHUNK, V_CHUNKS)
    mbarrier.wait(shared.kv_full.index(0), 0)
    last = (shared.last_s.index(0).load(gl.DotOperandLayout(0, s_layout, 2)),)
    gl.barrier()  # before P takes its place
    k = left_chunks(shared.k_s, 0, CHUNKS)
    k_rest = left_chunks(shared.k_rest_s, 0, CHUNKS - 1) + last
    rest_full = shared.q_rest_full.index(0)
    zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    if q_range.steps > 0:
        mbarrier.wait(shared.q_full.index(0), 0)
        s = scores(k, shared.q_s, 0, zero, CHUNKS)
        s = add_rest(s, k_rest, shared.q_rest_s, 0, rest_full, 0, CHUNKS)
        s = warpgroup_mma_wait(0, deps=(s,))
        warp_arrive(shared.q_rest_empty.index(0))
        stage = 0
        phase = 0
        for masked in gl.static_range(2):  # partial blocks of every head, then the full ones
            count = q_range.partial if masked == 0 else q_range.full_end - q_range.full_begin
            n = 0
            for i in range(0, count * tile.group):
                other = stage ^ 1
                lse = shared.row_stats.lse2.index(stage).load(gl.SliceLayout(0, s_layout))
                if masked == 0:
                    s = select_bits(s, bits_of_masked(n, keys, stage, args), float("-inf"))
                    n = gl.where(n + 1 == count, 0, n + 1)
                warp_arrive(shared.q_empty.index(stage))
                p = gl.exp2(s * scale2 - lse[None, :]).to(dtype)
                mbarrier.wait(args.p.empty.index(stage), phase ^ 1)
                args.p.tiles.index(stage).store(p)
                mbarrier.arrive(args.p.full.index(stage))
                p_half = gl.convert_layout(p, p_layout)
                mbarrier.wait(shared.do_full.index(stage), phase)
                dv_tokens = add_products(p_half, shared.do_s, stage, dv_sum, V_CHUNKS)
                phase = phase ^ stage
                mbarrier.wait(shared.q_full.index(other), phase)
                zeroth = opaque(stage * 0)
                k_left = left_chunks(shared.k_s, zeroth, CHUNKS)
                rest_left = left_chunks(shared.k_rest_s, zeroth, CHUNKS - 1) + last
                s_token = scores(k_left, shared.q_s, other, zero, CHUNKS)
                s_token = add_rest(
                    s_token, rest_left, shared.q_rest_s, zeroth, rest_full, other, CHUNKS
                )
                dv_sum = finished(dv_tokens, 2 * CHUNKS, V_CHUNKS)
                warp_arrive(shared.do_empty.index(stage))
                s = warpgroup_mma_wait(0, deps=(s_token,))
                warp_arrive(shared.q_rest_empty.index(0))
                stage = other
    keys_read(0, 1)
    store_gradient(args.dv, dv_sum, None, shared.v_s, args, V_CHUNKS)


@gluon.jit
def consume_gradients(args, config: gl.constexpr):
    """dP, dS and the part's dK."""
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
    v_rest = left_chunks(shared.v_rest_s, 0, V_CHUNKS)
    rest_full = shared.do_rest_full.index(0)
    if q_range.steps > 0:
        mbarrier.wait(shared.do_full.index(0), 0)
        dp = scores(v, shared.do_s, 0, zero, V_CHUNKS)
        dp = add_rest(dp, v_rest, shared.do_rest_s, 0, rest_full, 0, V_CHUNKS)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        warp_arrive(shared.do_rest_empty.index(0))
        stage = 0
        phase = 0
        for masked in gl.static_range(2):
            count = q_range.partial if masked == 0 else q_range.full_end - q_range.full_begin
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
                if masked == 0:
                    ds = select_bits(ds, bits_of_masked(n, keys, stage, args), 0.0)
                    n = gl.where(n + 1 == count, 0, n + 1)
                ds_half = gl.convert_layout(ds.to(dtype), ds_layout)
                dk_tokens = add_products(ds_half, shared.q_s, stage, dk_sum, CHUNKS)
                phase = phase ^ stage
                mbarrier.wait(shared.do_full.index(other), phase)
                zeroth = opaque(stage * 0)
                v_left = left_chunks(shared.v_s, zeroth, V_CHUNKS)
                rest_left = left_chunks(shared.v_rest_s, zeroth, V_CHUNKS)
                dp_token = scores(v_left, shared.do_s, other, zero, V_CHUNKS)
                dp_token = add_rest(
                    dp_token, rest_left, shared.do_rest_s, zeroth, rest_full, other, V_CHUNKS
                )
                dk_sum = finished(dk_tokens, 2 * V_CHUNKS, CHUNKS)
                warp_arrive(shared.q_empty.index(stage))
                dp = warpgroup_mma_wait(0, deps=(dp_token,))
                warp_arrive(shared.do_rest_empty.index(0))
                stage = other
    keys_read(1, 1)
    store_gradient(args.dk, dk_sum, args.scalars.scale, shared.k_s, args, CHUNKS)


@gluon.jit
def allocate_row_stats():
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return RowStats(
        gl.allocate_shared_memory(gl.float32, [2, ROWS], line),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], line),
        gl.allocate_shared_memory(gl.int32, [2, ROWS], line),
        gl.allocate_shared_memory(gl.int32, [2, ROWS], line),
    )


@gluon.jit
def backward_dkdv_sm90_parts(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As bwd.backward_sm90 without dQ and options; two programs for every 64 keys. Boxes of query,
    dout and the row statistics are of 32 rows."""
    CHUNKS: gl.constexpr = QK_DIM // PARTS // QK_CHUNK  # of a part
    V_CHUNKS: gl.constexpr = V_DIM // PARTS // V_CHUNK
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK, CHUNKS=CHUNKS,
        V_CHUNKS=V_CHUNKS,
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
    shared = PartShared(
        q_s=gl.allocate_shared_memory(dtype, [2 * CHUNKS, ROWS, QK_CHUNK], q_tile),
        k_s=gl.allocate_shared_memory(dtype, [CHUNKS, KEYS, QK_CHUNK], k_tile),
        v_s=gl.allocate_shared_memory(dtype, [V_CHUNKS, KEYS, V_CHUNK], v_tile),
        do_s=gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, ROWS, V_CHUNK], do_tile),
        q_rest_s=gl.allocate_shared_memory(dtype, [CHUNKS, ROWS, QK_CHUNK], q_tile),
        k_rest_s=gl.allocate_shared_memory(dtype, [CHUNKS - 1, KEYS, QK_CHUNK], k_tile),
        v_rest_s=gl.allocate_shared_memory(dtype, [V_CHUNKS, KEYS, V_CHUNK], v_tile),
        do_rest_s=gl.allocate_shared_memory(dtype, [V_CHUNKS, ROWS, V_CHUNK], do_tile),
        last_s=last_s, row_stats=allocate_row_stats(),
        kv_full=barriers(1), q_full=barriers(2), q_empty=barriers(2),
        do_full=barriers(2), do_empty=barriers(2),
        q_rest_full=barriers(1), q_rest_empty=barriers(1),
        do_rest_full=barriers(1), do_rest_empty=barriers(1),
    )  # fmt: skip
    p_s = last_s.reinterpret(dtype, [2, KEYS, ROWS], p_tile)
    p = Exchange(p_s, full=barriers(2), empty=barriers(2))
    init_barriers(
        1,
        (
            shared.kv_full, shared.q_rest_full, shared.do_rest_full, shared.q_rest_empty,
            shared.do_rest_empty,
        ),
        (1, 1, 1, 4, 4),
    )  # fmt: skip
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
    args = PartArgs(
        maps=Maps(query, key, value, dout), row_stats=RowStats(lse2, delta, lo, hi), dk=dk, dv=dv,
        mask=mask, shared=shared, p=p, tile=tile, part=part, q_range=q_range, scalars=scalars,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume_scores, (args, config)), (consume_gradients, (args, config)),
            (produce, (args, config))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
