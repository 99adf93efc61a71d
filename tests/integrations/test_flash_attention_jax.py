"""packax.integrations.flash_attention_jax: key masks and shapes of every kind, and kernels.

test_faces.py and test_originals.py compare results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packax.integrations import flash_attention_jax as ours

RNG = np.random.default_rng(2)


def test_key_masks_of_every_kind():
    q, k, v = (jnp.asarray(RNG.standard_normal((2, 3, 37, 8)), jnp.float32) for _ in range(3))
    mask = RNG.random((2, 37)) < 0.5
    out = ours.flash_attention(q, k, v, mask)
    for same in (mask.astype(np.int32), jnp.where(mask, 0.5, 0), mask.tolist()):
        np.testing.assert_array_equal(out, ours.flash_attention(q, k, v, same))
    one = ours.flash_attention(q, k, v, mask[0])
    np.testing.assert_array_equal(one[0], out[0])
    np.testing.assert_array_equal(one, ours.flash_attention(q, k, v, mask[:1]))
    assert np.abs(one[1] - out[1]).max() > 0.1


@pytest.mark.parametrize(
    "q,k,v",
    [
        ((2, 4, 21, 8), (2, 1, 21, 8), (2, 21, 8)),
        ((19, 8), (19, 8), (19, 8)),
        ((4, 19, 8), (4, 19, 8), (19, 8)),
        ((2, 1, 4, 2, 19, 8), (2, 1, 4, 2, 19, 8), (2, 1, 4, 19, 8)),
    ],
)
def test_axes_that_are_absent(q, k, v):
    """The results of the same call with all axes, (batch, heads, length, dim)."""
    arrays = [jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in (q, k, v)]
    out = ours.causal_flash_attention(*arrays)
    assert out.shape == q
    heads = q[-3] if len(q) > 2 else 1
    batch = np.prod(q[:-3], dtype=int)
    whole = []
    for x in arrays:
        own = x.shape[-3] if x.ndim == len(q) > 2 else 1
        x = x.reshape(batch, own, *x.shape[-2:])
        whole.append(jnp.broadcast_to(x, (batch, heads, *x.shape[2:])))
    want = ours.causal_flash_attention(*whole)
    np.testing.assert_allclose(out, want.reshape(q), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_nothing_to_attend(sizes):
    batch, q_len, k_len = sizes
    q, k = jnp.ones((batch, 4, q_len, 8)), jnp.ones((batch, 4, k_len, 8))
    for out in (
        ours.flash_attention(q, k, k, jnp.ones((batch, k_len), bool)),
        ours.causal_flash_attention(q, k, k),
    ):
        assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize(
    ("dtype", "dim", "kernels"),
    [
        ("bfloat16", 64, True),
        ("float16", 128, True),
        ("float32", 64, True),
        ("float32", 20, False),
        ("bfloat16", 600, False),
    ],
)
def test_kernels_where_there_are_and_xla_for_the_rest(extension, dtype, dim, kernels):
    """On every backend no request may fail because a kernel is missing."""
    x = jax.ShapeDtypeStruct((2, 3, 37, dim), dtype)
    traced = jax.jit(jax.grad(lambda *x: ours.causal_flash_attention(*x).sum())).trace(x, x, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("packax_forward" in text, "packax_backward" in text) == (kernels, kernels)
