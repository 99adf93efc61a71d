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
    by_rank = heavy[ops.order(key[heavy])]
    held = ops.sums_by(key, xp.ones_like(key), ranks)[:, None]
    first = ops.sums(held[:, 0])[:, None] - held
    place = xp.arange(columns, dtype=np.int32) * stride
    there = place < held
    index = xp.where(there, by_rank[xp.minimum(first + place, number - 1)], np.int32(-1))
    of_chunk = xp.where(there, areas[xp.maximum(index, 0)], 0)
    got = ops.sums_by(key, areas, ranks)
    pairs = ranks // 2

    def once(_: Any, state: Any) -> Any:
        index, of_chunk, short, _ = state  # short: of what is wanted
        order = ops.order(short)
        over, under = order[:pairs], order[ranks - pairs :][::-1]
        amount = (short[under] - short[over]) // 2
        left = xp.abs(
            of_chunk[over][:, :, None] - of_chunk[under][:, None, :] - amount[:, None, None]
        )
        both = (index[over] >= 0)[:, :, None] & (index[under] >= 0)[:, None, :]
        left = xp.where(both, left, _HUGE).reshape(pairs, columns * columns)
        best = left.argmin(axis=1).astype(np.int32)
        better = ops.along(left, best[:, None])[:, 0] < amount
        mine, other = best // columns, best % columns
        # For every rank the column that it gives, -1: none, and the rank that gives in return.
        middle = order[pairs : ranks - pairs]
        everyone = xp.concatenate([over, middle, under])
        none = -xp.ones_like(middle)
        mine, other = (xp.where(better, x, -1) for x in (mine, other))
        given = xp.concatenate([mine, none, other])
        partner = xp.concatenate([under, middle, over])
        given = ops.put(everyone, given.astype(np.int32))
        partner = ops.put(everyone, partner)
        at = xp.maximum(given, 0)[:, None]
        new = [ops.along(x, at)[partner] for x in (index, of_chunk)]
        gives = (xp.arange(columns, dtype=np.int32) == at) & (given >= 0)[:, None]
        change = xp.where(given >= 0, (new[1] - ops.along(of_chunk, at))[:, 0], 0)
        index, of_chunk = (
            xp.where(gives, x, old) for x, old in zip(new, (index, of_chunk), strict=True)
        )
        return index, of_chunk, short - change, better.any()

    state = (index, of_chunk, wanted - got, xp.ones((), bool))
    index, *_ = ops.repeat(_TIMES, once, state, lambda state: not state[3])
    return ops.placed(chunk_rank, index.reshape(-1), xp.repeat(rank[:, 0], columns))
