"""The forward and the backward pass of one device: the primitives, with sinks and the gradients of
score parameters around them.

context/shard.py runs the same on every rank, with `kernels` that gather keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import primitives
from packax._src.ops.partitioning import require_device_info
from packax._src.ops.row_sums import of_attended
from packax._src.ops.score_mods import (
    NonDiffOperands,
    ScoreParams,
    add_sinks,
    sinks_gradient,
    summed,
)

Arrays = list[jax.Array]


def forward(
    spec: AttentionSpec, query, key, value, scores: ScoreParams, mask: AttentionMask,
    fixed: NonDiffOperands, kernels: Callable[..., Arrays] | None = None,
) -> Arrays:  # fmt: skip
    """out (B, Sq, H, Dv), lse (ops/row_sums.py), and with max_logits the rows' largest logits (B,
    H, Sq)."""
    out, lse, *top = (kernels or _forward)(spec, query, key, value, scores, mask, fixed)
    if scores.sinks is not None:
        out, lse = add_sinks(out, lse, scores.sinks)
    return [out, lse, *top]


def backward(
    spec: AttentionSpec, query, key, value, scores: ScoreParams, out, lse, dout, dlse,
    mask: AttentionMask, fixed: NonDiffOperands, kernels: Callable[..., Any] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, ScoreParams]:  # fmt: skip
    """The gradients of query, key, value and scores, sharded as they are.

    Those not named in spec.needs_grad may hold anything. `dlse` may be None.
    """
    scores, query, key, value, out, lse, dout, dlse, mask, fixed = vary_together(
        scores, query, key, value, out, lse, dout, dlse, mask, fixed
    )
    if spec.layout is not None and spec.layout.several(spec.layout.kv_context):
        # Otherwise XLA reuses the forward's gathers, keeping the gathered keys for the backward.
        key, value, dout = jax.lax.optimization_barrier((key, value, dout))
    if scores.bias is not None:  # -inf in it may leave a row with nothing to attend
        dout, dlse = of_attended(lse, dout, dlse)
    dq, dk, dv, of_rows, dbias = (kernels or _backward)(
        spec, query, key, value, scores, out, lse, dout, dlse, mask, fixed
    )
    gradients = jax.tree.map(jnp.zeros_like, scores)  # those not needed stay 0
    if scores.sinks is not None:
        gradients = gradients._replace(sinks=sinks_gradient(scores.sinks, out, lse, dout, dlse))
    if of_rows is not None:  # (H, 2), of this rank's rows
        if scores.scales is not None:
            gradients = gradients._replace(scales=of_rows[:, 0].sum()[None])
        if scores.slopes is not None:
            gradients = gradients._replace(slopes=of_rows[:, 1][None])
    if dbias is not None:
        gradients = gradients._replace(bias=dbias)
    return dq, dk, dv, summed(spec.layout, gradients, spec.bias_dims)


def _forward(spec: AttentionSpec, query, key, value, scores, mask, fixed) -> Arrays:
    operands = Operands(require_device_info(query), key, value)._replace(
        **mask.operands("forward"), **score_operands(spec, scores, fixed)
    )
    return primitives.forward(spec.of_primitive(mask), operands)


def _backward(
    spec: AttentionSpec, query, key, value, scores, out, lse, dout, dlse, mask, fixed
) -> tuple[Any, ...]:
    operands = Operands(require_device_info(query), key, value, out, lse, dout, dlse)._replace(
        **mask.operands("backward"), **score_operands(spec, scores, fixed)
    )
    dq, dk, dv, *others = primitives.backward(spec.of_primitive(mask), operands)
    of_rows = others.pop(0).sum(axis=(0, 3)) if spec.score_grads else None
    return dq, dk, dv, of_rows, others.pop(0) if spec.bias_grad else None


def score_operands(
    spec: AttentionSpec, scores: ScoreParams, fixed: NonDiffOperands
) -> dict[str, jax.Array]:
    """The operands that change scores and probabilities, by their names in `Operands`."""
    made: dict[str, jax.Array] = {}
    if scores.scales is not None or scores.slopes is not None:
        real = jnp.float32 if scores.slopes is None else scores.slopes.dtype
        made["scales"] = (
            jnp.full((1,), spec.scale, real) if scores.scales is None else scores.scales
        )
    if scores.slopes is not None:
        made["slopes"] = scores.slopes
        if fixed.positions:
            batch = max(x.shape[0] for x in fixed.positions)
            named = (scores.slopes, *fixed.positions)
            for name, x in zip(("slopes", "q_bias_pos", "kv_bias_pos"), named, strict=True):
                made[name] = jnp.broadcast_to(x, (batch, x.shape[1]))
    if scores.bias is not None:
        made["bias"] = scores.bias
    if fixed.streams is not None:
        made["dropout_streams"] = fixed.streams
        made["dropout_rows"] = fixed.rows
    return made
