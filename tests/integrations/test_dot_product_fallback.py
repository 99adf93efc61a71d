"""packax.dot_product_attention where no kernel fits: jax.nn's own path, with one warning."""

import functools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from dot_products import DENSE, HEADS, RESIDUALS, S, T, lengths, tensors, theirs
from packax.integrations import fallback
from tiers import once_each, some


@pytest.fixture
def unwarned(monkeypatch):
    """No warning was given before, and PACKAX_FALLBACK is unset."""
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.delenv("PACKAX_FALLBACK", raising=False)


@pytest.fixture
def no_bias_kernels(monkeypatch):
    """A build without bias kernels, as for head dims that have none."""
    monkeypatch.setattr(fallback, "has_kernels", lambda *x, with_bias=0, options=0: 0)


@pytest.mark.parametrize(
    "masked,shape",  # 0: of size 1
    once_each([False, True], ["1111", "0011", "0111", "1101", "0000"]),
)
def test_every_broadcast_shape(unwarned, no_bias_kernels, masked, shape):
    """Results and gradients of q, k, v and the bias equal jax.nn's, bit for bit."""
    q, k, v = tensors()
    cut = tuple(slice(None) if whole == "1" else slice(1) for whole in shape)
    mask = DENSE[cut] if masked else None
    bias = jnp.cos(jnp.arange(2 * HEADS * T * S)).reshape(2, HEADS, T, S)[cut]

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, q, k, v, bias):
        call = functools.partial(attention, mask=mask, is_causal=True, scale=0.3)
        out, transpose = jax.vjp(lambda *x: call(*x), q, k, v, bias)
        return out, transpose(jnp.sin(out))

    with pytest.warns(fallback.FallbackWarning, match="with a bias, float32 and head"):
        ours = run(packax.dot_product_attention, q, k, v, bias)
    theirs = run(jax.nn.dot_product_attention, q, k, v, bias)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert ours[1][3].shape == bias.shape


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"scale": np.full((1, 1, 1), 0.3), "mask": [[True] * S] * T}, jnp.float32),
        ({}, jnp.int8),
        ({"is_causal": True}, jnp.complex64),
        ({"bias": np.ones((HEADS, T, S), np.complex64)}, jnp.float32),
        ({"bias": np.ones((HEADS, T, S), np.float16), "scale": np.ones(1)}, jnp.bfloat16),
        (
            {
                "mask": DENSE[0],
                "query_seq_lengths": lengths(T, 4),
                "key_value_seq_lengths": lengths(9, S),
                "scale": np.ones(1),
            },
            jnp.float16,
        ),
    ],
)
def test_what_only_jax_nn_takes(unwarned, options, dtype):
    x = tensors(dtype=dtype)
    with pytest.warns(fallback.FallbackWarning, match=r"^dot_product_attention with a? ?\w+ "):
        ours = packax.dot_product_attention(*x, **options)
    others = {**options, "mask": jnp.asarray(options["mask"])} if "mask" in options else options
    np.testing.assert_array_equal(ours, jax.nn.dot_product_attention(*x, **others))


@pytest.mark.parametrize("window", [np.int32(2), jnp.int8(2), (np.int64(2), 1), 2])
def test_arguments_that_jax_nn_takes_in_one_form_alone(unwarned, no_bias_kernels, window):
    """A window in an array, and lengths of another integer dtype, as on packax's path."""
    q, k, v = tensors()
    bias = jnp.ones((1, HEADS, T, S)) * jnp.arange(S)
    lengths = {"query_seq_lengths": [T, 3], "key_value_seq_lengths": [S, 5]}
    given = {name: np.asarray(x, np.uint8) for name, x in lengths.items()}
    with pytest.warns(fallback.FallbackWarning):
        ours = packax.dot_product_attention(q, k, v, bias, local_window_size=window, **given)
    pair = tuple(map(int, window)) if isinstance(window, tuple) else int(window)
    expected = jax.nn.dot_product_attention(
        q, k, v, bias, jnp.ones((1, 1, 1, 1), bool), local_window_size=pair,
        **{name: jnp.asarray(x, jnp.int32) for name, x in lengths.items()},
    )  # fmt: skip
    np.testing.assert_array_equal(ours, expected)


def test_an_expression_with_a_bias(unwarned, no_bias_kernels):
    q, k, v = tensors(keys=T)
    bias = jnp.ones((HEADS, T, T)) * jnp.arange(T)
    documents = packax.documents(np.repeat([0, 1], [9, 12]))
    with pytest.warns(fallback.FallbackWarning):
        ours = packax.dot_product_attention(q, k, v, bias, documents, is_causal=True)
    dense = documents.as_array(T, T)[None, None]
    expected = jax.nn.dot_product_attention(q, k, v, bias, dense, is_causal=True)
    np.testing.assert_array_equal(ours, expected)
    built = packax.create_attention_mask(documents)
    with pytest.raises(ValueError, match="mask is built for packax's kernels"):
        packax.dot_product_attention(q, k, v, bias, built)


ONLY_THEIRS = {"mask": DENSE, "scale": np.full(1, 0.3)}


def test_the_residual_of_jax_nn(unwarned):
    if not RESIDUALS:
        with pytest.raises(NotImplementedError, match=r"return_residual=True on jax.nn's path"):
            packax.dot_product_attention(*tensors(), **ONLY_THEIRS, return_residual=True)
        return
    with pytest.warns(fallback.FallbackWarning):
        ours = packax.dot_product_attention(*tensors(), **ONLY_THEIRS, return_residual=True)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs(*tensors(), **ONLY_THEIRS))


def test_said_once_silent_or_an_error(unwarned, monkeypatch):
    call = functools.partial(packax.dot_product_attention, *tensors(), **ONLY_THEIRS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # raised again: a warning that raised does not count as given
            with pytest.raises(fallback.FallbackWarning, match="a scale that is a number, and hea"):
                call()
    with pytest.warns(fallback.FallbackWarning, match=r"with a scale of shape \(1,\): ") as caught:
        call()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        monkeypatch.setattr(fallback, "_said", set())
        monkeypatch.setenv("PACKAX_FALLBACK", "silent")
        call()
        monkeypatch.setenv("PACKAX_FALLBACK", "error")
        packax.dot_product_attention(*tensors(), mask=DENSE)
    with pytest.raises(NotImplementedError, match=r"PACKAX_FALLBACK=error forbids jax.nn's own"):
        call()
    monkeypatch.setenv("PACKAX_FALLBACK", "loud")
    with pytest.raises(ValueError, match="PACKAX_FALLBACK must be warn, silent, error or unset"):
        call()


@pytest.mark.parametrize("first", some(["packax", "patch"], 1))
def test_assigned_over_jax_nn(first):
    """In either order; in a separate process, where nothing holds the original."""
    program = """
import jax, jax.numpy as jnp, numpy as np
original = jax.nn.dot_product_attention
def late(*args, **options):
    import packax
    return packax.dot_product_attention(*args, **options)
if FIRST == "packax":
    import packax
    late = packax.dot_product_attention
jax.nn.dot_product_attention = late
q = jnp.cos(jnp.arange(80.0)).reshape(1, 5, 2, 8)
mask = jnp.tril(jnp.ones((5, 5), bool))
for options in ({"mask": mask, "scale": jnp.ones(1)}, {"implementation": "xla"}):
    ours = jax.nn.dot_product_attention(q, q, q, **options)
    np.testing.assert_array_equal(ours, original(q, q, q, **options))
for options in ({"is_causal": True}, {"mask": mask}, {"bias": jnp.cos(jnp.ones((2, 5, 5)))}):
    ours = jax.nn.dot_product_attention(q, q, q, **options)
    np.testing.assert_allclose(ours, original(q, q, q, **options), rtol=1e-5, atol=1e-6)
"""
    environment = os.environ | {"PACKAX_FALLBACK": "silent", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", f"FIRST = {first!r}\n{program}"]
    subprocess.run(command, check=True, env=environment)
