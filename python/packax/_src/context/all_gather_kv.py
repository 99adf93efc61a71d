"""Gathers keys and values of all ranks for one rank, in groups of heads, and sends their gradients
back.

The gather of a group overlaps with the attention of the previous group, and the reduce-scatter of
its gradients with that of the next. XLA by itself undoes that: it joins the copies after several
gathers into one kernel, which then waits for all of them, and removes optimization barriers before
it does so; it runs one collective of a kind at a time; and it sends late. So keys and values of a
group are sent together, and data dependencies define the order: numbers that are 0, but known only
when something is done (`dependency_token`), are added to indices that later operations read.
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
from packax._src.core.sharding import Axes, HeadGroups, Layout, vary_together


class KVGatherPipeline:
    """A rank's keys and values in use, and the gather in flight: never more are in memory."""

    def __init__(
        self,
        layout: Layout | None,
        head_groups: HeadGroups,
        query,
        key,
        value,
        kv_plan,
        *,
        backward: bool = False,
        starts: tuple[int, ...] = (0,),
        private_rows: int = 0,
        halves: bool = False,
        fetch: Callable[[list[jax.Array]], list[jax.Array]] | None = None,
    ) -> None:
        """starts: at which context axes gathers begin, (): keys that only this rank reads;
        private_rows: how many rows attend to such keys; halves: whether half of their heads are
        attended before the shared keys and half after them; fetch: fetches halos instead."""
        self.layout = layout
        self.steps = () if layout is None else layout.steps(starts)
        private = not starts
        self.kv_plan = kv_plan
        self.fetch = fetch
        self.own = OwnHeads.of(layout, query.shape[2], key.shape[2])
        self.key, self.value = (self.own.take(x) for x in (key, value))
        self.heads = self.key.shape[2]
        gathers: tuple[tuple[int, ...], ...] = ((self.heads,),)
        if private and halves and self.heads > 1:
            gathers = ((self.heads - self.heads // 2,), (self.heads // 2,))
        elif layout is not None and not private:
            # The attention of private rows overlaps with one gather of all heads.
            among = layout.size(tuple(itertools.chain(*self.steps)))
            one = head_groups is None and private_rows >= among * key.shape[1]
            gathers = layout.gathers(self.heads, 1 if one else head_groups, backward, among)
        sizes = tuple(itertools.chain(*gathers))
        self.number = len(sizes)
        self.ends = tuple(itertools.accumulate(sizes, initial=0))
        groups = iter(range(self.number))
        self.gathers = [list(itertools.islice(groups, len(gather))) for gather in gathers]
        # 0 once: the previous group is attended; the next one's keys and the gradients of the
        # previous group are ready to be sent; those gradients are summed.
        self.attended: jax.Array | None = None
        self.sent: jax.Array | None = None
        self.sent_back: jax.Array | None = None
        self.summed_up: jax.Array | None = None
        self.to_send: list[jax.Array] = []  # what gathers take, and the last scatter
        self.to_send_back: list[jax.Array] = []
        self.under_way: list[list[jax.Array]] = []  # the results of gathers, by groups
        for _ in range(min(2, len(self.gathers))):
            self._gather()

    def next(self) -> list[jax.Array]:
        """Keys and values of the group whose turn it is, over the whole sequence."""
        pieces = self.under_way[0]
        group = [pieces.pop(0)] if self.number > 1 else self.under_way.pop(0)
        return self._apart(self._in_order(group, 1, self.attended))

    def mask(self, mask: AttentionMask, group: int) -> AttentionMask:
        """The mask for a group's attention, which waits for everything that overlaps with it.

        A block mask of heads becomes that of the group's heads.
        """
        after = self.attended if self.fetch is not None else None
        order = functools.reduce(_plus, (self.sent, self.sent_back, after), mask.q_order)
        ready: dict[str, Any] = {"q_order": order}
        for name, field in FIELDS.items():
            x = getattr(mask, name)
            if field.block_sparse and x is not None and x.shape[1] > 1:
                ready[name] = self.rows(x, group, 1)
        return dataclasses.replace(mask, **ready)

    def gather_after(self, result: jax.Array) -> None:
        """Starts the next gather but one when this result of a gather's last group is there: else
        all would be held at once.
        """
        self.sent = None
        if any(self.under_way):
            self.attended = dependency_token(result)
        if self.under_way and not self.under_way[0]:
            del self.under_way[0]
            if self.gathers:
                self._gather()

    def scatter(self, dk: jax.Array, dv: jax.Array) -> list[jax.Array]:
        """The sums of all ranks' gradients of a group, each rank's rows of them; in their dtype."""
        parts = self._in_order(self._together(dk, dv), 0, self.summed_up)
        self.to_send_back = parts
        if not self.steps:
            return self._apart(parts)
        sums = parts
        for axes in reversed(self.steps):
            sums = [jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) for x in sums]
        if self.number > 1:
            self.sent_back, self.summed_up = (dependency_token(*x) for x in (parts, sums))
        return self._apart(sums)

    def _gather(self) -> None:
        """The next one."""
        groups = self.gathers.pop(0)
        pieces = self._together(
            *(
                self.rows(x, group, 2, self.attended)
                for group in groups
                for x in (self.key, self.value)
            )
        )
        self.to_send += pieces
        if groups[0] > 0:
            self.sent = dependency_token(*pieces)
        for axes in self.steps:
            pieces = [jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in pieces]
        if self.fetch is not None:
            pieces = self.fetch(pieces)
        if len(groups) > 1:
            (both,) = pieces
            dims = self.key.shape[3] + self.value.shape[3]
            ends = [dims * (self.ends[group] - self.ends[groups[0]]) for group in groups[1:]]
            pieces = jnp.split(both, ends, 2)
        self.under_way.append(pieces)

    def _together(self, *parts: jax.Array) -> list[jax.Array]:
        """Of several groups: one array of keys and values, (batch, length, heads * both dims)."""
        if self.number == 1:
            return list(parts)
        return [jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], 2)]

    def _apart(self, pieces: list[jax.Array]) -> list[jax.Array]:
        if self.number == 1:
            return pieces
        (both,) = pieces
        dims = [x.shape[3] for x in (self.key, self.value)]
        heads = both.shape[2] // sum(dims)
        parts = jnp.split(both, [heads * dims[0]], 2)
        return [x.reshape(*x.shape[:2], heads, dim) for x, dim in zip(parts, dims, strict=True)]

    def _in_order(
        self, pieces: list[jax.Array], way: int, zero: jax.Array | None
    ) -> list[jax.Array]:
        """Rows of keys from the plan's order into the sequence's (way 1), or back (way 0)."""
        if self.kv_plan is None:
            return pieces
        return [take_chunks(_plus(self.kv_plan[:, way], zero), 1, x) for x in pieces]

    def rows(self, x: jax.Array, group: int, axis: int, zero: jax.Array | None = None) -> jax.Array:
        """The heads of x that are in the group."""
        if self.number == 1:
            return x
        own = self.heads_of(x.shape[axis], group)
        if zero is None:
            return jax.lax.slice_in_dim(x, own.start, own.stop, axis=axis)
        return jax.lax.dynamic_slice_in_dim(x, own.start + zero, len(own), axis)

    def heads_of(self, heads: int, group: int) -> range:
        """Which of `heads` heads are in the group."""
        each = heads // self.heads
        begin, end = (each * n for n in self.ends[group : group + 2])
        return range(begin, end)

    def summed(self, gradient: jax.Array, like: jax.Array) -> jax.Array:
        """All heads of `like`, summed over the axes that query has and keys do not.

        Over axes of the caller's shard_map jax sums, as the transpose of a replicated operand.
        """
        gradient = self.own.put(gradient, like)
        layout = self.layout
        if layout is None:
            return gradient
        missing = set(layout.context + layout.heads) - set(layout.kv_context + layout.kv_heads)
        axes = tuple(axis for axis, _ in layout.sizes if axis in missing & layout.mapped)
        return jax.lax.psum(gradient, axes) if axes else gradient


def piece(x: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    """Of (B, ranks, ...) those of this rank's group, which the axes number."""
    groups = layout.size(axes)
    if groups == 1:
        return x
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    x, number = vary_together(x, jax.lax.axis_index(layout.several(axes)))
    return jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False)


def as_gathered(x: jax.Array, layout: Layout, starts: tuple[int, ...]) -> jax.Array:
    """Of (B, ranks of a group, rows) the order in which the gathers of a part bring it."""
    pairs = itertools.pairwise((*starts, len(layout.context)))
    sizes = [layout.size(layout.context[first:end]) for first, end in pairs]
    x = x.reshape(x.shape[0], *sizes, x.shape[2])
    inner = range(len(sizes), 0, -1)
    return x.transpose(0, *inner, len(sizes) + 1).reshape(x.shape[0], -1)


def dependency_token(*results: jax.Array) -> jax.Array:
    """int32 0, whose value XLA does not know before the results exist."""
    bits = [
        jax.lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.int32)
        for x in results
        if 0 not in x.shape
    ]
    return jnp.minimum(functools.reduce(jnp.bitwise_or, bits, jnp.int32(0)) & 0x7FFFFFFF, 0)


def update_at(join: Any, x: jax.Array, more: jax.Array, begin: int, axis: int) -> jax.Array:
    """x, from there on joined with others."""
    # Not a concatenation, which would copy the rest. And at a place that XLA does not know: where
    # it does, some of its versions take the update for a result of the kernel's and fail.
    x, more, at = vary_together(x, more, begin + dependency_token(more))
    there = jax.lax.dynamic_slice_in_dim(x, at, more.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(x, join(there, more), at, axis)


def _plus(indices: jax.Array, zero: jax.Array | None) -> jax.Array:
    return indices if zero is None else indices + zero


class OwnHeads(NamedTuple):
    """Which of the available key/value heads a rank's query heads read."""

    number: int | None  # None: all
    first: Any = None
    every: Any = None  # indices, where they are not neighbours or repeat

    @staticmethod
    def of(layout: Layout | None, heads: int, kv_heads: int) -> OwnHeads:
        """Query head h of all reads head h // group: for replicated heads, this rank's part."""
        if layout is None or layout.kv_heads or layout.size(layout.heads) == 1:
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
