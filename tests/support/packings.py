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
