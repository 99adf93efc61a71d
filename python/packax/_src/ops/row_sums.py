"""The log-sum-exp of a row as one number or two, which the forward stores for the backward.

lse is (B, H, Sq), or with a bias array or dropout (operands.lse_in_two) (B, H, Sq, 2): the largest
logit, then the logarithm of the sum of exp(logit - largest). With logits of -1e9 their sum would
round the logarithm away, and with it every probability that the backward computes from it. The
largest logit is a shift on which results do not depend, so it has no tangent.

For a row that attends to nothing the one number is -inf, or the two are -inf and the largest finite
number: all probabilities computed from them are 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def of_log(x: jax.Array) -> jax.Array:
    """(B, H, Sq): the part of a tangent or cotangent of lse that belongs to the logarithm."""
    return x if x.ndim == 3 else x[..., 1]


def apart(lse: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """The largest logit, or None if it is not stored separately, and the logarithm; each (B, H,
    Sq), both -inf in a row that attends to nothing."""
    if lse.ndim == 3:
        return None, lse
    top, log = lse[..., 0], lse[..., 1]
    return top, jnp.where(top == -jnp.inf, -jnp.inf, log)


def together(top: jax.Array | None, log: jax.Array) -> jax.Array:
    """The inverse of `apart`."""
    if top is None:
        return log
    return jnp.stack([top, jnp.where(top == -jnp.inf, jnp.finfo(log.dtype).max, log)], -1)


def log_sum_exp(lse: jax.Array) -> jax.Array:
    """(B, H, Sq), one number per row."""
    top, log = apart(lse)
    return log if top is None else jax.lax.stop_gradient(top) + log


def of_attended(
    lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The cotangents, with 0 in rows that attend to nothing."""
    some = apart(lse)[1] != -jnp.inf
    dout = jnp.where(some.swapaxes(1, 2)[..., None], dout, 0)
    return dout, None if dlse is None else jnp.where(some, dlse, 0)
