"""packax.dot_product_attention next to jax.nn's: masks of packax, windows, residuals, dtypes."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from dot_products import DIM, HEADS, RESIDUALS, S, T, tensors, theirs
from packax.integrations.fallback import FallbackWarning
from tiers import some


def test_residual_has_the_dtype_of_key_and_no_gradient():
    """As in jax.nn; bfloat16 outputs differ by at most one rounding."""
    q, k, v = tensors(dtype=jnp.bfloat16)
    call = functools.partial(packax.dot_product_attention, is_causal=True, return_residual=True)
    out, residual = call(q, k, v)
    other, expected = theirs(q, k, v, is_causal=True)
    assert residual.dtype == expected.dtype == jnp.bfloat16
    assert residual.shape == expected.shape == (2, T, HEADS)
    for x, y in ((out, other), (residual, expected)):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=2**-6, atol=2**-6)
    gradient = jax.grad(lambda q: call(q, k, v)[1].astype(jnp.float32).sum())(q)
    assert not np.any(gradient)


def test_only_the_residual_asks_for_the_lse(monkeypatch):
    """Its cotangent costs the backward an operand."""
    seen = []
    real = packax.flash_attention
    monkeypatch.setattr(
        packax,
        "flash_attention",
        lambda *x, **options: seen.append(options.get("return_lse")) or real(*x, **options),
    )
    packax.dot_product_attention(*tensors())
    packax.dot_product_attention(*tensors(), return_residual=True)
    assert seen == [None, True]


def test_windows_beyond_int32():
    x = tensors()
    for far in (2**31 - 1, 10**12):
        np.testing.assert_array_equal(
            packax.dot_product_attention(*x, local_window_size=(far, np.int64(2))),
            packax.dot_product_attention(*x, local_window_size=(50, 2)),
        )


@pytest.mark.parametrize("dtype", some(["int8", "uint32", "float32", "float16"], 1, 3))
def test_windows_that_are_traced(dtype):
    """A scan over layers with different windows runs on packax's path and equals jax.nn."""
    q, k, v = tensors(keys=T)
    windows = jnp.array([[3, 2], [0, 0], [7, 0], [99, 1]], dtype)
    if jnp.issubdtype(windows.dtype, jnp.floating):
        windows = windows + 0.5

    def layers(attention, q):
        def layer(x, window):
            call = functools.partial(attention, local_window_size=tuple(window))
            return call(x, k, v, mask=jnp.ones((1, 1, 1, T), bool)), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, windows)[0]))

    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        ours = jax.jit(jax.value_and_grad(functools.partial(layers, packax.dot_product_attention)))(
            q
        )
    theirs = jax.jit(jax.value_and_grad(functools.partial(layers, jax.nn.dot_product_attention)))(q)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=5e-6)


def test_what_python_reads_as_numbers():
    """As in jax.nn: is_causal=None is not causal, scale=True is 1, and a NaN window reaches no
    key."""
    q, k, v = tensors(keys=T)
    for options in (
        {"is_causal": None},
        {"scale": True},
        {"local_window_size": (2.0, np.inf)},
    ):
        want = jax.nn.dot_product_attention(q, k, v, **options, mask=jnp.ones((1,) * 4, bool))
        got = packax.dot_product_attention(q, k, v, **options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert not np.any(packax.dot_product_attention(q, k, v, local_window_size=(np.nan, 3)))


IDS = np.repeat([0, 1, -1], [9, 8, 4])


def test_expressions_and_built_masks():
    q, k, v = tensors(keys=T)
    expression = packax.causal() & packax.documents(IDS)
    out = packax.dot_product_attention(q, k, v, mask=expression)
    built = packax.dot_product_attention(q, k, v, mask=packax.create_attention_mask(expression))
    with_causal = packax.dot_product_attention(q, k, v, mask=packax.documents(IDS), is_causal=True)
    dense = jax.nn.dot_product_attention(q, k, v, mask=expression.as_array(T, T)[None, None])
    np.testing.assert_array_equal(out, built)
    np.testing.assert_array_equal(out, with_causal)
    np.testing.assert_allclose(out[:, :17], dense[:, :17], rtol=2e-5, atol=2e-6)
    assert not np.any(out[:, 17:])


def test_implementations_of_jax_nn():
    """An explicit choice, which supports everything that jax.nn does, and expressions too."""
    q, k, v = tensors(keys=T)
    rng = np.random.default_rng(7)
    bias = jnp.asarray(rng.standard_normal((1, HEADS, T, T)), jnp.float32)
    mask = rng.random((2, 1, T, T)) < 0.7
    out = packax.dot_product_attention(q, k, v, bias, mask, implementation="xla")
    np.testing.assert_array_equal(out, jax.nn.dot_product_attention(q, k, v, bias, mask))
    documents = packax.documents(np.stack([IDS, IDS[::-1]]))
    out = packax.dot_product_attention(q, k, v, mask=documents, implementation="xla")
    expected = packax.dot_product_attention(q, k, v, mask=documents)
    np.testing.assert_allclose(out[0, :17], expected[0, :17], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(out[1, 4:], expected[1, 4:], rtol=2e-5, atol=2e-6)
    chosen = rng.random((2, HEADS, 3, 3)) < 0.5  # per head; then for batch 1 and without a batch
    for one in (chosen, chosen[:1], chosen[0, 0]):
        blocks = packax.masks.block_sparse(one | np.eye(3, dtype=bool), 7)
        out = packax.dot_product_attention(q, k, v, mask=blocks, implementation="xla")
        expected = packax.dot_product_attention(q, k, v, mask=blocks)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    if RESIDUALS:
        options = {"mask": documents, "implementation": "xla", "return_residual": True}
        assert packax.dot_product_attention(q, k, v, **options)[1].shape == (2, T, HEADS)


def test_cudnn_is_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(
        packax.integrations.jax_nn,
        "jax_nn_attention",
        lambda *x, return_residual=False, **options: seen.append(options) or x[0],
    )
    packax.dot_product_attention(*tensors(), implementation="cudnn", is_causal=True)
    assert seen[0]["implementation"] == "cudnn" and seen[0]["is_causal"] is True


def test_dims_as_jax_nn_takes_them():
    """One row without a length axis, flags as numbers, an integer scale, empty batches."""
    q, k, v = tensors(1)
    one = jax.nn.dot_product_attention(q[0, 0], k[0], v[0])
    np.testing.assert_allclose(
        packax.dot_product_attention(q[0, 0], k[0], v[0]), one, rtol=2e-5, atol=2e-6
    )
    assert one.shape == (HEADS, DIM)
    flags = [packax.dot_product_attention(q, k, v, is_causal=x) for x in (True, 1, jnp.bool_(True))]
    for other in flags[1:]:
        np.testing.assert_array_equal(other, flags[0])
    np.testing.assert_array_equal(
        packax.dot_product_attention(q, k, v, scale=jnp.int32(2)),
        packax.dot_product_attention(q, k, v, scale=jnp.float32(2)),
    )
    assert packax.dot_product_attention(q[:0], k[:0], v[:0]).shape == (0, T, HEADS, DIM)
    dense = jnp.ones((0, HEADS, T, S), bool)
    assert packax.dot_product_attention(q[:0], k[:0], v[:0], mask=dense).shape[0] == 0
    for implementation in (None, "xla"):
        none = packax.dot_product_attention(
            q[:, :0], k, v, mask=packax.causal(), implementation=implementation
        )
        assert none.shape == (1, 0, HEADS, DIM)


def test_the_shape_of_a_mask_says_what_rows_without_keys_give():
    """0 under a mask of keys, jax.nn's mean under the same mask broadcast over rows."""
    q, k, v = tensors(2)
    keys = jnp.stack([jnp.arange(S) < 5, jnp.zeros(S, bool)])[:, None, None]
    mean = jax.nn.dot_product_attention(q, k, v, mask=keys)
    of_keys = packax.dot_product_attention(q, k, v, mask=keys)
    np.testing.assert_array_equal(of_keys[1], jnp.zeros_like(of_keys[1]))
    np.testing.assert_allclose(of_keys[0], mean[0], rtol=2e-5, atol=2e-6)
    dense = packax.dot_product_attention(q, k, v, mask=jnp.broadcast_to(keys, (2, 1, T, S)))
    np.testing.assert_allclose(dense, mean, rtol=2e-5, atol=2e-6)


def test_head_dims_without_kernels_run_in_blockwise_xla(monkeypatch):
    """On a build whose kernels do not support them."""
    seen = []
    real = packax.flash_attention
    monkeypatch.setattr(
        packax,
        "flash_attention",
        lambda *x, **options: seen.append(options["implementation"]) or real(*x, **options),
    )
    for have in (True, False):
        monkeypatch.setattr(
            packax.integrations.fallback, "has_kernels", lambda *x, have=have, options: have
        )
        packax.dot_product_attention(*tensors())
    assert seen == [None, "xla"]


def test_errors_of_shapes():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"value must have the shape of key, \(2, 37, 2, 8\)"):
        packax.dot_product_attention(q, k, v[..., :4])
    with pytest.raises(ValueError, match=r"query must have shape \(batch, length, heads, dim\) or"):
        packax.dot_product_attention(q[None], k, v)


def test_a_mask_of_keys_under_x64():
    """Under x64, plain integers are int64."""
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    args = tensors()
    keys = np.random.default_rng(6).random((2, 1, 1, S)) < 0.5
    want = packax.dot_product_attention(*args, mask=keys)
    with x64(True):
        got = packax.dot_product_attention(*args, mask=jnp.asarray(keys))
    np.testing.assert_allclose(got, want, atol=1e-6)
