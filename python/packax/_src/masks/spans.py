"""spans(...): the tokens of a span, such as an image, attend to the whole span."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from packax._src.core.arguments import INT32, Array, ArrayLike, as_int32, described, numpy_of, shown
from packax._src.core.spec import common_batch
from packax._src.masks.expressions import (
    And,
    Interval,
    Limits,
    MaskExpression,
    Positions,
    documents_of,
    pytree,
)
from packax._src.masks.intervals import Causal

NO_SPAN = -1


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

    def check_others(self, both: And) -> None:
        document = documents_of(both)
        if document is not None and not (document.kv_ids is None and document.kv_pos is None):
            raise ValueError(
                "spans(...) is for self-attention, but documents(...) has kv_segment_ids or "
                "kv_positions: pass only segment_ids and positions, which the keys share"
            )

    def _changes(self, at: Positions) -> Any:
        """bool, (B or 1, S): whether a run of span ids or of segment ids begins here."""
        xp = numpy_of(self.ids, at.q, at.kv, *at.ids)
        begins = [begins_of(ids, xp) for ids in (self.ids, *at.ids)]
        return functools.reduce(operator.or_, begins)

    def _as_array(self, at: Positions) -> Array:
        changes = self._changes(at)
        xp = numpy_of(changes)
        run = xp.cumsum(changes, axis=-1, dtype=np.int32)
        inside = xp.broadcast_to(self.ids != NO_SPAN, run.shape)
        same = (run[..., :, None] == run[..., None, :]) & inside[..., None]
        key = at.kv[..., None, :]
        first = xp.where(same, key, INT32.max).min(axis=-1, keepdims=True, initial=INT32.max)
        last = xp.where(same, key, INT32.min).max(axis=-1, keepdims=True, initial=INT32.min)
        result = self.text._as_array(at) | ((first <= key) & (key <= last))
        flat = not self.batched and all(x.ndim == 1 for x in (at.q, *at.ids))
        return result[0] if flat and result.shape[0] == 1 else result

    def limits(self, at: Positions) -> Limits:
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


def begins_of(ids: Any, xp: Any) -> Any:
    """bool, (B or 1, S): whether a run of equal ids begins here."""
    ids = xp.atleast_2d(ids)
    return xp.concatenate([xp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def extremes(begins: Any, positions: Any, by_position: bool) -> tuple[Any, Any]:
    """The smallest and the largest position in each row's run, (B or 1, S)."""
    xp = numpy_of(begins, positions)
    if not by_position:  # positions are indices: the first and the last index of the run
        length = begins.shape[1]
        if xp is np:  # computed per run, because there are few runs
            at = np.flatnonzero(begins).astype(np.int32)
            sizes = np.diff(at, append=np.int32(begins.size))
            begin = at % np.int32(length)
            of_runs = (begin, begin + sizes - 1)
            start, end = (np.repeat(x, sizes).reshape(begins.shape) for x in of_runs)
            return start, end
        index = xp.arange(length, dtype=np.int32)
        first, following = xp.where(begins, index, 0), xp.where(begins, index, length)
        first = jax.lax.cummax(first, axis=1)
        following = jax.lax.cummin(following, axis=1, reverse=True)
        ends = xp.concatenate([following[:, 1:], xp.full_like(following[:, :1], length)], axis=1)
        return first, ends - 1
    batch = common_batch((begins.shape[0], positions.shape[0]))
    begins, positions = (xp.broadcast_to(x, (batch, x.shape[1])) for x in (begins, positions))
    run = xp.cumsum(begins, axis=1, dtype=np.int32) - 1
    first, last = (xp.full_like(positions, x) for x in (INT32.max, INT32.min))
    if xp is np:
        rows = np.arange(batch)[:, None]
        np.minimum.at(first, (rows, run), positions)
        np.maximum.at(last, (rows, run), positions)
        return first[rows, run], last[rows, run]

    def one(run: Any, positions: Any, first: Any, last: Any) -> tuple[Any, Any]:
        return first.at[run].min(positions)[run], last.at[run].max(positions)[run]

    return jax.vmap(one)(run, positions, first, last)


def spans(span_ids: ArrayLike, text: MaskExpression | None = None) -> MaskExpression:
    """Tokens of a span attend to the whole span and to what `text` allows; others follow `text`.

    A span is a maximal run of equal ids other than -1, such as the tokens of an image within text
    (Gemma 3). With documents(...) or a tree, a span also ends where the segment id changes. If
    positions are compared, a token of a span attends to everything from the smallest to the largest
    position of its span, in addition to what `text` allows.

    Args:
        span_ids: the span of each token, or -1 for text: (B, S) or (S,) integers that fit int32.
            For self-attention only: query i and key i are the same token.
        text: the mask without spans: `causal()` if None, or any expression in which every token
            attends to itself, such as `sliding_window(1023)` or `causal() & chunked(8192)`.

    Raises:
        ValueError: wrong rank, dtype, value or length; a `text` with an offset;
            or an intersection with documents(...) that has kv_segment_ids or kv_positions.
        NotImplementedError: a `text` with documents(...), ranges(...) or block_sparse(...), with
            which to intersect the spans instead.

    Examples:
        >>> packax.masks.spans([-1, 5, 5, -1]).as_array(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    ids = as_int32("span_ids", span_ids)
    text = Causal() if text is None else text
    if not isinstance(text, MaskExpression):
        raise ValueError(f"text must be a mask expression, but is {described(text)}")
    for part in text.walk():
        if not isinstance(part, Interval):
            raise NotImplementedError(
                f"the text of spans(...) cannot contain {part.name}(...): intersect the spans with "
                f"it, as in spans(span_ids) & {part.name}(...)"
            )
        if getattr(part, "offset", None) is not None:
            raise ValueError(
                "spans(...) is for self-attention, where the queries are the keys: its text must "
                f"not have an offset, but {part.name} has one"
            )
    return Spans(numpy_of(ids).atleast_2d(ids), text, ids.ndim == 2)
