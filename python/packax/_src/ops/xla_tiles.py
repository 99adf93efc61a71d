"""Cuts the operands of attention in jax.numpy into tiles of rows and blocks of keys.

XLA takes long to compile many small fusions. So tiles and blocks are read from a few arrays, which
are indexed by the number of the tile or block in the whole batch. They are slices of these arrays:
nothing is transposed beforehand. Sums accumulate in place, by a slice and an update in one fusion
(`change`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from packax._src.core.spec import INT_MAX, MaskMode, Operands, ceil_div, fill_up, is_symbolic

# Measured on two cores (float32 and bfloat16, 8/2 heads of dim 64). With 6 documents in 8k tokens,
# tiles from 128x128 to 256x256 are equally fast, and 512 is half as fast. With 160 documents in 16k
# tokens, 128x128 is at least 1.2 times as fast as larger tiles, which compute more masked pairs at
# the edges of documents.
ROWS = 128
KEYS = 128
# Rows that are not longer than this are one tile and one block, without a loop. A step computes as
# many of them together as there may be scores, of all heads: single short rows take less time than
# the start of an operation.
SHORT = 256
SCORES = 1 << 19
# On a GPU, each step of a loop launches several kernels, which take microseconds whatever the size
# of a tile: there tiles are as large as the scores of one step, of all heads, may be. On an H200,
# gradients through a tangent at 4k tokens with 16 heads took 1.21 times as long with 1024, and 1.9
# times with 512.
GPU_SIZE = 2048
GPU_SCORES = 1 << 26


class Tiles(NamedTuple):
    """The tiling of one call; `group` is the number of query heads per key/value head.

    A step is one tile of rows, a block is one block of keys. Both are numbered through the batch.
    Of short rows, which are one tile and one block, a step and a block have `together`.
    """

    batch: int
    kv_heads: int
    group: int
    rows: int
    row_tiles: int
    keys: int
    key_blocks: int
    together: int

    @property
    def steps(self) -> int:
        return self.batch * self.row_tiles if self.together == 1 else self.batch // self.together

    @property
    def one_block(self) -> bool:
        """Whether the keys of a row are known to be one block."""
        return not is_symbolic(self.key_blocks) and self.key_blocks == 1

    @property
    def products(self) -> int:
        """The first axis of what a step computes: its batch rows times key/value heads."""
        return self.together * self.kv_heads

    @property
    def scores(self) -> tuple[int, ...]:
        """The axes of a step's scores of a block, which are (products, group * rows, keys)."""
        return self.together, self.kv_heads, self.group, self.rows, self.keys


def tiles_of(x: Operands, on_gpu: bool) -> Tiles:
    batch, q_len, heads, _ = x.query.shape
    kv_len, kv_heads = x.key.shape[1:3]
    rows, keys, most = ROWS, KEYS, SCORES
    if x.q_block_lists is None:  # lists are for tiles of 128
        if on_gpu:
            rows = keys = GPU_SIZE
            most = GPU_SCORES
            while rows > ROWS and heads * rows * keys > most:
                rows = keys = rows // 2
        elif not (is_symbolic(q_len) or is_symbolic(kv_len)) and max(q_len, kv_len) <= SHORT:
            rows = keys = SHORT
    rows, keys = (
        size if is_symbolic(length) else min(size, length)
        for size, length in ((rows, q_len), (keys, kv_len))
    )
    together = 1
    short = x.q_block_lists is None and (rows, keys) == (q_len, kv_len)
    biases = 1 if x.bias is None else x.bias.shape[0]
    if short and not is_symbolic(batch) and biases in (1, batch):
        fit = max(1, most // (heads * rows * keys))
        together = next(n for n in range(min(batch, fit), 0, -1) if batch % n == 0)
    return Tiles(
        batch=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        rows=rows,
        row_tiles=ceil_div(q_len, rows),
        keys=keys,
        key_blocks=ceil_div(kv_len, keys),
        together=together,
    )


def row_integers(mask: Operands, tiles: Tiles, mask_mode: MaskMode) -> jax.Array:
    """(2 + mask_mode, steps, together, rows, 1): ~lo and hi, then ids and limits for the segment
    check.

    For empty rows and rows beyond Sq, ~lo is the lowest value and hi is 0, so that the maximum over
    a tile gives the range of the tile.
    """
    attends = lax.lt(mask.kv_start, mask.kv_end)
    not_lo = select(attends, lax.bitwise_not(mask.kv_start), ~INT_MAX)
    hi = select(attends, mask.kv_end, 0)
    limits = (
        [mask.q_pos] if mask_mode < MaskMode.BOTH_LIMITS else [mask.q_pos[:, 0], mask.q_pos[:, 1]]
    )
    whole = tiles.row_tiles * tiles.rows
    shape = (tiles.steps, tiles.together, tiles.rows, 1)

    def cut(x, value):
        x = fill_up(x, 1, whole, value)
        return lax.reshape(lax.broadcast_in_dim(x, (tiles.batch, whole), (0, 1)), shape)

    # Reshape, then stack: XLA copies an array that is reshaped just before a loop.
    others = [cut(x, 0) for x in [mask.q_ids, *limits][:mask_mode]]
    return stack([cut(not_lo, ~INT_MAX), cut(hi, 0), *others], 0)


def key_integers(mask: Operands, tiles: Tiles, mask_mode: MaskMode) -> list[jax.Array]:
    """The ids and positions that the segment check reads, if any, (1 or B, blocks * keys) each."""
    whole = tiles.key_blocks * tiles.keys
    return [fill_up(x, 1, whole) for x in [mask.kv_ids, mask.kv_pos][: min(mask_mode, 2)]]


def of_key_block(x: jax.Array, block: jax.Array, tiles: Tiles) -> jax.Array:
    """A block of an array from `key_integers`, (1 or together, 1, keys)."""
    x = batch_rows(x, block, tiles.key_blocks, tiles)
    x = read(x, (np.int32(0), first_key(block, tiles)), (x.shape[0], tiles.keys))
    return lax.expand_dims(x, (1,))


def first_key(block: jax.Array, tiles: Tiles) -> jax.Array:
    """The index of a block's first key in its batch row."""
    return lax.mul(rem(block, tiles.key_blocks), sized(tiles.keys))


def tile_max(rows: jax.Array) -> jax.Array:
    """The maximum of `row_integers` over each tile, (..., steps). Slicing first costs a fusion."""
    # XLA's CPU compiler splits the reduction of an axis of 32 or more into two reductions.
    count, steps, _, size = rows.shape[:4]
    few = math.gcd(size, 16)
    rows = lax.reshape(rows, (count, steps, size // few, few))
    return lax.reduce_max(lax.optimization_barrier(rows), (2, 3))


def block_range(most: jax.Array, step: jax.Array, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """The range of blocks to which a step's rows attend, [first, last + 1), from `tile_max`."""
    of_tile = at(most, step, 1)
    not_lo, hi = (lax.index_in_dim(of_tile, n, keepdims=False) for n in (0, 1))
    first, end = lax.bitwise_not(not_lo), lax.add(hi, np.int32(tiles.keys - 1))
    first, last = (div(x, tiles.keys) for x in (first, end))
    base = lax.mul(div(step, tiles.row_tiles), sized(tiles.key_blocks))
    return lax.add(lax.min(first, last), base), lax.add(last, base)


def sized(size: Any) -> Any:
    """A Python or symbolic size as int32, the dtype of step and block indices."""
    return jnp.asarray(size).astype(jnp.int32) if is_symbolic(size) else np.int32(size)


def div(number: jax.Array, size: Any) -> jax.Array:
    """number // size, for non-negative int32."""
    if _is_power_of_two(size):  # XLA and LLVM compile a division to more operations
        return lax.shift_right_logical(number, lax.full_like(number, size.bit_length() - 1))
    return lax.div(number, sized(size))


def rem(number: jax.Array, size: Any) -> jax.Array:
    """number % size, for non-negative int32."""
    if _is_power_of_two(size):
        return lax.bitwise_and(number, sized(size - 1))
    return lax.rem(number, sized(size))


def _is_power_of_two(size: Any) -> bool:
    return not is_symbolic(size) and size & (size - 1) == 0


def select(which: jax.Array, x: jax.Array, other: float) -> jax.Array:
    """x where `which` (an array shaped like x) is true, and the number `other` elsewhere.

    Loops use lax, because jax traces each jax.numpy function separately, and on a mesh attention is
    traced again during compilation. The number gets the dtype of x: a Python number would be 64-bit
    under jax_enable_x64.
    """
    return lax.select(which, x, lax.full_like(x, other))


def stack(arrays: list[jax.Array], axis: int) -> jax.Array:
    """jnp.stack in terms of lax."""
    return lax.concatenate([lax.expand_dims(x, (axis,)) for x in arrays], axis)


def batch_rows(x: jax.Array, number: Any, of: Any, tiles: Tiles) -> jax.Array:
    """The batch rows of x (1 or B, ...) for a step or block, (1 or together, ...); each batch row
    has `of` of them."""
    if x.shape[0] == 1:
        return x
    row = lax.mul(div(number, of), np.int32(tiles.together))
    return read(x, _start(x, row), (tiles.together, *x.shape[1:]))


def of_scores(x: jax.Array, tiles: Tiles) -> jax.Array:
    """x, whose axes are those of `tiles.scores` or 1, as (products, group * rows, keys)."""
    x = lax.broadcast_in_dim(x, tiles.scores, tuple(range(5)))
    return lax.reshape(x, (tiles.products, tiles.group * tiles.rows, tiles.keys))


def at(x: jax.Array, number: Any, axis: int = 0) -> jax.Array:
    """x[number] along the axis; `number` must be in bounds."""
    sizes = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return lax.squeeze(read(x, _start(x, number, axis), sizes), (axis,))


def put(x: jax.Array, part: jax.Array, number: jax.Array) -> jax.Array:
    """x with x[number] replaced by the part."""
    return write(x, lax.expand_dims(part, (0,)), _start(x, number))


def read(x: jax.Array, start: tuple[Any, ...], sizes: tuple[Any, ...]) -> jax.Array:
    """A dynamic slice of x, without arithmetic for negative indices."""
    return lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)


def write(x: jax.Array, part: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    """x with the part written at `start`."""
    return lax.dynamic_update_slice(x, part, start, allow_negative_indices=False)


def change(x: jax.Array, number: jax.Array, function: Callable) -> jax.Array:
    """x with x[number : number + 1] replaced by function(it), in place and in one fusion."""
    start = _start(x, number)
    return write(x, function(read(x, start, (1, *x.shape[1:]))), start)


def add(x: jax.Array, number: jax.Array, part: jax.Array) -> jax.Array:
    """x with the part added to x[number]."""
    return change(x, number, lambda own: lax.add(own, lax.expand_dims(part, (0,))))


def _start(x, number, axis=0):
    return tuple(number if n == axis else np.int32(0) for n in range(x.ndim))


def cut_rows(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Reshapes (B, Sq, H, D) to (steps, together, rows, Hkv, group, D), without moving data."""
    x = fill_up(x, 1, tiles.row_tiles * tiles.rows)
    of_heads = (tiles.kv_heads, tiles.group, x.shape[-1])
    return lax.reshape(x, (tiles.steps, tiles.together, tiles.rows, *of_heads))


def row_tile(x: jax.Array, step: Any) -> jax.Array:
    """A step's tile from `cut_rows`: (products, group * rows, D)."""
    x = lax.transpose(at(x, step), (0, 2, 3, 1, 4))
    together, kv_heads, group, rows, depth = x.shape
    return lax.reshape(x, (together * kv_heads, group * rows, depth))


def put_row_tile(x: jax.Array, part: jax.Array, step: Any, tiles: Tiles) -> jax.Array:
    """Writes a step's tile (in the layout of `row_tile`) into x (in the layout of `cut_rows`)."""
    part = lax.reshape(part, (*tiles.scores[:4], part.shape[-1]))
    return put(x, lax.transpose(part, (0, 3, 1, 2, 4)), step)


def uncut_rows(x: jax.Array, tiles: Tiles, q_len: Any) -> jax.Array:
    """The inverse of `cut_rows`: (B, Sq, H, D), without moving data."""
    heads = tiles.kv_heads * tiles.group
    x = lax.reshape(x, (tiles.batch, tiles.row_tiles * tiles.rows, heads, x.shape[-1]))
    return lax.slice_in_dim(x, 0, q_len, axis=1)


def rows_together(x: jax.Array, tiles: Tiles, q_len: Any) -> jax.Array:
    """Tiles in the layout of `row_tile`, (steps, products, group * rows, D), as (B, Sq, H, D)."""
    depth, rows = x.shape[-1], tiles.row_tiles * tiles.rows
    shape = (tiles.batch, tiles.row_tiles, tiles.kv_heads, tiles.group, tiles.rows, depth)
    x = lax.transpose(lax.reshape(x, shape), (0, 1, 4, 2, 3, 5))
    x = lax.reshape(x, (tiles.batch, rows, tiles.kv_heads * tiles.group, depth))
    return lax.slice_in_dim(x, 0, q_len, axis=1)


def cut_keys(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Reshapes (B, Skv, Hkv, D) to (blocks, together, keys, Hkv, D), without moving data."""
    x = fill_up(x, 1, tiles.key_blocks * tiles.keys)
    blocks = tiles.steps if tiles.together > 1 else tiles.batch * tiles.key_blocks
    return lax.reshape(x, (blocks, tiles.together, tiles.keys, *x.shape[2:]))


def key_block(x: jax.Array, block: Any) -> jax.Array:
    """A block from `cut_keys`: (products, keys, D)."""
    x = lax.transpose(at(x, block), (0, 2, 1, 3))
    return lax.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def add_keys(x: jax.Array, block: jax.Array, sums: jax.Array) -> jax.Array:
    """x (in the layout of `cut_keys`) with sums (products, keys, D) added to a block."""
    sums = lax.reshape(sums, (x.shape[1], x.shape[3], x.shape[2], x.shape[4]))
    return add(x, block, lax.transpose(sums, (0, 2, 1, 3)))


def keys_together(x: jax.Array, tiles: Tiles, like: jax.Array) -> jax.Array:
    """The inverse of `cut_keys`, in the shape and dtype of `like`."""
    keys = tiles.key_blocks * tiles.keys
    x = lax.reshape(x, (tiles.batch, keys, tiles.kv_heads, like.shape[-1]))
    x = lax.slice_in_dim(x, 0, like.shape[1], axis=1)
    return lax.convert_element_type(x, like.dtype)


class BiasTiles:
    """A bias array (groups, 1 or H, 1 or Sq, Skv) padded to whole tiles, and its gradient.

    Axes of size 1 are not expanded, and B / groups consecutive batch rows read the same bias.
    """

    def __init__(self, bias: jax.Array, tiles: Tiles) -> None:
        self.tiles = tiles
        self.shape = bias.shape
        self.array = self._whole(bias)

    def _whole(self, x: jax.Array) -> jax.Array:
        x = fill_up(x, 3, self.tiles.key_blocks * self.tiles.keys)
        if x.shape[2] == 1:
            return x
        return fill_up(x, 2, self.tiles.row_tiles * self.tiles.rows)

    def _start(self, step: Any, block: Any) -> tuple[Any, ...]:
        tiles, zero = self.tiles, np.int32(0)
        first: Any = zero
        if self.shape[0] != 1:
            row_steps = tiles.row_tiles  # of the batch rows that read one bias
            if tiles.together == 1:
                row_steps = row_steps * (tiles.batch // self.shape[0])
            first = lax.mul(div(step, row_steps), np.int32(tiles.together))
        return (
            first,
            zero,
            zero if self.shape[2] == 1 else rem(step, tiles.row_tiles) * sized(tiles.rows),
            rem(block, tiles.key_blocks) * sized(tiles.keys),
        )

    @property
    def _sizes(self) -> tuple[Any, ...]:
        together = 1 if self.shape[0] == 1 else self.tiles.together
        rows = 1 if self.shape[2] == 1 else self.tiles.rows
        return (together, self.shape[1], rows, self.tiles.keys)

    def at(self, step: Any, block: Any, real: Any, array: jax.Array | None = None) -> jax.Array:
        """The bias of a step and a block, (products, group * rows, keys), in the dtype `real`.
        `array` is read instead of self.array."""
        array = self.array if array is None else array
        tile = read(array, self._start(step, block), self._sizes).astype(real)
        together, heads, *sizes = self._sizes
        heads = (1, 1) if heads == 1 else self.tiles.scores[1:3]
        return of_scores(tile.reshape(together, *heads, *sizes), self.tiles)

    def add(self, sums: jax.Array, step: Any, block: Any, part: jax.Array) -> jax.Array:
        """sums with `part` added, the gradients of a tile's logits, (products, group * rows,
        keys)."""
        together, kv_heads, group, *sizes = self.tiles.scores
        part = part.reshape(together, kv_heads * group, *sizes)
        axes = tuple(axis for axis in range(3) if self.shape[axis] == 1)
        part = lax.reduce_sum(part, axes).reshape(self._sizes) if axes else part
        start = self._start(step, block)
        return write(sums, read(sums, start, self._sizes) + part, start)

    def gradient(self, sums: jax.Array, dtype: Any) -> jax.Array:
        """The gradient in the shape of the bias array."""
        rows, keys = self.shape[2:]
        return sums[:, :, :rows, :keys].astype(dtype)
