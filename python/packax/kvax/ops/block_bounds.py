"""Bounds of blocks as kvax defines them, for code that inspects a mask. No kernel uses them.

Each pair of blocks is compared by the smallest and largest ids and positions of both, so the cost
is O(query blocks * key blocks), with no work per pair of tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax.kvax.utils.common import PADDING_SEGMENT_ID

_LARGEST = np.iinfo(np.int32).max


class Side(NamedTuple):
    """Positions and segment ids, int32, (B, pieces, length). No block spans two pieces."""

    positions: jax.Array
    ids: jax.Array


class _Blocks(NamedTuple):
    """Values per block, (B, pieces, blocks) each."""

    low: jax.Array  # the smallest id; padding counts as larger than all others
    high: jax.Array  # the largest id
    padding: jax.Array  # whether the block is only padding
    single: jax.Array  # whether the block has only one id, or only padding
    first: jax.Array  # the smallest position
    last: jax.Array  # the largest position


@functools.partial(
    jax.jit, static_argnames=("query_block", "kv_block", "outer", "skip_pad_tokens"), inline=True
)
def block_bounds(
    query: Side, kv: Side, *, query_block: int, kv_block: int, outer: str, skip_pad_tokens: bool
) -> tuple[jax.Array, ...]:
    """lower, upper, lower_full, upper_full: int32, (B, 1, query blocks) or (B, shards, key blocks).

    Args:
        query: the queries, in one piece per shard.
        kv: the keys, in one piece.
        query_block, kv_block: tokens per block.
        outer: "query": bounds in key blocks for each query block. "kv": bounds in query blocks of
            a shard for each key block.
        skip_pad_tokens: whether padding attends to nothing, instead of to padding.
    """
    queries = _blocks(query, query_block, fill=-1)
    keys = _blocks(kv, kv_block, fill=_LARGEST)
    q, k = (jax.tree.map(lambda x: x[..., :, None], queries), keys)
    k = jax.tree.map(lambda x: x[..., None, :], k)
    attended = (q.low <= k.high) & (k.low <= q.high) & (q.last >= k.first)
    if skip_pad_tokens:
        attended &= ~q.padding & ~k.padding
    full = attended & q.single & k.single & (q.padding == k.padding) & (q.first >= k.last)
    if outer == "kv":
        attended, full = (jnp.swapaxes(x, 2, 3) for x in (attended, full))

    count = attended.shape[3]
    index = jnp.arange(count, dtype=jnp.int32)[None, None, None]
    some, some_full = attended.any(3), full.any(3)
    lower = jnp.where(some, jnp.where(attended, index, count).min(3), 0)
    upper = jnp.where(attended, index + 1, 0).max(3)
    # If an id reappears, blocks between full ones may not be full: use the first unbroken run.
    lower_full = jnp.where(full, index, count).min(3)
    after = ~full & (index > lower_full[..., None])
    upper_full = jnp.where(after, index, count).min(3)
    without = upper if outer == "kv" else lower
    lower_full, upper_full = (jnp.where(some_full, x, without) for x in (lower_full, upper_full))
    bounds: tuple[jax.Array, ...] = (lower, upper, lower_full, upper_full)
    if outer == "query":  # concatenates the blocks of all shards
        bounds = tuple(x.reshape(x.shape[0], 1, x.shape[1] * x.shape[2]) for x in bounds)
    return bounds


def _blocks(side: Side, size: int, fill: int) -> _Blocks:
    batch, pieces, length = side.ids.shape
    blocks = -(-length // size)
    widths = ((0, 0), (0, 0), (0, blocks * size - length))
    positions, ids = (
        jnp.pad(x, widths, constant_values=value).reshape(batch, pieces, blocks, size)
        for x, value in zip(side, (fill, PADDING_SEGMENT_ID), strict=True)
    )
    is_padding = ids == PADDING_SEGMENT_ID
    ids = jnp.where(is_padding, _LARGEST, ids)
    low, high = ids.min(3), ids.max(3)
    padding = is_padding.all(3)
    single = (low == high) & (padding | ~is_padding.any(3))
    return _Blocks(low, high, padding, single, positions.min(3), positions.max(3))
