"""Errors of attention, decoding and the arguments that wrappers share (attention.txt) have the
right type and name the argument, its value and what is accepted.

Guards against NumPy and JAX errors that name no argument, and against arguments that are accepted
silently and have no effect.
"""

import errors
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import PartitionSpec as P  # noqa: F401, as other names, used in attention.txt
from packax.integrations import flash_attention_jax, flax  # noqa: F401
from packax.kvax import ops as kvax
from packax.kvax.utils import attention_specs

Q, ONE = jnp.ones((2, 8, 2, 8)), jnp.ones((2, 1, 2, 8))
OUT, LSE = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 4, 5), np.float32)
LENGTHS, TABLE = np.array([5, 6]), np.zeros((2, 1), int)
IDS = np.zeros((2, 10), np.int32)
KEY = jax.random.key(0)
CAUSAL = packax.causal()
MASK = packax.create_attention_mask(packax.documents(IDS))
PLAN = packax.context_plan(packax.documents(np.zeros((1, 1024), int)), ranks=2)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


GOOD = {"query": zeros(2, 10, 4, 8), "key": zeros(2, 10, 2, 8), "value": zeros(2, 10, 2, 6),
    "mask": MASK}  # fmt: skip


def call(**changes):
    return packax.flash_attention(**{**GOOD, **changes})


def attend(query=Q, key=Q, value=Q, mask=CAUSAL, **options):
    return packax.flash_attention(query, key, value, mask, **options)


def biased(bias):
    return attend(zeros(2, 150, 4, 8), *[zeros(2, 187, 2, 8)] * 2, packax.full(), bias=bias)


def dropped(rate, key):
    return attend(dropout_rate=rate, dropout_key=key)


def decode(query=ONE, key=Q, value=Q, lengths=LENGTHS, **options):
    return packax.decode_attention(query, key, value, lengths, **options)


def shared(query=ONE, lengths=LENGTHS, prefixes=(1,), table=TABLE, **options):
    return packax.decode_shared_prefix(query, Q, Q, lengths, prefixes, block_table=table, **options)


def write(cache=Q, new=ONE):
    return packax.kv_cache.write(cache, new, TABLE, TABLE)


def attend_kvax(query=Q, key=Q):
    with attention_specs((None,) * 4, (None,) * 4):
        return kvax.flash_attention(query, key, Q, *[np.zeros((2, 8), int)] * 4, mask=None)


def build(**options):
    return packax.create_attention_mask(packax.documents(np.zeros(8, int)), **options)


def call_in_jit(**changes):
    traced = {name: x for name, x in {**GOOD, **changes}.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in changes.items() if name not in traced}
    return jax.jit(lambda traced: call(**static, **traced))(traced)


ROWS = list(errors.rows("attention"))
# An array scale is a tracer in jit, which changes the message.
IN_JIT = [row for row in ROWS if row[0].startswith("call(") and "scale" not in row[0]]


def test_the_good_call_is_good():
    assert call().shape == (2, 10, 4, 6)


@pytest.mark.parametrize("call,error,said", ROWS, ids=str)
def test_error(call, error, said):
    errors.check(call, error, said, globals())


@pytest.mark.parametrize("call,error,said", IN_JIT, ids=str)
def test_error_in_jit(call, error, said):
    errors.check(call.replace("call(", "call_in_jit(", 1), error, said, globals())
