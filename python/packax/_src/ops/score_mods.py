"""Score parameters (sinks, array scales, ALiBi, bias arrays), and the computations without kernels.

A sink is one more logit in the denominator of a head's softmax (gpt-oss, arXiv 2508.10925; "softmax
off by one" if it is 0). From out and lse of attention without sinks, a sink z gives
    lse' = log(exp(lse) + exp(z)),   out' = out * exp(lse - lse')
The forward kernels return out' and lse'; `add_sinks` is for blockwise XLA. As without a sink,
p' = exp(s - lse') and delta' = sum(dout * out') - dlse, so the backward kernels are exact when
given out' and lse'. The gradient of the sink is the sum over rows of -exp(z - lse') * delta', from
the delta' of the kernels.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from packax._src.core.schema import OPERANDS, ROWS
from packax._src.core.sharding import Layout
from packax._src.ops import row_sums
from packax._src.ops.merge import merged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alibi:
    """A bias linear in distance, from `alibi`."""

    slopes: Any
    positions: Any
    kv_positions: Any


def alibi(
    slopes: ArrayLike, *, positions: ArrayLike | None = None, kv_positions: ArrayLike | None = None
) -> Alibi:
    """Attention with linear biases (ALiBi, arXiv 2108.12409), for `flash_attention(..., bias=)`.

    It subtracts `slopes[head] * abs(position of i - position of j)` from the logit of query i and
    key j. For keys before the query, this is the paper's bias; for keys after it, the bias is
    symmetric.

    Args:
        slopes: the slope of each query head, (H,) of any float dtype; the paper uses 2^(-8 h / H),
            h from 1 to H. Differentiable.
        positions: the positions of queries, (Sq,) or (B or 1, Sq) integers that fit int32. None:
            their indices. Distances must be below 2^31, and are exact up to 2^24.
        kv_positions: the positions of keys, (Skv,) or (B or 1, Skv). None: `positions`, which
            requires equal lengths, or the indices of keys if `positions` is None too.

    Returns:
        Alibi, a pytree of these arrays.

    If both arrays are None, dedicated kernels run on Hopper for head dims 64 and 128.

    If the sequence is sharded, the index of a query is not its position. Then pass both arrays:
    `positions` sharded and permuted like query, and `kv_positions` complete and in the original
    order.

    Raises:
        ValueError: wrong shapes or dtypes, raised by `flash_attention`.

    Examples:
        >>> slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        >>> out = packax.flash_attention(query, key, value, mask, bias=packax.alibi(slopes))
    """
    return Alibi(slopes, positions, kv_positions)


class _Named:
    """Operands by name; None: absent."""

    __slots__ = ()

    def specs(self: Any, layout: Layout) -> Any:
        """The PartitionSpecs for the shard_map of context/shard.py."""
        return self._make(
            None if x is None else layout.spec(*mesh_dims(layout, name, x))
            for name, x in self._asdict().items()
        )


_namedtuple: Any = collections.namedtuple  # mypy knows fields that are literals only


def _fields(gradient: bool) -> Any:
    rows = [x.name for x in OPERANDS if x.gradient == gradient and (gradient or x.optional)]
    return _namedtuple("_Fields", rows, defaults=[None] * len(rows))


class ScoreParams(_Named, _fields(True)):  # type: ignore[misc]
    """Differentiable operands other than query, key and value: those of schema.py, with sinks
    (1, H), scales (1,) and slopes (1, H)."""

    __slots__ = ()


class NonDiffOperands(_Named, _fields(False)):  # type: ignore[misc]
    """Arrays of a request that have no gradient: those of schema.py."""

    __slots__ = ()


def mesh_dims(layout: Layout, name: str, x: Any) -> tuple[Any, ...]:
    """The mesh axes of each axis of an operand; none for axes of size 1 that are broadcast."""
    axes = ROWS[name].axes[-x.ndim :]
    dims = {"b": layout.batch, "h": layout.heads, "r": layout.context, ".": ()}
    return tuple(
        () if axis.isupper() and size == 1 else dims[axis.lower().replace("e", "b")]
        for axis, size in zip(axes.rstrip("."), x.shape, strict=False)
    )


def summed(layout: Layout, gradients: ScoreParams, bias_dims: tuple[Any, ...]) -> ScoreParams:
    """The gradients of score parameters, summed over the mesh axes that do not shard them.

    `bias_dims`: the mesh axes of the bias. jax itself sums over the axes of the caller's shard_map,
    as the transpose of replication.
    """

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


def largest(top: jax.Array, layout: Layout) -> jax.Array:
    """(B, H): the maximum of each row's largest logit, (B, H, Sq), over the rows of all ranks."""
    result = jax.lax.stop_gradient(top).max(axis=2)
    axes = tuple(axis for axis in layout.context if axis in layout.manual)
    return jax.lax.pmax(result, axes) if axes else result


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out' and lse' from out (B, Sq, H, Dv), lse (row_sums.py) and sinks (B or 1, H).

    Rows that attend to nothing do not change. With an infinite sink, out' is 0 and lse' is the
    sink, also in derivatives.
    """
    top, log = row_sums.apart(lse)
    if top is not None:
        # The sink may be the largest logit. Relative to logits of -1e9 it would be rounded away.
        attended, finite, sink = _sink_terms(None, log, jax.lax.stop_gradient(sinks))
        larger = jnp.where(attended & finite, jnp.maximum(top, sink), top)
        top, log = larger, log + jnp.where(attended, top - larger, 0)
    attended, _, sink = _sink_terms(top, log, sinks)
    out, log = merged([(out, log), (None, jnp.where(attended, sink, log))])
    return out, row_sums.together(top, log)


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the sinks (1, H) from these rows' lse' and delta'. Ignores empty rows."""
    top, log = row_sums.apart(lse)
    attended, finite, sink = _sink_terms(top, log, sinks)
    weight = jnp.exp(jnp.where(finite, sink, 0) - jnp.where(attended & finite, log, 0))
    return -jnp.sum(jnp.where(attended, weight * delta, 0), axis=(0, 2))[None]


def _sink_terms(
    top: jax.Array | None, log: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether each row attends to anything, whether each sink is not +inf, and the sinks.

    Like `log`, sinks are relative to the row's largest logit if that is stored separately.
    """
    attended, sink = log != -jnp.inf, sinks[..., None]
    finite = sink != jnp.inf
    return attended, finite, sink if top is None else sink - jnp.where(attended, top, 0)
