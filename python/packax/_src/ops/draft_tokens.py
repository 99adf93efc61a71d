"""Attention of new tokens to each other by a small mask, such as the tree of speculative decoding.

Kernels compute the keys before the new tokens. XLA computes the at most 16 x 16 scores of each head
among the new tokens, and merges both by their log-sum-exps.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.sharding import over_auto_axes, typed_axes
from packax._src.core.spec import AttentionSpec, Operands, accumulator
from packax._src.ops.merge import merged
from packax._src.ops.score_mods import add_sinks


def before_drafts(x: Operands) -> Operands:
    """The call over the keys before the new tokens. Its rows attend to all keys up to kv_end."""
    rows = x.query.shape[1]
    return x._replace(kv_end=jnp.maximum(x.kv_end - rows, 0), sinks=None)


def with_drafts(
    spec: AttentionSpec, x: Operands, draft_mask: jax.Array, cached: Any
) -> tuple[jax.Array, jax.Array]:
    """The results of x, whose rows attend to all keys up to kv_end except for new tokens that
    draft_mask, (1 or B, Sq, Sq), excludes. `cached`: the results of `before_drafts`."""
    batch, _, heads, _ = typed_axes(x.query)

    def complete(out: jax.Array, lse: jax.Array, mask: jax.Array, *leaves: Any) -> Any:
        of = Operands.of(x.names, leaves)
        result, top = merged([(out, lse), _among_drafts(spec, of, mask)])
        if of.sinks is not None:
            result, top = add_sinks(result, top, of.sinks)
        return result.astype(of.query.dtype), top

    arrays = (cached[0].astype(cached[1].dtype), cached[1], draft_mask, *x.leaves)
    return over_auto_axes(complete, arrays, (batch, (), heads), (batch, heads))


def _among_drafts(spec: AttentionSpec, x: Operands, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to the new tokens alone, and its log-sum-exp, in the accumulator's dtype. NaN in
    rows that attend to a token beyond the cache or in a page that does not exist."""
    batch, rows, heads, _ = x.query.shape
    size, kv_heads = x.key.shape[1:3]
    einsum = functools.partial(jnp.einsum, precision=spec.precision)
    real = accumulator(x.query.dtype)
    end = x.kv_end.max(1, keepdims=True)  # rows before position 0 attend to nothing
    index = end + jnp.arange(-rows, 0, dtype=jnp.int32)[None]  # (B, Sq), below 0 if there is none
    attends = mask & (index >= 0)[:, None] & (x.kv_end > 0)[:, :, None]
    attends &= index[:, None] >= x.kv_start[:, :, None]
    if x.block_table is None:
        page, place = jnp.arange(batch, dtype=jnp.int32)[:, None], index
        exists = index < size
    else:
        block, place = index // size, index % size
        page = jnp.take_along_axis(x.block_table, block, 1, mode="fill", fill_value=-1)
        exists = (page >= 0) & (page < x.key.shape[0])
    used = (attends.any(1) & exists)[..., None, None]
    page, place = (jnp.where(exists, y, 0) for y in (page, place))

    def new_tokens(cache: jax.Array, scale: jax.Array | None) -> jax.Array:
        found = cache.at[page, place].get(mode="clip").astype(real)
        if scale is not None:
            one = scale.shape[0] == 1
            of_page = scale[None] if one else scale.at[page].get(mode="clip")
            found = found * of_page.astype(real)[..., None]
        return jnp.where(used, found, 0)

    keys, values = new_tokens(x.key, x.key_scale), new_tokens(x.value, x.value_scale)
    attends = attends[:, None, None]
    query = jnp.where(attends.any(-1)[:, 0, 0, :, None, None], x.query, 0).astype(real)
    query = query.reshape(batch, rows, kv_heads, heads // kv_heads, -1)
    s = einsum("bihgd,bjhd->bhgij", query, keys) * spec.scale
    if spec.soft_cap:
        s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
    s = jnp.where(exists[:, None, None, None], s, jnp.nan)
    s = jnp.where(attends, s, -jnp.inf)
    top = s.max(-1)
    shift = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(s - shift[..., None])
    total = p.sum(-1)
    some = total != 0  # True for NaN
    lse = jnp.where(some, shift + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    p = p / jnp.where(some, total, 1)[..., None]
    out = einsum("bhgij,bjhd->bihgd", p, values)
    return out.reshape(batch, rows, heads, -1), lse.reshape(batch, heads, rows)
