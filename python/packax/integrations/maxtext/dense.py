"""Dense attention of `packax.integrations.maxtext`, to compare with.

Quadratic in the lengths, in plain XLA: what `AttentionOp(implementation="dense")` asks for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.precision import accumulator
from packax.integrations.maxtext.selection import MASKED


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    allowed: Any,
    cap: Any,
    sinks: Any,
    precision: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse (B, H, Sq), largest logits (B, H)), scale 1; a row that attends nothing gives 0,
    -inf.

    `allowed` is boolean, (B or 1, H or 1, Sq, Skv).
    """
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    wide = accumulator(query.dtype)
    grouped = query.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": wide}
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, key, **options)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    if allowed.shape[1] == 1:
        allowed = allowed[:, :, None]
    else:
        allowed = allowed.reshape(-1, kv_heads, heads // kv_heads, *allowed.shape[2:])
    some = jnp.any(allowed, axis=-1)
    logits = jnp.where(allowed, logits, MASKED)  # finite, so that no gradient is a NaN
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, jnp.asarray(sinks, wide).reshape(kv_heads, -1, 1))
    weights = jnp.where(allowed, jnp.exp(logits - lse[..., None]), 0)
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value, **options)
    lse = jnp.where(some, lse, -jnp.inf).reshape(batch, heads, rows)
    top = jnp.where(jnp.any(some, -1), jnp.max(logits, (-2, -1)), -jnp.inf)
    out = out.reshape(batch, rows, heads, -1).astype(query.dtype)
    return out, lse, jax.lax.stop_gradient(top.reshape(batch, heads))
