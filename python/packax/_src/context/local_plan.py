"""Plans of kind "local": documents stay whole on a rank, except those that balance must split.

A rank's rows are a shared part, whose keys every rank gathers, and a private part that no other
rank reads. All of it is numpy, on the host. A row of the batch is planned in three steps:

1. `analyze_row`: the lengths and attended areas of its documents, heaviest first.
2. `assign_documents`: which of them are split, and the rank of each of the others. A few dozen
   strategies split some of the heaviest and deal the others whole, each to the rank with the least
   load (longest processing time first, Graham 1969). Small documents then level the tokens of the
   ranks by water-filling, chunks of split documents level the areas, and ranks swap chunks.
3. `order_rows`: the tokens of each rank, those of split documents first.

With levels, such as hosts and their GPUs, the row is first divided among hosts as if they were
ranks. A host's part is divided among its GPUs in the same way, after the rows of documents that are
split over hosts, which are dealt evenly in tiles (`_Group`). There is a shared part for each level.
`local` uses the smallest shared parts that keep the ranks balanced.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
import warnings
from typing import Any, NamedTuple

import numpy as np

from packax._src.context.load_balance import (
    ContextPlan,
    balanced,
    checksum,
    deal_in_rounds,
    indices,
    inverse_of,
)
from packax._src.core.spec import PADDING_SEGMENT_ID, TILE
from packax._src.ops.ffi import ext

SHARES = tuple(
    n / 128
    for n in (0, 0.25, *range(1, 9), 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 104, 112, 120, 128)
)
"""The sizes of a shared part, as fractions of a rank's rows, from which `local` chooses."""

_FAIR = 1.03  # area of the most loaded rank over the mean
_AREA_BITS = 26  # areas are counted in units such that a whole row has less than 2**26
_HEAVIEST = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # documents that strategies split, and
_TOKEN_WEIGHTS = (0, 2, 8)  # rows of mean area that a token adds to a load when they deal
_ROUNDS = 16  # of dealing; the documents that remain are small
_SLACK = (256, 256, 256, 40, 40, 40, 40, 40)  # the nth best is taken within 1 + 1 / _SLACK[n]
_WORST = 8  # and none above 1 + 1 / _WORST of the mean
_SWAPS = 5  # rounds of swaps
_OFFERED = 16  # chunks that a rank offers in each
_HUGE = 2**30


def local(levels: tuple[int, ...], ids: Any, keys: np.ndarray, shared: Any) -> ContextPlan:
    """A plan for documents of `ids` (B or 1, length) or (length,), None: one document; `keys` (B or
    1, length): how many keys each row attends.

    levels: sizes of the groups of ranks, each inside the one before. shared: as in `context_plan`.
    """
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
                checksum=checksum(ids),
                levels=() if one else levels,
            )
    if shared is not None:
        given = " and ".join(str(x) for x in rows or ())
        warnings.warn(
            f"the documents do not fit a shared part of {given} of a rank's {own} rows, so "
            "all rows are shared, as in a plan that keeps nothing local. Pass a larger shared= (an "
            "int is a number of rows, a float a fraction of them), or None for the default",
            stacklevel=3,
        )
    return _all_shared(ranks, keys)


def shared_rows(shared: Any, own: int, levels: tuple[int, ...]) -> tuple[int, ...] | None:
    """Rows of each shared part of `own` rows, the outermost first; None if not specified."""
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
            f"shared must be a fraction from 0.0 to 1.0 or a number of rows, but is {shared!r}"
        ) from None
    if not 0 <= number <= own:
        raise ValueError(f"shared must be from 0 to {own} rows, those of a rank, but is {number}")
    return number


def _rows_of(share: float, own: int) -> int:
    return min(own, TILE * math.ceil(share * own / TILE))


def _all_shared(ranks: int, keys: np.ndarray) -> ContextPlan:
    order = balanced(ranks, keys).index()
    length = order.shape[1]
    made = (order, inverse_of(order), "local", ranks, length, 1)
    return ContextPlan(*made, shared=length // ranks)


class _Group:
    """Tokens of a group of ranks, to be divided among its parts: the groups of the next level.

    It caches its divisions for other sizes of the shared parts with the same first sizes.
    """

    def __init__(
        self,
        levels: tuple[int, ...],
        ids: np.ndarray,
        keys: np.ndarray,
        most_area: float,
        tokens: tuple[np.ndarray, ...] = (),
    ) -> None:
        """ids, keys: of the whole row; most_area: that a rank may get; tokens: of documents that
        each outer level has split, then all others; (): the whole row."""
        self.levels, self.ids, self.keys, self.most_area = levels, ids, keys, most_area
        self.tokens = tokens or (indices(len(ids)),)
        self.parts: dict[int, list[_Group] | None] = {}  # by rows of the shared part

    def divided(self, shared: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """Of a whole row the order, and (ranks, levels) how many of a rank's tokens are of
        documents that this level or an outer one has split; None: it does not fit."""
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
        """For each rank the tokens of documents that each level has split, then of whole ones."""
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
        """shared: rows of a rank."""
        parts, inner = self.levels[0], math.prod(self.levels[1:])
        length = sum(map(len, self.tokens))
        if shared * parts * inner == length:
            made = self._all_split()
        elif len(self.tokens[-1]) == 0:
            none = self.tokens[-1]
            made = [(*outer, none, none) for outer in self.preassigned[0]]
        else:
            assignment = assign_documents(self.strategies, shared * inner)
            if assignment is None:
                return None
            if inner == 1 and assignment.area << self.area_shift > self.most_area:
                return None  # certainly too much, as areas are rounded down
            order = order_rows(self.strategies.stats, assignment)
            if len(self.tokens) > 1:
                order = [(self.tokens[-1][split], self.tokens[-1][rest]) for split, rest in order]
            made = [(*x, *part) for x, part in zip(self.preassigned[0], order, strict=True)]
        if any(sum(map(len, x)) * parts != length for x in made):
            return None
        return [_Group(self.levels[1:], self.ids, self.keys, self.most_area, x) for x in made]

    @functools.cached_property
    def area_shift(self) -> int:
        whole = len(self.tokens) == 1
        keys = self.keys if whole else self.keys[np.concatenate(self.tokens)]
        return max(0, int(keys.sum(dtype=np.int64)).bit_length() - _AREA_BITS)

    @functools.cached_property
    def preassigned(self) -> tuple[list[list[np.ndarray]], np.ndarray, np.ndarray]:
        """Tokens that the outer levels have split, dealt in tiles, equally many of each level to
        every part: for each part its tokens of each level, their number and their area."""
        parts = self.levels[0]
        areas, sizes = np.zeros((2, parts), np.int64)
        dealt: list[list[np.ndarray]] = [[] for _ in range(parts)]
        for tokens in self.tokens[:-1]:
            of_tile = self._tile_areas(tokens, parts * -(-len(tokens) // (TILE * parts)))
            part = deal_in_rounds(of_tile, np.argsort(-of_tile, kind="stable"), areas)
            areas = areas + _sums(part, of_tile, parts)
            of_token = part.repeat(TILE)[: len(tokens)]
            for number, mine in enumerate(dealt):
                mine.append(tokens[of_token == number])
            sizes += [len(mine[-1]) for mine in dealt]
        return dealt, sizes, areas

    @functools.cached_property
    def strategies(self) -> Strategies:
        own = sum(map(len, self.tokens)) // self.levels[0]
        rest = self.tokens[-1]
        row = (self.ids, self.keys)
        ids, keys = row if len(self.tokens) == 1 else (x[rest] for x in row)
        return Strategies(analyze_row(ids, keys, own, *self.preassigned[1:], self.area_shift))

    def _all_split(self) -> list[tuple[np.ndarray, ...]]:
        """Everything that is left is split as well: tiles of the group's order, dealt by area."""
        parts, tokens = self.levels[0], np.concatenate(self.tokens)
        ends = np.cumsum([len(x) for x in self.tokens[:-1]], dtype=np.int64)
        tiles = len(tokens) // TILE
        areas = self._tile_areas(tokens, tiles)
        level = ends.searchsorted(TILE * np.arange(tiles), side="right")
        heavy = np.argsort(-areas, kind="stable")
        by_level = heavy[np.argsort(level[heavy], kind="stable")]
        part = deal_in_rounds(areas, by_level, np.zeros(parts, np.int64))
        # Tiles of this level may be swapped.
        last = level == len(ends)
        wanted = areas.sum() // parts - _sums(np.where(last, -1, part), areas, parts)
        swapped = refine_by_swaps(np.where(last, part, -1), areas, heavy, wanted, tiles // parts)
        of_token = np.where(last, swapped, part).repeat(TILE)
        none = tokens[:0]
        levels = [*zip(self.tokens, np.split(of_token, ends), strict=True)]
        return [(*(x[to == number] for x, to in levels), none) for number in range(parts)]

    def _tile_areas(self, tokens: np.ndarray, tiles: int) -> np.ndarray:
        keys = np.zeros(tiles * TILE, np.int64)
        keys[: len(tokens)] = self.keys[tokens]
        return keys.reshape(tiles, TILE).sum(axis=1) >> self.area_shift


class RowStats(NamedTuple):
    """The D documents of a row, heaviest first, and the tokens and areas of its R parts.

    A chunk is a tile of rows of one document, counted from its end: the kernels then need not
    share the tile. Only documents that may be split have chunks, G of them.
    """

    own: int  # tokens of a part
    sizes: np.ndarray  # (R,) preassigned tokens
    base_areas: np.ndarray  # (R,) their areas
    lengths: np.ndarray  # (D,); padding is a document of none
    areas: np.ndarray  # (D,)
    padding: int  # tokens
    chunk_document: np.ndarray  # (G,)
    chunk_areas: np.ndarray  # (G,)
    heavy_chunks: np.ndarray  # (G,) the order of chunks, heaviest first
    first_chunk: np.ndarray  # of each document that has some
    # Tokens sorted by document, and in it by index: places are among these.
    ends: np.ndarray  # (D,) place behind each document
    # Runs of one id, sorted alike: a row has a few hundred of them, and 100,000 tokens.
    run_first: np.ndarray  # index in the sequence
    run_begin: np.ndarray  # place, and then the number of tokens
    run_document: np.ndarray
    run_padding: np.ndarray  # bool


def analyze_row(
    ids: np.ndarray,
    keys: np.ndarray,
    own: int,
    sizes: np.ndarray,
    base_areas: np.ndarray,
    shift: int,
) -> RowStats:
    """ids, keys: of its tokens; the rest as in RowStats; areas count 2**shift pairs."""
    first = np.append(0, np.flatnonzero(ids[1:] != ids[:-1]) + 1)
    of_run, run_sizes = ids[first], np.diff(first, append=len(ids))
    by_id = of_run.argsort(kind="stable")
    first, of_run, run_sizes = first[by_id], of_run[by_id], run_sizes[by_id]
    begin = np.append(0, run_sizes.cumsum())
    begins = np.append(True, of_run[1:] != of_run[:-1])
    document, padding = begins.cumsum() - 1, of_run == PADDING_SEGMENT_ID
    starts = begin[:-1][begins]
    ends = np.append(starts[1:], len(ids))

    empty = padding[begins]
    lengths = np.where(empty, 0, ends - starts)

    # Sums of keys between any two places where a run or a chunk begins.
    chunk_document, behind = _numbered(lengths // TILE)
    places = np.unique(np.append(begin[:-1], ends[chunk_document] - TILE * (behind + 1)))
    run = begin[1:-1].searchsorted(places, side="right")
    token = first[run] + places - begin[run]
    by_token = token.argsort()
    sums = np.zeros(len(places) + 1, np.int64)
    sums[1:][by_token] = np.add.reduceat(keys, token[by_token], dtype=np.int64)
    sums = sums.cumsum()

    def area(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return (sums[places.searchsorted(end)] - sums[places.searchsorted(start)]) >> shift

    areas = np.where(empty, -1, area(starts, ends))
    heaviest = (-areas).argsort(kind="stable")
    lengths, areas, ends = lengths[heaviest], areas[heaviest].clip(0), ends[heaviest]
    place = np.empty_like(heaviest)
    place[heaviest] = np.arange(len(heaviest))

    each = lengths[: _max_candidates(len(sizes))] // TILE
    first_chunk = each.cumsum() - each
    chunk_document, behind = _numbered(each)
    end = ends[chunk_document] - TILE * behind
    chunk_areas = area(end - TILE, end)
    heavy_chunks = (-chunk_areas).argsort(kind="stable")
    of_padding = int(run_sizes[padding].sum())
    chunks = (chunk_document, chunk_areas, heavy_chunks, first_chunk)
    runs = (ends, first, begin, place[document], padding)
    return RowStats(own, sizes, base_areas, lengths, areas, of_padding, *chunks, *runs)


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For `counts` things of each kind: the kind of each, and its index within the kind."""
    kind = np.arange(len(counts)).repeat(counts)
    return kind, np.arange(len(kind)) - (counts.cumsum() - counts)[kind]


def _max_candidates(ranks: int) -> int:
    """How many of the heaviest documents a strategy may split or deal, plus one round."""
    return max(_HEAVIEST) + (_ROUNDS + 1) * ranks


class Assignment(NamedTuple):
    """What each part gets of a row."""

    owner: np.ndarray  # (D,) the part that has all of a document, -1: it is split
    chunk_part: np.ndarray  # (G,) of chunks of split documents, -1: none
    chunks: np.ndarray  # (R,) how many
    rows: np.ndarray  # (R,) of split documents and of padding
    split: np.ndarray  # (R,) of split documents
    area: int  # of the part with most


def assign_documents(strategies: Strategies, shared: int) -> Assignment | None:
    """The assignment by the strategy with the least load among those tried that need at most
    `shared` rows of a part; None: there is none, or none that is balanced."""
    mean = strategies.mean
    most = least = mean + mean // _WORST + 1
    numbers: dict[tuple[int, int], int] = {}  # strategies that split the same documents count once
    for number, need in enumerate(strategies.need.tolist()):
        if need <= shared and (load := strategies.predicted_load(number)) < most:
            numbers.setdefault((load, need), number)
    best = None
    for (_, number), slack in zip(
        sorted((x[0], n) for x, n in numbers.items()), _SLACK, strict=False
    ):
        found = strategies.assignment(number)
        fits = found.split.max() + strategies.stats.sizes.max() <= shared
        if fits and found.area < least:
            least, best = found.area, found
        if least <= mean + mean // slack:
            break
    return best


class Strategies:
    """K strategies for a row. Each splits some of the heaviest documents and deals the next whole.
    What it needs is estimated by treating the small ones as a fluid that levels parts' tokens."""

    def __init__(self, stats: RowStats) -> None:
        self.stats = stats
        ranks, lengths, areas = len(stats.sizes), stats.lengths, stats.areas
        self.mean = int(areas.sum() + stats.base_areas.sum()) // ranks
        end = self._deal()
        split = self.owner < 0
        few = min(split.shape[1], len(lengths))
        split_tokens, split_areas, chunks = (
            (split[:, :few] * x[:few]).sum(axis=1) for x in (lengths, areas, lengths // TILE)
        )
        small = lengths.sum() - split_tokens - (self.tokens - stats.sizes).sum(axis=1)
        small_areas = areas.sum() - split_areas - (self.areas - stats.base_areas).sum(axis=1)
        tokens = water_fill(self.tokens, small)
        density = small_areas // small.clip(1)
        self.without_chunks = self.areas + density[:, None] * (tokens - self.tokens)
        rows = stats.own - tokens
        self.chunks = _chunks_each(rows, chunks)
        remainder = split_tokens - TILE * self.chunks.sum(axis=1)  # rows that fill no chunk
        # Only small documents of the reserve are cut.
        largest = np.append(lengths, 0)[end.clip(0, len(lengths))]
        tail = lengths[::-1].cumsum()[::-1]
        first = (-tail).searchsorted(-_reserve(largest, ranks, ranks * stats.own))
        cut = np.minimum(largest, lengths[first.clip(0, len(lengths) - 1)])
        need = np.minimum(rows, TILE * self.chunks - (-remainder // ranks)[:, None]) + stats.sizes
        self.need = np.minimum(need.max(axis=1) + np.where(small > 0, cut, 0), stats.own)
        self.predicted_load = functools.cache(self._predicted_load)
        self.assignment = functools.cache(self._assignment)

    def _deal(self) -> np.ndarray:
        """Deals the documents after those that are split, each to the part with the least load
        that has room. Returns how many each strategy has then handled, and sets `tokens` and
        `areas` (K, R) and `owner` (K, candidates): the part, -1: split, R: small, not dealt."""
        stats, ranks = self.stats, len(self.stats.sizes)
        number, length = _max_candidates(ranks), ranks * stats.own
        lengths, areas = (
            np.pad(x[:number], (0, max(0, number - len(x)))) for x in (stats.lengths, stats.areas)
        )
        total_tokens, total_areas = stats.lengths.sum(), stats.areas.sum()
        mean = max(total_areas // length, 1)  # area of a token
        tokens_ahead, areas_ahead = (x.cumsum() - x for x in (lengths, areas))
        density = (total_areas - areas_ahead) // (total_tokens - tokens_ahead).clip(1)
        heaviest, weight = (
            x.ravel() for x in np.meshgrid(_HEAVIEST, _TOKEN_WEIGHTS, indexing="ij")
        )
        owner = np.where(np.arange(number) < heaviest[:, None], -1, ranks)
        before = np.stack([stats.sizes, stats.base_areas])[:, None].repeat(len(weight), axis=1)
        read = (lengths, areas, density.clip(max=4 * mean), weight * mean)
        written = (heaviest, *before, owner)
        deal: Any = _deal if ext is None else ext.deal
        changed = [x.astype(np.int32) for x in written]
        most = stats.own, self.mean + self.mean // 34
        deal(*(x.astype(np.int32) for x in read), *most, _ROUNDS, *changed)
        end, self.tokens, self.areas, self.owner = (x.astype(np.int64) for x in changed)
        return end

    def _predicted_load(self, number: int) -> int:
        """The area of the part with the largest area."""
        _, sums = _chunks_of(self.stats, self.owner[number])
        area = self.without_chunks[number]
        more, _ = _level(sums, self.chunks[number], self.mean - area)
        return int((area + more).max())

    def _assignment(self, number: int) -> Assignment:
        stats, ranks = self.stats, len(self.stats.sizes)
        owner = np.full(len(stats.lengths), ranks)
        few = self.owner[number][: len(owner)]
        owner[: len(few)] = few
        owner = _deal_small(owner, stats.lengths, self.tokens[number], stats.own)
        rows = stats.own - stats.sizes - _sums(owner, stats.lengths, ranks)
        area = stats.base_areas + _sums(owner, stats.areas, ranks)
        index, sums = _chunks_of(stats, owner)
        each = _chunks_each(rows[None], np.array([len(index)]))[0]
        wanted = self.mean - area
        _, part = _level(sums, each, wanted)
        chunk_part = np.full(len(stats.chunk_areas), -1)
        chunk_part[index[: len(part)]] = part
        heavy, most = stats.heavy_chunks, stats.own // TILE
        chunk_part = refine_by_swaps(chunk_part, stats.chunk_areas, heavy, wanted, most)
        area = area + _sums(chunk_part, stats.chunk_areas, ranks)
        room = rows - TILE * each
        remainder = stats.lengths[owner < 0].sum() - TILE * each.sum()
        ends = (room - np.minimum(room, stats.padding // ranks)).cumsum()
        split = TILE * each + np.diff(np.minimum(ends, remainder), prepend=0)
        return Assignment(owner, chunk_part, each, rows, split, int(area.max()))


def _deal(
    lengths, areas, density, weight, most_tokens, most_area, rounds, end, tokens, area, owner
) -> None:
    """Replaces csrc/plan/deal.cc without the extension; changes the last four arrays in place."""
    ranks, last = tokens.shape[1], len(lengths) - 1
    lengths, areas, density = (x.tolist() for x in (lengths, areas, density))
    for n, of_token in enumerate(weight.tolist()):
        held, load = tokens[n].tolist(), area[n].tolist()
        for _ in range(rounds):
            begin = int(end[n])
            first = min(begin, last)
            per_token = of_token - density[first]
            turns = [
                (load[rank] + per_token * held[rank], rank)
                for rank in range(ranks)
                if held[rank] + lengths[first] <= most_tokens
                and load[rank] + areas[first] <= most_area
            ]
            # As if one by one: ranks take one each while those before, with theirs, have no less.
            least, taken = math.inf, 0
            for before, rank in sorted(turns):
                if before > least:
                    break
                document = min(begin + taken, last)
                least = min(least, before + areas[document] + per_token * lengths[document])
                held[rank] += lengths[document]
                load[rank] += areas[document]
                owner[n, begin + taken] = rank
                taken += 1
            if taken == 0:
                owner[n, begin] = -1  # fits nowhere: it is split
            end[n] += max(taken, 1)
        tokens[n], area[n] = held, load


def water_fill(levels: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """(K, R) levels raised by a total of `amount` (K,), the lowest first, as by water."""
    by_level = levels.argsort(axis=1, kind="stable")
    low = np.take_along_axis(levels, by_level, 1)
    number = np.arange(1, levels.shape[1] + 1)
    total = low.cumsum(axis=1) + amount[:, None]
    # With the n lowest under water the surface is at total // n: n is the most that fit.
    covered = (total // number >= low).sum(axis=1, keepdims=True)
    surface, remainder = np.divmod(np.take_along_axis(total, covered - 1, 1), covered)
    raised = np.where(number <= covered, surface + (number <= remainder), low)
    filled = np.empty_like(levels)
    np.put_along_axis(filled, by_level, raised, 1)
    return filled


def _chunks_each(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
    """(K, R) how many of `number` (K,) chunks each part takes, with room for `rows` rows: as evenly
    as possible; if there is not enough room, the rest is left."""
    room = rows // TILE
    spare = (room.sum(axis=1) - number).clip(0)
    # Rooms lowered from the highest: what is left out is raised as water is, upside down.
    return -water_fill(-room, spare)


def _chunks_of(stats: RowStats, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of split documents, heaviest first, and the area of the first n of them."""
    heavy = stats.heavy_chunks
    index = heavy[owner[stats.chunk_document[heavy]] < 0]
    return index, np.append(0, stats.chunk_areas[index].cumsum())


def _level(sums: np.ndarray, each: np.ndarray, wanted: np.ndarray) -> tuple[Any, Any]:
    """Assigns chunks of split documents: to each part `each` chunks with area near `wanted`.

    sums: area of the first n, heaviest first. Returns the areas (R,), and the part of each chunk.
    A part gets some of the heaviest and some of the lightest chunks that are left. Parts that need
    the most or the least area per chunk choose first, so that chunks in between are left for the
    others. With more of the heaviest instead of the lightest an area never decreases, so their best
    number is found by bisection.
    """
    number = int(each.sum())
    mean = sums[number] // max(number, 1)
    turns = (-abs(wanted.clip(0) // each.clip(1) - mean)).argsort(kind="stable")
    known, counts, aims = (x.tolist() for x in (sums[: number + 1], each, wanted))
    areas, heavies = [0] * len(each), [0] * len(each)
    begin, end, missed = 0, number, 0
    for turn, part in enumerate(turns.tolist()):
        count, aim = counts[part], aims[part]
        goal, behind = aim + missed // (len(each) - turn), end - count

        def area(heavy: int, begin: int = begin, behind: int = behind, end: int = end) -> int:
            return known[begin + heavy] - known[begin] + known[end] - known[behind + heavy]

        best = bisect.bisect_left(range(count), goal, key=area)
        if best and abs(area(best - 1) - goal) <= abs(area(best) - goal):
            best = bisect.bisect_left(range(best - 1), area(best - 1), key=area)
        areas[part], heavies[part] = area(best), best
        missed += aim - area(best)
        begin, end = begin + best, behind + best
    front, back = np.array(heavies)[turns], (each - heavies)[turns]
    return np.array(areas), np.concatenate([turns.repeat(front), turns.repeat(back)[::-1]])


def refine_by_swaps(
    part_of: np.ndarray, areas: np.ndarray, heavy: np.ndarray, wanted: np.ndarray, most: int
) -> np.ndarray:
    """(G,) the part of each chunk, -1: none, with chunks swapped until areas are as wanted.

    Levelling leaves a part up to half a chunk from its target. The part with the largest and the
    one with the smallest area swap the two chunks that bring them closest, then the next pair
    inwards, and so on; all pairs at once, a few times. areas, heavy: (G,) of chunks, and their
    order, the largest first; wanted: (R,) of parts; most: the most chunks of a part.
    """
    ranks = len(wanted)
    if ranks < 2 or len(part_of) == 0:
        return part_of
    # (R, columns) the chunks that each offers: every n-th, by area.
    stride = -(-most // _OFFERED)
    columns = -(-most // stride)
    by_part = heavy[part_of[heavy] >= 0]
    by_part = by_part[part_of[by_part].argsort(kind="stable")]
    count = np.bincount(part_of[by_part], minlength=ranks)[:, None]
    place = stride * np.arange(columns)
    there = place < count
    slot = np.where(there, count.cumsum()[:, None] - count + place, 0)
    index = np.where(there, by_part[slot] if len(by_part) else -1, -1)
    offered = np.where(there, areas[index], 0)
    short = wanted - _sums(part_of, areas, ranks)
    # Without a chunk to give or to take, the difference is too large to be the best.
    missing = ~there * (_HUGE // 2)
    pairs = ranks // 2
    for _ in range(_SWAPS):
        order = short.argsort(kind="stable")
        over, under = order[:pairs], order[ranks - pairs :][::-1]
        amount = (short[under] - short[over]) // 2
        give = offered[over] + missing[over] - amount[:, None]
        take = offered[under] - missing[under]
        left = abs(give[:, :, None] - take[:, None, :]).reshape(pairs, -1)
        best = left.argmin(axis=1)
        better = np.flatnonzero(left[np.arange(pairs), best] < amount)
        if not len(better):
            break
        over, under = over[better], under[better]
        mine, other = np.divmod(best[better], columns)
        for x in (index, offered):
            x[over, mine], x[under, other] = x[under, other], x[over, mine]
        gained = offered[under, other] - offered[over, mine]
        short[over] += gained
        short[under] -= gained
    swapped = part_of.copy()
    swapped[index[there]] = np.arange(ranks).repeat(columns).reshape(there.shape)[there]
    return swapped


def _deal_small(owner: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, own: int) -> np.ndarray:
    """Small documents (owner R) put in a line, mixed, and cut so that parts are equally long.

    A document that is cut is split. To keep it short, the shortest documents are a reserve: the
    line of the others is cut between documents, and that of the reserve where each part is full.
    """
    ranks, small = len(tokens), owner == len(tokens)
    sizes = np.where(small, lengths, 0)
    tail = sizes[::-1].cumsum()[::-1]
    share = water_fill(tokens[None], tail[:1])[0] - tokens
    mixed = _mixed(len(sizes))
    reserved = (tail <= _reserve(sizes.max(), ranks, ranks * own))[mixed]
    sizes = sizes[mixed]
    line = np.where(reserved, 0, sizes)
    end = line.cumsum()
    room = share + water_fill(-share[None], end[-1:])[0]
    whole = np.minimum(room.cumsum().searchsorted(end - line, side="right"), ranks - 1)
    whole = np.where(reserved, -1, whole)
    left = share - _sums(whole, line, ranks)
    if left.min() >= 0:
        share, line = left, np.where(reserved, sizes, 0)
    else:  # the line of all is cut
        whole, line = np.full_like(whole, -1), sizes
    end, ends = line.cumsum(), share.cumsum()
    first, last = (ends.searchsorted(x, side="right") for x in (end - line, end - 1))
    cut = np.where(first == last, np.minimum(first, ranks - 1), -1)
    dealt = np.empty_like(owner)
    dealt[mixed] = np.where(whole >= 0, whole, cut)
    return np.where(small, dealt, owner)


def _reserve(largest: Any, ranks: int, length: Any) -> Any:
    """Tokens of the smallest documents, kept to level parts to which the others are dealt whole:
    twice the largest document for each part."""
    return 2 * ranks * np.minimum(largest, length // (2 * ranks))


@functools.lru_cache(64)
def _mixed(number: int) -> np.ndarray:
    """An order of `number` items of which any part is mixed."""
    golden = np.uint32(2654435769)  # 2**32 over the golden ratio
    return (np.arange(number, dtype=np.uint32) * golden >> np.uint32(1)).argsort(kind="stable")


def _sums(part_of: np.ndarray, x: np.ndarray, ranks: int) -> np.ndarray:
    """(ranks,) sums of x (N,) by part; those of no part (-1) and of R are left out."""
    return np.bincount(part_of + 1, x, ranks + 2)[1 : ranks + 1].astype(np.int64)


def order_rows(stats: RowStats, assignment: Assignment) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each part its tokens of split documents, and the others in the order of the row.

    Chunks come first, then rows of split documents that fill no chunk: each in the row's order.
    """
    # Runs are cut into pieces with one destination: at chunks, and where the line of rows that fill
    # no chunk, or of padding, continues on the next part.
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
        # Part -1 of a split document: in no chunk.
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
    """The indices at which a line of pieces is cut at `ends`, which are counts of its tokens."""
    line = size.cumsum()
    ends = ends[(ends > 0) & (ends < size.sum())]
    piece = line.searchsorted(ends, side="right")
    return place[piece] + ends - (line[piece] - size[piece])
