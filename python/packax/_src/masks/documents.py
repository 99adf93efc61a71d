"""documents(...) and ranges(...): the expressions that hold arrays of rows and keys."""

from __future__ import annotations

import warnings

import numpy as np

from packax._src.core.integers import Array, ArrayLike, as_int32
from packax._src.core.messages import shown
from packax._src.core.shapes import PADDING_SEGMENT_ID
from packax._src.masks.expressions import (
    Documents,
    MaskExpression,
    Positions,
    batch_of,
    check_lengths,
    pytree,
)


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
    """Query row i attends the keys with its own segment id; -1 is padding and attends nothing.

    Ids and positions may hold anything: ids in any order, negative, hashed, an id that comes
    back later in the row (it is the same document), positions that restart or go down. All of it
    is exact; rows whose keys are one stretch (ordinary packing) cost least.

    Args:
        segment_ids: (B, Sq) or (Sq,), any integer dtype that fits int32. Only -1
            (`PADDING_SEGMENT_ID`) is padding.
        kv_segment_ids: (B, Skv) or (Skv,), the keys' ids; None: the same as segment_ids.
        positions: like segment_ids. What `causal()` and all that is not documents(...) or
            ranges(...) compare in place of indices, beside this documents(...). Alone they have no
            effect.
        kv_positions: like kv_segment_ids; None: the same as positions, which needs
            kv_segment_ids to be None too.

    Raises:
        ValueError: a rank, dtype, value or length that is not as above.

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
        raise ValueError("kv_positions was given without positions: give both, or neither")
    if kv_ids is not None and q_pos is not None and kv_pos is None:
        raise ValueError(
            "positions was given with kv_segment_ids but without kv_positions: give "
            "kv_positions, one for every key"
        )
    for name, x in (("segment_ids", q_ids), ("kv_segment_ids", kv_ids)):
        _warn_of_padding(name, x)
    expression = Documents(q_ids, kv_ids, q_pos, kv_pos)
    check_lengths(expression)
    batch_of(expression)
    return expression


_LIKE_PADDING = (0, -100)  # of 0/1 masks and packers that number from 1; of labels


def _warn_of_padding(name: str, ids: Array | None) -> None:
    """Warns where rows end with an id that elsewhere is padding. Values of jax arrays would cost a
    wait for the device."""
    if not isinstance(ids, np.ndarray) or 0 in ids.shape or np.any(ids == PADDING_SEGMENT_ID):
        return
    rows = np.atleast_2d(ids)
    for padding in _LIKE_PADDING:
        tail = rows == padding
        if not np.any(tail[:, -1]):
            continue
        before = np.where(tail, 0, rows)
        # Documents numbered from 1 upwards, then nothing but padding, in all rows that have any.
        packed = np.all(before[:, 1:] >= before[:, :-1], axis=1, where=~tail[:, 1:])
        packed &= np.all(tail[:, 1:] >= tail[:, :-1], axis=1) & ~tail[:, 0] & (before.min(1) >= 0)
        if np.all(packed):
            warnings.warn(
                f"{name} ends with {padding} behind ids from 1 on, which looks like padding: here "
                f"only {PADDING_SEGMENT_ID} is, and {padding} is a document like any other. Give "
                f"np.where(ids == {padding}, {PADDING_SEGMENT_ID}, ids), or number documents from "
                "0 if it is one",
                stacklevel=3,
            )


def ranges(lo: ArrayLike, hi: ArrayLike) -> MaskExpression:
    """Query row i attends the keys lo[i] <= j < hi[i]: an empty range attends nothing.

    Args:
        lo, hi: (B, Sq) or (Sq,), any integer dtype, in keys. Values are clipped to [0, Skv].

    Raises:
        ValueError: a rank or dtype that is not as above, or lengths that differ.

    Examples:
        >>> packax.masks.ranges([0, 1], [1, 3]).as_array(2, 3).astype(int)
        array([[1, 0, 0],
               [0, 1, 1]])
    """
    expression = Ranges(as_int32("lo", lo, saturate=True), as_int32("hi", hi, saturate=True))
    check_lengths(expression)
    batch_of(expression)
    return expression
