"""Decoding in jax.numpy, for platforms without kernels, blockwise over the keys.

One loop step reads the next KEYS keys of all sequences, in place: no cache is copied, padded or
gathered as a whole. The online softmax is the one in xla_attention.py. Also attention to a few more
keys after a kernel (`extend`).
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
    capacity = x.key.shape[1] * (1 if x.block_table is None else x.block_table.shape[1])
    size = KEYS if is_symbolic(capacity) else min(KEYS, capacity)
    room = jnp.asarray(capacity).astype(jnp.int32) if is_symbolic(capacity) else capacity

    lo, hi = jnp.maximum(x.kv_start, 0), x.kv_end
    beyond = (lo < hi) & (hi > room)
    some = (lo < hi) & ~beyond
    lo, hi = jnp.where(some, lo, INT_MAX), jnp.where(some, hi, 0)
    rows = _rows(x, some)

    def one_block(block, state):
        # The last block ends with the cache. Keys that the previous block covers are masked.
        first = jnp.minimum(block * size, jnp.maximum(room - size, 0))
        index = first + jnp.arange(size, dtype=jnp.int32)
        j = index[None, None]
        attends = (lo[..., None] <= j) & (j < hi[..., None]) & (j >= block * size)
        return _attend(spec, x, rows, attends, _block(x, first, index), state)

    batch, q_len, kv_heads, group, _ = rows.shape
    shape = (batch, kv_heads, group, q_len)
    start = (
        jnp.zeros((*shape, x.value.shape[3]), rows.dtype),
        jnp.full(shape, -jnp.inf, rows.dtype),
        jnp.zeros(shape, rows.dtype),
    )
    blocks = jnp.where(some.any(), jnp.min(lo) // size, 0), -(-jnp.max(hi) // size)
    out, lse = _results(jax.lax.fori_loop(*blocks, one_block, start), some[:, None, None])
    if x.sinks is not None:
        out, lse = add_sinks(out, lse, x.sinks)
    out = jnp.where(beyond[..., None, None], jnp.nan, out)
    return out.astype(x.query.dtype), jnp.where(beyond[:, None], jnp.nan, lse)


def extend(
    spec: AttentionSpec,
    x: Operands,
    results: tuple[jax.Array, jax.Array],
    index: jax.Array,
    attends: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`results`, (out, lse) of x, with a few more keys of each sequence: those at `index`, (B,
    keys), to which rows attend by `attends`, (B, Sq, keys). Rows that attend to a key beyond the
    cache, or in a page that does not exist, are NaN. Both are in the accumulator's dtype."""
    attends_any = attends.any(-1)
    rows = _rows(x, attends_any)
    batch, q_len, kv_heads, group, _ = rows.shape
    out, lse = (y.astype(rows.dtype) for y in results)
    out = out.reshape(batch, q_len, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
    lse = lse.reshape(batch, kv_heads, group, q_len)
    table = x.block_table
    if table is None:  # a dense cache has a page for each sequence
        table = jnp.arange(batch, dtype=jnp.int32)[:, None]
    index, size = jnp.maximum(index, 0), jnp.asarray(x.key.shape[1]).astype(jnp.int32)
    page = jnp.take_along_axis(table, index // size, 1, mode="fill", fill_value=-1)
    keys = _paged(x, page, index % size)
    state = _attend(spec, x, rows, attends, keys, (out, lse, jnp.ones_like(lse)))
    return _results(state, (lse != -jnp.inf) | attends_any[:, None, None])


def _rows(x, some):
    """The queries, (B, Sq, Hkv, group, D). The content of rows that attend to nothing is ignored,
    and must not overflow. some: (B, Sq), the others."""
    batch, q_len, heads, _ = x.query.shape
    kv_heads = x.key.shape[2]
    rows = jnp.where(some[..., None, None], x.query, 0).astype(accumulator(x.query.dtype))
    return rows.reshape(batch, q_len, kv_heads, heads // kv_heads, -1)


def _attend(spec, x, rows, attends, block, state):
    """The state of the online softmax after some keys. attends: (B, Sq, keys)."""
    acc, row_max, total = state
    keys, values, page = block
    valid_page = None if page is None else (page >= 0) & (page < x.key.shape[0])
    einsum = functools.partial(jnp.einsum, precision=spec.precision)
    # Keys to which no row attends may hold anything, as may the page that is read in place of an
    # invalid one.
    used = attends.any(1) if valid_page is None else attends.any(1) & valid_page
    keys, values = keys.astype(rows.dtype), values.astype(rows.dtype)
    if x.key_scale is not None:
        keys = keys * _scale_of(x.key_scale, page).astype(rows.dtype)
        values = values * _scale_of(x.value_scale, page).astype(rows.dtype)
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


def _results(state, some):
    """out and lse. some: which rows attend to any key, (B, Hkv or 1, group or 1, Sq)."""
    acc, row_max, total = state
    batch, kv_heads, group, q_len, v_dim = acc.shape
    lse = jnp.where(some, row_max + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    out = acc / jnp.where(some, total, 1)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, q_len, kv_heads * group, v_dim)
    return out, lse.reshape(batch, kv_heads * group, q_len)


def _block(x, first, index):
    """Keys and values (B, keys, Hkv, D) at `index`, and their block table entries, (B, keys).

    Entries may be invalid. None: the cache is not paged.
    """
    size = x.key.shape[1]
    if x.block_table is not None:
        return _paged(x, x.block_table[:, index // size], index % size)
    if is_symbolic(size):  # possibly less than a block; the rest is masked
        indices = jnp.minimum(index, jnp.asarray(size).astype(jnp.int32) - 1)
        return x.key[:, indices], x.value[:, indices], None
    keys, values = (
        jax.lax.dynamic_slice_in_dim(y, first, index.shape[0], axis=1) for y in (x.key, x.value)
    )
    return keys, values, None


def _paged(x, page, place):
    """The result of `_block` for these pages, (B, keys), and places in them."""
    at = jnp.where((page >= 0) & (page < x.key.shape[0]), page, 0), place
    return x.key[at], x.value[at], page


def _scale_of(scale, page):
    """A scale (1, Hkv), (B, Hkv) or (pages, Hkv), broadcastable to (B, keys, Hkv, D)."""
    if page is None or scale.shape[0] == 1:
        return scale[:, None, :, None]
    return scale.at[page].get(mode="clip")[..., None]
