"""Which documents a local plan splits, found by trying a few dozen ways at once.

A way is how many of the heaviest documents are split, and what counts when the others are dealt.
Those are dealt whole, heaviest first, each to the rank with least so far (Graham 1969), as long as
they fit; the rows of split documents level the ranks afterwards, in chunks of a tile of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from packax._src.context.array_ops import HostOps
from packax._src.core.shapes import TILE
from packax._src.ops.ffi import ext

_HEAVIEST = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of which so many are split
_TOKENS = (0, 2, 8)  # how much a token weighs, in rows of mean area, beside area
_ROUNDS = 16  # of dealing; what is left then is light
_HUGE = 2**30


class Documents(NamedTuple):
    """Of one row, heaviest first; behind them entries of 0."""

    lengths: Any  # (D,) int32
    areas: Any  # (D,) attended pairs, in units of which the whole row has less than 2**26
    chunk_document: Any  # (G,) whose chunk it is, of those seen, or their number: nobody's
    chunk_areas: Any  # (G,) a document's last rows first
    chunk_order: Any  # (G,) by area, the largest first
    padding: Any  # () tokens


class Base(NamedTuple):
    """What ranks hold before, (R,) each: rows of documents that are split over hosts."""

    tokens: Any
    areas: Any


class Search(NamedTuple):
    """What of each way (K, ...) is needed to carry it out."""

    end: Any  # (K,) documents dealt with
    tokens: Any  # (K, R) of the base and the whole documents dealt
    areas: Any  # (K, R)
    owner: Any  # (K, seen) the rank that each document lies on whole, -1: split, `ranks`: light


def ways() -> tuple[np.ndarray, np.ndarray]:
    heaviest, tokens = np.meshgrid(_HEAVIEST, _TOKENS, indexing="ij")
    return heaviest.reshape(-1).astype(np.int32), tokens.reshape(-1).astype(np.int32)


def seen(ranks: int) -> int:
    """How many of the heaviest documents may be dealt with or split here, and a round more."""
    return max(_HEAVIEST) + (_ROUNDS + 1) * ranks


def window(ops: HostOps, x: Any, size: int) -> Any:
    """The first `size` entries, 0 behind the last."""
    xp = ops.xp
    return xp.concatenate([x[:size], xp.zeros(max(0, size - x.shape[0]), np.int32)])


def deal(ops: HostOps, documents: Documents, base: Base, length: int, limit: Any) -> Search:
    """Every way's documents dealt; `limit`: the most area that a rank may get."""
    ranks = base.tokens.shape[0]
    xp = ops.xp
    heaviest, weight = (xp.asarray(x) for x in ways())
    number = len(heaviest)
    size = seen(ranks)
    lengths, areas = (window(ops, x, size) for x in (documents.lengths, documents.areas))
    before = [xp.concatenate([xp.zeros(1, np.int32), ops.sums(x)]) for x in (lengths, areas)]
    all_tokens = documents.lengths.sum(dtype=np.int32)
    all_area = documents.areas.sum(dtype=np.int32)
    mean = xp.maximum(all_area // length, 1)
    own = length // ranks
    offered = xp.arange(ranks, dtype=np.int32)

    # Of each that may be the first of a round: the next, one for each rank, and a token's mean area
    # in what is behind them.
    index = xp.arange(size, dtype=np.int32)
    ahead = xp.minimum(index[:, None] + offered, size - 1)
    items = xp.stack([lengths[ahead], areas[ahead]])
    light = (all_area - before[1][:-1]) // xp.maximum(all_tokens - before[0][:-1], 1)
    light = xp.minimum(light, 4 * mean)
    weight = weight * mean
    owner = xp.where(index < heaviest[:, None], np.int32(-1), np.int32(ranks))
    held = ops.copied(xp.broadcast_to(xp.stack(base)[:, None], (2, number, ranks)))
    if xp is np and ext is not None:  # the same in C++
        end, most = heaviest.copy(), (own, int(limit))
        ext.deal(lengths, areas, light, weight, *most, _ROUNDS, end, *held, owner)
        return Search(end, held[0], held[1], owner)
    bounds = xp.stack([xp.asarray(own, np.int32), limit])[:, None, None]

    def one_round(n: Any, state: Any) -> Any:
        end, held, owner = state
        offer = items.take(end, axis=1)
        per_token = (weight - light.take(end))[:, None]
        fits = (held + offer[:, :, :1] <= bounds).all(axis=0)
        load = xp.where(fits, held[1] + per_token * held[0], _HUGE)
        mine, load = ops.sorted(load)
        after = ops.least_so_far(load + offer[1] + per_token * offer[0])
        good = load < _HUGE
        # As if one by one: a rank takes one while those before it, with theirs, have no less.
        first = load[:, 1:] <= after[:, :-1]
        good = ops.all_so_far(xp.concatenate([good[:, :1], good[:, 1:] & first], axis=1))
        count = good.sum(axis=1, dtype=np.int32)
        held = ops.added(held, mine, offer * good)
        # Who is offered one and takes none splits it.
        none = (offered == 0) & (count == 0)[:, None]
        got = xp.where(good, mine, xp.where(none, np.int32(-1), np.int32(ranks)))
        owner = ops.written(owner, end, got)
        return end + xp.maximum(count, 1), held, owner

    def done(state: Any) -> bool:
        return bool(state[0].min() >= documents.lengths.shape[0])

    state = (heaviest, held, owner)
    end, held, owner = ops.repeat(_ROUNDS, one_round, state, done)
    return Search(end, held[0], held[1], owner)


def filled(ops: HostOps, levels: Any, amount: Any) -> Any:
    """(K, R) levels raised by `amount` (K,) in all, the lowest first, as water would."""
    xp = ops.xp
    ranks = levels.shape[1]
    by_level, place = ops.ranked(levels)
    low = ops.along(levels, by_level)
    number = xp.arange(1, ranks + 1, dtype=np.int32)
    total = ops.sums(low) + amount[:, None]
    # With the n lowest under water the surface is at total // n: n is the most that fit.
    covered = (total // number >= low).sum(axis=1, dtype=np.int32)
    rank = xp.arange(ranks, dtype=np.int32)
    total = ops.along(total, covered[:, None] - 1)
    surface = total // covered[:, None] + (rank < total % covered[:, None])
    raised = xp.where(rank < covered[:, None], surface, low)
    return ops.along(raised, place)


def kept_back(ops: HostOps, largest: Any, ranks: int, length: int) -> Any:
    """Tokens of the smallest light documents, which level ranks that others are dealt to whole:
    twice the largest for each."""
    return 2 * ranks * ops.xp.minimum(largest, length // (2 * ranks))


def chunks_each(ops: HostOps, rows: Any, number: Any) -> Any:
    """(K, R) how many of `number` (K,) chunks each rank takes that has room for `rows` rows.

    As even as can be; where the room is too small the rest stays over.
    """
    xp = ops.xp
    room = rows // TILE
    spare = xp.maximum(room.sum(axis=1, dtype=np.int32) - number, 0)
    # Rooms lowered from the highest: what is left out is raised as water is, upside down.
    return -filled(ops, -room, spare)


class Chunks(NamedTuple):
    """Of split documents, heaviest first; others behind them."""

    index: Any  # (K, G) of the row's chunks
    number: Any  # (K,) how many there are
    sums: Any  # (K, G + 1) area of the first so many


def chunks_of(ops: HostOps, documents: Documents, split: Any) -> Chunks:
    """split: (K, seen) bool."""
    xp = ops.xp
    ways_, heavy = split.shape[0], documents.chunk_order
    none = xp.zeros((ways_, 1), np.int32)
    split = xp.concatenate([split, none != 0], axis=1)
    chosen = split[:, documents.chunk_document[heavy]]
    front = ops.in_front(chosen)
    areas = xp.where(chosen, documents.chunk_areas[heavy], 0)
    areas = ops.along(areas, front)
    sums = xp.concatenate([none, ops.sums(areas)], axis=1)
    return Chunks(heavy[front], chosen.sum(axis=1, dtype=np.int32), sums)


class Levelled(NamedTuple):
    """(K, R) each."""

    areas: Any  # of the chunks that a rank gets
    heavy: Any  # how many of them are of the heaviest left
    turns: Any  # the ranks in the order in which they choose


def level(ops: HostOps, chunks: Chunks, each: Any, wanted: Any, most: int) -> Levelled:
    """Chunks of split documents, to each rank as many as `each` says and area near `wanted`.

    A rank gets some of the heaviest that are left and some of the lightest: those with most or
    least area a chunk to go choose first, so that what is between is left for the others.
    """
    xp = ops.xp
    ways_, ranks = each.shape
    all_chunks = each.sum(axis=1, dtype=np.int32)[:, None]
    sums, slots = chunks.sums, chunks.sums.shape[1] - 1
    mean = ops.along(sums, all_chunks) // xp.maximum(all_chunks, 1)
    turns, _ = ops.ranked(-xp.abs(xp.maximum(wanted, 0) // xp.maximum(each, 1) - mean))
    if xp is np:
        found = [_level_one(*x) for x in zip(sums, each, wanted, turns, strict=True)]
        got, heavy = (np.array(x, np.int32) for x in zip(*found, strict=True))
        return Levelled(got, heavy, turns)
    heavies = xp.arange(most + 1, dtype=np.int32)

    def at(index: Any) -> Any:
        return ops.along(sums, xp.minimum(xp.maximum(index, 0), slots))

    def one_rank(n: Any, state: Any) -> Any:
        begin, end, got, heavy, missed = state
        rank = turns[:, n][:, None]
        number = ops.along(each, rank)
        aim = ops.along(wanted, rank) + missed // (ranks - n)
        area = at(begin + heavies) - at(begin) + at(end) - at(end - number + heavies)
        best = xp.where(heavies <= number, xp.abs(area - aim), _HUGE).argmin(axis=1)
        best = best.astype(np.int32)[:, None]
        here = xp.arange(ranks, dtype=np.int32) == rank
        area = ops.along(area, best)
        missed = missed + ops.along(wanted, rank) - area
        got, heavy = xp.where(here, area, got), xp.where(here, best, heavy)
        return begin + best, end - number + best, got, heavy, missed

    zeros = xp.zeros((ways_, ranks), np.int32)
    none = 0 * all_chunks
    state = (none, all_chunks, zeros, zeros, none)
    _, _, got, heavy, _ = ops.repeat(ranks, one_rank, state)
    return Levelled(got, heavy, turns)


def _level_one(
    sums: np.ndarray, each: np.ndarray, wanted: np.ndarray, turns: np.ndarray
) -> tuple[list[int], list[int]]:
    """One way's areas and heavy: with numbers of Python, which are quicker than arrays of one.

    With more of the heaviest in place of the lightest an area never gets smaller, so a rank's best
    number of them is found by bisection, and is the first of those that are as good.
    """
    each, wanted = each.tolist(), wanted.tolist()
    begin, end, missed = 0, sum(each), 0
    known = sums[: end + 1].tolist()  # area of the first so many
    got, heavy = [0] * len(each), [0] * len(each)
    for left, rank in zip(range(len(each), 0, -1), turns.tolist(), strict=True):
        number = each[rank]
        behind = end - number
        aim = wanted[rank] + missed // left
        base = known[end] - known[begin]

        def first(
            least: int, most: int, begin: int = begin, behind: int = behind, base: int = base
        ) -> int:
            """The first number whose area is `least` or more, `most` if none below is."""
            low, high = 0, most
            while low < high:
                middle = (low + high) // 2
                if base + known[begin + middle] - known[behind + middle] < least:
                    low = middle + 1
                else:
                    high = middle
            return low

        best = first(aim, number)
        area = base + known[begin + best] - known[behind + best]
        if best:
            below = base + known[begin + best - 1] - known[behind + best - 1]
            if abs(below - aim) <= abs(area - aim):
                best, area = first(below, best - 1), below
        got[rank], heavy[rank] = area, best
        missed += wanted[rank] - area
        begin, end = begin + best, behind + best
    return got, heavy


def chunk_ranks(ops: HostOps, chunks: Chunks, each: Any, levelled: Levelled) -> Any:
    """(G,) which rank gets each of the row's chunks, -1: none does; of one way."""
    xp = ops.xp
    turns = levelled.turns[0]
    heavy, each = levelled.heavy[0][turns], each[0][turns]
    ends = ops.sums(heavy), ops.sums(each - heavy)
    number = each.sum(dtype=np.int32)
    place = xp.arange(chunks.index.shape[1], dtype=np.int32)
    turn = xp.where(
        place < ends[0][-1],
        ops.passed(ends[0], place),
        ops.passed(ends[1], number - 1 - place),
    )
    rank = xp.where(place < number, turns[xp.minimum(turn, len(turns) - 1)], np.int32(-1))
    return ops.put(chunks.index[0], rank)


class Needs(NamedTuple):
    """What each way (K, ...) needs, the light documents taken as a fluid that levels tokens."""

    rows: Any  # (K,) shared rows of a rank, at most
    area: Any  # (K, R) without chunks
    each: Any  # (K, R) chunks


def needs(ops: HostOps, documents: Documents, base: Base, search: Search, length: int) -> Needs:
    xp = ops.xp
    ranks = base.tokens.shape[0]
    own = length // ranks
    size = search.owner.shape[1]
    lengths, areas = (window(ops, x, size) for x in (documents.lengths, documents.areas))
    split = search.owner < 0
    split_tokens, split_areas, chunks = (
        xp.where(split, x, 0).sum(axis=1, dtype=np.int32) for x in (lengths, areas, lengths // TILE)
    )
    all_tokens = documents.lengths.sum(dtype=np.int32)
    all_area = documents.areas.sum(dtype=np.int32)
    dealt = (search.tokens - base.tokens).sum(axis=1, dtype=np.int32)
    dealt_areas = (search.areas - base.areas).sum(axis=1, dtype=np.int32)
    light = all_tokens - split_tokens - dealt
    light_area = all_area - split_areas - dealt_areas
    tokens = filled(ops, search.tokens, light)
    more = tokens - search.tokens
    area = search.areas + light_area[:, None] // xp.maximum(light, 1)[:, None] * more
    rows = own - tokens
    each = chunks_each(ops, rows, chunks)
    # Rows that fill no chunk, and those of the light documents that ranks share.
    over = split_tokens - TILE * each.sum(axis=1, dtype=np.int32)
    largest = xp.take(lengths, search.end)
    # What is cut is of those kept back.
    tail = all_tokens - ops.sums(documents.lengths) + documents.lengths
    first = ops.passed(-tail, -1 - kept_back(ops, largest, ranks, length))
    last = documents.lengths.shape[0] - 1
    cut = documents.lengths.take(xp.minimum(first, last))
    largest = xp.where(light > 0, xp.minimum(largest, cut), 0)
    need = xp.minimum(rows, TILE * each + (-(-over // ranks))[:, None]) + base.tokens
    return Needs(xp.minimum(need.max(axis=1) + largest, own), area, each)


def foreseen(
    ops: HostOps, documents: Documents, owner: Any, needs: Needs, mean: Any, own: int
) -> Any:
    """(K,) the area of the most loaded rank; owner: of the search, of those ways."""
    chunks = chunks_of(ops, documents, owner < 0)
    levelled = level(ops, chunks, needs.each, mean - needs.area, own // TILE)
    return (needs.area + levelled.areas).max(axis=1)
