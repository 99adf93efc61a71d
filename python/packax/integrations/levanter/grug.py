"""`attention`: `levanter.grug.attention.attention`, computed by packax on plain arrays."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import packax
from packax.extend import described
from packax.integrations.fallback import fall_back, why_not
from packax.integrations.jax_nn import array_mask, bias_array, mean_where_empty
from packax.masks import AttentionMask, MaskExpression

OURS = (None, "packax", "cuda", "xla")


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = None, *, implementation: str | None = None
) -> jax.Array:
    """`levanter.grug.attention.attention`, computed by packax.

    On mesh axes of type Explicit, the sharding is read from the types of the operands. If the
    sequence of q is sharded, attention runs with context parallelism; the sequence of k and v is
    then unsharded, or sharded over the same axes.

    Args:
        q: (B, Q, Hq, D).
        k, v: (B, K, Hkv, D); Hq a multiple of Hkv.
        mask: Grug's AttentionMask, None, or a dense array (Q, K) or (1 or B, Q, K), boolean
            (True: attended) or of floats (added to the logits). It may also be a packax mask or
            expression, such as one from `build_mask`. Negative segment ids are padding: such tokens
            give 0, as in Levanter's FA4 kernels (its reference lets them attend to each other).
        implementation: None or "packax": packax, with kernels on CUDA and XLA on other platforms.
            "cuda" or "xla": packax with only the kernels, or only XLA. Any other name: Levanter's
            implementation of that name.

    Returns:
        (B, Q, Hq, D), dtype of q.

    Raises:
        ValueError: shapes, windows or ids that do not match.
        NotImplementedError: implementation="cuda", and there is no kernel.

    Examples:
        >>> from levanter.grug.attention import AttentionMask
        >>> mask = AttentionMask.causal().with_segment_ids(segment_ids)
        >>> out = attention(q, k, v, mask)
    """
    if implementation not in OURS:
        return _by_levanter()(q, k, v, mask, implementation=implementation)
    chosen: Any = None if implementation == "packax" else implementation
    if isinstance(mask, (jax.Array, np.ndarray)):
        return _dense(q, k, v, jnp.asarray(mask), chosen)
    if not isinstance(mask, (AttentionMask, MaskExpression)):
        mask = expression_of(mask, q.shape[1])
    return packax.flash_attention(q, k, v, mask, implementation=chosen)


def build_mask(
    mask: Any, q_len: int, kv_len: int | None = None, *, sliding_window: int | None = None
) -> AttentionMask:
    """A packax mask with the meaning of Grug's, to build once per step and pass to every layer.

    If layers in a scan have different windows, build one mask of each kind and stack them with
    `packax.masks.stack_masks`.

    Args:
        mask: Grug's AttentionMask, or None.
        q_len, kv_len: numbers of queries and keys; kv_len None: the same as q_len.
        sliding_window: replaces the window of the mask. If the mask has fa4_bounds, it narrows
            them: a window that they include remains.

    Returns:
        AttentionMask: pass it as the mask of `attention`.

    Raises:
        ValueError: an unsupported mask, such as a dense one, or a window that is not positive.
    """
    expression = expression_of(mask, q_len, sliding_window)
    return packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len or q_len)


def expression_of(mask: Any, q_len: int, sliding_window: int | None = None) -> MaskExpression:
    """The expression with the meaning of Grug's AttentionMask."""
    if not (mask is None or hasattr(mask, "fa4_bounds")):
        dense = isinstance(mask, (jax.Array, np.ndarray))
        raise ValueError(
            f"mask must be Grug's AttentionMask or None, but is {described(mask)}"
            + (": pass a dense mask to `attention`" if dense else "")
        )
    window = sliding_window
    parts: list[MaskExpression] = []
    if mask is not None and mask.fa4_bounds is not None:  # these include the mask's own window
        lower, valid = mask.fa4_bounds
        index = jax.lax.broadcasted_iota(jnp.int32, (1, q_len), 1)
        parts = [packax.masks.ranges(lower, jnp.where(valid, index + 1, 0))]
    elif mask is not None:
        window = mask.sliding_window if sliding_window is None else sliding_window
        parts = [packax.causal()] if mask.is_causal else []
        if mask.segment_ids is not None:
            parts.append(documents_of(*mask.segment_ids))
    if window is not None:
        if window <= 0:
            raise ValueError(f"sliding_window must be positive, but is {window}")
        parts.append(packax.sliding_window(window - 1, None))
    return all_of(parts)


def documents_of(q_ids: jax.Array, kv_ids: jax.Array) -> MaskExpression:
    """documents(...) in which every negative id is padding."""
    kv = None if kv_ids is q_ids else jnp.maximum(kv_ids, packax.PADDING_SEGMENT_ID)
    return packax.documents(jnp.maximum(q_ids, packax.PADDING_SEGMENT_ID), kv_segment_ids=kv)


def all_of(parts: list[MaskExpression]) -> MaskExpression:
    result = parts[0] if parts else packax.full()
    for part in parts[1:]:
        result = result & part
    return result


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, chosen: Any) -> jax.Array:
    """Attention with a dense mask: a boolean one takes one bit per element, floats are a bias."""
    rows, keys = q.shape[1], k.shape[1]
    if mask.ndim not in (2, 3) or mask.shape[-2:] != (rows, keys):
        raise ValueError(
            f"a dense mask must have shape ({rows}, {keys}) or (1 or {q.shape[0]}, {rows}, {keys}),"
            f" but has {mask.shape}"
        )
    whole = mask[None, None] if mask.ndim == 2 else mask[:, None]
    if mask.dtype == jnp.bool_:
        expression = array_mask(whole, rows, keys)
        out, lse = packax.flash_attention(
            q, k, v, expression, return_lse=True, implementation=chosen
        )
        return mean_where_empty(out, lse, v)
    bias = bias_array(whole, keys)
    if reason := why_not(q, k, v, bias=bias):
        forbidden = chosen == "cuda"
        fall_back("Grug's attention", reason, "Levanter's reference", forbidden=forbidden)
        return _by_levanter()(q, k, v, mask, implementation="reference")
    return packax.flash_attention(q, k, v, packax.full(), bias=bias, implementation=chosen)


def _by_levanter() -> Any:
    """Levanter's own `attention`, which `install` replaces."""
    current = importlib.import_module("levanter.grug.attention._core").attention
    return getattr(current, "by_levanter", current)
