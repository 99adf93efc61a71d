"""How attention in jax.numpy cuts its operands into tiles of rows and blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from packax._src.core.shapes import ceil_div, fill_up, is_symbolic

# Tile sizes measured on two cores (float32 and bfloat16, 8/2 heads of 64): with 6 documents in 8k
# tokens 128x128 to 256x256 are level, 512 is half as fast; with 160 documents in 16k tokens 128x128
# leads by 1.2 at least, because a larger tile computes more masked pairs at the edges of documents.
ROWS = 128
KEYS = 128


class Mask(NamedTuple):
    """Row ranges and the operands of the element test, in the order the primitives take them."""

    q_lo: jax.Array  # (Bm, Sq)
    q_hi: jax.Array
    q_ids: jax.Array
    kv_ids: jax.Array  # (Bm, Skv)
    q_pos: jax.Array  # (Bm, Sq), or (Bm, 2, Sq): upper limits, then lower ones
    kv_pos: jax.Array
    map_bits: jax.Array | None = None  # a block mask: (Bp, H or 1, NQ, words), Bp 1 or Bm
    q_entries: jax.Array | None = None  # (Bm, H or 1, ceil(Sq / 128), 2 + ceil(Skv / 64))


class Tiles(NamedTuple):
    """How one call is cut: tile sizes, their numbers, query heads per key head (group)."""

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


def mask_rows(mask, tiles):
    """A function from a step to its rows' lo, hi, ids and limits of positions; rows past Sq are
    empty.
    """
    limits = [mask.q_pos] if mask.q_pos.ndim == 2 else [mask.q_pos[:, 0], mask.q_pos[:, 1]]
    arrays = [mask.q_lo, mask.q_hi, mask.q_ids, *limits]
    arrays = [split(x, tiles.row_tiles, tiles.rows) for x in arrays]

    def rows_of(step):
        batch = step // tiles.row_tiles if mask.q_lo.shape[0] != 1 else 0
        return [x[batch, step % tiles.row_tiles] for x in arrays]

    return rows_of


def mask_keys(mask, tiles):
    """A function from batch row and key block to the keys' indices, ids and positions."""
    arrays = [split(x, tiles.key_blocks, tiles.keys) for x in (mask.kv_ids, mask.kv_pos)]
    index = jnp.arange(tiles.keys, dtype=jnp.int32)

    def keys_of(batch, block):
        batch = batch if mask.q_lo.shape[0] != 1 else 0
        return [block * tiles.keys + index, *(x[batch, block] for x in arrays)]

    return keys_of


def split(x, count, size):
    """(Bm, S) to (Bm, count, size), filled up with zeros."""
    # A mask without ids has the query's ranges in their place: of another length, never read.
    whole = count * size
    missing = whole if is_symbolic(whole - x.shape[1]) else max(whole - x.shape[1], 0)
    x = fill_up(x, 1, x.shape[1] + missing)[:, :whole]
    return x.reshape(x.shape[0], count, size)


def row_tiles(x, tiles):
    """(B, Sq, H, D) to (steps, Hkv, group * rows, D): one contiguous tile per step."""
    depth = x.shape[-1]
    x = fill_up(x, 1, tiles.row_tiles * tiles.rows)
    x = x.reshape(tiles.batch, tiles.row_tiles, tiles.rows, tiles.kv_heads, tiles.group, depth)
    x = x.transpose(0, 1, 3, 4, 2, 5)
    return x.reshape(tiles.batch * tiles.row_tiles, tiles.kv_heads, tiles.group * tiles.rows, depth)


def from_row_tiles(x, tiles, q_len):
    depth = x.shape[-1]
    x = x.reshape(
        tiles.batch, tiles.row_tiles, tiles.kv_heads, tiles.group, tiles.rows, depth
    ).transpose(0, 1, 4, 2, 3, 5)
    rows = tiles.row_tiles * tiles.rows
    return x.reshape(tiles.batch, rows, tiles.kv_heads * tiles.group, depth)[:, :q_len]


def key_blocks(x, tiles):
    """(B, Skv, Hkv, D) to (B * blocks, Hkv, keys, D): one contiguous block per index."""
    x = fill_up(x, 1, tiles.key_blocks * tiles.keys)
    x = x.reshape(tiles.batch * tiles.key_blocks, tiles.keys, tiles.kv_heads, x.shape[-1])
    return x.transpose(0, 2, 1, 3)


def from_key_blocks(x, tiles, like):
    keys = tiles.key_blocks * tiles.keys
    x = x.transpose(0, 2, 1, 3).reshape(tiles.batch, keys, tiles.kv_heads, like.shape[-1])
    return x[:, : like.shape[1]].astype(like.dtype)
