"""packax as the attention function of Flax's MultiHeadAttention, in linen and nnx.

    from packax.integrations.flax import dot_product_attention

    layer = nnx.MultiHeadAttention(..., attention_fn=dot_product_attention)
    # once per step, for all layers; a mask is a pytree, so it passes through scan and remat
    mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    out = layer(x, mask=mask)

Calls without a kernel (sown weights, the einsum classes, a bias or dropout above head dim 256, or
128 in float32) run on Flax's own attention, with one warning: `packax.integrations.fallback`.
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
import numpy as np
from flax import linen, nnx

import packax
from packax.extend import OneForAll, as_array, as_arrays, instead_of_ids
from packax.integrations.fallback import fall_back, why_not, with_or_without_kernels
from packax.integrations.jax_nn import (
    array_mask,
    bias_array,
    dense_mask,
    is_of_keys,
    is_packax,
    mean_where_empty,
)
from packax.masks import AttentionMask, MaskExpression, causal, documents, full

__all__ = ["attention_fn", "dot_product_attention"]

# Flax's functions, saved because this module's function may be assigned over them.
_LINEN, _NNX = linen.dot_product_attention, nnx.dot_product_attention
_OF_NO_RESULT = ("deterministic", "gather_head_groups", "checkpoint_name", "implementation")


def attention_fn(
    mask: AttentionMask | MaskExpression | None = None, /, *operands: Any, **options: Any
) -> Callable[..., jax.Array]:
    """`dot_product_attention` with a fixed mask and options, for `attention_fn=`.

    Args:
        mask: the mask of every call, positional or by name. A mask of keys or an expression that
            the call passes is joined with it; a built mask cannot be joined. Over a decode cache,
            intervals such as `packax.causal()` place the new query at the last valid key of the
            cache. When training, pass the mask to the layer's call instead: a function created in
            each step is compiled in each step.
        options: keyword arguments of `packax.flash_attention`: scale, soft_cap, sinks, bias, ...
            (also its `deterministic`, which here refers to gradients, not dropout).

    Raises:
        ValueError: return_lse or return_max_logits among the options, because a layer takes one
            result.

    Examples:
        >>> layer = nn.MultiHeadAttention(num_heads=8, attention_fn=attention_fn(packax.causal()))
    """
    if operands:
        raise ValueError(
            "attention_fn returns the function that a layer calls, but was itself called with "
            "query, key and value: pass attention_fn=attention_fn(), with parentheses"
        )
    mask = options.pop("mask", mask)
    for name in ("return_lse", "return_max_logits"):
        if name in options:
            raise ValueError(f"{name} is not an option of attention_fn: a layer takes one result")
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
    force_fp32_for_softmax: bool | None = None,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    promote_dtype: Any = None,
    is_causal: bool = False,
    *,
    _mask: AttentionMask | MaskExpression | None = None,
    _options: Mapping[str, Any] = MappingProxyType({}),
) -> jax.Array:
    """An `attention_fn` for `flax.linen` and `flax.nnx` that runs packax's kernels.

    Calls without a kernel run on Flax's function of that name, with memory quadratic in the lengths
    and one `packax.integrations.fallback.FallbackWarning`: on linen's if `module` or an argument
    that only linen has is passed, otherwise on nnx's.

    Args:
        query: (*batch, q_len, heads, dim), any batch dimensions or none.
        key: (*batch, kv_len, kv_heads, dim), heads a multiple of kv_heads.
        value: (*batch, kv_len, kv_heads, v_dim).
        bias: added to the logits, broadcastable to (*batch, heads, q_len, kv_len);
            differentiable.
        mask: a mask from `packax.create_attention_mask` or an expression such as
            `packax.causal()`, whose batch is the product of the batch dimensions; or an array of
            booleans or numbers, broadcastable to (*batch, heads, q_len, kv_len), cheapest if it is
            a mask of keys, (*batch, 1, 1, kv_len), as from Flax's decode cache. Integers need more
            than two axes: with fewer, they may be segment ids.
        dropout_rate, dropout_rng, deterministic: as in Flax, but the same dropout_rng drops
            different weights.
        broadcast_dropout: whether all rows and heads drop the same query-key pairs. Otherwise, each
            drops different pairs.
        dtype: the dtype of the computation and of the result. None: what the operands promote to.
        precision: how float32 products are computed, as in `packax.flash_attention`.
        module: for sowing the attention weights (`sow_weights=True`), on Flax's path.
        force_fp32_for_softmax: packax always does; True and False differ only on Flax's path.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum, promote_dtype: as in
            Flax, on its path.
        is_causal: query i attends to the keys j <= i; allowed with any mask except a built one.

    Returns:
        (*batch, q_len, heads, v_dim). A query that attends to no key gives 0; in Flax, and here
        with a dense mask and no sinks, it gives the mean of all values.

    Raises:
        ValueError: wrong shapes, dtypes or masks.
        NotImplementedError: a call that needs Flax's path, together with options of `attention_fn`
            that change the result, with implementation="cuda" or with PACKAX_FALLBACK=error.

    Examples:
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=8,
        ...     in_features=512,
        ...     decode=False,
        ...     attention_fn=dot_product_attention,
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
        >>> out = layer(x, mask=mask)
    """
    given = {
        "broadcast_dropout": broadcast_dropout,
        "dropout_rng": dropout_rng,
        "dropout_rate": dropout_rate,
        "deterministic": deterministic,
        "dtype": dtype,
        "precision": precision,
        "module": module,
    }
    of_linen = {
        "force_fp32_for_softmax": force_fp32_for_softmax,
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    of_linen = {name: x for name, x in of_linen.items() if x is not None}
    einsums = sorted(name for name in of_linen if name != "force_fp32_for_softmax")
    query, key, value = as_arrays(query=query, key=key, value=value)
    reason = None
    if einsums or promote_dtype is not None:
        reason = " and ".join(einsums) or "promote_dtype"
    elif module is not None:
        reason = "sown weights"
    if reason is None or is_packax(mask) or _mask is not None:
        _check_shapes(query, key, value)
    size = jnp.result_type(query, key, value) if dtype is None else jnp.dtype(dtype)
    sizes = (*query.shape[:-3], *query.shape[-2:-4:-1], *key.shape[-3:-2])
    masks: list[Any] = [
        x if is_packax(x) else _dense_mask(x) for x in (_mask, mask) if x is not None
    ]
    built = [x for x in masks if isinstance(x, AttentionMask)]
    if built and (is_causal or len(masks) > 1):
        raise ValueError(
            "mask is a built mask, so it cannot be joined with is_causal, a mask of attention_fn "
            "or the mask of a decode cache: pass an expression instead"
        )
    if len(masks) > 1 and sizes[-2] == 1 < sizes[-1] and not is_packax(masks[1]):
        shaped = _shaped("mask", masks[1], sizes).astype(bool)
        if is_of_keys(shaped):
            masks = [masks[0] & _row_in_cache(shaped, sizes[-1])]
    rate = 0.0 if deterministic else float(dropout_rate)
    options = {"precision": precision, **_options}
    if reason is None:
        _check_sources(bias, rate, dropout_rng, options)
        q, k, v = (
            x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]).astype(size)
            for x in (query, key, value)
        )
        arrays = [x if is_packax(x) else _shaped("mask", x, sizes).astype(bool) for x in masks]
        added = None if bias is None else _shaped("bias", as_array("bias", bias), sizes)
        dense = any(not is_packax(x) and not is_of_keys(x) for x in arrays)
        chosen = options.get("implementation")
        reason = why_not(q, k, v, bias=added, dropout=rate > 0, implementation=chosen)
        if added is None and not rate:
            options["implementation"] = with_or_without_kernels(
                q, k, v, dense=dense, implementation=chosen
            )
    if reason is not None:
        _check_options(reason, built, _options)
        fall_back(
            "attention of Flax",
            reason,
            "Flax's own attention",
            forbidden=_options.get("implementation") == "cuda",
        )
        masks = [*masks, causal()] if is_causal else masks
        given |= {"bias": bias, "mask": _dense(masks, sizes)}
        given["precision"] = _options.get("precision", precision)
        if of_linen or isinstance(module, linen.Module):
            return _LINEN(query, key, value, **given, **of_linen)
        promotion = {} if promote_dtype is None else {"promote_dtype": promote_dtype}
        return _NNX(query, key, value, **given, **promotion)
    rows, keys = sizes[-2:]
    expressions = [x if is_packax(x) else array_mask(x, rows, keys) for x in arrays]
    if is_causal:
        expressions.append(causal())
    if added is not None:
        options["bias"] = bias_array(added, keys)
    if rate:
        drawn = OneForAll(dropout_rng) if broadcast_dropout else dropout_rng
        options |= {"dropout_rate": rate, "dropout_key": drawn}
    whole: Any = functools.reduce(operator.and_, expressions) if expressions else full()
    means = dense and options.get("sinks") is None  # a sink takes all the weight of an empty row
    out: Any = packax.flash_attention(q, k, v, whole, **options, return_lse=means)
    if means:
        out = mean_where_empty(out[0], out[1], v)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _row_in_cache(mask: jax.Array, keys: int) -> MaskExpression:
    """The mask of the new row over a decode cache: the keys that are True in (B or 1, 1, 1, keys).

    The row is at the position of the last such key.
    """
    allowed = jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], keys))
    index = jax.lax.broadcasted_iota(jnp.int32, allowed.shape, 1)
    place = jnp.max(jnp.where(allowed, index, 0), axis=1, keepdims=True)
    ids = jnp.where(allowed, jnp.int32(0), jnp.int32(packax.PADDING_SEGMENT_ID))
    return documents(jnp.zeros_like(place), kv_segment_ids=ids, positions=place, kv_positions=index)


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} must have shape (*batch, length, heads, dim), not {x.shape}")
    batch = query.shape[:-3]
    for name, x in (("key", key), ("value", value)):
        if x.ndim != query.ndim:
            raise ValueError(
                f"query, key and value must have the same rank, but {name} has shape {x.shape}, "
                f"query {query.shape}"
            )
        if x.shape[:-3] != batch:
            raise ValueError(
                f"{name} must have the batch dims of query, {query.shape}, but has {x.shape}"
            )
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(
            f"key and value lengths must match, but are {key.shape[-3]} and {value.shape[-3]}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key depths must match, but are {query.shape[-1]} and {key.shape[-1]}"
        )


def _check_sources(bias: Any, rate: float, rng: Any, options: Mapping[str, Any]) -> None:
    """Raises if both the layer and attention_fn pass a bias or dropout, or dropout has no key."""
    for name, given in (("bias", bias is not None), ("dropout_rate", bool(rate))):
        if given and options.get(name) is not None:
            raise ValueError(f"{name} is passed to attention_fn and by the layer: pass only one")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be in the range [0, 1), not {rate}")
    if rate and rng is None:
        raise ValueError(
            f"dropout_rng is required if dropout_rate is above 0, here {rate}, and deterministic "
            "is False"
        )


def _check_options(reason: str, built: list[AttentionMask], options: Mapping[str, Any]) -> None:
    """Raises if a call on Flax's path has a built mask, or options that change the result."""
    if built:
        raise ValueError(
            f"mask is built for packax's kernels, which do not support {reason}: pass the "
            "expression itself as mask"
        )
    changing = sorted(options.keys() - {*_OF_NO_RESULT, "precision"})
    if changing:
        raise NotImplementedError(
            f"{', '.join(changing)} of attention_fn with {reason}: no kernel supports both, and "
            "Flax's own attention has no such option"
        )


def _dense_mask(mask: Any) -> jax.Array:
    x = as_array("mask", mask)
    if meant := instead_of_ids(x):  # Flax would interpret them as a mask that hides id 0
        raise ValueError(
            f"mask must be boolean, or have more axes than queries and keys, but is {x.dtype} "
            f"{x.shape}{meant}"
        )
    return x


def _shaped(name: str, x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """x as (batch or 1, heads or 1, q_len or 1, kv_len or 1); raises if it cannot broadcast."""
    shape = (1,) * (len(sizes) - x.ndim) + x.shape
    fits = zip(shape, sizes, strict=False)
    if len(shape) != len(sizes) or any(n not in (1, size) for n, size in fits):
        raise ValueError(
            f"{name} must be broadcastable to (*batch, heads, q_len, kv_len), {sizes}, but has "
            f"{x.shape}"
        )
    batch, others = shape[:-3], shape[-3:]
    batch = batch if all(n == 1 for n in batch) else sizes[:-3]
    x = jnp.broadcast_to(x.reshape(shape), (*batch, *others))
    return x.reshape(math.prod(batch), *others)


def _dense(masks: list[Any], sizes: tuple[int, ...]) -> Any:
    """The masks as one dense array for Flax. A single array is returned unchanged."""
    if len(masks) < 2 and not any(map(is_packax, masks)):
        return masks[0] if masks else None
    *batch, _, rows, keys = sizes
    whole: Any = np.True_
    for mask in masks:
        if is_packax(mask):
            mask = dense_mask(mask, rows, keys)
            own = tuple(batch) if mask.shape[0] > 1 else (1,) * len(batch)
            mask = mask.reshape(*own, *mask.shape[1:])
        whole = whole & mask.astype(bool)
    return whole
