"""Keys that depend on the data, for `packax.integrations.maxtext`: MoBA and indexers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # what an additive mask of MaxText's holds


def checked_indexer(mask: Any, shape: tuple[int, ...]) -> jax.Array:
    mask = jnp.asarray(mask)
    floating = jnp.issubdtype(mask.dtype, jnp.floating)
    if not floating or mask.shape not in (shape, (1, *shape[1:])):
        raise ValueError(
            f"indexer_mask must be floating point of shape {shape}, but is {mask.dtype} of shape "
            f"{mask.shape}"
        )
    return mask


def indexed(mask: Any) -> jax.Array:
    """An indexer's additive mask, 0 for what it keeps, as booleans."""
    return jnp.asarray(mask, jnp.float32) >= MASKED / 2


def moba(query: jax.Array, key: jax.Array, before: int, size: int, count: int) -> jax.Array:
    """The chunks of `size` keys that MoBA's gate leaves each row (arXiv 2502.13189): (B, H, Sq,
    chunks).

    Each row of each head attends the chunk that it lies in, and of the chunks before it the
    `count` - 1 whose mean key has the largest product with the query. `before`: the place of the
    first row. That a row attends no later key of its own chunk is left to the mask.
    """
    batch, rows, heads, dim = query.shape
    keys, kv_heads = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(
            f"the heads of query must be a multiple of those of key, but there are {heads} and "
            f"{kv_heads}"
        )
    chunks = math.ceil(keys / size)
    padded = jnp.pad(key.astype(jnp.float32), ((0, 0), (0, chunks * size - keys), (0, 0), (0, 0)))
    sums = padded.reshape(batch, chunks, size, kv_heads, dim).sum(2)
    held = jnp.minimum(size, keys - size * jnp.arange(chunks, dtype=jnp.int32))
    means = sums / held[:, None, None]
    grouped = query.astype(jnp.float32).reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    gate = jnp.einsum("btkgd,bnkd->bkgtn", grouped, means, precision="highest")
    own = (before + jnp.arange(rows, dtype=jnp.int32))[:, None] // size
    chunk = jnp.arange(chunks, dtype=jnp.int32)
    gate = jnp.where(chunk < own, gate, -jnp.inf)
    gate = jax.lax.stop_gradient(jnp.where(chunk == own, jnp.inf, gate))
    _, chosen = jax.lax.top_k(gate, min(count, chunks))
    attended = jax.nn.one_hot(chosen, chunks, dtype=bool).any(-2)
    return attended.reshape(batch, heads, rows, chunks)
