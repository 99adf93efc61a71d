"""Packed rows of several sequences: which rows a sequence has, and how they are divided into work.

In XLA and under `vmap` the rows of each sequence are divided into tiles of a fixed size, which are
decoded like sequences. The kernels read packed rows, and a list of work: tiles and shares of their
keys. Both are computed on the device, so any mix of sequences runs the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.core.sharding import over_auto_axes, typed_axes
from packax._src.core.spec import INT_MAX, Operands, ceil_div

MAX_ROWS = 16  # rows of a sequence that decode_p takes
ITEM = 8  # numbers of an item: csrc/kernels/portable/decode.py
TILE_ROWS = 64  # rows of a group in a tile of `decode_tall` for most dtypes
MOST_PARTS = 128  # DECODE_SPLITS in csrc/aot/tiles_decode.py
PROGRAMS = 1024  # into which long sequences are divided: a few for each multiprocessor
LEAST_KEYS = 256  # of a share
# Chunks: sequences with this many tokens, which Hopper's kernel computes in tiles of CHUNK_ROWS, if
# together they have at least CHUNK_PROGRAMS tiles of all heads. Tiles are not divided into shares.
CHUNK, CHUNK_ROWS, CHUNK_PROGRAMS = 128, 128, 96


class Tiles(NamedTuple):
    """Rows in tiles of one sequence each, padded at the end of a sequence."""

    size: int  # rows of a tile
    sequence: jax.Array  # (tiles,), any number of at least N without rows
    row: jax.Array  # (tiles, size), T for padding
    place: jax.Array  # (T,), the index in `row`, flattened; beyond it for padding


class PackedRows(NamedTuple):
    """Which rows belong to which sequence."""

    start: jax.Array  # (N,), the first row of each sequence
    end: jax.Array  # (N,)
    sequence: jax.Array  # (T,)
    valid: jax.Array  # (T,): not padding

    @staticmethod
    def of(start: jax.Array, end: jax.Array, rows: int) -> PackedRows:
        """`start` and `end` do not decrease, and may be beyond `rows`."""
        row = jnp.arange(rows, dtype=jnp.int32)
        sequence = _found(end, row)
        valid = (sequence < end.size) & (row >= start[0])
        return PackedRows(start, end, jnp.minimum(sequence, end.size - 1), valid)

    def positions(self, lengths: jax.Array) -> jax.Array:
        """(T,) int32: the position of each row, if it is not padding."""
        rows = jnp.arange(self.sequence.size, dtype=jnp.int32)
        return jnp.maximum(lengths, 0)[self.sequence] - (self.end[self.sequence] - rows)

    def counts(self) -> jax.Array:
        """(N,) int32: the rows of each sequence."""
        start, end = (jnp.minimum(x, self.sequence.size) for x in (self.start, self.end))
        return end - start

    def tiles(self, size: int, least: int = 1, taken: jax.Array | None = None) -> Tiles:
        """As many tiles as `size` rows each can need, whatever the mix. `taken`: the sequences that
        have tiles, (N,) bools, which have at least `least` rows; None: all."""
        rows, batch = self.sequence.size, self.start.size
        start, end = (jnp.minimum(x, rows) for x in (self.start, self.end))
        count = ceil_div(end - start, size)
        count = count if taken is None else jnp.where(taken, count, 0)
        last = jnp.cumsum(count, dtype=jnp.int32)
        tile = jnp.arange(most_tiles(rows, batch, size, least), dtype=jnp.int32)
        of_tile = _found(last, tile)
        first, begin, stop = (x.at[of_tile].get(mode="clip") for x in (last - count, start, end))
        within = jnp.arange(size, dtype=jnp.int32)[None]
        row = (begin + (tile - first) * size)[:, None] + within
        row = jnp.where((of_tile < batch)[:, None] & (row < stop[:, None]), row, rows)
        place = (last - count)[self.sequence] * size
        place += jnp.arange(rows, dtype=jnp.int32) - start[self.sequence]
        place = jnp.where(self.valid, place, tile.size * size)
        return Tiles(size, of_tile, row, place)


def most_tiles(rows: int, batch: int, size: int, least: int = 1) -> int:
    """The most tiles of sequences of at least `least` rows."""
    most = min(rows // least, batch)  # sequences that have rows
    return (rows - most) // size + most


def in_tiles(decode: Callable[[Operands], Any], x: Operands) -> tuple[jax.Array, jax.Array]:
    """The results of decode_p for packed rows, by `decode`, which takes rows of each sequence."""
    rows = x.query.shape[1]
    packing = PackedRows.of(x.row_bounds[0], x.row_bounds[1], rows)
    tiles = packing.tiles(min(MAX_ROWS, ceil_div(rows, packing.start.size)))
    head_axes = typed_axes(x.query)[2]
    call = x._replace(
        query=over_auto_axes(take_rows, (x.query, tiles.row), ((), (), head_axes)),
        kv_start=take_rows(x.kv_start, tiles.row),
        kv_end=take_rows(x.kv_end, tiles.row),
        block_table=x.block_table.at[tiles.sequence].get(mode="clip"),
        row_bounds=None,
    )
    out, lse = decode(call)
    out = over_auto_axes(_packed, (out, tiles.place), ((), (), head_axes))
    return out, over_auto_axes(_packed_lse, (lse, tiles.place), ((), head_axes))


def take_rows(x: jax.Array, row: jax.Array) -> jax.Array:
    """(1, T, ...) as (tiles, rows per tile, ...), with 0 for padding."""
    return x[0].at[row].get(mode="fill", fill_value=0)


def _packed(x: jax.Array, place: jax.Array, padding: float = 0) -> jax.Array:
    """The inverse of `take_rows`."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat.at[place].get(mode="fill", fill_value=padding)[None]


def _packed_lse(lse: jax.Array, place: jax.Array) -> jax.Array:
    """(tiles, H, rows per tile) as (1, H, T)."""
    return _packed(lse.swapaxes(1, 2), place, -jnp.inf).swapaxes(1, 2)


class Room(NamedTuple):
    """The static sizes of a list of work."""

    tile_rows: int  # the most tokens of an item
    shares: int  # into which all keys are divided, besides one for each tile
    items: int
    chunk_tiles: int


def room(tokens: int, sequences: int, heads: int, kv_heads: int) -> Room:
    size = max(1, TILE_ROWS * kv_heads // heads) if tokens > sequences else 1
    shares = ceil_div(PROGRAMS, kv_heads)
    items = most_tiles(tokens, sequences, size) + shares
    chunks = tokens >= CHUNK and tokens > sequences
    chunk_tiles = most_tiles(tokens, sequences, CHUNK_ROWS, CHUNK) if chunks else 0
    return Room(size, shares, items, chunk_tiles)


def room_of(x: Operands) -> Room:
    """Of a call with `row_bounds` or `work`."""
    _, tokens, heads, _ = x.query.shape
    return room(tokens, x.block_table.shape[0], heads, x.key.shape[2])


class _Keys(NamedTuple):
    """The keys to which some row of each tile attends, [first, last), and those to which all rows
    that have keys attend, [full_lo, full_hi)."""

    first: jax.Array
    last: jax.Array
    full_lo: jax.Array
    full_hi: jax.Array

    @staticmethod
    def of(tiles: Tiles, lo: jax.Array, hi: jax.Array) -> _Keys:
        """lo and hi: (T,), equal for rows without keys."""

        def taken(x: jax.Array, other: int) -> jax.Array:
            x = jnp.where(lo < hi, x, other)
            return x.at[tiles.row].get(mode="fill", fill_value=other)

        last = taken(hi, 0).max(1)
        first = jnp.where(last > 0, taken(lo, INT_MAX).min(1), 0)
        return _Keys(first, last, taken(lo, 0).max(1), taken(hi, INT_MAX).min(1))


def work_list(x: Operands) -> jax.Array:
    """Numbers for each row, (T, 2), and for each item, (items, ITEM). With chunks, the rows of
    other sequences, (T,), -1 beyond their number, and a list of tiles, (1 + chunk_tiles, ITEM). All
    flattened, one after another.

    An item has a tile of rows of one sequence and a share of their keys: the sequence, the first
    row, how many rows, the number of the share, into how many the tile's keys are divided, and
    whether the sequence is a chunk. The shares of a tile are consecutive items. A row has the place
    of its first share, which is the item times the rows of an item plus the row's index in it, and
    the number of its shares. For the list of tiles, see csrc/kernels/sm90/ragged.py.
    """
    _, rows, heads, _ = x.query.shape
    packing = PackedRows.of(x.row_bounds[0], x.row_bounds[1], rows)
    of_step = room_of(x)
    tiles = packing.tiles(of_step.tile_rows)
    capacity = x.block_table.shape[1] * x.key.shape[1]
    lo, end = jnp.maximum(x.kv_start[0], 0), x.kv_end[0]
    beyond = (lo < end) & (end > capacity)
    hi = jnp.where(beyond, lo, end)
    keys = _Keys.of(tiles, lo, hi)
    chunk = jnp.zeros(packing.start.size, bool)
    if of_step.chunk_tiles:
        beyond_tile = beyond.at[tiles.row].get(mode="fill", fill_value=False).any(1)
        chunk = _chunks(x, packing, tiles, keys, beyond_tile, heads)
    size = of_step.tile_rows
    parts, of_chunk = _parts(tiles, keys, chunk, capacity, of_step, rows)
    end = jnp.cumsum(parts, dtype=jnp.int32)
    item = jnp.arange(of_step.items, dtype=jnp.int32)
    tile = _found(end, item)
    used = (tiles.row < rows).sum(1, dtype=jnp.int32)  # tokens
    numbers = [tiles.sequence, tiles.row[:, 0], used, end - parts, parts]
    numbers += [of_chunk.astype(jnp.int32)]
    sequence, row, tokens, begin, of_tile, in_chunk = (y.at[tile].get(mode="clip") for y in numbers)
    tokens = jnp.where(tile < tiles.sequence.size, tokens, 0)
    listed = [sequence, row, tokens, item - begin, of_tile, in_chunk]
    listed += [jnp.zeros_like(item)] * (ITEM - len(listed))
    at = tiles.place // size
    begin, of_row = (y.at[at].get(mode="fill", fill_value=0) for y in (end - parts, parts))
    of_rows = jnp.stack([begin * size + tiles.place % size, of_row], 1)
    work = [of_rows, jnp.stack(listed, 1)]
    if of_step.chunk_tiles:
        others = ~chunk[packing.sequence] & packing.valid
        place = _found(jnp.cumsum(others, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32))
        work += [jnp.where(place < rows, place, -1)]
        work += [_chunk_tiles(packing, chunk, lo, hi)]
    return jnp.concatenate([y.reshape(-1) for y in work])


def _chunks(
    x: Operands, packing: PackedRows, tiles: Tiles, keys: _Keys, beyond: jax.Array, heads: int
) -> jax.Array:
    """(N,) bools: the sequences that Hopper's kernel computes, all of whose pages exist."""
    table, (pages, page_size) = x.block_table, x.key.shape[:2]
    of_sequence = tiles.sequence == jnp.arange(packing.start.size)[:, None]
    first = jnp.where(of_sequence & (keys.last > 0), keys.first, INT_MAX).min(1)
    last = jnp.where(of_sequence, keys.last, 0).max(1)
    wrong = (of_sequence & beyond).any(1)
    entry = jnp.arange(table.shape[1], dtype=jnp.int32)
    read = (entry >= first[:, None] // page_size) & (entry < ceil_div(last, page_size)[:, None])
    wrong |= (read & ((table < 0) | (table >= pages))).any(1)
    count = packing.counts()
    chunk = (count >= CHUNK) & ~wrong
    programs = jnp.where(chunk, ceil_div(count, CHUNK_ROWS), 0).sum() * heads
    return chunk & (programs >= CHUNK_PROGRAMS)


def _parts(
    tiles: Tiles, keys: _Keys, chunk: jax.Array, capacity: int, of_step: Room, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Into how many shares the keys of each tile are divided, and whether it is of a chunk. Tiles
    of chunks and the others get half of the shares each, because some GPUs compute only the
    others from this list."""
    unit = LEAST_KEYS  # so large that the sum fits in int32
    while tiles.sequence.size * ceil_div(capacity, unit) > INT_MAX:
        unit *= 2
    steps = ceil_div(keys.last - keys.first, unit)
    of_chunk = chunk.at[tiles.sequence].get(mode="fill", fill_value=False)

    def length(steps: jax.Array, shares: Any) -> jax.Array:
        most = jnp.maximum(ceil_div(steps.sum(), shares), ceil_div(steps.max(), MOST_PARTS))
        return jnp.maximum(most, 1)

    if of_step.chunk_tiles:
        each = jnp.where(chunk.any(), max(of_step.shares // 2, 1), of_step.shares)
        lengths = (length(jnp.where(of_chunk == x, steps, 0), each) for x in (True, False))
        of_each: Any = jnp.where(of_chunk, *lengths)
    else:
        of_each = length(steps, of_step.shares)
    parts = jnp.maximum(ceil_div(steps, of_each), 1)
    return jnp.where(tiles.row[:, 0] < rows, parts, 0), of_chunk


def _chunk_tiles(packing: PackedRows, chunk: jax.Array, lo: jax.Array, hi: jax.Array) -> jax.Array:
    """The number of tiles, and the bounds of all rows that are not padding; then each tile with its
    keys."""
    tiles = packing.tiles(CHUNK_ROWS, CHUNK, chunk)
    used = (tiles.row < packing.sequence.size).sum(1, dtype=jnp.int32)
    numbers = [tiles.sequence, tiles.row[:, 0], used, *_Keys.of(tiles, lo, hi)]
    numbers += [jnp.zeros_like(used)] * (ITEM - len(numbers))
    valid = packing.valid.sum(dtype=jnp.int32)
    first = jnp.minimum(packing.start[0], packing.sequence.size - valid)
    header = [(used > 0).sum(dtype=jnp.int32), first, first + valid]
    header += [jnp.zeros_like(valid)] * (ITEM - len(header))
    return jnp.concatenate([jnp.stack(header)[None], jnp.stack(numbers, 1)])


def _found(ends: jax.Array, places: jax.Array) -> jax.Array:
    """The index of the run, ending at `ends`, in which each place is; their number beyond.

    Not by jnp.searchsorted, which fails in jax 0.12 in a shard_map over some axes of a mesh."""
    return (ends[None] <= places[:, None]).sum(1, dtype=jnp.int32)
