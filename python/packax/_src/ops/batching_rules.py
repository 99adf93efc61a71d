"""The vmap rules of the primitives: they merge the mapped axis with the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from packax._src.core.schema import ROWS
from packax._src.core.sharding import vary_together
from packax._src.core.spec import accumulator, is_symbolic

P = jax.sharding.PartitionSpec


class BatchingRule(NamedTuple):
    """Merges the mapped axis with the batch, the first axis of every operand.

    The mapped axis comes before the batch. If an operand's type shards the batch over explicit mesh
    axes, it comes after the batch, because jax cannot merge such axes in the other order.
    """

    size: Any
    after_batch: bool

    def place(self, x: jax.Array, dim: int | None) -> jax.Array:
        """x with the mapped axis next to the batch; the axis has size 1 if x is not mapped."""
        to = int(self.after_batch)
        return jnp.expand_dims(x, to) if dim is None else jnp.moveaxis(x, dim, to)

    def merged(self, x: jax.Array, batch: Any) -> jax.Array:
        """The result of `place` with both axes merged, after broadcasting axes of size 1."""
        shape = (batch, self.size) if self.after_batch else (self.size, batch)
        x = jnp.broadcast_to(x, (*shape, *x.shape[2:]))
        return self._reshape(x, (shape[0] * shape[1], *x.shape[2:]))

    def fold(self, x: jax.Array, dim: int | None) -> jax.Array:
        x = self.place(x, dim)
        return self.merged(x, x.shape[0 if self.after_batch else 1])

    def fold_shared(self, operands, dims, batch: Any) -> list[jax.Array]:
        """Folds operands that either all have the batch or all have a batch of 1.

        A batch of 1 is kept if none of them is mapped.
        """
        if operands[0].shape[batch_axis(dims[0])] == 1 and all(d is None for d in dims):
            return list(operands)
        placed = [self.place(x, d) for x, d in zip(operands, dims, strict=True)]
        return [self.merged(x, batch) for x in placed]

    def repeated(self, x: jax.Array, times: int) -> jax.Array:
        """The result of `place` after the batch, each of whose rows is repeated."""
        x = jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:]))
        return self._reshape(x, (x.shape[0] * times, *x.shape[2:]))

    def unfold(self, results: Sequence[jax.Array]) -> tuple[list[jax.Array], list[int]]:
        shape = (-1, self.size) if self.after_batch else (self.size, -1)
        apart = [self._reshape(x, (*shape, *x.shape[1:])) for x in results]
        return apart, [int(self.after_batch)] * len(apart)

    def _reshape(self, x: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
        """Keeps the sharding of the batch, which jax 0.7 cannot infer next to an axis of size 1."""
        if not self.after_batch:
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


def batch_attention(primitive: Primitive, sharded: bool, operands, dims, *, names, **params):
    """The rule for attention primitives.

    `names` are the names of the operands: schema.py says which have the batch, and which either all
    have the batch or all a batch of 1. In the primitives of tangents.py, they are followed by the
    tangents of the operands `tangents`, which are folded in the same way.
    """
    every = [*names, *params.get("tangents", ())]
    values = list(zip(operands, dims, strict=True))
    bias_grad = params["spec"].bias_grad
    batch = operands[0].shape[batch_axis(dims[0])]
    folding = batching_rule(operands, dims)
    groups: dict[str, list[int]] = {}
    for n, name in enumerate(every):
        groups.setdefault(ROWS[name].fold or name, []).append(n)
    folded: list[Any] = [None] * len(operands)
    for group, numbers in groups.items():
        of_group = [values[n] for n in numbers]
        if group in ROWS and ROWS[group].axes[0] == "b":
            group_folded = [folding.fold(x, d) for x, d in of_group]
        elif group == "bias":
            group_folded = _fold_biases(folding, of_group, batch, bias_grad)
        else:
            arrays, axes_of = zip(*of_group, strict=True)
            group_folded = folding.fold_shared(arrays, axes_of, batch)
        for n, x in zip(numbers, group_folded, strict=True):
            folded[n] = x
    results = primitive.bind(*folded, names=names, **params)
    unfolded, axes = folding.unfold(results)
    if bias_grad and folding.after_batch:
        x, d = values[every.index("bias")]
        unfolded[-1] = _sum_of_rows(unfolded[-1], x.shape[batch_axis(d)])
    return unfolded, axes


def _fold_biases(
    folding: BatchingRule, biases: Sequence[tuple[Any, int | None]], batch: Any, bias_grad: bool
) -> list[jax.Array]:
    """The folded bias (and its tangent), each of whose entries serves consecutive batch rows.

    Gradients of the bias differ between mapped elements, so with `bias_grad` each has a bias.
    """
    x, dim = biases[0]
    groups = x.shape[batch_axis(dim)]
    shared = not bias_grad and all(d is None for _, d in biases)
    if shared and (groups == 1 or folding.after_batch):
        return [x for x, _ in biases]
    placed = [folding.place(x, d) for x, d in biases]
    if not folding.after_batch:
        return [folding.merged(x, groups) for x in placed]
    # The rows of a mapped element are not consecutive: each row gets a bias.
    if groups != 1:
        placed = [folding.repeated(x, batch // groups) for x in placed]
    return [folding.merged(x, batch) for x in placed]


def _sum_of_rows(x: jax.Array, groups: int) -> jax.Array:
    """The gradients of the batch rows, axis 0, summed for each of the groups that share a bias."""
    if x.shape[0] == groups:
        return x
    apart = x.reshape(groups, -1, *x.shape[1:])
    return apart.sum(1, dtype=accumulator(x.dtype)).astype(x.dtype)


def register_batching(primitive: Primitive, rule: Callable) -> None:
    """Registers rule(primitive, sharded, operands, dims, **params).

    `sharded`: whether the mapped axis is sharded over a mesh.
    """

    def batched(axis_data, operands, dims, **params):
        if all(d is None for d in dims):
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        if not is_symbolic(axis_data.size) and axis_data.size == 0:
            return _empty_results(primitive, operands, dims, **params)
        names = axis_data.spmd_name, getattr(axis_data, "explicit_mesh_axis", None)
        return rule(primitive, any(x is not None for x in names), operands, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batched


def _empty_results(primitive: Primitive, operands, dims, **params):
    """vmap over an axis of size 0: empty results, without computing anything."""
    one = [
        jax.ShapeDtypeStruct([n for axis, n in enumerate(x.shape) if axis != d], x.dtype)
        for x, d in zip(operands, dims, strict=True)
    ]
    shapes = jax.eval_shape(lambda *x: primitive.bind(*x, **params), *one)
    results = [jnp.zeros((0, *x.shape), x.dtype) for x in shapes]
    return vary_together(*results, *operands)[: len(results)], [0] * len(results)
