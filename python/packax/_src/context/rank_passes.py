"""The forward and backward pass of one rank, whose keys are gathered in groups of heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import KVGatherPipeline
from packax._src.core.mask import Pass
from packax._src.core.schema import ROWS
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import head_groups
from packax._src.ops.primitives import Inputs, score_operands


def forward(spec: AttentionSpec, x: Inputs) -> list[jax.Array]:
    """out, lse and, if requested, the largest logits. The keys of all ranks are gathered."""
    return forward_groups(KVGatherPipeline(spec, x))


def backward(spec: AttentionSpec, x: Inputs) -> tuple[Any, ...]:
    """The gradients of query, key and value, this rank's part of the gradients of scale and slopes,
    (H, 2) or None, row_delta or None, and the gradient of the bias or None."""
    groups = KVGatherPipeline(spec, x)
    found: list[tuple[Any, ...]] = []
    backward_groups(groups, range(groups.number), found)
    dq, dk, dv, *others = whole(found, x.scores.bias)
    return dq, groups.summed(dk, x.key), groups.summed(dv, x.value), *others


def forward_groups(groups: KVGatherPipeline) -> list[jax.Array]:
    """out, lse and, if requested, the largest logits, of all groups of heads."""
    out = None
    others: list[list[jax.Array]] = []
    for group in range(groups.number):
        out, lse, *top = _run("forward", groups, group, out)
        others.append([lse, *top])
        groups.gather_after(lse)
    assert out is not None
    return [out, *(_concat(list(parts), 1) for parts in zip(*others, strict=True))]


def backward_groups(
    groups: KVGatherPipeline, which: Iterable[int], found: list[tuple[Any, ...]]
) -> None:
    """Appends the gradients of each of these groups to `found`: dq (with the heads of earlier
    groups), dk and dv, and `spec.score_params`."""
    spec = groups.spec
    for group in which:
        before = found[-1][0] if found else None
        dq, dk, dv, *others = _run("backward", groups, group, before)
        # dq only if there is no other: the next group writes into it, and would wait for the read.
        key_gradients = [x for x, name in ((dk, "key"), (dv, "value")) if name in spec.needs_grad]
        groups.gather_after((key_gradients or [dq])[0])
        found.append((dq, *groups.scatter(dk, dv), *spec.score_params(others)))


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


def _run(direction: Pass, groups: KVGatherPipeline, group: int, init: Any) -> list[jax.Array]:
    """The results of a pass over the next group's keys. init: the first result, with the heads of
    earlier groups."""
    spec, x = groups.spec, groups.inputs
    keys, values = groups.next()
    lse, dlse = (None if y is None else groups.rows(y, group, 1) for y in (x.lse, x.dlse))
    scores = score_operands(direction, spec, x.scores, x.fixed)
    for name, y in scores.items():
        if ROWS[name].axes[1:2] in ("h", "H") and y.shape[1] > 1:
            scores[name] = groups.rows(y, group, 1)
    operands = Operands(x.query, keys, values, x.out, lse, x.dout, dlse, init=init)._replace(
        **groups.mask(x.mask, group).operands(direction), **scores
    )
    heads = groups.heads_of(x.query.shape[2], group)
    return head_groups.run(direction, heads, spec.of_primitive(x.mask), operands)


def _concat(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
