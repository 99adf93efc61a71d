"""One row of a local plan: from segment ids to which token stands where.

Tokens are looked at by document ("in documents' order"): an id's tokens together, in the order of
the sequence. A rank's place is filled with rows that it must have, chunks of split documents, the
rows of split documents that fill no chunk, and the rest: whole documents and padding. Each of these
is in the order of the sequence. Chunks fill tiles of rows of one document, which the kernels then
need not share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from packax._src.context.array_ops import HostOps
from packax._src.context.local_search import (
    Base,
    Documents,
    Search,
    chunk_ranks,
    chunks_each,
    chunks_of,
    filled,
    level,
    only,
    owners,
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
    sequence: Any  # (N,) in documents' order: the index in the sequence
    document: Any  # (N,) in documents' order
    from_end: Any  # (N,) rows of the document behind it
    padding: Any  # (N,) bool, in documents' order
    first_chunk: Any  # (seen,) of the row's chunks
    held: Any  # () the first in documents' order of the tokens that are given to ranks before


def by_document(ops: HostOps, ids: Any) -> Any:
    """The indices in documents' order."""
    if ops.xp is not np:
        return ops.order(ids)
    runs = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])).astype(np.int32)
    sizes = np.diff(runs, append=np.int32(len(ids)))
    by_id = np.argsort(ids[runs], kind="stable")
    runs, sizes = runs[by_id], sizes[by_id]
    offset = np.repeat(runs - (np.cumsum(sizes) - sizes), sizes)
    return (offset + np.arange(len(ids))).astype(np.int32)


class Areas:
    """Sums of attended pairs of tokens in documents' order, in units that keep them in int32."""

    def __init__(self, ops: HostOps, keys: Any) -> None:
        xp = ops.xp
        more = max(0, keys.shape[0].bit_length() - 21)
        self.bits = 10 - more
        keys = keys >> 3 * more
        none = xp.zeros(1, np.int32)
        self.high = xp.concatenate([none, ops.sums(keys >> self.bits)])
        self.low = xp.concatenate([none, ops.sums(keys & ((1 << self.bits) - 1))])
        self.xp = xp
        total = self.high[-1] + (self.low[-1] >> self.bits) + 1
        powers = xp.asarray(2 ** np.arange(31, dtype=np.int32))
        self.shift = xp.maximum(0, self.bits + (powers < total).sum(dtype=np.int32) - 26)

    def between(self, begin: Any, end: Any) -> Any:
        """Of the tokens from `begin` to `end`."""
        high, low = (x[end] - x[begin] for x in (self.high, self.low))
        left = self.xp.maximum(self.bits - self.shift, 0)
        right = self.xp.maximum(self.shift - self.bits, 0)
        return (((high << left) >> right) + (low >> self.shift)).astype(np.int32)


def look(ops: HostOps, ids: Any, keys: Any, ranks: int, held: Any) -> Row:
    """ids, keys: (N,) int32, keys how many each row attends.

    held: how many, the first, are given to ranks before and are of no document here.
    """
    xp = ops.xp
    index = xp.arange(ids.shape[0], dtype=np.int32)
    ids = xp.where(index < held, np.int32(PADDING_SEGMENT_ID), ids)
    length = ids.shape[0]
    sequence = by_document(ops, ids)
    ids = ids[sequence]
    begins = xp.concatenate([xp.ones(1, bool), ids[1:] != ids[:-1]])
    bounds = ops.where_true(begins)  # one more than documents
    starts, ends = bounds[:-1], bounds[1:]
    # Those held are the first of padding.
    padding = (ids == PADDING_SEGMENT_ID) & (sequence >= held)
    areas = Areas(ops, keys[sequence])
    empty = ids[xp.minimum(starts, length - 1)] == PADDING_SEGMENT_ID
    sizes = xp.where(empty, 0, ends - starts)
    works = xp.where(sizes > 0, areas.between(starts, ends), -1)
    heaviest = ops.order(-works)
    ends, sizes = ends[heaviest], sizes[heaviest]
    works = xp.maximum(works[heaviest], 0)

    size = seen(ranks)
    last_chunk = ops.sums(window(ops, sizes // TILE, size))
    slot = xp.arange(length // TILE, dtype=np.int32)
    of = ops.passed(last_chunk, slot)
    first_chunk = last_chunk - window(ops, sizes // TILE, size)
    known = xp.minimum(of, min(size, sizes.shape[0]) - 1)
    end = ends[known] - TILE * (slot - first_chunk[known])
    real = of < size
    chunk_works = xp.where(
        real, areas.between(xp.where(real, end - TILE, 0), xp.where(real, end, 0)), 0
    )
    chunk_documents = xp.where(real, of, np.int32(size))
    documents = Documents(sizes, works, chunk_documents, chunk_works, padding.sum(dtype=np.int32))
    place = ops.put(heaviest, xp.arange(sizes.shape[0], dtype=np.int32))
    number = place[ops.sums(begins) - 1]
    from_end = ends[number] - 1 - xp.arange(length, dtype=np.int32)
    first_held = (ids < PADDING_SEGMENT_ID).sum(dtype=np.int32)
    return Row(documents, areas, sequence, number, from_end, padding, first_chunk, first_held)


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
    number, own = sizes.shape[0], row.sequence.shape[0] // ranks
    search = only(ops, search, way)
    owner = owners(ops, search, ranks)[0, :number]
    rest = xp.full(max(0, number - owner.shape[0]), ranks, np.int32)
    owner = _light_dealt(ops, xp.concatenate([owner, rest]), sizes, search.tokens, ranks)

    rank = xp.arange(ranks, dtype=np.int32)[:, None]
    mine = owner == rank
    tokens = base.tokens + xp.where(mine, sizes, 0).sum(axis=1, dtype=np.int32)
    area = base.areas + xp.where(mine, works, 0).sum(axis=1, dtype=np.int32)
    rows = own - tokens
    chunks = chunks_of(ops, documents, window(ops, owner, seen(ranks))[None] < 0)
    each = chunks_each(ops, rows[None], chunks.number)
    wanted = (works.sum(dtype=np.int32) + base.areas.sum(dtype=np.int32)) // ranks - area
    levelled = level(ops, chunks, each, wanted[None], own // TILE)
    chunk_rank = chunk_ranks(ops, chunks, each, levelled)
    chunk_rank = settled(ops, chunk_rank, documents.chunk_areas, wanted, own // TILE)
    area = area + xp.where(chunk_rank == rank, documents.chunk_areas, 0).sum(1, dtype=np.int32)

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
    xp = ops.xp
    documents, sizes = row.documents, row.documents.lengths
    owner, chunk_rank, rows, _, each, _ = assigned
    ranks = rows.shape[0]

    # What is left of each rank: padding, as even as can be, and rows that fill no chunk.
    free = rows - TILE * each
    even = xp.minimum(free, documents.padding // ranks)
    ends, even_ends = ops.sums(free - even), ops.sums(even)
    owner = owner[row.document]
    kinds = before + 3
    key = (owner * kinds + before + _LOCAL).astype(np.int16 if xp is np else np.int32)
    # The others lie whole where their document does.
    unheld = held_by[row.sequence] < 0
    some = ops.some(((owner < 0) | row.padding) & unheld)
    owner, document, from_end, padding, unheld = (
        x[some] for x in (owner, row.document, row.from_end, row.padding, unheld)
    )
    divided = (owner < 0) & ~padding & unheld
    chunk = xp.where(
        document < seen(ranks),
        row.first_chunk[xp.minimum(document, seen(ranks) - 1)] + from_end // TILE,
        np.int32(_BEYOND),
    )
    whole_chunks = sizes[document] // TILE > from_end // TILE
    in_chunk = divided & whole_chunks & (chunk < chunk_rank.shape[0])
    chunk = chunk_rank[xp.where(in_chunk, chunk, 0)]
    in_chunk = in_chunk & (chunk >= 0)
    odd = divided & ~in_chunk
    odd_place = ops.sums(odd) - 1
    odd_number = odd.sum(dtype=np.int32)
    padding_place = ops.sums(padding) - 1
    spread = padding & (padding_place < even_ends[-1])
    behind = padding & ~spread
    line = xp.where(odd, odd_place, odd_number + padding_place - even_ends[-1])
    at = xp.where(in_chunk, chunk, owner)
    at = xp.where(odd | behind, ops.passed(ends, line, odd | behind), at)
    at = xp.where(spread, ops.passed(even_ends, padding_place, spread), at)
    kind = xp.where(in_chunk, _CHUNK, xp.where(odd, _ODD, _LOCAL))
    key = ops.with_some(key, some, (at * kinds + before + kind).astype(key.dtype))
    key = ops.put(row.sequence, key)
    if before:
        held_key = held_by // before * kinds + held_by % before
        key = xp.where(held_by < 0, key, held_key.astype(key.dtype))
    return ops.order(key)


_BEYOND = 2**30


def _light_dealt(ops: HostOps, owner: Any, sizes: Any, tokens: Any, ranks: int) -> Any:
    """Light documents laid in a line, mixed, and cut where each rank has its tokens.

    What is cut is split.
    """
    xp = ops.xp
    light = owner == ranks
    amount = xp.where(light, sizes, 0).sum(dtype=np.int32)
    share = (filled(ops, tokens, amount[None]) - tokens)[0]
    golden = np.uint32(2654435769)  # 2**32 over the golden ratio: any part of the line is mixed
    mixed = (xp.arange(sizes.shape[0], dtype=np.uint32) * golden) >> np.uint32(1)
    mixed = ops.order(mixed.astype(np.int32))
    line = xp.where(light, sizes, 0)[mixed]
    end = ops.sums(line)
    ends = ops.sums(share)
    first, last = ops.passed(ends, end - line), ops.passed(ends, end - 1)
    dealt = ops.put(mixed, xp.where(first == last, xp.minimum(first, ranks - 1), -1))
    return xp.where(light, dealt.astype(np.int32), owner)
