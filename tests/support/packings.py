"""Segment ids and positions of packed rows."""

from __future__ import annotations

import numpy as np


def ids_of(*pieces: tuple[int, int]) -> np.ndarray:
    """Ids from (id, length) pieces."""
    return np.concatenate([np.full(length, value, np.int32) for value, length in pieces])


def positions_of(ids: np.ndarray) -> np.ndarray:
    """Positions that restart at every change of id."""
    starts = np.concatenate([[True], ids[1:] != ids[:-1]])
    index = np.arange(len(ids))
    return (index - np.maximum.accumulate(np.where(starts, index, 0))).astype(np.int32)


# Odd: three whole tiles of 128 and a partial one. A single length lets cases share compilations.
LENGTH = 409
ODD = ids_of((0, 1), (1, 17), (2, 128), (3, 63), (4, 131), (5, 64), (6, 5))
PADDED = ids_of((-1, 3), (0, 70), (-1, 61), (1, 100), (2, 1), (-1, 9), (3, 90), (-1, 75))
BACK = ids_of((7, 90), (8, 40), (7, 65), (9, 1), (8, 100), (-1, 13), (7, 100))
assert len(ODD) == len(PADDED) == len(BACK) == LENGTH
