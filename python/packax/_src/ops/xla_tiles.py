"""How attention in jax.numpy cuts its operands into tiles of rows and blocks of keys.

XLA takes long to compile many small fusions. So what a tile or a block reads lies in few arrays,
each indexed by the tile's or the block's number in the whole batch, and is sliced from where it
lies: nothing is transposed beforehand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from packax._src.core.shapes import INT_MAX, ceil_div, fill_up, is_symbolic

# Tile sizes measured on two cores (float32 and bfloat16, 8/2 heads of 64): with 6 documents in 8k
# tokens 128x128 to 256x256 are level, 512 is half as fast; with 160 documents in 16k tokens 128x128
# leads by 1.2 at least, because a larger tile computes more masked pairs at the edges of documents.
ROWS = 128
KEYS = 128


class Mask(NamedTuple):
    """Row ranges and the operands of the segment check, in the order the primitives take them."""

    q_lo: jax.Array  # (Bm, Sq)
    q_hi: jax.Array
    q_ids: jax.Array
    kv_ids: jax.Array  # (Bm, Skv)
    q_pos: jax.Array  # (Bm, Sq), or (Bm, 2, Sq): upper limits, then lower ones
    kv_pos: jax.Array
    block_mask: jax.Array | None = None  # a block mask: (Bp, H or 1, NQ, words), Bp 1 or Bm
    q_block_lists: jax.Array | None = None  # (Bm, H or 1, ceil(Sq / 128), 2 + ceil(Skv / 64))


class Tiles(NamedTuple):
    """How one call is cut: tile sizes, their numbers, query heads per key head (group).

    A step is a tile of a batch row, a block one of its blocks of keys; both are numbered through
    the batch.
    """

    batch: int
    kv_heads: int
    group: int
    rows: int
    row_tiles: int
    keys: int
    key_blocks: int


def tiles_of(query, key) -> Tiles:
    batch, q_len, heads, _ = query.shape
    kv_len, kv_heads = key.shape[1:3]
    rows, keys = (
        size if is_symbolic(length) else min(size, length)
        for size, length in ((ROWS, q_len), (KEYS, kv_len))
    )
    return Tiles(
        batch=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        rows=rows,
        row_tiles=ceil_div(q_len, rows),
        keys=keys,
        key_blocks=ceil_div(kv_len, keys),
    )


def row_integers(mask: Mask, tiles: Tiles, segment_check: int) -> jax.Array:
    """(2 + segment_check, steps, rows, 1): lo, hi, then ids and limits of the segment check.

    Rows past Sq are empty.
    """
    limits = [mask.q_pos] if mask.q_pos.ndim == 2 else [mask.q_pos[:, 0], mask.q_pos[:, 1]]
    arrays = [mask.q_lo, mask.q_hi, mask.q_ids, *limits][: 2 + segment_check]
    return _by_tile(arrays, tiles.batch, tiles.row_tiles, tiles.rows)[..., None]


def key_integers(mask: Mask, tiles: Tiles, segment_check: int) -> jax.Array:
    """(1 to 3, blocks, 1, keys): indices, then ids and positions that the segment check reads."""
    whole = tiles.key_blocks * tiles.keys
    batch = mask.q_lo.shape[0]
    index = lax.broadcasted_iota(jnp.int32, (batch, whole), 1)
    arrays = [index, mask.kv_ids, mask.kv_pos][: 1 + min(segment_check, 2)]
    return _by_tile(arrays, tiles.batch, tiles.key_blocks, tiles.keys)[:, :, None]


def block_ranges(rows: jax.Array, tiles: Tiles) -> jax.Array:
    """(steps, 2): of every tile the first block that its rows (`row_integers`) meet, and the last
    one + 1.
    """
    lo, hi = rows[0, :, :, 0], rows[1, :, :, 0]
    some = lo < hi
    both = jnp.stack([jnp.where(some, ~lo, ~INT_MAX), jnp.where(some, hi, 0)])
    most = lax.reduce_max(both, (2,))
    base = (
        div(lax.iota(jnp.int32, tiles.batch * tiles.row_tiles), tiles.row_tiles) * tiles.key_blocks
    )
    first = div(~most[0], tiles.keys)
    last = div(most[1] + (tiles.keys - 1), tiles.keys)
    return jnp.stack([jnp.minimum(first, last) + base, last + base], axis=1)


def int32(size: Any) -> Any:
    """A size of Python, which would be int64 under x64, or a symbolic one."""
    return jnp.asarray(size).astype(jnp.int32) if is_symbolic(size) else np.int32(size)


def div(number: jax.Array, size: Any) -> jax.Array:
    """number // size, of int32 from 0."""
    return lax.div(number, int32(size))


def rem(number: jax.Array, size: Any) -> jax.Array:
    """number % size, of int32 from 0."""
    return lax.rem(number, int32(size))


def batch_row(x: jax.Array, number: Any, of: Any) -> jax.Array:
    """Of x, (1 or B, ...): the batch row of a step or a block, `of` of which a batch row has."""
    return x[0] if x.shape[0] == 1 else at(x, div(number, of))


def at(x: jax.Array, number: Any, axis: int = 0) -> jax.Array:
    """x[number] along the axis; the number is there."""
    sizes = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return lax.squeeze(lax.dynamic_slice(x, _start(x, number, axis), sizes), (axis,))


def put(x: jax.Array, part: jax.Array, number: Any) -> jax.Array:
    """x with the part at this number."""
    return lax.dynamic_update_slice(x, part[None], _start(x, number))


def _start(x, number, axis=0):
    # Unsigned, so that jax adds no arithmetic for numbers below zero.
    number, zero = number.astype(jnp.uint32), jnp.uint32(0)
    return tuple(number if n == axis else zero for n in range(x.ndim))


def _by_tile(arrays, batch, count, size):
    """(1 or B, S) each to (arrays, B * count, size), filled up with zeros."""
    stacked = jnp.stack([fill_up(x, 1, count * size) for x in arrays])
    stacked = jnp.broadcast_to(stacked, (len(arrays), batch, count * size))
    return stacked.reshape(len(arrays), batch * count, size)


def cut_rows(x: jax.Array, tiles: Tiles) -> jax.Array:
    """(B, Sq, H, D) to (steps, rows, Hkv, group, D), as it lies."""
    x = fill_up(x, 1, tiles.row_tiles * tiles.rows)
    steps = tiles.batch * tiles.row_tiles
    return x.reshape(steps, tiles.rows, tiles.kv_heads, tiles.group, x.shape[-1])


def row_tile(x: jax.Array, step: Any) -> jax.Array:
    """Of `cut_rows`, a step's tile: (Hkv, group * rows, D)."""
    x = at(x, step).transpose(1, 2, 0, 3)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])


def put_row_tile(x: jax.Array, tile: jax.Array, step: Any) -> jax.Array:
    """x of `cut_rows` with this tile of the step."""
    _, rows, kv_heads, group, depth = x.shape
    tile = tile.reshape(kv_heads, group, rows, depth).transpose(2, 0, 1, 3)
    return put(x, tile, step)


def rows_together(x: jax.Array, tiles: Tiles, q_len: Any) -> jax.Array:
    """From `cut_rows` back to (B, Sq, H, D)."""
    rows = tiles.row_tiles * tiles.rows
    return x.reshape(tiles.batch, rows, tiles.kv_heads * tiles.group, x.shape[-1])[:, :q_len]


def cut_keys(x: jax.Array, tiles: Tiles) -> jax.Array:
    """(B, Skv, Hkv, D) to (blocks, keys, Hkv, D), as it lies."""
    x = fill_up(x, 1, tiles.key_blocks * tiles.keys)
    return x.reshape(tiles.batch * tiles.key_blocks, tiles.keys, *x.shape[2:])


def key_block(x: jax.Array, block: Any) -> jax.Array:
    """Of `cut_keys`, a block: (Hkv, keys, D)."""
    return at(x, block).transpose(1, 0, 2)


def add_to_key_block(x: jax.Array, sums: jax.Array, block: Any) -> jax.Array:
    """x of `cut_keys` with sums (Hkv, keys, D) added to a block."""
    start = _start(x, block)
    own = lax.dynamic_slice(x, start, (1, *x.shape[1:]))
    return lax.dynamic_update_slice(x, own + sums.transpose(1, 0, 2)[None], start)


def keys_together(x: jax.Array, tiles: Tiles, like: jax.Array) -> jax.Array:
    """From `cut_keys` back to the shape and dtype of `like`."""
    keys = tiles.key_blocks * tiles.keys
    x = x.reshape(tiles.batch, keys, tiles.kv_heads, like.shape[-1])
    return x[:, : like.shape[1]].astype(like.dtype)
