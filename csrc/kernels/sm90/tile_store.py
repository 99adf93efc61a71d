"""Stores the results of the Hopper kernels, in chunks of columns (chunked_mma.py): the sums in
registers are rounded into shared memory that has been read, and TMA stores them from there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def start_store(target, tiles_s, first, b, row, head, column, CHUNKS: gl.constexpr):
    """Starts the store of a head's columns from `column` on, and rows from `row` on, which this
    warp group has written to chunks of tiles_s, from index `first` on. TMA stores nothing past the
    last column or row."""
    ROWS: gl.constexpr = tiles_s.shape[1]
    COLUMNS: gl.constexpr = tiles_s.shape[2]
    fence_async_shared()
    gl.barrier()
    for c in gl.static_range(CHUNKS):
        chunk = tiles_s.index(first + c)
        chunk = chunk.reinterpret(target.dtype, [1, 1, ROWS, COLUMNS], target.layout)
        tma.async_store(target, [b, head, row, column + c * COLUMNS], chunk)


@gluon.jit
def store_rows(
    target, sums, attended, scale, tiles_s, first, b, row, head, column, CHUNKS: gl.constexpr
):
    """Stores rows of dQ as store_gradient does, and zeros in rows that attend to nothing."""
    gl.barrier()
    for c in gl.static_range(CHUNKS):
        # select, not multiply: a row that attends to nothing may have summed garbage
        result = gl.where(gl.expand_dims(attended, 1), sums[c] * scale, 0.0)
        tiles_s.index(first + c).store(result.to(target.dtype))
    start_store(target, tiles_s, first, b, row, head, column, CHUNKS)
    tma.store_wait(0)


@gluon.jit
def store_gradient(target, sums, scale, tiles_s, b, row, head, column, CHUNKS: gl.constexpr):
    """Rounds `sums` into tiles_s, multiplied by `scale` unless it is None, and stores them."""
    for c in gl.static_range(CHUNKS):
        result = sums[c] if scale is None else sums[c] * scale
        tiles_s.index(c).store(result.to(target.dtype))
    start_store(target, tiles_s, 0, b, row, head, column, CHUNKS)
    tma.store_wait(0)


@gluon.jit
def store_half(
    W: gl.constexpr, k, v, dk_sum, dv_sum, args, CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr
):
    """Stores dK and dV of the W-th 64 of 128 keys. They overwrite these keys `k` and values `v` in
    shared memory. All are in chunks. With dropout, the sum of dV is of P that has been kept, but
    not divided by the fraction that is kept."""
    shared = args.shared
    tile = args.tile
    dtype: gl.constexpr = args.dk.dtype
    QK_CHUNK: gl.constexpr = shared.k_s.shape[2]
    V_CHUNK: gl.constexpr = shared.v_s.shape[2]
    inverse_keep = args.dropout.inverse_keep
    for c in gl.static_range(CHUNKS):
        k[c].store((dk_sum[c] * args.scalars.scale).to(dtype))
    for c in gl.static_range(V_CHUNKS):
        dv = dv_sum[c] if inverse_keep is None else dv_sum[c] * inverse_keep
        v[c].store(dv.to(dtype))
    fence_async_shared()
    gl.barrier()
    first_key = tile.first_key + W * 64
    for c in gl.static_range(CHUNKS):
        dk_tile = shared.k_s.index(c).reinterpret(dtype, [1, 1, 128, QK_CHUNK], args.dk.layout)
        dk_tile = dk_tile.slice(W * 64, 64, dim=2)
        tma.async_store(args.dk, [tile.b, tile.kv_head, first_key, c * QK_CHUNK], dk_tile)
    for c in gl.static_range(V_CHUNKS):
        dv_tile = shared.v_s.index(W * V_CHUNKS + c)
        dv_tile = dv_tile.reinterpret(dtype, [1, 1, 64, V_CHUNK], args.dv.layout)
        tma.async_store(args.dv, [tile.b, tile.kv_head, first_key, c * V_CHUNK], dv_tile)
    tma.store_wait(0)
