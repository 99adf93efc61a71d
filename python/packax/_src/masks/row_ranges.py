"""From the arrays of an expression to those of a mask: row ranges, then bounds of blocks.

Nothing here depends on which rows these are or on their order: rank_rows.py decides that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.sharding import vary_together
from packax._src.core.spec import BLOCK, INT_MAX, MaskMode, ceil_div, fill_up
from packax._src.masks.expressions import And, Limits, Positions
from packax._src.ops.block_lists import Subtrees, entries, packed
from packax._src.ops.partitioning import require_device_info
from packax._src.ops.primitives import BLOCK_ARRAYS, blocks_p, documents_p
from packax._src.ops.xla_mask import query_blocks

_INT32 = np.iinfo(np.int32)


class Document(NamedTuple):
    """The ids and positions of documents(...), each (1 or batch, length), or None."""

    q_ids: jax.Array | None
    kv_ids: jax.Array | None  # None: same as the query's
    q_pos: jax.Array | None
    kv_pos: jax.Array | None  # None: same as the query's

    def keys(self) -> tuple[jax.Array | None, jax.Array | None]:
        return (
            self.q_ids if self.kv_ids is None else self.kv_ids,
            self.q_pos if self.kv_pos is None else self.kv_pos,
        )


class Rows(NamedTuple):
    """The inputs of row ranges: one value per row, (batch, rows) each."""

    ids: jax.Array | None
    low: jax.Array | None  # low, high: the lowest and the highest position the row attends to
    high: jax.Array | None
    ranges: tuple[tuple[jax.Array, jax.Array], ...]


def limits_of(document: Document, interval: And, q_len: int) -> Limits:
    """The interval of each row of the sequence: (low, high), each (1 or batch, q_len) or None."""
    if not interval.members:
        return None, None
    by_position, ids = document.q_pos is not None, document.q_ids
    positions: Any = document.q_pos
    if not by_position:
        positions = jnp.arange(q_len, dtype=jnp.int32)[None]
        positions, ids, interval = vary_together(positions, ids, interval)
    # Only spans(...) read the positions of keys, and their keys are the rows.
    of_rows = () if ids is None else (ids,)
    return interval.limits(Positions(positions, positions, of_rows, by_position))


def mask_mode_of(document: Document, low: Any, high: Any) -> MaskMode:
    if document.q_ids is None:
        return MaskMode.NO_CHECK
    if document.q_pos is None or (low is None and high is None):
        return MaskMode.IDS
    return MaskMode.UPPER_LIMIT if low is None else MaskMode.BOTH_LIMITS


def row_ranges_and_bounds(
    row_values: Rows, kv_ids, kv_pos, block_mask=None, *,
    mode, batch, q_len, kv_len, implementation, block_size=None, tree=None, parts=None,
) -> dict[str, Any]:  # fmt: skip
    """The computed arrays of a mask, for these rows and all keys in their order.

    tree: None without a tree, otherwise whether there are documents, too. With a tree,
    `row_values.high` is -1 - row index, and kv_pos is minus the end of the key's subtree (tree.py).
    parts: None, or a function from row ranges and the rows that need a segment check to the arrays
    of parts.
    """
    # Without the block mask, which may vary over the axes of heads.
    row_values, kv_ids, kv_pos = vary_together(row_values, kv_ids, kv_pos)
    q_pos = row_values.ids
    if mode == MaskMode.UPPER_LIMIT:
        q_pos = row_values.high
    elif mode == MaskMode.BOTH_LIMITS:
        assert row_values.low is not None
        high = (
            jnp.full_like(row_values.low, _INT32.max)
            if row_values.high is None
            else row_values.high
        )
        q_pos = jnp.stack([high, row_values.low], axis=1)
    if mode >= MaskMode.IDS and tree is not False:
        lo, hi, segment_checked = documents_p.bind(
            require_device_info(row_values.ids, untyped=False),
            kv_ids,
            q_pos if tree is None else row_values.ids,
            kv_pos if mode >= MaskMode.UPPER_LIMIT and tree is None else kv_ids,
            compare_positions=max(mode - 1, 0) if tree is None else 0,
            implementation=implementation,
        )
    else:
        lo = jnp.zeros((batch, q_len), jnp.int32)
        hi = jnp.full((batch, q_len), kv_len, jnp.int32)
        segment_checked = lo

    if mode < MaskMode.UPPER_LIMIT:  # positions are indices
        if row_values.high is not None:
            hi = jnp.minimum(hi, jnp.minimum(row_values.high, kv_len - 1) + 1)
        if row_values.low is not None:
            lo = jnp.maximum(lo, row_values.low)
    for first, last in row_values.ranges:
        lo = jnp.maximum(lo, jnp.clip(first, 0, kv_len))
        hi = jnp.minimum(hi, jnp.clip(last, 0, kv_len))
    empty = lo >= hi
    lo, hi, segment_checked = (jnp.where(empty, 0, x) for x in (lo, hi, segment_checked))

    computed: dict[str, Any] = {"kv_start": lo, "kv_end": hi}
    if mode >= MaskMode.UPPER_LIMIT:
        computed["q_pos"] = q_pos
    if parts is not None:
        computed |= parts(lo, hi, segment_checked)
    if tree is not None:  # before rows are marked as checked: a marked block has no full part
        lo, hi, segment_checked = vary_together(lo, hi, segment_checked)
        q_blocks = query_blocks(lo, hi, segment_checked)
        assert q_pos is not None
        subtrees = _subtrees(q_pos, lo < hi, kv_pos)
        q_lists, kv_lists, tested = entries(
            block_mask, block_size, q_blocks, q_len, kv_len, subtrees
        )
        computed |= {"q_block_lists": q_lists, "kv_block_lists": kv_lists}
        tested = jnp.repeat(tested, BLOCK, axis=1)[:, :q_len]
        segment_checked = ((tested | (segment_checked != 0)) & (lo < hi)).astype(jnp.int32)
    computed |= bounds_of(lo, hi, segment_checked, kv_len, implementation)
    if block_size is None:
        return computed
    if tree is None:
        bounds = vary_together(block_mask, computed["q_blocks"])
        q_lists, kv_lists, _ = entries(bounds[0], block_size, bounds[1], q_len, kv_len)
        computed |= {"q_block_lists": q_lists, "kv_block_lists": kv_lists}
    # The block mask is not broadcast: all batch rows may share it.
    words = jnp.ones((1, 1, 1, 1), jnp.int32) if block_mask is None else packed(block_mask)
    return computed | {"block_mask": words}


def bounds_of(
    lo: Any, hi: Any, segment_checked: Any, kv_len: Any, implementation: Any
) -> dict[str, jax.Array]:
    """The arrays BLOCK_ARRAYS of these row ranges, by name."""
    blocks = blocks_p.bind(
        *vary_together(require_device_info(lo, untyped=False), hi, segment_checked),
        kv_len=kv_len,
        implementation=implementation,
    )
    return dict(zip(BLOCK_ARRAYS, blocks, strict=True))


def _subtrees(q_pos: jax.Array, not_empty: jax.Array, kv_pos: jax.Array) -> Subtrees:
    """The bounds of subtrees in each block of rows, ignoring empty rows, and of keys."""

    def bounds(x: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        count = ceil_div(x.shape[1], BLOCK)
        least, most = x, x
        if valid is not None:
            least, most = jnp.where(valid, x, INT_MAX), jnp.where(valid, x, 0)
        least, most = (
            fill_up(y, 1, count * BLOCK, value).reshape(x.shape[0], count, BLOCK)
            for y, value in ((least, INT_MAX), (most, 0))
        )
        return least.min(axis=2), most.max(axis=2)

    return Subtrees(*bounds(-q_pos, not_empty), *bounds(-kv_pos, None))
