"""The examples of docs/guide/biases.md against dense attention: T5's buckets, and all gradients."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import DOCS

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (DOCS / "guide/biases.md").read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def page():
    space: dict = {}
    for block in BLOCKS:
        exec(block, space)
    return space


def dense(page, query, bias, causal=False):
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, page["k"]) / np.sqrt(query.shape[-1]) + bias
    if causal:
        logits = jnp.where(np.tril(np.ones(logits.shape[2:], bool)), logits, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), page["value"])


def test_a_pair_bias(page):
    query, bias = page["query"], page["pair_bias"]
    expected = jax.grad(lambda x: jnp.sum(dense(page, query, x) ** 2))(bias)
    np.testing.assert_allclose(page["gradient"], expected, rtol=1e-4, atol=1e-5)


def test_t5(page):
    """32 buckets: 16 of one distance each, wider ones up to 128, and the last for all beyond."""
    table = jnp.arange(32.0)[:, None]
    buckets = page["t5_bias"](table, 300)[0, 0]
    known = {0: 0, 1: 1, 15: 15, 16: 16, 18: 16, 19: 17, 64: 26, 127: 31, 128: 31, 299: 31}
    assert {far: int(buckets[299, 299 - far]) for far in known} == known
    assert not np.triu(buckets).any()

    def loss(table):
        bias = page["t5_bias"](table, 96)
        return jnp.sum(dense(page, page["query"], bias, causal=True) ** 2)

    expected = jax.grad(loss)(jax.random.normal(page["key"], (32, 4)))
    np.testing.assert_allclose(page["table_gradient"], expected, rtol=1e-4, atol=1e-4)


def test_dropout(page):
    """Some weights are dropped, and the mean over keys stays about the same."""
    whole = dense(page, page["query"], 0.0, causal=True)
    assert page["out"].shape == whole.shape and np.abs(page["out"] - whole).max() > 0.01
    assert abs(float(jnp.mean(page["out"] - whole))) < 0.02
