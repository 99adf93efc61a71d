"""Layouts, shared memory tiles, copies and products for the kernels with mma.sync and cp.async."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2


@gluon.constexpr_function
def accumulator(warps, warps_n=1):
    """The accumulator layout of mma.sync, with `warps_n` warps along columns and the rest along
    rows."""
    return gl.NVMMADistributedLayout([2, 0], [warps // warps_n, warps_n], [16, 8])


@gluon.constexpr_function
def copy_layout(columns, warps):
    """The layout of copies: 16 bytes per thread, and up to 128 contiguous bytes of a row."""
    lanes = min(columns // 8, 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def swizzled(columns):
    """A swizzled layout for rows of 64 bytes or of multiples of 128, from which 8 x 8 matrices are
    read without bank conflicts."""
    narrow = columns < 64
    return gl.SwizzledSharedLayout(8, 2 if narrow else 1, 4 if narrow else 8, [1, 0])


@gluon.jit
def tile_offsets(row_stride, ROWS: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """Element offsets of a tile of ROWS rows, `row_stride` elements apart."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    return r[:, None] * row_stride + c[None, :]


@gluon.constexpr_function
def chunk_of(dim):
    """Columns of a chunk of a tile: the largest power of two that divides `dim`, so that 192 is
    three chunks of 64."""
    return dim & -dim


@gluon.constexpr_function
def chunks_of(dim):
    """The number of chunks of a tile."""
    return dim // (dim & -dim)


@gluon.jit
def copy_chunks(shared, at, base, offsets, in_bounds, DIM: gl.constexpr):
    """Starts copying a tile, chunk by chunk, to index `at` in shared memory. Rows whose mask
    `in_bounds` (ROWS, 1) is False become 0 and are not read."""
    CHUNKS: gl.constexpr = chunks_of(DIM)
    for c in gl.static_range(CHUNKS):
        async_copy.async_load(
            shared.index(at * CHUNKS + c), base + c * chunk_of(DIM) + offsets, in_bounds
        )


@gluon.jit
def zeros(ROWS: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """A zero accumulator of DIM columns, as a tuple of chunks."""
    sums = ()
    for _c in gl.static_range(chunks_of(DIM)):
        sums = sums + (gl.zeros([ROWS, chunk_of(DIM)], gl.float32, layout),)  # noqa: RUF005
    return sums


@gluon.jit
def columns_of_tile(base, row_stride, rows, ROWS: gl.constexpr, DIM: gl.constexpr, layout):
    """Loads a tile from global memory to registers, as a tuple of left operands of 16 columns each,
    for a product in `layout`. Rows from `rows` on become 0 and are not read."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    offsets = tile_offsets(row_stride, ROWS, 16, operand)
    in_bounds = (gl.arange(0, ROWS, gl.SliceLayout(1, operand)) < rows)[:, None]
    columns = ()
    for n in gl.static_range(DIM // 16):
        x = gl.load(base + n * 16 + offsets, mask=in_bounds, other=0.0)
        columns = columns + (x,)  # noqa: RUF005
    return columns


@gluon.jit
def times_transposed(left, right_s, at, acc, DIM: gl.constexpr):
    """acc + left right^T, summed over DIM columns. `right` is the tile at index `at` in shared
    memory, and `left` a tile in shared memory or from `columns_of_tile`. A step has 16 columns, to
    save registers."""
    layout: gl.constexpr = acc.type.layout
    CHUNK: gl.constexpr = chunk_of(DIM)
    for c in gl.static_range(chunks_of(DIM)):
        right = right_s.index(at * chunks_of(DIM) + c)
        for n in gl.static_range(CHUNK // 16):
            if isinstance(left, gl.tuple):
                x = left[c * (CHUNK // 16) + n]
            else:
                columns = left.index(c).slice(n * 16, 16, dim=1)
                x = columns.load(gl.DotOperandLayout(0, layout, 2))
            y = right.slice(n * 16, 16, dim=1).permute((1, 0))
            acc = mma_v2(x, y.load(gl.DotOperandLayout(1, layout, 2)), acc)
    return acc


@gluon.jit
def times_shared(left_s, right_s, at, sums, N: gl.constexpr, DIM: gl.constexpr):
    """sums + left right, for two tiles in shared memory, of which the right one is at index `at`
    and has DIM columns in chunks. A step has 16 of the N columns of `left`."""
    layout: gl.constexpr = sums[0].type.layout
    for n in gl.static_range(N // 16):
        x = left_s.slice(n * 16, 16, dim=1).load(gl.DotOperandLayout(0, layout, 2))
        more = ()
        for c in gl.static_range(chunks_of(DIM)):
            right = right_s.index(at * chunks_of(DIM) + c).slice(n * 16, 16, dim=0)
            y = right.load(gl.DotOperandLayout(1, layout, 2))
            more = more + (mma_v2(x, y, sums[c]),)  # noqa: RUF005
        sums = more
    return sums


@gluon.jit
def columns_of(x, N: gl.constexpr):
    """Splits an accumulator into a tuple of tiles of N columns, without moving data between
    registers."""
    columns = (x,)
    if x.shape[1] > N:
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
        layout: gl.constexpr = x.type.layout
        left = gl.convert_layout(left, layout, assert_trivial=True)
        right = gl.convert_layout(right, layout, assert_trivial=True)
        columns = columns_of(left, N) + columns_of(right, N)
    return columns


@gluon.jit
def added_columns(x, N: gl.constexpr):
    """The sum of an accumulator's tiles of N columns."""
    columns = columns_of(x, N)
    total = columns[0]
    for i in gl.static_range(1, len(columns)):
        total = total + columns[i]
    return total


@gluon.jit
def times(left, right_s, sums, DIM: gl.constexpr):
    """sums + left right, for an accumulator `left` in 16 bits and a tile in shared memory with DIM
    columns in chunks. A step has only 16 columns of `left`, because the compiler loads the operands
    of a whole step at once, and moves registers to make room."""
    layout: gl.constexpr = sums[0].type.layout
    columns = columns_of(left, 16)
    for n in gl.static_range(len(columns)):
        x = gl.convert_layout(columns[n], gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
        more = ()
        for c in gl.static_range(chunks_of(DIM)):
            y = right_s.index(c).slice(n * 16, 16, dim=0).load(gl.DotOperandLayout(1, layout, 2))
            more = more + (mma_v2(x, y, sums[c]),)  # noqa: RUF005
        sums = more
    return sums


@gluon.jit
def scaled(sums, factor, DIM: gl.constexpr):
    """sums * factor, for an accumulator in chunks."""
    more = ()
    for c in gl.static_range(chunks_of(DIM)):
        more = more + (sums[c] * factor,)  # noqa: RUF005
    return more
