"""The two functions of flash-attention-jax 0.3.1, on packax: change only the import.

    from packax.integrations.flash_attention_jax import flash_attention, causal_flash_attention

The layout is (batch, heads, length, dim), and scores are scaled by 1 / sqrt(dim). Unlike that
package, it supports any lengths, leading dimensions on every call, keys and values of one head (or
fewer heads than the query), head dims of values that differ from the query's, key masks of any
shape, and every backend. Where packax has kernels (bfloat16 and float16 with head dims up to 512,
float32 up to 256, all multiples of 8) they run on CUDA; everything else runs in blockwise XLA, as
the package itself does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import packax
from packax.extend import as_arrays
from packax.integrations import jax_nn as dot_product
from packax.integrations.fallback import with_or_without_kernels
from packax.masks import MaskExpression

__all__ = ["causal_flash_attention", "flash_attention"]


def flash_attention(q: Any, k: Any, v: Any, key_mask: Any = None) -> jax.Array:
    """Attention of every query to the keys of `key_mask`, softmax(q @ k^T / sqrt(dim)) @ v.

    Args:
        q: (batch, heads, q_len, dim), with any number of batch dimensions, or without batch or
            heads: (q_len, dim) and (heads, q_len, dim).
        k: (batch, heads, k_len, dim), or one head for all: (batch, 1, k_len, dim) or
            (batch, k_len, dim). Any number of heads that divides the query's is accepted.
        v: like k, (..., k_len, v_dim).
        key_mask: (batch, k_len), boolean or numbers (0 is False): the keys that are attended; the
            batch dimensions may be 1 or absent. None: all keys.

    Returns:
        (batch, heads, q_len, v_dim), dtype of q. 0 where a query attends to no key. It is one
        array, so do not unpack it as `out, _ = ...`.

    Raises:
        ValueError: wrong shapes or dtypes.

    Examples:
        >>> out = flash_attention(q, k, v, key_mask)
    """
    return _run(q, k, v, functools.partial(_key_mask, key_mask))


def causal_flash_attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Causal attention; if q_len != k_len, the last query is aligned with the last key.

    Query i attends to the keys j <= i + k_len - q_len; if there are none, its output is 0.

    Args:
        q, k, v: as for `flash_attention`, with any leading dimensions.

    Returns:
        (batch, heads, q_len, v_dim), dtype of q.

    Raises:
        ValueError: wrong shapes or dtypes.

    Examples:
        >>> out = causal_flash_attention(q, k, v)
    """
    return _run(q, k, v, lambda batch, q_len, k_len: packax.causal(k_len - q_len))


def _run(q: Any, k: Any, v: Any, expression: Callable[..., MaskExpression]) -> jax.Array:
    """Runs packax's attention, in its layout (B, length, heads, dim), on (*batch, heads, length,
    dim).

    expression: a function from (batch dimensions, q_len, k_len) to the mask.
    """
    q, k, v = as_arrays(q=q, k=k, v=v)
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
    mask = expression(batch, query.shape[1], key.shape[1])
    out = packax.flash_attention(
        query, key, value, mask, implementation=with_or_without_kernels(query, key, value)
    )
    return out.swapaxes(1, 2).reshape(*q.shape[:-1], v.shape[-1])


def _with_heads(name: str, x: jax.Array, batch: tuple[int, ...], ndim: int) -> jax.Array:
    if x.ndim == ndim - 1 and ndim > 2:  # one head for all, without its dimension
        x = jnp.expand_dims(x, -3)
    elif x.ndim == ndim == 2:
        x = x[None]
    if x.shape[:-3] != batch or x.ndim != max(ndim, 3):
        raise ValueError(
            f"{name} must have the batch dimensions of q, {batch}, before (heads, length, dim) or "
            f"(length, dim), but has shape {x.shape}"
        )
    return x.reshape(math.prod(batch), *x.shape[-3:]).swapaxes(1, 2)


def _key_mask(key_mask: Any, batch: tuple[int, ...], q_len: int, k_len: int) -> MaskExpression:
    if key_mask is None:
        return packax.full()
    # Converts numpy arrays in numpy: jax would truncate 64-bit numbers to 32 bits.
    numbers = key_mask if isinstance(key_mask, jax.Array) else np.asarray(key_mask)
    mask = jnp.asarray(numbers.astype(bool))
    shape = (*batch, k_len)
    try:
        whole = jnp.broadcast_to(mask, shape)
    except ValueError:
        whole = None
    if whole is None or mask.shape[-1:] != (k_len,):  # the axis of keys is not broadcast
        raise ValueError(f"key_mask must have shape {shape}, (*batch, k_len), but has {mask.shape}")
    return dot_product.key_mask(whole.reshape(math.prod(batch), k_len), q_len)
