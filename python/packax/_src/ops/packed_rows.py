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

    def tiles(self, size: int) -> Tiles:
        """As many tiles as `size` rows each can need, whatever the mix."""
        rows, batch = self.sequence.size, self.start.size
        start, end = (jnp.minimum(x, rows) for x in (self.start, self.end))
        count = ceil_div(end - start, size)
        last = jnp.cumsum(count, dtype=jnp.int32)
        most = min(rows, batch)  # sequences that have rows
        tile = jnp.arange((rows - most) // size + most, dtype=jnp.int32)
        of_tile = _found(last, tile)
        first, begin, stop = (x.at[of_tile].get(mode="clip") for x in (last - count, start, end))
        within = jnp.arange(size, dtype=jnp.int32)[None]
        row = (begin + (tile - first) * size)[:, None] + within
        row = jnp.where((of_tile < batch)[:, None] & (row < stop[:, None]), row, rows)
        place = (last - count)[self.sequence] * size
        place += jnp.arange(rows, dtype=jnp.int32) - start[self.sequence]
        place = jnp.where(self.valid, place, tile.size * size)
        return Tiles(size, of_tile, row, place)


def in_tiles(decode: Callable[[Operands], Any], x: Operands) -> tuple[jax.Array, jax.Array]:
    """The results of decode_p for packed rows, by `decode`, which takes rows of each sequence."""
    rows = x.query.shape[1]
    packing = PackedRows.of(x.row_bounds[0], x.row_bounds[1], rows)
    tiles = packing.tiles(min(MAX_ROWS, ceil_div(rows, packing.start.size)))
    head_axes = typed_axes(x.query)[2]
    call = x._replace(
        query=over_auto_axes(_taken, (x.query, tiles.row), ((), (), head_axes)),
        kv_start=_taken(x.kv_start, tiles.row),
        kv_end=_taken(x.kv_end, tiles.row),
        block_table=x.block_table.at[tiles.sequence].get(mode="clip"),
        row_bounds=None,
    )
    out, lse = decode(call)
    out = over_auto_axes(_packed, (out, tiles.place), ((), (), head_axes))
    return out, over_auto_axes(_packed_lse, (lse, tiles.place), ((), head_axes))


def _taken(x: jax.Array, row: jax.Array) -> jax.Array:
    """(1, T, ...) as (tiles, rows per tile, ...), with 0 for padding."""
    return x[0].at[row].get(mode="fill", fill_value=0)


def _packed(x: jax.Array, place: jax.Array, padding: float = 0) -> jax.Array:
    """The inverse of `_taken`."""
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


def room(tokens: int, sequences: int, heads: int, kv_heads: int) -> Room:
    size = max(1, TILE_ROWS * kv_heads // heads) if tokens > sequences else 1
    most = min(tokens, sequences)
    shares = ceil_div(PROGRAMS, kv_heads)
    return Room(size, shares, (tokens - most) // size + most + shares)


def work_list(x: Operands) -> tuple[jax.Array, jax.Array]:
    """Numbers for each row, (T, 2), and for each item, (items, ITEM).

    An item has a tile of rows of one sequence and a share of their keys: the sequence, the first
    row, how many rows, the number of the share, and into how many the tile's keys are divided. The
    shares of a tile are consecutive items. A row has the place of its first share, which is the
    item times the rows of an item plus the row's index in it, and the number of its shares.
    """
    _, rows, heads, _ = x.query.shape
    packing = PackedRows.of(x.row_bounds[0], x.row_bounds[1], rows)
    size, shares, items = room(rows, packing.start.size, heads, x.key.shape[2])
    tiles = packing.tiles(size)
    capacity = x.block_table.shape[1] * x.key.shape[1]
    lo, hi = jnp.maximum(x.kv_start[0], 0), x.kv_end[0]
    some = (lo < hi) & (hi <= capacity)
    first = jnp.where(some, lo, INT_MAX).at[tiles.row].get(mode="fill", fill_value=INT_MAX).min(1)
    last = jnp.where(some, hi, 0).at[tiles.row].get(mode="fill", fill_value=0).max(1)
    unit = LEAST_KEYS  # so large that the sum fits in int32
    while tiles.sequence.size * ceil_div(capacity, unit) > INT_MAX:
        unit *= 2
    steps = ceil_div(jnp.maximum(last - first, 0), unit)
    most = jnp.maximum(ceil_div(steps.sum(), shares), ceil_div(steps.max(), MOST_PARTS))
    used = (tiles.row < rows).sum(1, dtype=jnp.int32)  # tokens
    length: Any = jnp.maximum(most, 1)
    parts = jnp.maximum(ceil_div(steps, length), 1)
    parts = jnp.where(used > 0, parts, 0)
    end = jnp.cumsum(parts, dtype=jnp.int32)
    item = jnp.arange(items, dtype=jnp.int32)
    tile = _found(end, item)
    numbers = [tiles.sequence, tiles.row[:, 0], used, end - parts, parts]
    sequence, row, tokens, begin, of_tile = (y.at[tile].get(mode="clip") for y in numbers)
    tokens = jnp.where(tile < tiles.sequence.size, tokens, 0)
    listed = [sequence, row, tokens, item - begin, of_tile]
    listed += [jnp.zeros_like(item)] * (ITEM - len(listed))
    at = tiles.place // size
    begin, of_row = (y.at[at].get(mode="fill", fill_value=0) for y in (end - parts, parts))
    of_rows = jnp.stack([begin * size + tiles.place % size, of_row], 1)
    return of_rows, jnp.stack(listed, 1)


def _found(ends: jax.Array, places: jax.Array) -> jax.Array:
    """The index of the run, ending at `ends`, in which each place is; their number beyond."""
    return jnp.searchsorted(ends, places, side="right", method="compare_all").astype(jnp.int32)
