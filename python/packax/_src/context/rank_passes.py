"""Forward and backward of a rank's rows, against keys that come by groups of heads."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import Groups
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import HeadGroups, Layout
from packax._src.ops import head_groups
from packax._src.ops.score_mods import Scores

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


class Rows(NamedTuple):
    """A rank's rows, or a part of them, and what they are attended with."""

    query: jax.Array
    scores: Scores
    mask: AttentionMask
    bias_pos: Arrays
    # Of the backward pass: the results and their cotangents.
    out: Any = None
    lse: Any = None
    dout: Any = None
    dlse: Any = None


def forward(
    call: Call, scores, query, key, value, mask, bias_pos
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """out, lse and the largest logits, if asked for, of rows that attend keys of all ranks."""
    groups = Groups(call.layout, call.gather_head_groups, query, key, value, mask.kv_plan)
    return forward_groups(call, groups, Rows(query, scores, mask, bias_pos))


def backward(
    call: Call, scores, query, key, value, mask, bias_pos, out, lse, dout, dlse
) -> tuple[Any, ...]:
    """The gradients of query, key and value, and what rows add to those of scale and slopes."""
    gathered = (call.gather_head_groups, query, key, value, mask.kv_plan)
    groups = Groups(call.layout, *gathered, backward=True)
    rows = Rows(query, scores, mask, bias_pos, out, lse, dout, dlse)
    found = Gradients()
    for group in range(groups.number):
        found.add(*backward_group(call, groups, group, rows, found.dq))
    dq, dk, dv, of_scores = found.whole()
    return dq, groups.summed(dk, key), groups.summed(dv, value), of_scores


def forward_groups(
    call: Call, groups: Groups, rows: Rows
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """out, lse, and the largest logits, if asked for, of all groups."""
    query, scores, mask, bias_pos = rows[:4]
    out = None
    lses: list[jax.Array] = []
    tops: list[jax.Array] = []
    for group in range(groups.number):
        keys, values = groups.next()
        extras = _extras(call, scores, bias_pos, groups, group)
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
            segment_check=mask.segment_check,
            block_size=mask.block_size,
            max_logits=call.return_max_logits,
            extras=len(extras),
            implementation=call.implementation,
        )
        tops += top
        lses.append(lse)
        groups.gather_after(lse)
    assert out is not None
    return out, _joined(lses, 1), _joined(tops, 1) if tops else None


class Gradients:
    """Those of groups, as they come."""

    def __init__(self) -> None:
        self.dq: jax.Array | None = None
        self.keys: list[jax.Array] = []
        self.values: list[jax.Array] = []
        self.scores: list[jax.Array] = []

    def add(self, dq: jax.Array, dk: jax.Array, dv: jax.Array, *scores: jax.Array) -> None:
        self.dq = dq
        self.keys.append(dk)
        self.values.append(dv)
        self.scores += scores

    def whole(self) -> tuple[Any, ...]:
        """dq, dk and dv of all heads, and (H, 2) of scale and slopes or None."""
        scores = _joined(self.scores, 1).sum(axis=(0, 3)) if self.scores else None
        return self.dq, _joined(self.keys, 2), _joined(self.values, 2), scores


def backward_group(
    call: Call, groups: Groups, group: int, rows: Rows, dq: jax.Array | None
) -> tuple[Any, ...]:
    """The gradients of query, on the others', of keys and values, and what there is of scores."""
    query, scores, mask, bias_pos, out, lse, dout, dlse = rows
    needs_grad = call.needs_grad[3 + (scores.sinks is not None) :]
    keys, values = groups.next()
    extras = _extras(call, scores, bias_pos, groups, group)
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
        segment_check=mask.segment_check,
        block_size=mask.block_size,
        score_grads=scores.any_in_kernels() and any(needs_grad),
        extras=len(extras),
        has_dlse=call.return_lse,
        deterministic=call.deterministic,
        needs_grad=call.needs_grad[:3],
        implementation=call.implementation,
    )
    # Not dq if there is another: the next group writes into it, which a look at it would put off.
    made = [x for x, there in zip((dk, dv), call.needs_grad[1:3], strict=True) if there]
    groups.gather_after((made or [dq])[0])
    return dq, *groups.scatter(dk, dv), *score_grad


def _extras(call: Call, scores: Scores, bias_pos: Any, groups: Groups, group: int) -> Arrays:
    """The operands of the primitives behind the mask's: scales, then slopes and bias_pos."""
    if not scores.any_in_kernels():
        return ()
    real = jnp.float32 if scores.slopes is None else scores.slopes.dtype
    scale = jnp.full((1,), call.scale, real) if scores.scale is None else scores.scale
    if scores.slopes is None:
        return (scale,)
    slopes = groups.rows(scores.slopes, group, 1)
    if not bias_pos:
        return scale, slopes
    batch = max(x.shape[0] for x in bias_pos)
    return scale, *(jnp.broadcast_to(x, (batch, x.shape[1])) for x in (slopes, *bias_pos))


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
