"""Documents, and masks of every kind over them, for tests of plans that keep documents local."""

from __future__ import annotations

import context
import numpy as np
import packax
from cases import ids_of, positions_of

# Long and short documents, documents of one token, padding anywhere, ids that reappear.
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


def expression_of(kind):
    causal, documents = packax.causal(), packax.documents(ROWS)
    positions = np.stack([positions_of(row) for row in ROWS])
    expressions = {
        "window": lambda: packax.sliding_window(50, 7) & documents,
        "chunked": lambda: causal & packax.chunked(96) & documents,
        "prefix": lambda: packax.prefix(np.array([90, 700, 500, 33])) & documents,
        "union": lambda: (causal & packax.chunked(64) | packax.sliding_window(30)) & documents,
        "offsets": lambda: packax.causal(offset=np.array([0, -30, 200, 2000])) & documents,
        "window of positions": lambda: (
            packax.sliding_window(40, 3) & packax.documents(ROWS, positions=positions)
        ),
    }
    return expressions[kind]() if kind in expressions else context.expression_of(kind, ROWS)


KINDS = (
    *("documents", "one mask for all", "both ways", "window", "chunked", "prefix", "union"),
    *("offsets", "ranges", "spans", "spans of positions", "of ids alone", "positions"),
    "window of positions",
)
