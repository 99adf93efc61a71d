"""Decoding in `packax.integrations.maxtext`: one query row per sequence over MaxText's caches.

The attended tokens of a cache are known only on the device and may not be one range (a ring buffer
that wrapped around, blocks selected by MoBA). They are passed to `packax.decode_attention` as pages
of one key each: only these keys are read, and the cache is not copied.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax import decode_attention, full
from packax.integrations.jax_nn import key_mask
from packax.integrations.maxtext.masks import (
    ACTIVE,
    both,
    chosen,
    indexed,
    interval_of,
    moba_chunks,
    numbers,
)

_LOCAL = ("local_sliding", "chunk")


def one_cache(
    op: Any, query: Any, key: Any, value: Any, ids: Any, indexer: Any, record: bool
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of attention over one cache."""
    key, value = jnp.asarray(key), jnp.asarray(value)
    rows, keys = query.shape[1], key.shape[1]
    before = keys - 1 if rows == 1 else 0  # the row's position in MaxText's masks
    active = None
    if ids is not None:
        active = jnp.asarray(numbers("the segment ids of a cache", ids) == ACTIVE)
        if active.shape not in ((query.shape[0], keys), (1, keys)):
            raise ValueError(
                f"the segment ids of a cache must have shape {(query.shape[0], keys)}, as its "
                f"keys, but have {active.shape}"
            )
    if op.sharding is not None or record or rows != 1:
        expression = full()
        if active is not None:
            expression = key_mask(active, rows)
            if op.attention_type in _LOCAL:
                expression = expression & interval_of(op.attention_type, op.size, before)
        expression = chosen(expression, op.moba, query, key, before, indexer)
        mask = op.built(expression, rows, keys, None)
        return op.attend(query, key, value, mask, None, record)
    place = jnp.arange(keys, dtype=jnp.int32)
    most, attended = keys, active
    if active is not None and op.attention_type in _LOCAL:
        size = op.size
        first = keys - size if op.attention_type == "local_sliding" else before // size * size
        most, attended = min(max(size, 1), keys), active & (place >= first)
    if indexer is not None:
        attended = both(attended, indexed(indexer)[:, 0])
    if op.moba is not None:
        size, count = op.moba
        chunks = moba_chunks(query, key, before, size, count)[:, :, 0]
        most = min(most, size * count)
        attended = both(None if attended is None else attended[:, None], chunks[..., place // size])
    if attended is not None:
        attended = jnp.broadcast_to(attended, (query.shape[0], *attended.shape[1:]))
    return _decode(op, query, key, value, attended, most)


def _decode(
    op: Any, query: jax.Array, key: jax.Array, value: jax.Array, attended: Any, most: int
) -> tuple[jax.Array, jax.Array]:
    """Attention with scale 1: out (B, 1, H, Dv) and lse (B, H, 1).

    attended: bool, (B, S), or (B, H, S) if heads attend to different keys; None: all keys. At most
    `most` keys are True per row.
    """
    batch, _, heads, dim = query.shape
    keys, kv_heads = key.shape[1:3]
    options: dict[str, Any] = {
        "scale": 1.0,
        "soft_cap": op.attn_logits_soft_cap,
        "precision": op.precision,
        "implementation": op.implementation,
    }
    if attended is None:
        lengths = jnp.full(batch, keys, jnp.int32)
        return decode_attention(query, key, value, lengths, return_lse=True, **options)
    table, counts = _pages(attended, min(most, keys))
    first = keys * jnp.arange(batch, dtype=jnp.int32)
    if attended.ndim == 2:
        table = first[:, None] + table
        key, value = (x.reshape(-1, 1, *x.shape[2:]) for x in (key, value))
    else:  # each head is a separate sequence, over a cache of one head
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
    """The indices of True in each row in increasing order, (..., most), and their number."""
    place = jnp.arange(attended.shape[-1], dtype=jnp.int32)
    rank = jnp.cumsum(attended, axis=-1, dtype=jnp.int32) - 1
    at = jnp.where(attended, rank, most)

    def scatter(at: jax.Array) -> jax.Array:
        return jnp.zeros(most, jnp.int32).at[at].set(place, mode="drop")

    rows = jax.vmap(scatter)(at.reshape(-1, at.shape[-1]))
    return rows.reshape(*at.shape[:-1], most), rank[..., -1] + 1
