"""Attention over packed trees in blockwise XLA: outputs and all gradients against the oracle, and
that siblings do not affect each other.

Guards against attention between siblings, a shared prefix whose gradient misses a branch, and a
tree that differs from its branches laid out as documents.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
import trees

LENGTH, SEGMENTS, BATCH, HEADS, KV_HEADS, DIM = 300, 10, 3, 4, 2, 16


@functools.cache
def tensors(dtype="float32"):
    rng = np.random.default_rng(7)
    shapes = [(BATCH, LENGTH, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    drawn = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return (*drawn, jnp.asarray(rng.standard_normal((BATCH, HEADS, LENGTH)), jnp.float32))


@functools.partial(jax.jit, static_argnames="joined")
def run(query, key, value, dout, dlse, ids, parents, joined="causal"):
    mask = packax.create_attention_mask(trees.expression(trees.Tree(ids, parents), joined))

    def attention(*x):
        return packax.flash_attention(*x, mask, return_lse=True)

    return oracle.run(attention, query, key, value, dout, dlse)


def check(seed, joined, dtype):
    tree = trees.batch_of_trees(seed, BATCH, LENGTH, SEGMENTS)
    *operands, dout, dlse = tensors(dtype)
    got = run(*operands, dout, dlse, *tree, joined=joined)
    oracle_args = trees.meaning(tree, joined), DIM**-0.5, dout, dlse
    oracle.check(got, oracle.exact(*operands, *oracle_args), oracle.plain(*operands, *oracle_args))


@pytest.mark.exhaustive
@pytest.mark.parametrize("joined", trees.JOINED)
def test_a_thousand_trees(joined):
    for seed in range(10, 10 + 1000 // BATCH // len(trees.JOINED) + 1):
        check(seed, joined, "float32")


def test_what_siblings_hold_changes_nothing():
    """One answer's values are replaced by huge ones: every token that does not attend to it keeps
    every bit."""
    tree = trees.of_lengths([90, 70, 40, 60, 40], [-1, 0, 1, 1, 0])
    ids, parents = (np.broadcast_to(x, (BATCH, len(x))) for x in tree)
    clean = run(*tensors(), ids, parents)
    *operands, dlse = tensors()
    changed = tree.ids == 1
    dirty = [jnp.where(changed[:, None, None], 1e30 * x + 1, x) for x in operands]
    got = run(*dirty, dlse, ids, parents)
    for name, x, y in zip(got._fields, clean, got, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if name == "lse":
            x, y = x.swapaxes(1, 2), y.swapaxes(1, 2)
        # Rows below the answer attend to it; keys above it receive its gradients.
        kept = np.isin(tree.ids, [4] if name in ("dk", "dv") else [0, 4])
        np.testing.assert_array_equal(x[:, kept], y[:, kept], err_msg=name)
        assert not np.array_equal(x[:, changed], y[:, changed])


def test_a_tree_is_its_branches_as_documents():
    """A prompt with several answers equals separate documents that repeat the prompt; the prompt's
    gradients are sums over its copies."""
    prompt, answers = 100, [60, 90, 50]
    tree = trees.of_lengths([prompt, *answers], [-1, 0, 0, 0])
    copies, ids, at = [], [], prompt
    for n, length in enumerate(answers):
        copies += [np.arange(prompt), np.arange(at, at + length)]
        ids.append(np.full(prompt + length, n))
        at += length
    index, ids = np.concatenate(copies), np.concatenate(ids)
    query, key, value, dout, _ = tensors()
    first = np.unique(index, return_index=True)[1]  # only one copy of each token has a cotangent
    has_cotangent = np.isin(np.arange(len(index)), first)[:, None, None]

    def attend(mask, x):
        return packax.flash_attention(*x, packax.create_attention_mask(mask))

    def as_documents(*x):
        out = attend(packax.causal() & packax.documents(ids), [y[:, index] for y in x])
        return jnp.where(has_cotangent, out * dout[:, index], 0).sum(), out[:, first]

    def as_tree(*x):
        group_ids = np.zeros(LENGTH, int)
        answer_ids = np.where(tree.ids == 0, -1, tree.ids)
        out = attend(packax.masks.shared_prefix(group_ids, answer_ids) & packax.causal(), x)
        return (out * dout).sum(), out

    results = [
        jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(query, key, value)
        for f in (as_documents, as_tree)
    ]
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
