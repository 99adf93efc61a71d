"""The tokens of a row for a local plan on the host: by runs of an id, not one by one.

The same numbers as local_rows.py finds of every token on the device. A row has a few hundred runs
where it has a hundred thousand tokens; only sums of keys and the order itself are of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
    """As local_rows.Sums, of keys in the order of the sequence."""

    def __init__(self, runs: Runs, keys: np.ndarray, bits: int) -> None:
        self.bits = bits
        self.runs = runs
        # Of the sequence, then what turns these into sums in documents' order.
        self.sums = []
        for x, kind in ((keys, np.int64), (keys >> bits, np.int32)):
            sums = np.zeros(len(keys) + 1, kind)
            np.cumsum(x, out=sums[1:])
            size = np.diff(runs.begin)
            begin = sums[runs.first]
            of_run = sums[runs.first + size] - begin
            self.sums.append((sums, np.cumsum(of_run) - of_run - begin))

    def totals(self) -> tuple[Any, Any]:
        whole, high = (sums[-1] for sums, _ in self.sums)
        return high, (whole - (int(high) << self.bits)).astype(np.int32)

    def between(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """Sums of high and of low bits, of the tokens from `begin` to `end`."""
        whole, high = (b - a for a, b in zip(self._before(begin), self._before(end), strict=True))
        low = whole - (high.astype(np.int64) << self.bits)
        return high.astype(np.int32), low.astype(np.int32)

    def _before(self, place: Any) -> list[np.ndarray]:
        first, begin = self.runs.first, self.runs.begin
        run = np.searchsorted(begin[1:-1], place, side="right")
        token = first[run] + place - begin[run]
        return [more[run] + sums[token] for sums, more in self.sums]


def pieces_of(runs: Runs, cuts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where runs are cut at these places: places, tokens, and the run of each."""
    place = np.unique(np.concatenate([runs.begin[:-1], *cuts]))
    run = np.searchsorted(runs.begin[1:-1], place, side="right")
    return place, np.diff(place, append=runs.begin[-1]), run


def cuts_of_line(place: np.ndarray, size: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The places where a line of pieces is cut at `ends`, which are numbers of its tokens."""
    line = np.cumsum(size)
    ends = ends[(ends > 0) & (ends < (line[-1] if len(line) else 0))]
    piece = np.searchsorted(line, ends, side="right")
    return place[piece] + ends - (line[piece] - size[piece])


def tokens_in_order(key: np.ndarray, first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """(N,) the tokens of pieces, which begin at `first` of the sequence, by key and then by it."""
    order = np.lexsort((first, key))
    first, size = first[order], size[order]
    offset = first - (np.cumsum(size) - size)
    number = int(size.sum())
    return np.repeat(offset.astype(np.int32), size) + np.arange(number, dtype=np.int32)
