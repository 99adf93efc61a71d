"""Recipes of the guide compute what dense attention, or separate documents, compute."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import packax
import pytest
from paths import ROOT

HEADS, KV_HEADS, DIM = 4, 2, 8


def namespace_of(page, *names):
    """The names that the blocks of a page define, from the blocks that define these names."""
    text = (ROOT / "docs" / "guide" / page).read_text()
    space = {"np": np, "jnp": jnp, "packax": packax, "kv_cache": packax.kv_cache}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        if any(re.search(rf"^(def )?{name}\b", block, re.MULTILINE) for name in names):
            exec(block, space)
    return space


def recipe(page, name):
    """A function of a page, without the example that follows it."""
    text = (ROOT / "docs" / "guide" / page).read_text()
    (block,) = re.findall(rf"^```python\n((?:(?!```).)*?^def {name}\(.*?)^```$", text, re.M | re.S)
    functions = re.split(r"^(?=\w+(?:, \w+)* = [\w.]+\()", block, flags=re.M)[0]
    space = {"np": np, "jnp": jnp, "packax": packax, "kv_cache": packax.kv_cache}
    exec(functions, space)
    return space


def normal(*shape):
    return np.random.default_rng(len(shape) + shape[1]).standard_normal(shape).astype(np.float32)


def dense(query, key, value, allowed):
    """Attention of (H, D) rows over keys (N, Hkv, D); allowed (rows, N)."""
    key, value = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key).astype(np.float64) / DIM**0.5
    weights = np.exp(np.where(allowed, scores, -np.inf))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)


def test_last_tokens():
    ids = jnp.array([[2, 2, -1, 0], [1, 1, 1, -1]])
    last = recipe("decoding.md", "last_tokens")["last_tokens"](ids, 3)
    np.testing.assert_array_equal(last, [3, 6, 1])


def test_a_ring_buffer():
    """After prompts shorter and longer than the window; each step equals dense attention."""
    space = recipe("decoding.md", "fill_ring")
    window = space["WINDOW"] = 16
    lengths, steps = np.array([5, 40, 16]), 20
    total = lengths + steps
    key, value = (normal(3, 64, KV_HEADS, DIM) + n for n in range(2))
    ids = packax.segments.from_lengths(lengths, length=70)[None]
    positions = packax.segments.positions(ids)
    packed = [x[ids, positions] for x in (key, value)]
    empty = jnp.zeros((3, window, KV_HEADS, DIM))
    caches = [space["fill_ring"](empty, x, ids, positions, jnp.asarray(lengths)) for x in packed]
    query, at = normal(3, 64, HEADS, DIM), jnp.asarray(lengths)
    for _ in range(steps):
        rows = np.arange(3)[:, None], np.asarray(at)[:, None]
        new = query[rows], key[rows], value[rows]
        out, *caches, after = space["ring_step"](*new, *caches, at)
        for n, p in enumerate(np.asarray(at)):
            first = max(0, p + 1 - window)
            want = dense(new[0][n], key[n, first : p + 1], value[n, first : p + 1], True)
            np.testing.assert_allclose(out[n], want, atol=1e-5)
        at = after
    np.testing.assert_array_equal(at, total)


@pytest.mark.parametrize("parents", [[-1, 0, 1, 0], [-1, -1, 1, 1], [-1, 0, 1, 2]])
def test_a_draft_tree(parents):
    attend = recipe("decoding.md", "attend_to_drafts")["attend_to_drafts"]
    lengths = np.array([4, 33])
    query, key, value = (normal(2, 4, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    caches = [normal(2, 40, KV_HEADS, DIM) + n for n in range(2)]
    out = attend(query, key, value, *caches, jnp.asarray(lengths), parents)
    allowed = np.eye(4, dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            allowed[i] |= allowed[parent]
    for n, cached in enumerate(lengths):
        both = [
            np.concatenate([c[n, :cached], x[n]]) for c, x in zip(caches, (key, value), strict=True)
        ]
        seen = np.concatenate([np.ones((4, cached), bool), allowed], axis=1)
        np.testing.assert_allclose(out[n], dense(query[n], *both, seen), atol=1e-5)


def test_packed_groups():
    """Every answer token has the keys and the predecessor that it has after its prompt alone."""
    space = namespace_of("trees.md", "groups", "advantages", "group_ids")
    tokens, before = space["packed"].tokens, np.asarray(space["before"])
    array = np.asarray(space["expression"].as_array(512, 512))
    found = []
    for row, at in np.argwhere(space["answer_ids"] >= 0):
        group = space["packed"].segment_ids[row, at]
        path = tokens[row, np.flatnonzero(array[row, at])]
        assert space["positions"][row, at] == len(path) - 1
        assert tokens[row, before[row, at]] == path[-2]
        found.append((row, group, space["answer_ids"][row, at], tuple(path.tolist())))
    paths = {path for *_, path in found}
    for prompt, answers in space["groups"]:
        for answer in answers:
            for n in range(len(answer)):
                assert tuple(np.concatenate([prompt, answer[: n + 1]]).tolist()) in paths
    assert len(found) == sum(len(x) for _, answers in space["groups"] for x in answers)
    assert (space["advantages"] != 0).sum() == len(found) and np.isfinite(space["loss"])
