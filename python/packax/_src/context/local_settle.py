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

    # Few ranks and columns are picked by comparing: XLA fuses that.
    column = xp.arange(columns, dtype=np.int32)

    def picked(x: Any, at: Any) -> Any:
        """x[at] of ranks."""
        here = (at[:, None] == rank[:, 0]).reshape(*at.shape, ranks, *[1] * (x.ndim - 1))
        return xp.where(here, x[None], 0).sum(axis=1, dtype=np.int32)

    def once(_: Any, state: Any) -> Any:
        index, of_chunk, short = state  # short: of what is wanted
        order, place = ops.ranked(short)
        by_index, by_area, by_short = (picked(x, order) for x in (index, of_chunk, short))
        over, under = slice(0, pairs), slice(None, ranks - pairs - 1, -1)
        amount = (by_short[under] - by_short[over]) // 2
        left = xp.abs(
            by_area[over][:, :, None] - by_area[under][:, None, :] - amount[:, None, None]
        )
        both = (by_index[over] >= 0)[:, :, None] & (by_index[under] >= 0)[:, None, :]
        left = xp.where(both, left, _HUGE).reshape(pairs, columns * columns)
        best = left.argmin(axis=1).astype(np.int32)
        best = xp.where(left.min(axis=1) < amount, best, np.int32(-1))
        # For every rank the column that it gives, -1: none, and the rank that gives in return.
        none = xp.full(ranks - 2 * pairs, -1, np.int32)
        given = picked(xp.concatenate([best, none, best[::-1]]), place)
        mine = xp.where(place < pairs, given // columns, given % columns)
        gives = (column == mine[:, None]) & (given >= 0)[:, None]
        partner = picked(order, ranks - 1 - place)
        old = [xp.where(gives, x, 0).sum(axis=1, dtype=np.int32) for x in (index, of_chunk)]
        new = [picked(x, partner) for x in old]
        index, of_chunk = (
            xp.where(gives, x[:, None], y) for x, y in zip(new, (index, of_chunk), strict=True)
        )
        return index, of_chunk, short - (new[1] - old[1])

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
