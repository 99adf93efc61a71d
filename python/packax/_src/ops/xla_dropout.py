"""Which probabilities dropout keeps, in jax.numpy: the bits of csrc/kernels/portable/dropout.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from packax._src.core.shapes import ceil_div, fill_up
from packax._src.ops.xla_tiles import Tiles, at, batch_row, div, first_key, rem

_MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


def philox(counters: Any, keys: Any) -> list[jax.Array]:
    """Philox4x32-10: four words of uint32 for four counters and two keys, arrays of uint32."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return [c0, c1, c2, c3]


def _product(x: jax.Array, y: np.uint32) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of a product, without integers of 64 bits."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = x1 * y0 + (x0 * y0 >> half)
    carry = (middle & low) + x0 * y1
    return x1 * y1 + (middle >> half) + (carry >> half), x * y


def kept(
    streams: jax.Array, rows: jax.Array, step: Any, block: Any, threshold: int, tiles: Tiles
) -> jax.Array:
    """(Hkv, group * rows, keys) of a step and a block: whether the element is kept.

    streams: (B, H, 4); rows: (1 or B, Sq), as ops/dropout.py makes them.
    """
    whole = tiles.row_tiles * tiles.rows
    rows = fill_up(rows, 1, whole).reshape(rows.shape[0], tiles.row_tiles, tiles.rows)
    row = at(batch_row(rows, step, tiles.row_tiles), rem(step, tiles.row_tiles))
    words = at(streams, div(step, tiles.row_tiles))[:, :, None, None]  # (H, 4, 1, 1)
    fours = ceil_div(tiles.keys, 4)
    shape = (words.shape[0], tiles.rows, fours)
    four = first_key(block, tiles) // 4 + lax.broadcasted_iota(jnp.int32, shape, 2)
    row, batch, head = (
        jnp.broadcast_to(x.astype(jnp.uint32), shape)
        for x in (row[None, :, None], words[:, 2], words[:, 3])
    )
    made = philox((four.astype(jnp.uint32), row, head, batch), (words[:, 0], words[:, 1]))
    stays = jnp.stack([x >= np.uint32(threshold) for x in made], -1)
    stays = stays.reshape(*shape[:2], 4 * fours)[..., : tiles.keys]
    return stays.reshape(tiles.kv_heads, tiles.group * tiles.rows, tiles.keys)
