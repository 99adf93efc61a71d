"""Plans of kind "local" for tests: what must hold of one, by brute force, and a greedy that makes
some without any of packax's own code for it."""

from __future__ import annotations

import numpy as np
from packax import ContextPlan

PADDING = -1


def check_local(plan: ContextPlan, ids) -> None:
    """Every invariant of a local plan for these segment ids, (B or 1, length) or (length,)."""
    ids = np.atleast_2d(np.asarray(ids))
    order, inverse = np.asarray(plan.order), np.asarray(plan.inverse)
    ranks, length = plan.ranks, plan.length
    own = length // ranks
    assert plan.kind == "local" and plan.chunk == 1 and plan.shared is not None
    assert length % ranks == 0 and all(0 <= rows <= own for _, rows in plan.parts)
    assert order.dtype == inverse.dtype == np.int32 and order.shape == inverse.shape
    assert order.shape in ((1, length), (ids.shape[0], length)) and ids.shape[1] == length
    if plan.split is None:
        assert plan.parts[0] == (1, own)
    else:
        assert plan.split.dtype == np.int32
        assert plan.split.shape == (len(order), ranks, len(plan.parts))
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
            there = np.unique(homes[document == one])
            assert len(there) == 1, f"document {one} of row {row} is in several parts: {there}"


def greedy(ids, ranks: int, shared: int = 0) -> ContextPlan:
    """A local plan of numpy: documents whole on the rank with most room, longest first.

    What does not fit is split, and lies where room is left. `shared`: at least so many rows a rank.
    """
    ids = np.atleast_2d(np.asarray(ids))
    length = ids.shape[1]
    own = length // ranks
    rows = [_one_row(row, ranks) for row in ids]
    shared = max(shared, max(own - min(len(piece) for piece in pieces) for pieces, _ in rows))
    order = np.stack([_in_places(*row, own) for row in rows]).astype(np.int32)
    inverse = np.argsort(order, axis=1).astype(np.int32)
    split = np.array([[own - len(piece) for piece in pieces] for pieces, _ in rows], np.int32)
    if shared == own:
        return ContextPlan(order, inverse, "local", ranks, length, 1, shared=shared)
    return ContextPlan(
        order, inverse, "local", ranks, length, 1, shared=shared, split=split[:, :, None]
    )


def _one_row(ids: np.ndarray, ranks: int) -> tuple[list[list[int]], list[int]]:
    """What lies whole on each rank, padding among it; and what is split."""
    pieces: list[list[int]] = [[] for _ in range(ranks)]
    documents, lengths = np.unique(ids[ids != PADDING], return_counts=True)
    rest = [*np.flatnonzero(ids == PADDING)]
    split: list[int] = []
    for n in np.argsort(-lengths, kind="stable"):
        least = min(pieces, key=len)
        fits = len(least) + lengths[n] <= len(ids) // ranks
        (least if fits else split).extend(np.flatnonzero(ids == documents[n]))
    for token in rest:
        min(pieces, key=len).append(token)
    return pieces, split


def _in_places(pieces: list[list[int]], split: list[int], own: int) -> list[int]:
    rest, order = sorted(split), []
    for piece in pieces:
        fill = [rest.pop(0) for _ in range(own - len(piece))]
        order += [*fill, *sorted(piece)]
    return order
