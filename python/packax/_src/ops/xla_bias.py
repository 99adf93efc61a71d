"""A bias that is an array, and its gradient, by tiles of rows and blocks of keys: in jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from packax._src.core.shapes import fill_up
from packax._src.ops.xla_tiles import Tiles, div, read, rem, sized, write


class BiasTiles:
    """(1 or B, 1 or H, 1 or Sq, Skv) in whole tiles; nothing is expanded over the axes of 1."""

    def __init__(self, bias: jax.Array, tiles: Tiles) -> None:
        self.tiles = tiles
        self.shape = bias.shape
        self.array = self._whole(bias)

    def _whole(self, x: jax.Array) -> jax.Array:
        x = fill_up(x, 3, self.tiles.key_blocks * self.tiles.keys)
        if x.shape[2] == 1:
            return x
        return fill_up(x, 2, self.tiles.row_tiles * self.tiles.rows)

    def _start(self, step: Any, block: Any) -> tuple[Any, ...]:
        tiles, zero = self.tiles, np.int32(0)
        return (
            zero if self.shape[0] == 1 else div(step, tiles.row_tiles),
            zero,
            zero if self.shape[2] == 1 else rem(step, tiles.row_tiles) * sized(tiles.rows),
            rem(block, tiles.key_blocks) * sized(tiles.keys),
        )

    @property
    def _sizes(self) -> tuple[Any, ...]:
        rows = 1 if self.shape[2] == 1 else self.tiles.rows
        return (1, self.shape[1], rows, self.tiles.keys)

    def at(self, step: Any, block: Any, real: Any) -> jax.Array:
        """(Hkv, group * rows, keys), of this dtype."""
        tiles = self.tiles
        tile = read(self.array, self._start(step, block), self._sizes)[0].astype(real)
        heads = (1, 1) if self.shape[1] == 1 else (tiles.kv_heads, tiles.group)
        tile = tile.reshape(*heads, *tile.shape[1:])
        of_heads = (tiles.kv_heads, tiles.group, tiles.rows, tiles.keys)
        tile = jnp.broadcast_to(tile, of_heads)
        return tile.reshape(tiles.kv_heads, tiles.group * tiles.rows, tiles.keys)

    def zeros(self, real: Any) -> jax.Array:
        """Sums of the gradient."""
        return jnp.zeros(self.array.shape, real)

    def add(self, sums: jax.Array, step: Any, block: Any, part: jax.Array) -> jax.Array:
        """sums with the gradients (Hkv, group * rows, keys) of a tile's logits added."""
        tiles = self.tiles
        part = part.reshape(tiles.kv_heads * tiles.group, tiles.rows, tiles.keys)
        axes = tuple(axis for axis in (0, 1) if self.shape[axis + 1] == 1)
        part = lax.reduce_sum(part, axes).reshape(self._sizes) if axes else part[None]
        start = self._start(step, block)
        return write(sums, read(sums, start, self._sizes) + part, start)

    def gradient(self, sums: jax.Array, dtype: Any) -> jax.Array:
        """Of the bias as it came."""
        rows, keys = self.shape[2:]
        return sums[:, :, :rows, :keys].astype(dtype)
