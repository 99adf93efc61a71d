"""What a rank computes with a plan that keeps documents local: only shared rows' keys are gathered.

A document lies whole on one rank, or in the ranks' shared parts. So there are two attentions with a
mask each: of all rows of a rank and its own keys, and of its shared rows and the shared keys of all
ranks. A row is empty in one of the two, and adds 0 there. The first runs while the shared keys are
gathered. Of its backward pass, one half of the heads runs then too, and the other while the shared
gradients are reduce-scattered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import Groups, zero_after
from packax._src.context.load_balance import take_chunks
from packax._src.context.rank_passes import (
    Arrays,
    Call,
    Gradients,
    Rows,
    backward_group,
    forward_groups,
)
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask


def forward(
    call: Call, scores, query, key, value, mask, bias_pos
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """out, lse and the largest logits, if asked for."""
    private = _private(call, scores, query, key, value, mask, bias_pos)
    if mask.shared_part is None:
        return forward_groups(call, *private)
    shared = _shared(call, scores, query, key, value, mask, bias_pos)
    private.groups.sent = zero_after(*shared.groups.to_send)
    out, lse, top = forward_groups(call, *private)
    shared.groups.attended = zero_after(lse)
    more, more_lse, more_top = forward_groups(call, *shared)
    if top is not None and more_top is not None:
        top = _on_first(jnp.maximum, top, more_top, 2)
    return _on_first(jnp.add, out, more, 1), _on_first(jnp.maximum, lse, more_lse, 2), top


def backward(
    call: Call, scores, query, key, value, mask, bias_pos, out, lse, dout, dlse
) -> tuple[Any, ...]:
    """The gradients of query, key and value, and what rows add to those of scale and slopes."""
    results = (out, lse, dout, dlse)
    own, more = Gradients(), Gradients()
    private = _private(call, scores, query, key, value, mask, bias_pos, results)
    halves = iter(range(private.groups.number))
    if mask.shared_part is not None:
        shared = _shared(call, scores, query, key, value, mask, bias_pos, results)
        if private.groups.number > 1:
            private.groups.sent = zero_after(*shared.groups.to_send)
            own.add(*backward_group(call, private.groups, next(halves), private.rows, None))
            # Not dq: the other half writes into it, which a look at it would put off.
            keys = zip((own.keys, own.values), call.needs_grad[1:3], strict=True)
            shared.groups.attended = zero_after(*[x[0] for x, there in keys if there][:1])
        for group in range(shared.groups.number):
            more.add(*backward_group(call, shared.groups, group, shared.rows, more.dq))
        private.groups.sent = None
        private.groups.sent_back = zero_after(*shared.groups.to_send_back)
    for group in halves:
        own.add(*backward_group(call, private.groups, group, private.rows, own.dq))
    dq, dk, dv, of_scores = own.whole()
    if mask.shared_part is not None:
        *found, more_scores = more.whole()
        pairs = zip((dq, dk, dv), found, strict=True)
        dq, dk, dv = (_on_first(jnp.add, x, first, 1) for x, first in pairs)
        of_scores = None if of_scores is None else of_scores + more_scores
    groups = private.groups
    return dq, groups.summed(dk, key), groups.summed(dv, value), of_scores


class _Part(NamedTuple):
    """Keys by groups of heads, and the rows that attend them."""

    groups: Groups
    rows: Rows


def _private(call: Call, scores, query, key, value, mask, bias_pos, results: Arrays = ()) -> _Part:
    """All rows of the rank and its own keys; `results`: out, lse and cotangents, for backward."""
    of = mask.private_part
    groups = Groups(
        call.layout, None, query, key, value, of.kv_plan, backward=bool(results), private=True
    )
    if bias_pos:
        bias_pos = bias_pos[0], _own_keys(call, mask, bias_pos[1])
    return _Part(groups, Rows(query, scores, of, bias_pos, *results))


def _shared(call: Call, scores, query, key, value, mask, bias_pos, results: Arrays = ()) -> _Part:
    """The first rows of the rank, and such keys of all ranks."""
    of = mask.shared_part
    number = of.q_lo.shape[1]

    def first(x: jax.Array, axis: int = 1) -> jax.Array:
        return jax.lax.slice_in_dim(x, 0, number, axis=axis)

    query, key, value = (first(x) for x in (query, key, value))
    groups = Groups(
        call.layout,
        call.gather_head_groups,
        query,
        key,
        value,
        of.kv_plan,
        backward=bool(results),
        beside=mask.private_part.kv_len - number,
    )
    if bias_pos:
        moved = _in_plans_order(call, mask, bias_pos[1])[:, :, :number]
        keys = take_chunks(of.kv_plan[:, 1], 1, moved.reshape(len(moved), of.kv_len))
        bias_pos = first(bias_pos[0]), keys
    results = tuple(first(x, 1 if x.ndim == 4 else 2) for x in results)
    return _Part(groups, Rows(query, scores, of, bias_pos, *results))


def _own_keys(call: Call, mask: AttentionMask, bias_pos: jax.Array) -> jax.Array:
    """Of the rank's own keys, in order."""
    moved = _in_plans_order(call, mask, bias_pos)
    assert call.layout is not None and mask.private_part is not None
    moved, rank = vary_together(moved, jax.lax.axis_index(call.layout.context))
    own = jax.lax.dynamic_index_in_dim(moved, rank, 1, keepdims=False)
    plan = mask.private_part.kv_plan
    return own if plan is None else take_chunks(plan[:, 1], 1, own)


def _in_plans_order(call: Call, mask: AttentionMask, bias_pos: jax.Array) -> jax.Array:
    """(batch, ranks, rows of each), from those of all keys in the order of the sequence."""
    assert call.layout is not None and mask.kv_plan is not None
    batch = max(len(bias_pos), len(mask.kv_plan))
    bias_pos = jnp.broadcast_to(bias_pos, (batch, bias_pos.shape[1]))
    moved = take_chunks(mask.kv_plan[:, 0], 1, bias_pos)
    return moved.reshape(batch, call.layout.size(call.layout.context), -1)


def _on_first(join: Any, x: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """x, on its first rows joined with others."""
    begin = jax.lax.slice_in_dim(x, 0, first.shape[axis], axis=axis)
    # Not a concatenation, which would copy the other rows.
    x, joined, zero = vary_together(x, join(begin, first), jnp.int32(0))
    return jax.lax.dynamic_update_slice_in_dim(x, joined, zero, axis)
