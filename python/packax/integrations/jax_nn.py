"""`dot_product_attention` with the signature of `jax.nn.dot_product_attention`."""

from __future__ import annotations

import inspect
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import packax
from packax.extend import (
    accumulator,
    as_array,
    as_int32,
    check_implementation,
    described,
    instead_of_ids,
    is_symbolic,
    jax_nn_attention,
    over_auto_axes,
    typed_axes,
)
from packax.integrations.fallback import fall_back, why_not, with_or_without_kernels
from packax.masks import AttentionMask, MaskExpression, block_sparse, documents, full, ranges

_MASKED = -0.7 * float(np.finfo(np.float32).max)  # jax.nn's logit of a masked pair
_FAR = 1 << 30  # beyond every row and key, but adding a row's index does not overflow int32


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskExpression | AttentionMask | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["cuda", "xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` on packax's kernels: change only the import.

    Masks that are a range of keys for every query (`is_causal`, lengths, windows, a mask of keys)
    take memory linear in the lengths; a dense mask takes one bit per element; a bias and its
    gradient are read and written without expanding them. Calls without a kernel (other dtypes, a
    bias above head dim 256, or 128 in float32) run on jax.nn's own path, with one
    `packax.integrations.fallback.FallbackWarning`; PACKAX_FALLBACK=error in the environment makes
    it an error, PACKAX_FALLBACK=silent hides it. You may assign this function over
    `jax.nn.dot_product_attention`.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key: (B, S, K, H) or (S, K, H), dtype of query; N a multiple of K.
        value: shape and dtype of key.
        bias: added to the logits, broadcastable to (B, N, T, S); differentiable.
        mask: which pairs are attended, in one of three forms: a boolean broadcastable to (B, N, T,
            S), cheapest if it is the same for all heads and rows, (B or 1, 1, 1, S); a packax
            expression such as `packax.documents(segment_ids)`, joined with the other arguments;
            a mask from `packax.create_attention_mask`, instead of all other masking arguments.
        scale: the factor of the scores. None: 1 / sqrt(H).
        is_causal: query i attends to the keys j <= i, counted from the first query and the first
            key.
        query_seq_lengths, key_value_seq_lengths: the lengths of each sequence, (B,) int32: later
            queries give 0, and later keys are not attended.
        local_window_size: (left, right), or one number for both: query i attends to the keys
            i - left <= j <= i + right. Each may be traced, as in a `scan` over layers.
        implementation: what runs. None: packax (kernels on CUDA, blockwise XLA elsewhere) if
            possible; "cuda": packax's kernels or an error; "xla", "cudnn": jax.nn's implementation
            of that name.
        return_residual: also return the log-sum-exp.

    Returns:
        The output, shape and dtype of query, or (output, residual). As in jax.nn, the residual is
        (B, T, N) or (T, N), has the dtype of key and no gradient (for a differentiable one in
        float32 use `packax.flash_attention(..., return_lse=True)`).

        One result differs from jax.nn's: a query that attends to no key gives 0 and residual -inf,
        while jax.nn gives the mean of all values and about -2.4e38, or NaN if a bias is -inf. With
        a boolean mask of another shape than (B or 1, 1, 1, S) it gives the mean, as jax.nn does.

    Raises:
        ValueError: wrong shapes, dtypes or arguments.
        NotImplementedError: there is no kernel, and implementation="cuda" or PACKAX_FALLBACK=error
            forbids the fallback; or return_residual needs jax.nn's path, and jax is 0.7.

    Examples:
        >>> out = packax.dot_product_attention(query, key, value, is_causal=True)
    """
    check_implementation(implementation, ("cuda", "xla", "cudnn"), " (these two are jax.nn's)")
    given: dict[str, Any] = {
        "scale": scale,
        "is_causal": is_causal,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
        "return_residual": return_residual,
    }
    if implementation in ("xla", "cudnn"):
        return _by_jax_nn(query, key, value, bias, mask, implementation, given)
    shape = jnp.shape(query)
    query, key, value = (
        _batched(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    if value.shape != key.shape:
        raise ValueError(f"value must have the shape of key, {key.shape}, but has {value.shape}")
    batch, rows, heads = query.shape[:3]
    sizes = (batch, heads, rows, key.shape[1])
    given["is_causal"] = is_causal = _flag(is_causal)
    mask = mask if mask is None or is_packax(mask) else _boolean(mask, sizes)
    limits = _limits(
        batch, rows, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size
    )
    if bias is not None:
        bias = _bias(bias, sizes)
    reason = why_not(query, key, value, bias=bias, scale=scale)
    if reason is not None:
        fall_back(
            "dot_product_attention",
            reason,
            "jax.nn's own attention",
            forbidden=implementation == "cuda",
        )
        if local_window_size is not None:  # jax.nn takes no arrays outside of a pair
            given["local_window_size"] = _window(local_window_size)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            if given[name] is not None:
                given[name] = jnp.asarray(given[name], jnp.int32)
        out = _by_jax_nn(query, key, value, bias, mask, None, given)
        if not return_residual:
            return out.reshape(shape)
        return out[0].reshape(shape), out[1].reshape(shape[:-1])
    dense = isinstance(mask, jax.Array) and not is_of_keys(mask)
    mask = _combined(mask, limits, rows, key.shape[1])
    if isinstance(scale, bool):
        scale = float(scale)
    if scale is not None and jnp.ndim(scale) == 0 and not isinstance(scale, (int, float)):
        scale = as_array("scale", scale)
        scale = scale if jnp.issubdtype(scale.dtype, jnp.floating) else scale.astype(jnp.float32)
    options: dict[str, Any] = {"scale": scale, "implementation": implementation}
    if bias is not None:
        options["bias"] = bias_array(bias, key.shape[1])
    else:
        options["implementation"] = with_or_without_kernels(
            query, key, value, dense=dense, implementation=implementation
        )
    if not return_residual and not dense:
        return packax.flash_attention(query, key, value, mask, **options).reshape(shape)
    out, lse = packax.flash_attention(query, key, value, mask, return_lse=True, **options)
    if dense:
        out = mean_where_empty(out, lse, value)
        lse = jnp.where(lse == -jnp.inf, _MASKED, lse)
        if query_seq_lengths is not None:
            lengths = jnp.asarray(query_seq_lengths)[:, None]
            inside = jax.lax.broadcasted_iota(lengths.dtype, (1, rows), 1) < lengths
            out = jnp.where(inside[..., None, None], out, 0)
    if not return_residual:
        return out.reshape(shape)
    residual = jax.lax.stop_gradient(lse).swapaxes(1, 2).astype(key.dtype)
    return out.reshape(shape), residual.reshape(shape[:-1])


def is_packax(mask: Any) -> bool:
    return isinstance(mask, (AttentionMask, MaskExpression))


def _by_jax_nn(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, implementation: Any, given: Any
) -> Any:
    """Calls jax.nn's original function, even if its name in jax.nn was reassigned."""
    options = {**given, "implementation": implementation}
    known = "return_residual" in inspect.signature(jax_nn_attention).parameters
    if not known and options.pop("return_residual"):
        raise NotImplementedError(
            f"return_residual=True on jax.nn's path: jax {jax.__version__} does not support it; "
            "use packax.flash_attention(..., return_lse=True)"
        )
    mask = _dense(mask, query, key)
    if mask is None and given["local_window_size"] is not None:
        mask = jnp.ones((1,) * 4, bool)  # jax 0.7 ignores a window without another mask
    return jax_nn_attention(query, key, value, bias, mask, **options)


def key_mask(keys: Any, rows: int) -> MaskExpression:
    """Every row attends to the keys that are True; keys: (B, S) or (S,)."""
    # All attended keys and all rows are one document.
    ids = jnp.where(keys, jnp.int32(0), jnp.int32(packax.PADDING_SEGMENT_ID))
    one = jnp.zeros if is_symbolic(rows) else np.zeros
    return documents(one(rows, np.int32), kv_segment_ids=ids)


def is_of_keys(mask: jax.Array) -> bool:
    """Whether a boolean mask is the same for all heads and rows."""
    return mask.shape[-3:-1] == (1, 1)


def array_mask(mask: jax.Array, rows: Any, keys: Any) -> MaskExpression:
    """The expression for a boolean mask, (B or 1, H or 1, rows or 1, keys or 1)."""
    if is_of_keys(mask):
        return key_mask(jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], keys)), rows)
    if 0 in (mask.shape[0], rows, keys):  # there are no pairs
        return full()
    whole = list(mask.shape)
    for axis, length in ((2, rows), (3, keys)):
        if whole[axis] == 1 and is_symbolic(length):  # a block size cannot be symbolic
            whole[axis] = length
    # Without the barrier, XLA folds everything computed from a constant mask (jnp.tril of ones).
    mask = jax.lax.optimization_barrier(jnp.broadcast_to(mask, whole))
    sizes = (rows if mask.shape[2] == 1 else 1, keys if mask.shape[3] == 1 else 1)
    return block_sparse(mask, sizes)


def dense_mask(expression: MaskExpression, rows: Any, keys: Any) -> jax.Array:
    """The expression as a boolean array, (B or 1, H or 1, rows, keys)."""
    dense = jnp.asarray(expression.as_array(rows, keys))
    return jnp.expand_dims(dense, tuple(range(dense.ndim - 2, 2)))


def mean_where_empty(out: jax.Array, lse: jax.Array, value: jax.Array) -> jax.Array:
    """Replaces rows that attend to no key by the mean of all values, as if all logits were equal.

    out: (B, T, N, H); lse: (B, N, T); value: (B, S, K, H).
    """
    if 0 in (*out.shape, value.shape[1]):
        return out

    def replaced(out: jax.Array, lse: jax.Array, value: jax.Array) -> jax.Array:
        mean = value.mean(1, keepdims=True, dtype=accumulator(value.dtype))
        mean = jnp.repeat(mean, out.shape[2] // value.shape[2], 2)
        empty = jax.lax.stop_gradient(lse).swapaxes(1, 2)[..., None] == -jnp.inf
        return jnp.where(empty, mean.astype(out.dtype), out)

    return over_auto_axes(replaced, (out, lse, value), typed_axes(out))


def bias_array(bias: jax.Array, keys: Any) -> jax.Array:
    """A real bias (B or 1, H or 1, T or 1, S or 1) with the dtype and keys for flash_attention."""
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(jnp.float32)
    return jnp.broadcast_to(bias, (*bias.shape[:3], keys))


def _batched(name: str, x: Any) -> jax.Array:
    x = as_array(name, x)
    if x.ndim > 4:
        raise ValueError(
            f"{name} must have shape (batch, length, heads, dim) or (length, heads, dim), but has "
            f"{x.shape}"
        )
    return x.reshape(*(1,) * (4 - x.ndim), *x.shape)


def _flag(is_causal: Any) -> bool:
    if is_causal is None:
        return False
    try:
        flag = operator.index(is_causal.item() if hasattr(is_causal, "item") else is_causal)
    except (TypeError, ValueError):
        flag = -1
    if flag not in (0, 1):
        raise ValueError(f"is_causal must be True or False, but is {is_causal!r}")
    return bool(flag)


def _limits(
    batch: int, rows: int, is_causal: bool, q_lengths: Any, kv_lengths: Any, window: Any
) -> MaskExpression | None:
    """The intersection of the masking arguments that are ranges of keys; None if there are none."""
    lengths = {"query_seq_lengths": q_lengths, "key_value_seq_lengths": kv_lengths}
    for name, x in lengths.items():
        if x is None:
            continue
        if not isinstance(x, jax.Array):
            x = np.asarray(x)
            if np.issubdtype(x.dtype, np.integer):
                x = as_int32(name, x, ranks=(1,), shapes=f"({batch},)")
        if x.shape != (batch,) or x.dtype != jnp.int32:
            raise ValueError(
                f"{name} must be int32 of shape ({batch},), but is {x.dtype} of shape {x.shape}"
            )
        lengths[name] = jnp.asarray(x)[:, None]
    q_lengths, kv_lengths = lengths.values()
    if not is_causal and window is None and q_lengths is None and kv_lengths is None:
        return None
    left, right = (None, None) if window is None else _window(window)
    traced = isinstance(left, jax.Array) or isinstance(right, jax.Array)
    xp: Any = jnp if traced or is_symbolic(rows) else np
    index = xp.arange(rows, dtype=np.int32)[None]
    lo, hi = xp.zeros_like(index), xp.full_like(index, _FAR)
    if is_causal:
        hi = index + 1
    if left is not None:
        lo, hi = xp.maximum(lo, index - left), xp.minimum(hi, index + right + 1)
    if kv_lengths is not None:
        hi = jnp.minimum(hi, kv_lengths)
    if q_lengths is not None:
        hi = jnp.where(index < q_lengths, hi, 0)
    lo, hi = jnp.broadcast_arrays(lo, hi)
    return ranges(lo, hi)


def _window(window: Any) -> Any:
    """(left, right): Python integers, or int32 scalars for arrays."""
    both = isinstance(window, (tuple, list)) or np.ndim(window)
    pair = window if both else (window, window)
    try:
        if isinstance(window, float):  # jax.nn takes floats only in pairs
            raise TypeError
        left, right = map(_side, pair)
    except (TypeError, ValueError):
        raise ValueError(
            f"local_window_size must be an integer or (left, right), but is {window!r}"
        ) from None
    return left, right


def _side(x: Any) -> Any:
    """The number of keys on one side of a window, rounded down."""
    try:
        return min(max(operator.index(x), -_FAR), _FAR)
    except TypeError:  # traced, or a float
        x = jnp.asarray(x)
    if x.shape != () or not jnp.issubdtype(x.dtype, jnp.number) or jnp.iscomplexobj(x):
        raise ValueError
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.floor(x.astype(accumulator(x.dtype)))
        x = jnp.where(jnp.isnan(x), -_FAR, x)  # NaN: no key is in the window
    elif x.dtype.itemsize < 4:
        x = x.astype(jnp.int32)
    least = 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -_FAR
    return jnp.clip(x, least, _FAR).astype(jnp.int32)


def _combined(
    mask: Any, limits: MaskExpression | None, rows: int, keys: int
) -> AttentionMask | MaskExpression:
    if isinstance(mask, AttentionMask):
        if limits is not None:
            raise ValueError(
                "mask is a built mask, so it cannot be joined with is_causal, lengths and windows: "
                "pass an expression as mask, or build the mask with them"
            )
        return mask
    if mask is None:
        return full() if limits is None else limits
    if not isinstance(mask, MaskExpression):
        mask = array_mask(mask, rows, keys)
    return mask if limits is None else mask & limits


def _boolean(mask: Any, sizes: tuple[int, ...]) -> jax.Array:
    """A boolean mask as (B or 1, N or 1, T or 1, S or 1)."""
    mask = as_array("mask", mask)
    if mask.dtype != jnp.bool_ or mask.ndim > 4:
        raise ValueError(
            "mask must be boolean, of shape (batch, heads, queries, keys), a packax expression or "
            f"a mask from create_attention_mask, but is {mask.dtype} of shape {mask.shape}"
            f"{instead_of_ids(mask)}"
        )
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    _check_broadcast("mask", mask.shape, sizes)
    return mask


def _bias(bias: Any, sizes: tuple[int, ...]) -> jax.Array:
    """The bias as (B or 1, N or 1, T or 1, S or 1)."""
    if is_packax(bias):
        raise ValueError(f"bias is {described(bias)}: pass a mask by its name, as mask=")
    bias = as_array("bias", bias)
    shape = (1,) * (4 - bias.ndim) + bias.shape
    _check_broadcast("bias", shape, sizes)
    return bias.reshape(shape)


def _check_broadcast(name: str, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    if len(shape) != 4 or any(n not in (1, size) for n, size in zip(shape, sizes, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to (batch, heads, queries, keys), {sizes}, but has "
            f"shape {shape}"
        )


def _dense(mask: Any, query: Any, key: Any) -> Any:
    """The mask as an array for jax.nn."""
    if isinstance(mask, AttentionMask):
        raise ValueError(
            "mask is built for packax's kernels, and jax.nn's implementations cannot read it: pass "
            "the expression itself, or implementation=None"
        )
    if not isinstance(mask, MaskExpression):
        return mask
    return dense_mask(mask, jnp.shape(query)[-3], jnp.shape(key)[-3])
