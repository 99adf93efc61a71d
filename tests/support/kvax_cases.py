"""Inputs for the tests of packax.kvax: ids, positions and tensors."""

import jax.numpy as jnp
import numpy as np
from packings import ids_of, positions_of

ALONE = ((None,) * 4, (None,) * 4)
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 4, 90, 110, 4, 2, 16

# Padding inside and at the end, an id that reappears, unsorted ids, a query id without keys (7).
KV_IDS = np.stack(
    [
        ids_of((0, 110)),
        ids_of((3, 30), (-1, 9), (1, 41), (-2, 10), (-1, 20)),
        ids_of((5, 20), (4, 31), (5, 20), (-9, 39)),
        ids_of((111, 60), (2**31 - 1, 30), (-1, 20)),
    ]
)
Q_IDS = KV_IDS[:, 20:].copy()
Q_IDS[1, 60:] = 7
POSITIONS = np.stack([positions_of(ids) for ids in KV_IDS])
KV_POSITIONS = POSITIONS.copy()
KV_POSITIONS[3] = np.random.default_rng(5).integers(0, 20, KV_LEN)  # not monotonic
TOKENS = (KV_POSITIONS[:, 20:], Q_IDS, KV_POSITIONS, KV_IDS)


def tensors():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return (
        normal(BATCH, Q_LEN, HEADS, DIM),
        normal(BATCH, KV_LEN, KV_HEADS, DIM),
        normal(BATCH, KV_LEN, KV_HEADS, DIM + 8),
        normal(BATCH, Q_LEN, HEADS, DIM + 8),
    )
