"""Gathers the keys and values of other ranks in groups of heads, and sends back their gradients.

The gather of a group overlaps with the attention of the previous group, and the reduce-scatter of
its gradients overlaps with the attention of the next group. Left alone, XLA undoes that. It fuses
the copies after several gathers into one kernel, which then waits for all of them, and it removes
optimization barriers before it fuses. It runs only one collective of a kind at a time, and starts
collectives late. So the keys and values of a group are sent together, and data dependencies enforce
the order: a `dependency_token`, a 0 that XLA knows only after other operations have finished, is
added to indices that later operations read.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.load_balance import take_chunks
from packax._src.core.mask import FIELDS, AttentionMask
from packax._src.core.sharding import Axes, Layout, vary_together
from packax._src.core.spec import AttentionSpec
from packax._src.ops.primitives import Inputs


class KVGatherPipeline:
    """Gathers a rank's keys and values: the gather in use and the one in flight are in memory."""

    def __init__(
        self,
        spec: AttentionSpec,
        x: Inputs,
        *,
        private_rows: int = 0,
        halves: bool = False,
        fetch: Callable[[list[jax.Array]], list[jax.Array]] | None = None,
    ) -> None:
        """Starts the first gathers, at most two.

        x: the rows of a rank, or of a part of its mask, and the rank's keys.
        private_rows: the number of rows that attend to private keys, for the shared part.
        halves: for the private part, whether attention runs for half of the heads before the
            shared parts, and for the other half after them.
        fetch: a function that fetches halos, if they replace the gathers.
        """
        layout, head_groups = spec.layout, spec.gather_head_groups
        self.spec, self.inputs, self.layout = spec, x, layout
        mask: Any = x.mask
        starts = (0,) if mask.gathers is None else mask.gathers
        self.steps = layout.steps(starts)
        private = not starts  # private keys are not gathered
        self.kv_plan = mask.kv_plan
        self.fetch = fetch
        self.own = OwnHeads.of(layout, x.query.shape[2], x.key.shape[2])
        self.key, self.value = (self.own.take(y) for y in (x.key, x.value))
        self.heads = self.key.shape[2]
        gathers: tuple[tuple[int, ...], ...] = ((self.heads,),)
        if private and halves and self.heads > 1:
            gathers = ((self.heads - self.heads // 2,), (self.heads // 2,))
        elif not private:
            # The attention of private rows overlaps with one gather of all heads.
            among = layout.size(tuple(itertools.chain(*self.steps)))
            one = head_groups is None and private_rows >= among * x.key.shape[1]
            gathers = layout.gathers(
                self.heads, 1 if one else head_groups, x.dout is not None, among
            )
        sizes = tuple(itertools.chain(*gathers))
        self.number = len(sizes)
        self.ends = tuple(itertools.accumulate(sizes, initial=0))
        groups = iter(range(self.number))
        self.gathers = [list(itertools.islice(groups, len(gather))) for gather in gathers]
        # Dependency tokens. The attention of the previous group has finished; the keys of the next
        # group are ready to be sent; the gradients of the previous group are ready to be sent;
        # the reduce-scatter of these gradients has finished.
        self.attention_done: jax.Array | None = None
        self.keys_ready: jax.Array | None = None
        self.gradients_ready: jax.Array | None = None
        self.scatter_done: jax.Array | None = None
        self.to_send: list[jax.Array] = []  # operands of the gathers
        self.to_send_back: list[jax.Array] = []  # operands of the last reduce-scatter
        self.in_flight: list[list[jax.Array]] = []  # for each gather, its results by group
        for _ in range(min(2, len(self.gathers))):
            self._gather()

    def next(self) -> list[jax.Array]:
        """The keys and values of the next group, over the whole sequence."""
        pieces = self.in_flight[0]
        group = [pieces.pop(0)] if self.number > 1 else self.in_flight.pop(0)
        return self._split(self._reorder(group, 1, self.attention_done))

    def mask(self, mask: AttentionMask, group: int) -> AttentionMask:
        """The mask for a group's attention, with the dependency tokens of what must be sent first.

        A block mask with heads is restricted to the heads of the group.
        """
        after = self.attention_done if self.fetch is not None else None
        order = functools.reduce(
            _add_token, (self.keys_ready, self.gradients_ready, after), mask.q_order
        )
        ready: dict[str, Any] = {"q_order": order}
        for name, field in FIELDS.items():
            x = getattr(mask, name)
            if field.block_sparse and x is not None and x.shape[1] > 1:
                ready[name] = self.rows(x, group, 1)
        return dataclasses.replace(mask, **ready)

    def gather_after(self, result: jax.Array) -> None:
        """Tells the pipeline about a result of the attention of the current group.

        If the group is the last one of its gather, starts another gather, which waits for the
        result. Otherwise the results of all gathers could be in memory at once.
        """
        self.keys_ready = None
        if any(self.in_flight):
            self.attention_done = dependency_token(result)
        if self.in_flight and not self.in_flight[0]:
            del self.in_flight[0]
            if self.gathers:
                self._gather()

    def scatter(self, dk: jax.Array, dv: jax.Array) -> list[jax.Array]:
        """Reduce-scatters the gradients of a group in their dtype, for this rank's keys."""
        parts = self._reorder(self._concat(dk, dv), 0, self.scatter_done)
        self.to_send_back = parts
        if not self.steps:
            return self._split(parts)
        sums = parts
        for axes in reversed(self.steps):
            sums = [jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) for x in sums]
        if self.number > 1:
            self.gradients_ready, self.scatter_done = (dependency_token(*x) for x in (parts, sums))
        return self._split(sums)

    def _gather(self) -> None:
        """Starts the next gather."""
        groups = self.gathers.pop(0)
        pieces = self._concat(
            *(
                self.rows(x, group, 2, self.attention_done)
                for group in groups
                for x in (self.key, self.value)
            )
        )
        self.to_send += pieces
        if groups[0] > 0:
            self.keys_ready = dependency_token(*pieces)
        for axes in self.steps:
            pieces = [jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in pieces]
        if self.fetch is not None:
            pieces = self.fetch(pieces)
        if len(groups) > 1:
            (both,) = pieces
            dims = self.key.shape[3] + self.value.shape[3]
            ends = [dims * (self.ends[group] - self.ends[groups[0]]) for group in groups[1:]]
            pieces = jnp.split(both, ends, 2)
        self.in_flight.append(pieces)

    def _concat(self, *parts: jax.Array) -> list[jax.Array]:
        """Keys and values; with several groups, in one array (batch, length, heads * both dims)."""
        if self.number == 1:
            return list(parts)
        return [jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], 2)]

    def _split(self, pieces: list[jax.Array]) -> list[jax.Array]:
        if self.number == 1:
            return pieces
        (both,) = pieces
        dims = [x.shape[3] for x in (self.key, self.value)]
        heads = both.shape[2] // sum(dims)
        parts = jnp.split(both, [heads * dims[0]], 2)
        return [x.reshape(*x.shape[:2], heads, dim) for x, dim in zip(parts, dims, strict=True)]

    def _reorder(
        self, pieces: list[jax.Array], way: int, zero: jax.Array | None
    ) -> list[jax.Array]:
        """Reorders keys from the plan's order to sequence order (way 1), or back (way 0)."""
        if self.kv_plan is None:
            return pieces
        return [take_chunks(_add_token(self.kv_plan[:, way], zero), 1, x) for x in pieces]

    def rows(self, x: jax.Array, group: int, axis: int, zero: jax.Array | None = None) -> jax.Array:
        """The group's heads in x, whose axis `axis` is the heads."""
        if self.number == 1:
            return x
        own = self.heads_of(x.shape[axis], group)
        if zero is None:
            return jax.lax.slice_in_dim(x, own.start, own.stop, axis=axis)
        return jax.lax.dynamic_slice_in_dim(x, own.start + zero, len(own), axis)

    def heads_of(self, heads: int, group: int) -> range:
        """The heads of the group, if there are `heads` heads in total."""
        each = heads // self.heads
        begin, end = (each * n for n in self.ends[group : group + 2])
        return range(begin, end)

    def summed(self, gradient: jax.Array, like: jax.Array) -> jax.Array:
        """The gradient for all heads of `like`, summed over mesh axes that shard only query.

        jax itself sums over the axes of the caller's shard_map, as the transpose of replication.
        """
        gradient = self.own.put(gradient, like)
        layout = self.layout
        missing = set(layout.context + layout.heads) - set(layout.kv_context + layout.kv_heads)
        axes = tuple(axis for axis, _ in layout.sizes if axis in missing & layout.mapped)
        return jax.lax.psum(gradient, axes) if axes else gradient


def piece(x: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    """The entries of x (B, ranks, ...) for the ranks of this rank's group.

    `axes`: the context axes that number the groups.
    """
    groups = layout.size(axes)
    if groups == 1:
        return x
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    x, number = vary_together(x, jax.lax.axis_index(layout.several(axes)))
    return jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False)


def as_gathered(x: jax.Array, layout: Layout, starts: tuple[int, ...]) -> jax.Array:
    """x (B, ranks of a group, rows) as (B, keys), in the order that the gathers produce."""
    pairs = itertools.pairwise((*starts, len(layout.context)))
    sizes = [layout.size(layout.context[first:end]) for first, end in pairs]
    x = x.reshape(x.shape[0], *sizes, x.shape[2])
    inner = range(len(sizes), 0, -1)
    return x.transpose(0, *inner, len(sizes) + 1).reshape(x.shape[0], -1)


def dependency_token(*results: jax.Array) -> jax.Array:
    """An int32 0 that XLA knows only after the results are computed."""
    bits = [
        jax.lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.int32)
        for x in results
        if 0 not in x.shape
    ]
    return jnp.minimum(functools.reduce(jnp.bitwise_or, bits, jnp.int32(0)) & 0x7FFFFFFF, 0)


def update_at(join: Any, x: jax.Array, more: jax.Array, begin: int, axis: int) -> jax.Array:
    """x with its slice from `begin` replaced by join(slice, more)."""
    # Not a concatenation, which would copy the rest of x. The index is unknown to XLA: with a known
    # index, some XLA versions treat the update as an output of the kernel and fail.
    x, more, index = vary_together(x, more, begin + dependency_token(more))
    current = jax.lax.dynamic_slice_in_dim(x, index, more.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(x, join(current, more), index, axis)


def _add_token(indices: jax.Array, zero: jax.Array | None) -> jax.Array:
    return indices if zero is None else indices + zero


class OwnHeads(NamedTuple):
    """The key/value heads that a rank's query heads read, among those that the rank has."""

    number: int | None  # None: all
    first: Any = None
    every: Any = None  # indices, if the heads are not consecutive or repeat

    @staticmethod
    def of(layout: Layout, heads: int, kv_heads: int) -> OwnHeads:
        """This rank's heads, if key/value heads are replicated: query head h reads h // group."""
        if layout.kv_heads or layout.size(layout.heads) == 1:
            return OwnHeads(None)
        group = heads * layout.size(layout.heads) // kv_heads
        rank = jax.lax.axis_index(layout.heads)
        common = math.gcd(heads, group)
        number = heads // common
        if heads % group == 0 or group % heads == 0:
            return OwnHeads(number, rank * heads // group)
        index = (rank * heads + common * jnp.arange(number, dtype=jnp.int32)) // group
        return OwnHeads(number, None, index)

    def take(self, x: jax.Array) -> jax.Array:
        if self.number is None:
            return x
        if self.every is not None:
            return jnp.take(x, self.every, axis=2)
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.number, axis=2)

    def put(self, gradient: jax.Array, like: jax.Array) -> jax.Array:
        if self.number is None:
            return gradient
        shape = (*gradient.shape[:2], like.shape[2], gradient.shape[3])
        zeros = jnp.zeros_like(gradient, shape=shape)
        if self.every is not None:
            return zeros.at[:, :, self.every].add(gradient)
        zeros, gradient, first = vary_together(zeros, gradient, self.first)
        return jax.lax.dynamic_update_slice_in_dim(zeros, gradient, first, axis=2)
