"""Masks that are probably a mistake warn where their values are known, and no others do
(warnings.txt)."""

import re
import warnings

import errors
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest

OFFSETS, ON_DEVICE = np.array([6, 2], np.int32), jnp.array([6, 2])
IDS = np.array([[0, 0, 0, 1, 1, 1, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3]], np.int32)
LENGTHS = np.array([[2, 2, 2, 2, 2, 2, 0, 0], [3] * 8])  # of each row's document


def build(expression, q_len=4, kv_len=10):
    return packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)


def twice(expression):
    build(expression)
    jax.jit(build)(expression)


def checked(ids):
    with packax.context.debug_checks():
        packax.documents(ids)


@jax.jit
def traced_prefixes(lengths, ids):
    return packax.create_attention_mask(packax.prefix(lengths) & packax.documents(ids))


@pytest.mark.parametrize("call,_,said", list(errors.rows("warnings")), ids=str)
def test_warning(call, _, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eval(call, globals())
    if said == ["none"]:
        assert not caught, caught[0].message
    else:
        pattern = ".*".join(map(re.escape, said))
        assert any(re.search(pattern, str(x.message), re.DOTALL) for x in caught), caught


def test_each_warning_stands_at_the_call_of_the_user():
    with pytest.warns(UserWarning) as caught:
        packax.documents([1, 1, 0])
        build(packax.causal(6) & packax.sliding_window(3))
    assert {re.sub(".*/", "", x.filename) for x in caught} == {"test_mask_warnings.py"}
