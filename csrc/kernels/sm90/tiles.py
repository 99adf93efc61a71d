"""Shared memory of the Hopper kernels: barriers, and loads of tiles by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """N tiles in shared memory, in the layout of TMA and wgmma."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [N, ROWS, COLUMNS], layout)


@gluon.jit
def allocate_lines(dtype: gl.constexpr, N: gl.constexpr, SIZE: gl.constexpr):
    """N lines of 32-bit numbers in shared memory."""
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.allocate_shared_memory(dtype, [N, SIZE], line)


@gluon.jit
def barriers(N: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barriers(N: gl.constexpr, rings, arrivals):
    """Initialises the barriers of each ring with the number of arrivals they count. A ring has at
    most N barriers, or is None."""
    for n in gl.static_range(N):
        for k in gl.static_range(len(rings)):
            if rings[k] is not None and n < rings[k].shape[0]:
                mbarrier.init(rings[k].index(n), arrivals[k])


@gluon.jit
def reset_barriers(N: gl.constexpr, rings, arrivals):
    """Puts the barriers of each ring back to their first phase. No warp uses them meanwhile."""
    for n in gl.static_range(N):
        for k in gl.static_range(len(rings)):
            if rings[k] is not None and n < rings[k].shape[0]:
                mbarrier.invalidate(rings[k].index(n))
    init_barriers(N, rings, arrivals)


@gluon.jit
def load_columns(
    source, b, row, head, column, full, tiles_s, first, CHUNKS: gl.constexpr,
    HALF: gl.constexpr = None,
):  # fmt: skip
    """Loads a head's columns from `column` on into chunks (chunked_mma.py) of tiles_s, from index
    `first` on; zeros past the last column or row. With HALF, loads only the HALF-th 64 rows of each
    chunk."""
    ROWS: gl.constexpr = tiles_s.shape[1]
    COLUMNS: gl.constexpr = tiles_s.shape[2]
    for c in gl.static_range(CHUNKS):
        chunk = tiles_s.index(first + c)
        chunk = chunk.reinterpret(source.dtype, [1, 1, ROWS, COLUMNS], source.layout)
        if HALF is not None:
            chunk = chunk.slice(HALF * 64, 64, dim=2)
        tma.async_load(source, [b, head, row, column + c * COLUMNS], full, chunk)


@gluon.jit
def load_chunks(
    source, b, row, head, full, tiles_s, first, CHUNKS: gl.constexpr, HALF: gl.constexpr = None
):
    """Loads the columns of a head, as load_columns does."""
    load_columns(source, b, row, head, 0, full, tiles_s, first, CHUNKS, HALF)


@gluon.jit
def load_line(source, line_s, at, full):
    """Loads one number per row for a block of rows."""
    line = line_s.reinterpret(source.dtype, [1, 1, 1, line_s.shape[0]], source.layout)
    tma.async_load(source, [0, 0, 0, at], full, line)
