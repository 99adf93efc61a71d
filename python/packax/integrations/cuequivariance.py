"""cuEquivariance's triangle attention on packax's kernels: change only the import.

    from packax.integrations.cuequivariance import triangle_attention

As `cuequivariance_jax.triangle_attention` 0.13, it takes tensors (B, N, H, S, D) and a pair bias
that the N rows of a sample share. `jax.vmap` of it becomes one call, and under `jax.jit` samples
and heads may be sharded without a `shard_map`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import packax
from packax.extend import accumulator, as_array
from packax.integrations.jax_nn import key_mask, mean_where_empty

__all__ = ["triangle_attention"]

_MASKED = -1e9  # cuEquivariance's logit of a masked key


def triangle_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    bias: ArrayLike,
    mask: ArrayLike | None,
    scale: float,
    precision: jax.lax.PrecisionLike = None,
) -> list[jax.Array]:
    """softmax(scale * q k^T + bias where mask) v, for each of N rows of B samples.

    Args:
        q: (B, N, H, Sq, D), bfloat16, float16, float32 or float64.
        k: (B, N, H, Skv, D), dtype of q.
        v: (B, N, H, Skv, Dv), dtype of q.
        bias: (B, 1, H, Sq, Skv) of any float dtype, shared by the N rows of a sample.
            Differentiable, even if it is float32 and q is not.
        mask: bool (B, N, 1, 1, Skv): the keys that the queries of a row attend to. None: all.
        scale: factor of the scores.
        precision: how float32 products are computed, as in `packax.flash_attention`.

    Returns:
        A list: the output, (B, N, H, Sq, Dv) in q's dtype, then the log-sum-exp and the largest
        logit of each query, (B, N, H, Sq, 1) in float32 (float64 for float64). The last two have no
        gradient. Queries of a row without a key attend to all keys equally, as in cuEquivariance.
        The largest logits take a further product of q and k in XLA; in a jitted function that does
        not use them, nothing is computed.

    Raises:
        ValueError: wrong shapes or dtypes.
        NotImplementedError: there is no kernel, as for `packax.flash_attention`.

    Examples:
        >>> q = k = v = jnp.ones((1, 8, 4, 32, 16))  # one sample of 8 rows
        >>> bias, mask = jnp.zeros((1, 1, 4, 32, 32)), jnp.ones((1, 8, 1, 1, 32), bool)
        >>> out, lse, largest = triangle_attention(q, k, v, bias, mask, scale=16**-0.5)
    """
    arrays = {"q": q, "k": k, "v": v, "bias": bias}
    q, k, v, bias = (as_array(name, x) for name, x in arrays.items())
    _check(q, k, v, bias)
    samples, rows, _, q_len, _ = q.shape
    kv_len = k.shape[3]
    keys, expression = None, packax.full()
    if mask is not None:
        keys = as_array("mask", mask)
        if keys.dtype != jnp.bool_ or keys.shape != (samples, rows, 1, 1, kv_len):
            raise ValueError(
                f"mask must be boolean of shape (B, N, 1, 1, Skv), {(samples, rows, 1, 1, kv_len)},"
                f" but is {keys.dtype} of shape {keys.shape}"
            )
        expression = key_mask(keys.reshape(samples * rows, kv_len), q_len)
    query, key, value = (x.reshape(-1, *x.shape[2:]).swapaxes(1, 2) for x in (q, k, v))
    out, lse = packax.flash_attention(
        query, key, value, expression, bias=bias[:, 0], scale=scale, precision=precision,
        return_lse=True,
    )  # fmt: skip
    if keys is not None:
        out = mean_where_empty(out, lse, value)
    out = out.swapaxes(1, 2).reshape(*q.shape[:4], v.shape[4])
    lse = jax.lax.stop_gradient(lse).reshape(*q.shape[:4], 1)
    operands = jax.lax.stop_gradient((q, k, bias))
    return [out, jnp.maximum(lse, _MASKED), _largest_logits(*operands, keys, scale)]


def _check(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 5:
            raise ValueError(
                f"{name} must have shape (B, N, H, length, dim), but has shape {x.shape}"
            )
    if k.shape[:3] != q.shape[:3] or k.shape[4] != q.shape[4] or v.shape[:4] != k.shape[:4]:
        raise ValueError(
            "k must have q's B, N, H and dim, and v k's B, N, H and length, but q, k and v have "
            f"shapes {q.shape}, {k.shape} and {v.shape}"
        )
    expected = (q.shape[0], 1, q.shape[2], q.shape[3], k.shape[3])
    if bias.shape != expected:
        raise ValueError(
            f"bias must have shape (B, 1, H, Sq, Skv), {expected}, but has shape {bias.shape}"
        )


def _largest_logits(
    q: jax.Array, k: jax.Array, bias: jax.Array, keys: jax.Array | None, scale: float
) -> jax.Array:
    """(B, N, H, Sq, 1), computed for one row of every sample at a time."""
    real = accumulator(q.dtype)

    def of_row(row: tuple[jax.Array, ...]) -> jax.Array:
        q, k, *attended = row
        logits = jnp.einsum("bhid,bhjd->bhij", q, k, preferred_element_type=real) * scale
        logits += bias[:, 0].astype(real)
        if attended:
            logits = jnp.where(attended[0], logits, jnp.asarray(_MASKED, real))
        return logits.max(-1, keepdims=True)

    arrays = (q, k) if keys is None else (q, k, keys)
    found = jax.lax.map(of_row, tuple(jnp.moveaxis(x, 1, 0) for x in arrays))
    return jnp.moveaxis(found, 0, 1)
