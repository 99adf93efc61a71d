"""Halos: the keys next to a rank's chunks, for masks whose reach is static, such as windows.

With a window, a row reads few keys outside its chunk. So a rank does not gather all keys, but
fetches the end of the chunk before each of its chunks, and the start of the chunk behind it. The
keys are then `[halo of chunk 0 | chunk 0 | halo of chunk 1 | chunk 1 ...]`, in which the keys of
each row are still one range. Rows that need no halo attend to the rank's keys while the halos are
sent. This module computes the static part; fetch_halos.py moves the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from packax._src.core.arguments import described
from packax._src.core.spec import TILE, ceil_div


def keys_of_halos(expression: Any, chunk: int) -> list[int]:
    """The keys of the halos before and behind each chunk, in whole tiles. Omits unknown numbers."""
    return [TILE * ceil_div(x, TILE) for x in expression.reach(chunk) if x is not None]


class Place(NamedTuple):
    """Where a chunk is: its rank, and its index among the rank's chunks."""

    rank: int
    slot: int


class Send(NamedTuple):
    """A collective permute of rows at the ends or starts of chunks."""

    hop: int  # distance in chunks
    rows: int
    pairs: tuple[tuple[Place, Place], ...]  # (source, target); no rank twice on the same side

    @property
    def is_local(self) -> bool:
        return all(source.rank == target.rank for source, target in self.pairs)


class Stretch(NamedTuple):
    """The rows `first` to `rows` of each chunk, and the keys to which they may attend: `keys` keys,
    which begin `before` keys before the chunk."""

    first: int
    rows: int
    before: int
    keys: int


class Halo(NamedTuple):
    """The keys next to its chunks that a rank fetches. A static field of the mask."""

    ranks: int
    chunks: int  # per rank
    chunk: int  # rows per chunk
    before: int  # keys of the halo before each chunk
    after: int  # keys of the halo behind each chunk
    placed: str  # order of chunks: "in order", "zigzag", or "balanced" (dynamic)

    @staticmethod
    def of(expression: Any, placed: str, ranks: int, length: int, chunk: int) -> Halo | None:
        """The halos for a mask of this expression.

        None: its reach is unknown, or fetching halos would not move fewer keys than a full gather.
        """
        if not hasattr(expression, "reach"):
            raise ValueError(
                f"expression must be a mask expression, but is {described(expression)}"
            )
        reach = keys_of_halos(expression, chunk)
        if len(reach) < 2 or placed == "local" or (placed == "balanced" and sum(reach) >= chunk):
            return None
        halo = Halo(ranks, length // (ranks * chunk), chunk, reach[0], reach[1], placed)
        return halo if halo.saved > 0 else None

    @property
    def rows(self) -> int:
        """How many of the first rows of each chunk attend to keys with halos."""
        edge = self.before if self.after == 0 else self.chunk
        return min(edge, self.chunk)

    @property
    def own(self) -> Stretch:
        """The rows that attend only to the rank's keys."""
        return Stretch(self.rows, self.chunk, 0, self.chunk)

    @property
    def edge(self) -> Stretch:
        """The rows that attend to keys with halos."""
        return Stretch(0, self.rows, self.before, self.before + self.rows + self.after)

    @property
    def parts(self) -> list[tuple[Halo | None, Stretch]]:
        """The halos, if any, and the stretch of each part of the mask, private part first."""
        own = [] if self.rows == self.chunk else [(None, self.own)]
        return [*own, *([(self, self.edge)] if self.rows else [])]

    @property
    def places(self) -> np.ndarray:
        """(ranks, chunks per rank): the chunks' indices in the sequence, if these are static."""
        rank = np.arange(self.ranks)
        return np.stack([rank, 2 * self.ranks - 1 - rank][: self.chunks], axis=1)

    def sends(self, way: int) -> Iterator[Send]:
        """The transfers of halos before (way -1) or behind (1) chunks, nearest chunk first."""
        place_of = {int(n): Place(*place) for place, n in np.ndenumerate(self.places)}
        left = self.before if way < 0 else self.after
        for hop in range(1, len(place_of)):
            if left <= 0:
                return
            pairs = [
                (place_of[n + way * hop], target)
                for n, target in place_of.items()
                if n + way * hop in place_of
            ]
            for together in _at_once(pairs):
                yield Send(hop, min(left, self.chunk), tuple(together))
            left -= self.chunk

    @property
    def fetched(self) -> int:
        """The number of keys that a rank fetches from others, as the collectives move them."""
        if self.placed == "balanced":
            return sum(self.traffic(self.ranks))
        both = itertools.chain(self.sends(-1), self.sends(1))
        return sum(send.rows for send in both if not send.is_local)

    @property
    def saved(self) -> int:
        """How many fewer keys are fetched than by a gather of all keys."""
        return (self.ranks - 1) * self.chunks * self.chunk - self.fetched

    def traffic(self, ranks_per_host: int) -> tuple[int, int]:
        """The largest numbers of keys that a rank fetches from its own host, and from others."""
        if self.placed == "balanced":
            of_rank = self.chunks * (self.before + self.after)
            return (ranks_per_host - 1) * of_rank, (self.ranks - ranks_per_host) * of_rank
        rows = np.zeros((2, self.ranks), int)
        for send in itertools.chain(self.sends(-1), self.sends(1)):
            for source, target in send.pairs:
                if source.rank != target.rank:
                    other = source.rank // ranks_per_host != target.rank // ranks_per_host
                    rows[int(other), target.rank] += send.rows
        inside, between = rows.max(axis=1)
        return int(inside), int(between)


def _at_once(pairs: list[tuple[Place, Place]]) -> list[list[tuple[Place, Place]]]:
    """Divides the pairs greedily into a few collective permutes, and moves inside ranks."""
    groups: list[list[tuple[Place, Place]]] = []
    for pair in sorted(pairs, key=lambda pair: (pair[0].slot, pair[1].slot, pair)):
        source_rank, target_rank = (place.rank for place in pair)
        for group in groups:
            if all(
                source_rank != source.rank
                and target_rank != target.rank
                and (source_rank == target_rank) == (source.rank == target.rank)
                for source, target in group
            ):
                group.append(pair)
                break
        else:
            groups.append([pair])
    return groups
