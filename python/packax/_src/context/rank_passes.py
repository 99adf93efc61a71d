"""Forward and backward of a rank's rows, against keys that come by groups of heads."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import Groups
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import HeadGroups, Layout
from packax._src.ops import head_groups
from packax._src.ops.score_mods import Beside, Scores

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
    bias_dims: tuple[Any, ...] = ()  # the mesh axes that a bias has
    dropout_threshold: int = 0  # of 2^32: probabilities whose word is below are dropped

    def scores_need(self, scores: Scores) -> Scores:
        """Of which of these a gradient is needed."""
        tree = jax.tree.structure(scores)
        return jax.tree.unflatten(tree, self.needs_grad[3:])


class Rows(NamedTuple):
    """A rank's rows, or a part of them, and what they are attended with."""

    query: jax.Array
    scores: Scores
    mask: AttentionMask
    beside: Beside
    # Of the backward pass: the results and their cotangents.
    out: Any = None
    lse: Any = None
    dout: Any = None
    dlse: Any = None


def forward(
    call: Call, scores, query, key, value, mask, beside
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """out, lse and the largest logits, if asked for, of rows that attend keys of all ranks."""
    groups = Groups(call.layout, call.gather_head_groups, query, key, value, mask.kv_plan)
    return forward_groups(call, groups, Rows(query, scores, mask, beside))


def backward(
    call: Call, scores, query, key, value, mask, beside, out, lse, dout, dlse
) -> tuple[Any, ...]:
    """The gradients of query, key and value, what rows add to those of scale and slopes, and that
    of the bias."""
    gathered = (call.gather_head_groups, query, key, value, mask.kv_plan)
    groups = Groups(call.layout, *gathered, backward=True)
    rows = Rows(query, scores, mask, beside, out, lse, dout, dlse)
    found = Gradients()
    for group in range(groups.number):
        found.add(*backward_group(call, groups, group, rows, found.dq))
    dq, dk, dv, *others = found.whole(scores.bias)
    return dq, groups.summed(dk, key), groups.summed(dv, value), *others


def forward_groups(
    call: Call, groups: Groups, rows: Rows
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """out, lse, and the largest logits, if asked for, of all groups."""
    query, scores, mask, beside = rows[:4]
    out = None
    lses: list[jax.Array] = []
    tops: list[jax.Array] = []
    for group in range(groups.number):
        keys, values = groups.next()
        extras = _extras(call, scores, beside, groups, group)
        out, lse, *top = head_groups.forward(
            groups.heads_of(query.shape[2], group),
            out,
            query,
            keys,
            values,
            *groups.mask(mask, group).operands("forward"),
            *extras.values(),
            scale=call.scale,
            soft_cap=call.soft_cap,
            precision=call.precision,
            segment_check=mask.segment_check,
            block_size=mask.block_size,
            max_logits=call.return_max_logits,
            extras=tuple(extras),
            dropout_threshold=call.dropout_threshold,
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
        self.biases: list[jax.Array] = []

    def add(
        self,
        dq: jax.Array,
        dk: jax.Array,
        dv: jax.Array,
        scores: jax.Array | None,
        bias: jax.Array | None,
    ) -> None:
        self.dq = dq
        self.keys.append(dk)
        self.values.append(dv)
        self.scores += [] if scores is None else [scores]
        self.biases += [] if bias is None else [bias]

    def whole(self, bias: jax.Array | None = None) -> tuple[Any, ...]:
        """dq, dk and dv of all heads, (H, 2) of scale and slopes or None, that of `bias` or
        None."""
        scores = _joined(self.scores, 1).sum(axis=(0, 3)) if self.scores else None
        of_bias = None
        if self.biases and bias is not None:
            one_for_all = bias.shape[1] == 1
            of_bias = sum(self.biases[1:], self.biases[0]) if one_for_all else None
            of_bias = _joined(self.biases, 1) if of_bias is None else of_bias
        return self.dq, _joined(self.keys, 2), _joined(self.values, 2), scores, of_bias


def backward_group(
    call: Call, groups: Groups, group: int, rows: Rows, dq: jax.Array | None
) -> tuple[Any, ...]:
    """The gradients of query, on the others', of keys and values, and what there is of scores and
    of the bias, or None."""
    query, scores, mask, beside, out, lse, dout, dlse = rows
    needs = call.scores_need(scores)
    score_grads, bias_grad = bool(needs.scale or needs.slopes), bool(needs.bias)
    keys, values = groups.next()
    extras = _extras(call, scores, beside, groups, group)
    dq, dk, dv, *others = head_groups.backward(
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
        *extras.values(),
        scale=call.scale,
        soft_cap=call.soft_cap,
        precision=call.precision,
        segment_check=mask.segment_check,
        block_size=mask.block_size,
        score_grads=score_grads,
        bias_grad=bias_grad,
        extras=tuple(extras),
        dropout_threshold=call.dropout_threshold,
        has_dlse=call.return_lse,
        deterministic=call.deterministic,
        needs_grad=call.needs_grad[:3],
        implementation=call.implementation,
    )
    # Not dq if there is another: the next group writes into it, which a look at it would put off.
    made = [x for x, there in zip((dk, dv), call.needs_grad[1:3], strict=True) if there]
    groups.gather_after((made or [dq])[0])
    of_scores = others.pop(0) if score_grads else None
    return dq, *groups.scatter(dk, dv), of_scores, others.pop(0) if bias_grad else None


def _extras(
    call: Call, scores: Scores, beside: Beside, groups: Groups, group: int
) -> dict[str, jax.Array]:
    """The operands of the primitives behind the mask's, by name and in order."""
    made: dict[str, jax.Array] = {}
    if scores.scale is not None or scores.slopes is not None:
        real = jnp.float32 if scores.slopes is None else scores.slopes.dtype
        made["scales"] = jnp.full((1,), call.scale, real) if scores.scale is None else scores.scale
    if scores.slopes is not None:
        made["slopes"] = groups.rows(scores.slopes, group, 1)
        if beside.positions:
            batch = max(x.shape[0] for x in beside.positions)
            named = (made["slopes"], *beside.positions)
            for name, x in zip(("slopes", "q_bias_pos", "kv_bias_pos"), named, strict=True):
                made[name] = jnp.broadcast_to(x, (batch, x.shape[1]))
    if scores.bias is not None:
        one_for_all = scores.bias.shape[1] == 1
        made["bias"] = scores.bias if one_for_all else groups.rows(scores.bias, group, 1)
    if beside.streams is not None:
        made["dropout_streams"] = groups.rows(beside.streams, group, 1)
        made["dropout_rows"] = beside.rows
    return made


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
