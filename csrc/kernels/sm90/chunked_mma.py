"""Products whose tiles and sums are divided into chunks of columns, because the sizes of Gluon's
tiles are powers of two and 192 is not. A tile in shared memory is CHUNKS consecutive entries, and a
sum is a tuple of CHUNKS accumulators. The product of each chunk is one wgmma group to wait for."""

from sm90.common import accumulator
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def zeros(layout: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr):
    sums = ()
    for _c in gl.static_range(CHUNKS):
        sums = sums + (gl.zeros([64, COLUMNS], gl.float32, layout),)  # noqa: RUF005
    return sums


@gluon.jit
def left_chunks(tiles_s, at, CHUNKS: gl.constexpr):
    """The at-th tile as the left operand of `scores`."""
    left = ()
    for c in gl.static_range(CHUNKS):
        left = left + (tiles_s.index(at * CHUNKS + c),)  # noqa: RUF005
    return left


@gluon.jit
def half_of_keys(k_s, at, W: gl.constexpr, CHUNKS: gl.constexpr):
    """The 64 keys of warp group W in the at-th tile of 128 keys."""
    half = ()
    for c in gl.static_range(CHUNKS):
        half = half + (k_s.index(at * CHUNKS + c).slice(W * 64, 64, dim=0),)  # noqa: RUF005
    return half


@gluon.jit
def scores(left, tiles_s, at, zero, CHUNKS: gl.constexpr):
    """Starts left tile^T, where tile is the at-th tile of tiles_s."""
    tile_t = tiles_s.index(at * CHUNKS).permute((1, 0))
    s = warpgroup_mma(left[0], tile_t, zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, CHUNKS):
        tile_t = tiles_s.index(at * CHUNKS + c).permute((1, 0))
        s = warpgroup_mma(left[c], tile_t, s, is_async=True)
    return s


@gluon.jit
def add_products(left, tiles_s, at, sums, CHUNKS: gl.constexpr):
    """Starts sums + left tile, where tile is the at-th tile of tiles_s."""
    tokens = ()
    for c in gl.static_range(CHUNKS):
        tile = tiles_s.index(at * CHUNKS + c)
        tokens = tokens + (warpgroup_mma(left, tile, sums[c], is_async=True),)  # noqa: RUF005
    return tokens


@gluon.jit
def products(left, right):
    """Starts left right, where `right` is a tuple of chunks."""
    COLUMNS: gl.constexpr = right[0].shape[1]
    zero = gl.zeros([64, COLUMNS], gl.float32, accumulator(COLUMNS))
    tokens = ()
    for c in gl.static_range(len(right)):
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
