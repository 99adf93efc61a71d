"""causal(), sliding_window(), chunked(), prefix() and full(): one interval of keys for each row.

They compare the positions of `documents(..., positions=...)` if given, otherwise the indices of
rows and keys.
"""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any, overload

import jax
import numpy as np

from packax._src.core.arguments import INT32, Array, ArrayLike, as_int32, numpy_of, plus, shown
from packax._src.core.spec import PADDING_SEGMENT_ID
from packax._src.masks.expressions import (
    And,
    Documents,
    Interval,
    Limits,
    MaskExpression,
    Positions,
    Reach,
    documents_of,
    offset_value,
    pytree,
)

_UNSET: Any = object()


class _Offset(Interval):
    """Intervals relative to the position of the row plus an offset."""

    offset: Any  # None: 0; otherwise () or (B,)

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [] if np.ndim(self.offset) == 0 else [("offset", self.offset, "batch")]

    def check_others(self, both: And) -> None:
        document = documents_of(both)
        if self.offset is not None and document is not None and document.q_pos is not None:
            raise ValueError(
                f"{self.name} has an offset and is joined with documents(..., positions=...): "
                "leave the offset out, because the positions include it"
            )

    def anchors(self) -> frozenset[Any] | None:
        return frozenset([0 if self.offset is None else offset_value(self.offset)])

    def arguments(self) -> list[str]:
        return [] if self.offset is None else [f"offset={shown(self.offset)}"]

    def offsets(self) -> tuple[int, int] | None:
        """The smallest and the largest offset; None: unknown when tracing."""
        if isinstance(self.offset, jax.Array):
            return None
        offset = np.asarray(0 if self.offset is None else self.offset)
        return int(offset.min()), int(offset.max())

    def shifted(self, positions: Array) -> Array:
        if self.offset is None:
            return positions
        return plus(positions, self.offset[:, None] if np.ndim(self.offset) else self.offset)


def warn_of_offsets(expression: MaskExpression, q_len: Any, kv_len: Any) -> None:
    """Warns about offsets that are certainly or probably wrong for rows after a cache.

    Each interval has a separate offset: in causal(n) & sliding_window(w), the window's offset is 0.
    Without an offset, if there are fewer rows than keys, the rows are the first tokens of the
    sequence, not the last.
    """
    members = [part for part in expression.walk() if isinstance(part, _Offset)]
    for part in expression.walk():
        own = [x for x in part.parts() if isinstance(x, _Offset)]
        if not _may_be_equal([x.offset for x in own]):
            names = " and ".join(sorted({x.name for x in own}))
            warnings.warn(
                f"{names} have different offsets in one `&`, so each sees the queries at different "
                "positions. For queries after a cache, pass the same offset to all of them, as in "
                "causal(offset=n) & sliding_window(w, offset=n)",
                stacklevel=3,
            )
    sizes = q_len, kv_len
    if not all(isinstance(n, int) for n in sizes) or not 0 < q_len < kv_len:
        return
    # With positions, no offset is needed; keys with separate ids are another sequence.
    placed = any(part.places(*sizes) is not None for part in expression.parts())
    sides = {side for x in expression.parts() for _, _, side in x.arrays()}
    causal = any(isinstance(x, Causal) for x in members)
    if causal and not placed and "kv" not in sides and all(x.offset is None for x in members):
        warnings.warn(
            "causal() aligns query 0 with key 0, and there are fewer queries than keys: query 0 "
            "attends only to key 0. If the queries are new tokens after a cache, use "
            "causal(offset=kv_len - q_len), or decode_attention",
            stacklevel=3,
        )


def _may_be_equal(offsets: list[Any]) -> bool:
    """False if the offsets certainly differ. A jax array counts as different from no offset."""
    known = [x for x in offsets if not isinstance(x, jax.Array)]
    numbers = [np.asarray(0 if x is None else x) for x in known]
    if any(np.any(x != numbers[0]) for x in numbers[1:]):
        return False
    return len(known) == len(offsets) or not any(x is None for x in known)


@pytree()
class Full(Interval):
    """See `full`."""

    def _as_array(self, at: Positions) -> Array:
        return np.ones((at.q.shape[-1], at.kv.shape[-1]), bool)

    def limits(self, at: Positions) -> Limits:
        return None, None

    def anchors(self) -> frozenset[Any] | None:
        return None

    def unbounded(self) -> tuple[bool, bool]:
        return True, True


@pytree("offset")
class Causal(_Offset):
    """See `causal`."""

    offset: Any = None

    def _as_array(self, at: Positions) -> Array:
        return self.shifted(at.q)[..., :, None] >= at.kv[..., None, :]

    def limits(self, at: Positions) -> Limits:
        return None, self.shifted(at.q)

    def unbounded(self) -> tuple[bool, bool]:
        return True, False

    def reach(self, chunk: int) -> Reach:
        offsets = self.offsets()
        return None, None if offsets is None else max(0, offsets[1])


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

    def _as_array(self, at: Positions) -> Array:
        low, high = self.limits(at)
        key = at.kv[..., None, :]
        result: Array = np.ones((at.q.shape[-1], at.kv.shape[-1]), bool)
        if low is not None:
            result = result & (low[..., :, None] <= key)
        return result if high is None else result & (key <= high[..., :, None])

    def limits(self, at: Positions) -> Limits:
        # Indices and left are not negative, so in this order a limit saturates at most once.
        low = None if self.left is None else self.shifted(plus(at.q, -self.left))
        return low, None if self.right is None else plus(self.shifted(at.q), self.right)

    def unbounded(self) -> tuple[bool, bool]:
        return self.left is None, self.right is None

    def reach(self, chunk: int) -> Reach:
        offsets = self.offsets()
        if offsets is None:
            return None, None
        before = None if self.left is None else max(0, self.left - offsets[0])
        return before, None if self.right is None else max(0, self.right + offsets[1])

    def row_keys(self) -> int | None:
        if self.left is None or self.right is None:
            return None
        return self.left + self.right + 1


@pytree("offset", static=("size",))
class Chunked(_Offset):
    """See `chunked`."""

    size: int
    offset: Any = None

    def arguments(self) -> list[str]:
        return [repr(self.size), *super().arguments()]

    def _as_array(self, at: Positions) -> Array:
        row = self.shifted(at.q) // self.size
        return row[..., :, None] == (at.kv // self.size)[..., None, :]

    def limits(self, at: Positions) -> Limits:
        row = self.shifted(at.q)
        inside = row % self.size
        return plus(row, -inside), plus(row, self.size - 1 - inside)

    def reach(self, chunk: int) -> Reach:
        offsets = self.offsets()
        if offsets is None:
            return None, None
        # The first row of each rank chunk is at a multiple of `common` inside its mask chunk.
        common = math.gcd(self.size, chunk, *offsets)
        inside = self.size - (common if offsets[0] == offsets[1] else 1)
        return max(0, inside - offsets[0]), max(0, inside + offsets[1])

    def row_keys(self) -> int | None:
        return self.size


@pytree("lengths", static=("per_row",))
class Prefix(Interval):
    """See `prefix`."""

    lengths: Any  # (), (B,) or (B, Sq), or (Sq,) if vmap removed the batch axis of (B, Sq)
    per_row: bool  # whether each query row has a length

    def arguments(self) -> list[str]:
        return [shown(self.lengths)]

    def arrays(self) -> list[tuple[str, Array, str]]:
        held = ("lengths", self.lengths, "q" if self.per_row else "batch")
        return [held] if np.ndim(self.lengths) else []

    def warn_with(self, document: Documents | None) -> None:
        if document is None or document.q_pos is not None:
            return
        counted = (
            "prefix(lengths) counts from the first token of the row, because documents(...) "
            "has no positions"
        )
        held = self.lengths, document.q_ids
        if any(isinstance(x, jax.core.Tracer) for x in held):
            if self.per_row:
                warnings.warn(
                    f"{counted}: if lengths are those of each row's document, only the first "
                    "document gets its prefix. Pass documents(..., positions=)",
                    stacklevel=3,
                )
            return
        arrays = [x for x in held if isinstance(x, jax.Array)]
        if arrays and not (self.per_row and all(x.is_fully_addressable for x in arrays)):
            return  # reading values would wait for the device
        lengths, ids = np.broadcast_arrays(self._per_row(), np.atleast_2d(document.q_ids))
        for row, own in zip(ids, lengths, strict=True):
            _, index, inverse = np.unique(row, return_index=True, return_inverse=True)
            begins = index[inverse]
            if np.any((row != PADDING_SEGMENT_ID) & (own > 0) & (own <= begins) & (begins > 0)):
                warnings.warn(
                    f"{counted}, and a document begins after the length of its prefix, so it has "
                    "no prefix. Pass documents(..., positions=) to count from the start of each "
                    "document",
                    stacklevel=3,
                )
                return

    def _per_row(self) -> Any:
        if self.per_row or np.ndim(self.lengths) == 0:
            return self.lengths
        return self.lengths[:, None]

    def _as_array(self, at: Positions) -> Array:
        key = at.kv[..., None, :]
        return (at.q[..., :, None] >= key) | (key < self._per_row()[..., None])

    def limits(self, at: Positions) -> Limits:
        last = plus(self._per_row(), -1)
        return None, numpy_of(at.q, last).maximum(at.q, last)

    def anchors(self) -> frozenset[Any] | None:
        return frozenset([0])

    def unbounded(self) -> tuple[bool, bool]:
        return True, False


def full() -> MaskExpression:
    """Every query attends to every key.

    Examples:
        >>> packax.full().as_array(2, 3)
        array([[ True,  True,  True],
               [ True,  True,  True]])
    """
    return Full()


def causal(offset: ArrayLike = 0) -> MaskExpression:
    """Query i attends to the keys j <= i + offset; queries and keys are both counted from 0.

    With `documents(..., positions=...)`, positions are compared instead of indices: a query attends
    to a key if the query's position is at least the key's.

    Args:
        offset: the number of keys before the first query, as with a cache of earlier tokens: an
            integer, or (B,) integers, int32. With positions it must be 0.

    Raises:
        ValueError: an offset of the wrong rank, dtype or size, or combined with positions.

    Examples:
        >>> packax.causal().as_array(2, 3)
        array([[ True, False, False],
               [ True,  True, False]])
    """
    return Causal(_offset(offset))


@overload
def sliding_window(
    left: int | None, right: int | None = ..., *, offset: ArrayLike = ...
) -> MaskExpression: ...
@overload
def sliding_window(*, window: int, offset: ArrayLike = ...) -> MaskExpression: ...
def sliding_window(
    left: Any = _UNSET, right: int | None = 0, *, window: int | None = None, offset: ArrayLike = 0
) -> MaskExpression:
    """Query i attends to the keys from i - left to i + right, both included.

    Models count differently: a window of w keys, as in the configurations of Mistral, Gemma and
    gpt-oss, includes the token itself. It is `sliding_window(window=w)`, which is the same as
    `sliding_window(w - 1)`. With `documents(..., positions=...)`, positions are compared.

    Args:
        left, right: the numbers of keys before and after the token, at least 0. None: no limit on
            that side.
        window: the number of keys including the token itself, at least 1: the token and the
            window - 1 keys before it. Pass it instead of left and right.
        offset: as in `causal`.

    Raises:
        ValueError: a size out of range; both left and window, or neither; a wrong offset.

    Examples:
        >>> packax.sliding_window(window=2).as_array(3, 3).astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]])
    """
    if (left is _UNSET) == (window is None) or (window is not None and right != 0):
        raise ValueError(
            "pass either left (and right), without the token itself, or window=, the number of "
            "keys with the token itself: sliding_window(4095) equals sliding_window(window=4096)"
        )
    if window is not None:
        left = _size("window", window, 1) - 1
    before = None if left is None else _size("left", left, 0)
    after = None if right is None else _size("right", right, 0)
    return SlidingWindow(before, after, _offset(offset))


def chunked(size: int, *, offset: ArrayLike = 0) -> MaskExpression:
    """Query i attends to the keys j of its chunk: floor(j / size) == floor(i / size).

    Llama 4's local layers are `causal() & chunked(8192)`. With `documents(..., positions=...)` it
    compares positions, so that a document's first chunk begins at its position 0.

    Args:
        size: the number of tokens in a chunk, at least 1.
        offset: as in `causal`.

    Raises:
        ValueError: a size below 1 or above 2**31 - 1, or a wrong offset.

    Examples:
        >>> packax.chunked(2).as_array(3, 4).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 1]])
    """
    return Chunked(_size("size", size, 1), _offset(offset))


def prefix(lengths: ArrayLike) -> MaskExpression:
    """Query i attends to the keys j <= i, and to all keys j < length: a prefix-LM.

    With `documents(..., positions=...)` it compares positions. Each document may then have a
    different prefix: pass `lengths` of shape (B, Sq).

    Args:
        lengths: the length of the prefix: an integer, (B,) for each row, or (B, Sq) for each query;
            int32.

    Raises:
        ValueError: wrong rank, dtype or size, or values that do not fit int32.

    Examples:
        >>> packax.prefix(2).as_array(3, 3).astype(int)
        array([[1, 1, 0],
               [1, 1, 0],
               [1, 1, 1]])
    """
    shapes = "(), (batch,) or (batch, length)"
    lengths = as_int32("lengths", lengths, ranks=(0, 1, 2), shapes=shapes)
    return Prefix(lengths, lengths.ndim == 2)


def _offset(offset: ArrayLike) -> Any:
    """None for 0, otherwise an int32 array of rank 0 or 1."""
    array = as_int32("offset", offset, ranks=(0, 1), shapes="() or (batch,)")
    zero = isinstance(array, np.ndarray) and array.ndim == 0 and array == 0
    return None if zero else array


def _size(name: str, size: Any, least: int) -> int:
    if isinstance(size, jax.core.Tracer):
        raise ValueError(
            f"{name} must be an integer that is known when tracing, but is traced: make it static "
            "(static_argnums of jit, or a closure), or use packax.masks.ranges(lo, hi) for a "
            "window that depends on data"
        )
    try:
        number = operator.index(size)
    except TypeError:
        number = None
    if number is None or isinstance(size, bool):
        raise ValueError(f"{name} must be an integer, but is {size!r}") from None
    if not least <= number <= INT32.max:
        raise ValueError(f"{name} must be an integer from {least} to {INT32.max}, but is {number}")
    return number
