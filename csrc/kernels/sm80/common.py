"""What the kernels of mma.sync and cp.async share: layouts, tiles in shared memory, copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2


@gluon.constexpr_function
def plain(n):
    while hasattr(n, "value"):
        n = n.value
    return int(n)


@gluon.constexpr_function
def accumulator(warps, warps_n=1):
    """Warps side by side along rows, `warps_n` of them along columns."""
    n = plain(warps_n)
    return gl.NVMMADistributedLayout([2, 0], [plain(warps) // n, n], [16, 8])


@gluon.constexpr_function
def copy_layout(columns, warps):
    """16 bytes a thread, at most 128 bytes of a row together."""
    lanes = min(plain(columns) // 8, 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [plain(warps), 1], [1, 0])


@gluon.constexpr_function
def swizzled(columns):
    """Rows of 64 bytes or of multiples of 128, in which matrices of 8 x 8 are read without bank
    conflicts."""
    narrow = plain(columns) < 64
    return gl.SwizzledSharedLayout(8, 2 if narrow else 1, 4 if narrow else 8, [1, 0])


@gluon.jit
def tile_offsets(row_stride, ROWS: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """Of ROWS rows, `row_stride` elements apart."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    return r[:, None] * row_stride + c[None, :]


@gluon.constexpr_function
def chunk_of(dim):
    """Columns of a tile in shared memory: a power of two, so that 192 is three tiles of 64."""
    return plain(dim) & -plain(dim)


@gluon.constexpr_function
def chunks_of(dim):
    return plain(dim) // (plain(dim) & -plain(dim))


@gluon.jit
def copy_chunks(shared, at, base, offsets, there, DIM: gl.constexpr):
    """Start copying the at-th tile by chunks of columns; rows that are not `there` (ROWS, 1) become
    0 and are not read."""
    CHUNKS: gl.constexpr = chunks_of(DIM)
    for c in gl.static_range(CHUNKS):
        async_copy.async_load(
            shared.index(at * CHUNKS + c), base + c * chunk_of(DIM) + offsets, there
        )


@gluon.jit
def zeros(ROWS: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """A sum of DIM columns: a tuple of chunks."""
    sums = ()
    for _c in gl.static_range(chunks_of(DIM)):
        sums = sums + (gl.zeros([ROWS, chunk_of(DIM)], gl.float32, layout),)  # noqa: RUF005
    return sums


@gluon.jit
def columns_of_tile(base, row_stride, rows, ROWS: gl.constexpr, DIM: gl.constexpr, layout):
    """A tile of global memory in registers: left operands of 16 columns each of a product in
    `layout`. Rows from the `rows`-th on become 0 and are not read."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    offsets = tile_offsets(row_stride, ROWS, 16, operand)
    there = (gl.arange(0, ROWS, gl.SliceLayout(1, operand)) < rows)[:, None]
    columns = ()
    for n in gl.static_range(DIM // 16):
        x = gl.load(base + n * 16 + offsets, mask=there, other=0.0)
        columns = columns + (x,)  # noqa: RUF005
    return columns


@gluon.jit
def times_transposed(left, right_s, at, acc, DIM: gl.constexpr):
    """acc + left right^T, in chunks of their DIM columns; the right one is the at-th of the tiles
    in shared memory, the left one a tile in shared memory or of columns_of_tile. 16 columns a step:
    few registers."""
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
    """sums + left right of two tiles in shared memory, the right one the at-th in chunks of its DIM
    columns. 16 of N common columns a step."""
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
    """An accumulator as a tuple of tiles of N columns. No register moves."""
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
    """sums + left right, of an accumulator in 16 bits and a tile in chunks of its DIM columns. 16
    of the common columns a step: the compiler would load all of a step at once, and move registers
    to make room."""
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
    more = ()
    for c in gl.static_range(chunks_of(DIM)):
        more = more + (sums[c] * factor,)  # noqa: RUF005
    return more
