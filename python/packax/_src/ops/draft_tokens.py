"""Attention of new tokens to each other by a small mask, such as the tree of speculative decoding.

Kernels compute the keys before the drafts. XLA adds the few scores of each head among the drafts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.core.sharding import Axes, over_auto_axes, typed_axes
from packax._src.core.spec import INT_MAX, AttentionSpec, Operands
from packax._src.ops import xla_decode
from packax._src.ops.packed_rows import take_rows
from packax._src.ops.score_mods import add_sinks

MAX_DRAFTS = 64  # of a sequence in a packed step


class Drafts(NamedTuple):
    """The last new tokens of each sequence, at most D."""

    position: jax.Array  # (N, D) int32: on their path; -1 for none
    place: jax.Array  # (N, D): of their keys in the sequence
    attends: jax.Array  # (N, D, D): to which of each other
    row: jax.Array | None = None  # (N, D): in packed rows, their number for none

    @staticmethod
    def of(
        mask: jax.Array,
        first: jax.Array,
        starts: jax.Array | None,
        left: int | None,
        batch: Axes = (),
        count: jax.Array | None = None,
    ) -> Drafts:
        """mask: (1 or N, D, D). first: (N,), the place of the first draft; those before 0 are
        padding. starts: (N, 1 or D), the first key of each. left: of a window. count: (N,), of the
        drafts; None: D. batch: the mesh axes of N."""
        paths = functools.partial(_paths, left)
        dims = (batch, ()), (batch, ()), (batch, (), ())
        return Drafts(*over_auto_axes(paths, (mask, first, starts, count), *dims))


def _paths(
    left: int | None, mask: jax.Array, first: jax.Array, starts: Any, count: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    nth = jnp.arange(mask.shape[-1], dtype=jnp.int32)[None]
    place = first[:, None] + nth
    valid = place >= 0
    if count is not None:
        valid &= nth < count[:, None]
    attends = mask & valid[:, None] & valid[:, :, None]
    position = jnp.maximum(first, 0)[:, None] - 1 + attends.sum(-1, dtype=jnp.int32)
    position = jnp.where(valid, position, -1)
    if left is not None:
        attends &= position[:, None] >= position[:, :, None] - min(left, INT_MAX // 2)
    if starts is not None:
        attends &= place[:, None] >= starts[:, :, None]
    return position, place, attends


def with_drafts(
    spec: AttentionSpec, x: Operands, drafts: Drafts, cached: Any
) -> tuple[jax.Array, jax.Array]:
    """The results of x with the drafts. `cached`: the results without them, and without sinks."""
    batch, _, heads, _ = typed_axes(x.query)

    def complete(out: Any, lse: Any, place: Any, attends: Any, row: Any, *leaves: Any) -> Any:
        of = Operands.of(x.names, leaves)
        if row is None:
            out, lse = xla_decode.extend(spec, of, (out, lse), place, attends)
        else:
            of_drafts = of._replace(query=take_rows(of.query, row))
            lse = lse.swapaxes(1, 2)
            results = take_rows(out, row), take_rows(lse, row).swapaxes(1, 2)
            results = xla_decode.extend(spec, of_drafts, results, place, attends)
            out = out.astype(lse.dtype).at[0, row].set(results[0], mode="drop")
            lse = lse.at[0, row].set(results[1].swapaxes(1, 2), mode="drop").swapaxes(1, 2)
        if of.sinks is not None:
            out, lse = add_sinks(out, lse, of.sinks)
        return out.astype(of.query.dtype), lse

    arrays = (*cached, *drafts[1:], *x.leaves)
    return over_auto_axes(complete, arrays, (batch, (), heads), (batch, heads))
