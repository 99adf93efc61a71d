"""The producer warp of dK and dV with a block mask: sm90/bwd_producer.py's, for the lists of the
heads of a group.

Apart from that one, so that no byte of the kernels without a map depends on it.
"""

from sm90.block_lists import list_of_keys
from sm90.bwd_producer import ROWS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def load_keys(
    maps, tiles_s, kv_full, tile, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr
):
    """The tile of keys and its values."""
    _query, key, value, _dout = maps
    _q_s, k_s, v_s, _do_s = tiles_s
    b, first_key, kv_head, _group, _bh, _mask_row, _padded = tile
    dtype: gl.constexpr = key.dtype
    for w in gl.static_range(2):
        at = first_key + w * 64
        mbarrier.expect(kv_full.index(w), 64 * (QK_DIM + V_DIM) * 2)
        for c in gl.static_range(QK_DIM // QK_CHUNK):
            k_tile = k_s.index(c).reinterpret(dtype, [1, 128, QK_CHUNK], key.layout)
            at_k = [b, at, kv_head * QK_DIM + c * QK_CHUNK]
            tma.async_load(key, at_k, kv_full.index(w), k_tile.slice(w * 64, 64, dim=1))
        v_tile = v_s.index(w).reinterpret(dtype, [1, 64, V_DIM], value.layout)
        tma.async_load(value, [b, at, kv_head * V_DIM], kv_full.index(w), v_tile)


@gluon.jit
def load_rows(
    maps, row_stats, tiles_s, row_stats_s, barriers, tile, stage, phase, g, row,
    WITH_DOUT: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
):  # fmt: skip
    """A block of rows of the group's g-th head."""
    query, _key, _value, dout = maps
    lse2, delta, lo, hi = row_stats
    q_s, _k_s, _v_s, do_s = tiles_s
    lse_s, delta_s, lo_s, hi_s = row_stats_s
    _, q_full, q_empty, do_full, do_empty = barriers
    b, _first_key, kv_head, group, bh, mask_row, padded = tile
    dtype: gl.constexpr = query.dtype
    f32: gl.constexpr = gl.float32
    i32: gl.constexpr = gl.int32
    stat = (bh + g) * padded + row
    head = kv_head * group + g
    mbarrier.wait(q_empty.index(stage), phase ^ 1)
    full = q_full.index(stage)
    mbarrier.expect(full, ROWS * QK_DIM * 2 + ROWS * 12)
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    for c in gl.static_range(CHUNKS):
        q_tile = q_s.index(stage * CHUNKS + c)
        q_tile = q_tile.reinterpret(dtype, [1, ROWS, QK_CHUNK], query.layout)
        tma.async_load(query, [b, row, head * QK_DIM + c * QK_CHUNK], full, q_tile)
    lse_line = lse_s.index(stage).reinterpret(f32, [1, 1, ROWS], lse2.layout)
    tma.async_load(lse2, [0, 0, stat], full, lse_line)
    lo_line = lo_s.index(stage).reinterpret(i32, [1, 1, ROWS], lo.layout)
    tma.async_load(lo, [0, 0, mask_row + row], full, lo_line)
    hi_line = hi_s.index(stage).reinterpret(i32, [1, 1, ROWS], hi.layout)
    tma.async_load(hi, [0, 0, mask_row + row], full, hi_line)
    if WITH_DOUT:
        mbarrier.wait(do_empty.index(stage), phase ^ 1)
        full = do_full.index(stage)
        mbarrier.expect(full, ROWS * V_DIM * 2 + ROWS * 4)
        do_tile = do_s.index(stage).reinterpret(dtype, [1, ROWS, V_DIM], dout.layout)
        tma.async_load(dout, [b, row, head * V_DIM], full, do_tile)
        delta_line = delta_s.index(stage).reinterpret(f32, [1, 1, ROWS], delta.layout)
        tma.async_load(delta, [0, 0, stat], full, delta_line)


@gluon.jit
def produce_listed(
    maps, row_stats, shared, barriers, tile, listing, config: gl.constexpr
):  # fmt: skip
    """The producer warp: blocks of every head's list, and the rows of one block more, whose scores
    are made and dropped."""
    _b, first_key, kv_head, group, _bh, _mask_row, _padded = tile
    mask_args, mask_b, q_len, kv_len = listing
    tiles_s, row_stats_s = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    load_keys(maps, tiles_s, barriers[0], tile, QK_DIM, V_DIM, QK_CHUNK)
    i = 0
    for g in range(0, group):
        listed, partial, full_count = list_of_keys(
            mask_args, mask_b, kv_head * group + g, first_key, q_len, kv_len
        )
        block = gl.load(listed)
        for n in range(0, partial + full_count):
            row = block * ROWS
            block = gl.load(
                listed + gl.minimum(n + 1, partial + full_count - 1)
            )  # read a step ahead
            load_rows(
                maps, row_stats, tiles_s, row_stats_s, barriers, tile, i % 2, (i // 2) & 1, g, row,
                True, QK_DIM, V_DIM, QK_CHUNK,
            )  # fmt: skip
            i += 1
    if i > 0:
        load_rows(
            maps, row_stats, tiles_s, row_stats_s, barriers, tile, i % 2, (i // 2) & 1, 0, 0, False,
            QK_DIM, V_DIM, QK_CHUNK,
        )  # fmt: skip
