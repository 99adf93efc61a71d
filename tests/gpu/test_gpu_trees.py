"""Packed trees on a GPU. `pytest -m gpu`.

At head dims that have kernels for block lists, plain calls run these on Hopper. Other head dims,
soft caps and sinks use the fallback kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import trees
from gpu_kinds import KINDS, name_of
from gpu_runs import Tensors, assert_agree, assert_close, assert_identical, run, tensors

pytestmark = pytest.mark.gpu

LENGTH = 777


def expression_of(seed, batch, joined="causal", length=LENGTH, segments=14):
    return trees.expression(trees.batch_of_trees(seed, batch, length, segments), joined)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("joined", ["causal", "alone", "window"])
def test_against_the_oracle(kind, joined):
    dtype, dims = kind
    x = tensors(2, LENGTH, LENGTH, 4, 2, dims, dtype)
    expression = expression_of(3, 2, joined)
    assert_close(x, run(x, expression), expression.as_array(LENGTH, LENGTH))


@pytest.mark.parametrize("seed", range(12))
def test_random_trees(seed):
    """Random trees at common head dims, with grouped heads, also with `deterministic=True`."""
    dims = (128, 128), (192, 128), (256, 256)
    x = tensors(3, LENGTH, LENGTH, 8, 2, dims[seed % 3], "bfloat16", seed)
    expression = expression_of(seed, 3, list(trees.JOINED)[seed % len(trees.JOINED)])
    got = run(x, expression)
    assert_close(x, got, expression.as_array(LENGTH, LENGTH))
    assert_identical(got, run(x, expression), "again")
    assert_close(x, run(x, expression, deterministic=True), expression.as_array(LENGTH, LENGTH))


@pytest.mark.parametrize("dim", [64, 128, 256, 40])
def test_soft_cap(dim):
    x = tensors(1, LENGTH, LENGTH, 4, 4, dim, "bfloat16")
    expression = expression_of(5, 1)
    mask = packax.create_attention_mask(expression)
    got = run(x, mask, soft_cap=5.0)

    @jax.jit
    def dense(x):
        def attention(q, k, v):
            s = jnp.einsum("bihd,bjhd->bhij", *(y.astype(jnp.float32) for y in (q, k)))
            s = 5 * jnp.tanh(s * dim**-0.5 / 5)
            allowed = expression.as_array(LENGTH, LENGTH)[:, None]
            p = jax.nn.softmax(jnp.where(allowed, s, -1e30), -1) * allowed.any(-1, keepdims=True)
            return jnp.einsum("bhij,bjhd->bihd", p, v.astype(jnp.float32)).astype(q.dtype)

        return attention(*x[:3])

    wanted = np.asarray(dense(x), np.float32)
    np.testing.assert_allclose(np.asarray(got.out, np.float32), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_other_branches_do_not_change_results(dim):
    lengths, parents = [300, 200, 177, 100], [-1, 0, 0, 2]
    tree = trees.of_lengths(lengths, parents)
    expression = packax.masks.tree(*tree) & packax.causal()
    x = tensors(1, LENGTH, LENGTH, 4, 2, dim, "bfloat16")
    clean = run(x, expression, deterministic=True)
    changed = (tree.ids == 1)[None, :, None, None]
    # Large, but the branch's results stay finite; docs/guide/numerics.md says how far NaNs spread.
    dirty = [jnp.where(changed, 100 * y.astype(jnp.float32), y).astype(y.dtype) for y in x[:4]]
    got = run(Tensors(*dirty, x.dlse), expression, deterministic=True)
    for name, a, b in zip(got._fields, clean, got, strict=True):
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        if name == "lse":
            a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        kept = np.isin(tree.ids, [2, 3] if name in ("dk", "dv") else [0, 2, 3])
        np.testing.assert_array_equal(a[:, kept], b[:, kept], err_msg=name)


@functools.partial(jax.jit, static_argnames="implementation")
def both_passes(x, mask, implementation):
    def attention(*y):
        return packax.flash_attention(*y, mask, return_lse=True, implementation=implementation)

    results, pullback = jax.vjp(attention, *x[:3])
    return *results, *pullback((x.dout, x.dlse))


@pytest.mark.parametrize("name", trees.LARGE)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_large_trees_equal_xla(name, dims):
    """Long lists of mostly full blocks; the mask kernels also produce the same integers as XLA."""
    tree = trees.LARGE[name]()
    length = len(tree.ids)
    x = tensors(1, length, length, 2, 1, dims, "bfloat16")
    expression = packax.masks.tree(*tree) & packax.causal()
    mask = packax.create_attention_mask(expression)
    by_xla = packax.create_attention_mask(expression, implementation="xla")
    for a, b in zip(jax.tree.leaves(mask), jax.tree.leaves(by_xla), strict=True):
        np.testing.assert_array_equal(a, b)
    got, wanted = both_passes(x, mask, "cuda"), both_passes(x, mask, "xla")
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=2.0**-6 * np.abs(b).max(), err_msg=name)


def test_documents_as_trees_are_documents():
    """Trees of one segment each equal documents, which other kernels compute."""
    ids = np.repeat(np.arange(5), [200, 77, 300, 1, 199])
    x = tensors(1, LENGTH, LENGTH, 8, 2, 128, "bfloat16")
    got = run(x, packax.masks.tree(ids, np.full(5, -1)) & packax.causal())
    allowed = (packax.causal() & packax.documents(ids)).as_array(LENGTH, LENGTH)
    assert_close(x, got, allowed)
    assert_agree(got, run(x, packax.causal() & packax.documents(ids)))


def test_mapped():
    """vmap over trees equals one call for all of them."""
    batch = trees.batch_of_trees(9, 4, LENGTH, 14)
    x = tensors(4, LENGTH, LENGTH, 4, 2, 128, "bfloat16")

    @jax.jit
    def together(q, k, v, tree):
        mask = packax.create_attention_mask(packax.masks.tree(*tree) & packax.causal())
        return packax.flash_attention(q, k, v, mask, implementation="cuda")

    def one(q, k, v, tree):
        return together(q[None], k[None], v[None], tree)[0]

    mapped = jax.jit(jax.vmap(one))(*x[:3], batch)
    np.testing.assert_array_equal(
        np.asarray(mapped, np.float32), np.asarray(together(*x[:3], batch), np.float32)
    )
