"""Documents, and masks of every kind with them, for tests of plans that keep documents local."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import packax
from cases import ids_of, positions_of
from context import LENGTH

# Long documents and short ones, tokens alone, padding anywhere, ids that come back.
ROWS = np.stack(
    [
        ids_of((0, 300), *((n, 23 + 3 * n) for n in range(1, 12)), (12, 221), (-1, 52)),
        ids_of((3, 200), (1, 20), (-1, 9), (2, 400), *((n, 1) for n in range(10, 110)), (-1, 295)),
        ids_of(
            *((5, 40), (6, 100), (5, 61), (-2, 200), (7, 60), (6, 7), (8, 93), (9, 180), (4, 120)),
            *((10, 40), (11, 30), (12, 31), (13, 62)),
        ),
        ids_of(*((n, 32) for n in range(32))),
    ]
)
POSITIONS = np.stack([positions_of(row) for row in ROWS])


def of_ids_alone(ids):
    positions = jnp.broadcast_to(jnp.arange(LENGTH) % 300, ids.shape).astype(jnp.int32)
    spans = packax.masks.spans(jnp.where(ids % 2 == 0, ids, -1), packax.sliding_window(100))
    return spans & packax.documents(ids, positions=positions)


def expression_of(kind, ids=ROWS):
    index = np.arange(LENGTH)
    causal, documents = packax.causal(), packax.documents(ids)
    with_positions = packax.documents(ids, positions=POSITIONS)
    return {
        "documents": lambda: causal & documents,
        "one mask for all": lambda: causal & packax.documents(ROWS[1]),
        "both ways": lambda: documents,
        "window": lambda: packax.sliding_window(50, 7) & documents,
        "chunked": lambda: causal & packax.chunked(96) & documents,
        "prefix": lambda: packax.prefix(np.array([90, 700, 500, 33])) & documents,
        "union": lambda: (causal & packax.chunked(64) | packax.sliding_window(30)) & documents,
        "offsets": lambda: packax.causal(offset=np.array([0, -30, 200, 2000])) & documents,
        "ranges": lambda: packax.masks.ranges(index - 70, index + 1) & documents,
        "spans": lambda: (
            packax.masks.spans(
                np.stack([np.roll(row, 37) for row in ROWS]), packax.sliding_window(100)
            )
            & documents
        ),
        "spans of positions": lambda: (
            packax.masks.spans(np.roll(ROWS[1], 50), causal & packax.chunked(96))
            & packax.documents(ids, positions=np.stack([positions_of(row[::-1]) for row in ROWS]))
        ),
        "of ids alone": lambda: of_ids_alone(jnp.asarray(ids)),
        "positions": lambda: causal & with_positions,
        "window of positions": lambda: packax.sliding_window(40, 3) & with_positions,
    }[kind]()


KINDS = (
    *("documents", "one mask for all", "both ways", "window", "chunked", "prefix", "union"),
    *("offsets", "ranges", "spans", "spans of positions", "of ids alone", "positions"),
    "window of positions",
)
