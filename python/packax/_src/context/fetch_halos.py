"""Fetches the halos of a rank's keys and values from other ranks, and returns their gradients.

Keys and values are sent together: XLA runs one collective of a kind at a time, so the second of two
would not overlap with attention. Without a plan, and with "zigzag", the rank of every chunk is
static, and each halo is sent only to the rank that reads it. With other plans, the edges of all
chunks are gathered, and each rank selects those that it needs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.all_gather_kv import update_at
from packax._src.context.halo import Halo, Place, Stretch
from packax._src.context.load_balance import take_each
from packax._src.core.sharding import Layout, vary_together


def numbers(halo: Halo, layout: Layout, kv_plan: Any) -> jax.Array:
    """(1 or B, chunks): the indices of this rank's chunks in the sequence."""
    if halo.placed == "balanced":
        order = kv_plan[:, 0].reshape(-1, halo.ranks, halo.chunks)
    else:
        order = jnp.asarray(halo.places, jnp.int32)[None]
    order, rank = vary_together(order, jax.lax.axis_index(layout.context))
    return jax.lax.dynamic_index_in_dim(order, rank, 1, keepdims=False)


def index(halo: Halo, stretch: Stretch, numbers: jax.Array) -> jax.Array:
    """(1 or B, keys): the indices of a stretch's keys in the sequence, clipped to its length.

    numbers: the indices of the rank's chunks. Clipped indices belong to keys that no row attends
    to.
    """
    first = numbers * halo.chunk - stretch.before
    index = first[:, :, None] + jnp.arange(stretch.keys, dtype=jnp.int32)[None, None]
    last = halo.ranks * halo.chunks * halo.chunk - 1
    return jnp.clip(index, 0, last).reshape(len(numbers), -1)


def fetch(halo: Halo, pieces: list[jax.Array], layout: Layout, kv_plan: Any) -> list[jax.Array]:
    """The keys and values of `Halo.edge` for this rank, (B, keys, ...) each."""
    chunks = [_by_chunks(halo, x) for x in pieces]
    halos = _halos(halo, *_edges(halo, chunks), layout=layout, kv_plan=kv_plan)
    before, after = (_split_heads(x, chunks) for x in halos)
    own_rows = [x[:, :, : halo.rows] for x in chunks]
    keys = (jnp.concatenate(x, 2) for x in zip(before, own_rows, after, strict=True))
    return [x.reshape(len(x), -1, *like.shape[2:]) for x, like in zip(keys, pieces, strict=True)]


def return_gradients(
    halo: Halo,
    gradients: list[jax.Array],
    onto: list[jax.Array] | None,
    layout: Layout,
    kv_plan: Any,
) -> list[jax.Array]:
    """The transpose of `fetch`. `onto`: gradients to which to add, if any."""
    by_chunks = [_by_chunks(halo, x) for x in gradients]
    end = halo.before + halo.rows
    chunks = [x[:, :, halo.before : end] for x in by_chunks]
    if onto is not None:
        onto_chunks = (_by_chunks(halo, x) for x in onto)
        chunks = [update_at(jnp.add, *x, 0, 2) for x in zip(onto_chunks, chunks, strict=True)]
    halos = (
        _concat_heads(x[:, :, : halo.before] for x in by_chunks),
        _concat_heads(x[:, :, end:] for x in by_chunks),
    )
    edges = _edges(halo, chunks)
    last, first = _halos_back(halo, *halos, edges, layout=layout, kv_plan=kv_plan)
    for begin, more in ((halo.chunk - last.shape[2], last), (0, first)):
        if more.shape[2]:
            both = zip(chunks, _split_heads(more, chunks), strict=True)
            chunks = [update_at(jnp.add, *x, begin, 2) for x in both]
    return [x.reshape(len(x), -1, *y.shape[2:]) for x, y in zip(chunks, gradients, strict=True)]


def _by_chunks(halo: Halo, x: jax.Array) -> jax.Array:
    """(B, chunks, rows of each, heads * dim)."""
    return x.reshape(len(x), halo.chunks, x.shape[1] // halo.chunks, -1)


def _concat_heads(parts: Iterable[jax.Array]) -> jax.Array:
    return jnp.concatenate(list(parts), 3)


def _split_heads(x: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    ends = itertools.accumulate(y.shape[3] for y in like[:-1])
    return jnp.split(x, list(ends), 3)


def _edges(halo: Halo, chunks: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The rows at both ends of each chunk that other ranks read, keys and values together."""
    last = _concat_heads(x[:, :, halo.chunk - min(halo.before, halo.chunk) :] for x in chunks)
    return last, _concat_heads(x[:, :, : min(halo.after, halo.chunk)] for x in chunks)


def _halos(
    halo: Halo, last: jax.Array, first: jax.Array, *, layout: Layout, kv_plan: Any
) -> tuple[jax.Array, jax.Array]:
    """The keys before and behind this rank's chunks, from the edges of all ranks' chunks."""
    if halo.placed != "balanced":
        before, after = _sent(halo, last, -1, layout), _sent(halo, first, 1, layout)
        return before, after
    axes = layout.several(layout.kv_context)
    both = jnp.concatenate([last, first], 2)
    both = jax.lax.all_gather(both, axes, axis=1, tiled=True)
    number, place_of = numbers(halo, layout, kv_plan), kv_plan[:, 1]
    found = []
    for way, part in ((-1, both[:, :, : halo.before]), (1, both[:, :, halo.before :])):
        # At the ends of the sequence the index wraps around to a chunk that is not read.
        place = take_each(place_of, (number + way) % place_of.shape[1])
        found.append(take_each(part, place, unique=True))
    return found[0], found[1]


def _halos_back(
    halo: Halo, before: jax.Array, after: jax.Array, like: Any, *, layout: Layout, kv_plan: Any
) -> tuple[jax.Array, jax.Array]:
    """The transpose of `_halos`, whose operands have the shapes of `like`."""
    if halo.placed != "balanced":
        function = functools.partial(_halos, halo, layout=layout, kv_plan=kv_plan)
        last, first = jax.linear_transpose(function, *like)((before, after))
        return last, first
    axes = layout.several(layout.kv_context)
    chunk_at, place_of = kv_plan[:, 0], kv_plan[:, 1]
    rank = jax.lax.axis_index(axes)
    both = []
    for way, x in ((-1, before), (1, after)):
        # For each chunk, the gradient from the halo of its neighbor, if the neighbor is on this
        # rank. Not a scatter, which would need an array of zeros.
        place = take_each(place_of, (chunk_at - way) % place_of.shape[1])
        x, place, own = vary_together(x, place, rank)
        part = take_each(x, place % halo.chunks)
        is_here = (place // halo.chunks == own)[:, :, None, None]
        both.append(jnp.where(is_here, part, jnp.zeros_like(part)))
    sums = jax.lax.psum_scatter(jnp.concatenate(both, 2), axes, scatter_dimension=1, tiled=True)
    return sums[:, :, : halo.before], sums[:, :, halo.before :]


def _sent(halo: Halo, x: jax.Array, way: int, layout: Layout) -> jax.Array:
    """The halos of this rank's chunks, in key order, exchanged for x, the edges of its chunks.

    x: (B, chunks, rows of an edge, ...). way: -1 for halos before the chunks, 1 for halos behind.
    """
    axes = layout.several(layout.kv_context)
    rank = jax.lax.axis_index(axes)

    def where(places: list[Place], x: jax.Array, other: jax.Array) -> jax.Array:
        """x on the ranks of these places, `other` on all other ranks."""
        is_target = np.isin(np.arange(halo.ranks), [place.rank for place in places])
        x, other, on_target = vary_together(x, other, jnp.asarray(is_target)[rank])
        return jnp.where(on_target, x, other)

    hops: dict[tuple[int, int], jax.Array] = {}  # keyed by (hop, slot)
    for send in halo.sends(way):
        edges = x[:, :, -send.rows :] if way < 0 else x[:, :, : send.rows]
        sources, targets = (_by_slot(side) for side in zip(*send.pairs, strict=True))
        rows, *others = (edges[:, slot] for slot in sources)
        for other, places in zip(others, list(sources.values())[1:], strict=True):
            rows = where(places, other, rows)
        if not send.is_local:
            pairs = [(source.rank, target.rank) for source, target in send.pairs]
            rows = _ppermute(rows, pairs, axes, layout)
        for slot, places in targets.items():
            at = send.hop, slot
            hops[at] = where(places, rows, hops.get(at, jnp.zeros_like(rows)))
    sizes = {send.hop: send.rows for send in halo.sends(way)}
    order = sorted(sizes, reverse=way < 0)
    chunks = []
    for slot in range(halo.chunks):
        parts = [hops.get((hop, slot), jnp.zeros_like(x[:, 0, : sizes[hop]])) for hop in order]
        chunks.append(jnp.concatenate([*parts, x[:, slot, :0]], 1))
    return jnp.stack(chunks, 1)


def _ppermute(
    x: jax.Array, pairs: list[tuple[int, int]], axes: tuple[str, ...], layout: Layout
) -> jax.Array:
    """`jax.lax.ppermute` between ranks that count along `axes`. JAX's function counts ranks in the
    mesh's order of axes, unlike `axis_index` and `all_gather`."""
    in_mesh = tuple(axis for axis, _ in layout.sizes if axis in axes)
    ranks = np.arange(layout.size(axes)).reshape([layout.size((axis,)) for axis in axes])
    place = np.argsort(ranks.transpose([axes.index(axis) for axis in in_mesh]), axis=None)
    at = [(int(place[source]), int(place[target])) for source, target in pairs]
    return jax.lax.ppermute(x, in_mesh, at)


def _by_slot(places: Iterable[Place]) -> dict[int, list[Place]]:
    by_slot: dict[int, list[Place]] = {}
    for place in places:
        by_slot.setdefault(place.slot, []).append(place)
    return by_slot
