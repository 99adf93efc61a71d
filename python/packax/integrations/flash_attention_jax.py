"""The calls of flash-attention-jax 0.3.1, by packax: switching is the import.

    from packax.integrations.flash_attention_jax import flash_attention, causal_flash_attention

Layout (batch, heads, length, dim), scores scaled by 1 / sqrt(dim). Beyond that package: any
lengths, leading dimensions on every call, keys and values of one head (or fewer heads than the
query), head dims of values that differ from the query's, key masks of any shape, and every backend.
Where packax has kernels (bfloat16 and float16 with head dims up to 512, float32 up to 256, all
multiples of 8) they run on CUDA; everything else is blockwise XLA, as that whole package is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src import attention as _attention
from packax._src.core.precision import accumulator
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.intervals import causal, full
from packax._src.ops import ffi
from packax.integrations import jax_nn as dot_product

__all__ = [
    "PRNGKeyGenerator",
    "attention",
    "causal_attention",
    "causal_flash_attention",
    "cosine_sim_attention",
    "cosine_sim_flash_attention",
    "flash_attention",
    "plain_attention",
    "rabe_attention",
    "value_and_grad_difference",
]

COSINE_SIM_SCALE = 10
_EPSILON = 1e-10
_MASKED = -1e10


def flash_attention(q: Any, k: Any, v: Any, key_mask: Any = None) -> jax.Array:
    """Attention of every query row to the keys of `key_mask`, softmax(q @ k^T / sqrt(dim)) @ v.

    Args:
        q: (batch, heads, q_len, dim). Leading dimensions may be any number of batch dimensions and
            the heads: (q_len, dim) and (heads, q_len, dim) too.
        k: (batch, heads, k_len, dim), or one head for all: (batch, 1, k_len, dim) or
            (batch, k_len, dim). Also any number of heads that divides the query's.
        v: as k, (..., k_len, v_dim).
        key_mask: (batch, k_len), boolean or numbers (0 is False): the keys that take part; the
            batch dimensions may be 1 or absent. None: all keys.

    Returns:
        (batch, heads, q_len, v_dim), dtype of q. 0 where a batch row has no key. One array: `out, _
        = flash_attention(...)` would unpack its batch.

    Raises:
        ValueError: shapes or dtypes that are not as above.

    Examples:
        >>> out = flash_attention(q, k, v, key_mask)
    """
    return _run(q, k, v, _key_mask, key_mask)


def causal_flash_attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Causal attention; with q_len != k_len the last row is at the last key.

    Row i attends the keys j <= i + k_len - q_len, and nothing (0) where there is none.

    Args:
        q, k, v: as for `flash_attention`, with any leading dimensions.

    Examples:
        >>> out = causal_flash_attention(q, k, v)
    """
    return _run(q, k, v, _causal)


def cosine_sim_flash_attention(q: Any, k: Any, v: Any, key_mask: Any = None) -> jax.Array:
    """`flash_attention` of normalised queries and keys, scores scaled by 10.

    As in flash-attention-jax, a (length, dim) matrix is divided by the norm of all its elements
    (Frobenius), not each row by its own: for that, normalise the rows and call
    `packax.flash_attention(..., scale=10)`.
    """
    q, k = jnp.asarray(q), jnp.asarray(k)
    return _run(_normalised(q), _normalised(k), v, _key_mask, key_mask, scale=COSINE_SIM_SCALE)


def rabe_attention(
    q: Any, k: Any, v: Any, q_chunk_size: int = 1024, k_chunk_size: int = 4096
) -> jax.Array:
    """Attention of every row to every key (arXiv 2112.05682). The chunk sizes have no effect."""
    return _run(q, k, v, _key_mask, None)


def _run(
    q: Any,
    k: Any,
    v: Any,
    expression: Callable[..., MaskExpression],
    *operands: Any,
    scale: float | None = None,
) -> jax.Array:
    """(*batch, heads, length, dim) to packax's (B, length, heads, dim) and back."""
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    if q.ndim < 2:
        raise ValueError(f"q must have shape (..., length, dim), but has {q.shape}")
    heads = q.shape[-3] if q.ndim > 2 else 1
    batch = q.shape[:-3]
    query = q.reshape(math.prod(batch), heads, *q.shape[-2:]).swapaxes(1, 2)
    key, value = (_with_heads(name, x, batch, q.ndim) for name, x in (("k", k), ("v", v)))
    kv_heads = max(key.shape[2], value.shape[2])
    key, value = (
        jnp.broadcast_to(x, (*x.shape[:2], kv_heads, x.shape[3])) if x.shape[2] == 1 else x
        for x in (key, value)
    )
    mask = expression(query, key, batch, *operands)
    takes = ffi.has_kernels(query, key, value)
    out = _attention.flash_attention(
        query, key, value, mask, scale=scale, implementation=None if takes else "xla"
    )
    return out.swapaxes(1, 2).reshape(*q.shape[:-1], v.shape[-1])


def _with_heads(name: str, x: jax.Array, batch: tuple[int, ...], ndim: int) -> jax.Array:
    if x.ndim == ndim - 1 and ndim > 2:  # one head, and no dimension for it
        x = jnp.expand_dims(x, -3)
    elif x.ndim == ndim == 2:
        x = x[None]
    if x.shape[:-3] != batch or x.ndim != max(ndim, 3):
        raise ValueError(
            f"{name} must have the batch dimensions of q, {batch}, before (heads, length, dim) or "
            f"(length, dim), but has shape {x.shape}"
        )
    return x.reshape(-1, *x.shape[-3:]).swapaxes(1, 2)


def _numbers(key_mask: Any) -> Any:
    """An array; numpy's stays numpy's, since jax would cut numbers of 64 bits to 32."""
    return key_mask if isinstance(key_mask, jax.Array) else np.asarray(key_mask)


def _key_mask(
    query: jax.Array, key: jax.Array, batch: tuple[int, ...], key_mask: Any
) -> MaskExpression:
    if key_mask is None:
        return full()
    mask = jnp.asarray(_numbers(key_mask).astype(bool))
    length = key.shape[1]
    if mask.ndim == 0 or mask.shape[-1] != length or mask.ndim > len(batch) + 1:
        raise ValueError(
            f"key_mask must have shape {(*batch, length)}, (*batch, k_len), but has {mask.shape}"
        )
    try:
        mask = jnp.broadcast_to(mask, (*batch, length))
    except ValueError:
        raise ValueError(
            f"key_mask must have shape {(*batch, length)}, (*batch, k_len), but has {mask.shape}"
        ) from None
    return dot_product.key_mask(mask.reshape(-1, length), query.shape[1])


def _causal(query: jax.Array, key: jax.Array, batch: tuple[int, ...]) -> MaskExpression:
    q_len, k_len = query.shape[1], key.shape[1]
    return causal(k_len - q_len)


def _normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(accumulator(x.dtype))
    norm = jnp.sqrt(jnp.sum(wide * wide, (-2, -1), keepdims=True))
    return (wide / (norm + _EPSILON)).astype(x.dtype)


# --- The plain functions that its users compare with: dense, quadratic in memory.


def attention(q: Any, k: Any, v: Any, key_mask: Any) -> jax.Array:
    """Dense `flash_attention`; a batch row with no key gives the mean of the values."""
    scores = jnp.einsum("...id,...jd->...ij", q * (1 / jnp.sqrt(q.shape[-1])), k)
    return _weighted(scores, _numbers(key_mask)[..., None, None, :].astype(bool), v)


plain_attention = attention


def causal_attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Dense `causal_flash_attention`; a row with no key gives the mean of the values."""
    scores = jnp.einsum("...id,...jd->...ij", q * (1 / jnp.sqrt(q.shape[-1])), k)
    q_len, k_len = scores.shape[-2:]
    return _weighted(scores, jnp.tril(jnp.ones((q_len, k_len), bool), k_len - q_len), v)


def cosine_sim_attention(q: Any, k: Any, v: Any, key_mask: Any) -> jax.Array:
    """Dense `cosine_sim_flash_attention`."""
    q, k = _normalised(jnp.asarray(q)), _normalised(jnp.asarray(k))
    scores = jnp.einsum("...id,...jd->...ij", q, k) * COSINE_SIM_SCALE
    return _weighted(scores, _numbers(key_mask)[..., None, None, :].astype(bool), v)


def _weighted(scores: jax.Array, allowed: jax.Array, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.where(allowed, scores, _MASKED), axis=-1)
    return jnp.einsum("...ij,...jd->...id", weights, v)


def PRNGKeyGenerator(seed: int = 42) -> Any:
    """Random keys, without end."""
    key = jax.random.key(seed)
    while True:
        key, one = jax.random.split(key)
        yield one


def value_and_grad_difference(
    fn1: Callable[..., jax.Array],
    fn2: Callable[..., jax.Array],
    seed: int = 42,
    batch: int = 2,
    heads: int = 4,
    q_seq_len: int = 4096,
    k_seq_len: int = 8192,
    add_key_mask: bool = True,
    dim: int = 512,
) -> tuple[jax.Array, list[jax.Array]]:
    """Largest differences of two attentions on random float32 input: of the sum of the output, and
    of the gradients of q, k and v.
    """
    keys = PRNGKeyGenerator(seed)
    args = [
        jax.random.normal(next(keys), (batch, heads, length, dim))
        for length in (q_seq_len, k_seq_len, k_seq_len)
    ]
    if add_key_mask:
        args.append(jax.random.bernoulli(next(keys), 0.5, (batch, k_seq_len)))
    (out1, grads1), (out2, grads2) = (
        jax.jit(jax.value_and_grad(lambda *x, fn=fn: jnp.sum(fn(*x)), (0, 1, 2)))(*args)
        for fn in (fn1, fn2)
    )
    differences = [jnp.max(jnp.abs(x - y)) for x, y in zip(grads1, grads2, strict=True)]
    return jnp.max(jnp.abs(out1 - out2)), differences
