"""Decides which documents of a row a plan of kind "local" splits, and the rank of each other one.

1. `analyze_row`: the lengths and attended areas of the documents, heaviest first.
2. `assign_documents`: tries a few dozen strategies, which split some of the heaviest documents and
   deal the others whole, each to the rank with the least load (longest processing time first,
   Graham 1969). Then small documents level the ranks' tokens by water-filling, chunks of split
   documents level the areas, and ranks swap chunks.

This is computed on the host: in numpy, and documents are dealt in C++ (csrc/plan). A rank is
called a part, because with levels it may be a group of ranks.
"""

from __future__ import annotations

import bisect
import functools
from typing import Any, NamedTuple

import numpy as np

from packax._src.core.spec import PADDING_SEGMENT_ID, TILE
from packax._src.ops.ffi import ext

_HEAVIEST = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # documents that strategies split
_TOKEN_WEIGHTS = (0, 2, 8)  # load per token when dealing, in mean areas of a token
_ROUNDS = 16  # rounds of dealing; the remaining documents are called small
_SLACK = (256, 256, 256, 40, 40, 40, 40, 40)  # the nth best is taken up to 1 + 1 / _SLACK[n]
_WORST = 8  # and none above 1 + 1 / _WORST, both relative to the mean
_SWAPS = 5  # rounds of swaps
_OFFERED = 16  # chunks that a part offers in each round, at most
_HUGE = 2**30


class RowStats(NamedTuple):
    """The D documents of a row, heaviest first, and the preassigned tokens of its R parts.

    A chunk is TILE rows of one document, counted from the document's end, so that tiles of the
    kernels do not mix documents. Only documents that may be split have chunks, G in total.
    """

    own: int  # tokens per part
    sizes: np.ndarray  # (R,) numbers of preassigned tokens
    base_areas: np.ndarray  # (R,) areas of the preassigned tokens
    lengths: np.ndarray  # (D,); padding counts as a document of length 0
    areas: np.ndarray  # (D,)
    padding: int  # padding tokens
    chunk_document: np.ndarray  # (G,)
    chunk_areas: np.ndarray  # (G,)
    heavy_chunks: np.ndarray  # (G,) indices of chunks, heaviest first
    first_chunk: np.ndarray  # index of the first chunk of each document that may be split
    # A place is an index into the tokens sorted by id, then by index in the sequence.
    ends: np.ndarray  # (D,) the place behind each document
    # Runs of one id, sorted in the same way. A row may have 100,000 tokens, but few runs.
    run_first: np.ndarray  # index of the first token in the sequence
    run_begin: np.ndarray  # place of the first token; the last entry is the number of tokens
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
    """ids, keys: the segment id of each token, and the number of keys to which it attends.

    own, sizes, base_areas: as in RowStats. Areas are in units of 2**shift pairs.
    """
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

    # Prefix sums of keys at all places where a run or a chunk begins.
    chunk_document, behind = _kind_and_index(lengths // TILE)
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
    chunk_document, behind = _kind_and_index(each)
    end = ends[chunk_document] - TILE * behind
    chunk_areas = area(end - TILE, end)
    heavy_chunks = (-chunk_areas).argsort(kind="stable")
    of_padding = int(run_sizes[padding].sum())
    chunks = (chunk_document, chunk_areas, heavy_chunks, first_chunk)
    runs = (ends, first, begin, place[document], padding)
    return RowStats(own, sizes, base_areas, lengths, areas, of_padding, *chunks, *runs)


def _kind_and_index(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each item and its index within the kind, for counts[k] items of kind k."""
    kind = np.arange(len(counts)).repeat(counts)
    return kind, np.arange(len(kind)) - (counts.cumsum() - counts)[kind]


def _max_candidates(ranks: int) -> int:
    """How many of the heaviest documents a strategy may split or deal, plus one round."""
    return max(_HEAVIEST) + (_ROUNDS + 1) * ranks


class Assignment(NamedTuple):
    """The division of a row among its parts."""

    owner: np.ndarray  # (D,) the part of each document; -1: split
    chunk_part: np.ndarray  # (G,) the part of each chunk of split documents; -1: none
    chunks: np.ndarray  # (R,) number of chunks
    rows: np.ndarray  # (R,) rows of split documents and padding
    split: np.ndarray  # (R,) rows of split documents
    area: int  # the largest area of a part


def assign_documents(strategies: Strategies, shared: int) -> Assignment | None:
    """The best assignment found that needs at most `shared` rows of each part.

    Strategies are tried in the order of their predicted loads. None: no assignment fits and is
    balanced.
    """
    mean = strategies.mean
    most = least = mean + mean // _WORST + 1
    numbers: dict[tuple[int, int], int] = {}  # one per (load, need): equal strategies count once
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

    The rows that each needs are estimated as if small documents were a fluid that levels the parts.
    """

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
        # Only small documents in the reserve are cut.
        largest = np.append(lengths, 0)[end.clip(0, len(lengths))]
        tail = lengths[::-1].cumsum()[::-1]
        first = (-tail).searchsorted(-_reserve(largest, ranks, ranks * stats.own))
        cut = np.minimum(largest, lengths[first.clip(0, len(lengths) - 1)])
        need = np.minimum(rows, TILE * self.chunks - (-remainder // ranks)[:, None]) + stats.sizes
        self.need = np.minimum(need.max(axis=1) + np.where(small > 0, cut, 0), stats.own)
        self.predicted_load = functools.cache(self._predicted_load)
        self.assignment = functools.cache(self._assignment)

    def _deal(self) -> np.ndarray:
        """Deals the documents after the split ones, each to the least loaded part with enough room.

        Returns how many documents each strategy has split or dealt. Sets `tokens` and `areas` (K,
        R), and `owner` (K, candidates): the part; -1: split; R: small, not dealt yet.
        """
        stats, ranks = self.stats, len(self.stats.sizes)
        number, length = _max_candidates(ranks), ranks * stats.own
        lengths, areas = (
            np.pad(x[:number], (0, max(0, number - len(x)))) for x in (stats.lengths, stats.areas)
        )
        total_tokens, total_areas = stats.lengths.sum(), stats.areas.sum()
        mean = max(total_areas // length, 1)  # of one token
        tokens_ahead, areas_ahead = (x.cumsum() - x for x in (lengths, areas))
        density = (total_areas - areas_ahead) // (total_tokens - tokens_ahead).clip(1)
        heaviest, weight = (
            x.ravel() for x in np.meshgrid(_HEAVIEST, _TOKEN_WEIGHTS, indexing="ij")
        )
        owner = np.where(np.arange(number) < heaviest[:, None], -1, ranks)
        before = np.stack([stats.sizes, stats.base_areas])[:, None].repeat(len(weight), axis=1)
        read = (lengths, areas, density.clip(max=4 * mean), weight * mean)
        written = (heaviest, *before, owner)
        changed = [x.astype(np.int32) for x in written]
        most = stats.own, self.mean + self.mean // 34
        assert ext is not None  # local_plan.py checked it
        ext.deal(*(x.astype(np.int32) for x in read), *most, _ROUNDS, *changed)
        end, self.tokens, self.areas, self.owner = (x.astype(np.int64) for x in changed)
        return end

    def _predicted_load(self, number: int) -> int:
        """The predicted largest area of a part."""
        _, sums = _chunks_of(self.stats, self.owner[number])
        area = self.without_chunks[number]
        more, _ = _level_areas(sums, self.chunks[number], self.mean - area)
        return int((area + more).max())

    def _assignment(self, number: int) -> Assignment:
        stats, ranks = self.stats, len(self.stats.sizes)
        owner = np.full(len(stats.lengths), ranks)
        few = self.owner[number][: len(owner)]
        owner[: len(few)] = few
        owner = _deal_small(owner, stats.lengths, self.tokens[number], stats.own)
        rows = stats.own - stats.sizes - sums_by_part(owner, stats.lengths, ranks)
        area = stats.base_areas + sums_by_part(owner, stats.areas, ranks)
        index, sums = _chunks_of(stats, owner)
        each = _chunks_each(rows[None], np.array([len(index)]))[0]
        wanted = self.mean - area
        _, part = _level_areas(sums, each, wanted)
        chunk_part = np.full(len(stats.chunk_areas), -1)
        chunk_part[index[: len(part)]] = part
        heavy, most = stats.heavy_chunks, stats.own // TILE
        chunk_part = refine_by_swaps(chunk_part, stats.chunk_areas, heavy, wanted, most)
        area = area + sums_by_part(chunk_part, stats.chunk_areas, ranks)
        room = rows - TILE * each
        remainder = stats.lengths[owner < 0].sum() - TILE * each.sum()
        ends = (room - np.minimum(room, stats.padding // ranks)).cumsum()
        split = TILE * each + np.diff(np.minimum(ends, remainder), prepend=0)
        return Assignment(owner, chunk_part, each, rows, split, int(area.max()))


def water_fill(levels: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """(K, R) levels raised by a total of `amount` (K,), lowest first, like filling with water."""
    by_level = levels.argsort(axis=1, kind="stable")
    low = np.take_along_axis(levels, by_level, 1)
    number = np.arange(1, levels.shape[1] + 1)
    total = low.cumsum(axis=1) + amount[:, None]
    # If the n lowest are under water, the surface is at total // n. n is the largest possible.
    covered = (total // number >= low).sum(axis=1, keepdims=True)
    surface, remainder = np.divmod(np.take_along_axis(total, covered - 1, 1), covered)
    raised = np.where(number <= covered, surface + (number <= remainder), low)
    filled = np.empty_like(levels)
    np.put_along_axis(filled, by_level, raised, 1)
    return filled


def _chunks_each(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
    """(K, R): the number of chunks of each part, `number` (K,) in total, divided evenly.

    rows: the free rows of each part. Chunks that exceed them are left over.
    """
    room = rows // TILE
    spare = (room.sum(axis=1) - number).clip(0)
    # Lowers the largest rooms until their sum is `number`: water-filling upside down.
    return -water_fill(-room, spare)


def _chunks_of(stats: RowStats, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the chunks of split documents, heaviest first, and prefix sums of their areas."""
    heavy = stats.heavy_chunks
    index = heavy[owner[stats.chunk_document[heavy]] < 0]
    return index, np.append(0, stats.chunk_areas[index].cumsum())


def _level_areas(sums: np.ndarray, each: np.ndarray, wanted: np.ndarray) -> tuple[Any, Any]:
    """Assigns chunks of split documents: `each` chunks to each part, with an area near `wanted`.

    sums: prefix sums of the chunks' areas, heaviest first. Returns the area of each part (R,), and
    the part of each chunk.

    A part takes some of the heaviest and some of the lightest remaining chunks. Parts that need the
    most or the least area per chunk choose first, which leaves chunks in between for the others.
    The area never decreases with more of the heaviest chunks, so bisection finds their number.
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
    """Swaps chunks between parts, to bring the parts' areas closer to the wanted areas.

    Levelling leaves a part up to half a chunk away from its target. The part with the largest
    excess and the one with the largest deficit swap the two chunks that bring them closest, as do
    the next such pairs, all at once. This is repeated a few times.

    part_of: (G,) the part of each chunk; -1: none. areas: (G,) areas of chunks. heavy: (G,) indices
    of chunks, heaviest first. wanted: (R,) the wanted area of each part. most: the maximum number
    of chunks of a part. Returns the new part_of.
    """
    ranks = len(wanted)
    if ranks < 2 or len(part_of) == 0:
        return part_of
    # (R, columns) the chunks that each part offers: every n-th, by area.
    stride = -(-most // _OFFERED)
    columns = -(-most // stride)
    by_part = heavy[part_of[heavy] >= 0]
    by_part = by_part[part_of[by_part].argsort(kind="stable")]
    count = np.bincount(part_of[by_part], minlength=ranks)[:, None]
    place = stride * np.arange(columns)
    is_chunk = place < count
    slot = np.where(is_chunk, count.cumsum()[:, None] - count + place, 0)
    index = np.where(is_chunk, by_part[slot] if len(by_part) else -1, -1)
    offered = np.where(is_chunk, areas[index], 0)
    short = wanted - sums_by_part(part_of, areas, ranks)
    # A huge difference for missing chunks, so that they are never the best choice.
    missing = ~is_chunk * (_HUGE // 2)
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
        given, taken = np.divmod(best[better], columns)
        for x in (index, offered):
            x[over, given], x[under, taken] = x[under, taken], x[over, given]
        gained = offered[under, taken] - offered[over, given]
        short[over] += gained
        short[under] -= gained
    swapped = part_of.copy()
    swapped[index[is_chunk]] = np.arange(ranks).repeat(columns).reshape(is_chunk.shape)[is_chunk]
    return swapped


def _deal_small(owner: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, own: int) -> np.ndarray:
    """Assigns the small documents (owner R) so that all parts have the same length.

    The documents are put in a line, in a mixed order, which is cut into parts. Cutting a document
    splits it. To keep split documents short, the shortest documents are a reserve: the line of the
    others is cut only between documents, and the line of the reserve where a part is full.
    """
    ranks, small = len(tokens), owner == len(tokens)
    sizes = np.where(small, lengths, 0)
    tail = sizes[::-1].cumsum()[::-1]
    share = water_fill(tokens[None], tail[:1])[0] - tokens
    mixed = _mixed_order(len(sizes))
    reserved = (tail <= _reserve(sizes.max(), ranks, ranks * own))[mixed]
    sizes = sizes[mixed]
    line = np.where(reserved, 0, sizes)
    end = line.cumsum()
    room = share + water_fill(-share[None], end[-1:])[0]
    whole = np.minimum(room.cumsum().searchsorted(end - line, side="right"), ranks - 1)
    whole = np.where(reserved, -1, whole)
    left = share - sums_by_part(whole, line, ranks)
    if left.min() >= 0:
        share, line = left, np.where(reserved, sizes, 0)
    else:  # cut the line of all small documents
        whole, line = np.full_like(whole, -1), sizes
    end, ends = line.cumsum(), share.cumsum()
    first, last = (ends.searchsorted(x, side="right") for x in (end - line, end - 1))
    cut = np.where(first == last, np.minimum(first, ranks - 1), -1)
    dealt = np.empty_like(owner)
    dealt[mixed] = np.where(whole >= 0, whole, cut)
    return np.where(small, dealt, owner)


def _reserve(largest: Any, ranks: int, length: Any) -> Any:
    """The number of tokens in the reserve of smallest documents: twice the largest document for
    each part. The reserve levels the parts after the others are dealt whole."""
    return 2 * ranks * np.minimum(largest, length // (2 * ranks))


@functools.lru_cache(64)
def _mixed_order(number: int) -> np.ndarray:
    """A permutation of `number` items in which every stretch is a mixture of all."""
    golden = np.uint32(2654435769)  # 2**32 over the golden ratio
    return (np.arange(number, dtype=np.uint32) * golden >> np.uint32(1)).argsort(kind="stable")


def sums_by_part(part_of: np.ndarray, x: np.ndarray, ranks: int) -> np.ndarray:
    """(ranks,) sums of x (N,) by part; items of the parts -1 and R are left out."""
    return np.bincount(part_of + 1, x, ranks + 2)[1 : ranks + 1].astype(np.int64)
