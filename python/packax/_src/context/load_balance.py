"""Which chunk of query rows goes to which rank: the permutation of context parallelism.

Row ranges are in key coordinates, so the rows of a mask may stand in any order. A plan moves whole
chunks: every rank gets as many, in the order of the sequence, so that the rows of a document stay
neighbours and the hulls of the key side stay tight.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.shapes import BLOCK, PADDING_SEGMENT_ID, TILE

P = jax.sharding.PartitionSpec

Kind = Literal["head_tail", "area"]
Tree = TypeVar("Tree")

_KINDS = ("head_tail", "area")
_ROUNDS = 16  # chunks per rank that the default chunk leaves: benchmarks/context_plans.py


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order", "inverse"],
    meta_fields=["kind", "shards", "length", "chunk"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ContextPlan:
    """What `context_plan` returns: a pytree, so it crosses jit, scan and remat.

    Attributes:
        order: (B or 1, length / chunk) int32: place p holds the chunk order[:, p].
        inverse: the same shape: chunk c stands at place inverse[:, c].
        kind, shards, length, chunk: as given to `context_plan`, chunk in rows.
    """

    order: Any
    inverse: Any
    kind: str
    shards: int
    length: int
    chunk: int

    def permute(self, tree: Tree, axis: int = 1) -> Tree:
        """Every array of `tree` with its rows along `axis` in the plan's order.

        Rank r's rows are then the r-th of `shards` equal pieces: shard that axis over the context
        axes of the mesh. numpy arrays stay numpy where the plan was made on the host.

        Raises:
            ValueError: an array whose `axis` is not as long as the plan, or, where the plan has
                one order per row of the batch, whose first axis is not that batch.

        >>> batch = plan.permute(batch)
        """
        return self._move(tree, self.order, axis)

    def unpermute(self, tree: Tree, axis: int = 1) -> Tree:
        """The exact inverse of `permute`."""
        return self._move(tree, self.inverse, axis)

    def index(self) -> Any:
        """(B or 1, length) int32: the index that the row at each place had in the sequence."""
        numpy = isinstance(self.order, np.ndarray)
        offset = (np if numpy else jnp).arange(self.chunk, dtype=np.int32)
        rows = self.order[:, :, None] * np.int32(self.chunk) + offset[None, None]
        return rows.reshape(rows.shape[0], self.length)

    def _move(self, tree: Tree, order: Any, axis: int) -> Tree:
        def move(path: Any, x: Any) -> Any:
            name = "array" + jax.tree_util.keystr(path)
            if not isinstance(x, jax.Array):
                x = np.asarray(x)
            at = axis + x.ndim if axis < 0 else axis
            if not 0 <= at < x.ndim or x.shape[at] != self.length:
                raise ValueError(
                    f"{name} must have {self.length} rows, the plan's length, along axis {axis}, "
                    f"but has shape {x.shape}"
                )
            batch = order.shape[0]
            if batch > 1 and (at == 0 or x.shape[0] != batch):
                raise ValueError(
                    f"{name} must have the plan's batch, {batch}, as its first axis and be permuted "
                    f"along another, but has shape {x.shape} and axis {axis}"
                )
            return take_sharded(order, at, x)

        return jax.tree_util.tree_map_with_path(move, tree)


def take_chunks(order: Any, axis: int, x: Any) -> Any:
    """Chunk order[b or 0, p] of x at place p of `axis`; x's batch is its first axis."""
    chunks = order.shape[1]
    split = x.reshape(*x.shape[:axis], chunks, -1, *x.shape[axis + 1 :])
    if isinstance(x, np.ndarray) and isinstance(order, np.ndarray):
        if order.shape[0] == 1:
            return np.take(split, order[0], axis).reshape(x.shape)
        return np.stack(
            [np.take(s, o, axis - 1) for s, o in zip(split, order, strict=True)]
        ).reshape(x.shape)

    def take(row: jax.Array, order: jax.Array, axis: int) -> jax.Array:
        index = (slice(None),) * axis + (order,)
        return row.at[index].get(unique_indices=True, mode="promise_in_bounds")

    split, order = jnp.asarray(split), jnp.asarray(order)
    if order.shape[0] == 1:
        return take(split, order[0], axis).reshape(x.shape)
    return jax.vmap(functools.partial(take, axis=axis - 1))(split, order).reshape(x.shape)


def take_sharded(order: Any, axis: int, x: Any) -> Any:
    """take_chunks, also where x's type says how it is sharded: that stays."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not any(sharding.spec):
        return take_chunks(order, axis, x)
    spec = tuple(sharding.spec)

    def place(x: Any, *spec: Any) -> jax.Array:
        return jax.sharding.reshard(x, jax.sharding.NamedSharding(sharding.mesh, P(*spec)))

    whole = tuple(None if n == axis else axes for n, axes in enumerate(spec))
    order = place(order, None if order.shape[0] == 1 else spec[0])
    return place(take_chunks(order, axis, place(x, *whole)), *spec)


def context_plan(
    kind: Kind,
    shards: int,
    *,
    length: int | None = None,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
    segment_ids: Any = None,
    mask: Any = None,
    chunk: int | None = None,
) -> ContextPlan:
    """Which chunks of rows each of `shards` ranks gets: equally many, and as equal work as can be.

    "head_tail": rank r gets the chunks r and 2 * shards - 1 - r of 2 * shards (Llama 3, arXiv
    2407.21783, section 3.3.2): the same work for one causal document, whatever the documents are.
    "area": chunks dealt by the attended area of these documents, causal inside each, or of `mask`.
    The rule is
    longest-processing-time-first (Graham 1969) in rounds: the chunks sorted by area, in each round
    the largest of the next `shards` to the rank with least so far. Deterministic, and the same on
    the host and on the device.

    Args:
        kind: "head_tail" or "area".
        shards: number of ranks along the context axes.
        length: rows of the sequence; needed only where nothing else says it.
        lengths: for "area", on the host: the documents' lengths in order, from the first token on;
            what is left of `length` is padding. A sequence, or one sequence per row of the batch.
        segment_ids: for "area", on the device, inside jit or not: (B, length) or (length,) integers,
            -1 is padding. numpy arrays are worked on by the host.
        mask: for "area", on the device, inside jit or not: what `create_attention_mask` made of the
            expression, without sharding and plan, where windows, chunks or spans make the area
            another than that of causal documents. A row counts for its range of keys; with a
            block_sparse(...) for the blocks of 64 keys that the kernels visit for it, of all heads.
        chunk: rows of a chunk, a multiple of 128 (a tile of the kernels), for "area". None: the
            largest power of two times 128 that leaves a rank 16 chunks, at least 128.

    Returns:
        ContextPlan, with one order per row of the batch where lengths or segment_ids have one.

    Raises:
        ValueError: an unknown kind, a length that does not divide into whole chunks for every rank,
            or documents missing for "area".

    >>> plan = packax.context_plan("area", 4, segment_ids=segment_ids)
    >>> batch = plan.permute(batch)  # tokens, positions, targets: (B, length, ...)
    """
    if kind not in _KINDS:
        raise ValueError(f'kind must be "head_tail" or "area", but is {kind!r}')
    shards = _positive("shards", shards)
    if lengths is not None and segment_ids is not None:
        raise ValueError("give lengths (on the host) or segment_ids, not both")
    if mask is not None:
        _check_mask(mask, lengths is not None or segment_ids is not None)
    ids = _ids_of_lengths(lengths, length) if lengths is not None else _ids(segment_ids)
    rows: Any = ids if mask is None else mask.q_lo
    if length is None:
        if rows is None:
            raise ValueError("length is not known: give length=, lengths=, segment_ids= or mask=")
        length = rows.shape[1]
    length = _positive("length", length)
    if rows is not None and rows.shape[1] != length:
        name = "segment_ids" if mask is None else "mask"
        raise ValueError(f"{name} has {rows.shape[1]} rows, but length says {length}")

    if kind == "head_tail":
        order = _head_tail(shards)
        chunk = _head_tail_chunk(length, shards, chunk)
        inverse = np.argsort(order, axis=1).astype(np.int32)
        return ContextPlan(order, inverse, kind, shards, length, chunk)
    if rows is None:
        raise ValueError('kind "area" needs the documents: give lengths=, segment_ids= or mask=')
    chunk = _area_chunk(length, shards, chunk)
    if isinstance(rows, np.ndarray) and mask is None:
        order = _deal_on_host(_chunk_areas(_causal_keys(rows, np), chunk, np), shards)
        inverse = np.argsort(order, axis=1).astype(np.int32)
    elif mask is None:
        order, inverse = _area_on_device(_causal_keys_on_device(_whole_rows(rows)), chunk, shards)
    else:
        keys = _keys_of_mask(mask) >> max(0, mask.kv_len.bit_length() - length.bit_length())
        order, inverse = _area_on_device(keys, chunk, shards)
    return ContextPlan(order, inverse, kind, shards, length, chunk)


def _positive(name: str, number: Any) -> int:
    try:
        number = operator.index(number)
    except TypeError:
        raise ValueError(f"{name} must be an integer, but is {number!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, but is {number}")
    return number


def _ids(segment_ids: Any) -> Any:
    if segment_ids is None:
        return None
    ids = segment_ids if isinstance(segment_ids, jax.Array) else np.asarray(segment_ids)
    if ids.ndim not in (1, 2) or 0 in ids.shape:
        raise ValueError(
            f"segment_ids must have shape (batch, length) or (length,), but has {ids.shape}"
        )
    if not jnp.issubdtype(ids.dtype, np.integer):  # jnp's knows int4
        raise ValueError(f"segment_ids must be integers, but has dtype {ids.dtype}")
    return ids if ids.ndim == 2 else ids[None]


def _whole_rows(ids: jax.Array) -> jax.Array:
    """ids, not sharded along the sequence in their type."""
    sharding = getattr(jax.typeof(ids), "sharding", None)
    if sharding is None or not any(sharding.spec[1:]):
        return ids
    return jax.sharding.reshard(ids, jax.sharding.NamedSharding(sharding.mesh, P(sharding.spec[0])))


def _ids_of_lengths(lengths: Any, length: int | None) -> np.ndarray:
    several = isinstance(lengths, (list, tuple)) and len(lengths) > 0 and np.ndim(lengths[0]) > 0
    rows = [np.asarray(x) for x in (lengths if several or np.ndim(lengths) > 1 else [lengths])]
    rows = [row if row.size else row.astype(np.int32) for row in rows]  # [] is of floats
    for row in rows:
        if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer) or row.min(initial=0) < 0:
            raise ValueError(
                "lengths must hold document lengths, integers from 0, of a row or of each row of "
                f"the batch, but holds {row!r}"
            )
    total = max(int(row.sum()) for row in rows) if length is None else _positive("length", length)
    ids = np.full((len(rows), total), PADDING_SEGMENT_ID, np.int32)
    for row_ids, row in zip(ids, rows, strict=True):
        tokens = int(row.sum())
        if tokens > total:
            raise ValueError(f"lengths sum to {tokens} in a row, but length says {total}")
        row_ids[:tokens] = np.repeat(np.arange(len(row)), row)
    return ids


def _head_tail(shards: int) -> np.ndarray:
    rank = np.arange(shards, dtype=np.int32)
    return np.stack([rank, 2 * shards - 1 - rank], axis=1).reshape(1, -1)


def _head_tail_chunk(length: int, shards: int, chunk: int | None) -> int:
    own = length // (2 * shards)
    if length % (2 * shards * TILE):
        raise ValueError(
            f'length must be a multiple of 2 * shards * {TILE} = {2 * shards * TILE} for "head_tail", '
            f"but is {length}"
        )
    if chunk not in (None, own):
        raise ValueError(
            f'chunk of "head_tail" is length / (2 * shards) = {own}, but {chunk} was given'
        )
    return own


def _area_chunk(length: int, shards: int, chunk: int | None) -> int:
    if chunk is None:
        chunk = TILE
        while length % (2 * chunk * shards) == 0 and length >= 2 * chunk * shards * _ROUNDS:
            chunk *= 2
    chunk = _positive("chunk", chunk)
    if chunk % TILE:
        raise ValueError(f"chunk must be a multiple of {TILE}, but is {chunk}")
    if length % (chunk * shards):
        raise ValueError(
            f"length must be a multiple of chunk * shards = {chunk} * {shards} = {chunk * shards}, "
            f"but is {length}"
        )
    return chunk


def _check_mask(mask: Any, more: bool) -> None:
    if more:
        raise ValueError("give mask, or documents as lengths or segment_ids, not both")
    if not hasattr(mask, "q_lo"):  # the class is in build.py, which needs this file
        raise ValueError(
            f"mask must come from create_attention_mask, but is a {type(mask).__name__}"
        )
    if mask.shards != 1 or mask.kv_plan is not None:
        raise ValueError(
            "mask must be in the order of the sequence and whole: build it without sharding and plan"
        )


def _keys_of_mask(mask: Any) -> jax.Array:
    """(Bm, length) int32: the keys that each row attends, or that a tile visits for it, on average of the heads."""
    if mask.q_entries is None:
        lo, hi = (_whole_rows(jnp.asarray(x)) for x in (mask.q_lo, mask.q_hi))
        return hi - lo
    counts = _whole_rows(mask.q_entries[..., :2].sum(axis=3, dtype=jnp.int32).swapaxes(1, 2))
    blocks, heads = counts.sum(axis=2, dtype=jnp.int32), counts.shape[2]
    keys = blocks // heads * BLOCK + blocks % heads * BLOCK // heads
    return jnp.repeat(keys, TILE, axis=1)  # rows come in whole chunks, so in whole tiles


def _causal_keys(ids: Any, xp: ModuleType) -> Any:
    """(B, length) int32: the keys that each row attends, causal in runs of one id."""
    length = ids.shape[1]
    index = xp.arange(length, dtype=np.int32)[None]
    changes = xp.concatenate([xp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    starts = xp.where(changes, index, 0)
    if xp is np:
        starts = np.maximum.accumulate(starts, axis=1)
    else:
        starts = jax.lax.cummax(starts, axis=1)
    return xp.where(ids == PADDING_SEGMENT_ID, 0, index - starts + 1)


@functools.partial(jax.jit, inline=True)
def _causal_keys_on_device(ids: jax.Array) -> jax.Array:
    return _causal_keys(ids, jnp)


def _chunk_areas(keys: Any, chunk: int, xp: ModuleType) -> Any:
    """(B, chunks) int32: attended pairs of each chunk, in units of a tile's rows, rounded down."""
    batch, length = keys.shape
    keys = keys >> max(0, length.bit_length() - 24)  # so that a tile's sum fits int32
    tiles = keys.reshape(batch, -1, TILE).sum(axis=2, dtype=np.int32) // TILE
    return tiles.reshape(batch, length // chunk, -1).sum(axis=2, dtype=np.int32)


def _next_round(load: Any, areas: Any, xp: ModuleType) -> tuple[Any, Any]:
    """One round of dealing: areas (shards,), largest first, to ranks of these loads.

    Returns the new loads, and which of the round's chunks each rank gets.
    """
    rank = xp.arange(load.shape[0])
    before = (load[None, :] < load[:, None]) | (
        (load[None, :] == load[:, None]) & (rank[None, :] < rank[:, None])
    )
    mine = before.sum(axis=1)  # the rank with least gets the largest
    load = load + areas[mine]
    return load - load.min(), mine  # only differences count, and they stay small


def _deal_on_host(areas: np.ndarray, shards: int) -> np.ndarray:
    orders = []
    for row in areas:
        chunks = np.argsort(-row, kind="stable").reshape(-1, shards)
        load = np.zeros(shards, np.int32)
        dealt = np.empty_like(chunks)
        for number, round_ in enumerate(chunks):
            load, mine = _next_round(load, row[round_], np)
            dealt[number] = round_[mine]
        orders.append(np.sort(dealt.T, axis=1).reshape(-1))
    return np.stack(orders).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("chunk", "shards"), inline=True)
def _area_on_device(keys: jax.Array, chunk: int, shards: int) -> tuple[jax.Array, jax.Array]:
    def one_row(areas: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunks = jnp.argsort(-areas, stable=True).astype(jnp.int32).reshape(-1, shards)

        def deal(load: jax.Array, round_: jax.Array) -> tuple[jax.Array, jax.Array]:
            load, mine = _next_round(load, areas[round_], jnp)
            return load, round_[mine]

        _, dealt = jax.lax.scan(deal, 0 * areas[:shards], chunks)
        order = jnp.sort(dealt.T, axis=1).reshape(-1)
        return order, jnp.argsort(order).astype(jnp.int32)

    return jax.vmap(one_row)(_chunk_areas(keys, chunk, jnp))
