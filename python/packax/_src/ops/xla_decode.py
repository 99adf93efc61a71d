"""Decoding in jax.numpy, for platforms without kernels, blockwise over the keys.

One loop step reads the next KEYS keys of all sequences, in place: no cache is copied, padded or
gathered as a whole. The online softmax is the one in xla_attention.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from packax._src.core.spec import INT_MAX, AttentionSpec, Operands, accumulator, is_symbolic
from packax._src.ops.score_mods import add_sinks

KEYS = 128


def decode(spec: AttentionSpec, x: Operands) -> tuple[jax.Array, jax.Array]:
    """The results of decode_p."""
    query, key, value, block_table = x.query, x.key, x.value, x.block_table
    batch, q_len, heads, _ = query.shape
    kv_heads, v_dim = value.shape[2:]
    group = heads // kv_heads
    capacity = key.shape[1] * (1 if block_table is None else block_table.shape[1])
    size = KEYS if is_symbolic(capacity) else min(KEYS, capacity)
    room = jnp.asarray(capacity).astype(jnp.int32) if is_symbolic(capacity) else capacity
    einsum = functools.partial(jnp.einsum, precision=spec.precision)
    real = accumulator(query.dtype)

    lo, hi = jnp.maximum(x.kv_start, 0), x.kv_end
    beyond = (lo < hi) & (hi > room)
    some = (lo < hi) & ~beyond
    lo, hi = jnp.where(some, lo, INT_MAX), jnp.where(some, hi, 0)
    # The content of rows that attend to nothing is ignored, and must not overflow.
    rows = jnp.where(some[..., None, None], query, 0).astype(real)
    rows = rows.reshape(batch, q_len, kv_heads, group, -1)

    def one_block(block, state):
        acc, row_max, total = state
        # The last block ends with the cache. Keys that the previous block covers are masked.
        first = jnp.minimum(block * size, jnp.maximum(room - size, 0))
        index = first + jnp.arange(size, dtype=jnp.int32)
        keys, values, page = _block(key, value, block_table, first, index)
        valid_page = None if page is None else (page >= 0) & (page < key.shape[0])
        j = index[None, None]
        attends = (lo[..., None] <= j) & (j < hi[..., None]) & (j >= block * size)
        # Keys to which no row attends may hold anything, as may the page that is read in place of
        # an invalid one.
        used = attends.any(1) if valid_page is None else attends.any(1) & valid_page
        keys, values = keys.astype(real), values.astype(real)
        if x.key_scale is not None:
            keys = keys * _scale_of(x.key_scale, page).astype(real)
            values = values * _scale_of(x.value_scale, page).astype(real)
        values = jnp.where(used[..., None, None], values, 0)
        attends = attends[:, None, None]  # (B, 1, 1, Sq, keys)
        s = einsum("bihgd,bjhd->bhgij", rows, keys) * spec.scale
        if spec.soft_cap:
            s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
        if valid_page is not None:
            s = jnp.where(valid_page[:, None, None, None], s, jnp.nan)
        s = jnp.where(attends, s, -jnp.inf)
        new_max = jnp.maximum(row_max, s.max(axis=-1))
        shift = jnp.where(new_max == -jnp.inf, 0, new_max)
        p = jnp.exp(s - shift[..., None])
        keep = jnp.exp(row_max - shift)
        acc = acc * keep[..., None] + einsum("bhgij,bjhd->bhgid", p, values)
        return acc, new_max, total * keep + p.sum(axis=-1)

    shape = (batch, kv_heads, group, q_len)
    start = (
        jnp.zeros((*shape, v_dim), real),
        jnp.full(shape, -jnp.inf, real),
        jnp.zeros(shape, real),
    )
    blocks = jnp.where(some.any(), jnp.min(lo) // size, 0), -(-jnp.max(hi) // size)
    acc, row_max, total = jax.lax.fori_loop(*blocks, one_block, start)

    attends_any = some[:, None, None]
    lse = jnp.where(attends_any, row_max + jnp.log(jnp.where(attends_any, total, 1)), -jnp.inf)
    out = acc / jnp.where(attends_any, total, 1)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, q_len, heads, v_dim)
    lse = lse.reshape(batch, heads, q_len)
    if x.sinks is not None:
        out, lse = add_sinks(out, lse, x.sinks)
    out = jnp.where(beyond[..., None, None], jnp.nan, out)
    return out.astype(query.dtype), jnp.where(beyond[:, None], jnp.nan, lse)


def _block(key, value, block_table, first, index):
    """Keys and values (B, keys, Hkv, D) at `index`, and their block table entries, (B, keys).

    Entries may be invalid. None: the cache is not paged.
    """
    if block_table is None:
        if is_symbolic(key.shape[1]):  # possibly less than a block; the rest is masked
            indices = jnp.minimum(index, jnp.asarray(key.shape[1]).astype(jnp.int32) - 1)
            return key[:, indices], value[:, indices], None
        keys, values = (
            jax.lax.dynamic_slice_in_dim(x, first, index.shape[0], axis=1) for x in (key, value)
        )
        return keys, values, None
    pages, page_size = key.shape[:2]
    page = block_table[:, index // page_size]
    at = jnp.where((page >= 0) & (page < pages), page, 0), index % page_size
    return key[at], value[at], page


def _scale_of(scale, page):
    """A scale (1, Hkv), (B, Hkv) or (pages, Hkv), broadcastable to (B, keys, Hkv, D)."""
    if page is None or scale.shape[0] == 1:
        return scale[:, None, :, None]
    return scale.at[page].get(mode="clip")[..., None]
