"""What each rank of a mesh computes: its query rows against all keys that they may attend.

Context parallelism by all-gather of keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).
The rules of autodiff.py lie outside of this: what it keeps for the backward pass are the
ranks' own pieces, and the backward gathers again. A group of key/value heads is gathered while the
attention of the group before runs, and its gradients are reduce-scattered while the next one runs.
rank_passes.py does that where all keys are gathered, local_kv.py where a plan keeps most of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.context import local_kv, rank_passes
from packax._src.context.rank_passes import Call
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import Layout
from packax._src.ops.row_sums import of_attended
from packax._src.ops.score_mods import Beside, Scores, add_sinks, sinks_gradient, summed


def forward(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    mask: AttentionMask,
    beside: Beside,
) -> tuple[Any, ...]:
    """out (B, Sq, H, Dv), lse (ops/row_sums.py), and on request the rows' largest logits (B, H,
    Sq)."""
    function = _forward if call.layout is None else _forward_of_ranks
    return function(call, query, key, value, scores, mask, beside)


def backward(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    mask: AttentionMask,
    beside: Beside,
) -> tuple[jax.Array, jax.Array, jax.Array, Scores]:
    """The gradients of query, key, value and scores, sharded as they are.

    Those that call.needs_grad does not say may hold anything. `dlse`: lse if there is none.
    """
    function = _backward if call.layout is None else _backward_of_ranks
    return function(call, query, key, value, scores, out, lse, dout, dlse, mask, beside)


# jit, so that outside of jit it is one program and not one for every operation and collective.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward_of_ranks(call: Call, query, key, value, scores, mask, beside) -> tuple[Any, ...]:
    assert call.layout is not None
    q_spec, kv_spec, lse_spec, *others = _specs(call.layout, scores, mask, beside)
    mapped = _shard_map(
        call.layout,
        lambda *operands: _forward(call, *operands),
        (q_spec, kv_spec, kv_spec, *others),
        (q_spec, lse_spec, lse_spec if call.return_max_logits else None),
    )
    return mapped(query, key, value, scores, mask, beside)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward_of_ranks(
    call: Call, query, key, value, scores, out, lse, dout, dlse, mask, beside
) -> tuple[Any, ...]:
    assert call.layout is not None
    q_spec, kv_spec, lse_spec, score_specs, *others = _specs(call.layout, scores, mask, beside)
    rows = (q_spec, lse_spec, q_spec, lse_spec)
    mapped = _shard_map(
        call.layout,
        lambda *operands: _backward(call, *operands),
        (q_spec, kv_spec, kv_spec, score_specs, *rows, *others),
        (q_spec, kv_spec, kv_spec, score_specs),
    )
    return mapped(query, key, value, scores, out, lse, dout, dlse, mask, beside)


def _specs(layout: Layout, scores: Scores, mask: AttentionMask, beside: Beside) -> tuple[Any, ...]:
    """Of query, key and value, log-sum-exps, scores, mask and beside."""
    batch, context, heads = layout.batch, layout.context, layout.heads
    return (
        layout.spec(batch, context, heads),
        layout.spec(batch, layout.kv_context, layout.kv_heads),
        layout.spec(batch, heads, context),
        scores.specs(layout),
        mask.specs(layout.spec, batch, context, heads),
        beside.specs(layout),
    )


def _shard_map(layout: Layout, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """Over all axes that the caller has not mapped: a custom call cannot be partitioned further."""
    if not layout.mapped:
        return function
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(layout.mapped),
    )


def _forward(call: Call, query, key, value, scores, mask, beside) -> tuple[Any, ...]:
    """On one rank."""
    operands = vary_together(scores, query, key, value, mask, beside)
    scores = operands[0]
    passes = rank_passes if operands[4].private_part is None else local_kv
    out, lse, top = passes.forward(call, *operands)
    if scores.sinks is not None:
        out, lse = add_sinks(out, lse, scores.sinks)
    return out, lse, top


def _backward(
    call: Call, query, key, value, scores, out, lse, dout, dlse, mask, beside
) -> tuple[Any, ...]:
    """On one rank."""
    scores, query, key, value, out, lse, dout, dlse, mask, beside = vary_together(
        scores, query, key, value, out, lse, dout, dlse, mask, beside
    )
    if call.layout is not None and call.layout.several(call.layout.kv_context):
        # Else XLA sees the forward's gathers here, and keeps the gathered keys for the backward.
        key, value, dout = jax.lax.optimization_barrier((key, value, dout))
    if scores.bias is not None:  # whose -inf may empty a row
        dout, of_lse = of_attended(lse, dout, dlse if call.return_lse else None)
        dlse = dlse if of_lse is None else of_lse
    operands = (scores, query, key, value, mask, beside, out, lse, dout, dlse)
    passes = rank_passes if mask.private_part is None else local_kv
    dq, dk, dv, parts, dbias = passes.backward(call, *operands)
    dscores = jax.tree.map(jnp.zeros_like, scores)  # for those that nobody wants
    if scores.sinks is not None:
        dlse = dlse if call.return_lse else None
        dscores = dscores._replace(sinks=sinks_gradient(scores.sinks, out, lse, dout, dlse))
    if parts is not None:  # (H, 2) of this rank's rows
        if scores.scale is not None:
            dscores = dscores._replace(scale=parts[:, 0].sum()[None])
        if scores.slopes is not None:
            dscores = dscores._replace(slopes=parts[:, 1][None])
    if dbias is not None:
        dscores = dscores._replace(bias=dbias)
    return dq, dk, dv, summed(call.layout, dscores, call.bias_dims)
