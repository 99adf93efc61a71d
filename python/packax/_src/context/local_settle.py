"""Chunks of split documents exchanged between ranks, pair by pair, until their areas are as wanted.

Levelling (local_search.py) gives a rank some of the heaviest chunks and some of the lightest, which
leaves it up to half a chunk from its share. Here the rank with most and the one with least exchange
the two chunks that bring them nearest, and so on inwards; all pairs at once, a few times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from packax._src.context.array_ops import HostOps

_TIMES = 5
_OFFERED = 16  # of a rank's chunks
_HUGE = 2**30


def settled(ops: HostOps, chunk_rank: Any, areas: Any, heavy: Any, wanted: Any, most: int) -> Any:
    """(G,) chunk_rank, -1: nobody's, with chunks exchanged; as many on each rank.

    areas, heavy: (G,) of chunks, and their order, the largest first; wanted: (R,) of ranks;
    most: chunks that a rank may have.
    """
    xp = ops.xp
    ranks, number = wanted.shape[0], chunk_rank.shape[0]
    if ranks < 2 or number == 0:
        return chunk_rank
    rank = xp.arange(ranks, dtype=np.int32)[:, None]
    # (R, columns) the chunks that each offers: one of so many, by area.
    stride = -(-most // _OFFERED)
    columns = -(-most // stride)
    taken = chunk_rank >= 0
    key = xp.where(taken, chunk_rank, np.int32(ranks))
    small = np.int16 if ranks < 2**15 else np.int32  # numpy sorts 16 bits faster
    by_rank = heavy[ops.order(key[heavy].astype(small))]
    held = ops.sums_by(key, xp.ones_like(key), ranks)[:, None]
    first = ops.sums(held[:, 0])[:, None] - held
    place = xp.arange(columns, dtype=np.int32) * stride
    there = place < held
    index = xp.where(there, by_rank[xp.minimum(first + place, number - 1)], np.int32(-1))
    of_chunk = xp.where(there, areas[xp.maximum(index, 0)], 0)
    got = ops.sums_by(key, areas, ranks)
    pairs = ranks // 2
    if xp is np:
        _exchange(index, of_chunk, wanted - got)
        return ops.placed(chunk_rank, index.reshape(-1), rank[:, 0].repeat(columns))

    def once(_: Any, state: Any) -> Any:
        index, of_chunk, short = state  # short: of what is wanted
        order, place = ops.ranked(short)
        over, under = order[:pairs], order[ranks - pairs :][::-1]
        amount = (short[under] - short[over]) // 2
        left = xp.abs(
            of_chunk[over][:, :, None] - of_chunk[under][:, None, :] - amount[:, None, None]
        )
        both = (index[over] >= 0)[:, :, None] & (index[under] >= 0)[:, None, :]
        left = xp.where(both, left, _HUGE).reshape(pairs, columns * columns)
        best = left.argmin(axis=1).astype(np.int32)
        better = left.min(axis=1) < amount
        # For every rank the column that it gives, -1: none, and the rank that gives in return.
        pair = xp.minimum(place, ranks - 1 - place)
        there = pair < pairs  # else it is in the middle
        pair = xp.minimum(pair, pairs - 1)
        given = xp.where(place < pairs, best[pair] // columns, best[pair] % columns)
        given = xp.where(there & better[pair], given, -1)
        partner = order[ranks - 1 - place]
        at = xp.maximum(given, 0)[:, None]
        new = [ops.along(x, at)[partner] for x in (index, of_chunk)]
        gives = (xp.arange(columns, dtype=np.int32) == at) & (given >= 0)[:, None]
        change = xp.where(given >= 0, (new[1] - ops.along(of_chunk, at))[:, 0], 0)
        index, of_chunk = (
            xp.where(gives, x, old) for x, old in zip(new, (index, of_chunk), strict=True)
        )
        return index, of_chunk, short - change

    index, *_ = ops.repeat(_TIMES, once, (index, of_chunk, wanted - got))
    return ops.placed(chunk_rank, index.reshape(-1), xp.repeat(rank[:, 0], columns))


def _exchange(index: np.ndarray, of_chunk: np.ndarray, short: np.ndarray) -> None:
    """The same in place, on the host: only what changes is touched, until nothing does."""
    ranks, columns = index.shape
    pairs = ranks // 2
    # Where there is no chunk, to give and to take, a difference is too large to be the best.
    missing = (index < 0) * np.int32(_HUGE // 2)
    for _ in range(_TIMES):
        order = short.argsort(kind="stable")
        over, under = order[:pairs], order[ranks - pairs :][::-1]
        amount = (short[under] - short[over]) // 2
        give = of_chunk[over] + missing[over] - amount[:, None]
        take = of_chunk[under] - missing[under]
        left = np.abs(give[:, :, None] - take[:, None, :]).reshape(pairs, -1)
        best = left.argmin(axis=1)
        better = np.flatnonzero(left[np.arange(pairs), best] < amount)
        if not len(better):
            return
        mine, other = np.divmod(best[better], columns)
        over, under = over[better], under[better]
        for x in (index, of_chunk):
            x[over, mine], x[under, other] = x[under, other], x[over, mine]
        gained = of_chunk[under, other] - of_chunk[over, mine]
        short[over] += gained
        short[under] -= gained
