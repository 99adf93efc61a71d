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
from packax._src.core.sharding import Layout, vary_together
from packax._src.core.spec import AttentionSpec, accumulator
from packax._src.ops import primitives
from packax._src.ops.primitives import Inputs
from packax._src.ops.score_mods import mesh_dims


def place_operands(spec: AttentionSpec, layout: Layout, x: Inputs) -> tuple[AttentionSpec, Inputs]:
    """The spec and the inputs of a call on this mesh."""
    bias, dims = x.scores.bias, ()
    if bias is not None:
        groups, batch = bias.shape[0], x.query.shape[0]
        if 1 in bias.shape[:3] or groups != batch:
            # In float32, so that partial gradients of ranks are added in float32.
            bias = bias.astype(accumulator(x.query.dtype))
        if groups not in (1, batch) and groups % layout.size(layout.batch):
            bias = jnp.repeat(bias, batch // groups, axis=0)  # ranks have no whole number of biases
        x, dims = x._replace(scores=x.scores._replace(bias=bias)), mesh_dims(layout, "bias", bias)
    mask = ContextMask.of(x.mask)
    if bias is not None or spec.dropout_threshold:
        mask = mask.without_halos()
    x = x._replace(mask=mask)
    placed = layout.place_all(x, _specs(layout, x))
    return dataclasses.replace(spec, layout=layout, bias_dims=dims), placed


# jit, so that outside of jit this is one program, not one per operation and collective.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def forward_pass(spec: AttentionSpec, x: Inputs) -> list[jax.Array]:
    """`ops.primitives.forward_pass` on every rank."""
    layout, specs = spec.layout, _specs(spec.layout, x)
    lse_spec = layout.spec(layout.batch, layout.heads, layout.context)
    results = [specs.query, lse_spec, *([lse_spec] if spec.max_logits else [])]
    return layout.shard_map(functools.partial(_forward, spec), (specs,), results)(x)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def backward_pass(spec: AttentionSpec, x: Inputs) -> tuple[Any, ...]:
    """`ops.primitives.backward_pass` on every rank."""
    specs = _specs(spec.layout, x)
    run = functools.partial(primitives.backward_pass, spec, kernels=_kernels("backward"))
    results = (specs.query, specs.key, specs.value, specs.scores)
    return spec.layout.shard_map(run, (specs,), results)(x)


def _specs(layout: Layout, x: Inputs) -> Inputs:
    """The PartitionSpecs of all arrays."""
    batch, context, heads = layout.batch, layout.context, layout.heads
    rows: Any = layout.spec(batch, context, heads)
    keys: Any = layout.spec(batch, layout.kv_context, layout.kv_heads)
    mask = x.mask.specs(layout.spec, batch, context, heads)
    lse = layout.spec(batch, heads, context)
    specs = Inputs(rows, keys, keys, x.scores.specs(layout), mask, x.fixed.specs(layout))
    if x.out is None:
        return specs
    return specs._replace(out=rows, lse=lse, dout=rows, dlse=None if x.dlse is None else lse)


def _forward(spec: AttentionSpec, x: Inputs) -> list[jax.Array]:
    """The forward pass of one rank."""
    return _kernels("forward")(spec, Inputs(*vary_together(*x)))


def _kernels(direction: str) -> Callable[..., Any]:
    """The pass that gathers all keys or only some, depending on the mask."""
    gather_all, gather_some = (getattr(module, direction) for module in (rank_passes, local_kv))

    def kernels(spec: AttentionSpec, x: Inputs) -> Any:
        mask: Any = x.mask
        if mask.private_part is None:
            return gather_all(spec, x)
        if mask.halos_suffice is None:
            return gather_some(spec, x)
        passes = (functools.partial(run, spec) for run in (gather_some, gather_all))
        return jax.lax.cond(mask.halos_suffice[0] != 0, *passes, x)

    return kernels
