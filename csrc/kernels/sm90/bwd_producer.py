"""Parts of the Hopper backward kernels: a program's tile and its rows, the producer warp, and masks
of a block of rows."""

from sm90.common import element_bits, opaque, place_of_tile, position_row, split
from sm90.lse_by_mma import FAR, LANES, load_row_stats, lse_scale, store_parts
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS = gl.constexpr(64)  # of a block


@gluon.constexpr_function
def row_bits_asm(n):
    """Bits of common.range_bits_asm for rows along the columns: 1 where lo[row] <= key < hi[row].

    Operands: bits (2), keys (2), shared addresses of lo and hi of the n rows.
    """
    while hasattr(n, "value"):
        n = n.value
    t = [
        "{ .reg .u32 q, a, b, d, u; .reg .s32 lo<2>, hi<2>; .reg .pred p;"
        " mov.u32 q, %tid.x; and.b32 q, q, 3;"
        "shl.b32 q, q, 3; add.u32 a, $4, q; add.u32 b, $5, q; mov.b32 $0, 0; mov.b32 $1, 0;"
    ]
    for o in range(int(n) // 8):
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
    return gl.inline_asm(
        row_bits_asm(ROWS), "=&r,=&r,r,r,r,r,~{memory}", (keys, lo_s, hi_s), keys.type
    )


@gluon.jit
def row_range(kv_blocks, mask_b, key, kv_len):
    """As kv_ranges.row_range for a tile of 128 keys, but one with a key past the end has none full:
    such a key must not meet dQ."""
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
    """As row_range for 64 keys; a block past the end meets no row."""
    blocks = (kv_len + 63) // 64
    base = kv_blocks + mask_b.to(gl.int64) * (4 * blocks)
    t = gl.minimum(key // 64, blocks - 1)
    end = gl.where(key < kv_len, gl.load(base + blocks + t), 0)
    full_hi = gl.where(key + 64 > kv_len, 0, gl.load(base + 3 * blocks + t))
    start = gl.where(end == 0, 0, gl.load(base + t))
    return start, end, gl.load(base + 2 * blocks + t), full_hi


@gluon.jit
def tile_of_program(orders, pointers, sizes, KEYS: gl.constexpr):
    """Where this program's keys are, which blocks of rows meet them (the full ones are not
    masked), the mask's arrays of its batch row, and the bounds of its blocks of keys."""
    q_blocks, kv_blocks, kv_order = orders
    q_ids, kv_ids, q_pos, kv_pos = pointers
    mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads = sizes
    group = heads // kv_heads
    _, kv_head, b, mask_b, first_key = place_of_tile(
        gl.program_id(0), kv_order, batch, mask_batch, (kv_len + 127) // 128, 1, kv_heads, KEYS,
        128 // KEYS,
    )  # fmt: skip
    if KEYS == 128:
        start, end, full_lo, full_hi = row_range(kv_blocks, mask_b, first_key, kv_len)
    else:
        start, end, full_lo, full_hi = row_range_64(kv_blocks, mask_b, first_key, kv_len)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, ROWS)
    row_blocks = (q_len + 63) // 64
    mask_row = mask_b.to(gl.int64) * q_len
    mask_key = mask_b.to(gl.int64) * kv_len
    flags = q_blocks + mask_b.to(gl.int64) * (5 * row_blocks)
    q_pos += position_row(mask_row, mask_mode)
    own_blocks = kv_blocks + mask_b.to(gl.int64) * (4 * ((kv_len + 63) // 64))
    mask = (q_ids + mask_row, kv_ids + mask_key, q_pos, kv_pos + mask_key, flags)
    bh = b * heads + kv_head * group
    tile = (b, first_key, kv_head, group, bh, mask_b * (row_blocks * 64), row_blocks * 64)
    q_range = (start, steps, steps - full_end + full_begin, full_begin, full_end)
    return tile, q_range, mask, own_blocks


@gluon.jit
def rows_of_half(own_blocks, t, kv_len):
    """Rows [start, end) that may meet the t-th 64 keys; none past the last key."""
    blocks = (kv_len + 63) // 64
    at = gl.minimum(t, blocks - 1)
    end = gl.load(own_blocks + blocks + at)
    return gl.load(own_blocks + at), gl.where(t < blocks, end, 0)


@gluon.jit
def mask_mode_of_tile(flags, mask_mode, start, steps, row_blocks):
    """mask_mode, or 0 for a tile of keys that meets no segment-checked block of rows: its
    steps need not wait for a flag."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    first = start // ROWS
    found = gl.zeros([128], gl.int32, layout)
    if mask_mode > 0:
        for t in range(first, first + steps, 128):
            at = t + gl.arange(0, 128, layout)
            found |= gl.load(flags + 4 * row_blocks + at, mask=at < first + steps, other=0)
    return gl.where(gl.max(found & 1, axis=0) != 0, mask_mode, 0)


@gluon.jit
def mask_bits(keys, row, lo_s, hi_s, mask, scalars):
    """Bits of common.range_bits_asm for a block of rows along the columns."""
    q_ids, kv_ids, q_pos, kv_pos, q_blocks = mask
    mask_mode, q_len, kv_len = scalars[:3]
    row_blocks = (q_len + 63) // 64
    bits = row_bits(keys, lo_s, hi_s)
    if mask_mode > 0:
        flags = gl.load(q_blocks + 4 * row_blocks + row // 64)
        if flags & 1:
            there = keys < kv_len
            kv_id = gl.load(kv_ids + keys, mask=there, other=-1)
            bits = bits & element_bits(kv_id, q_ids, row, q_len, ROWS, "eq")
            if mask_mode > 1:
                kv_at = gl.load(kv_pos + keys, mask=there, other=0)
                bits = bits & element_bits(kv_at, q_pos, row, q_len, ROWS, "ge")
                if mask_mode > 2:
                    after = opaque(q_len)
                    bits = bits & element_bits(kv_at, q_pos, row + after, q_len + after, ROWS, "le")
    return bits


@gluon.jit
def row_of(n, in_partial, q_range):
    """The first row of a head's n-th partial block, or of its full blocks' n-th."""
    start, _steps, _partial, full_begin, full_end = q_range
    masked = gl.where(n < full_begin, n, n + full_end - full_begin)
    return start + gl.where(in_partial, masked, full_begin + n) * ROWS


@gluon.jit
def next_block(n, g, in_partial, q_range, group):
    """Of partial blocks or of the full ones: the next one of a head, then the next head's."""
    _start, _steps, partial, full_begin, full_end = q_range
    n += 1
    wrap = n == gl.where(in_partial, partial, full_end - full_begin)
    n = gl.where(wrap, 0, n)
    return n, gl.where(wrap, gl.where(g == group - 1, 0, g + 1), g)


@gluon.jit
def produce(
    maps, row_stats, shared, barriers, tile, q_range, lse_parts, scale, config: gl.constexpr
):  # fmt: skip
    tiles_s, row_stats_s = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    HALVES: gl.constexpr = config.HALVES
    LSE_BY_MMA: gl.constexpr = config.LSE_BY_MMA
    query, key, value, dout = maps
    lse2, delta, lo, hi = row_stats
    q_s, k_s, v_s, do_s = tiles_s
    lse_s, delta_s, lo_s, hi_s = row_stats_s
    kv_full, q_full, q_empty, do_full, do_empty = barriers
    b, first_key, kv_head, group, bh, mask_row, padded = tile
    _start, steps, partial, _full_begin, _core_end = q_range
    dtype: gl.constexpr = query.dtype
    f32: gl.constexpr = gl.float32
    i32: gl.constexpr = gl.int32
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    for w in gl.static_range(HALVES):
        at = first_key + w * 64
        mbarrier.expect(kv_full.index(w), 64 * (QK_DIM + V_DIM) * 2)
        for c in gl.static_range(CHUNKS):
            k_tile = k_s.index(c).reinterpret(dtype, [1, 64 * HALVES, QK_CHUNK], key.layout)
            at_k = [b, at, kv_head * QK_DIM + c * QK_CHUNK]
            tma.async_load(key, at_k, kv_full.index(w), k_tile.slice(w * 64, 64, dim=1))
        for c in gl.static_range(V_CHUNKS):
            v_tile = v_s.index(w * V_CHUNKS + c).reinterpret(dtype, [1, 64, V_CHUNK], value.layout)
            at_v = [b, at, kv_head * V_DIM + c * V_CHUNK]
            tma.async_load(value, at_v, kv_full.index(w), v_tile)
    total = steps * group
    g = 0
    n = 0
    if LSE_BY_MMA:
        lse_p, delta_p, row_stats_full = lse_parts
        part = 1.0 / lse_scale(scale)
        if total > 0:
            first = row_of(0, partial > 0, q_range)
            load_row_stats(row_stats, row_stats_s, row_stats_full, bh * padded + first, 0)
    # partial blocks of every head, then full blocks of every head, then one block more than there
    # are: the consumers start its scores (a tile of 64 keys its dP, too) and drop them
    for i in range(0, gl.where(total > 0, total + 1, 0)):
        stage = i % 2
        phase = (i // 2) & 1
        in_partial = i < partial * group
        row = row_of(n, in_partial, q_range)
        stat = (bh + g) * padded + row
        head = kv_head * group + g
        if LSE_BY_MMA:  # numbers are read a block ahead
            if i < total:
                then, of = next_block(n, g, in_partial, q_range, group)
                following = (bh + of) * padded + row_of(then, i + 1 < partial * group, q_range)
                load_row_stats(row_stats, row_stats_s, row_stats_full, following, stage ^ 1)
            mbarrier.wait(row_stats_full.index(stage), phase)
            far = lse_s.index(stage).load(LANES) * part
            far = gl.where(far > FAR, FAR, far)  # NaN stays
            dl = delta_s.index(stage).load(LANES)
        mbarrier.wait(q_empty.index(stage), phase ^ 1)
        full = q_full.index(stage)
        if LSE_BY_MMA:
            store_parts(far, lse_p.index(stage))
        mbarrier.expect(full, ROWS * QK_DIM * 2 + ROWS * (8 if LSE_BY_MMA else 12))
        for c in gl.static_range(CHUNKS):
            q_tile = q_s.index(stage * CHUNKS + c)
            q_tile = q_tile.reinterpret(dtype, [1, ROWS, QK_CHUNK], query.layout)
            tma.async_load(query, [b, row, head * QK_DIM + c * QK_CHUNK], full, q_tile)
        if not LSE_BY_MMA:
            lse_line = lse_s.index(stage).reinterpret(f32, [1, 1, ROWS], lse2.layout)
            tma.async_load(lse2, [0, 0, stat], full, lse_line)
        lo_line = lo_s.index(stage).reinterpret(i32, [1, 1, ROWS], lo.layout)
        tma.async_load(lo, [0, 0, mask_row + row], full, lo_line)
        hi_line = hi_s.index(stage).reinterpret(i32, [1, 1, ROWS], hi.layout)
        tma.async_load(hi, [0, 0, mask_row + row], full, hi_line)
        if i < total + 2 - HALVES:
            mbarrier.wait(do_empty.index(stage), phase ^ 1)
            full = do_full.index(stage)
            if LSE_BY_MMA:
                store_parts(dl, delta_p.index(stage))
            mbarrier.expect(full, ROWS * V_DIM * 2 + (0 if LSE_BY_MMA else ROWS * 4))
            for c in gl.static_range(V_CHUNKS):
                do_tile = do_s.index(stage * V_CHUNKS + c)
                do_tile = do_tile.reinterpret(dtype, [1, ROWS, V_CHUNK], dout.layout)
                tma.async_load(dout, [b, row, head * V_DIM + c * V_CHUNK], full, do_tile)
            if not LSE_BY_MMA:
                delta_line = delta_s.index(stage).reinterpret(f32, [1, 1, ROWS], delta.layout)
                tma.async_load(delta, [0, 0, stat], full, delta_line)
        n, g = next_block(n, g, in_partial, q_range, group)
