"""Products whose tiles and sums are divided into chunks of columns, because the sizes of Gluon's
tiles are powers of two and 192 is not. A tile in shared memory is CHUNKS consecutive entries, and a
sum is a tuple of CHUNKS accumulators. The product of each chunk is one wgmma group to wait for."""

from sm90.common import accumulator
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def count(columns, chunk):
    return (columns + chunk - 1) // chunk


@gluon.constexpr_function
def width(c, columns, chunk):
    """The columns of the c-th chunk. The last chunk may be narrower than the others: 96 columns are
    64 and 32, and products take a slice of the second tile of 64."""
    return min(chunk, columns - c * chunk)


@gluon.jit
def first_columns(tile, N: gl.constexpr):
    return tile.slice(0, N, dim=1) if tile.shape[1] > N else tile


@gluon.jit
def zero_chunk(N: gl.constexpr):
    return gl.zeros([64, N], gl.float32, accumulator(N))


@gluon.jit
def zeros(COLUMNS: gl.constexpr, CHUNK: gl.constexpr):
    sums = ()
    for c in gl.static_range(count(COLUMNS, CHUNK)):
        sums = sums + (zero_chunk(width(c, COLUMNS, CHUNK)),)  # noqa: RUF005
    return sums


@gluon.jit
def left_chunks(tiles_s, at, COLUMNS: gl.constexpr):
    """The at-th tile as the left operand of `scores`."""
    CHUNK: gl.constexpr = tiles_s.shape[2]
    CHUNKS: gl.constexpr = count(COLUMNS, CHUNK)
    left = ()
    for c in gl.static_range(CHUNKS):
        tile = first_columns(tiles_s.index(at * CHUNKS + c), width(c, COLUMNS, CHUNK))
        left = left + (tile,)  # noqa: RUF005
    return left


@gluon.jit
def half_of_keys(k_s, at, W: gl.constexpr, COLUMNS: gl.constexpr):
    """The 64 keys of warp group W in the at-th tile of 128 keys."""
    keys = left_chunks(k_s, at, COLUMNS)
    half = ()
    for c in gl.static_range(len(keys)):
        half = half + (keys[c].slice(W * 64, 64, dim=0),)  # noqa: RUF005
    return half


@gluon.jit
def scores(left, tiles_s, at, zero):
    """Starts left tile^T, where tile is the at-th tile of tiles_s."""
    CHUNKS: gl.constexpr = len(left)
    tile = first_columns(tiles_s.index(at * CHUNKS), left[0].shape[1])
    s = warpgroup_mma(left[0], tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, CHUNKS):
        tile = first_columns(tiles_s.index(at * CHUNKS + c), left[c].shape[1])
        s = warpgroup_mma(left[c], tile.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def add_products(left, tiles_s, at, sums):
    """Starts sums + left tile, where `left` is in registers and tile is the at-th tile of
    tiles_s."""
    CHUNKS: gl.constexpr = len(sums)
    tokens = ()
    for c in gl.static_range(CHUNKS):
        tile = first_columns(tiles_s.index(at * CHUNKS + c), sums[c].shape[1])
        part = gl.convert_layout(left, gl.DotOperandLayout(0, sums[c].type.layout, 2))
        tokens = tokens + (warpgroup_mma(part, tile, sums[c], is_async=True),)  # noqa: RUF005
    return tokens


@gluon.jit
def products(left, right):
    """Starts left right, where `right` is a tuple of chunks."""
    tokens = ()
    for c in gl.static_range(len(right)):
        zero = zero_chunk(right[c].shape[1])
        token = warpgroup_mma(left, right[c], zero, use_acc=False, is_async=True)
        tokens = tokens + (token,)  # noqa: RUF005
    return tokens


@gluon.jit
def wait_products(tokens, pending: gl.constexpr, CHUNKS: gl.constexpr):
    """Waits until at most `pending` wgmma groups are in flight, and returns the sums of
    `add_products`."""
    if CHUNKS == 1:
        sums = (warpgroup_mma_wait(pending, deps=tokens),)
    else:
        sums = warpgroup_mma_wait(pending, deps=tokens)
    return sums
