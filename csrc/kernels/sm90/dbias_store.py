"""Stores the gradient of a bias with an element for every logit, block by block, in the kernel of
dK and dV: dS, rounded as for its product with the queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def start_store(tile_s, target, plane, row, key):
    """Starts the store of a tile (rows, keys) that this warp group has written to tile_s."""
    ROWS: gl.constexpr = tile_s.shape[0]
    KEYS: gl.constexpr = tile_s.shape[1]
    fence_async_shared()
    gl.barrier()
    tile = tile_s.reinterpret(target.dtype, [1, 1, ROWS, KEYS], target.layout)
    tma.async_store(target, [plane, 0, row, key], tile)


@gluon.jit
def end_store():
    """Waits until the tile has been read."""
    tma.store_wait(0)
    gl.barrier()


@gluon.jit
def clear_rows(tile_s, args, layout: gl.constexpr):
    """Stores zeros in the rows outside args.q_range. No tile of zeros overlaps with the range:
    tiles before it are counted backwards from its start, and TMA stores nothing outside the
    array."""
    target = args.bias.gradient
    tile = args.tile
    q_range = args.q_range
    ROWS: gl.constexpr = tile_s.shape[0]
    tile_s.store(gl.zeros(tile_s.shape, target.dtype, layout))
    fence_async_shared()
    gl.barrier()
    zeros_s = tile_s.reinterpret(target.dtype, [1, 1, ROWS, tile_s.shape[1]], target.layout)
    before = (q_range.start + ROWS - 1) // ROWS
    end = q_range.start + q_range.steps * ROWS
    count = before + gl.maximum(args.scalars.q_len - end + ROWS - 1, 0) // ROWS
    for g in range(0, tile.group):
        plane = tile.b * args.scalars.heads + tile.kv_head * tile.group + g
        for i in range(0, count):
            row = gl.where(i < before, q_range.start - (i + 1) * ROWS, end + (i - before) * ROWS)
            tma.async_store(target, [plane, 0, row, tile.first_key], zeros_s)
    tma.store_wait(0)
