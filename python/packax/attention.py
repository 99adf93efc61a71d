"""`flash_attention`: the user's request checked once, defaults, the gradient rule, checkpoints."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from packax.build import AttentionMask, create_attention_mask
from packax.masks import MaskExpression
from packax.primitives import backward_p, forward_p, vary_together

Implementation = Literal["cubin", "xla"]

CHECKPOINT_NAMES = ("packax_out", "packax_lse")
"""The results' names for `jax.checkpoint_policies.save_only_these_names`."""

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_IMPLEMENTATIONS = (None, "cubin", "xla")


@overload
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array: ...
@overload
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention, softmax(scale * query @ key^T where mask) @ value, in O(S) memory.

    The algorithm is FlashAttention-2 (arXiv 2307.08691) over row ranges: blocks of keys that no
    row of a tile attends are never visited, forward or backward. Differentiable in query, key
    and value; softmax and all sums are float32 (float64 for float64 operands).

    Args:
        query: (B, Sq, H, Dqk) bfloat16, float16 or float32 (float64 where jax has it enabled).
        key: (B, Skv, Hkv, Dqk), dtype of query. H must be a multiple of Hkv: query head h reads
            key/value head h // (H / Hkv).
        value: (B, Skv, Hkv, Dv), dtype of query.
        mask: a mask from `create_attention_mask`, built once and used by every layer, or an
            expression such as `causal() & documents(segment_ids)`, built on the spot. Its batch
            is B, or 1 for one mask for all.
        scale: a finite Python or numpy number, of any sign, or 0; None: 1 / sqrt(Dqk).
        return_lse: return also the log-sum-exp (natural logarithm) of each row's scaled scores.
            It is differentiable.
        deterministic: True: bit-identical gradients from run to run; on Hopper the backward then
            uses the portable kernels (slower). False: on Hopper, parts of the gradient of query
            are summed in any order, so it may differ by rounding. The results, the gradients of
            key and value, and all that runs on other GPUs or as XLA are bit-identical either way.
        implementation: None: the CUDA kernels where this is lowered for CUDA, blockwise XLA
            elsewhere; "cubin": the CUDA kernels or an error; "xla": blockwise XLA everywhere.

    Returns:
        out, (B, Sq, H, Dv) in query's dtype, or (out, lse), lse (B, H, Sq) float32 (float64 for
        float64). A row that attends nothing has out 0, lse -inf and gradients 0, and the
        cotangents that come in for it are ignored.

    Raises:
        ValueError: shapes, dtypes, scale, mask or implementation that are not as above.
        NotImplementedError: when lowered for CUDA, no kernel for the dtype or head dims; with
            implementation="cubin", when lowered for another platform.

    Under `jax.checkpoint`, the policy `save_only_these_names("packax_out", "packax_lse")`
    (`packax.CHECKPOINT_NAMES`) keeps the results, so that the backward pass does not run
    attention forward again.

    >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    >>> out = packax.flash_attention(query, key, value, mask)
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check_tensors(query, key, value)
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f'implementation must be None, "cubin" or "xla", but is {implementation!r}'
        )
    for name, flag in (("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(flag, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, but is {flag!r}")
    batch, q_len, _, qk_dim = query.shape
    kv_len = key.shape[1]
    scale = 1 / math.sqrt(qk_dim) if scale is None else _checked_scale(scale)
    if isinstance(mask, MaskExpression):
        mask = create_attention_mask(mask, q_len=q_len, kv_len=kv_len)
    _check_mask(mask, batch, q_len, kv_len)

    query, scale = _with_positive_scale(query, scale)
    query, key, value, *operands = vary_together(query, key, value, *mask.operands())
    static = _Static(
        scale, mask.element_test, bool(return_lse), bool(deterministic), implementation
    )
    out, lse = _attention(static, query, key, value, tuple(operands))
    return (out, lse) if return_lse else out


class _Static(NamedTuple):
    """What the trace fixes."""

    scale: float
    element_test: int
    return_lse: bool
    deterministic: bool
    implementation: Implementation | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, query, key, value, mask):
    return _forward(static, query, key, value, mask)[0]


def _forward(static, query, key, value, mask):
    out, lse = forward_p.bind(
        query,
        key,
        value,
        *mask[:9],
        scale=static.scale,
        element_test=static.element_test,
        implementation=static.implementation,
    )
    # The backward pass reads the named values, so a policy that keeps them spares the kernel.
    out, lse = map(checkpoint_name, (out, lse), CHECKPOINT_NAMES)
    return (out, lse), (query, key, value, mask, out, lse)


def _backward(static, residuals, cotangents):
    query, key, value, mask, out, lse = residuals
    dout, dlse = cotangents
    gradients = backward_p.bind(
        query,
        key,
        value,
        out,
        lse,
        dout,
        dlse if static.return_lse else lse,
        *mask[:8],
        *mask[9:],  # without q_order_192
        scale=static.scale,
        element_test=static.element_test,
        has_dlse=static.return_lse,
        deterministic=static.deterministic,
        implementation=static.implementation,
    )
    return (*gradients, None)


_attention.defvjp(_forward, _backward)


def _check_tensors(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, length, heads, dim), not {x.shape}")
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty, but has shape {x.shape}")
        if str(x.dtype) not in _DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(_DTYPES)}, but is {x.dtype}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must have one dtype, but have "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    for name in ("key", "value"):
        if tensors[name].shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} has batch size {tensors[name].shape[0]}, but query has {query.shape[0]}"
            )
    for axis, what in ((1, "length"), (2, "number of heads")):
        if key.shape[axis] != value.shape[axis]:
            raise ValueError(
                f"value must have the {what} of key, {key.shape[axis]}, but has {value.shape[axis]}"
            )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"the heads of query must be a multiple of those of key and value, but there are "
            f"{query.shape[2]} and {key.shape[2]}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"key must have the head dim of query, {query.shape[3]}, but has {key.shape[3]}"
        )


def _checked_scale(scale: Any) -> float:
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        raise ValueError(
            f"scale must be a Python or numpy number, known when tracing, but is a "
            f"{type(scale).__name__}: to scale by an array, multiply query by it"
        )
    try:
        number = float(scale)
    except OverflowError:  # an integer beyond float64
        number = math.inf
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"scale must be finite in float32, but is {number}")
    return number


def _with_positive_scale(query: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """The kernels take the largest score before they scale it: a sign belongs into the query.

    At scale 0 scores are 0 whatever query holds, and so are the gradients of query and key: those
    of a query of zeros. So they are at a scale that is 0 beside the smallest normal number.
    """
    real = np.float64 if query.dtype == jnp.float64 else np.float32
    if abs(scale) < float(np.finfo(real).tiny):
        return jnp.zeros_like(query), 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def _check_mask(mask: Any, batch: int, q_len: int, kv_len: int) -> None:
    if not isinstance(mask, AttentionMask):
        raise ValueError(
            "mask must come from create_attention_mask, or be an expression such as "
            f"causal() & documents(segment_ids), but is a {type(mask).__name__}"
        )
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"mask was built for {mask.q_len} query rows and {mask.kv_len} keys, but query has "
            f"{q_len} and key {kv_len}"
        )
    shape = jnp.shape(mask.q_lo)
    if len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != q_len:
        raise ValueError(
            f"mask has row ranges of shape {shape}, but query needs ({batch}, {q_len}) or "
            f"(1, {q_len}), one mask for all: was it built for another batch, or cut?"
        )
