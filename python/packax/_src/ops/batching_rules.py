"""How vmap folds into the batch: the mapped axis and the batch become one, for every primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from packax._src.core.jax_compat import vary_together
from packax._src.core.precision import accumulator
from packax._src.core.shapes import is_symbolic
from packax._src.ops.operands import MOVING

P = jax.sharding.PartitionSpec


class BatchingRule(NamedTuple):
    """The mapped axis merged into the batch, which is every operand's first axis.

    In front of it; behind it where the batch is sharded in the types of an explicit mesh, which
    merge no other way.
    """

    size: Any
    behind: bool

    def place(self, x: jax.Array, dim: int | None) -> jax.Array:
        """The mapped axis beside the batch, of size 1 where x has none."""
        to = int(self.behind)
        return jnp.expand_dims(x, to) if dim is None else jnp.moveaxis(x, dim, to)

    def merged(self, x: jax.Array, batch: Any) -> jax.Array:
        """Of `place`, repeated where it has one for all."""
        shape = (batch, self.size) if self.behind else (self.size, batch)
        x = jnp.broadcast_to(x, (*shape, *x.shape[2:]))
        return self._reshape(x, (shape[0] * shape[1], *x.shape[2:]))

    def fold(self, x: jax.Array, dim: int | None) -> jax.Array:
        x = self.place(x, dim)
        return self.merged(x, x.shape[0 if self.behind else 1])

    def fold_shared(self, operands, dims, batch: Any) -> list[jax.Array]:
        """Operands that all have the batch, or all 1: one for all stays so, unless it is mapped."""
        if not operands:
            return []
        if operands[0].shape[batch_axis(dims[0])] == 1 and all(d is None for d in dims):
            return list(operands)
        placed = [self.place(x, d) for x, d in zip(operands, dims, strict=True)]
        return [self.merged(x, batch) for x in placed]

    def unfold(self, results: Sequence[jax.Array]) -> tuple[list[jax.Array], list[int]]:
        shape = (-1, self.size) if self.behind else (self.size, -1)
        apart = [self._reshape(x, (*shape, *x.shape[1:])) for x in results]
        return apart, [int(self.behind)] * len(apart)

    def _reshape(self, x: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
        """With or without the mapped axis. How that is sharded jax 0.7 does not find beside an axis
        of size 1.
        """
        if not self.behind:
            return x.reshape(shape)
        given = jax.typeof(x).sharding
        batch, *rest = (*given.spec, *[None] * x.ndim)[: x.ndim]
        rest = rest[1:] if len(shape) < x.ndim else [None, *rest]
        to = jax.sharding.NamedSharding(given.mesh, P(batch, *rest))
        return jnp.reshape(x, shape, out_sharding=to)


def batch_axis(dim: int | None) -> int:
    return 1 if dim == 0 else 0


def batching_rule(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> BatchingRule:
    both = list(zip(operands, dims, strict=True))
    size = next(x.shape[d] for x, d in both if d is not None)
    shardings = [(getattr(jax.typeof(x), "sharding", None), batch_axis(d)) for x, d in both]
    return BatchingRule(
        size, any(s is not None and (*s.spec, None, None)[axis] for s, axis in shardings)
    )


def batch_mask(primitive: Primitive, sharded: bool, operands, dims, **params):
    folding = batching_rule(operands, dims)
    folded = [folding.fold(x, d) for x, d in zip(operands, dims, strict=True)]
    return folding.unfold(primitive.bind(*folded, **params))


def batch_attention(
    primitive: Primitive, tensors: int, sharded: bool, operands, dims, tangents=(),
    tangent_dims=(), *, extras, **params,
):  # fmt: skip
    """The first `tensors` operands have the batch; mask operands and extras have it, or 1.

    `tangents`: of the tensors and of the extras that move, which are folded as those are.
    """
    biases = _of_bias(operands, dims, tangents, tangent_dims, extras)
    bias_grad = params.get("bias_grad", False)
    batch = operands[0].shape[batch_axis(dims[0])]
    one_for_batch = batch != 1 and any(x.shape[batch_axis(d)] == 1 for x, d in biases)
    apart = bias_grad or any(d is not None for _, d in biases)
    if one_for_batch and apart and not sharded:  # folded, the bias would be repeated for the batch
        every, all_dims = (*operands, *tangents), (*dims, *tangent_dims)
        return _one_by_one(primitive, every, all_dims, extras=extras, **params)
    folding = batching_rule((*operands, *tangents), (*dims, *tangent_dims))
    values = list(zip(operands, dims, strict=True))
    moved = list(zip(tangents, tangent_dims, strict=True))
    folded = [folding.fold(x, d) for x, d in values[:tensors]]
    new = [folding.fold(x, d) for x, d in moved[:tensors]]
    end = len(operands) - len(extras)
    of_extra = dict(zip(extras, values[end:], strict=True))
    move = iter(moved[tensors:])
    with_tangent = {name: next(move) for name in extras if name in MOVING and moved}
    expanded = bias_grad and biases[0][0].shape[batch_axis(biases[0][1])] == 1
    for group in (None, *_TOGETHER):
        if group is None:
            own, other = values[tensors:end], []
        else:
            own = [of_extra[name] for name in group if name in of_extra]
            other = [with_tangent[name] for name in group if name in with_tangent]
        both = own + other
        if group == ("dropout_streams",) or (group == ("bias",) and expanded):
            # Of bits every batch row has its own, and of the bias every element its own gradient.
            placed = [folding.place(x, d) for x, d in both]
            made = [folding.merged(x, batch) for x in placed]
        else:
            made = folding.fold_shared([x for x, _ in both], [d for _, d in both], batch)
        folded += made[: len(own)]
        new += made[len(own) :]
    results = primitive.bind(*folded, *new, extras=extras, **params)
    apart, axes = folding.unfold(results)
    if expanded:  # of all rows of the batch
        apart[-1] = _sum_of_batch(apart[-1], 0 if folding.behind else 1)
    return apart, axes


_TOGETHER = (
    ("scales",),
    ("slopes", "q_bias_pos", "kv_bias_pos"),
    ("bias",),
    ("dropout_streams",),
    ("dropout_rows",),
)
"""Extras that have the batch together, or all 1; dropout_streams have it always."""


def _of_bias(operands, dims, tangents, tangent_dims, extras) -> list[tuple[Any, int | None]]:
    """The bias and its tangent, with their mapped axes; those that there are."""
    if "bias" not in extras:
        return []
    at = len(operands) - len(extras) + extras.index("bias")
    found = [(operands[at], dims[at])]
    if tangents:  # the last: no other extra that moves stands behind the bias
        found.append((tangents[-1], tangent_dims[-1]))
    return found


def _one_by_one(primitive: Primitive, operands, dims, **params):
    """A loop over the mapped axis, for which nothing is repeated."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(some):
        rest = iter(some)
        every = (x if d is None else next(rest) for x, d in zip(operands, dims, strict=True))
        return tuple(primitive.bind(*every, **params))

    results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


def _sum_of_batch(x: jax.Array, axis: int) -> jax.Array:
    return x.sum(axis, keepdims=True, dtype=accumulator(x.dtype)).astype(x.dtype)


def register_batching(primitive: Primitive, rule: Callable) -> None:
    """rule(primitive, whether the mapped axis is divided over a mesh, operands, dims, **params)."""

    def batched(axis_data, operands, dims, **params):
        if all(d is None for d in dims):
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        if not is_symbolic(axis_data.size) and axis_data.size == 0:
            return _of_no_element(primitive, operands, dims, **params)
        names = axis_data.spmd_name, getattr(axis_data, "explicit_mesh_axis", None)
        return rule(primitive, any(x is not None for x in names), operands, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batched


def _of_no_element(primitive: Primitive, operands, dims, **params):
    """vmap over an axis of size 0: nothing is computed."""
    one = [
        jax.ShapeDtypeStruct([n for axis, n in enumerate(x.shape) if axis != d], x.dtype)
        for x, d in zip(operands, dims, strict=True)
    ]
    shapes = jax.eval_shape(lambda *x: primitive.bind(*x, **params), *one)
    results = [jnp.zeros((0, *x.shape), x.dtype) for x in shapes]
    return vary_together(*results, *operands)[: len(results)], [0] * len(results)
