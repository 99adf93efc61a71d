"""One row of a local plan: from segment ids to which token stands where.

Tokens are looked at by document ("in documents' order"): an id's tokens together, in the order of
the sequence. A rank's place is filled with chunks of split documents, the rows of split documents
that fill no chunk, and the rest: whole documents and padding. Each of these is in the order of the
sequence. Chunks fill tiles of rows of one document, which the kernels then need not share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from packax._src.context.array_ops import HostOps
from packax._src.context.local_search import (
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
from packax._src.core.shapes import PADDING_SEGMENT_ID, TILE

_CHUNK, _ODD, _LOCAL = range(3)  # in the order in which a rank has them


class Row(NamedTuple):
    """The documents of one row; D of them, in descending area, and N tokens."""

    documents: Documents
    sequence: Any  # (N,) in documents' order: the index in the sequence
    document: Any  # (N,) in documents' order
    from_end: Any  # (N,) rows of the document behind it
    padding: Any  # (N,) bool, in documents' order
    first_chunk: Any  # (seen,) of the row's chunks


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


def look(ops: HostOps, ids: Any, keys: Any, ranks: int) -> Row:
    """ids, keys: (N,) int32, keys how many each row attends."""
    xp = ops.xp
    length = ids.shape[0]
    sequence = by_document(ops, ids)
    ids = ids[sequence]
    begins = xp.concatenate([xp.ones(1, bool), ids[1:] != ids[:-1]])
    bounds = ops.where_true(begins)  # one more than documents
    starts, ends = bounds[:-1], bounds[1:]
    padding = ids == PADDING_SEGMENT_ID
    areas = Areas(ops, keys[sequence])
    empty = padding[xp.minimum(starts, length - 1)]
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
    return Row(documents, sequence, number, from_end, padding, first_chunk)


def carry_out(ops: HostOps, row: Row, search: Search, way: Any, ranks: int) -> tuple[Any, Any]:
    """(N,) the tokens in the order of one way, and (ranks,) rows each has of split documents."""
    xp = ops.xp
    documents = row.documents
    sizes, works = documents.lengths, documents.areas
    number, length = sizes.shape[0], row.sequence.shape[0]
    own = length // ranks
    search = only(ops, search, way)
    owner = owners(ops, search, ranks)[0, :number]
    rest = xp.full(max(0, number - owner.shape[0]), ranks, np.int32)
    owner = _light_dealt(ops, xp.concatenate([owner, rest]), sizes, search.tokens, ranks)

    rank = xp.arange(ranks, dtype=np.int32)[:, None]
    mine = owner == rank
    tokens = xp.where(mine, sizes, 0).sum(axis=1, dtype=np.int32)
    area = xp.where(mine, works, 0).sum(axis=1, dtype=np.int32)
    rows = own - tokens
    chunks = chunks_of(ops, documents, window(ops, owner, seen(ranks))[None] < 0)
    each = chunks_each(ops, rows[None], chunks.number)
    wanted = works.sum(dtype=np.int32) // ranks - area
    levelled = level(ops, chunks, each, wanted[None], own // TILE)
    chunk_rank = chunk_ranks(ops, chunks, each, levelled)

    # What is left of each rank: padding, as even as can be, and rows that fill no chunk.
    free = rows - TILE * each[0]
    even = xp.minimum(free, documents.padding // ranks)
    ends, even_ends = ops.sums(free - even), ops.sums(even)
    owner = owner[row.document]
    key = (owner * 3 + _LOCAL).astype(np.int16 if xp is np else np.int32)
    # The others lie whole where their document does.
    some = ops.some((owner < 0) | row.padding)
    owner, document, from_end, padding = (
        x[some] for x in (owner, row.document, row.from_end, row.padding)
    )
    chunk = xp.where(
        document < seen(ranks),
        row.first_chunk[xp.minimum(document, seen(ranks) - 1)] + from_end // TILE,
        np.int32(_BEYOND),
    )
    whole_chunks = sizes[document] // TILE > from_end // TILE
    in_chunk = (owner < 0) & ~padding & whole_chunks & (chunk < chunk_rank.shape[0])
    chunk = chunk_rank[xp.where(in_chunk, chunk, 0)]
    in_chunk = in_chunk & (chunk >= 0)
    odd = (owner < 0) & ~padding & ~in_chunk
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
    key = ops.with_some(key, some, (at * 3 + kind).astype(key.dtype))
    order = ops.order(ops.put(row.sequence, key))

    own_odd = xp.diff(xp.minimum(ends, odd_number), prepend=np.int32(0))
    return order, TILE * each[0] + own_odd


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
