"""What a rank computes with a plan that keeps documents local: only shared rows' keys are gathered.

A document lies whole on one rank, or in the shared parts of all ranks, or of those of a host. So
there is an attention with a mask for each: of all rows of a rank and its own keys, and of its first
rows and such keys of the ranks that share them. A row is empty in all but one, and adds 0 there.
The first runs while shared keys are gathered. Of its backward pass, one half of the heads runs then
too, and the other while shared gradients are reduce-scattered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import Groups, as_gathered, piece, zero_after
from packax._src.context.load_balance import take_chunks
from packax._src.context.rank_passes import Gradients, Rows, backward_group, forward_groups
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask
from packax._src.core.spec import AttentionSpec


def forward(spec: AttentionSpec, query, key, value, scores, mask, fixed) -> list[jax.Array]:
    """out, lse and the largest logits, if asked for."""
    private, *shared = _parts(spec, scores, query, key, value, mask, fixed)
    private.groups.sent = _all_sent(shared)
    out, lse, *top = forward_groups(spec, *private)
    for part in shared:
        part.groups.attended = zero_after(lse)
        more, more_lse, *more_top = forward_groups(spec, *part)
        top = [_on_first(jnp.maximum, *x, 2) for x in zip(top, more_top, strict=True)]
        out, lse = _on_first(jnp.add, out, more, 1), _on_first(jnp.maximum, lse, more_lse, 2)
    if mask.plan_mismatch is not None:
        # One number of each head is enough to reach all that is made of the output. Gradients are
        # NaN by the log-sum-exp.
        nan = jnp.where(mask.plan_mismatch != 0, jnp.nan, 0.0)
        lse = lse + nan.reshape(-1, *[1] * (lse.ndim - 1)).astype(lse.dtype)
        of_heads = jnp.broadcast_to(nan[:, None, None, None], (*out.shape[:3], 1))
        out = _on_first(jnp.add, out, of_heads.astype(out.dtype), 3)
    return [out, lse, *top]


def backward(
    spec: AttentionSpec, query, key, value, scores, out, lse, dout, dlse, mask, fixed
) -> tuple[Any, ...]:
    """The gradients of query, key and value, and what rows add to those of scale and slopes."""
    results = (out, lse, dout, dlse)
    private, *shared = _parts(spec, scores, query, key, value, mask, fixed, results)
    own, others = Gradients(), []
    halves = iter(range(private.groups.number))
    if shared and private.groups.number > 1:
        private.groups.sent = _all_sent(shared)
        own.add(*backward_group(spec, private.groups, next(halves), private.rows, None))
        # Not dq: the other half writes into it, which a look at it would put off.
        made = [(own.keys, "key"), (own.values, "value")]
        done = zero_after(*[x[0] for x, name in made if name in spec.needs_grad][:1])
        for part in shared:
            part.groups.attended = done
    for part in shared:
        more = Gradients()
        for group in range(part.groups.number):
            more.add(*backward_group(spec, part.groups, group, part.rows, more.dq))
        others.append(more)
    private.groups.sent = None
    if shared:
        to_send = [x for part in shared for x in part.groups.to_send_back]
        private.groups.sent_back = zero_after(*to_send)
    for group in halves:
        own.add(*backward_group(spec, private.groups, group, private.rows, own.dq))
    dq, dk, dv, of_scores, _ = own.whole()
    for more in others:
        *found, more_scores, _ = more.whole()
        pairs = zip((dq, dk, dv), found, strict=True)
        dq, dk, dv = (_on_first(jnp.add, x, first, 1) for x, first in pairs)
        of_scores = None if of_scores is None else of_scores + more_scores
    groups = private.groups
    return dq, groups.summed(dk, key), groups.summed(dv, value), of_scores, None


class _Part(NamedTuple):
    """Keys by groups of heads, and the rows that attend them."""

    groups: Groups
    rows: Rows


def _parts(
    spec: AttentionSpec, scores, query, key, value, mask, fixed, results: tuple[Any, ...] = ()
) -> list[_Part]:
    """In the order in which they are attended: private rows, then what is shared by the fewest.

    results: out, lse and cotangents, for backward.
    """
    shared = [
        (of, of.q_lo.shape[1])  # the first rows of the rank, and such keys of the ranks
        for of in reversed(mask.shared_parts)
    ]
    private = query.shape[1] - max((number for _, number in shared), default=0)
    made: list[_Part] = []
    for of, number in [(mask.private_part, query.shape[1]), *shared]:

        def first(x: jax.Array, axis: int = 1, number: int = number) -> jax.Array:
            return jax.lax.slice_in_dim(x, 0, number, axis=axis)

        own_query, own_key, own_value = (first(x) for x in (query, key, value))
        groups = Groups(
            spec.layout,
            spec.gather_head_groups,
            own_query,
            own_key,
            own_value,
            of.kv_plan,
            backward=bool(results),
            starts=of.gathers,
            beside=private,
        )
        own_fixed = fixed
        if fixed.positions:
            rows, keys = fixed.positions
            positions = first(rows), _of_keys(spec, mask, of, keys, number)
            own_fixed = fixed._replace(positions=positions)
        own_results = (None if x is None else first(x, 1 if x.ndim == 4 else 2) for x in results)
        made.append(_Part(groups, Rows(own_query, scores, of, own_fixed, *own_results)))
    return made


def _all_sent(shared: list[_Part]) -> jax.Array | None:
    """0 when the keys of all that is shared are ready to be sent."""
    pieces = [x for part in shared for x in part.groups.to_send]
    return zero_after(*pieces) if pieces else None


def _of_keys(
    spec: AttentionSpec, mask: AttentionMask, of: AttentionMask, x: jax.Array, number: int
) -> Any:
    """What all keys have in the order of the sequence, of the keys of a part."""
    layout = spec.layout
    assert layout is not None and of.gathers is not None
    x = _in_plans_order(spec, mask, x)[:, :, :number]
    outside = layout.context[: of.gathers[0]] if of.gathers else layout.context
    x = piece(x, outside, layout)
    if not of.gathers:
        return x[:, 0]
    assert of.kv_plan is not None
    return take_chunks(of.kv_plan[:, 1], 1, as_gathered(x, layout, of.gathers))


def _in_plans_order(spec: AttentionSpec, mask: AttentionMask, positions: jax.Array) -> jax.Array:
    """(batch, ranks, rows of each), from those of all keys in the order of the sequence."""
    assert spec.layout is not None and mask.kv_plan is not None
    batch = max(len(positions), len(mask.kv_plan))
    positions = jnp.broadcast_to(positions, (batch, positions.shape[1]))
    moved = take_chunks(mask.kv_plan[:, 0], 1, positions)
    return moved.reshape(batch, spec.layout.size(spec.layout.context), -1)


def _on_first(join: Any, x: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """x, on its first rows joined with others."""
    # Not a concatenation, which would copy the other rows. And at a place that XLA does not know:
    # where it does, some of its versions take the update for a result of the kernel's and fail.
    x, first, zero = vary_together(x, first, zero_after(first))
    begin = jax.lax.dynamic_slice_in_dim(x, zero, first.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(x, join(begin, first), zero, axis)
