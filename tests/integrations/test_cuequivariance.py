"""cuEquivariance's triangle attention on packax, against a dense float64 reference.

Guards against a bias of the wrong sample, rows of different samples that are mixed, a mask of the
wrong keys, and a gradient of the bias that misses rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packax.integrations.cuequivariance import triangle_attention

B, N, H, S, T, D = 2, 3, 2, 20, 28, 16
SCALE = 0.3


def dense(q, k, v, bias, mask):
    logits = jnp.einsum("bnhid,bnhjd->bnhij", q, k) * SCALE + bias
    logits = jnp.where(mask, logits, -1e9)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    p = jnp.exp(logits - top)
    total = p.sum(-1, keepdims=True)
    return jnp.einsum("bnhij,bnhjd->bnhid", p / total, v), jnp.log(total) + top, top


def inputs(*more):
    rng = np.random.default_rng(0)
    shapes = ((B, N, H, S, D), (B, N, H, T, D), (B, N, H, T, D), (B, 1, H, S, T))
    arrays = [rng.standard_normal((*more, *shape)) for shape in shapes]
    mask = rng.random((*more, B, N, 1, 1, T)) < 0.6
    mask[..., 1, 0, 0, 0, :] = False  # a row without keys
    return arrays, mask, rng.standard_normal((*more, B, N, H, S, D))


def both(function, arrays, mask, dout):
    """All results, and the gradients of q, k, v and bias."""

    @jax.jit
    def run(arrays, mask, dout):
        results = function(*arrays, mask)
        gradients = jax.grad(lambda *x: jnp.sum(function(*x, mask)[0] * dout), (0, 1, 2, 3))
        return list(results), gradients(*arrays)

    return run(arrays, mask, dout)


def ours(q, k, v, bias, mask):
    return triangle_attention(q, k, v, bias, mask, SCALE)


def compare(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_it_equals_the_dense_reference(masked):
    arrays, mask, dout = inputs()
    whole = mask if masked else np.ones_like(mask)
    with jax.enable_x64(True):
        expected = both(dense, arrays, whole, dout)
    arrays = [x.astype(np.float32) for x in arrays]
    compare(both(ours, arrays, mask if masked else None, dout.astype(np.float32)), expected)


def test_vmap_becomes_one_call():
    arrays, mask, dout = inputs(2)
    with jax.enable_x64(True):
        expected = jax.vmap(lambda *x: both(dense, *x))(arrays, mask, dout)
    arrays = [x.astype(np.float32) for x in arrays]
    mapped = jax.vmap(lambda *x: both(ours, *x))
    compare(mapped(arrays, mask, dout.astype(np.float32)), expected)


@pytest.mark.parametrize(
    "changes,text",
    [
        ({0: (N, H, S, D)}, "q must have shape \\(B, N, H, length, dim\\)"),
        ({1: (B, N, H, T, 8)}, "k must have q's B, N, H and dim"),
        ({3: (B, N, H, S, T)}, "bias must have shape \\(B, 1, H, Sq, Skv\\)"),
        ({4: (B, N, 1, 1, S)}, "mask must be boolean of shape \\(B, N, 1, 1, Skv\\)"),
    ],
    ids=["q", "k", "bias", "mask"],
)
def test_refusals(changes, text):
    arrays, mask, _ = inputs()
    operands = [*(x.astype(np.float32) for x in arrays), mask]
    for n, shape in changes.items():
        operands[n] = np.zeros(shape, operands[n].dtype)
    with pytest.raises(ValueError, match=text):
        ours(*operands)
