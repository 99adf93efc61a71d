"""Converts block masks to the kernels' format: packed bits, and a list of visited blocks per tile.

This happens once per mask, in O(blocks), from the block mask and the bounds of blocks of 64
("The mask format" in the documentation). The lists only say which blocks to visit; the bits
decide about each element.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.spec import BLOCK, ceil_div, fill_up

_WORD = 32


class Subtrees(NamedTuple):
    """Bounds of own and end in blocks of 64, if row i attends to key j only if own[i] <= end[j].

    own_min and own_max, over non-empty rows: (Bm, ceil(Sq / 64)). end_min and end_max, over keys:
    (Bm, ceil(Skv / 64)).
    """

    own_min: jax.Array
    own_max: jax.Array
    end_min: jax.Array
    end_max: jax.Array


def packed(block_mask: jax.Array) -> jax.Array:
    """Packs bool (..., NK) into int32 (..., ceil(NK / 32)): bit n of word w is column 32 w + n."""
    columns = block_mask.shape[-1]
    words = ceil_div(columns, _WORD)
    x = fill_up(block_mask, block_mask.ndim - 1, words * _WORD, False)
    x = x.reshape(*x.shape[:-1], words, _WORD).astype(jnp.uint32)
    bits = jnp.left_shift(x, _as_last_axis(jnp.arange(_WORD, dtype=jnp.uint32), x)).sum(
        -1, dtype=jnp.uint32
    )
    return jax.lax.bitcast_convert_type(bits, jnp.int32)


def bit(block_mask: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The bits of (H, NQ, words) at rows (N,) and columns (M,): (H, N, M). Indices are clamped."""
    columns = columns[None]
    words = block_mask.at[:, rows[:, None], columns // _WORD].get(mode="clip")
    return (words >> columns[None] % _WORD) & 1 != 0


def entries(
    block_mask: jax.Array | None,
    block_size: tuple[int, int],
    q_blocks: jax.Array,
    q_len: Any,
    kv_len: Any,
    subtrees: Subtrees | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The block lists of the tiles of 128 rows, and of the tiles of 128 keys.

    block_mask: (Bp, H, NQ, NK), Bp 1 or Bm. None: one head that attends to all blocks.
    q_blocks: (Bm, 5, ceil(Sq / 64)).

    Returns three arrays. The lists of row tiles, int32 (Bm, H, ceil(Sq / 128), 2 + ceil(Skv / 64)),
    contain blocks of 64 keys. The lists of key tiles, int32 (Bm, H, ceil(Skv / 128), 2 + ceil(Sq /
    64)), contain blocks of 64 rows. The last, bool (Bm, ceil(Sq / 64)), says for each block of rows
    whether a visited tile of 128 x 128 needs the check own[i] <= end[j].
    """
    lo_min, lo_max, hi_min, hi_max, flags = (
        x[:, None, :, None] for x in jnp.unstack(q_blocks, axis=1)
    )
    first = _as_last_axis(BLOCK * jnp.arange(ceil_div(kv_len, BLOCK), dtype=jnp.int32), lo_min)
    overlaps = (lo_min < first + BLOCK) & (first < hi_max)
    # A partial last block of keys is never full, because no row's range reaches its end.
    full = (lo_max <= first) & (first + BLOCK <= hi_min)
    tested = jnp.zeros(q_blocks[:, 0].shape, bool)
    if subtrees is not None:
        own_min, own_max = (x[:, None, :, None] for x in (subtrees.own_min, subtrees.own_max))
        end_min, end_max = (x[:, None, None, :] for x in (subtrees.end_min, subtrees.end_max))
        hull = overlaps
        overlaps &= own_min <= end_max
        full &= own_max <= end_min
        # Computed without the block mask, whose heads may be on other ranks.
        visited = _any_in_tile(_any_in_tile(overlaps, 2), 3)
        tested = (visited & hull & (end_min < own_max)).any((1, 3))
    if block_mask is not None:
        some, every = (
            _pooled(
                _pooled(block_mask, 2, block_size[0], q_len, how), 3, block_size[1], kv_len, how
            )
            for how in (jnp.any, jnp.all)
        )
        overlaps, full = some & overlaps, every & full
    of_rows = _block_list(
        _to_tiles(overlaps, 2, jnp.any), _to_tiles(full | (hi_max == 0), 2, jnp.all)
    )
    # For key tiles, a block with empty rows is not full: these must not add to the keys' sums.
    full &= flags == 0
    of_keys = (_to_tiles(overlaps, 3, jnp.any), _to_tiles(full, 3, jnp.all))
    return of_rows, _block_list(*(x.swapaxes(2, 3) for x in of_keys)), tested


def visited_blocks(lists: jax.Array) -> jax.Array:
    """Whether any head visits each block of 128, (ceil(N / 2),), from a tile's lists (H, 2 + N)."""
    number = lists.shape[1] - 2
    listed = jnp.arange(number, dtype=jnp.int32)[None] < lists[:, :2].sum(
        axis=1, keepdims=True, dtype=jnp.int32
    )
    found = jnp.zeros(number, bool).at[lists[:, 2:]].max(listed)
    return _to_tiles(found, 0, jnp.any)


def _block_list(visited: jax.Array, full: jax.Array) -> jax.Array:
    """Lists: the counts of partial and full blocks, then partial, full and unvisited blocks."""
    number = visited.shape[-1]
    kind = jnp.where(visited, jnp.where(full, 1, 0), 2).astype(jnp.int32)
    index = _as_last_axis(jnp.arange(number, dtype=jnp.int32), kind)
    order = jnp.sort(kind * number + index, axis=-1) % number
    counts = [(kind == n).sum(-1, dtype=jnp.int32, keepdims=True) for n in (0, 1)]
    return jnp.concatenate([*counts, order], axis=-1)


def _pooled(x: jax.Array, axis: int, block: int, length: Any, how: Any) -> jax.Array:
    """Resamples an axis from blocks of size `block` to blocks of 64: any or all of those that
    overlap."""
    return how(jnp.take(x, overlapped(block, length, jnp), axis=axis), axis=axis + 1)


def overlapped(block: int, length: Any, xp: ModuleType) -> Any:
    """(blocks of 64, most): the blocks of size `block` that each block of 64 overlaps; some repeat.
    `xp`: numpy or jax.numpy."""
    first = BLOCK * xp.arange(ceil_div(length, BLOCK), dtype=np.int32)
    last = xp.minimum(first + BLOCK, length) - 1
    most = ceil_div(BLOCK, block) + (BLOCK % block != 0 and block % BLOCK != 0)
    index = (first // block)[:, None] + xp.arange(most, dtype=np.int32)[None]
    return xp.minimum(index, (last // block)[:, None])


def _as_last_axis(x: jax.Array, like: jax.Array) -> jax.Array:
    """x (n,) with leading axes of size 1, for jax_numpy_rank_promotion=raise."""
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


def _to_tiles(x: jax.Array, axis: int, how: Any) -> jax.Array:
    """Resamples an axis from blocks of 64 to tiles of 128, combined by any or all."""
    pairs = ceil_div(x.shape[axis], 2)
    x = fill_up(x, axis, 2 * pairs, how is jnp.all)
    return how(x.reshape(*x.shape[:axis], pairs, 2, *x.shape[axis + 1 :]), axis=axis + 1)


def _any_in_tile(x: jax.Array, axis: int) -> jax.Array:
    """For each block of 64, whether x is true for either block of its tile of 128."""
    pairs = jnp.repeat(_to_tiles(x, axis, jnp.any), 2, axis=axis)
    return jax.lax.slice_in_dim(pairs, 0, x.shape[axis], axis=axis)
