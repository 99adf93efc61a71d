"""What changes the scores or their sum beside the mask: checked, and what of it needs no kernel.

A sink is one more logit in the denominator of a head's softmax (gpt-oss, arXiv 2508.10925; "softmax
off by one" where it is 0). Attention without it gives out and lse; with it, with z the sink,
    lse' = log(exp(lse) + exp(z)),   out' = out * exp(lse - lse')
and since p' = exp(s - lse') and delta' = sum(dout * out') - dlse hold as without, the backward
kernels, given out' and lse', are exact as they are. The sink's own gradient is the sum over rows of
-exp(z - lse') * delta'.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from packax._src.core.sharding import Layout
from packax._src.ops import row_sums
from packax._src.ops.merge import merged


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slopes", "positions", "kv_positions"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Alibi:
    """A linear bias by distance, from `alibi`."""

    slopes: Any
    positions: Any
    kv_positions: Any


def alibi(
    slopes: ArrayLike, *, positions: ArrayLike | None = None, kv_positions: ArrayLike | None = None
) -> Alibi:
    """Attention with linear biases (ALiBi, arXiv 2108.12409), for `flash_attention(..., bias=)`.

    The logit of row i and key j is less by `slopes[head] * abs(place of i - place of j)`. On keys
    before the row that is the paper's bias; a mask that also has keys behind it makes it symmetric.

    Args:
        slopes: (H,) of any float dtype, one per query head; the paper takes 2^(-8 h / H), h from 1
            to H. Differentiable.
        positions: (Sq,) or (B or 1, Sq), any integer dtype that fits int32, the places of query
            rows; None: their indices. Distances must stay below 2^31, and are exact up to 2^24.
        kv_positions: (Skv,) or (B or 1, Skv), of keys. None: `positions` where the lengths are the
            same, or the indices of keys without them.

    Without both arrays, on Hopper, head dims 64 and 128 have kernels of their own, which take no
    array.

    Where `sharding` cuts the sequence, rows do not lie at their indices: it needs both arrays,
    `positions` cut and permuted as the query rows are, `kv_positions` whole and in the order of the
    sequence. Everything is checked by `flash_attention`.

    Examples:
        >>> slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        >>> out = packax.flash_attention(query, key, value, mask, bias=packax.alibi(slopes))
    """
    return Alibi(slopes, positions, kv_positions)


class ScoreParams(NamedTuple):
    """What has a gradient besides query, key and value; None: absent."""

    sinks: Any = None  # (H,)
    scales: Any = None  # (1,)
    slopes: Any = None  # (1, H)
    bias: Any = None  # (1 or B, 1 or H, 1 or Sq, Skv)

    def specs(self, layout: Layout) -> ScoreParams:
        """How they are sharded, where context/shard.py maps over the mesh."""
        return ScoreParams(
            None if self.sinks is None else layout.spec(layout.heads),
            None if self.scales is None else layout.spec(()),
            None if self.slopes is None else layout.spec((), layout.heads),
            None if self.bias is None else layout.spec(*bias_dims(layout, self.bias)),
        )


def bias_dims(layout: Layout, bias: Any) -> tuple[Any, ...]:
    """The mesh axes of a bias: those of batch, heads and rows where it is not one for all."""
    own = (layout.batch, layout.heads, layout.context)
    return tuple(() if size == 1 else axes for size, axes in zip(bias.shape[:3], own, strict=True))


class NonDiffOperands(NamedTuple):
    """Arrays of a request that have no gradient; None: absent."""

    positions: tuple[Any, ...] = ()  # (1 or B, length) of rows and of keys, for ALiBi
    streams: Any = None  # (B, H, 4), of dropout (ops/dropout.py)
    rows: Any = None  # (1 or B, Sq), of dropout

    def specs(self, layout: Layout) -> NonDiffOperands:
        """As `ScoreParams.specs`."""

        def of_length(x: Any, dims: Any) -> Any:
            return layout.spec(() if x.shape[0] == 1 else layout.batch, dims)

        both = zip(self.positions, (layout.context, ()), strict=False)
        return NonDiffOperands(
            tuple(of_length(x, dims) for x, dims in both),
            None if self.streams is None else layout.spec(layout.batch, layout.heads),
            None if self.rows is None else of_length(self.rows, layout.context),
        )


def summed(
    layout: Layout | None, gradients: ScoreParams, bias_dims: tuple[Any, ...]
) -> ScoreParams:
    """A rank's part of the gradients, summed over the axes that the arrays do not have.

    `bias_dims`: the mesh axes that the bias has. Where the caller's shard_map has the axis, jax
    sums: the transpose of a replicated operand.
    """
    if layout is None:
        return gradients

    def psum(x, axes):
        axes = tuple(axis for axis in axes if axis in layout.mapped)
        return jax.lax.psum(x, axes) if axes and x is not None else x

    rows = layout.batch + layout.context
    of_bias = {axis for axes in bias_dims for axis in axes}
    return gradients._replace(
        bias=psum(gradients.bias, tuple(x for x in rows + layout.heads if x not in of_bias)),
        sinks=psum(gradients.sinks, rows),
        scales=psum(gradients.scales, rows + layout.heads),
        slopes=psum(gradients.slopes, rows),
    )


def largest(top: jax.Array, layout: Layout | None) -> jax.Array:
    """(B, H) of every row's largest logit (B, H, Sq), of all rows also where a caller cut them."""
    result = jax.lax.stop_gradient(top).max(axis=2)
    if layout is None:
        return result
    axes = tuple(axis for axis in layout.context if axis in layout.manual)
    return jax.lax.pmax(result, axes) if axes else result


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out' and lse' of out (B, Sq, H, Dv), lse (row_sums.py) and sinks (H,) or (B or 1, H); empty
    rows stay as they are.

    An infinite sink takes all of the softmax: out' is 0 and lse' is the sink, also in derivatives.
    """
    top, log = row_sums.apart(lse)
    attended, _, sink = _sink_terms(top, log, sinks)
    out, log = merged([(out, log), (None, jnp.where(attended, sink, log))])
    return out, row_sums.together(top, log)


def sinks_gradient(
    sinks: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> jax.Array:
    """(H,) of these rows, from out' and lse'; cotangents of empty rows are ignored."""
    real = lse.dtype
    delta = jnp.sum(out.astype(real) * dout.astype(real), -1).transpose(0, 2, 1)
    if dlse is not None:
        delta -= dlse.astype(real)
    top, log = row_sums.apart(lse)
    attended, finite, sink = _sink_terms(top, log, sinks)
    weight = jnp.exp(jnp.where(finite, sink, 0) - jnp.where(attended & finite, log, 0))
    return -jnp.sum(jnp.where(attended, weight * delta, 0), axis=(0, 2)).astype(sinks.dtype)


def _sink_terms(
    top: jax.Array | None, log: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where rows attend something, where sinks are less than infinity, and the sinks as `log` is:
    less the row's largest logit, if that is apart."""
    attended, sink = log != -jnp.inf, jnp.atleast_2d(sinks).astype(log.dtype)[..., None]
    finite = sink != jnp.inf
    return attended, finite, sink if top is None else sink - jnp.where(attended, top, 0)
