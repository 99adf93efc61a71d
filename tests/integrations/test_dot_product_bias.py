"""packax.dot_product_attention with biases and dense masks gives the results of jax.nn, on packax's
kernels.

Guards against a bias added to the wrong heads or rows, a gradient of another shape, an array
expanded over its broadcast axes, and a silent use of jax.nn's quadratic path.
"""

import re
import warnings

import jax
import jax.export
import jax.numpy as jnp
import lowered
import numpy as np
import packax
import pytest
from dot_products import DENSE, HEADS, S, T, tensors, theirs
from packax.integrations.fallback import FallbackWarning
from tiers import some

BIAS = np.random.default_rng(3).standard_normal((2, HEADS, T, S)).astype(np.float32)


@pytest.fixture(autouse=True)
def no_fallback():
    """Also forbids rank promotion, as JAX's own tests do."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("raise"):
        warnings.simplefilter("error", FallbackWarning)
        yield


def cut(array, shape):
    """For a shape such as "1011", where 0 is an axis of size 1."""
    return array[tuple(slice(None) if whole == "1" else slice(1) for whole in shape)]


def run(attention, q, k, v, bias, residual=True, **options):
    """Output, residual and gradients of the tensors and the bias."""

    @jax.jit
    def all_of_it(*x):
        def call(*x):
            q, k, v = x[:3]
            added = x[3] if bias is not None else None
            out = attention(q, k, v, added, **options, return_residual=residual)
            return out if residual else (out, ())

        out, transpose, rest = jax.vjp(call, *x, has_aux=True)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        return out, rest, transpose(weights)

    return all_of_it(*(x for x in (q, k, v, bias) if x is not None))


def packax_nn(*x, **options):
    return packax.dot_product_attention(*x, **options)


@pytest.mark.parametrize("dtype", some([jnp.float32, jnp.bfloat16, jnp.int32], 2))
def test_bfloat16_with_biases_of_every_dtype(dtype):
    """As close to the exact result as jax.nn in the same dtype; an integer bias has no gradient."""
    bias = jnp.asarray(3 * cut(BIAS, "0111"), dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)

    def results_of(attention, tensors, bias):
        def call(q, k, v, added, **more):
            return attention(q, k, v, added if floating else bias, **more)

        given = bias if floating else None
        return jax.tree.leaves(run(call, *tensors, given, residual=False, mask=DENSE))

    half = tensors(dtype=jnp.bfloat16)
    wide = tuple(x.astype(jnp.float32) for x in half)
    true = results_of(
        jax.nn.dot_product_attention, wide, bias.astype(jnp.float32) if floating else bias
    )
    plain = results_of(jax.nn.dot_product_attention, half, bias)
    for x, y, z in zip(results_of(packax_nn, half, bias), plain, true, strict=True):
        assert x.dtype == y.dtype
        errors = [np.abs(np.asarray(one, np.float32) - z).max() for one in (x, y)]
        assert errors[0] <= 2 * errors[1]


def test_rows_that_a_bias_leaves_no_key():
    """0, also in gradients, where jax.nn gives NaN; other rows equal those under a mask."""
    q, k, v = tensors()
    bias = BIAS.copy()
    bias[:, 1, 4] = -np.inf
    bias[:, :, :, 5] = -np.inf
    out, residual, gradients = run(packax_nn, q, k, v, jnp.asarray(bias))
    assert not np.any(out[:, 4, 1]) and np.all(np.isneginf(residual[:, 4, 1]))
    assert not np.any(gradients[0][:, 4, 1]) and not np.any(gradients[3][:, 1, 4])
    assert all(np.all(np.isfinite(x)) for x in gradients)
    mask = np.arange(S) != 5
    whole = run(theirs, q, k, v, jnp.asarray(BIAS), mask=jnp.asarray(mask)[None, None, None])[0]
    others = np.ones((2, T, HEADS), bool)
    others[:, 4, 1] = False
    np.testing.assert_allclose(out[others], whole[others], rtol=2e-5, atol=5e-6)


def test_expressions_and_built_masks_with_a_bias():
    q, k, v = tensors(keys=T)
    bias = jnp.asarray(BIAS[..., :T])
    documents = packax.documents(np.repeat([0, 1], [9, 12]))
    dense = jnp.asarray(documents.as_array(T, T)[None, None])
    expected = jax.nn.dot_product_attention(q, k, v, bias, dense, is_causal=True)
    ours = packax.dot_product_attention(q, k, v, bias, documents, is_causal=True)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=5e-6)
    built = packax.create_attention_mask(documents & packax.causal())
    np.testing.assert_array_equal(packax.dot_product_attention(q, k, v, bias, built), ours)


def test_without_a_batch():
    q, k, v = (x[0] for x in tensors(1))
    bias, mask = jnp.asarray(BIAS[0]), jnp.asarray(DENSE[0, 0])
    ours = packax.dot_product_attention(q, k, v, bias, mask)
    expected = jax.nn.dot_product_attention(q, k, v, bias, mask[None, None])
    assert ours.shape == q.shape
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize(("rows", "keys", "batch"), [(0, S, 2), (T, 0, 2), (T, S, 0)])
def test_nothing_to_attend(rows, keys, batch):
    q, k, v = tensors(batch, rows, keys)
    mask, bias = np.ones((1, 1, rows, keys), bool), np.ones((batch, HEADS, rows, keys))
    out = packax.dot_product_attention(q, k, v, bias, mask)
    assert out.shape == q.shape and not np.any(out)


def text_of(q, k, v, **options):
    def loss(q, k, v, bias):
        out = packax.dot_product_attention(q, k, v, bias, **options)
        return out.astype(jnp.float32).sum()

    both = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    length = q.shape[1], k.shape[1]
    return lowered.text_of(both, q, k, v, jax.ShapeDtypeStruct((1, 8, *length), jnp.float32))


@pytest.mark.parametrize("dim", [64, 256])
def test_kernels_that_are_called(extension, dim):
    """Both passes use kernels with a bias, and the bias is never expanded over the batch."""
    text = text_of(*lowered.abstract(dim=dim, v_dim=dim), is_causal=True)
    assert {"packax_forward_v1", "packax_backward_v1"} <= set(re.findall(r"packax_\w+_v1", text))
    assert "2x8x300x300" not in text and "8x300x300" in text


def test_no_kernels_for_a_bias(extension, monkeypatch):
    """Above head dim 256: jax.nn's own path, with one warning, and its gradient."""
    monkeypatch.setattr(packax.integrations.fallback, "_said", set())
    wide = lowered.abstract(dim=264, v_dim=264)
    with pytest.warns(FallbackWarning, match=r"a bias, bfloat16 and head dim 264: runs on"):
        text = text_of(*wide)
    assert "packax" not in text
    with pytest.raises(NotImplementedError, match=r"264: there is no kernel for it, and impl"):
        text_of(*wide, implementation="cuda")


def test_a_constant_mask_is_not_computed_while_compiling():
    """XLA spent 11 s on folding a 2048 x 2048 mask into bits: only the mask itself is a
    constant."""
    q = jnp.ones((1, 320, HEADS, 8))
    mask = np.tril(np.ones((320, 320), bool))
    run = jax.jit(lambda q: packax.dot_product_attention(q, q, q, mask=mask))
    text = run.lower(q).compile().as_text()
    constants = re.findall(r"= (\w+\[[\d,]*\b320\b[\d,]*\])\S* constant", text)
    assert constants == ["pred[1,1,320,320]"]


@pytest.mark.exhaustive
def test_export_with_symbolic_sizes():
    def run(query, key, bias, mask):
        return packax.dot_product_attention(query, key, key, bias, mask, is_causal=True)

    rng = np.random.default_rng(3)
    query, key = (jnp.asarray(rng.standard_normal((3, 70, h, 8)), jnp.float32) for h in (4, 2))
    batch, length = jax.export.symbolic_shape("b, s")
    sizes = {3: batch, 70: length}
    for shape in ((3, 1, 70, 70), (1, 4, 70, 1), (1, 4, 1, 70)):
        bias = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        x = query, key, bias, bias < 0.7
        shapes = [jax.ShapeDtypeStruct([sizes.get(n, n) for n in y.shape], y.dtype) for y in x]
        program = jax.export.export(jax.jit(run))(*shapes)
        np.testing.assert_allclose(program.call(*x), jax.jit(run)(*x), rtol=1e-5, atol=1e-6)
