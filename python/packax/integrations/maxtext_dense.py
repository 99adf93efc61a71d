"""Dense attention of `packax.integrations.maxtext`, for masks that depend on the data.

Quadratic in the lengths, in plain XLA: what `AttentionOp(implementation="dense")` asks for.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # what an additive mask of MaxText's holds


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, allowed: Any, cap: Any, sinks: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse (B, H, Sq), largest logits (B, H)), scale 1; a row that attends nothing gives 0, -inf.

    `allowed` is boolean, broadcastable to (B, Hkv, H / Hkv, Sq, Skv).
    """
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=wide)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    some = jnp.any(allowed, axis=-1)
    logits = jnp.where(allowed, logits, _MASKED)  # finite, so that no gradient is a NaN
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, jnp.asarray(sinks, wide).reshape(kv_heads, -1, 1))
    weights = jnp.where(allowed, jnp.exp(logits - lse[..., None]), 0)
    out = jnp.einsum(
        "bkgts,bskd->btkgd", weights.astype(value.dtype), value, preferred_element_type=wide
    )
    lse = jnp.where(some, lse, -jnp.inf).reshape(batch, heads, rows)
    top = jnp.where(jnp.any(some, -1), jnp.max(logits, (-2, -1)), -jnp.inf)
    out = out.reshape(batch, rows, heads, -1).astype(query.dtype)
    return out, lse, jax.lax.stop_gradient(top.reshape(batch, heads))


def indexed(mask: Any) -> jax.Array:
    """An indexer's additive mask (B, Sq, Skv), 0 for what it keeps: boolean, (B, 1, 1, Sq, Skv)."""
    return (jnp.asarray(mask) >= _MASKED / 2)[:, None, None]


def moba(query: jax.Array, key: jax.Array, before: int, size: int, count: int) -> jax.Array:
    """The keys that MoBA's gate leaves (arXiv 2502.13189): (B, Hkv, H / Hkv, Sq, Skv), causal.

    Each row of each head attends the chunk of `size` keys that it lies in, and of the chunks before
    the `count` - 1 whose mean key has the largest product with the query.
    """
    batch, rows, heads, dim = query.shape
    keys, kv_heads = key.shape[1:3]
    chunks = math.ceil(keys / size)
    padded = jnp.pad(key.astype(jnp.float32), ((0, 0), (0, chunks * size - keys), (0, 0), (0, 0)))
    sums = padded.reshape(batch, chunks, size, kv_heads, dim).sum(2)
    held = jnp.minimum(size, keys - size * jnp.arange(chunks))
    means = sums / held[:, None, None]
    grouped = query.astype(jnp.float32).reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    gate = jnp.einsum("btkgd,bnkd->bkgtn", grouped, means, precision="highest")
    row = before + jnp.arange(rows)
    own, chunk = row[:, None] // size, jnp.arange(chunks)
    gate = jnp.where(chunk < own, gate, -jnp.inf)
    gate = jax.lax.stop_gradient(jnp.where(chunk == own, jnp.inf, gate))
    _, chosen = jax.lax.top_k(gate, min(count, chunks))
    attended = jax.nn.one_hot(chosen, chunks, dtype=bool).any(-2)
    place = jnp.arange(keys)
    return attended[..., place // size] & (place <= row[:, None])
