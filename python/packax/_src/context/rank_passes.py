"""Forward and backward of a rank's rows, with keys that arrive in groups of heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import KVGatherPipeline
from packax._src.core.mask import AttentionMask
from packax._src.core.spec import OF_HEADS, AttentionSpec, Operands
from packax._src.ops import head_groups
from packax._src.ops.primitives import score_operands
from packax._src.ops.score_mods import NonDiffOperands, ScoreParams

Arrays = tuple[jax.Array, ...]


class Rows(NamedTuple):
    """A rank's rows, or a part of them, and the operands of their attention."""

    query: jax.Array
    scores: ScoreParams
    mask: AttentionMask
    fixed: NonDiffOperands
    # For the backward pass: the results and their cotangents.
    out: Any = None
    lse: Any = None
    dout: Any = None
    dlse: Any = None


def forward(spec: AttentionSpec, query, key, value, scores, mask, fixed) -> list[jax.Array]:
    """out, lse and the largest logits, if requested, of rows that attend to keys of all ranks."""
    groups = KVGatherPipeline(spec.layout, spec.gather_head_groups, query, key, value, mask.kv_plan)
    return forward_groups(spec, groups, Rows(query, scores, mask, fixed))


def backward(
    spec: AttentionSpec, query, key, value, scores, out, lse, dout, dlse, mask, fixed
) -> tuple[Any, ...]:
    """The gradients of query, key and value, the rows' part of those of scale and slopes, and that
    of the bias."""
    gathered = (spec.gather_head_groups, query, key, value, mask.kv_plan)
    groups = KVGatherPipeline(spec.layout, *gathered, backward=True)
    rows = Rows(query, scores, mask, fixed, out, lse, dout, dlse)
    found: list[tuple[Any, ...]] = []
    backward_groups(spec, groups, range(groups.number), rows, found)
    dq, dk, dv, *others = whole(found, scores.bias)
    return dq, groups.summed(dk, key), groups.summed(dv, value), *others


def forward_groups(spec: AttentionSpec, groups: KVGatherPipeline, rows: Rows) -> list[jax.Array]:
    """out, lse, and the largest logits, if requested, of all groups."""
    query, scores, mask, fixed = rows[:4]
    out = None
    others: list[list[jax.Array]] = []
    for group in range(groups.number):
        keys, values = groups.next()
        own = groups.heads_of(query.shape[2], group)
        operands = Operands(query, keys, values, init=out)._replace(
            **groups.mask(mask, group).operands("forward"),
            **_extras(spec, scores, fixed, groups, group),
        )
        out, lse, *top = head_groups.run("forward", own, spec.of_primitive(mask), operands)
        others.append([lse, *top])
        groups.gather_after(lse)
    assert out is not None
    return [out, *(_joined(list(x), 1) for x in zip(*others, strict=True))]


def backward_groups(
    spec: AttentionSpec,
    groups: KVGatherPipeline,
    which: Iterable[int],
    rows: Rows,
    found: list[tuple[Any, ...]],
) -> None:
    """Appends the gradients of each of these groups to those of the groups before."""
    for group in which:
        dq = found[-1][0] if found else None
        found.append(_backward_group(spec, groups, group, rows, dq))


def whole(found: list[tuple[Any, ...]], bias: jax.Array | None = None) -> tuple[Any, ...]:
    """Of all groups dq, dk and dv, (H, 2) of scale and slopes or None, that of `bias` or None."""
    dqs, dks, dvs, scores, biases = map(list, zip(*found, strict=True))
    of_scores = None if scores[0] is None else _joined(scores, 1).sum(axis=(0, 3))
    of_bias = None
    if bias is not None and biases[0] is not None:
        one_for_all = bias.shape[1] == 1
        of_bias = sum(biases[1:], biases[0]) if one_for_all else _joined(biases, 1)
    return dqs[-1], _joined(dks, 2), _joined(dvs, 2), of_scores, of_bias


def _backward_group(
    spec: AttentionSpec, groups: KVGatherPipeline, group: int, rows: Rows, dq: jax.Array | None
) -> tuple[Any, ...]:
    """The gradients of query, on the others', of keys and values, and what there is of scores and
    of the bias, or None."""
    query, scores, mask, fixed, out, lse, dout, dlse = rows
    keys, values = groups.next()
    lse, dlse = (None if x is None else groups.rows(x, group, 1) for x in (lse, dlse))
    operands = Operands(query, keys, values, out, lse, dout, dlse, init=dq)._replace(
        **groups.mask(mask, group).operands("backward"),
        **_extras(spec, scores, fixed, groups, group),
    )
    own = groups.heads_of(query.shape[2], group)
    dq, dk, dv, *others = head_groups.run("backward", own, spec.of_primitive(mask), operands)
    # Not dq if there is another: the next group writes into it, and would wait for this read.
    made = [x for x, name in ((dk, "key"), (dv, "value")) if name in spec.needs_grad]
    groups.gather_after((made or [dq])[0])
    of_scores = others.pop(0) if spec.score_grads else None
    return dq, *groups.scatter(dk, dv), of_scores, others.pop(0) if spec.bias_grad else None


def _extras(
    spec: AttentionSpec,
    scores: ScoreParams,
    fixed: NonDiffOperands,
    groups: KVGatherPipeline,
    group: int,
) -> dict[str, jax.Array]:
    """The operands that change scores and probabilities, for the group's heads."""
    return {
        name: groups.rows(x, group, 1) if name in OF_HEADS and x.shape[1] > 1 else x
        for name, x in score_operands(spec, scores, fixed).items()
    }


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
