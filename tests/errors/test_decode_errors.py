"""Errors of decoding and of the caches (decoding.txt) have the right type and name the argument,
its value and what is accepted."""

import errors
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax import kv_cache

FP8 = jnp.float8_e4m3fn
SEQUENCES = {"query": (2, 1, 8, 64), "key": (2, 4096, 2, 64), "value": (2, 4096, 2, 64)}


def decode(dtypes=(), **given):
    """Shapes given as tuples, and arrays. dtypes: those that are not float32, or int32."""
    of = dict.fromkeys(("query", "key", "value", "sinks"), jnp.float32) | dict(dtypes)
    call = SEQUENCES | {"kv_lengths": (2,)} | given
    of_numbers = ("window", "scale", "soft_cap", "causal", "return_lse", "implementation")
    shapes = {n: x for n, x in call.items() if type(x) is tuple and n not in of_numbers}
    arrays = {n: jax.ShapeDtypeStruct(x, of.get(n, jnp.int32)) for n, x in shapes.items()}
    others = {n: x for n, x in call.items() if n not in arrays}
    jax.eval_shape(lambda x: packax.decode_attention(**x, **others), arrays)


def fp8(**change):
    cache = jnp.ones((3, 8, 2, 8), FP8)
    call = {"query": jnp.ones((3, 1, 2, 8)), "key": cache, "value": cache}
    packax.decode_attention(**call | {"kv_lengths": np.array([1, 2, 3])} | change)


def shared(prefixes):
    query, pages = jnp.ones((4, 1, 4, 16)), jnp.ones((9, 8, 2, 16))
    table = np.zeros((4, 9), int)
    packax.decode_shared_prefix(query, pages, pages, np.ones(4, int), prefixes, block_table=table)


Q, TABLE, LENS = jnp.ones((6, 4, 8)), np.zeros((2, 3), int), np.array([4, 5])


def ragged(**changes):
    cache = jnp.ones((5, 4, 2, 8))
    call = {"query": Q, "key": cache, "value": cache, "kv_lens": LENS, "page_indices": TABLE}
    packax.ragged_paged_attention(**call | {"cu_q_lens": np.array([0, 1, 6])} | changes)


def write(**change):
    given = {"cache": np.zeros((3, 7, 2, 4)), "new": np.zeros((2, 10, 2, 4))}
    given |= {"sequence_ids": np.zeros((2, 10), int), "positions": np.zeros((2, 10), int)}
    kv_cache.write(**given | change)


@pytest.mark.parametrize("call,error,said", list(errors.rows("decoding")), ids=str)
def test_error(call, error, said):
    errors.check(call, error, said, globals())
