"""Shared by the Hopper backward kernels: a program's tile of keys and its range of rows, the
producer warp, and the mask of a block of rows."""

from common.kv_ranges import opaque, place_of_tile, position_row, split, tiles_are_near
from sm90.args import KeyTile, KeyTileMask, RowStats, StepRange
from sm90.block_lists import list_of_keys
from sm90.common import element_bits
from sm90.lse_by_mma import FAR, LANES, load_row_stats, lse_scale, store_parts
from sm90.row_producer import plane_of_bias
from sm90.tiles import allocate_lines, load_columns, load_line
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS = gl.constexpr(64)  # per block, where no other size is given


@gluon.constexpr_function
def row_bits_asm(n):
    """Bits as in common.range_bits_asm, for transposed tiles (keys x rows): 1 where lo[row] <= key
    < hi[row].

    Operands: bits (2), keys (2), shared addresses of lo and hi of the n rows.
    """
    t = [
        "{ .reg .u32 q, a, b, d, u; .reg .s32 lo<2>, hi<2>; .reg .pred p;"
        " mov.u32 q, %tid.x; and.b32 q, q, 3;"
        "shl.b32 q, q, 3; add.u32 a, $4, q; add.u32 b, $5, q; mov.b32 $0, 0; mov.b32 $1, 0;"
    ]
    for o in range(n // 8):
        t.append(
            f"ld.shared.v2.s32 {{lo0, lo1}}, [a+{32 * o}]; ld.shared.v2.s32 {{hi0, hi1}}, "
            f"[b+{32 * o}];"
        )
        for j in (0, 1):
            bit = 1 << (2 * o + j)
            t.append(
                f"sub.s32 u, hi{j}, lo{j};"
                f"sub.s32 d, $2, lo{j}; setp.lt.u32 p, d, u; @p or.b32 $0, $0, {bit};"
                f"sub.s32 d, $3, lo{j}; setp.lt.u32 p, d, u; @p or.b32 $1, $1, {bit};"
            )
    return " ".join(t) + " }"


@gluon.jit
def row_bits(keys, lo_s, hi_s):
    letters: gl.constexpr = "=&r,=&r,r,r,r,r,~{memory}"
    return gl.inline_asm(row_bits_asm(lo_s.shape[0]), letters, (keys, lo_s, hi_s), keys.type)


@gluon.jit
def row_range(kv_blocks, mask_b, key, kv_len):
    """Same as `row_range` in portable/kv_ranges.py for a tile of 128 keys, except that no block is
    full if a key is past the end: such a key must not contribute to dQ."""
    blocks = (kv_len + 63) // 64
    base = kv_blocks + mask_b.to(gl.int64) * (4 * blocks)
    t = key // 64
    u = gl.minimum(t + 1, blocks - 1)
    start = gl.minimum(gl.load(base + t), gl.load(base + u))
    end = gl.maximum(gl.load(base + blocks + t), gl.load(base + blocks + u))
    full_lo = gl.maximum(gl.load(base + 2 * blocks + t), gl.load(base + 2 * blocks + u))
    full_hi = gl.minimum(gl.load(base + 3 * blocks + t), gl.load(base + 3 * blocks + u))
    full_hi = gl.where(key + 128 > kv_len, 0, full_hi)
    start = gl.where(end == 0, 0, start)
    return start, end, full_lo, full_hi


@gluon.jit
def row_range_64(kv_blocks, mask_b, key, kv_len):
    """As row_range for 64 keys. No row attends to a block past the end."""
    blocks = (kv_len + 63) // 64
    base = kv_blocks + mask_b.to(gl.int64) * (4 * blocks)
    t = gl.minimum(key // 64, blocks - 1)
    end = gl.where(key < kv_len, gl.load(base + blocks + t), 0)
    full_hi = gl.where(key + 64 > kv_len, 0, gl.load(base + 3 * blocks + t))
    start = gl.where(end == 0, 0, gl.load(base + t))
    return start, end, gl.load(base + 2 * blocks + t), full_hi


@gluon.jit
def tile_of_program(
    mask, kv_order, scalars, turn: gl.constexpr, TILES: gl.constexpr, KEYS: gl.constexpr,
    BLOCK: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """This program's tile of keys and part of its columns, the blocks of BLOCK rows that attend to
    it (full blocks are not masked), and the mask's arrays from its batch row on. A program has
    TILES tiles, which are all tiles of a head if they are several; `turn`: which one."""
    q_len = scalars.q_len
    kv_len = scalars.kv_len
    group = scalars.heads // scalars.kv_heads
    nth = gl.program_id(0)
    part = nth % PARTS
    tiles = (kv_len + 127) // 128
    near = tiles_are_near(tiles, scalars.batch * scalars.kv_heads)
    if TILES > 1:
        nth = nth * TILES + turn
        near = True
    _, kv_head, b, mask_b, first_key = place_of_tile(
        nth // PARTS, kv_order, scalars.batch, scalars.mask_batch, tiles, 1, scalars.kv_heads,
        KEYS, 128 // KEYS, near,
    )  # fmt: skip
    if KEYS == 128:
        start, end, full_lo, full_hi = row_range(mask.kv_blocks, mask_b, first_key, kv_len)
    else:
        start, end, full_lo, full_hi = row_range_64(mask.kv_blocks, mask_b, first_key, kv_len)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK)
    row_blocks = (q_len + 63) // 64
    mask_row = mask_b.to(gl.int64) * q_len
    mask_key = mask_b.to(gl.int64) * kv_len
    q_blocks = mask.q_blocks + mask_b.to(gl.int64) * (5 * row_blocks)
    q_pos = mask.q_pos + position_row(mask_row, scalars.mask_mode)
    kv_blocks = mask.kv_blocks + mask_b.to(gl.int64) * (4 * ((kv_len + 63) // 64))
    mask = KeyTileMask(
        mask.q_ids + mask_row, mask.kv_ids + mask_key, q_pos, mask.kv_pos + mask_key, q_blocks,
        kv_blocks,
    )  # fmt: skip
    bh = b * scalars.heads + kv_head * group
    padded = row_blocks * 64
    tile = KeyTile(mask_b, b, first_key, kv_head, group, bh, mask_b * padded, padded)
    q_range = StepRange(start, steps, steps - full_end + full_begin, full_begin, full_end)
    return tile, part, q_range, mask


@gluon.jit
def rows_of_half(mask, t, kv_len):
    """Rows [start, end) that may attend to the t-th block of 64 keys; none past the last key."""
    blocks = (kv_len + 63) // 64
    at = gl.minimum(t, blocks - 1)
    end = gl.load(mask.kv_blocks + blocks + at)
    return gl.load(mask.kv_blocks + at), gl.where(t < blocks, end, 0)


@gluon.jit
def mask_mode_of_tile(mask, q_range, scalars):
    """mask_mode, or 0 for a tile of keys without a segment-checked block of rows: its steps then
    need not wait for a flag."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    steps = q_range.steps
    row_blocks = (scalars.q_len + 63) // 64
    first = q_range.start // ROWS
    flags = gl.zeros([128], gl.int32, layout)
    if scalars.mask_mode > 0:
        for t in range(first, first + steps, 128):
            at = t + gl.arange(0, 128, layout)
            flags |= gl.load(mask.q_blocks + 4 * row_blocks + at, mask=at < first + steps, other=0)
    return gl.where(gl.max(flags & 1, axis=0) != 0, scalars.mask_mode, 0)


@gluon.jit
def mask_bits(keys, row, stage, args):
    """Bits as in common.range_bits_asm for a block of rows, for transposed tiles."""
    mask = args.mask
    scalars = args.scalars
    q_len = scalars.q_len
    row_blocks = (q_len + 63) // 64
    row_stats = args.shared.row_stats
    N: gl.constexpr = row_stats.lo.shape[1]  # rows of a block
    bits = row_bits(keys, row_stats.lo.index(stage), row_stats.hi.index(stage))
    if scalars.mask_mode > 0:
        flags = gl.load(mask.q_blocks + 4 * row_blocks + row // 64)
        if flags & 1:
            in_bounds = keys < scalars.kv_len
            kv_id = gl.load(mask.kv_ids + keys, mask=in_bounds, other=-1)
            bits = bits & element_bits(kv_id, mask.q_ids, row, q_len, N, "eq")
            if scalars.mask_mode > 1:
                q_pos = mask.q_pos
                kv_at = gl.load(mask.kv_pos + keys, mask=in_bounds, other=0)
                bits = bits & element_bits(kv_at, q_pos, row, q_len, N, "ge")
                if scalars.mask_mode > 2:
                    lower = opaque(q_len)
                    bits = bits & element_bits(kv_at, q_pos, row + lower, q_len + lower, N, "le")
    return bits


@gluon.jit
def row_of(n, in_partial, q_range, BLOCK: gl.constexpr):
    """First row of a head's n-th partial block, or of its n-th full block."""
    nth = gl.where(in_partial, q_range.nth_partial(n), q_range.full_begin + n)
    return q_range.start + nth * BLOCK


@gluon.jit
def next_block(n, g, in_partial, q_range, group):
    """Moves on to the head's next block of the same kind (partial or full), or to the first one of
    the next head."""
    n += 1
    wrap = n == gl.where(in_partial, q_range.partial, q_range.full_end - q_range.full_begin)
    n = gl.where(wrap, 0, n)
    return n, gl.where(wrap, gl.where(g == group - 1, 0, g + 1), g)


@gluon.jit
def allocate_row_stats(BLOCK: gl.constexpr):
    return RowStats(
        allocate_lines(gl.float32, 2, BLOCK),
        allocate_lines(gl.float32, 2, BLOCK),
        allocate_lines(gl.int32, 2, BLOCK),
        allocate_lines(gl.int32, 2, BLOCK),
    )


@gluon.jit
def load_keys(args, config: gl.constexpr):
    """Loads the tile of keys and its values, 64 keys at a time, and in parts the rest of their
    columns."""
    maps = args.maps
    shared = args.shared
    tile = args.tile
    QK_DIM: gl.constexpr = config.QK_DIM
    HALVES: gl.constexpr = config.HALVES
    CHUNKS: gl.constexpr = config.CHUNKS
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    V_DIM: gl.constexpr = config.V_DIM
    head = tile.kv_head
    part = args.part
    for w in gl.static_range(HALVES):
        at = tile.first_key + w * 64
        full = shared.kv_full.index(w)
        mbarrier.expect(full, config.PARTS * 64 * (QK_DIM + V_DIM) * 2)
        load_columns(maps.key, tile.b, at, head, part * QK_DIM, full, shared.k_s, 0, CHUNKS, w)
        if config.PARTS > 1:
            rest = args.q_rest
            column = (1 - part) * QK_DIM
            load_columns(maps.key, tile.b, at, head, column, full, rest.left_s, 0, CHUNKS - 1)
            column += (CHUNKS - 1) * config.QK_CHUNK
            load_columns(maps.key, tile.b, at, head, column, full, rest.last_s, 0, 1)
        load_columns(
            maps.value, tile.b, at, head, part * V_DIM, full, shared.v_s, w * V_CHUNKS, V_CHUNKS
        )
        if config.PARTS > 1:
            left_s = args.do_rest.left_s
            column = (1 - part) * V_DIM
            load_columns(maps.value, tile.b, at, head, column, full, left_s, 0, V_CHUNKS)


@gluon.jit
def load_queries(args, head, row, stat, stage, phase, lse, config: gl.constexpr):
    """Loads a block of query rows and its row statistics, which begin at `stat`. With LSE_BY_MMA,
    stores LSE in parts."""
    shared = args.shared
    tile = args.tile
    row_stats = args.row_stats
    LSE_BY_MMA: gl.constexpr = config.LSE_BY_MMA
    BLOCK: gl.constexpr = shared.q_s.shape[1]
    CHUNKS: gl.constexpr = config.CHUNKS
    mbarrier.wait(shared.q_empty.index(stage), phase ^ 1)
    full = shared.q_full.index(stage)
    if LSE_BY_MMA:
        store_parts(lse, shared.lse_parts.index(stage))
    mbarrier.expect(full, BLOCK * config.QK_DIM * 2 + BLOCK * (8 if LSE_BY_MMA else 12))
    column = args.part * config.QK_DIM
    load_columns(
        args.maps.query, tile.b, row, head, column, full, shared.q_s, stage * CHUNKS, CHUNKS
    )
    if not LSE_BY_MMA:
        load_line(row_stats.lse2, shared.row_stats.lse2.index(stage), stat, full)
    load_line(row_stats.lo, shared.row_stats.lo.index(stage), tile.mask_row + row, full)
    load_line(row_stats.hi, shared.row_stats.hi.index(stage), tile.mask_row + row, full)


@gluon.jit
def load_dout(args, head, row, stat, stage, phase, delta, config: gl.constexpr):
    """Loads the cotangents and delta of the same rows. With LSE_BY_MMA, stores delta in parts."""
    shared = args.shared
    tile = args.tile
    LSE_BY_MMA: gl.constexpr = config.LSE_BY_MMA
    BLOCK: gl.constexpr = shared.do_s.shape[1]
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    mbarrier.wait(shared.do_empty.index(stage), phase ^ 1)
    full = shared.do_full.index(stage)
    if LSE_BY_MMA:
        store_parts(delta, shared.delta_parts.index(stage))
    mbarrier.expect(full, BLOCK * config.V_DIM * 2 + (0 if LSE_BY_MMA else BLOCK * 4))
    column = args.part * config.V_DIM
    load_columns(
        args.maps.dout, tile.b, row, head, column, full, shared.do_s, stage * V_CHUNKS, V_CHUNKS
    )
    if not LSE_BY_MMA:
        load_line(args.row_stats.delta, shared.row_stats.delta.index(stage), stat, full)


@gluon.jit
def load_rest(source, b, row, head, part, rest, stage, DIM: gl.constexpr, CHUNKS: gl.constexpr):
    """Loads the columns of a block that the other part computes. They have a single stage,
    whose phase flips with every block."""
    mbarrier.wait(rest.empty.index(0), stage ^ 1)
    full = rest.full.index(0)
    mbarrier.expect(full, rest.tiles_s.shape[1] * DIM * 2)
    load_columns(source, b, row, head, (1 - part) * DIM, full, rest.tiles_s, 0, CHUNKS)


@gluon.jit
def stage_of_bias(bias, nth):
    """Stage and phase of the tile of the nth block, of whose number the two lowest bits count."""
    if bias.tiles_s.shape[0] == 1:
        stage, phase = nth * 0, nth & 1
    else:
        stage, phase = nth & 1, (nth >> 1) & 1
    return stage, phase


@gluon.jit
def load_bias(args, head, row, stat, nth, config: gl.constexpr):
    """Loads the bias of the nth block, and the largest logits of its rows."""
    bias = args.bias
    tile = args.tile
    BLOCK: gl.constexpr = bias.tiles_s.shape[1]
    KEYS: gl.constexpr = bias.tiles_s.shape[2]
    stage, phase = stage_of_bias(bias, nth)
    mbarrier.wait(bias.empty.index(stage), phase ^ 1)
    full = bias.full.index(stage)
    mbarrier.expect(full, BLOCK * KEYS * config.BIAS_BYTES + BLOCK * 4)
    layout: gl.constexpr = bias.map.layout
    tile_s = bias.tiles_s.index(stage).reinterpret(bias.map.dtype, [1, 1, BLOCK, KEYS], layout)
    plane = plane_of_bias(bias.axes, tile.b, head, args.scalars.heads)
    tma.async_load(bias.map, [plane, 0, row, tile.first_key], full, tile_s)
    load_line(bias.top, bias.top_s.index(stage), stat, full)


@gluon.jit
def produce(args, config: gl.constexpr):
    """Loads the tile of keys and then blocks of rows: those of every head's list, or partial blocks
    of every head and then full blocks. One extra block follows: the consumers start its scores (for
    a tile of 64 keys also its dP) and drop them."""
    load_keys(args, config)
    if config.BLOCK_LISTS:
        load_listed_blocks(args, config)
    else:
        load_blocks(args, config)


@gluon.jit
def load_listed_blocks(args, config: gl.constexpr):
    tile = args.tile
    i = 0
    for g in range(0, tile.group):
        listed, partial, full_count = list_of_keys(args.blocks, args.scalars, tile, g)
        block = gl.load(listed)
        for n in range(0, partial + full_count):
            row = block * ROWS
            # the list is read one step ahead
            block = gl.load(listed + gl.minimum(n + 1, partial + full_count - 1))
            stage = i % 2
            phase = (i // 2) & 1
            stat = (tile.bh + g) * tile.padded + row
            head = tile.kv_head * tile.group + g
            load_queries(args, head, row, stat, stage, phase, (), config)
            load_dout(args, head, row, stat, stage, phase, (), config)
            i += 1
    if i > 0:
        stage = i % 2
        phase = (i // 2) & 1
        stat = tile.bh * tile.padded
        load_queries(args, tile.kv_head * tile.group, 0, stat, stage, phase, (), config)
        if config.SPLIT:
            load_dout(args, tile.kv_head * tile.group, 0, stat, stage, phase, (), config)


@gluon.jit
def load_blocks(args, config: gl.constexpr):
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    group = tile.group
    LSE_BY_MMA: gl.constexpr = config.LSE_BY_MMA
    BLOCK: gl.constexpr = shared.q_s.shape[1]
    total = q_range.steps * group
    g = 0
    n = 0
    if LSE_BY_MMA:
        inverse_scale = 1.0 / lse_scale(args.scalars.scale)
        if total > 0:
            first = row_of(0, q_range.partial > 0, q_range, BLOCK)
            load_row_stats(args, tile.bh * tile.padded + first, 0)
    for i in range(0, gl.where(total > 0, total + 1, 0)):
        stage = i % 2
        phase = (i // 2) & 1
        in_partial = i < q_range.partial * group
        row = row_of(n, in_partial, q_range, BLOCK)
        stat = (tile.bh + g) * tile.padded + row
        head = tile.kv_head * group + g
        lse = ()
        delta = ()
        if LSE_BY_MMA:  # row statistics are loaded one block ahead
            if i < total:
                next_n, next_g = next_block(n, g, in_partial, q_range, group)
                following = (tile.bh + next_g) * tile.padded + row_of(
                    next_n, i + 1 < q_range.partial * group, q_range, BLOCK
                )
                load_row_stats(args, following, stage ^ 1)
            mbarrier.wait(shared.row_stats_full.index(stage), phase)
            lse = shared.row_stats.lse2.index(stage).load(LANES) * inverse_scale
            lse = gl.where(lse > FAR, FAR, lse)  # a NaN stays
            delta = shared.row_stats.delta.index(stage).load(LANES)
        load_queries(args, head, row, stat, stage, phase, lse, config)
        if args.bias is not None and i < total:
            load_bias(args, head, row, stat, i, config)
        # true for all blocks of split consumers, but not every kernel gained without the test
        if args.bias is not None or config.PARTS > 1 or i < total + config.SPLIT:
            load_dout(args, head, row, stat, stage, phase, delta, config)
        if config.PARTS > 1:
            part = args.part
            load_rest(
                args.maps.query, tile.b, row, head, part, args.q_rest, stage, config.QK_DIM,
                config.CHUNKS,
            )  # fmt: skip
            load_rest(
                args.maps.dout, tile.b, row, head, part, args.do_rest, stage, config.V_DIM,
                config.V_CHUNKS,
            )  # fmt: skip
        n, g = next_block(n, g, in_partial, q_range, group)
