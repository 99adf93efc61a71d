"""Halos: the keys next to a rank's chunks, where a mask's reach is known when tracing.

A row under a window reads few keys outside its chunk. So a rank does not gather all
keys: it fetches the end of the chunk before each of its chunks, and the start of the one behind.
Keys are then `[halo of chunk 0 | chunk 0 | halo of chunk 1 | chunk 1 ...]`, in which the keys of a
row still are one range. Rows too far from an edge to need a halo attend to the rank's keys as they
are, while halos travel. Here is what is known when tracing; fetch_halos.py moves the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from packax._src.core.arguments import described
from packax._src.core.spec import TILE, ceil_div


def keys_of_halos(expression: Any, chunk: int) -> list[int]:
    """Before and behind each chunk, as whole tiles; without those that are not known."""
    return [TILE * ceil_div(x, TILE) for x in expression.reach(chunk) if x is not None]


class Place(NamedTuple):
    """Of a chunk: its rank, and which of the rank's chunks it is."""

    rank: int
    slot: int


class Send(NamedTuple):
    """A collective permute of rows at the end or start of chunks."""

    hop: int  # how many chunks away
    rows: int
    pairs: tuple[tuple[Place, Place], ...]  # from, to; each rank at most once on each side

    @property
    def is_local(self) -> bool:
        return all(source.rank == target.rank for source, target in self.pairs)


class Stretch(NamedTuple):
    """Rows of each chunk, from `first` to `rows`, and the keys that they may attend: the number
    `keys`, beginning `before` keys in front of the chunk."""

    first: int
    rows: int
    before: int
    keys: int


class Halo(NamedTuple):
    """Which keys of other ranks a rank needs, next to its chunks. A static field of the mask."""

    ranks: int
    chunks: int  # of each rank
    chunk: int  # rows of one
    before: int  # keys fetched in front of each chunk
    after: int  # and behind it
    placed: str  # how ranks get chunks: "in order", "zigzag", or "balanced" (known at run time)

    @staticmethod
    def of(expression: Any, placed: str, ranks: int, length: int, chunk: int) -> Halo | None:
        """The halos for a mask of this expression. None: its reach is unknown, or halos would be no
        fewer rows than all keys."""
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
        """Of each chunk those that attend to keys with halos: the first."""
        edge = self.before if self.after == 0 else self.chunk
        return min(edge, self.chunk)

    @property
    def own(self) -> Stretch:
        """Of the rank's keys alone."""
        return Stretch(self.rows, self.chunk, 0, self.chunk)

    @property
    def edge(self) -> Stretch:
        """Of keys with halos."""
        return Stretch(0, self.rows, self.before, self.before + self.rows + self.after)

    @property
    def parts(self) -> list[tuple[Halo | None, Stretch]]:
        """Of a rank's rows and keys: with halos, or None; those of most rows first."""
        own = [] if self.rows == self.chunk else [(None, self.own)]
        return [*own, *([(self, self.edge)] if self.rows else [])]

    @property
    def places(self) -> np.ndarray:
        """(ranks, chunks of each): their numbers in the sequence, where these are static."""
        rank = np.arange(self.ranks)
        return np.stack([rank, 2 * self.ranks - 1 - rank][: self.chunks], axis=1)

    def sends(self, way: int) -> Iterator[Send]:
        """Of halos before the chunks (way -1) or behind (1), the nearest chunk first."""
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
        """Rows of keys that a rank fetches from others, as the program's collectives say it."""
        if self.placed == "balanced":
            return sum(self.traffic(self.ranks))
        both = itertools.chain(self.sends(-1), self.sends(1))
        return sum(send.rows for send in both if not send.is_local)

    @property
    def saved(self) -> int:
        """How many fewer they are than all keys of others."""
        return (self.ranks - 1) * self.chunks * self.chunk - self.fetched

    def traffic(self, ranks_per_host: int) -> tuple[int, int]:
        """Rows of keys that a rank fetches from its own host, and from others, each at most."""
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
    """The pairs, divided greedily into collective permutes, of which there should be few, and pairs
    of one rank, which need none."""
    found: list[list[tuple[Place, Place]]] = []
    for pair in sorted(pairs, key=lambda pair: (pair[0].slot, pair[1].slot, pair)):
        one, other = (place.rank for place in pair)
        for group in found:
            if all(
                one != source.rank
                and other != target.rank
                and (one == other) == (source.rank == target.rank)
                for source, target in group
            ):
                group.append(pair)
                break
        else:
            found.append([pair])
    return found
