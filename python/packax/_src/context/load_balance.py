"""Load balancing for context parallelism: plans that assign chunks of query rows to ranks.

Row ranges are indices of keys, so the rows of a mask may be in any order. A plan moves whole
chunks. Every rank gets the same number of chunks, in the order of the sequence, so that the rows of
a document stay neighbors and the row ranges of key blocks stay tight. masks/planning.py computes
the work of each row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.halo import Halo, keys_of_halos
from packax._src.core.arguments import PublicNames
from packax._src.core.provenance import mark_permuted
from packax._src.core.sharding import spec, typed_as, typed_axes, vary_together
from packax._src.core.spec import TILE, common_batch

Tree = TypeVar("Tree")

# The number of chunks per rank with the default chunk size (benchmarks/context_plans.py). With a
# window, every chunk has a halo and the work of chunks differs less, so there are fewer chunks, if
# halos are at most half a chunk.
_ROUNDS, _ROUNDS_WITH_HALOS = 16, 4

_AREA_BITS = 30  # of the largest area: the difference of two loads, plus an area, fits int32


class Step(NamedTuple):
    """A gather among `size` ranks whose indices are `stride` apart."""

    size: int
    stride: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order", "inverse", "split", "checksum"],
    meta_fields=["kind", "ranks", "length", "chunk", "shared", "levels"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ContextPlan(metaclass=PublicNames):
    """What `context_plan` returns: a pytree, so it can be passed through jit, scan and remat.

    Attributes:
        order: the chunk at each index of the plan, (B or 1, length / chunk) int32.
        inverse: the index of each chunk, in the same shape.
        kind, ranks, length, chunk: as in `context_plan`; chunk is in tokens.
        shared: for "local" (whose chunk is 1), the number of tokens at the start of each rank that
            form its shared part, whose keys and values all ranks gather. The other tokens are its
            private part, which no other rank reads. With levels, a tuple with one number for each:
            the first shared[0] tokens are gathered by all ranks, the first shared[1] by the ranks
            of a host, and so on. None: there are no parts, and all keys are gathered.
        split: for "local", how many tokens of each rank are in split documents, at each level (over
            hosts, or inside a host), (B or 1, ranks, levels or 1) int32. These tokens come first,
            at most `shared` of them. Then come the tokens of documents that are not split, in the
            order of the sequence. None: attention gathers all keys.
        checksum: a checksum of the segment ids from which the plan was made, (B or 1,) int32. None:
            it was made without ids, or with separate ids for the keys.
        levels: for "local", the sizes of the groups of ranks, such as (hosts, ranks of a host),
            whose product is `ranks`. (): one level.
    """

    public = ("permute", "unpermute", "index", "fetched", "traffic")

    order: Any
    inverse: Any
    kind: str
    ranks: int
    length: int
    chunk: int
    shared: int | tuple[int, ...] | None = None
    split: Any = None
    checksum: Any = None
    levels: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(groups, rows) of each shared part, the outermost first.

        groups: the number of groups into which ranks split to gather the part. rows: the number of
        rows of each rank in the part.
        """
        if self.shared is None:
            return ()
        rows = self.shared if isinstance(self.shared, tuple) else (self.shared,)
        groups = itertools.accumulate((1, *self.levels), operator.mul)
        return tuple(zip(groups, rows, strict=False))

    @property
    def moves(self) -> bool:
        """Whether `permute` may change the order: not with one rank and one chunk."""
        return self.ranks > 1 or self.chunk != self.length

    @property
    def fetched(self) -> int:
        """How many keys a rank fetches from others, for each row of the batch, to log."""
        parts = self.parts or ((1, self.length // self.ranks),)
        return sum((self.ranks // groups - 1) * rows for groups, rows in parts)

    def traffic(
        self, ranks_per_host: int, token_bytes: int, expression: Any = None
    ) -> dict[str, int]:
        """Bytes of keys and values that a rank fetches for one row of the batch, by this plan.

        Sending their gradients back takes as many bytes. The ranks of a host are neighbors: the
        host is the first of the context axes. With levels, the keys that all ranks gather are sent
        to each host once: first, each rank fetches keys from the ranks with the same index on the
        other hosts. Then the ranks of a host exchange what they have fetched.

        Args:
            ranks_per_host: the number of context ranks on one host, a divisor of `ranks`.
            token_bytes: the size of the keys and values of one token, such as 2 * kv_heads *
                head_dim * 2 in bfloat16.
            expression: the mask expression of a layer, whose window may need fewer keys than the
                plan. The result is then an upper bound for each rank: ranks at the ends of a host
                fetch more from other hosts than the others do.

        Returns:
            {"inside": bytes from ranks of the same host, "between": bytes from other hosts}.

        Raises:
            ValueError: ranks_per_host does not divide the ranks.

        Examples:
            >>> # zigzag, 4 ranks, 1024 tokens
            >>> plan.traffic(ranks_per_host=2, token_bytes=2 * 8 * 128 * 2)
            {'inside': 1048576, 'between': 2097152}
        """
        inner = positive("ranks_per_host", ranks_per_host)
        if self.ranks % inner:
            raise ValueError(
                f"ranks_per_host must divide the plan's {self.ranks} ranks, but is {inner}"
            )
        row = positive("token_bytes", token_bytes)
        halo = None if expression is None else self.halo(expression)
        if halo is not None:
            inside, between = halo.traffic(inner)
            return {"inside": inside * row, "between": between * row}
        inside = between = 0
        for groups, rows in self.parts or ((1, self.length // self.ranks),):
            rows_held = rows  # rows that a rank has, before each step
            for step in self.steps(groups):
                on_host = math.gcd(step.size * step.stride, inner) // math.gcd(step.stride, inner)
                inside += (on_host - 1) * rows_held
                between += (step.size - on_host) * rows_held
                rows_held *= step.size
        return {"inside": inside * row, "between": between * row}

    def halo(self, expression: Any) -> Halo | None:
        """The halos that ranks fetch for a mask of this expression; None: no halos."""
        return Halo.of(expression, self.kind, self.ranks, self.length, self.chunk)

    def steps(self, groups: int) -> list[Step]:
        """The gathers, in order, of a part that `groups` groups of ranks gather separately."""
        if len(self.levels) < 2:
            return [Step(self.ranks // groups, 1)]
        found, stride = [], self.ranks
        for size in self.levels:
            stride //= size
            if self.ranks // stride > groups and size > 1:
                found.append(Step(size, stride))
        return found

    def permute(self, tree: Tree, axis: int = 1) -> Tree:
        """Every array of `tree` with its tokens along `axis` in the plan's order.

        Rank r's tokens are then the r-th of `ranks` equal pieces: shard that axis over the context
        axes of the mesh. numpy arrays stay numpy arrays if the plan was made on the host. Do not
        make a mask from permuted ids: expressions describe the sequence in its original order, and
        `create_attention_mask` permutes their arrays.

        Raises:
            ValueError: an array whose `axis` has another length than the plan or, if the plan has
                one order per row of the batch, an array with another batch size.

        Examples:
            >>> permuted = plan.permute(batch)
        """
        permuted = self._move(tree, self.order, axis)
        return mark_permuted(permuted) if self.moves else permuted

    def unpermute(self, tree: Tree, axis: int = 1) -> Tree:
        """Every array of `tree` with its tokens along `axis` back in the order of the sequence.

        The exact inverse of `permute`, with the same arguments and errors.

        Examples:
            >>> outputs = plan.unpermute(plan.permute(query))
        """
        return self._move(tree, self.inverse, axis)

    def index(self) -> Any:
        """(B or 1, length) int32: for each token in the plan's order, its index in the sequence."""
        numpy = isinstance(self.order, np.ndarray)
        offset = (np if numpy else jnp).arange(self.chunk, dtype=np.int32)
        rows = self.order[:, :, None] * np.int32(self.chunk) + offset[None, None]
        return rows.reshape(rows.shape[0], self.length)

    def _move(self, tree: Tree, order: Any, axis: int) -> Tree:
        if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
            raise ValueError(f"axis must be an integer, but is {axis!r}")

        def move(path: Any, x: Any) -> Any:
            name = "array" + jax.tree_util.keystr(path)
            if not isinstance(x, jax.Array):
                x = np.asarray(x)
            at = axis + x.ndim if axis < 0 else axis
            if not 0 <= at < x.ndim or x.shape[at] != self.length:
                raise ValueError(
                    f"{name} must have {self.length} tokens, the plan's length, along axis {axis}, "
                    f"but has shape {x.shape}"
                )
            batch = order.shape[0]
            if batch > 1 and (at == 0 or x.shape[0] != batch):
                raise ValueError(
                    f"{name} must have the plan's batch, {batch}, as its first axis and be "
                    f"permuted along another, but has shape {x.shape} and axis {axis}"
                )
            return take_sharded(order, at, x)

        return jax.tree_util.tree_map_with_path(move, tree)


def take_chunks(order: Any, axis: int, x: Any) -> Any:
    """x with its chunks along `axis` reordered: chunk p of the result is chunk order[b, p] of x.

    b is the batch row, an index into the first axis of x. An order with batch 1 applies to all.
    """
    chunks = order.shape[1]
    split = x.reshape(*x.shape[:axis], chunks, -1, *x.shape[axis + 1 :])
    if isinstance(x, np.ndarray) and isinstance(order, np.ndarray):
        if order.shape[0] == 1:
            return np.take(split, order[0], axis).reshape(x.shape)
        return np.stack(
            [np.take(s, o, axis - 1) for s, o in zip(split, order, strict=True)]
        ).reshape(x.shape)

    split, order = jnp.asarray(split), jnp.asarray(order)
    if order.shape[0] > 1:
        return take_each(split, order, axis, unique=True).reshape(x.shape)
    index = (slice(None),) * axis + (order[0],)
    return split.at[index].get(unique_indices=True, mode="promise_in_bounds").reshape(x.shape)


def take_each(x: jax.Array, index: jax.Array, axis: int = 1, unique: bool = False) -> jax.Array:
    """x[b] at index[b] along `axis` of x, for each batch row b; both have batch 1 or B.

    unique: no index occurs twice in a batch row. Not written as a jax.vmap over the rows: in a
    shard_map, that fails if the caller maps the call with spmd_axis_name.
    """
    batch = common_batch((x.shape[0], index.shape[0]))
    x, index = vary_together(x, index)
    x, index = (jnp.broadcast_to(y, (batch, *y.shape[1:])) for y in (x, index))
    others = tuple(dim for dim in range(1, x.ndim) if dim != axis)
    return jax.lax.gather(
        x,
        index[..., None],
        jax.lax.GatherDimensionNumbers(
            offset_dims=others,
            collapsed_slice_dims=(axis,),
            start_index_map=(axis,),
            operand_batching_dims=(0,),
            start_indices_batching_dims=(0,),
        ),
        slice_sizes=[size if dim in others else 1 for dim, size in enumerate(x.shape)],
        unique_indices=unique,
        mode="promise_in_bounds",
    )


def take_sharded(order: Any, axis: int, x: Any) -> Any:
    """take_chunks that keeps the sharding of x's type."""
    axes = typed_axes(x)
    if not any(axes):
        order = typed_as(order) if isinstance(order, jax.Array) else order
        return take_chunks(order, axis, x)
    rows = spec(() if order.shape[0] == 1 else axes[0])
    mesh = jax.typeof(x).sharding.mesh
    order = jax.sharding.reshard(order, jax.sharding.NamedSharding(mesh, rows))
    whole = typed_as(x, *(() if n == axis else of for n, of in enumerate(axes)))
    return typed_as(take_chunks(order, axis, whole), *axes)


def zigzag(ranks: int, length: int) -> ContextPlan:
    """Of 2 * ranks chunks, rank r gets the chunks r and 2 * ranks - 1 - r."""
    rank = np.arange(ranks, dtype=np.int32)
    order = np.stack([rank, 2 * ranks - 1 - rank], axis=1).reshape(1, -1)
    return ContextPlan(order, inverse_of(order), "zigzag", ranks, length, length // (2 * ranks))


def balanced(
    ranks: int, keys: Any, chunk: int | None = None, expression: Any = None
) -> ContextPlan:
    """Deals chunks to ranks by their work.

    keys: (B or 1, length) int32, the number of keys to which each row attends. A numpy array is
    processed on the host, with the same result.
    expression: the mask expression, whose halos determine the default chunk. None: no halos,
    because this is not self-attention.
    """
    length = keys.shape[1]
    chunk = _balanced_chunk(length, ranks, chunk, expression)
    if isinstance(keys, np.ndarray):
        order = _deal_on_host(_chunk_areas(keys, chunk, np), ranks)
        inverse = inverse_of(order)
    else:
        order, inverse = _deal_on_device(keys, chunk, ranks)
    return ContextPlan(order, inverse, "balanced", ranks, length, chunk)


@functools.lru_cache(8)
def indices(number: int) -> np.ndarray:
    """0, 1, ..., number - 1. Cached, because allocation costs more than computation; read-only."""
    index = np.arange(number, dtype=np.int32)
    index.flags.writeable = False
    return index


def inverse_of(order: np.ndarray) -> np.ndarray:
    """(B, n): the inverse of each permutation."""
    inverse = np.empty_like(order)
    for of_row, row in zip(inverse, order, strict=True):
        of_row[row] = indices(len(row))
    return inverse


def checksum(ids: Any) -> Any:
    """(B,) int32: checksums of segment ids (B, length), equal for numpy and jax arrays."""
    if isinstance(ids, jax.Array):
        weights = _weights(jnp.arange(ids.shape[1], dtype=jnp.uint32))
        sums = (ids.astype(jnp.uint32) * weights[None]).sum(axis=1, dtype=jnp.uint32)
    else:
        sums = ids.astype(np.uint32) @ _weights_on_host(ids.shape[1])
    return sums.astype(np.int32)


def _weights(index: Any) -> Any:
    """Odd pseudorandom numbers: sums of ids times these numbers distinguish rows."""
    x = index * np.uint32(2654435761)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(2246822519)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(3266489917)
    return (x ^ (x >> np.uint32(16))) | np.uint32(1)


@functools.lru_cache(8)
def _weights_on_host(number: int) -> np.ndarray:
    return _weights(np.arange(number, dtype=np.uint32))


def in_order(kind: str, length: int) -> ContextPlan:
    """The plan for one rank, which moves nothing."""
    order = np.zeros((1, 1), np.int32)
    return ContextPlan(order, order, kind, 1, length, length)


def positive(name: str, number: Any) -> int:
    try:
        number = operator.index(number)
    except TypeError:
        raise ValueError(f"{name} must be an integer, but is {number!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, but is {number}")
    return number


def whole_rows(x: jax.Array) -> jax.Array:
    """x, resharded so that its type shards only the first axis."""
    return typed_as(x, typed_axes(x)[0])


def check_zigzag(length: int, ranks: int, chunk: int | None) -> None:
    """Raises unless the chunks of `zigzag` are whole tiles, each of `chunk` tokens if given."""
    own = length // (2 * ranks)
    if length % (2 * ranks * TILE):
        raise ValueError(
            f'length must be a multiple of 2 * ranks * {TILE} = {2 * ranks * TILE} for "zigzag", '
            f"but is {length}"
        )
    if chunk not in (None, own):
        raise ValueError(
            f'chunk of "zigzag" is length / (2 * ranks) = {own}, but {chunk} was given'
        )


def _default_chunk(length: int, ranks: int, rounds: int) -> int:
    chunk = TILE
    while length % (2 * chunk * ranks) == 0 and length >= 2 * chunk * ranks * rounds:
        chunk *= 2
    return chunk


def _balanced_chunk(length: int, ranks: int, chunk: int | None, expression: Any) -> int:
    if chunk is None:
        chunk = _default_chunk(length, ranks, _ROUNDS_WITH_HALOS)
        halos = [] if expression is None else keys_of_halos(expression, chunk)
        if len(halos) < 2 or 2 * sum(halos) > chunk:
            chunk = _default_chunk(length, ranks, _ROUNDS)
    chunk = positive("chunk", chunk)
    if chunk % TILE:
        raise ValueError(f"chunk must be a multiple of {TILE}, but is {chunk}")
    if length % (chunk * ranks):
        raise ValueError(
            f"length must be a multiple of chunk * ranks = {chunk} * {ranks} = {chunk * ranks}, "
            f"but is {length}: pad the rows to such a length"
        )
    return chunk


def _chunk_areas(keys: Any, chunk: int, xp: ModuleType) -> Any:
    """(B, chunks) int32: attended pairs of each chunk, in units of TILE pairs, rounded down.

    If the largest area of a row has more than _AREA_BITS bits, all of its areas lose the low bits
    that are too many.
    """
    batch, length = keys.shape
    most = 1 << length.bit_length()  # keys of a row
    small = TILE * most < 2**31
    by_tile = keys.reshape(batch, -1, TILE)
    if xp is np or small:
        tiles = by_tile.sum(axis=2, dtype=np.int32 if small else np.int64) // TILE
    else:
        quotients, remainders = by_tile // TILE, by_tile % TILE
        tiles = quotients.sum(axis=2, dtype=np.int32)
        tiles += remainders.sum(axis=2, dtype=np.int32) // TILE
    tiles = tiles.reshape(batch, length // chunk, -1)
    if most * tiles.shape[2] < 1 << _AREA_BITS:
        return tiles.sum(axis=2, dtype=np.int32)
    if xp is np:
        areas = tiles.sum(axis=2, dtype=np.int64)
        bits = [int(x).bit_length() for x in areas.max(axis=1)]
        return (areas >> np.maximum(np.array(bits)[:, None] - _AREA_BITS, 0)).astype(np.int32)
    return _sum_of_top_bits(tiles, most)


def _sum_of_top_bits(tiles: jax.Array, most: int) -> jax.Array:
    """tiles.sum(axis=2) >> shift, with the shift for which the largest sum of a row has _AREA_BITS
    bits. `most`: an upper bound on the values of tiles. jax has int64 only with jax_enable_x64."""
    size = 31 - tiles.shape[2].bit_length()  # bits of a digit: the sum of digits fits int32
    mask = (1 << size) - 1
    carry: Any = 0
    digits: list[tuple[int, jax.Array]] = []  # each with the number of bits below it
    for below in range(0, (most * tiles.shape[2]).bit_length(), size):
        total = ((tiles >> min(below, 31)) & mask).sum(axis=2, dtype=np.int32) + carry
        digits.append((below, total & mask))
        carry = total >> size
    tops = [(below, x.max(axis=1, keepdims=True)) for below, x in digits]
    bits = [jnp.where(top > 0, 32 - jax.lax.clz(top) + below, 0) for below, top in tops]
    shift = jnp.maximum(functools.reduce(jnp.maximum, bits) - _AREA_BITS, 0)
    return functools.reduce(
        jnp.add,
        [(x << jnp.clip(n - shift, 0, 31)) >> jnp.clip(shift - n, 0, 31) for n, x in digits],
    )


def deal_in_rounds(areas: np.ndarray, order: np.ndarray, load: np.ndarray) -> np.ndarray:
    """The rank of each chunk, if chunks are dealt in the given order.

    In each round, every rank gets one chunk, and larger chunks go to ranks with less load.
    """
    load, rank_of = load.astype(np.int64), np.empty(len(areas), np.int64)
    for chunks in order.reshape(-1, len(load)):
        chunks = chunks[(-areas[chunks]).argsort(kind="stable")]
        ranks = load.argsort(kind="stable")
        rank_of[chunks] = ranks
        load[ranks] += areas[chunks]
    return rank_of


def _deal_on_host(areas: np.ndarray, ranks: int) -> np.ndarray:
    none = np.zeros(ranks, np.int64)
    dealt = [deal_in_rounds(row, (-row).argsort(kind="stable"), none) for row in areas]
    return np.stack(dealt).argsort(axis=1, kind="stable").astype(np.int32)


@functools.partial(jax.jit, static_argnames=("chunk", "ranks"), inline=True)
def _deal_on_device(keys: jax.Array, chunk: int, ranks: int) -> tuple[jax.Array, jax.Array]:
    def one_row(areas: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunks = jnp.argsort(-areas, stable=True).astype(jnp.int32).reshape(-1, ranks)

        def deal(load: jax.Array, round_: jax.Array) -> tuple[jax.Array, jax.Array]:
            index = jnp.arange(ranks, dtype=jnp.int32)
            less, equal = (f(load[None, :], load[:, None]) for f in (jnp.less, jnp.equal))
            is_less_loaded = less | (equal & (index[None, :] < index[:, None]))
            turn = is_less_loaded.sum(axis=1)  # ranks with less load get larger chunks
            load = load + areas[round_[turn]]
            return load - load.min(), round_[turn]  # only differences matter: stay small

        _, dealt = jax.lax.scan(deal, 0 * areas[:ranks], chunks)
        order = jnp.sort(dealt.T, axis=1).reshape(-1)
        return order, jnp.argsort(order).astype(jnp.int32)

    return jax.vmap(one_row)(_chunk_areas(keys, chunk, jnp))
