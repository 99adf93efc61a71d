"""Decoding of `packax.integrations.maxtext`: one row a sequence over MaxText's caches.

Which tokens of a cache are attended is known on the device only, and need be no range (a ring that
went round its end, the blocks that MoBA chose). `packax.decode_attention` takes them as pages of
one
key each: nothing else of a cache is read, and no cache is copied.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax._src.decode import decode_attention


def decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attended: Any,
    most: int,
    *,
    soft_cap: float | None,
    precision: Any,
    implementation: Any,
) -> tuple[jax.Array, jax.Array]:
    """out (B, 1, H, Dv) and lse (B, H, 1), scale 1.

    `attended`: None: every key; (B, S) bool; or (B, H, S), where heads attend other keys. No row of
    it has more than `most` keys.
    """
    batch, _, heads, dim = query.shape
    keys, kv_heads = key.shape[1:3]
    options: dict[str, Any] = {
        "scale": 1.0,
        "soft_cap": soft_cap,
        "precision": precision,
        "implementation": implementation,
    }
    if attended is None:
        lengths = jnp.full(batch, keys, jnp.int32)
        return decode_attention(query, key, value, lengths, return_lse=True, **options)
    table, counts = _pages(attended, min(most, keys))
    first = keys * jnp.arange(batch, dtype=jnp.int32)
    if attended.ndim == 2:
        table = first[:, None] + table
        key, value = (x.reshape(-1, 1, *x.shape[2:]) for x in (key, value))
    else:  # each head is a sequence of its own, over a cache of one head
        head = jnp.arange(heads, dtype=jnp.int32) // (heads // kv_heads)
        table = (first[:, None, None] + table) * kv_heads + head[:, None]
        table, counts = table.reshape(batch * heads, -1), counts.reshape(-1)
        key, value = (x.reshape(-1, 1, 1, x.shape[3]) for x in (key, value))
        query = query.reshape(batch * heads, 1, 1, dim)
    out, lse = decode_attention(
        query, key, value, counts, block_table=table, return_lse=True, **options
    )
    return out.reshape(batch, 1, heads, -1), lse.reshape(batch, heads, 1)


def _pages(attended: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """The places of True in each row, in order, (..., most), and how many there are."""
    place = jnp.arange(attended.shape[-1], dtype=jnp.int32)
    rank = jnp.cumsum(attended, axis=-1, dtype=jnp.int32) - 1
    at = jnp.where(attended, rank, most)

    def scatter(at: jax.Array) -> jax.Array:
        return jnp.zeros(most, jnp.int32).at[at].set(place, mode="drop")

    rows = jax.vmap(scatter)(at.reshape(-1, at.shape[-1]))
    return rows.reshape(*at.shape[:-1], most), rank[..., -1] + 1


def merged(parts: list[tuple[jax.Array, jax.Array]], sinks: Any) -> jax.Array:
    """One softmax over the keys of all parts, and the sink."""
    if len(parts) == 1 and sinks is None:
        return parts[0][0]
    lses = [lse for _, lse in parts]
    if sinks is not None:
        lses.append(jnp.broadcast_to(sinks.astype(lses[0].dtype)[:, None], lses[0].shape))
    total = jax.scipy.special.logsumexp(jnp.stack(lses), axis=0)
    total = jnp.where(jnp.isneginf(total), 0, total)  # nothing attended: every weight is 0
    result = jnp.zeros((), total.dtype)
    for out, lse in parts:
        weight = jnp.exp(lse - total)
        result = result + weight.swapaxes(1, 2)[..., None] * out.astype(lse.dtype)
    return result.astype(parts[0][0].dtype)
