"""The forward and backward pass of one rank, whose keys are gathered in groups of heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import KVGatherPipeline
from packax._src.core.context_mask import ContextMask
from packax._src.core.mask import Pass
from packax._src.core.schema import ROWS
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import head_groups
from packax._src.ops.primitives import score_operands
from packax._src.ops.score_mods import NonDiffOperands, ScoreParams

Arrays = tuple[jax.Array, ...]


class Rows(NamedTuple):
    """The rows of a rank, or some of them, and the other operands of their attention."""

    query: jax.Array
    scores: ScoreParams
    mask: ContextMask
    fixed: NonDiffOperands
    # For the backward pass: the forward's results and their cotangents.
    out: Any = None
    lse: Any = None
    dout: Any = None
    dlse: Any = None


def forward(spec: AttentionSpec, query, key, value, scores, mask, fixed) -> list[jax.Array]:
    """out, lse and, if requested, the largest logits. The keys of all ranks are gathered."""
    groups = KVGatherPipeline(spec.layout, spec.gather_head_groups, query, key, value, mask.kv_plan)
    return forward_groups(spec, groups, Rows(query, scores, mask, fixed))


def backward(
    spec: AttentionSpec, query, key, value, scores, out, lse, dout, dlse, mask, fixed
) -> tuple[Any, ...]:
    """The gradients of query, key and value, this rank's part of the gradients of scale and slopes,
    (H, 2) or None, row_delta or None, and the gradient of the bias or None."""
    gathered = (spec.gather_head_groups, query, key, value, mask.kv_plan)
    groups = KVGatherPipeline(spec.layout, *gathered, backward=True)
    rows = Rows(query, scores, mask, fixed, out, lse, dout, dlse)
    found: list[tuple[Any, ...]] = []
    backward_groups(spec, groups, range(groups.number), rows, found)
    dq, dk, dv, *others = whole(found, scores.bias)
    return dq, groups.summed(dk, key), groups.summed(dv, value), *others


def forward_groups(spec: AttentionSpec, groups: KVGatherPipeline, rows: Rows) -> list[jax.Array]:
    """out, lse and, if requested, the largest logits, of all groups of heads."""
    query, scores, mask, fixed = rows[:4]
    out = None
    others: list[list[jax.Array]] = []
    for group in range(groups.number):
        keys, values = groups.next()
        head_range = groups.heads_of(query.shape[2], group)
        operands = Operands(query, keys, values, init=out)._replace(
            **groups.mask(mask, group).operands("forward"),
            **_score_operands("forward", spec, scores, fixed, groups, group),
        )
        out, lse, *top = head_groups.run("forward", head_range, spec.of_primitive(mask), operands)
        others.append([lse, *top])
        groups.gather_after(lse)
    assert out is not None
    return [out, *(_concat(list(x), 1) for x in zip(*others, strict=True))]


def backward_groups(
    spec: AttentionSpec,
    groups: KVGatherPipeline,
    which: Iterable[int],
    rows: Rows,
    found: list[tuple[Any, ...]],
) -> None:
    """Appends the gradients of each of these groups to `found`."""
    for group in which:
        dq = found[-1][0] if found else None
        found.append(_backward_group(spec, groups, group, rows, dq))


def whole(found: list[tuple[Any, ...]], bias: jax.Array | None = None) -> tuple[Any, ...]:
    """Joins the gradients of all groups: dq, dk, dv, (H, 2) for scale and slopes or None, row_delta
    or None, and that of `bias` or None."""
    dqs, dks, dvs, scores, deltas, biases = map(list, zip(*found, strict=True))
    of_scores = None if scores[0] is None else _concat(scores, 1).sum(axis=(0, 3))
    row_delta = None if deltas[0] is None else _concat(deltas, 1)
    of_bias = None
    if bias is not None and biases[0] is not None:
        one_for_all = bias.shape[1] == 1
        of_bias = sum(biases[1:], biases[0]) if one_for_all else _concat(biases, 1)
    return dqs[-1], _concat(dks, 2), _concat(dvs, 2), of_scores, row_delta, of_bias


def _backward_group(
    spec: AttentionSpec, groups: KVGatherPipeline, group: int, rows: Rows, dq: jax.Array | None
) -> tuple[Any, ...]:
    """The gradients of one group: dq (with the heads of earlier groups, from the argument `dq`), dk
    and dv, and `spec.score_params`."""
    query, scores, mask, fixed, out, lse, dout, dlse = rows
    keys, values = groups.next()
    lse, dlse = (None if x is None else groups.rows(x, group, 1) for x in (lse, dlse))
    operands = Operands(query, keys, values, out, lse, dout, dlse, init=dq)._replace(
        **groups.mask(mask, group).operands("backward"),
        **_score_operands("backward", spec, scores, fixed, groups, group),
    )
    head_range = groups.heads_of(query.shape[2], group)
    dq, dk, dv, *others = head_groups.run("backward", head_range, spec.of_primitive(mask), operands)
    # dq only if there is no other: the next group writes into it, and would wait for the read.
    key_gradients = [x for x, name in ((dk, "key"), (dv, "value")) if name in spec.needs_grad]
    groups.gather_after((key_gradients or [dq])[0])
    return dq, *groups.scatter(dk, dv), *spec.score_params(others)


def _score_operands(
    direction: Pass,
    spec: AttentionSpec,
    scores: ScoreParams,
    fixed: NonDiffOperands,
    groups: KVGatherPipeline,
    group: int,
) -> dict[str, jax.Array]:
    """`score_operands` for the heads of the group."""
    return {
        name: groups.rows(x, group, 1)
        if ROWS[name].axes[1:2] in ("h", "H") and x.shape[1] > 1
        else x
        for name, x in score_operands(direction, spec, scores, fixed).items()
    }


def _concat(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
