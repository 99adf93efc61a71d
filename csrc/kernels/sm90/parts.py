"""Shared by the Hopper backward kernels for head dim 512, whose programs or warp groups each
compute one part of a gradient's columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

PARTS = gl.constexpr(2)


@gluon.jit
def load_columns(source, b, row, column, full, tiles_s, first, CHUNKS: gl.constexpr):
    """Loads the columns from `column` on into chunks of tiles_s, from index `first` on."""
    ROWS: gl.constexpr = tiles_s.shape[1]
    COLUMNS: gl.constexpr = tiles_s.shape[2]
    for c in gl.static_range(CHUNKS):
        chunk = tiles_s.index(first + c)
        chunk = chunk.reinterpret(source.dtype, [1, ROWS, COLUMNS], source.layout)
        tma.async_load(source, [b, row, column + c * COLUMNS], full, chunk)
