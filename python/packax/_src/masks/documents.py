"""documents(...) and ranges(...): expressions given by arrays with one value per row or key."""

from __future__ import annotations

import warnings

import jax
import numpy as np

from packax._src.core.arguments import Array, ArrayLike, as_int32, shown
from packax._src.core.debug import enabled
from packax._src.core.spec import PADDING_SEGMENT_ID
from packax._src.masks.expressions import (
    Documents,
    MaskExpression,
    Positions,
    batch_of,
    check_lengths,
    pytree,
)
from packax._src.segments.ids import is_left_padded_mask


@pytree("lo", "hi")
class Ranges(MaskExpression):
    """See `ranges`."""

    lo: Array
    hi: Array

    def arguments(self) -> list[str]:
        return [shown(self.lo), shown(self.hi)]

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [("lo", self.lo, "q"), ("hi", self.hi, "q")]

    def _as_array(self, at: Positions) -> Array:
        index = np.arange(at.kv.shape[-1])
        return (self.lo[..., None] <= index) & (index < self.hi[..., None])


def documents(
    segment_ids: ArrayLike,
    *,
    kv_segment_ids: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
) -> MaskExpression:
    """Query i attends to the keys with its segment id; -1 is padding and attends to nothing.

    Ids and positions may have any values: ids in any order, negative or hashed, an id that
    reappears later in the sequence (it is the same document), positions that restart or decrease.
    The result is exact in all of these cases; queries whose keys are contiguous (ordinary packing)
    are the fastest.

    Args:
        segment_ids: the document of each query, (B, Sq) or (Sq,) integers that fit int32. Only -1
            (`PADDING_SEGMENT_ID`) is padding.
        kv_segment_ids: the document of each key, (B, Skv) or (Skv,). None: the same as segment_ids.
        positions: the position of each query, shaped like segment_ids. Expressions joined with this
            one, such as `causal()`, compare them instead of indices; all do except documents(...),
            ranges(...) and block_sparse(...). Without an expression that compares them, positions
            have no effect.
        kv_positions: the position of each key, shaped like kv_segment_ids. None: the same as
            positions. It must be passed if both positions and kv_segment_ids are.

    Raises:
        ValueError: wrong rank or dtype, values that do not fit int32, or inconsistent lengths.

    Examples:
        >>> packax.documents([7, 7, -1, 3]).as_array(4, 4).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 0, 0],
               [0, 0, 0, 1]])
    """
    q_ids = as_int32("segment_ids", segment_ids)
    kv_ids = None if kv_segment_ids is None else as_int32("kv_segment_ids", kv_segment_ids)
    q_pos = None if positions is None else as_int32("positions", positions)
    kv_pos = None if kv_positions is None else as_int32("kv_positions", kv_positions)
    if kv_pos is not None and q_pos is None:
        raise ValueError("kv_positions was given without positions: pass both, or neither")
    if kv_ids is not None and q_pos is not None and kv_pos is None:
        raise ValueError(
            "positions was given with kv_segment_ids but without kv_positions: pass "
            "kv_positions, one for every key"
        )
    for name, x in (("segment_ids", q_ids), ("kv_segment_ids", kv_ids)):
        _warn_of_padding(name, x)
    expression = Documents(q_ids, kv_ids, q_pos, kv_pos)
    check_lengths(expression)
    batch_of(expression)
    return expression


# Padding values of other formats: 0 in 0/1 masks and ids that start at 1, -100 in labels.
_LIKE_PADDING = (0, -100)


def _warn_of_padding(name: str, ids: Array | None) -> None:
    """Warns if rows end with an id that other libraries use for padding, or are attention masks
    with padding on the left. For jax arrays only under `debug_checks`: reading their values waits
    for the device."""
    if isinstance(ids, jax.Array) and enabled():
        if isinstance(ids, jax.core.Tracer) or not ids.is_fully_addressable:
            return
        ids = np.asarray(ids)
    if not isinstance(ids, np.ndarray) or 0 in ids.shape or np.any(ids == PADDING_SEGMENT_ID):
        return
    rows = np.atleast_2d(ids)
    if is_left_padded_mask(rows):
        warnings.warn(
            f"{name} is 0, then 1, in every row, which looks like an attention mask with padding "
            f"on the left, but only {PADDING_SEGMENT_ID} is padding, and 0 is a document. Pass "
            f"packax.segments.from_attention_mask({name})",
            stacklevel=3,
        )
        return
    for padding in _LIKE_PADDING:
        tail = rows == padding
        if not np.any(tail[:, -1]):
            continue
        before = np.where(tail, 0, rows)
        # In every row: ids from 0 that do not decrease, then only this value.
        packed = np.all(before[:, 1:] >= before[:, :-1], axis=1, where=~tail[:, 1:])
        packed &= np.all(tail[:, 1:] >= tail[:, :-1], axis=1) & ~tail[:, 0] & (before.min(1) >= 0)
        if np.all(packed):
            warnings.warn(
                f"{name} ends with {padding} after ids from {rows[~tail].min()} on, which looks "
                f"like padding, but only {PADDING_SEGMENT_ID} is padding, and {padding} is a "
                f"document. Pass np.where(ids == {padding}, {PADDING_SEGMENT_ID}, ids), or give "
                f"the document {padding} a higher id than those before it",
                stacklevel=3,
            )


def ranges(lo: ArrayLike, hi: ArrayLike) -> MaskExpression:
    """Query i attends to the keys lo[i] <= j < hi[i]. With an empty range it attends to nothing.

    Args:
        lo, hi: each query's first key and the index after its last: (B, Sq) or (Sq,) integers,
            clipped to [0, Skv].

    Raises:
        ValueError: wrong rank or dtype, or different lengths.

    Examples:
        >>> packax.masks.ranges([0, 1], [1, 3]).as_array(2, 3).astype(int)
        array([[1, 0, 0],
               [0, 1, 1]])
    """
    expression = Ranges(as_int32("lo", lo, saturate=True), as_int32("hi", hi, saturate=True))
    check_lengths(expression)
    batch_of(expression)
    return expression
