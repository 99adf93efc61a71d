"""The tokens of a row for a local plan on the host: by runs of an id, not one by one.

The same numbers as local_rows.py finds of every token on the device. A row has a few hundred runs
where it has a hundred thousand tokens; only sums of keys and the order itself are of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from packax._src.context.array_ops import indices
from packax._src.core.shapes import PADDING_SEGMENT_ID


class Runs(NamedTuple):
    """In documents' order: an id's runs together, in the order of the sequence."""

    first: np.ndarray  # (r,) index in the sequence
    begin: np.ndarray  # (r + 1,) place in documents' order, then the number of tokens
    document: np.ndarray  # (r,) number of the id
    padding: np.ndarray  # (r,) bool, not what is held
    starts: np.ndarray  # (D,) place of each document
    ends: np.ndarray
    empty: np.ndarray  # (D,) bool: padding, or held


def runs_of(ids: np.ndarray, held: int) -> Runs:
    """ids: (N,); held: the first so many tokens are given to ranks before, of no document here."""
    changes = np.flatnonzero(ids[held + 1 :] != ids[held : len(ids) - 1]).astype(np.int32)
    first = np.concatenate([np.arange(held > 0), [held], changes + held + 1]).astype(np.int32)
    first = first[: len(first) - (held == len(ids))]
    sizes = np.diff(first, append=np.int32(len(ids)))
    of_run = ids[first]
    if held:
        of_run[0] = PADDING_SEGMENT_ID
    by_id = np.argsort(of_run, kind="stable")
    first, sizes, of_run = first[by_id], sizes[by_id], of_run[by_id]
    begin = np.zeros(len(first) + 1, np.int32)
    np.cumsum(sizes, out=begin[1:])
    begins = np.ones(len(first), bool)
    begins[1:] = of_run[1:] != of_run[:-1]
    at = np.flatnonzero(begins)
    starts = begin[at]
    ends = np.append(starts[1:], np.int32(len(ids)))
    padding = (of_run == PADDING_SEGMENT_ID) & (first >= held)
    document = np.cumsum(begins, dtype=np.int32) - 1
    return Runs(first, begin, document, padding, starts, ends, of_run[at] == PADDING_SEGMENT_ID)


class SumsOfRuns:
    """As local_rows.Sums, of keys in the order of the sequence.

    Sums wrap around int32. Differences that fit it are right all the same, and those of high and
    of low bits do: `whole - (high << bits)` is the sum of low bits.
    """

    def __init__(self, runs: Runs, keys: np.ndarray, bits: int) -> None:
        self.bits = bits
        self.runs = runs
        # Of whole numbers and high bits, in the sequence; then what turns these into sums in
        # documents' order.
        size = np.diff(runs.begin)
        self.sums = np.empty((2, len(keys) + 1), np.int32)
        self.sums[:, 0] = 0
        whole, high = self.sums[:, 1:]
        keys.cumsum(dtype=np.int32, out=whole)
        np.right_shift(keys, bits, out=high)
        high.cumsum(dtype=np.int32, out=high)
        begin = self.sums.take(runs.first, axis=1)
        of_run = self.sums.take(runs.first + size, axis=1) - begin
        self.more = of_run.cumsum(axis=1, dtype=np.int32) - of_run - begin

    def totals(self) -> tuple[Any, Any]:
        high, low = self._parts(self.sums[:, -1:])
        return high[0], low[0]

    def between(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """Sums of high and of low bits, of the tokens from `begin` to `end`."""
        return self._parts(self._before(end) - self._before(begin))

    def _parts(self, sums: np.ndarray) -> tuple[Any, Any]:
        whole, high = sums
        return high, whole - (high << self.bits)

    def _before(self, place: Any) -> np.ndarray:
        first, begin = self.runs.first, self.runs.begin
        run = begin[1:-1].searchsorted(place, side="right")
        token = first.take(run) + place - begin.take(run)
        return self.more.take(run, axis=1) + self.sums.take(token, axis=1)


def pieces_of(runs: Runs, cuts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where runs are cut at these places: places, tokens, and the run of each."""
    place = np.concatenate([runs.begin[:-1], *cuts])
    place.sort()
    place = place[np.diff(place, prepend=-1) > 0]
    run = runs.begin[1:-1].searchsorted(place, side="right")
    return place, np.diff(place, append=runs.begin[-1]), run


def cuts_of_line(place: np.ndarray, size: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The places where a line of pieces is cut at `ends`, which are numbers of its tokens."""
    line = np.cumsum(size)
    ends = ends[(ends > 0) & (ends < (line[-1] if len(line) else 0))]
    piece = np.searchsorted(line, ends, side="right")
    return place[piece] + ends - (line[piece] - size[piece])


def tokens_in_order(key: np.ndarray, first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """(N,) the tokens of pieces, which begin at `first` of the sequence, by key and then by it."""
    ends = size.sum()
    order = (key * np.int64(ends) + first).argsort()  # of which no two are equal
    first, size = first[order], size[order]
    offset = first - (size.cumsum() - size)
    tokens = offset.astype(np.int32).repeat(size)
    tokens += indices(int(ends))
    return tokens
