"""A small call with packed documents, which the tests of jax's transformations transform."""

import jax.numpy as jnp
import numpy as np
import packax
import packings

IDS = packings.ids_of((3, 4), (-1, 1), (5, 3), (3, 2), (-1, 3))  # an id that reappears, padding
LENGTH, HEADS, KV_HEADS, DIM, V_DIM = len(IDS), 4, 2, 4, 3
EXPRESSION = packax.causal() & packax.documents(IDS)


def random(seed, *lead):
    """query, key, value, sinks in float64."""
    rng = np.random.default_rng(seed)
    shapes = (LENGTH, HEADS, DIM), (LENGTH, KV_HEADS, DIM), (LENGTH, KV_HEADS, V_DIM)
    tensors = [jnp.asarray(rng.standard_normal((*lead, 2, *shape))) for shape in shapes]
    return (*tensors, jnp.asarray(rng.standard_normal((*lead, HEADS))))
