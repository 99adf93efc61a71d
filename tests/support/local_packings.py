"""Rows of packed documents of every kind, for tests of plans that keep documents local."""

from __future__ import annotations

import numpy as np
import packax
import packings

LENGTH = 2048

# Long and short documents, documents of one token, padding anywhere, ids that reappear.
PACKED = [
    ((0, 300), *((n, 23 + 3 * n) for n in range(1, 12)), (12, 221), (-1, 52)),
    ((3, 200), (1, 20), (-1, 9), (2, 400), *((n, 1) for n in range(10, 110)), (-1, 295)),
    (
        *((5, 40), (6, 100), (5, 61), (-2, 200), (7, 60), (6, 7), (8, 93), (9, 180), (4, 120)),
        *((10, 40), (11, 30), (12, 31), (13, 62)),
    ),
    tuple((n, 32) for n in range(32)),
]
ROWS = np.stack([packings.ids_of(*pieces) for pieces in PACKED])
EXPRESSION = packax.causal() & packax.documents(ROWS)


def ids_of(lengths, length=LENGTH, padding_between=False):
    """Consecutive documents numbered from 0, with the padding after them or between them."""
    ids = np.full(length, -1, np.int32)
    rest = length - sum(lengths)
    at = 0
    for number, size in enumerate(lengths):
        ids[at : at + size] = number
        gap = rest // len(lengths) if padding_between else 0
        at += size + gap
    return ids


def lognormal(rng, mean, length=LENGTH):
    lengths = []
    while sum(lengths) < length:
        lengths.append(int(np.clip(rng.lognormal(np.log(mean) - 0.72, 1.2), 1, length)))
    lengths[-1] -= sum(lengths) - length
    return [n for n in lengths if n]


def random_row(rng):
    """A row of document ids with a random kind of packing."""
    kind = rng.integers(8)
    lengths = lognormal(rng, int(rng.choice([20, 60, 200, 700])))
    if kind == 0:
        lengths = [1] * int(rng.integers(1, LENGTH))
    elif kind == 1:
        lengths = [int(rng.integers(1, 400))] * 5
    elif kind == 2:
        lengths = lengths[: max(1, len(lengths) // 2)]
    elif kind == 3:
        lengths = [int(rng.integers(1, LENGTH + 1))]
    ids = ids_of(lengths, padding_between=bool(rng.integers(2)))
    if kind == 4:  # unsorted and negative ids
        names = rng.permutation(np.arange(-LENGTH, LENGTH))
        ids = np.where(ids < 0, -1, names[ids])
    elif kind == 5:  # ids that reappear
        ids = np.where(ids < 0, -1, ids % 3)
    elif kind == 6:
        ids = rng.integers(-1, 5, LENGTH).astype(np.int32)
    return ids.astype(np.int32)
