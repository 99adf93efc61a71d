"""What each rank of a mesh computes: its query rows against all keys, gathered group by group.

Context parallelism by all-gather of keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).
The rules of autodiff.py lie outside of this: what it keeps for the backward pass are the
ranks' own pieces, and the backward gathers again. A group of key/value heads is gathered while the
attention of the group before runs, and its gradients are reduce-scattered while the next one runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import Groups
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import HeadGroups, Layout
from packax._src.ops import head_groups
from packax._src.ops.score_mods import Scores, add_sinks, place_specs, sinks_gradient, summed

Arrays = tuple[jax.Array, ...]


class Call(NamedTuple):
    """What the trace fixes of one attention."""

    scale: float
    return_lse: bool
    deterministic: bool
    implementation: Literal["cuda", "xla"] | None
    layout: Layout | None
    checkpoint_name: str | None = None
    needs_grad: tuple[bool, ...] = ()  # which gradients, of the leaves of the inputs in order
    soft_cap: float = 0.0  # 0: none
    return_max_logits: bool = False
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    gather_head_groups: HeadGroups = None


def forward(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    mask: AttentionMask,
    places: Arrays,
) -> tuple[Any, ...]:
    """out (B, Sq, H, Dv), lse (B, H, Sq), and the rows' largest logits like lse, on request.

    `places`: of rows and keys, if there is a bias and they are not just their indices.
    """
    function = _forward if call.layout is None else _forward_of_ranks
    return function(call, query, key, value, scores, mask, places)


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
    places: Arrays,
) -> tuple[jax.Array, jax.Array, jax.Array, Scores]:
    """The gradients of query, key, value and scores, sharded as they are.

    Those that call.needs_grad does not say may hold anything. `dlse`: lse if there is none.
    """
    function = _backward if call.layout is None else _backward_of_ranks
    return function(call, query, key, value, scores, out, lse, dout, dlse, mask, places)


# jit, so that outside of jit it is one program and not one for every operation and collective.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward_of_ranks(call: Call, query, key, value, scores, mask, places) -> tuple[Any, ...]:
    assert call.layout is not None
    q_spec, kv_spec, lse_spec, *others = _specs(call.layout, scores, mask, places)
    mapped = _shard_map(
        call.layout,
        lambda *operands: _forward(call, *operands),
        (q_spec, kv_spec, kv_spec, *others),
        (q_spec, lse_spec, lse_spec if call.return_max_logits else None),
    )
    return mapped(query, key, value, scores, mask, places)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward_of_ranks(
    call: Call, query, key, value, scores, out, lse, dout, dlse, mask, places
) -> tuple[Any, ...]:
    assert call.layout is not None
    q_spec, kv_spec, lse_spec, score_specs, *others = _specs(call.layout, scores, mask, places)
    rows = (q_spec, lse_spec, q_spec, lse_spec)
    mapped = _shard_map(
        call.layout,
        lambda *operands: _backward(call, *operands),
        (q_spec, kv_spec, kv_spec, score_specs, *rows, *others),
        (q_spec, kv_spec, kv_spec, score_specs),
    )
    return mapped(query, key, value, scores, out, lse, dout, dlse, mask, places)


def _specs(layout: Layout, scores: Scores, mask: AttentionMask, places: Arrays) -> tuple[Any, ...]:
    """Of query, key and value, log-sum-exps, scores, mask and places."""
    batch, context, heads = layout.batch, layout.context, layout.heads
    return (
        layout.spec(batch, context, heads),
        layout.spec(batch, layout.kv_context, layout.kv_heads),
        layout.spec(batch, heads, context),
        scores.specs(layout),
        mask.specs(layout.spec, batch, context, heads),
        place_specs(layout, places),
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


def _forward(call: Call, query, key, value, scores, mask, places) -> tuple[Any, ...]:
    """On one rank."""
    scores, query, key, value, mask, places = vary_together(scores, query, key, value, mask, places)
    groups = Groups(call.layout, call.gather_head_groups, query, key, value, mask.kv_plan)
    out = None
    lses: list[jax.Array] = []
    tops: list[jax.Array] = []
    for group in range(groups.number):
        keys, values = groups.next()
        extras = _extras(call, scores, places, groups, group)
        out, lse, *top = head_groups.forward(
            groups.heads_of(query.shape[2], group),
            out,
            query,
            keys,
            values,
            *groups.mask(mask, group).operands("forward"),
            *extras,
            scale=call.scale,
            soft_cap=call.soft_cap,
            precision=call.precision,
            element_test=mask.element_test,
            block_size=mask.block_size,
            max_logits=call.return_max_logits,
            extras=len(extras),
            implementation=call.implementation,
        )
        tops += top
        lses.append(lse)
        groups.gather_after(lse)
    assert out is not None
    lse = _joined(lses, 1)
    if scores.sinks is not None:
        out, lse = add_sinks(out, lse, scores.sinks)
    return out, lse, _joined(tops, 1) if tops else None


def _extras(call: Call, scores: Scores, places: Any, groups: Groups, group: int) -> Arrays:
    """The operands of the primitives behind the mask's: scales, then slopes and places."""
    if not scores.any_in_kernels():
        return ()
    real = jnp.float32 if scores.slopes is None else scores.slopes.dtype
    scale = jnp.full((1,), call.scale, real) if scores.scale is None else scores.scale
    if scores.slopes is None:
        return (scale,)
    slopes = groups.rows(scores.slopes, group, 1)
    if not places:
        return scale, slopes
    batch = max(x.shape[0] for x in places)
    return scale, *(jnp.broadcast_to(x, (batch, x.shape[1])) for x in (slopes, *places))


def _backward(
    call: Call, query, key, value, scores, out, lse, dout, dlse, mask, places
) -> tuple[Any, ...]:
    """On one rank."""
    scores, query, key, value, out, lse, dout, dlse, mask, places = vary_together(
        scores, query, key, value, out, lse, dout, dlse, mask, places
    )
    if call.layout is not None and call.layout.several(call.layout.kv_context):
        # Else XLA sees the forward's gathers here, and keeps the gathered keys for the backward.
        key, value, dout = jax.lax.optimization_barrier((key, value, dout))
    gathered = (call.gather_head_groups, query, key, value, mask.kv_plan)
    groups = Groups(call.layout, *gathered, backward=True)
    dq = None
    dks: list[jax.Array] = []
    dvs: list[jax.Array] = []
    score_grads: list[jax.Array] = []
    needs_grad = call.needs_grad[3 + (scores.sinks is not None) :]
    for group in range(groups.number):
        keys, values = groups.next()
        extras = _extras(call, scores, places, groups, group)
        dq, dk, dv, *score_grad = head_groups.backward(
            groups.heads_of(query.shape[2], group),
            dq,
            query,
            keys,
            values,
            out,
            groups.rows(lse, group, 1),
            dout,
            groups.rows(dlse, group, 1),
            *groups.mask(mask, group).operands("backward"),
            *extras,
            scale=call.scale,
            soft_cap=call.soft_cap,
            precision=call.precision,
            element_test=mask.element_test,
            block_size=mask.block_size,
            score_grads=scores.any_in_kernels() and any(needs_grad),
            extras=len(extras),
            has_dlse=call.return_lse,
            deterministic=call.deterministic,
            needs_grad=call.needs_grad[:3],
            implementation=call.implementation,
        )
        score_grads += score_grad
        # Not dq if there is another: the next group writes into it, which a look at it would put
        # off.
        made = [x for x, there in zip((dk, dv), call.needs_grad[1:3], strict=True) if there]
        groups.gather_after((made or [dq])[0])
        dk, dv = groups.scatter(dk, dv)
        dks.append(dk)
        dvs.append(dv)
    dscores = jax.tree.map(jnp.zeros_like, scores)  # for those that nobody wants
    if scores.sinks is not None:
        dlse = dlse if call.return_lse else None
        dscores = dscores._replace(sinks=sinks_gradient(scores.sinks, out, lse, dout, dlse))
    if score_grads:
        parts = _joined(score_grads, 1).sum(axis=(0, 3))  # (H, 2) of this rank's rows
        if scores.scale is not None:
            dscores = dscores._replace(scale=parts[:, 0].sum()[None])
        if scores.slopes is not None:
            dscores = dscores._replace(slopes=parts[:, 1][None])
    return (
        dq,
        groups.summed(_joined(dks, 2), key),
        groups.summed(_joined(dvs, 2), value),
        summed(call.layout, dscores),
    )


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
