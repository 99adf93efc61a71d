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
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from packax._src.core.integers import as_int32
from packax._src.core.messages import described
from packax._src.core.sharding import Layout
from packax._src.ops import row_sums
from packax._src.ops.merge import merged

_CAPS = (1e-30, 1e30)


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


class Scores(NamedTuple):
    """What has a gradient beside query, key and value; None: not there."""

    sinks: Any = None  # (H,)
    scale: Any = None  # (1,)
    slopes: Any = None  # (1, H)
    bias: Any = None  # (1 or B, 1 or H, 1 or Sq, Skv)

    def specs(self, layout: Layout) -> Scores:
        """How they lie on the mesh, where context/shard.py maps over it."""
        return Scores(
            None if self.sinks is None else layout.spec(layout.heads),
            None if self.scale is None else layout.spec(()),
            None if self.slopes is None else layout.spec((), layout.heads),
            None if self.bias is None else layout.spec(*bias_dims(layout, self.bias)),
        )


def bias_dims(layout: Layout, bias: Any) -> tuple[Any, ...]:
    """The mesh axes of a bias: those of batch, heads and rows where it is not one for all."""
    own = (layout.batch, layout.heads, layout.context)
    return tuple(() if size == 1 else axes for size, axes in zip(bias.shape[:3], own, strict=True))


class Beside(NamedTuple):
    """Arrays of a request that have no gradient; None: not there."""

    positions: tuple[Any, ...] = ()  # (1 or B, length) of rows and of keys, for ALiBi
    streams: Any = None  # (B, H, 4), of dropout (ops/dropout.py)
    rows: Any = None  # (1 or B, Sq), of dropout

    def specs(self, layout: Layout) -> Beside:
        """As `Scores.specs`."""

        def of_length(x: Any, dims: Any) -> Any:
            return layout.spec(() if x.shape[0] == 1 else layout.batch, dims)

        both = zip(self.positions, (layout.context, ()), strict=False)
        return Beside(
            tuple(of_length(x, dims) for x, dims in both),
            None if self.streams is None else layout.spec(layout.batch, layout.heads),
            None if self.rows is None else of_length(self.rows, layout.context),
        )


def summed(layout: Layout | None, gradients: Scores, bias_dims: tuple[Any, ...]) -> Scores:
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
        scale=psum(gradients.scale, rows + layout.heads),
        slopes=psum(gradients.slopes, rows),
    )


def largest(top: jax.Array, layout: Layout | None) -> jax.Array:
    """(B, H) of every row's largest logit (B, H, Sq), of all rows also where a caller cut them."""
    result = jax.lax.stop_gradient(top).max(axis=2)
    if layout is None:
        return result
    axes = tuple(axis for axis in layout.context if axis in layout.manual)
    return jax.lax.pmax(result, axes) if axes else result


def scores_of(
    query: jax.Array,
    q_len: int,
    kv_len: int,
    scale: float | jax.Array,
    sinks: Any,
    bias: Any,
    layout: Layout | None,
    for_sm90: bool = True,
) -> tuple[Scores, tuple[jax.Array, ...]]:
    """The arrays of a request, checked; with ALiBi the places of rows and keys, (1 or B, length),
    but none where they are indices and nothing else is an array: Hopper has kernels for that, if
    the rest of the request is `for_sm90`.

    The lengths are those of whole sequences.
    """
    real = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    scores = Scores(_per_head("sinks", "logit", sinks, query, layout))
    if isinstance(scale, jax.Array):
        scores = scores._replace(scale=_placed(scale.astype(real)[None], layout, ()))
    if bias is None:
        return scores, ()
    if not isinstance(bias, Alibi):
        return scores._replace(bias=_bias_array(bias, query, kv_len, layout)), ()
    slopes = _per_head("slopes", "slope", bias.slopes, query, layout)
    if slopes is None:
        raise ValueError("slopes must be an array of floats, but is None")
    places: tuple[jax.Array, ...] = ()
    _check_cut(bias, layout)
    given = bias.positions is not None or bias.kv_positions is not None
    if given or scores.scale is not None or not for_sm90:
        places = _places(bias, query.shape[:2], q_len, kv_len, layout)
    return scores._replace(slopes=slopes.astype(real)[None]), places


def _bias_array(bias: Any, query: jax.Array, kv_len: int, layout: Layout | None) -> jax.Array:
    """(1 or B, 1 or H, 1 or Sq, Skv), of query's dtype, or of float32 as the kernels take it."""
    if not hasattr(bias, "dtype") or not hasattr(bias, "shape"):
        raise ValueError(
            f"bias must be None, alibi(slopes) or an array of floats, but is {described(bias)}"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        more = ": a mask is an expression, not a bias" if bias.dtype == bool else ""
        raise ValueError(f"bias must be an array of floats, but is {bias.dtype}{more}")
    batch, rows, heads, _ = query.shape
    sizes = (batch, heads, rows)
    fits = len(bias.shape) == 4 and bias.shape[3] == kv_len
    if not fits or any(n not in (1, m) for n, m in zip(bias.shape[:3], sizes, strict=True)):
        raise ValueError(
            f"bias must have shape (1 or {batch}, 1 or {heads}, 1 or {rows}, {kv_len}), which is "
            f"(batch, heads, query rows, keys), but has {tuple(bias.shape)}"
        )
    real = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    if bias.dtype == jnp.float64 and real == jnp.float32:  # its least number is no infinity there
        xp, limits = jnp if isinstance(bias, jax.Array) else np, np.finfo(np.float32)
        bias = xp.where(xp.isinf(bias), bias, xp.clip(bias, limits.min, limits.max))
    bias = jnp.asarray(bias)
    # Parts of its gradient that ranks, or groups of heads, add up are float32.
    divided = layout is not None and 1 in bias.shape[:3]
    if divided or bias.dtype not in (query.dtype, real):
        bias = bias.astype(real)
    return bias if layout is None else _placed(bias, layout, *bias_dims(layout, bias))


def _placed(x: jax.Array, layout: Layout | None, *dims: Any) -> jax.Array:
    return x if layout is None else layout.place(x, *dims)


def _per_head(
    name: str, what: str, given: Any, query: jax.Array, layout: Layout | None
) -> jax.Array | None:
    """(H,) as an array of floats, or None; on an explicit mesh sharded as the heads are."""
    heads = query.shape[2]
    if given is None:
        return None
    try:
        given = jnp.asarray(given)
    except TypeError:
        raise ValueError(f"{name} must be an array of floats, but is {given!r}") from None
    if not jnp.issubdtype(given.dtype, jnp.floating):
        raise ValueError(f"{name} must be an array of floats, but is {given.dtype}")
    if given.shape != (heads,):
        raise ValueError(
            f"{name} must have shape ({heads},), one {what} per head of query, but has "
            f"{given.shape}"
        )
    if layout is not None:
        return layout.place(given, layout.heads)
    sharding = jax.typeof(query).sharding
    of_heads, own = ((*x.spec, *[None] * 4) for x in (sharding, jax.typeof(given).sharding))
    if own[0] == of_heads[2]:
        return given
    return jax.sharding.reshard(given, NamedSharding(sharding.mesh, P(of_heads[2])))


def _check_cut(bias: Alibi, layout: Layout | None) -> None:
    if layout is None or layout.size(layout.context) <= 1:
        return
    if bias.positions is None or bias.kv_positions is None:
        raise ValueError(
            f"alibi needs positions and kv_positions where sharding cuts the sequence, here over "
            f"{layout.context}: rows do not lie at their indices"
        )


def _places(
    bias: Alibi, rows: tuple[int, ...], q_len: int, kv_len: int, layout: Layout | None
) -> tuple[jax.Array, ...]:
    q, kv = bias.positions, bias.kv_positions
    if q is not None and kv is None:
        if q_len != kv_len:
            raise ValueError(
                f"alibi needs kv_positions beside positions where the lengths differ: there are "
                f"{q_len} query rows and {kv_len} keys"
            )
        kv = q
    q = jnp.arange(q_len, dtype=jnp.int32) if q is None else q
    kv = jnp.arange(kv_len, dtype=jnp.int32) if kv is None else kv
    places = []
    batch = rows[0]
    for name, x, length in (("positions", q, rows[1]), ("kv_positions", kv, kv_len)):
        shapes = f"({length},), (1, {length}) or ({batch}, {length})"
        x = as_int32(name, x, shapes=shapes)
        if x.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"{name} must have shape {shapes}, but has {x.shape}")
        x = jnp.atleast_2d(x)
        if layout is not None:
            dims = layout.context if name == "positions" else ()
            x = layout.place(x, () if x.shape[0] == 1 else layout.batch, dims)
        places.append(x)
    return tuple(places)


def checked_scale(scale: Any) -> float | jax.Array:
    """A number that is finite in float32, or an array of floats of shape ()."""
    if isinstance(scale, (jax.Array, np.ndarray)):
        if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
            key = (
                ", a key of jax.random" if jnp.issubdtype(scale.dtype, jax.dtypes.prng_key) else ""
            )
            raise ValueError(
                f"scale, where it is an array, must have shape () and a float dtype, but is "
                f"{scale.dtype} of shape {scale.shape}{key}"
            )
        return jnp.asarray(scale)
    number = _number("scale", scale)
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"scale must be finite in float32, but is {number}")
    return number


def checked_soft_cap(soft_cap: Any) -> float:
    """The cap; 0: there is none."""
    if soft_cap is None:
        return 0.0
    number = _number("soft_cap", soft_cap)
    if not _CAPS[0] <= number <= _CAPS[1]:
        none = ": for no cap, pass None" if number == 0 else ""
        raise ValueError(f"soft_cap must be from {_CAPS[0]} to {_CAPS[1]}, but is {number}{none}")
    return number


def _number(name: str, given: Any) -> float:
    if not isinstance(given, numbers.Real) or isinstance(given, bool):
        more = " or an array of shape ()" if name == "scale" else ", known when tracing"
        raise ValueError(
            f"{name} must be a Python or numpy number{more}, but is {described(given)}"
        )
    try:
        return float(given)
    except OverflowError:  # an integer beyond float64
        return math.inf


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out' and lse' of out (B, Sq, H, Dv), lse (row_sums.py) and sinks (H,) or (B or 1, H); empty
    rows stay as they are.

    An infinite sink takes all of the softmax: out' is 0 and lse' is the sink, also in derivatives.
    """
    top, log = row_sums.apart(lse)
    attended, _, sink = _beside(top, log, sinks)
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
    attended, finite, sink = _beside(top, log, sinks)
    weight = jnp.exp(jnp.where(finite, sink, 0) - jnp.where(attended & finite, log, 0))
    return -jnp.sum(jnp.where(attended, weight * delta, 0), axis=(0, 2)).astype(sinks.dtype)


def _beside(
    top: jax.Array | None, log: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where rows attend something, where sinks are less than infinity, and the sinks as `log` is:
    less the row's largest logit, if that is apart."""
    attended, sink = log != -jnp.inf, jnp.atleast_2d(sinks).astype(log.dtype)[..., None]
    finite = sink != jnp.inf
    return attended, finite, sink if top is None else sink - jnp.where(attended, top, 0)
