"""What changes the scores or their sum beside the mask: checked, and what of it needs no kernel.

A sink is one more logit in the denominator of a head's softmax (gpt-oss, arXiv 2508.10925; "softmax
off by one" where it is 0). Attention without it gives out and lse; with it, with z the sink,
    lse' = log(exp(lse) + exp(z)),   out' = out * exp(lse - lse')
and since p' = exp(s - lse') and delta' = sum(dout * out') - dlse hold as without, the backward
kernels, given out' and lse', are exact as they are. The sink's own gradient is the sum over rows of
-exp(z - lse') * delta'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax.sharding import Layout


class Scores(NamedTuple):
    """The arrays of one attention that are neither tensors nor mask; None: not there."""

    sinks: Any = None  # (H,)

    def specs(self, layout: Layout) -> Scores:
        """How they lie on the mesh, where partition.py maps over it."""
        return Scores(None if self.sinks is None else layout.spec(layout.heads))


def summed(layout: Layout | None, gradients: Scores) -> Scores:
    """A rank's part of the gradients, summed over the axes that the arrays do not have.

    Where the caller's shard_map has the axis, jax sums: the transpose of a replicated operand.
    """
    if layout is None:
        return gradients
    axes = tuple(axis for axis in layout.batch + layout.context if axis in layout.mapped)
    return jax.tree.map(lambda x: jax.lax.psum(x, axes), gradients) if axes else gradients


def checked_sinks(sinks: Any, heads: int, layout: Layout | None) -> jax.Array | None:
    """(H,) as an array of floats, or None."""
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks must be an array of floats, but is {sinks.dtype}")
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks must have shape ({heads},), one logit per head of query, but has {sinks.shape}"
        )
    return sinks if layout is None else layout.place(sinks, layout.heads)


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out' and lse' of out (B, Sq, H, Dv) and lse (B, H, Sq); empty rows stay as they are."""
    attended = lse > -jnp.inf
    attended |= jnp.isnan(lse)
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
    share = jnp.exp(lse - jnp.where(attended, total, 0))  # 0 where empty
    scaled = out.astype(lse.dtype) * share.transpose(0, 2, 1)[..., None]
    return scaled.astype(out.dtype), jnp.where(attended, total, lse)


def sinks_gradient(
    sinks: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> jax.Array:
    """(H,) of these rows, from out' and lse'; cotangents of empty rows are ignored."""
    real = lse.dtype
    delta = jnp.einsum("bihd,bihd->bhi", out.astype(real), dout.astype(real))
    if dlse is not None:
        delta -= dlse.astype(real)
    attended = lse != -jnp.inf
    weight = jnp.exp(sinks.astype(real)[:, None] - jnp.where(attended, lse, 0))
    return -jnp.sum(jnp.where(attended, weight * delta, 0), axis=(0, 2)).astype(sinks.dtype)
