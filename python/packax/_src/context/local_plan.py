"""Plans of kind "local": each document stays on one rank, unless it must be split for balance.

The rows of a rank consist of a shared part, whose keys all ranks gather, and a private part, whose
keys no other rank reads. Plans are computed in numpy on the host. A row of the batch takes three
steps, of which the first two are in document_assignment.py:

1. `analyze_row`: the lengths and attended areas of its documents, heaviest first.
2. `assign_documents`: which documents are split, and the rank of each other document.
3. `order_rows`: the tokens of each rank, those of split documents first.

With levels, such as hosts and their GPUs, the row is first divided among hosts as if they were
ranks. Then the rows of a host are divided among its GPUs: first, the rows of documents that are
split over hosts are dealt evenly in tiles; the others are divided in the same way (`_Group`). There
is a shared part for each level. `local` uses the smallest shared parts that balance the ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import warnings
from typing import Any

import numpy as np

from packax._src.context.document_assignment import (
    Assignment,
    RowStats,
    Strategies,
    analyze_row,
    assign_documents,
    refine_by_swaps,
    sums_by_part,
)
from packax._src.context.load_balance import (
    ContextPlan,
    balanced,
    deal_in_rounds,
    indices,
    inverse_of,
)
from packax._src.core.spec import TILE
from packax._src.ops.ffi import ext

SHARES = tuple(
    n / 128
    for n in (0, 0.25, *range(1, 9), 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 104, 112, 120, 128)
)
"""The sizes of a shared part, as fractions of a rank's rows, that `local` tries."""

_FAIR = 1.03  # at most: the area of the most loaded rank over the mean
_AREA_BITS = 26  # the unit of areas is chosen so that a whole row has less than 2**26


def local(levels: tuple[int, ...], ids: Any, keys: np.ndarray, shared: Any) -> ContextPlan:
    """A plan of kind "local".

    levels: sizes of the groups of ranks, from outer to inner.
    ids: segment ids, (B or 1, length) or (length,). None: one document.
    keys: (B or 1, length), the number of keys to which each row attends.
    shared: as in `context_plan`.
    """
    if ext is None:
        raise NotImplementedError(
            'kind="local" needs the extension module packax._ext, which did not load: reinstall '
            'packax, or pass kind="balanced"'
        )
    ranks, length = math.prod(levels), keys.shape[1]
    if length % (TILE * ranks):
        raise ValueError(
            f'length must be a multiple of ranks * {TILE} = {TILE * ranks} for "local", '
            f"but is {length}"
        )
    own = length // ranks
    rows = shared_rows(shared, own, levels)
    if shared is not None and not isinstance(shared, tuple):
        levels = (ranks,)
    if ids is None or (rows is not None and rows[0] == own):
        return _all_shared(ranks, keys)
    ids = np.atleast_2d(ids)
    batch = max(len(ids), len(keys))
    ids, keys = (np.broadcast_to(np.asarray(x, np.int32), (batch, length)) for x in (ids, keys))
    most = (_FAIR if rows is None else math.inf) * (keys.sum(axis=1, dtype=np.int64) / ranks)
    groups = [_Group(levels, *row) for row in zip(ids, keys, most, strict=True)]
    tried: Any = [rows]
    if rows is None:
        sizes = sorted({_rows_of(share, own) for share in SHARES})
        tried = itertools.combinations_with_replacement(sizes, len(levels))
    for rows in tried:
        if rows[0] == own:
            break
        of_rows = (group.divided(rows) for group in groups)
        divided = [*itertools.takewhile(lambda x: x is not None, of_rows)]
        if len(divided) == batch:
            order, split = (np.stack(x) for x in zip(*divided, strict=True))
            one = len(levels) == 1
            return ContextPlan(
                *(order, inverse_of(order), "local", ranks, length, 1),
                shared=rows[0] if one else rows,
                split=split,
                levels=() if one else levels,
            )
    if shared is not None:
        given = " and ".join(str(x) for x in rows or ())
        warnings.warn(
            f"the documents do not fit a shared part of {given} of a rank's {own} tokens, so "
            "all tokens are shared, as in a plan that keeps nothing local. Pass a larger shared= "
            "(an int is a number of tokens, a float a fraction of them), or None for the default",
            stacklevel=3,
        )
    return _all_shared(ranks, keys)


def shared_rows(shared: Any, own: int, levels: tuple[int, ...]) -> tuple[int, ...] | None:
    """The size of each shared part in rows, of a rank's `own` rows, the outermost first.

    None: not specified.
    """
    if shared is None:
        return None
    if not isinstance(shared, tuple):
        return (_rows(shared, own),)
    rows = tuple(_rows(x, own) for x in shared)
    if len(rows) != len(levels) or any(a > b for a, b in itertools.pairwise(rows)):
        raise ValueError(
            f"shared must hold a size for each of the levels of ranks, {levels}, none smaller than "
            f"the one before, but is {shared}"
        )
    return rows


def _rows(shared: Any, own: int) -> int:
    if isinstance(shared, float):
        if not 0 <= shared <= 1:
            raise ValueError(f"shared must be a fraction from 0.0 to 1.0, but is {shared}")
        return _rows_of(shared, own)
    try:
        number = operator.index(shared)
    except TypeError:
        number = None
    if number is None or isinstance(shared, bool):
        raise ValueError(
            f"shared must be a fraction from 0.0 to 1.0 or a number of tokens, but is {shared!r}"
        ) from None
    if not 0 <= number <= own:
        raise ValueError(f"shared must be from 0 to {own} tokens, those of a rank, but is {number}")
    return number


def _rows_of(share: float, own: int) -> int:
    return min(own, TILE * math.ceil(share * own / TILE))


def _all_shared(ranks: int, keys: np.ndarray) -> ContextPlan:
    order = balanced(ranks, keys).index()
    length = order.shape[1]
    fields = (order, inverse_of(order), "local", ranks, length, 1)
    return ContextPlan(*fields, shared=length // ranks)


class _Group:
    """The tokens of a group of ranks, and their division among its parts, the next level's groups.

    Divisions are cached, because sizes of shared parts that differ only in inner levels reuse them.
    """

    def __init__(
        self,
        levels: tuple[int, ...],
        ids: np.ndarray,
        keys: np.ndarray,
        most_area: float,
        tokens: tuple[np.ndarray, ...] = (),
    ) -> None:
        """levels: the sizes of the groups of ranks inside this group, from outer to inner.
        ids, keys: the ids and the key counts of the whole row.
        most_area: the largest area that a rank may get.
        tokens: for each outer level, the tokens of documents that it has split, then all other
            tokens. (): the whole row.
        """
        self.levels, self.ids, self.keys, self.most_area = levels, ids, keys, most_area
        self.tokens = tokens or (indices(len(ids)),)
        self.parts: dict[int, list[_Group] | None] = {}  # keyed by the rows of the shared part

    def divided(self, shared: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """The order of a whole row, and (ranks, levels) how many tokens of each rank belong to
        documents that this level or an outer one has split. None: it does not fit."""
        ranks = self._ranks(shared)
        if ranks is None:
            return None
        order = np.concatenate([*itertools.chain(*ranks)])
        split = np.array([[len(x) for x in rank[:-1]] for rank in ranks])
        split = split.cumsum(axis=1, dtype=np.int32)
        areas = (self.keys[x].sum(dtype=np.int64) for x in order.reshape(len(ranks), -1))
        fits = (split <= shared).all() and all(area <= self.most_area for area in areas)
        return (order, split) if fits else None

    def _ranks(self, shared: tuple[int, ...]) -> list[tuple[np.ndarray, ...]] | None:
        """For each rank, the tokens of documents that each level has split, then all others."""
        if not self.levels:
            return [self.tokens]
        rows, *inner = shared
        if rows not in self.parts:
            self.parts[rows] = self._divide(rows)
        found: list[tuple[np.ndarray, ...]] = []
        for part in self.parts[rows] or ():
            ranks = part._ranks(tuple(inner))
            if ranks is None:
                return None
            found += ranks
        return found or None

    def _divide(self, shared: int) -> list[_Group] | None:
        """Divides the group, with `shared` rows per rank in the shared part; None: does not fit."""
        parts, inner = self.levels[0], math.prod(self.levels[1:])
        length = sum(map(len, self.tokens))
        if shared * parts * inner == length:
            divided = self._all_split()
        elif len(self.tokens[-1]) == 0:
            none = self.tokens[-1]
            divided = [(*outer, none, none) for outer in self.preassigned[0]]
        else:
            assignment = assign_documents(self.strategies, shared * inner)
            if assignment is None:
                return None
            if inner == 1 and assignment.area << self.area_shift > self.most_area:
                return None  # certainly too much, because areas are rounded down
            order = order_rows(self.strategies.stats, assignment)
            if len(self.tokens) > 1:
                order = [(self.tokens[-1][split], self.tokens[-1][rest]) for split, rest in order]
            divided = [(*x, *part) for x, part in zip(self.preassigned[0], order, strict=True)]
        if any(sum(map(len, x)) * parts != length for x in divided):
            return None
        return [_Group(self.levels[1:], self.ids, self.keys, self.most_area, x) for x in divided]

    @functools.cached_property
    def area_shift(self) -> int:
        whole = len(self.tokens) == 1
        keys = self.keys if whole else self.keys[np.concatenate(self.tokens)]
        return max(0, int(keys.sum(dtype=np.int64)).bit_length() - _AREA_BITS)

    @functools.cached_property
    def preassigned(self) -> tuple[list[list[np.ndarray]], np.ndarray, np.ndarray]:
        """Deals the tokens of documents that outer levels have split, in tiles, evenly per level.

        Returns for each part its tokens per level, and the parts' numbers of these tokens and their
        areas.
        """
        parts = self.levels[0]
        areas, sizes = np.zeros((2, parts), np.int64)
        dealt: list[list[np.ndarray]] = [[] for _ in range(parts)]
        for tokens in self.tokens[:-1]:
            of_tile = self._tile_areas(tokens, parts * -(-len(tokens) // (TILE * parts)))
            part = deal_in_rounds(of_tile, np.argsort(-of_tile, kind="stable"), areas)
            areas = areas + sums_by_part(part, of_tile, parts)
            of_token = part.repeat(TILE)[: len(tokens)]
            for number, part_tokens in enumerate(dealt):
                part_tokens.append(tokens[of_token == number])
            sizes += [len(part_tokens[-1]) for part_tokens in dealt]
        return dealt, sizes, areas

    @functools.cached_property
    def strategies(self) -> Strategies:
        own = sum(map(len, self.tokens)) // self.levels[0]
        rest = self.tokens[-1]
        row = (self.ids, self.keys)
        ids, keys = row if len(self.tokens) == 1 else (x[rest] for x in row)
        return Strategies(analyze_row(ids, keys, own, *self.preassigned[1:], self.area_shift))

    def _all_split(self) -> list[tuple[np.ndarray, ...]]:
        """Splits all remaining documents, too: deals the tiles of the group by area."""
        parts, tokens = self.levels[0], np.concatenate(self.tokens)
        ends = np.cumsum([len(x) for x in self.tokens[:-1]], dtype=np.int64)
        tiles = len(tokens) // TILE
        areas = self._tile_areas(tokens, tiles)
        level = ends.searchsorted(TILE * np.arange(tiles), side="right")
        heavy = np.argsort(-areas, kind="stable")
        by_level = heavy[np.argsort(level[heavy], kind="stable")]
        part = deal_in_rounds(areas, by_level, np.zeros(parts, np.int64))
        # Only tiles of this level may be swapped.
        last = level == len(ends)
        wanted = areas.sum() // parts - sums_by_part(np.where(last, -1, part), areas, parts)
        swapped = refine_by_swaps(np.where(last, part, -1), areas, heavy, wanted, tiles // parts)
        of_token = np.where(last, swapped, part).repeat(TILE)
        none = tokens[:0]
        levels = [*zip(self.tokens, np.split(of_token, ends), strict=True)]
        return [(*(x[to == number] for x, to in levels), none) for number in range(parts)]

    def _tile_areas(self, tokens: np.ndarray, tiles: int) -> np.ndarray:
        keys = np.zeros(tiles * TILE, np.int64)
        keys[: len(tokens)] = self.keys[tokens]
        return keys.reshape(tiles, TILE).sum(axis=1) >> self.area_shift


def order_rows(stats: RowStats, assignment: Assignment) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each part, its tokens of split documents, and its other tokens in the order of the row.

    The chunks of split documents come first, then their rows that fill no chunk, in row order.
    """
    # Runs are cut into pieces that go to a single part: at chunk boundaries, and where the sequence
    # of rows that fill no chunk, or of padding, continues on the next part.
    some = assignment.owner[: len(stats.first_chunk)] < 0
    of_split = some[stats.chunk_document]
    document = stats.chunk_document[of_split]
    behind = np.arange(len(of_split))[of_split] - stats.first_chunk[document] + 1
    cuts = [stats.run_begin[:-1], stats.ends[document] - TILE * behind]
    free = assignment.rows - TILE * assignment.chunks
    even = np.minimum(free, stats.padding // len(free))
    ends, even_ends = (free - even).cumsum(), even.cumsum()

    def pieces() -> tuple[np.ndarray, ...]:
        place = np.unique(np.concatenate(cuts))
        run = stats.run_begin[1:-1].searchsorted(place, side="right")
        document, padding = stats.run_document[run], stats.run_padding[run]
        from_end = stats.ends[document] - 1 - place
        # Part -1: the document is split and the piece is in no chunk.
        part = assignment.owner[document]
        split = ~padding & (part < 0)
        chunked = (
            split
            & (document < len(stats.first_chunk))
            & (stats.lengths[document] // TILE > from_end // TILE)
        )
        chunk = stats.first_chunk[document[chunked]] + from_end[chunked] // TILE
        part[chunked] = assignment.chunk_part[chunk]
        first = stats.run_first[run] + place - stats.run_begin[run]
        return place, np.diff(place, append=stats.run_begin[-1]), first, padding, split, part

    place, size, _, padding, split, part = pieces()
    remainder = split & (part < 0)
    cuts.append(_cuts_of_line(place[remainder], size[remainder], ends))
    left = ends - size[remainder].sum() + even_ends[-1]
    line_ends = np.append(even_ends, left[left > even_ends[-1]])
    cuts.append(_cuts_of_line(place[padding], size[padding], line_ends))
    place, size, first, padding, split, part = pieces()
    remainder = split & (part < 0)
    in_line, in_padding = (np.where(x, size, 0).cumsum() - size for x in (remainder, padding))
    spread = padding & (in_padding < even_ends[-1])
    in_line[padding] = in_padding[padding] + size[remainder].sum() - even_ends[-1]
    kind = np.where(remainder, 1, np.where(split, 0, 2))
    behind = remainder | padding
    part[behind] = ends.searchsorted(in_line[behind], side="right")
    part[spread] = even_ends.searchsorted(in_padding[spread], side="right")
    order = np.lexsort((first, kind, part))
    first, size = first[order], size[order]
    tokens = (first - (size.cumsum() - size)).astype(np.int32).repeat(size)
    tokens += indices(len(tokens))
    parts = np.split(tokens, (stats.own - stats.sizes).cumsum()[:-1])
    return [(x[:n], x[n:]) for x, n in zip(parts, assignment.split, strict=True)]


def _cuts_of_line(place: np.ndarray, size: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The places at which concatenated pieces are cut; `ends`: their token counts at the cuts."""
    line = size.cumsum()
    ends = ends[(ends > 0) & (ends < size.sum())]
    piece = line.searchsorted(ends, side="right")
    return place[piece] + ends - (line[piece] - size[piece])
