"""Mask expressions that are an interval of places of keys for every row: causal() and its kin.

A place is the position that `documents(..., positions=...)` gives, or else the index, of the row
among the rows and of the key among the keys.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from packax._src.core.shapes import PADDING_SEGMENT_ID
from packax._src.masks.expressions import (
    Array,
    ArrayLike,
    Documents,
    Interval,
    Limits,
    MaskExpression,
    Places,
    as_int32,
    numpy_of,
    offset_value,
    plus,
    pytree,
    shown,
)

NO_SPAN = -1
_INT32 = np.iinfo(np.int32)


class _Offset(Interval):
    """Intervals around the row's own place, which counts as place + offset."""

    offset: Any  # None: 0; a number, () or (B,)

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [] if np.ndim(self.offset) == 0 else [("offset", self.offset, "batch")]

    def check_beside(self, document: Documents | None) -> None:
        if self.offset is not None and document is not None and document.q_pos is not None:
            raise ValueError(
                f"{self.name} has an offset, beside documents(..., positions=...): "
                "give no offset, the positions say it"
            )

    def anchors(self) -> frozenset[Any] | None:
        return frozenset([0 if self.offset is None else offset_value(self.offset)])

    def arguments(self) -> list[str]:
        return [] if self.offset is None else [f"offset={shown(self.offset)}"]

    def shifted(self, places: Array) -> Array:
        if self.offset is None:
            return places
        return plus(places, self.offset[:, None] if np.ndim(self.offset) else self.offset)


@pytree()
class Full(Interval):
    """See `full`."""

    def _as_array(self, at: Places) -> Array:
        return np.ones((at.q.shape[-1], at.kv.shape[-1]), bool)

    def limits(self, at: Places) -> Limits:
        return None, None

    def anchors(self) -> frozenset[Any] | None:
        return None

    def unbounded(self) -> tuple[bool, bool]:
        return True, True


@pytree("offset")
class Causal(_Offset):
    """See `causal`."""

    offset: Any = None

    def _as_array(self, at: Places) -> Array:
        return self.shifted(at.q)[..., :, None] >= at.kv[..., None, :]

    def limits(self, at: Places) -> Limits:
        return None, self.shifted(at.q)

    def unbounded(self) -> tuple[bool, bool]:
        return True, False


@pytree("offset", static=("left", "right"))
class SlidingWindow(_Offset):
    """See `sliding_window`."""

    left: int | None
    right: int | None
    offset: Any = None

    @property
    def name(self) -> str:
        return "sliding_window"

    def arguments(self) -> list[str]:
        right = [] if self.right == 0 else [repr(self.right)]
        return [repr(self.left), *right, *super().arguments()]

    def _as_array(self, at: Places) -> Array:
        low, high = self.limits(at)
        key = at.kv[..., None, :]
        result: Array = np.ones((at.q.shape[-1], at.kv.shape[-1]), bool)
        if low is not None:
            result = result & (low[..., :, None] <= key)
        return result if high is None else result & (key <= high[..., :, None])

    def limits(self, at: Places) -> Limits:
        # In this order a limit saturates once at most: indices are not negative, nor is left.
        low = None if self.left is None else self.shifted(plus(at.q, -self.left))
        return low, None if self.right is None else plus(self.shifted(at.q), self.right)

    def unbounded(self) -> tuple[bool, bool]:
        return self.left is None, self.right is None


@pytree("offset", static=("size",))
class Chunked(_Offset):
    """See `chunked`."""

    size: int
    offset: Any = None

    def arguments(self) -> list[str]:
        return [repr(self.size), *super().arguments()]

    def _as_array(self, at: Places) -> Array:
        row = self.shifted(at.q) // self.size
        return row[..., :, None] == (at.kv // self.size)[..., None, :]

    def limits(self, at: Places) -> Limits:
        row = self.shifted(at.q)
        inside = row % self.size
        return plus(row, -inside), plus(row, self.size - 1 - inside)

    def unbounded(self) -> tuple[bool, bool]:
        return False, False


@pytree("lengths", static=("per_row",))
class Prefix(Interval):
    """See `prefix`."""

    lengths: Any  # a number, (), (B,) or (B, Sq), or (Sq,) where vmap took the batch of that
    per_row: bool  # whether every query row has its own

    def arguments(self) -> list[str]:
        return [shown(self.lengths)]

    def arrays(self) -> list[tuple[str, Array, str]]:
        held = ("lengths", self.lengths, "q" if self.per_row else "batch")
        return [held] if np.ndim(self.lengths) else []

    def warn_beside(self, document: Documents | None) -> None:
        if document is None or document.q_pos is not None:
            return
        counted = (
            "prefix(lengths) counts from the first token of the batch row where documents(...) has "
            "no positions"
        )
        held = self.lengths, document.q_ids
        if any(isinstance(x, jax.core.Tracer) for x in held):
            if self.per_row:
                warnings.warn(
                    f"{counted}: if lengths are those of each row's document, only the first "
                    "document has its prefix. Give documents(..., positions=)",
                    stacklevel=3,
                )
            return
        arrays = [x for x in held if isinstance(x, jax.Array)]
        if arrays and not (self.per_row and all(x.is_fully_addressable for x in arrays)):
            return  # to look at values would wait for the device
        lengths, ids = np.broadcast_arrays(self._per_row(), np.atleast_2d(document.q_ids))
        for row, own in zip(ids, lengths, strict=True):
            _, index, inverse = np.unique(row, return_index=True, return_inverse=True)
            begins = index[inverse]
            if np.any((row != PADDING_SEGMENT_ID) & (own > 0) & (own <= begins) & (begins > 0)):
                warnings.warn(
                    f"{counted}, and a document begins behind its length: it has no prefix. Give "
                    "documents(..., positions=) to count from the start of each document",
                    stacklevel=3,
                )
                return

    def _per_row(self) -> Any:
        if self.per_row or np.ndim(self.lengths) == 0:
            return self.lengths
        return self.lengths[:, None]

    def _as_array(self, at: Places) -> Array:
        key = at.kv[..., None, :]
        return (at.q[..., :, None] >= key) | (key < np.expand_dims(self._per_row(), -1))

    def limits(self, at: Places) -> Limits:
        last = plus(self._per_row(), -1)
        return None, numpy_of(at.q, last).maximum(at.q, last)

    def anchors(self) -> frozenset[Any] | None:
        return frozenset([0])

    def unbounded(self) -> tuple[bool, bool]:
        return True, False


@pytree("ids", "text", static=("batched",))
class Spans(Interval):
    """See `spans`."""

    ids: Array  # (B or 1, S)
    text: Any
    batched: bool

    def arguments(self) -> list[str]:
        ids: Any = self.ids
        if not self.batched and np.ndim(ids) == 2:
            ids = jax.ShapeDtypeStruct(ids.shape[1:], ids.dtype)
        plain = type(self.text) is Causal and self.text.offset is None
        return [shown(ids)] if plain else [shown(ids), repr(self.text)]

    def walk(self) -> Iterator[MaskExpression]:
        yield self
        yield from self.text.walk()

    def arrays(self) -> list[tuple[str, Array, str]]:
        ids = self.ids if self.batched else self.ids[0]
        return [("span_ids", ids, "q"), ("span_ids", ids, "kv"), *self.text.arrays()]

    def check_beside(self, document: Documents | None) -> None:
        if document is not None and not (document.kv_ids is None and document.kv_pos is None):
            raise ValueError(
                "spans(...) is for self-attention, but documents(...) has kv_segment_ids or "
                "kv_positions: give segment_ids and positions alone, the keys' are the same"
            )

    def _changes(self, at: Places) -> Any:
        """(B or 1, S): where a run of span ids begins, or one of segment ids."""
        xp = numpy_of(self.ids, *[x for x in at if isinstance(x, jax.Array)])
        changes = _begins(self.ids, xp)
        return changes if at.ids is None else changes | _begins(at.ids, xp)

    def _as_array(self, at: Places) -> Array:
        changes = self._changes(at)
        xp = numpy_of(changes)
        run = xp.cumsum(changes, axis=-1)
        inside = xp.broadcast_to(self.ids != NO_SPAN, run.shape)
        same = (run[..., :, None] == run[..., None, :]) & inside[..., None]
        key = at.kv[..., None, :]
        first = xp.where(same, key, _INT32.max).min(axis=-1, keepdims=True)
        last = xp.where(same, key, _INT32.min).max(axis=-1, keepdims=True)
        result = self.text._as_array(at) | ((first <= key) & (key <= last))
        flat = not self.batched and (at.ids is None or at.ids.ndim == 1) and at.q.ndim == 1
        return result[0] if flat and result.shape[0] == 1 else result

    def limits(self, at: Places) -> Limits:
        low, high = self.text.limits(at)
        changes = self._changes(at)
        inside = self.ids != NO_SPAN
        first, last = extremes(changes, at.q, at.by_position)
        xp = numpy_of(first, inside, low, high)
        if low is not None:
            low = xp.where(inside, xp.minimum(low, first), low)
        if high is not None:
            high = xp.where(inside, xp.maximum(high, last), high)
        return low, high

    def anchors(self) -> frozenset[Any] | None:
        return self.text.anchors()

    def unbounded(self) -> tuple[bool, bool]:
        return self.text.unbounded()


def _begins(ids: Any, xp: Any) -> Any:
    ids = xp.atleast_2d(ids)
    return xp.concatenate([xp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def extremes(begins: Any, places: Any, by_position: bool) -> tuple[Any, Any]:
    """The smallest and the largest place in the run of each row, (B or 1, S)."""
    xp = numpy_of(begins, places)
    if not by_position:  # places are indices: where the run begins, and where the next one does
        length = begins.shape[1]
        index = xp.arange(length, dtype=np.int32)
        first, following = xp.where(begins, index, 0), xp.where(begins, index, np.int32(length))
        if xp is np:
            first = np.maximum.accumulate(first, axis=1)
            following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
        else:
            first = jax.lax.cummax(first, axis=1)
            following = jax.lax.cummin(following, axis=1, reverse=True)
        ends = xp.concatenate([following[:, 1:], xp.full_like(following[:, :1], length)], axis=1)
        return first, ends - 1
    batch = max(begins.shape[0], places.shape[0])
    begins, places = (xp.broadcast_to(x, (batch, x.shape[1])) for x in (begins, places))
    run = xp.cumsum(begins, axis=1, dtype=np.int32) - 1
    first, last = (xp.full_like(places, x) for x in (_INT32.max, _INT32.min))
    if xp is np:
        rows = np.arange(batch)[:, None]
        np.minimum.at(first, (rows, run), places)
        np.maximum.at(last, (rows, run), places)
        return first[rows, run], last[rows, run]

    def one(run: Any, places: Any, first: Any, last: Any) -> tuple[Any, Any]:
        return first.at[run].min(places)[run], last.at[run].max(places)[run]

    return jax.vmap(one)(run, places, first, last)


def full() -> MaskExpression:
    """Every query row attends every key.

    >>> packax.full().as_array(2, 3)
    array([[ True,  True,  True],
           [ True,  True,  True]])
    """
    return Full()


def causal(offset: ArrayLike = 0) -> MaskExpression:
    """Query row i attends the keys j <= i + offset, counted from the first row and the first key.

    Beside `documents(..., positions=...)` positions are compared in place of indices: row i
    attends key j if the row's position is at least the key's.

    Args:
        offset: an integer, or (B,) integers, int32: how many keys come before the first row, as
            where the keys of earlier rows are in a cache. Positions say that themselves: beside
            them it must be 0.

    Raises:
        ValueError: an offset of another rank, dtype or size, or beside positions.

    >>> packax.causal().as_array(2, 3)
    array([[ True, False, False],
           [ True,  True, False]])
    """
    return Causal(_offset(offset))


def sliding_window(
    left: int | None, right: int | None = 0, *, offset: ArrayLike = 0
) -> MaskExpression:
    """Query row i attends the keys from i - left to i + right, both included.

    A window of w keys that ends with the row's own, as Mistral and Gemma count, is
    `sliding_window(w - 1)`. Places are positions beside `documents(..., positions=...)`.

    Args:
        left, right: integers from 0; None: no limit on that side.
        offset: as in `causal`.

    Raises:
        ValueError: a size that is not from 0 to 2**31 - 1; an offset as in `causal`.

    >>> packax.sliding_window(1).as_array(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    return SlidingWindow(_size("left", left, 0), _size("right", right, 0), _offset(offset))


def chunked(size: int, *, offset: ArrayLike = 0) -> MaskExpression:
    """Query row i attends the keys j of its own chunk: floor(j / size) == floor(i / size).

    Llama 4's local layers are `causal() & chunked(8192)`. Places are positions beside
    `documents(..., positions=...)`, so that a document's first chunk begins with its position 0.

    Args:
        size: places of a chunk, from 1.
        offset: as in `causal`.

    Raises:
        ValueError: a size that is not from 1 to 2**31 - 1; an offset as in `causal`.

    >>> packax.chunked(2).as_array(3, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 1]])
    """
    chunk = _size("size", size, 1)
    if chunk is None:
        raise ValueError("size must be an integer from 1 to 2147483647, but is None")
    return Chunked(chunk, _offset(offset))


def prefix(lengths: ArrayLike) -> MaskExpression:
    """Query row i attends the keys j <= i, and all keys j < length: a prefix-LM.

    Places are positions beside `documents(..., positions=...)`: every document may then have a
    prefix of its own, by one length for each row.

    Args:
        lengths: an integer, (B,), or (B, Sq) with the length that each row goes by; int32.

    Raises:
        ValueError: another rank or dtype, values that do not fit int32, or lengths that differ.

    >>> packax.prefix(2).as_array(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    shapes = "(), (batch,) or (batch, length)"
    lengths = as_int32("lengths", lengths, ranks=(0, 1, 2), shapes=shapes)
    return Prefix(lengths, lengths.ndim == 2)


def spans(span_ids: ArrayLike, text: MaskExpression | None = None) -> MaskExpression:
    """Rows of a span attend the whole span and what `text` gives them; other rows follow `text`.

    A span is a maximal run of equal ids other than -1, as of the tokens of an image among text
    (Gemma 3); beside documents(...) it ends where the segment id changes. In places: a row of a span
    attends down to the smallest and up to the largest place of its span, whatever `text` says.

    Args:
        span_ids: (B, S) or (S,), any integer dtype that fits int32, in self-attention: a row and
            a key of one index are the same token. -1 is text.
        text: what rows attend without spans: `causal()` if None, or any expression that surely
            holds the row's own place, such as `sliding_window(1023)`, `causal() & chunked(8192)`.

    Raises:
        ValueError: a rank, dtype, value or length that is not as above; a `text` with an offset,
            or documents(...) with kv_segment_ids or kv_positions beside.
        NotImplementedError: a `text` with documents(...), ranges(...) or block_sparse(...):
            intersect the spans with them.

    >>> packax.spans([-1, 5, 5, -1]).as_array(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    ids = as_int32("span_ids", span_ids)
    text = Causal() if text is None else text
    if not isinstance(text, MaskExpression):
        raise ValueError(f"text must be a mask expression, but is a {type(text).__name__}")
    for part in text.walk():
        if not isinstance(part, Interval):
            raise NotImplementedError(
                f"the text of spans(...) cannot hold {part.name}(...): intersect the spans with it, "
                f"as in spans(span_ids) & {part.name}(...)"
            )
        if getattr(part, "offset", None) is not None:
            raise ValueError(
                "spans(...) is for self-attention, whose rows are the keys: the text of spans must "
                f"not have an offset, but {part.name} has one"
            )
    return Spans(numpy_of(ids).atleast_2d(ids), text, ids.ndim == 2)


def _offset(offset: ArrayLike) -> Any:
    """None for 0; else an int32 array of rank 0 or 1."""
    array = as_int32("offset", offset, ranks=(0, 1), shapes="() or (batch,)")
    zero = isinstance(array, np.ndarray) and array.ndim == 0 and array == 0
    return None if zero else array


def _size(name: str, size: Any, least: int) -> int | None:
    if size is None:
        return None
    if isinstance(size, jax.core.Tracer):
        raise ValueError(
            f"{name} must be an integer that is known when tracing, but is traced: make it static "
            "(static_argnums of jit, or a closure), or say a window that the data decides by "
            "ranges(lo, hi)"
        )
    try:
        number = operator.index(size)
    except TypeError:
        number = None
    if number is None or isinstance(size, bool):
        raise ValueError(f"{name} must be an integer, but is {size!r}") from None
    if not least <= number <= _INT32.max:
        raise ValueError(f"{name} must be an integer from {least} to {_INT32.max}, but is {number}")
    return number
