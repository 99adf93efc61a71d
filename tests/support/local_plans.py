"""Plans of kind "local" for tests: a brute-force check of their invariants, and a greedy planner
that shares no code with packax's."""

from __future__ import annotations

import numpy as np
from packax._src.context.load_balance import checksum
from packax.context import ContextPlan

PADDING = -1


def check_local(plan: ContextPlan, ids) -> None:
    """Every invariant of a local plan for these segment ids, (B or 1, length) or (length,)."""
    ids = np.atleast_2d(np.asarray(ids))
    order, inverse = np.asarray(plan.order), np.asarray(plan.inverse)
    ranks, length = plan.ranks, plan.length
    per_rank = length // ranks
    assert plan.kind == "local" and plan.chunk == 1 and plan.shared is not None
    assert length % ranks == 0 and all(0 <= rows <= per_rank for _, rows in plan.parts)
    assert order.dtype == inverse.dtype == np.int32 and order.shape == inverse.shape
    assert order.shape in ((1, length), (ids.shape[0], length)) and ids.shape[1] == length
    if plan.split is None:
        assert plan.parts[0] == (1, per_rank)
    else:
        assert plan.split.dtype == np.int32
        assert plan.split.shape == (len(order), ranks, len(plan.parts))
        np.testing.assert_array_equal(plan.checksum, np.broadcast_to(checksum(ids), len(order)))
    for row in range(max(len(order), len(ids))):
        at = row if len(order) > 1 else 0
        of_row = order[at]
        document = ids[row if len(ids) > 1 else 0]
        np.testing.assert_array_equal(np.sort(of_row), np.arange(length))
        np.testing.assert_array_equal(of_row[inverse[at]], np.arange(length))
        if plan.split is None:
            continue
        homes = np.full(length, -1)
        split = np.asarray(plan.split)[at]
        for rank, (piece, ends) in enumerate(zip(of_row.reshape(ranks, -1), split, strict=True)):
            assert (np.diff(ends, prepend=0) >= 0).all()
            private = piece[ends[-1] :]
            assert (np.diff(private) > 0).all(), "whole documents are not in the row's order"
            homes[private] = rank
            for level, (groups, rows) in reversed([*enumerate(plan.parts)]):
                assert ends[level] <= rows, "more rows are split than are shared"
                homes[piece[: ends[level]]] = ranks * (level + 1) + rank // (ranks // groups)
        for one in np.setdiff1d(document, [PADDING]):
            found = np.unique(homes[document == one])
            assert len(found) == 1, f"document {one} of row {row} is in several parts: {found}"


def greedy(ids, ranks, shared: int = 0) -> ContextPlan:
    """A local plan in numpy: each document goes whole to the rank with most room, longest first.

    Documents that do not fit are split over the remaining room. `shared`: the least number of
    shared rows per rank. `ranks`: a number, or the sizes of levels; a document that fits into one
    group of ranks is split only within that group.
    """
    ids = np.atleast_2d(np.asarray(ids))
    levels = ranks if isinstance(ranks, tuple) else (ranks,)
    ranks, length = int(np.prod(levels)), ids.shape[1]
    per_rank = length // ranks
    rows = [_one_row(row, levels) for row in ids]
    order = np.array([np.concatenate([x for rank in row for x in rank]) for row in rows], np.int32)
    inverse = np.argsort(order, axis=1).astype(np.int32)
    split = [[np.cumsum([len(x) for x in rank[:-1]]) for rank in row] for row in rows]
    split = np.array(split, np.int32)
    most = tuple(max(shared, int(x)) for x in split.max((0, 1)))
    if most[0] == per_rank:
        return ContextPlan(order, inverse, "local", ranks, length, 1, shared=per_rank)
    known = {"split": split, "checksum": checksum(ids)}
    if len(levels) == 1:
        return ContextPlan(order, inverse, "local", ranks, length, 1, shared=most[0], **known)
    arguments = (order, inverse, "local", ranks, length, 1, most)
    return ContextPlan(*arguments, **known, levels=levels)


def _one_row(ids: np.ndarray, levels: tuple[int, ...]) -> list[list[list[int]]]:
    """For each rank: the rows split at each level, then the rows of whole documents, in order."""
    groups = [[[*range(len(ids))]]]
    for parts in levels:
        groups = [part for group in groups for part in _divided(ids, group, parts)]
    return groups


def _divided(ids: np.ndarray, group: list[list[int]], parts: int) -> list[list[list[int]]]:
    *before, tokens = group
    room = sum(map(len, group)) // parts
    divided = [[rows[part::parts] for rows in before] for part in range(parts)]
    whole: list[list[int]] = [[] for _ in range(parts)]

    def left(part: int) -> int:
        return room - sum(map(len, divided[part])) - len(whole[part])

    documents, lengths = np.unique(
        [ids[n] for n in tokens if ids[n] != PADDING] or [PADDING], return_counts=True
    )
    split: list[int] = []
    for n in np.argsort(-lengths, kind="stable"):
        rows = [m for m in tokens if ids[m] == documents[n] != PADDING]
        most = max(range(parts), key=left)
        (whole[most] if left(most) >= len(rows) else split).extend(rows)
    for token in (n for n in tokens if ids[n] == PADDING):
        whole[max(range(parts), key=left)].append(token)
    split.sort()
    for part in range(parts):
        free = left(part)
        divided[part] += [split[:free], sorted(whole[part])]
        split = split[free:]
    return divided
