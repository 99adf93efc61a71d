"""Errors of mask expressions, masks and segments (masks.txt) have the right type and name the
argument, its value and what is accepted."""

import errors
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax import segments  # noqa: F401, used in masks.txt

BLOCKS = np.ones((5, 5), bool)
DENSE = np.ones((8, 8), bool)
FOUR = np.zeros(4, np.int32)
IDS = np.array([[0, 0, 0, 1, 1, 1, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3]], np.int32)
QUERY, KEY = jnp.ones((2, 8, 2, 8)), jnp.ones((2, 6, 2, 8))
CACHE = jnp.arange(2)
POSITIONS = packax.documents(FOUR, positions=FOUR)
EXPRESSION = packax.causal() & packax.documents(np.repeat([[5, 2], [1, 1]], 8, axis=1))
TREE = packax.masks.tree([0, 0, 1], [-1, 0])
MASK = packax.create_attention_mask(packax.documents(IDS))
TWO = [packax.create_attention_mask(packax.full(), q_len=256, kv_len=256)] * 2
SHORT = packax.create_attention_mask(packax.full(), q_len=8, kv_len=256)


def traced_window():
    jax.jit(lambda left: packax.sliding_window(left).as_array(4, 4))(3)


@pytest.mark.parametrize("call,error,said", list(errors.rows("masks")), ids=str)
def test_error(call, error, said):
    errors.check(call, error, said, globals())
