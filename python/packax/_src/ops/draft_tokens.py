"""Attention of new tokens to each other by a small mask, such as the tree of speculative decoding.

Kernels compute the keys before the new tokens. XLA adds the at most 16 x 16 scores of each head
among the new tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.sharding import over_auto_axes, typed_axes
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import xla_decode
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
        rows = of.query.shape[1]
        end = of.kv_end.max(1, keepdims=True)  # rows before position 0 attend to nothing
        index = end + jnp.arange(-rows, 0, dtype=jnp.int32)[None]  # below 0 if there is none
        attends = mask & (index >= 0)[:, None] & (of.kv_end > 0)[:, :, None]
        attends &= index[:, None] >= of.kv_start[:, :, None]
        out, lse = xla_decode.extend(spec, of, (out, lse), index, attends)
        if of.sinks is not None:
            out, lse = add_sinks(out, lse, of.sinks)
        return out.astype(of.query.dtype), lse

    return over_auto_axes(
        complete, (*cached, draft_mask, *x.leaves), (batch, (), heads), (batch, heads)
    )
