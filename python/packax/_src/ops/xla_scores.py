"""What changes scores and probabilities in attention in jax.numpy: by steps and blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from packax._src.core.shapes import fill_up
from packax._src.ops.xla_bias import BiasTiles
from packax._src.ops.xla_dropout import kept
from packax._src.ops.xla_tiles import at, batch_row, rem


class Logits(NamedTuple):
    """Of a block: what the softmax takes, and the factors of its gradient on the way back."""

    logit: jax.Array
    scale: jax.Array | float
    cap_slope: jax.Array | None  # of soft_cap * tanh(s * scale / soft_cap)
    far: jax.Array | None  # (heads, group * rows, keys)


def logits_of_blocks(spec, extras, tiles):
    """A function from scores, their step and their block to Logits."""
    soft_cap = spec.soft_cap
    biased = extras.slopes is not None
    bias = None if extras.bias is None else BiasTiles(extras.bias, tiles)
    if biased:
        q_bias_pos, kv_bias_pos = (
            lax.broadcasted_iota(jnp.int32, (1, count, size), 1) * size
            + lax.broadcasted_iota(jnp.int32, (1, count, size), 2)
            if x is None
            else fill_up(x, 1, count * size).reshape(x.shape[0], count, size)
            for x, count, size in (
                (extras.q_bias_pos, tiles.row_tiles, tiles.rows),
                (extras.kv_bias_pos, tiles.key_blocks, tiles.keys),
            )
        )

    def of_block(s, step, block):
        factor = spec.scale
        if extras.scales is not None:
            factor = batch_row(extras.scales, step, tiles.row_tiles)
        factor = lax.convert_element_type(factor, s.dtype)
        logit, cap_slope, far = lax.mul(s, factor), None, None
        if soft_cap:
            t = jnp.tanh(logit / soft_cap)
            logit, cap_slope = soft_cap * t, 1 - t * t
        if biased:
            row = at(batch_row(q_bias_pos, step, tiles.row_tiles), rem(step, tiles.row_tiles))
            column = batch_row(kv_bias_pos, step, tiles.row_tiles)
            column = at(column, rem(block, tiles.key_blocks))
            far = jnp.abs(row[:, None] - column[None, :]).astype(s.dtype)
            far = jnp.tile(far, (tiles.group, 1))[None]
            slopes = batch_row(extras.slopes, step, tiles.row_tiles)
            slopes = slopes.reshape(tiles.kv_heads, tiles.group)
            logit -= jnp.repeat(slopes, tiles.rows, axis=1)[..., None] * far
        if bias is not None:
            logit += bias.at(step, block, s.dtype)
        return Logits(logit, factor, cap_slope, far)

    return of_block


def kept_of_blocks(spec, extras, tiles):
    """A function from a step and a block to which probabilities dropout keeps; None: all."""
    if not spec.dropout_threshold:
        return None
    streams, rows = extras.dropout_streams, extras.dropout_rows
    return lambda step, block: kept(streams, rows, step, block, spec.dropout_threshold, tiles)
