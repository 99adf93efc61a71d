"""One row of a local plan: from segment ids to which token stands where.

Tokens are looked at by document ("in documents' order"): an id's tokens together, in the order of
the sequence. A rank's place is filled with rows that it must have, chunks of split documents, the
rows of split documents that fill no chunk, and the rest: whole documents and padding. Each of these
is in the order of the sequence. Chunks fill tiles of rows of one document, which the kernels then
need not share.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from packax._src.context.array_ops import HostOps
from packax._src.context.local_runs import (
    SumsOfRuns,
    cuts_of_line,
    pieces_of,
    runs_of,
    tokens_in_order,
)
from packax._src.context.local_search import (
    Base,
    Documents,
    Search,
    chunk_ranks,
    chunks_each,
    chunks_of,
    filled,
    kept_back,
    level,
    seen,
    window,
)
from packax._src.context.local_settle import settled
from packax._src.core.shapes import PADDING_SEGMENT_ID, TILE

_CHUNK, _ODD, _LOCAL = range(3)  # in the order in which a rank has them, behind what it must have


class Row(NamedTuple):
    """The documents of one row; D of them, in descending area, and N tokens."""

    documents: Documents
    areas: Areas
    tokens: Any  # Tokens, or Runs on the host
    length: int
    ends: Any  # (D,) place in documents' order
    number: Any  # (D,) of the documents in documents' order: which they are here
    first_chunk: Any  # (seen,) of the row's chunks
    held: Any  # () the first in documents' order of the tokens that are given to ranks before


class Tokens(NamedTuple):
    """(N,) in documents' order."""

    sequence: Any  # the index in the sequence
    document: Any  # the number of the id
    padding: Any  # bool


class Sums:
    """Sums of high and of low bits of numbers, between any two."""

    def __init__(self, ops: HostOps, x: Any, bits: int) -> None:
        none = ops.xp.zeros(1, np.int32)
        self.sums = [
            ops.xp.concatenate([none, ops.sums(part)])
            for part in (x >> bits, x & ((1 << bits) - 1))
        ]

    def totals(self) -> tuple[Any, Any]:
        high, low = self.sums
        return high[-1], low[-1]

    def between(self, begin: Any, end: Any) -> tuple[Any, Any]:
        high, low = (x[end] - x[begin] for x in self.sums)
        return high, low


class Areas:
    """Sums of attended pairs of tokens in documents' order, in units that keep them in int32."""

    def __init__(self, ops: HostOps, sums: Any, bits: int, dropped: int) -> None:
        xp = ops.xp
        self.sums = sums
        high, low = sums.totals()
        total = high + (low >> bits) + 1
        powers = xp.asarray(2 ** np.arange(31, dtype=np.int32))
        self.shift = xp.maximum(0, bits + (powers < total).sum(dtype=np.int32) - 26)
        self.unit = 1 << (self.shift + 3 * dropped)
        self.left = xp.maximum(bits - self.shift, 0)
        self.right = xp.maximum(self.shift - bits, 0)

    def between(self, begin: Any, end: Any) -> Any:
        """Of the tokens from `begin` to `end`."""
        high, low = self.sums.between(begin, end)
        return (((high << self.left) >> self.right) + (low >> self.shift)).astype(np.int32)


def look(ops: HostOps, ids: Any, keys: Any, ranks: int, held: Any) -> Row:
    """ids, keys: (N,) int32, keys how many each row attends.

    held: how many, the first, are given to ranks before and are of no document here.
    """
    xp = ops.xp
    length = ids.shape[0]
    more = max(0, length.bit_length() - 21)
    bits, keys = 10 - more, keys >> 3 * more if more else keys
    tokens: Any
    sums: Any
    if xp is np:
        tokens = runs_of(ids, int(held))
        sums = SumsOfRuns(tokens, keys, bits)
        padding = np.diff(tokens.begin)[tokens.padding].sum(dtype=np.int32)
        starts, ends, empty = tokens.starts, tokens.ends, tokens.empty
        first_held = tokens.begin[(tokens.first < held).argmax()]
    else:
        ids = xp.where(xp.arange(length, dtype=np.int32) < held, PADDING_SEGMENT_ID, ids)
        sequence = ops.order(ids)
        ids = ids[sequence]
        begins = xp.concatenate([xp.ones(1, bool), ids[1:] != ids[:-1]])
        bounds = ops.where_true(begins)  # one more than documents
        starts, ends = bounds[:-1], bounds[1:]
        # Those held are the first of padding.
        is_padding = (ids == PADDING_SEGMENT_ID) & (sequence >= held)
        tokens = Tokens(sequence, ops.sums(begins) - 1, is_padding)
        sums = Sums(ops, keys[sequence], bits)
        padding = is_padding.sum(dtype=np.int32)
        empty = ids[xp.minimum(starts, length - 1)] == PADDING_SEGMENT_ID
        first_held = (ids < PADDING_SEGMENT_ID).sum(dtype=np.int32)
    areas = Areas(ops, sums, bits, more)
    sizes = xp.where(empty, 0, ends - starts)
    works = xp.where(sizes > 0, areas.between(starts, ends), -1)
    heaviest = ops.order(-works)
    ends, sizes = ends[heaviest], sizes[heaviest]
    works = xp.maximum(works[heaviest], 0)

    size = seen(ranks)
    each = window(ops, sizes // TILE, size)
    last_chunk = ops.sums(each)
    # On the host as many as there are.
    chunks = max(1, int(last_chunk[-1])) if xp is np else length // TILE
    slot = xp.arange(chunks, dtype=np.int32)
    of = ops.passed(last_chunk, slot)
    first_chunk = last_chunk - each
    known = xp.minimum(of, min(size, sizes.shape[0]) - 1)
    end = ends[known] - TILE * (slot - first_chunk[known])
    real = of < size
    chunk_works = xp.where(
        real, areas.between(xp.where(real, end - TILE, 0), xp.where(real, end, 0)), 0
    )
    chunk_documents = xp.where(real, of, np.int32(size))
    chunk_order = ops.order(-chunk_works)
    documents = Documents(sizes, works, chunk_documents, chunk_works, chunk_order, padding)
    number = ops.put(heaviest, xp.arange(sizes.shape[0], dtype=np.int32))
    return Row(documents, areas, tokens, length, ends, number, first_chunk, first_held)


class Assigned(NamedTuple):
    """What each rank gets, by one way."""

    owner: Any  # (D,) the rank on which a document lies whole, -1: it is split
    chunk_rank: Any  # (G,) which rank gets each of the row's chunks, -1: none does
    rows: Any  # (R,) of split documents and padding
    split: Any  # (R,) rows of split documents
    number: Any  # (R,) chunks
    area: Any  # () of the most loaded rank


def assign(ops: HostOps, row: Row, search: Search, way: Any, base: Base) -> Assigned:
    xp = ops.xp
    documents = row.documents
    sizes, works = documents.lengths, documents.areas
    ranks = base.tokens.shape[0]
    number, own = sizes.shape[0], row.length // ranks
    owner = search.owner[way][:number]
    rest = xp.full(max(0, number - owner.shape[0]), ranks, np.int32)
    owner = _light_dealt(
        ops, xp.concatenate([owner, rest]), sizes, search.tokens[way][None], row.length
    )

    tokens = base.tokens + ops.sums_by(owner, sizes, ranks)
    area = base.areas + ops.sums_by(owner, works, ranks)
    rows = own - tokens
    chunks = chunks_of(ops, documents, window(ops, owner, seen(ranks))[None] < 0)
    each = chunks_each(ops, rows[None], chunks.number)
    wanted = (works.sum(dtype=np.int32) + base.areas.sum(dtype=np.int32)) // ranks - area
    levelled = level(ops, chunks, each, wanted[None], own // TILE)
    chunk_rank = chunk_ranks(ops, chunks, each, levelled)
    works, order = documents.chunk_areas, documents.chunk_order
    chunk_rank = settled(ops, chunk_rank, works, order, wanted, own // TILE)
    area = area + ops.sums_by(chunk_rank, works, ranks)

    each = each[0]
    free = rows - TILE * each
    odd = xp.where(owner < 0, sizes, 0).sum(dtype=np.int32) - TILE * each.sum(dtype=np.int32)
    ends = ops.sums(free - xp.minimum(free, documents.padding // ranks))
    own_odd = xp.diff(xp.minimum(ends, odd), prepend=np.int32(0))
    return Assigned(owner, chunk_rank, rows, TILE * each + own_odd, each, area.max())


def carry_out(ops: HostOps, row: Row, assigned: Assigned, held_by: Any, before: int) -> Any:
    """(N,) the tokens in the order of the ranks.

    held_by: (N,) of the tokens held, of which `before` kinds come first in this order on a rank:
    rank * before + kind; -1: of others.
    """
    if ops.xp is np:
        return _carry_out_runs(row, assigned, held_by, before)
    xp = ops.xp
    sequence, document, padding = row.tokens
    document = row.number[document]
    from_end = row.ends[document] - 1 - xp.arange(row.length, dtype=np.int32)
    divided = ~padding & (held_by[sequence] < 0)
    chunk, odd = _chunk_of(ops, row, assigned, document, from_end, divided)
    places, left = (ops.sums(odd) - 1, ops.sums(padding) - 1), odd.sum(dtype=np.int32)
    key = _key(ops, row, assigned, document, padding, chunk, odd, places, left, before)
    key = ops.put(sequence, key)
    if before:
        held_key = held_by // before * (before + 3) + held_by % before
        key = xp.where(held_by < 0, key, held_key.astype(key.dtype))
    return ops.order(key)


def _carry_out_runs(row: Row, assigned: Assigned, held_by: np.ndarray, before: int) -> np.ndarray:
    """The same of pieces of runs, whose tokens go the same way."""
    ops, runs, sizes = HostOps(), row.tokens, row.documents.lengths
    of_seen = len(row.first_chunk)
    split = np.flatnonzero((assigned.owner[:of_seen] < 0) & (sizes[:of_seen] > 0))
    number = sizes[split] // TILE
    behind = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    cuts = [np.repeat(row.ends[split], number) - TILE * (behind + 1)]
    held = int((held_by[: len(held_by) if before else 0] >= 0).sum())
    if held:
        cuts.append(row.held + 1 + np.flatnonzero(np.diff(held_by[:held])))
    ends, even_ends = _ends_of_rest(ops, row, assigned)

    def looked(cuts: list[np.ndarray]) -> tuple[Any, ...]:
        place, size, run = pieces_of(runs, cuts)
        document, padding = row.number[runs.document[run]], runs.padding[run]
        first = runs.first[run] + place - runs.begin[run]
        divided = ~padding & (first >= held)
        from_end = row.ends[document] - 1 - place
        chunk, odd = _chunk_of(ops, row, assigned, document, from_end, divided)
        return place, size, first, document, padding, chunk, odd

    place, size, _, _, padding, _, odd = looked(cuts)
    left = size[odd].sum()
    cuts.append(cuts_of_line(place[odd], size[odd], ends))
    more = ends - left + even_ends[-1]
    line_ends = np.concatenate([even_ends, more[more > even_ends[-1]]])
    cuts.append(cuts_of_line(place[padding], size[padding], line_ends))
    place, size, first, document, padding, chunk, odd = looked(cuts)
    places = [np.cumsum(np.where(x, size, 0)) - size for x in (odd, padding)]
    key = _key(ops, row, assigned, document, padding, chunk, odd, places, left, before)
    if held:
        of_held = held_by[np.minimum(first, held - 1)]
        key = np.where(first < held, of_held // before * (before + 3) + of_held % before, key)
    return tokens_in_order(key, first, size)


def _ends_of_rest(ops: HostOps, row: Row, assigned: Assigned) -> tuple[Any, Any]:
    """(R,) ends of what is left of each rank behind its chunks, in lines: of rows that fill no
    chunk and then padding; and of padding that is dealt as even as can be."""
    free = assigned.rows - TILE * assigned.number
    even = ops.xp.minimum(free, row.documents.padding // free.shape[0])
    return ops.sums(free - even), ops.sums(even)


def _chunk_of(
    ops: HostOps, row: Row, assigned: Assigned, document: Any, from_end: Any, free: Any
) -> tuple[Any, Any]:
    """The rank that gets the chunk of tokens, -1: they are in none; and whether they are of a split
    document, but in none. free: tokens of documents that are not held."""
    xp = ops.xp
    size = row.first_chunk.shape[0]
    chunk = xp.where(
        document < size,
        row.first_chunk[xp.minimum(document, size - 1)] + from_end // TILE,
        np.int32(_BEYOND),
    )
    divided = free & (assigned.owner[document] < 0)
    whole = row.documents.lengths[document] // TILE > from_end // TILE
    there = divided & whole & (chunk < assigned.chunk_rank.shape[0])
    chunk = xp.where(there, assigned.chunk_rank[xp.where(there, chunk, 0)], np.int32(-1))
    return chunk, divided & (chunk < 0)


def _key(
    ops: HostOps,
    row: Row,
    assigned: Assigned,
    document: Any,
    padding: Any,
    chunk: Any,
    odd: Any,
    places: Any,
    odd_number: Any,
    before: int,
) -> Any:
    """By which tokens are sorted: rank and kind. places: of tokens in the lines of odd, padding."""
    xp = ops.xp
    ends, even_ends = _ends_of_rest(ops, row, assigned)
    odd_place, padding_place = places
    spread = padding & (padding_place < even_ends[-1])
    behind = padding & ~spread
    line = xp.where(odd, odd_place, odd_number + padding_place - even_ends[-1])
    at = xp.where(chunk >= 0, chunk, assigned.owner[document])
    at = xp.where(odd | behind, ops.passed(ends, line), at)
    at = xp.where(spread, ops.passed(even_ends, padding_place), at)
    kind = xp.where(chunk >= 0, _CHUNK, xp.where(odd, _ODD, _LOCAL))
    return (at * (before + 3) + before + kind).astype(np.int32)


_BEYOND = 2**30


def _light_dealt(ops: HostOps, owner: Any, sizes: Any, tokens: Any, length: int) -> Any:
    """Light documents laid in a line, mixed, and cut where each rank has its tokens.

    What is cut is split. So that it is small, the smallest are kept back: the line of the others is
    cut between two of them, and that of the smallest where each rank is full.
    """
    xp, ranks = ops.xp, tokens.shape[1]
    light = owner == ranks
    sizes = xp.where(light, sizes, 0)
    tail = ops.sums(sizes[::-1])[::-1]
    share = (filled(ops, tokens, tail[:1]) - tokens)[0]
    mixed = _mixed(sizes.shape[0]) if xp is np else _mix(ops, sizes.shape[0])
    small = (tail <= kept_back(ops, sizes.max(), ranks, length))[mixed]
    sizes = sizes[mixed]
    line = xp.where(small, 0, sizes)
    end = ops.sums(line)
    room = share + filled(ops, -share[None], end[-1:])[0]
    at = xp.minimum(ops.passed(ops.sums(room), end - line), ranks - 1)
    at = xp.where(small, np.int32(-1), at)
    left = share - ops.sums_by(at, line, ranks)
    good = left.min() >= 0  # else the line of all is cut
    share = xp.where(good, left, share)
    line = xp.where(good & ~small, 0, sizes)
    end, ends = ops.sums(line), ops.sums(share)
    first, last = ops.passed(ends, end - line), ops.passed(ends, end - 1)
    cut = xp.where(first == last, xp.minimum(first, ranks - 1), np.int32(-1))
    dealt = ops.put(mixed, xp.where(good & ~small, at, cut).astype(np.int32))
    return xp.where(light, dealt, owner)


def _mix(ops: HostOps, number: int) -> Any:
    """An order of so many, of which any part is mixed."""
    golden = np.uint32(2654435769)  # 2**32 over the golden ratio
    mixed = (ops.xp.arange(number, dtype=np.uint32) * golden) >> np.uint32(1)
    return ops.order(mixed.astype(np.int32))


@functools.lru_cache(64)
def _mixed(number: int) -> np.ndarray:
    return _mix(HostOps(), number)
