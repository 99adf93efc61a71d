"""Maps both passes over the mesh: each rank computes its query rows with the keys that they need.

This is context parallelism by all-gather of keys and values (Llama 3, arXiv 2407.21783, section
3.3.2). autodiff.py differentiates the mapped functions as a whole, so each rank keeps only its
shards for the backward pass, which gathers again. A group of key/value heads is gathered while
attention runs on the previous group, and its gradients are reduce-scattered while the next group
runs. rank_passes.py does that if all keys are gathered, local_kv.py if only some are needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.context import local_kv, rank_passes
from packax._src.core.context_mask import ContextMask
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import Layout, vary_together
from packax._src.core.spec import AttentionSpec, accumulator
from packax._src.ops import primitives
from packax._src.ops.score_mods import NonDiffOperands, ScoreParams, mesh_dims


def place_operands(
    spec: AttentionSpec, layout: Layout, inputs: Any, mask: AttentionMask, fixed: NonDiffOperands
) -> tuple[AttentionSpec, Any]:
    """The spec and the operands of a call on this mesh."""
    query, key, value, scores = inputs
    bias, dims = scores.bias, ()
    if bias is not None:
        groups, batch = bias.shape[0], query.shape[0]
        if 1 in bias.shape[:3] or groups != batch:
            # In float32, so that partial gradients of ranks are added in float32.
            bias = bias.astype(accumulator(query.dtype))
        if groups not in (1, batch) and groups % layout.size(layout.batch):
            bias = jnp.repeat(bias, batch // groups, axis=0)  # ranks have no whole number of biases
        scores, dims = scores._replace(bias=bias), mesh_dims(layout, "bias", bias)
    mask = ContextMask.of(mask)
    if bias is not None or spec.dropout_threshold:
        mask = mask.without_halos()
    q_spec, kv_spec, _, score_specs, *others = _specs(layout, scores, mask, fixed)
    operands = (query, key, value, scores), mask, fixed
    placed = layout.place_all(operands, ((q_spec, kv_spec, kv_spec, score_specs), *others))
    return dataclasses.replace(spec, layout=layout, bias_dims=dims), placed


# jit, so that outside of jit this is one program, not one per operation and collective.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def forward_pass(spec: AttentionSpec, query, key, value, scores, mask, fixed) -> list[jax.Array]:
    """`ops.primitives.forward_pass` on every rank."""
    q_spec, kv_spec, lse_spec, *others = _specs(spec.layout, scores, mask, fixed)
    mapped = spec.layout.shard_map(
        functools.partial(_forward, spec),
        (q_spec, kv_spec, kv_spec, *others),
        [q_spec, lse_spec, *([lse_spec] if spec.max_logits else [])],
    )
    return mapped(query, key, value, scores, mask, fixed)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def backward_pass(
    spec: AttentionSpec, query, key, value, scores, out, lse, dout, dlse, mask, fixed
) -> tuple[Any, ...]:
    """`ops.primitives.backward_pass` on every rank."""
    run = functools.partial(primitives.backward_pass, spec, kernels=_kernels("backward"))
    q_spec, kv_spec, lse_spec, score_specs, *others = _specs(spec.layout, scores, mask, fixed)
    rows = (q_spec, lse_spec, q_spec, None if dlse is None else lse_spec)
    mapped = spec.layout.shard_map(
        run,
        (q_spec, kv_spec, kv_spec, score_specs, *rows, *others),
        (q_spec, kv_spec, kv_spec, score_specs),
    )
    return mapped(query, key, value, scores, out, lse, dout, dlse, mask, fixed)


def _specs(
    layout: Layout, scores: ScoreParams, mask: AttentionMask, fixed: NonDiffOperands
) -> tuple[Any, ...]:
    """The specs of query, key and value, log-sum-exps, scores, mask and fixed operands."""
    batch, context, heads = layout.batch, layout.context, layout.heads
    return (
        layout.spec(batch, context, heads),
        layout.spec(batch, layout.kv_context, layout.kv_heads),
        layout.spec(batch, heads, context),
        scores.specs(layout),
        mask.specs(layout.spec, batch, context, heads),
        fixed.specs(layout),
    )


def _forward(spec: AttentionSpec, *operands: Any) -> list[jax.Array]:
    """The forward pass of one rank."""
    return _kernels("forward")(spec, *vary_together(*operands))


def _kernels(direction: str) -> Callable[..., Any]:
    """The pass that gathers all keys or only some, depending on the mask."""
    gather_all, gather_some = (getattr(module, direction) for module in (rank_passes, local_kv))

    def kernels(spec: AttentionSpec, *operands: Any) -> Any:
        mask = next(x for x in operands if isinstance(x, ContextMask))
        if mask.private_part is None:
            return gather_all(spec, *operands)
        if mask.halos_suffice is None:
            return gather_some(spec, *operands)
        passes = (functools.partial(x, spec) for x in (gather_some, gather_all))
        return jax.lax.cond(mask.halos_suffice[0] != 0, *passes, *operands)

    return kernels
