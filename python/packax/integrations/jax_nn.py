"""`dot_product_attention`: the call of `jax.nn.dot_product_attention`, as row ranges."""

from __future__ import annotations

import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from packax._src.attention import flash_attention
from packax._src.core.integers import as_int32
from packax._src.core.mask import AttentionMask
from packax._src.core.shapes import PADDING_SEGMENT_ID, is_symbolic
from packax._src.masks.documents import documents, ranges
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.intervals import full
from packax._src.ops.primitives import check_implementation

_FAR = 1 << 30  # beyond every row and key, and still int32 when a row's index is added


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskExpression | AttentionMask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["cuda", "xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, on packax's kernels: the import is the whole change.

    What is a range of keys for every row (`is_causal`, lengths, windows, a mask of keys) runs in
    packax, with memory linear in the lengths. What is not (a bias, a dense mask) raises an error
    that names implementation="xla", which is jax.nn's own dense path.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key: (B, S, K, H) or (S, K, H), dtype of query; N a multiple of K.
        value: shape and dtype of key.
        bias: only with implementation="xla" or "cudnn".
        mask: which pairs take part, in one of three forms: a boolean that is the same for all
            heads and rows, shape (B or 1, 1, 1, S); a packax expression such as
            `packax.documents(segment_ids)`, beside which the other arguments still hold; a mask
            from `packax.create_attention_mask`, which then says everything. Any other boolean
            (..., T, S) only with implementation="xla" or "cudnn".
        scale: None: 1 / sqrt(H).
        is_causal: row i attends the keys j <= i, counted from the first row and the first key.
        query_seq_lengths, key_value_seq_lengths: (B,) int32: later rows give 0, later keys do not
            take part.
        local_window_size: (left, right), or one number for both: row i attends the keys
            i - left <= j <= i + right.
        implementation: None: packax (kernels on CUDA, blockwise XLA elsewhere); "cuda": packax's
            kernels or an error; "xla", "cudnn": what jax.nn does under that name.
        return_residual: return also the log-sum-exp.

    Returns:
        The output, shape and dtype of query, or (output, residual): (B, T, N) or (T, N), dtype of
        key, no gradient, as jax.nn gives it (float32 and differentiable:
        `packax.flash_attention(..., return_lse=True)`).

        One result differs from jax.nn's: a row that attends no key gives 0 and residual -inf,
        where jax.nn's XLA path gives the mean of all values (or, past query_seq_lengths, 0), and
        about -2.4e38.

    Raises:
        ValueError: shapes, dtypes or arguments that are not as above.
        NotImplementedError: a bias or a dense mask without implementation="xla"; no kernel for the
            dtype or head dim (as `packax.flash_attention`).

    >>> out = packax.dot_product_attention(query, key, value, is_causal=True)
    """
    check_implementation(implementation, ("cuda", "xla", "cudnn"), " (these two are jax.nn's)")
    if implementation in ("xla", "cudnn"):
        others: dict[str, Any] = {"implementation": implementation}
        if return_residual:
            others["return_residual"] = True
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            _dense(mask, query, key),
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            **others,
        )
    shape = jnp.shape(query)
    query, key, value = (
        _batched(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    if value.shape != key.shape:
        raise ValueError(f"value must have the shape of key, {key.shape}, but has {value.shape}")
    if bias is not None:
        raise NotImplementedError(
            "bias must be None: a bias for every pair of row and key has no kernel. "
            'implementation="xla" adds it, as jax.nn does, with memory quadratic in the lengths'
        )
    batch, rows = query.shape[:2]
    limits = _limits(
        batch, rows, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size
    )
    mask = _combined(mask, limits, batch, rows, key.shape[1])
    options: dict[str, Any] = {"scale": scale, "implementation": implementation}
    if not return_residual:
        return flash_attention(query, key, value, mask, **options).reshape(shape)
    out, lse = flash_attention(query, key, value, mask, return_lse=True, **options)
    residual = jax.lax.stop_gradient(lse).swapaxes(1, 2).astype(key.dtype)
    return out.reshape(shape), residual.reshape(shape[:-1])


def key_mask(keys: Any, rows: int) -> MaskExpression:
    """Every row attends the keys that are True, wherever they lie; keys: (B, S) or (S,)."""
    # one document of all that take part
    ids = jnp.where(keys, jnp.int32(0), jnp.int32(PADDING_SEGMENT_ID))
    one = jnp.zeros if is_symbolic(rows) else np.zeros
    return documents(one(rows, np.int32), ids)


def _batched(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{name} must have shape (batch, length, heads, dim) or (length, heads, dim), but has "
            f"{x.shape}"
        )
    return x if x.ndim == 4 else x[None]


def _limits(
    batch: int, rows: int, is_causal: Any, q_lengths: Any, kv_lengths: Any, window: Any
) -> MaskExpression | None:
    """All that is a range: None if there is nothing."""
    if not isinstance(is_causal, (bool, np.bool_)):
        raise ValueError(f"is_causal must be True or False, but is {is_causal!r}")
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
    xp: Any = jnp if is_symbolic(rows) else np
    index = xp.arange(rows, dtype=np.int32)[None]
    lo, hi = xp.zeros_like(index), xp.full_like(index, _FAR)
    if is_causal:
        hi = index + 1
    if window is not None:
        left, right = _window(window)
        lo, hi = xp.maximum(lo, index - left), xp.minimum(hi, index + right + 1)
    if kv_lengths is not None:
        hi = jnp.minimum(hi, kv_lengths)
    if q_lengths is not None:
        hi = jnp.where(index < q_lengths, hi, 0)
    lo, hi = jnp.broadcast_arrays(lo, hi)
    return ranges(lo, hi)


def _window(window: Any) -> tuple[int, int]:
    pair = window if np.ndim(window) else (window, window)
    try:
        left, right = (min(max(operator.index(x), -_FAR), _FAR) for x in pair)
    except (TypeError, ValueError):
        raise ValueError(
            f"local_window_size must be an integer or (left, right), but is {window!r}"
        ) from None
    return left, right


def _combined(
    mask: Any, limits: MaskExpression | None, batch: int, rows: int, keys: int
) -> AttentionMask | MaskExpression:
    if isinstance(mask, AttentionMask):
        if limits is not None:
            raise ValueError(
                "mask is built, so it must say everything: give is_causal, lengths and windows to "
                "create_attention_mask, or pass an expression as mask"
            )
        return mask
    if mask is None:
        return full() if limits is None else limits
    if not isinstance(mask, MaskExpression):
        mask = _from_boolean(mask, batch, rows, keys)
    return mask if limits is None else mask & limits


def _from_boolean(mask: Any, batch: int, rows: int, keys: int) -> MaskExpression:
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_ or mask.ndim > 4:
        raise ValueError(
            "mask must be boolean, of shape (batch, heads, rows, keys), a packax expression or "
            f"a mask from create_attention_mask, but is {mask.dtype} of shape {mask.shape}"
        )
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    if mask.shape[1:3] != (1, 1):
        raise NotImplementedError(
            f"mask has shape {mask.shape}: a boolean for every row and key is no range of keys. "
            f"There are: a mask of keys, ({batch} or 1, 1, 1, {keys}); a packax expression, such "
            "as packax.causal() & packax.documents(segment_ids); a mask from "
            'packax.create_attention_mask. implementation="xla" takes any boolean, as jax.nn does, '
            "with memory quadratic in the lengths"
        )
    if mask.shape[0] not in (1, batch) or mask.shape[3] not in (1, keys):
        raise ValueError(f"mask must have shape ({batch} or 1, 1, 1, {keys}), but has {mask.shape}")
    return key_mask(jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], keys)), rows)


def _dense(mask: Any, query: Any, key: Any) -> Any:
    """A mask as jax.nn takes it."""
    if isinstance(mask, AttentionMask):
        raise ValueError(
            "mask is built for packax's kernels, which jax.nn's implementations do not read: pass "
            "the expression itself, or implementation=None"
        )
    if not isinstance(mask, MaskExpression):
        return mask
    dense = jnp.asarray(mask.as_array(jnp.shape(query)[-3], jnp.shape(key)[-3]))
    return dense if dense.ndim == 4 else dense.reshape(-1, 1, *dense.shape[-2:])
