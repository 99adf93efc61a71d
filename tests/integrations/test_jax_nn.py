"""packax.dot_product_attention: which path a call takes, windows, residuals, shapes, and jax.nn's
path with its one warning.

test_faces.py and test_originals.py compare results and gradients.
"""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import lowered
import numpy as np
import packax
import pytest
from dot_products import DENSE, DIM, HEADS, RESIDUALS, S, T, lengths, tensors, theirs
from packax.integrations import fallback
from tiers import some
from unwarned import unwarned  # noqa: F401, a fixture

BIAS = np.random.default_rng(3).standard_normal((2, HEADS, T, S)).astype(np.float32)
attend = packax.dot_product_attention


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=5e-6)


@pytest.fixture
def no_bias_kernels(monkeypatch):
    """A build without bias kernels, as for head dims that have none."""
    monkeypatch.setattr(fallback, "has_kernels", lambda *x, with_bias=0, options=0: 0)


def test_residual_has_the_dtype_of_key_and_no_gradient():
    """As in jax.nn; bfloat16 outputs differ by at most one rounding."""
    q, k, v = tensors(dtype=jnp.bfloat16)
    call = functools.partial(attend, is_causal=True, return_residual=True)
    results, expected = call(q, k, v), theirs(q, k, v, is_causal=True)
    assert results[1].shape == expected[1].shape == (2, T, HEADS)
    for x, y in zip(results, expected, strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=2**-6, atol=2**-6)
    assert not np.any(jax.grad(lambda q: call(q, k, v)[1].astype(jnp.float32).sum())(q))


def test_what_is_passed_on(monkeypatch):
    """Only the residual asks for the log-sum-exp; head dims without kernels run in blockwise XLA;
    "cudnn" goes to jax.nn."""
    seen = []
    real = packax.flash_attention

    def noted(*x, **options):
        seen.append((options.get("return_lse"), options["implementation"]))
        return real(*x, **options)

    monkeypatch.setattr(packax, "flash_attention", noted)
    for kernels, options in ((True, {}), (False, {}), (True, {"return_residual": True})):
        monkeypatch.setattr(fallback, "has_kernels", lambda *x, options, have=kernels: have)
        attend(*tensors(), **options)
    assert seen == [(None, None), (None, "xla"), (True, None)]

    def by_jax_nn(query, *x, **options):
        return query, seen.append(options)

    monkeypatch.setattr(packax.integrations.jax_nn, "jax_nn_attention", by_jax_nn)
    attend(*tensors(), implementation="cudnn", is_causal=True)
    assert seen[-1]["implementation"] == "cudnn" and seen[-1]["is_causal"] is True


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

    both = attend, jax.nn.dot_product_attention
    ours, expected = (jax.jit(jax.value_and_grad(functools.partial(layers, f)))(q) for f in both)
    jax.tree.map(close, ours, expected)


def test_arguments_in_every_form_of_jax_nn():
    """is_causal=None is not causal, scale=True is 1, and a NaN window reaches no key; flags as
    numbers, integer scales, windows beyond int32."""
    q, k, v = tensors(keys=T)
    for options in ({"is_causal": None}, {"scale": True}, {"local_window_size": (2.0, np.inf)}):
        close(attend(q, k, v, **options), jax.nn.dot_product_attention(
            q, k, v, **options, mask=jnp.ones((1,) * 4, bool)))  # fmt: skip
    assert not np.any(attend(q, k, v, local_window_size=(np.nan, 3)))
    for name, first, *others in (
        ("is_causal", True, 1, jnp.bool_(True)),
        ("scale", jnp.float32(2), jnp.int32(2)),
        ("local_window_size", (50, 2), (2**31 - 1, np.int64(2)), (10**12, 2)),
    ):
        want = attend(q, k, v, **{name: first})
        for x in others:
            np.testing.assert_array_equal(attend(q, k, v, **{name: x}), want)


IDS = np.repeat([0, 1, -1], [9, 8, 4])


def test_expressions_with_arguments_and_built_masks():
    q, k, v = tensors(keys=T)
    bias = jnp.asarray(BIAS[..., :T])
    expression = packax.causal() & packax.documents(IDS)
    out = attend(q, k, v, bias, expression)
    built = attend(q, k, v, bias, packax.create_attention_mask(expression))
    np.testing.assert_array_equal(out, built)
    with_causal = attend(q, k, v, bias, packax.documents(IDS), is_causal=True)
    np.testing.assert_array_equal(out, with_causal)
    assert not np.any(out[:, 17:]) and np.all(np.any(out[:, :17], -1))


def test_implementations_of_jax_nn():
    """An explicit choice, which supports everything that jax.nn does, and expressions too."""
    q, k, v = tensors(keys=T)
    rng = np.random.default_rng(7)
    mask = rng.random((2, 1, T, T)) < 0.7
    out = attend(q, k, v, BIAS[:1, ..., :T], mask, implementation="xla")
    np.testing.assert_array_equal(out, theirs(q, k, v, BIAS[:1, ..., :T], mask)[0])
    documents = packax.documents(np.stack([IDS, IDS[::-1]]))
    ours, other = (attend(q, k, v, mask=documents, implementation=x) for x in (None, "xla"))
    close(other[0, :17], ours[0, :17])
    close(other[1, 4:], ours[1, 4:])
    chosen = rng.random((2, HEADS, 3, 3)) < 0.5  # per head; then for batch 1 and without a batch
    for one in (chosen, chosen[:1], chosen[0, 0]):
        blocks = packax.masks.block_sparse(one | np.eye(3, dtype=bool), 7)
        ours, other = (attend(q, k, v, mask=blocks, implementation=x) for x in (None, "xla"))
        close(ours, other)
    if RESIDUALS:
        options = {"mask": documents, "implementation": "xla", "return_residual": True}
        assert attend(q, k, v, **options)[1].shape == (2, T, HEADS)


def test_shapes_as_jax_nn_takes_them():
    """One row without a length axis, no batch, empty batches and lengths, an integer bias."""
    q, k, v = tensors(1)
    one = jax.nn.dot_product_attention(q[0, 0], k[0], v[0])
    close(attend(q[0, 0], k[0], v[0]), one)
    assert one.shape == (HEADS, DIM)
    of_one = q[0], k[0], v[0]
    expected = jax.nn.dot_product_attention(*of_one, BIAS[0], DENSE[:1, :1])
    close(attend(*of_one, jnp.asarray(BIAS[0]), DENSE[0, 0]), expected)
    np.testing.assert_array_equal(
        attend(q, k, v, (BIAS[:1] * 3).astype(np.int32)),
        attend(q, k, v, (BIAS[:1] * 3).astype(np.int32).astype(np.float32)),
    )
    assert attend(q[:0], k[:0], v[:0]).shape == (0, T, HEADS, DIM)
    for implementation in (None, "xla"):
        none = attend(q[:, :0], k, v, mask=packax.causal(), implementation=implementation)
        assert none.shape == (1, 0, HEADS, DIM)
    for rows, keys, batch in ((0, S, 2), (T, 0, 2), (T, S, 0)):
        mask, bias = np.ones((1, 1, rows, keys), bool), np.ones((batch, HEADS, rows, keys))
        out = attend(*tensors(batch, rows, keys), bias, mask)
        assert out.shape == (batch, rows, HEADS, DIM) and not np.any(out)


def test_the_shape_of_a_mask_says_what_rows_without_keys_give():
    """0 under a mask of keys, jax.nn's mean under the same mask broadcast over rows. Under x64,
    where plain integers are int64, the same."""
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    q, k, v = tensors(2)
    keys = jnp.stack([jnp.arange(S) < 5, jnp.zeros(S, bool)])[:, None, None]
    mean = jax.nn.dot_product_attention(q, k, v, mask=keys)
    for mode in (False, True):
        with x64(mode):
            of_keys = attend(q, k, v, mask=keys)
        assert not np.any(of_keys[1])
        close(of_keys[0], mean[0])
    close(attend(q, k, v, mask=jnp.broadcast_to(keys, (2, 1, T, S))), mean)


def text_of(q, k, v, **options):
    def loss(q, k, v, bias):
        return attend(q, k, v, bias, **options).astype(jnp.float32).sum()

    both = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    bias = jax.ShapeDtypeStruct((1, 8, q.shape[1], k.shape[1]), jnp.float32)
    return lowered.text_of(both, q, k, v, bias)


def test_kernels_for_a_bias(extension):
    """Both passes use kernels with a bias, which is never expanded over the batch. Above head dim
    256: jax.nn's own path, with one warning, and its gradient."""
    for dim in (64, 256):
        text = text_of(*lowered.abstract(dim=dim, v_dim=dim), is_causal=True)
        assert {"packax_forward_v1", "packax_backward_v1"} <= set(re.findall(r"packax_\w+", text))
        assert "2x8x300x300" not in text and "8x300x300" in text
    wide = lowered.abstract(dim=264, v_dim=264)
    with pytest.warns(fallback.FallbackWarning, match=r"a bias, bfloat16 and head dim 264: runs"):
        assert "packax" not in text_of(*wide)
    with pytest.raises(NotImplementedError, match=r"264: there is no kernel for it, and impl"):
        text_of(*wide, implementation="cuda")


def test_a_constant_mask_is_not_computed_while_compiling():
    """XLA spent 11 s on folding a 2048 x 2048 mask into bits: only the mask itself is a
    constant."""
    q = jnp.ones((1, 320, HEADS, 8))
    mask = np.tril(np.ones((320, 320), bool))
    text = jax.jit(lambda q: attend(q, q, q, mask=mask)).lower(q).compile().as_text()
    constants = re.findall(r"= (\w+\[[\d,]*\b320\b[\d,]*\])\S* constant", text)
    assert constants == ["pred[1,1,320,320]"]


# --- No kernel: jax.nn's own path.


@pytest.mark.parametrize(  # 0: of size 1
    "masked,shape", some([(True, "0111"), (False, "0011"), (True, "1101"), (False, "1111")], 0)
)
def test_jax_nns_path_bit_for_bit(no_bias_kernels, masked, shape):
    """Results and gradients of q, k, v and the bias equal jax.nn's."""
    cut = tuple(slice(None) if whole == "1" else slice(1) for whole in shape)
    mask = DENSE[cut] if masked else None

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, *x):
        call = functools.partial(attention, mask=mask, is_causal=True, scale=0.3)
        out, transpose = jax.vjp(lambda *x: call(*x), *x)
        return out, transpose(jnp.sin(out))

    x = *tensors(), BIAS[cut]
    with pytest.warns(fallback.FallbackWarning, match="with a bias, float32 and head"):
        ours = run(attend, *x)
    jax.tree.map(np.testing.assert_array_equal, ours, run(jax.nn.dot_product_attention, *x))
    assert ours[1][3].shape == BIAS[cut].shape


ONLY_THEIRS = {"mask": DENSE, "scale": np.full(1, 0.3)}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"scale": np.full((1, 1, 1), 0.3), "mask": [[True] * S] * T}, jnp.float32),
        ({}, jnp.int8),
        ({"is_causal": True}, jnp.complex64),
        ({"bias": np.ones((HEADS, T, S), np.complex64)}, jnp.float32),
        ({"bias": np.ones((HEADS, T, S), np.float16), "scale": np.ones(1)}, jnp.bfloat16),
        (
            {"mask": DENSE[0], "query_seq_lengths": lengths(T, 4), "scale": np.ones(1)}
            | {"key_value_seq_lengths": lengths(9, S)},
            jnp.float16,
        ),
    ],
)
def test_what_only_jax_nn_takes(options, dtype):
    x = tensors(dtype=dtype)
    with pytest.warns(fallback.FallbackWarning, match=r"^dot_product_attention with a? ?\w+ "):
        ours = attend(*x, **options)
    others = {**options, "mask": jnp.asarray(options["mask"])} if "mask" in options else options
    np.testing.assert_array_equal(ours, jax.nn.dot_product_attention(*x, **others))


def test_arguments_that_jax_nn_takes_in_one_form_alone(no_bias_kernels):
    """On its path, too: a window in an array, lengths of another integer dtype, an expression."""
    q, k, v = tensors()
    sizes = {"query_seq_lengths": [T, 3], "key_value_seq_lengths": [S, 5]}
    given, wanted = ({n: np.asarray(x, d) for n, x in sizes.items()} for d in (np.uint8, np.int32))
    with pytest.warns(fallback.FallbackWarning):
        ours = attend(q, k, v, BIAS, local_window_size=jnp.int8(2), **given)
    np.testing.assert_array_equal(ours, attend(q, k, v, BIAS, local_window_size=(2, 2), **given))
    everything = jnp.ones((1,) * 4, bool)
    expected = jax.nn.dot_product_attention(
        q, k, v, BIAS, everything, local_window_size=2, **wanted
    )
    np.testing.assert_array_equal(ours, expected)
    q, k, v = tensors(keys=T)
    documents, bias = packax.documents(np.repeat([0, 1], [9, 12])), BIAS[..., :T]
    ours = attend(q, k, v, bias, documents, is_causal=True)
    dense = documents.as_array(T, T)[None, None]
    expected = jax.nn.dot_product_attention(q, k, v, bias, dense, is_causal=True)
    np.testing.assert_array_equal(ours, expected)
    with pytest.raises(ValueError, match="mask is built for packax's kernels"):
        attend(q, k, v, bias, packax.create_attention_mask(documents))


def test_the_residual_of_jax_nn():
    call = functools.partial(attend, *tensors(), **ONLY_THEIRS, return_residual=True)
    if not RESIDUALS:
        with pytest.raises(NotImplementedError, match=r"return_residual=True on jax.nn's path"):
            call()
        return
    with pytest.warns(fallback.FallbackWarning):
        ours = call()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs(*tensors(), **ONLY_THEIRS))


def test_said_once_silent_or_an_error(monkeypatch):
    call = functools.partial(attend, *tensors(), **ONLY_THEIRS)
    for _ in range(2):  # raised again: a warning that raised does not count as given
        with pytest.raises(fallback.FallbackWarning, match="a scale that is a number, and hea"):
            call()
    with pytest.warns(fallback.FallbackWarning, match=r"with a scale of shape \(1,\): ") as caught:
        call()
    assert caught[0].filename == __file__
    call()
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.setenv("PACKAX_FALLBACK", "silent")
    call()
    monkeypatch.setenv("PACKAX_FALLBACK", "error")
    attend(*tensors(), mask=DENSE)
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
options = {"bias": jnp.cos(jnp.ones((2, 5, 5))), "mask": mask}
ours = jax.nn.dot_product_attention(q, q, q, **options)
np.testing.assert_allclose(ours, original(q, q, q, **options), rtol=1e-5, atol=1e-6)
"""
    environment = os.environ | {"PACKAX_FALLBACK": "silent", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", f"FIRST = {first!r}\n{program}"]
    subprocess.run(command, check=True, env=environment)
