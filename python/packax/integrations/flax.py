"""Attention of Flax's MultiHeadAttention, linen and nnx, by packax.

    from packax.integrations.flax import dot_product_attention

    layer = nnx.MultiHeadAttention(..., attention_fn=dot_product_attention)
    mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    out = layer(x, mask=mask)  # once per step for all layers: a pytree, through scan and remat

Flax itself is not imported here: this is the convention by which it calls.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.attention import flash_attention
from packax._src.core.mask import AttentionMask
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.intervals import causal, full
from packax.integrations.jax_nn import key_mask

__all__ = ["attention_fn", "dot_product_attention"]


def attention_fn(
    mask: AttentionMask | MaskExpression | None = None, **options: Any
) -> Callable[..., jax.Array]:
    """`dot_product_attention` with a mask and options of its own, for `attention_fn=`.

    Args:
        mask: holds for every call, beside the mask of the call if that is a mask of keys or an
            expression; a built one stands alone. In a trained model pass the mask to the layer's
            call instead: a function made anew each step is compiled anew each step.
        options: keyword arguments of `packax.flash_attention`: scale, soft_cap, sinks, bias, ...
            (its `deterministic` too, which here means gradients, not dropout).

    Raises:
        ValueError: return_lse or return_max_logits among the options: a layer takes one result.

    >>> layer = nn.MultiHeadAttention(num_heads=8, attention_fn=attention_fn(packax.causal()))
    """
    for name in ("return_lse", "return_max_logits"):
        if name in options:
            raise ValueError(f"{name} is no option of attention_fn: a layer takes one result")
    return functools.partial(dot_product_attention, _mask=mask, _options=options)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    *,
    _mask: AttentionMask | MaskExpression | None = None,
    _options: Mapping[str, Any] = MappingProxyType({}),
) -> jax.Array:
    """What `flax.linen` and `flax.nnx` call as `attention_fn`, by packax's kernels.

    Args:
        query: (*batch, q_len, heads, dim), any batch dimensions or none.
        key: (*batch, kv_len, kv_heads, dim), heads a multiple of kv_heads.
        value: (*batch, kv_len, kv_heads, v_dim).
        bias: must be None.
        mask: a mask from `packax.create_attention_mask` or an expression such as
            `packax.causal()`, whose batch is the product of the batch dimensions; or a mask of
            keys, (*batch, 1, 1, kv_len), boolean or numbers, as Flax's decode cache makes it.
        dropout_rate: must be 0, or deterministic True. broadcast_dropout and dropout_rng then have
            no effect.
        dtype: of the computation and the result; None: what the operands promote to.
        precision: as of `packax.flash_attention`: of products of float32 operands.
        module: must be None: the weights that `sow_weights=True` asks for are never formed.
        force_fp32_for_softmax: always so.
        qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
        is_causal: row i attends the keys j <= i, with any mask but a built one.

    Returns:
        (*batch, q_len, heads, v_dim). A row that attends no key gives 0, where Flax gives the mean
        of all values.

    Raises:
        ValueError: shapes, dtypes or masks that are not as above.
        NotImplementedError: a bias, dropout, a dense mask, sown weights, other einsums; no
            kernel for the dtype or head dim (as `packax.flash_attention`).
    """
    _check_refused(
        bias, dropout_rate, deterministic, module, qk_attn_weights_einsum, attn_weights_value_einsum
    )
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} must have shape (*batch, length, heads, dim), not {x.shape}")
    batch = query.shape[:-3]
    for name, x in (("key", key), ("value", value)):
        if x.shape[:-3] != batch:
            raise ValueError(
                f"{name} must have the batch dimensions of query, {batch}, but has {x.shape[:-3]}"
            )
    dtype = jnp.result_type(query, key, value) if dtype is None else jnp.dtype(dtype)
    q, k, v = (
        x.reshape(math.prod(batch), *x.shape[-3:]).astype(dtype) for x in (query, key, value)
    )
    out: Any = flash_attention(
        q,
        k,
        v,
        _mask_of(mask, _mask, is_causal, batch, query.shape[-3], key.shape[-3]),
        **{"precision": precision, **_options},
    )
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _check_refused(
    bias: Any, dropout_rate: Any, deterministic: Any, module: Any, qk_einsum: Any, wv_einsum: Any
) -> None:
    if bias is not None:
        raise NotImplementedError(
            "bias must be None: a bias for every pair of row and key has no kernel. Flax's own "
            "dot_product_attention adds it, with memory quadratic in the length"
        )
    if dropout_rate and not deterministic:
        raise NotImplementedError(
            f"dropout_rate must be 0 or deterministic True, but they are {dropout_rate} and "
            f"{deterministic}: no kernel drops attention weights"
        )
    if module is not None:
        raise NotImplementedError(
            "sow_weights must be False: attention weights are never formed, so none can be sown"
        )
    for name, einsum in (
        ("qk_attn_weights_einsum", qk_einsum),
        ("attn_weights_value_einsum", wv_einsum),
    ):
        if einsum is not None:
            raise NotImplementedError(f"{name} must be None: the kernels make both products")


def _mask_of(
    mask: Any, fixed: Any, is_causal: bool, batch: tuple[int, ...], rows: int, keys: int
) -> AttentionMask | MaskExpression:
    given = [_checked(x, batch, rows, keys) for x in (fixed, mask) if x is not None]
    built = [x for x in given if isinstance(x, AttentionMask)]
    if built and (is_causal or len(given) > 1):
        raise ValueError(
            "mask is built, so it must say everything: beside it is_causal, a mask of attention_fn "
            "and the mask of a decode cache have no place; pass an expression instead"
        )
    if built:
        return built[0]
    expressions = [x for x in given if isinstance(x, MaskExpression)]
    if is_causal:
        expressions.append(causal())
    return functools.reduce(operator.and_, expressions) if expressions else full()


def _checked(
    mask: Any, batch: tuple[int, ...], rows: int, keys: int
) -> AttentionMask | MaskExpression:
    if isinstance(mask, (AttentionMask, MaskExpression)):
        return mask
    mask = jnp.asarray(mask)
    wanted = (*batch, 1, 1, keys)
    if mask.ndim < 3 or mask.shape[-3:-1] != (1, 1):
        raise NotImplementedError(
            f"mask has shape {mask.shape}: a dense mask for every row and key is no range of "
            f"keys. There are: a mask of keys, {wanted}; a packax expression, such as "
            "packax.causal() & packax.documents(segment_ids); a mask from "
            "packax.create_attention_mask"
        )
    try:
        attended = jnp.broadcast_to(mask.astype(bool), wanted)
    except ValueError:
        raise ValueError(f"mask must be broadcastable to {wanted}, but has {mask.shape}") from None
    return key_mask(attended.reshape(math.prod(batch), keys), rows)
