"""Dense and paged caches, from which `decode_attention` and `ragged_paged_attention` read: writing
keys and values, and the places of the tokens of a packed step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from packax._src.core.arguments import as_int32
from packax._src.core.sharding import over_auto_axes, typed_axes
from packax._src.core.spec import FP8, is_fp8
from packax._src.decode import checked_kv_scale
from packax._src.ragged import token_positions
from packax._src.requests import as_arrays

__all__ = ["token_positions", "write"]


def write(
    cache: ArrayLike,
    new: ArrayLike,
    sequence_ids: ArrayLike,
    positions: ArrayLike,
    *,
    block_table: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> jax.Array:
    """Writes the keys, or the values, of new tokens into a cache.

    After a prefill `new` is a packed batch: each row holds prompts of any lengths, one after
    another. In decoding it is one or a few tokens of every sequence, and in a step of a server the
    tokens of all sequences, without an axis of rows (`token_positions` says where they go). Donate
    the cache to `jit`, so that it is written in place.

    Args:
        cache: (B, S, Hkv, D); with block_table its pages, (pages, page_size, Hkv, D).
        new: the keys or values of R rows of T tokens, (R, T, Hkv, D), or of one row, (T, Hkv, D),
            cast to the dtype of the cache. In a float8_e4m3fn cache, numbers beyond its largest,
            448, are clipped to it.
        sequence_ids: the sequence of each token, which is a row of the cache or of block_table:
            (R, T) integers, or (R, 1) if all tokens of a row belong to one sequence; (T,) or (1,)
            for one row. A token with -1, or another number that is not a sequence, is not written.
        positions: the position of each token in its sequence, from 0: (R, T) or (T,) integers.
            Positions beyond the cache or the table, and those whose entry of the table is not a
            page, are not written.
        block_table: the pages of each sequence, (B, max_blocks) integers, as in `decode_attention`.
        scale: for a cache in float8_e4m3fn: `new` is divided by it, and the cache is multiplied by
            it when it is read. Pass the same array as key_scale or value_scale of
            `decode_attention`, which gives its shapes. Do not change a scale after numbers were
            written with it. None: 1.

    Returns:
        The cache, with the same shape and dtype.

    Raises:
        ValueError: wrong shapes or dtypes.

    Examples:
        >>> pages = jnp.zeros((6, 4, 1, 8))  # six pages of four keys
        >>> table = jnp.array([[5, 0], [2, 1]])  # of two sequences
        >>> prompts = jnp.ones((1, 9, 1, 8))  # of 6 and 2 tokens in one row, then padding
        >>> sequence_ids = packax.segments.from_lengths([6, 2], length=9)[None]
        >>> positions = packax.segments.positions(sequence_ids)
        >>> pages = packax.kv_cache.write(
        ...     pages, prompts, sequence_ids, positions, block_table=table
        ... )
        >>> pages[:, :, 0, 0].astype(int)
        Array([[1, 1, 0, 0],
               [0, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 0, 0],
               [0, 0, 0, 0],
               [1, 1, 1, 1]], dtype=int32)
    """
    cache, new = as_arrays(cache=cache, new=new)
    arrays = (cache, new, sequence_ids, positions, block_table, scale)
    return over_auto_axes(_written, arrays, typed_axes(cache))


def _written(
    cache: jax.Array,
    new: jax.Array,
    sequence_ids: Any,
    positions: Any,
    block_table: Any,
    scale: Any,
) -> jax.Array:
    if cache.ndim != 4 or new.ndim not in (3, 4) or cache.shape[2:] != new.shape[-2:]:
        raise ValueError(
            "cache and new must have shapes (sequences or pages, length, heads, head dim) and "
            "(rows, tokens, heads, head dim) or (tokens, heads, head dim) with the same heads and "
            f"head dim, but have {cache.shape} and {new.shape}"
        )
    tokens = new.shape[:-2]
    shapes = "(rows, tokens)" if new.ndim == 4 else "(tokens,)"
    row, place = (
        jnp.asarray(as_int32(name, x, ranks=(len(tokens),), shapes=shapes))
        for name, x in (("sequence_ids", sequence_ids), ("positions", positions))
    )
    for name, x in (("sequence_ids", row), ("positions", place)):
        one = (*tokens[:-1], 1)
        if x.shape != tokens and (name == "positions" or x.shape != one):
            or_one = "" if name == "positions" else f", or shape {one}"
            raise ValueError(
                f"{name} must have the rows and tokens of new, {tokens}{or_one}, but has {x.shape}"
            )
    row = jnp.broadcast_to(row, place.shape)
    if scale is not None and not is_fp8(cache):
        raise ValueError(f"scale is for caches in {FP8}, but cache is {cache.dtype}: omit it")
    valid = (row >= 0) & (place >= 0)
    table = None
    if block_table is not None:
        table = jnp.asarray(
            as_int32("block_table", block_table, ranks=(2,), shapes="(batch, max_blocks)")
        )
    if 0 in cache.shape or (table is not None and 0 in table.shape):  # an empty cache
        return cache
    if table is not None:
        block, place = place // cache.shape[1], place % cache.shape[1]
        row = table.at[row, block].get(mode="fill", fill_value=-1)
        valid &= row >= 0
    if is_fp8(cache):
        paged = table is not None
        scales = checked_kv_scale("scale", scale, cache.shape[0], cache.shape[2], paged=paged)
        if scales.shape[0] == 1:  # of all tokens
            of_token = scales.reshape(*[1] * (new.ndim - 2), -1)
        else:
            of_token = scales.at[row].get(mode="clip")
        largest = float(jnp.finfo(cache.dtype).max)
        new = jnp.clip(new.astype(jnp.float32) / of_token[..., None], -largest, largest)
    row = jnp.where(valid, row, cache.shape[0])  # out of bounds: the scatter drops it
    return cache.at[row, place].set(new.astype(cache.dtype), mode="drop")
