"""The log-sum-exp that the forward stores for the backward, as one or two numbers per row.

lse is (B, H, Sq). With a bias array or dropout (`Operands.lse_in_two`) it is (B, H, Sq, 2): the
largest logit, then the logarithm of the sum of exp(logit - largest). If the two were added, logits
of -1e9 would round the logarithm away, and with it all probabilities that the backward computes.
The largest logit is a shift on which the results do not depend, so it has no tangent.

In a row that attends to nothing, the single number is -inf, or the pair is -inf and the largest
finite number. All probabilities computed from them are then 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def of_log(x: jax.Array) -> jax.Array:
    """(B, H, Sq): the tangent or cotangent of the logarithm, computed from that of lse."""
    return x if x.ndim == 3 else x[..., 1]


def apart(lse: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """The largest logit (None if it is not stored separately) and the logarithm, (B, H, Sq) each.

    Both are -inf in rows that attend to nothing.
    """
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
    """The log-sum-exp as one number per row, (B, H, Sq)."""
    top, log = apart(lse)
    return log if top is None else jax.lax.stop_gradient(top) + log


def zero_unattended(
    lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The cotangents, set to 0 in rows that attend to nothing."""
    attends = apart(lse)[1] != -jnp.inf
    dout = jnp.where(attends.swapaxes(1, 2)[..., None], dout, 0)
    return dout, None if dlse is None else jnp.where(attends, dlse, 0)
