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
    ranks, length, shared = plan.ranks, plan.length, plan.shared
    assert plan.kind == "local" and plan.chunk == 1 and shared is not None
    assert length % ranks == 0 and 0 <= shared <= length // ranks
    assert order.dtype == inverse.dtype == np.int32 and order.shape == inverse.shape
    assert order.shape in ((1, length), (ids.shape[0], length)) and ids.shape[1] == length
    for row in range(max(len(order), len(ids))):
        of_row = order[row if len(order) > 1 else 0]
        document = ids[row if len(ids) > 1 else 0]
        np.testing.assert_array_equal(np.sort(of_row), np.arange(length))
        back = inverse[row if len(order) > 1 else 0]
        np.testing.assert_array_equal(of_row[back], np.arange(length))
        pieces = of_row.reshape(ranks, -1)
        private = pieces[:, shared:]
        assert (np.diff(private, axis=1) > 0).all(), "a part is not in the order of the sequence"
        for rank, piece in enumerate(pieces):
            for one in np.unique(document[piece[shared:]]):
                whole = np.flatnonzero(document == one)
                assert one == PADDING or np.isin(whole, piece).all(), (
                    f"document {one} of row {row} has private rows on rank {rank} and others"
                )


def greedy(ids, ranks: int, shared: int = 0) -> ContextPlan:
    """A local plan of numpy: documents whole on the rank with most room, longest first.

    What does not fit is split, and lies where room is left. `shared`: at least so many rows a rank.
    """
    ids = np.atleast_2d(np.asarray(ids))
    length = ids.shape[1]
    own = length // ranks
    rows = [_one_row(row, ranks) for row in ids]
    shared = max(shared, max(own - min(len(piece) for piece in pieces) for pieces, _ in rows))
    order = np.stack([_in_places(*row, own, shared) for row in rows]).astype(np.int32)
    inverse = np.argsort(order, axis=1).astype(np.int32)
    return ContextPlan(order, inverse, "local", ranks, length, 1, shared=shared)


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


def _in_places(pieces: list[list[int]], split: list[int], own: int, shared: int) -> list[int]:
    rest, order = sorted(split), []
    for piece in pieces:
        fill = [rest.pop(0) for _ in range(own - len(piece))]
        # The last of what is whole fills the shared part.
        private, extra = piece[: own - shared], piece[own - shared :]
        order += [*sorted(fill + extra), *sorted(private)]
    return order
