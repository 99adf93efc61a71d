"""`RankRows`: from arrays for whole sequences to the rows of each rank.

An expression describes whole sequences in their original order. `RankRows` applies the plan's
permutation and the mesh's sharding to arrays with one value per row, and maps functions over the
ranks. Without a layout and a plan it changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.load_balance import ContextPlan, take_sharded
from packax._src.core.context_mask import dims_of
from packax._src.core.sharding import AttentionSharding, Axes, Layout
from packax._src.core.spec import MaskMode
from packax._src.masks.expressions import And, Limits
from packax._src.masks.row_ranges import Document, limits_of
from packax._src.masks.tree import Tree, tree_rows
from packax._src.ops.primitives import Implementation


class MaskSpec(NamedTuple):
    """What a program that builds a mask depends on."""

    batch: int  # 1 if all batch rows share the mask
    q_len: Any
    kv_len: Any
    block_size: tuple[int, int] | None
    implementation: Implementation | None
    sharding: AttentionSharding | None
    layout: Layout
    permuted_keys: bool
    of_plan: bool | None  # see `made_of`
    halos: Any  # halo_mask.Halos, or None
    row_keys: int


@dataclasses.dataclass(frozen=True)
class RankRows:
    """The rows of a mask, (batch, q_len), and the plan that permutes them."""

    static: MaskSpec
    plan: ContextPlan | None

    @property
    def layout(self) -> Layout:
        return self.static.layout

    @property
    def is_unsharded(self) -> bool:
        """Whether all rows are in one piece, in the original order."""
        return not self.layout.on_mesh and self.plan is None

    @property
    def mask_batch(self) -> Axes:
        return () if self.static.batch == 1 else self.layout.batch

    @property
    def plan_batch(self) -> Axes:
        return self.mask_batch if self.plan is not None and self.plan.order.shape[0] > 1 else ()

    @property
    def pieces(self) -> int:
        return self.layout.size(self.layout.context)

    def sizes(self) -> tuple[Any, Any]:
        """Batch size and number of query rows per rank inside `shard_map`."""
        batch = self.static.batch // self.layout.inside(self.mask_batch)
        return batch, self.static.q_len // self.pieces

    def spec(
        self, name: str, mode: MaskMode, heads: Axes = (), *, gathers: Any = None, batch: Any = None
    ) -> Any:
        """The PartitionSpec of an array of the mask, or of its part with these gathers."""
        batch = self.mask_batch if batch is None else batch
        return self.layout.spec(*dims_of(name, gathers, mode, batch, self.layout.context, heads))

    def with_placed_plan(self) -> RankRows:
        if self.plan is None:
            return self
        plan = jax.tree.map(lambda x: self.layout.place(jnp.asarray(x), self.plan_batch), self.plan)
        return dataclasses.replace(self, plan=plan)

    def replicated(self, x: Any, *dims: Axes) -> Any:
        """x replicated on all ranks. XLA might shard it otherwise, and gather it in every layer."""
        spec = self.layout.spec(*dims)
        return self.layout.shard_map(lambda x: x, (spec,), spec)(x)

    def keys(self, x: Any) -> Any:
        """Whole sequences in the original order, broadcast to the batch size."""
        whole = jnp.broadcast_to(x, (self.static.batch, x.shape[1]))
        return self.layout.place(whole, self.mask_batch)

    def rows(self, x: Any) -> Any:
        """Converts whole sequences to rows in the plan's order, in a shard_map to this rank's
        rows."""
        x = self.keys(x)
        if self.plan is not None:
            x = self.plan.permute(x)
        own = self.layout.own_part(x, 1)
        return self.layout.place(own, self.mask_batch, self.layout.context)

    def chunks(self) -> Any:
        """(1 or B, chunks): the original index of each chunk in the plan's order; without a plan,
        one chunk per rank. Inside a shard_map, only this rank's chunks."""
        if self.plan is None:
            order = jnp.arange(self.pieces, dtype=jnp.int32)[None]
        else:
            order = self.plan.order
        own = self.layout.own_part(order, 1)
        return self.layout.place(own, self.plan_batch, self.layout.context)

    @property
    def chunks_spec(self) -> Any:
        return self.layout.spec(self.plan_batch, self.layout.context)

    def limits(self, document: Document, interval: And) -> Limits:
        """`limits_of` for whole sequences: intervals refer to their indices and spans."""
        function = functools.partial(limits_of, q_len=self.static.q_len)
        low, high = self._of_sequences(function, document, interval)
        return low, high

    def tree_rows(self, tree: Tree, ids: Any, interval: And) -> list[Any]:
        """`tree_rows` for whole sequences: trees refer to the original order."""
        tree = jax.tree.map(lambda x: self.keys(jnp.atleast_2d(x)), tree)
        return self._of_sequences(tree_rows, (tree, ids), interval)

    def _of_sequences(self, function: Callable[..., Any], operands: Any, interval: And) -> Any:
        """function(operands, interval) on every rank: arrays with a value per row, or None.

        operands: arrays returned by `keys`.
        """
        if not self.layout.on_mesh:
            return function(operands, interval)

        def of_leaf(x: Any) -> tuple[Axes, ...]:
            return (self._batch_axes(x),) if jnp.ndim(x) else ()

        layout = self.layout
        interval = jax.tree.map(lambda x: layout.place(jnp.asarray(x), *of_leaf(x)), interval)
        shape = self.sizes()[0], self.static.q_len

        def of_rank(operands: Any, interval: And) -> list[Any]:
            values = function(operands, interval)
            return [None if x is None else jnp.broadcast_to(x, shape) for x in values]

        keys = layout.spec(self.mask_batch)
        specs = (keys, jax.tree.map(lambda x: layout.spec(*of_leaf(x)), interval))
        return layout.shard_map(of_rank, specs, keys)(operands, interval)

    def block_mask(
        self, block_mask: jax.Array, block_size: tuple[int, int]
    ) -> tuple[jax.Array, tuple[int, int], tuple[Axes, Axes]]:
        """The block mask of these rows, its block size, and the mesh axes of batch and heads."""
        if self.plan is not None and self.plan.order.shape[0] > 1:
            block_mask = jnp.broadcast_to(block_mask, (self.static.batch, *block_mask.shape[1:]))
        heads = self.layout.heads if block_mask.shape[1] > 1 else ()
        axes = self._batch_axes(block_mask), heads
        if self.is_unsharded:
            return block_mask, block_size, axes
        chunks = self.pieces if self.plan is None else self.plan.order.shape[1]
        block_mask, block_size = _kept_together(
            block_mask, block_size, self.static.q_len, self.static.q_len // chunks
        )
        block_mask = self.layout.place(block_mask, *axes)
        if self.plan is not None:
            block_mask = take_sharded(self.plan.order, 2, block_mask)
        block_mask = self.layout.own_part(block_mask, 2)
        return self.layout.place(block_mask, *axes, self.layout.context), block_size, axes

    def _batch_axes(self, x: Any) -> Axes:
        """The mesh axes over which the first axis of an expression's array is sharded."""
        if not self.mask_batch:  # a symbolic batch has no mesh
            return ()
        return self.mask_batch if jnp.shape(x)[0] == self.static.batch > 1 else ()


def _kept_together(
    block_mask: jax.Array, block_size: tuple[int, int], q_len: int, together: int
) -> tuple[jax.Array, tuple[int, int]]:
    """The block mask and its block size, with rows per block reduced so that no block crosses the
    boundary of a rank or chunk."""
    rows = block_size[0]
    if together == q_len or together % rows == 0:
        return block_mask, block_size
    fewer = math.gcd(rows, together)
    block_mask = jnp.repeat(block_mask, rows // fewer, axis=2)[:, :, : q_len // fewer]
    return block_mask, (fewer, block_size[1])
