"""Blockwise attention in jax.numpy, for platforms without a kernel: O(S) memory.

The recurrence is FlashAttention-2's (arXiv 2307.08691): an online softmax over blocks of keys
forward, five products per block backward. One loop step is a tile of query rows with all heads;
its inner loop visits only the key blocks of the tile's row ranges, so documents cost their area.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from packax._src.core.shapes import INT_MAX
from packax._src.ops import block_lists
from packax._src.ops.xla_tiles import (
    Mask,
    from_key_blocks,
    from_row_tiles,
    key_blocks,
    mask_keys,
    mask_rows,
    row_tiles,
    split,
    tiles_of,
)


class Extras(NamedTuple):
    """What changes scores, in the order the primitives take it; batches 1 or B."""

    scales: jax.Array | None = None  # (1 or B,)
    slopes: jax.Array | None = None  # (Bp, H)
    q_places: jax.Array | None = None  # (Bp, Sq); None beside slopes: indices
    kv_places: jax.Array | None = None  # (Bp, Skv)


_NO_EXTRAS = Extras()


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    extras: Extras = _NO_EXTRAS,
    *,
    scale: float,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    element_test: int,
    block_size: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out (B, Sq, H, Dv) in query's dtype, lse (B, H, Sq), and like it the largest logits.

    Shapes as in flash_attention; `scale` where there are no scales; soft_cap 0: none; `block_size`
    of the mask's map.
    """
    tiles = tiles_of(query, key)
    keys, values = key_blocks(key, tiles), key_blocks(value, tiles)
    rows_of = mask_rows(mask, tiles)
    keys_of = mask_keys(mask, tiles)
    logits_of = _logits(extras, scale, soft_cap, tiles)
    visits_of, in_map = _visits(mask, tiles), _in_map(mask, block_size, tiles)
    real = _accumulator(query.dtype)
    dot = _dots(precision)
    shape = (tiles.kv_heads, tiles.group * tiles.rows)

    def one_tile(step_and_query):
        step, q_tile = step_and_query
        batch = step // tiles.row_tiles
        rows = rows_of(step)
        q_tile = q_tile.astype(real)
        logits = logits_of(step)
        first, last, block_of = visits_of(step, rows)

        def one_block(visit, state):
            acc, row_max, total = state
            block = block_of(visit)
            at = batch * tiles.key_blocks + block
            allowed = in_map(_allowed(rows, keys_of(batch, block), element_test), step, block)
            s = logits(dot(q_tile, keys[at].astype(real), 2, 2), block).logit
            s = _where(allowed, s, -jnp.inf, tiles)
            # Results do not depend on the shift, so it needs no tangent. That of a maximum asks
            # which scores equal it, and none may: the compiler rounds them anew (a multiply-add)
            # for that.
            new_max = jnp.maximum(row_max, jax.lax.stop_gradient(s).max(axis=-1))
            # A row that has met no key yet keeps -inf: shift by 0 so that -inf - -inf never is.
            shift = jnp.where(new_max == -jnp.inf, 0, new_max)
            p = jnp.exp(s - shift[..., None])
            keep = jnp.exp(row_max - shift)
            total = total * keep + p.sum(axis=-1)
            acc = acc * keep[..., None] + dot(p, values[at].astype(real), 2, 1)
            return acc, new_max, total

        start = (
            jnp.zeros((*shape, value.shape[-1]), real),
            jnp.full(shape, -jnp.inf, real),
            jnp.zeros(shape, real),
        )
        acc, row_max, total = jax.lax.fori_loop(first, last, one_block, start)
        empty = total == 0
        out = acc / jnp.where(empty, 1, total)[..., None]
        lse = jnp.where(empty, -jnp.inf, row_max + jnp.log(jnp.where(empty, 1, total)))
        return out.astype(query.dtype), jnp.stack([lse, row_max], -1)

    steps = jnp.arange(tiles.batch * tiles.row_tiles, dtype=jnp.int32)
    out, sums = jax.lax.map(one_tile, (steps, row_tiles(query, tiles)))
    out = from_row_tiles(out, tiles, query.shape[1])
    lse, row_max = from_row_tiles(sums, tiles, query.shape[1]).transpose(3, 0, 2, 1)
    return out, lse, row_max


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    mask: Mask,
    extras: Extras = _NO_EXTRAS,
    *,
    scale: float,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    element_test: int,
    block_size: tuple[int, int] | None = None,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value, in their dtypes, in one pass over the attended blocks.

    And every row's part of those of scale and slope, (B, H, 2, Sq). Gradients that nobody
    needs are zeros: XLA would not drop a sum that a loop carries.
    """
    tiles = tiles_of(query, key)
    keys, values = key_blocks(key, tiles), key_blocks(value, tiles)
    rows_of = mask_rows(mask, tiles)
    keys_of = mask_keys(mask, tiles)
    logits_of = _logits(extras, scale, soft_cap, tiles)
    visits_of, in_map = _visits(mask, tiles), _in_map(mask, block_size, tiles)
    real = _accumulator(query.dtype)
    dot = _dots(precision)

    # A row that attends nothing and its cotangents are ignored, whatever they hold.
    nothing = lse.transpose(0, 2, 1) == -jnp.inf
    query = jnp.where(nothing[..., None], 0, query)
    dout = jnp.where(nothing[..., None], 0, dout)
    delta = jnp.sum(out.astype(real) * dout.astype(real), axis=-1)
    if dlse is not None:
        delta = delta - dlse.transpose(0, 2, 1).astype(real)
    shift = lse.transpose(0, 2, 1).astype(real)

    def one_tile(sums, operands):
        step, q_tile, do_tile, shift_tile, delta_tile = operands
        batch = step // tiles.row_tiles
        rows = rows_of(step)
        q_tile, do_tile = q_tile.astype(real), do_tile.astype(real)
        logits = logits_of(step)
        first, last, block_of = visits_of(step, rows)

        def one_block(visit, state):
            dq, parts, dk, dv = state
            block = block_of(visit)
            at = batch * tiles.key_blocks + block
            k_block, v_block = keys[at].astype(real), values[at].astype(real)
            allowed = in_map(_allowed(rows, keys_of(batch, block), element_test), step, block)
            s = dot(q_tile, k_block, 2, 2)
            of = logits(s, block)
            # Where no pair is, the row's lse and dp may be inf or nan (garbage in padding, another
            # document's overflow): select, never multiply.
            # The first select also keeps the compiler from one multiply-add of s * scale - lse: lse
            # is of rounded logits, and p is more exact where the same rounding cancels.
            logit = _where(allowed, of.logit, -jnp.inf, tiles)
            p = _where(allowed, jnp.exp(logit - shift_tile), 0, tiles)
            dp = dot(do_tile, v_block, 2, 2)
            dlogit = p * (dp - delta_tile)
            ds = dlogit if of.cap_slope is None else dlogit * of.cap_slope
            if extras.scales is not None:
                by_scale = _where(allowed, ds * s, 0, tiles).sum(axis=-1)
                parts = parts.at[..., 0].add(by_scale)
            if of.far is not None:
                by_slope = _where(allowed, dlogit * of.far, 0, tiles).sum(axis=-1)
                parts = parts.at[..., 1].add(-by_slope)
            ds = _where(allowed, ds * of.scale, 0, tiles)
            dq = None if dq is None else dq + dot(ds, k_block, 2, 1)
            dk = None if dk is None else dk.at[at].add(dot(ds, q_tile, 1, 1))
            dv = None if dv is None else dv.at[at].add(dot(p, do_tile, 1, 1))
            return dq, parts, dk, dv

        parts = jnp.zeros((*q_tile.shape[:2], 2), real)
        state = (jnp.zeros(q_tile.shape, real) if needs_grad[0] else None, parts, *sums)
        dq, parts, *sums = jax.lax.fori_loop(first, last, one_block, state)
        return tuple(sums), (None if dq is None else dq.astype(query.dtype), parts)

    steps = jnp.arange(tiles.batch * tiles.row_tiles, dtype=jnp.int32)
    operands = (
        steps,
        row_tiles(query, tiles),
        row_tiles(dout, tiles),
        row_tiles(shift[..., None], tiles),
        row_tiles(delta[..., None], tiles),
    )
    sums = tuple(
        jnp.zeros(x.shape, real) if wants else None
        for x, wants in zip((keys, values), needs_grad[1:], strict=True)
    )
    (dk, dv), (dq, parts) = jax.lax.scan(one_tile, sums, operands)
    return (
        jnp.zeros_like(query) if dq is None else from_row_tiles(dq, tiles, query.shape[1]),
        jnp.zeros_like(key) if dk is None else from_key_blocks(dk, tiles, key),
        jnp.zeros_like(value) if dv is None else from_key_blocks(dv, tiles, value),
        from_row_tiles(parts, tiles, query.shape[1]).transpose(0, 2, 3, 1),
    )


def _accumulator(dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _dots(precision):
    """Product per key head (axis 0), contracting the two axes named; sums in a's dtype."""

    def dot(a, b, a_axis, b_axis):
        dims = ((a_axis,), (b_axis,)), ((0,), (0,))
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=a.dtype)

    return dot


class _Logits(NamedTuple):
    """Of a block: what the softmax takes, and the factors of its gradient on the way back."""

    logit: jax.Array
    scale: jax.Array | float
    cap_slope: jax.Array | None  # of soft_cap * tanh(s * scale / soft_cap)
    far: jax.Array | None  # (heads, group * rows, keys)


def _places(x, tiles, size):
    if x is None:
        return jnp.arange(tiles * size, dtype=jnp.int32).reshape(1, tiles, size)
    return split(x, tiles, size)


def _logits(extras, scale, soft_cap, tiles):
    """A function from a step to one from a block of scores and its number to _Logits."""
    biased = extras.slopes is not None
    if biased:
        rows = _places(extras.q_places, tiles.row_tiles, tiles.rows)
        keys = _places(extras.kv_places, tiles.key_blocks, tiles.keys)

    def of_batch(x, batch):
        return x[batch if x.shape[0] != 1 else 0]

    def of_step(step):
        batch = step // tiles.row_tiles
        factor = scale if extras.scales is None else of_batch(extras.scales, batch)

        def of_block(s, block):
            logit, cap_slope, far = s * factor, None, None
            if soft_cap:
                t = jnp.tanh(logit / soft_cap)
                logit, cap_slope = soft_cap * t, 1 - t * t
            if biased:
                row = of_batch(rows, batch)[step % tiles.row_tiles]
                far = jnp.abs(row[:, None] - of_batch(keys, batch)[block][None, :]).astype(s.dtype)
                far = jnp.tile(far, (tiles.group, 1))[None]
                slopes = of_batch(extras.slopes, batch).reshape(tiles.kv_heads, tiles.group)
                logit -= jnp.repeat(slopes, tiles.rows, axis=1)[..., None] * far
            return _Logits(logit, factor, cap_slope, far)

        return of_block

    return of_step


def _where(allowed, x, other, tiles):
    """x (heads, group * rows, keys) where allowed (rows, keys), or of every head, else other."""
    by_group = x.reshape(tiles.kv_heads, tiles.group, tiles.rows, tiles.keys)
    return jnp.where(allowed, by_group, jnp.asarray(other, x.dtype)).reshape(x.shape)


def _allowed(rows, keys, element_test):
    """Which keys each row attends, (rows, keys): its range, and inside it the element test."""
    lo, hi, q_ids, upper, *lower = (x[:, None] for x in rows)
    index, kv_ids, kv_pos = (x[None, :] for x in keys)
    allowed = (lo <= index) & (index < hi)
    # The test holds by construction in rows that are not tested, so it needs no flag.
    if element_test >= 1:
        allowed &= q_ids == kv_ids
    if element_test >= 2:
        allowed &= kv_pos <= upper
    if element_test >= 3:
        allowed &= lower[0] <= kv_pos
    return allowed


def _block_range(rows, tiles):
    lo, hi = rows[0], rows[1]
    first = jnp.min(jnp.where(lo < hi, lo, INT_MAX))
    last = jnp.max(jnp.where(lo < hi, hi, 0))
    return first // tiles.keys, -(-last // tiles.keys)


def _visits(mask, tiles):
    """A function from a step and its rows to the numbers of its visits, and one from those to
    blocks.
    """
    if mask.q_entries is None:
        return lambda step, rows: (*_block_range(rows, tiles), lambda visit: visit)

    def of_step(step, rows):
        batch = step // tiles.row_tiles if mask.q_entries.shape[0] != 1 else 0
        met = block_lists.met(mask.q_entries[batch, :, step % tiles.row_tiles])
        number = jnp.arange(met.shape[0], dtype=jnp.int32)
        blocks = jnp.sort(jnp.where(met, number, INT_MAX))
        return jnp.int32(0), met.sum(dtype=jnp.int32), lambda visit: blocks[visit]

    return of_step


def _in_map(mask, block_size, tiles):
    """A function from what a step's rows attend of a block, (rows, keys), to what of it the map
    has, also (key heads or 1, group or 1, rows, keys)."""
    if block_size is None:
        return lambda allowed, step, block: allowed

    def of_block(allowed, step, block):
        batch = step // tiles.row_tiles if mask.map_bits.shape[0] != 1 else 0
        places = [
            (first * size + jnp.arange(size, dtype=jnp.int32)) // of_map
            for first, size, of_map in zip(
                (step % tiles.row_tiles, block), (tiles.rows, tiles.keys), block_size, strict=True
            )
        ]
        bits = block_lists.bit(mask.map_bits[batch], *places)
        heads = (tiles.kv_heads, tiles.group) if bits.shape[0] > 1 else (1, 1)
        return allowed[None, None] & bits.reshape(*heads, *bits.shape[1:])

    return of_block
