"""Functions with another library's signature against that library's own: results and gradients.

Guards against a bias added to the wrong heads or rows, a gradient of another shape, an array
expanded over its broadcast axes, and a silent use of the library's quadratic path.
"""

import contextlib
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from dot_products import DENSE, HEADS, RESIDUALS, S, T, lengths, tensors, theirs
from packax.integrations.fallback import FallbackWarning
from tiers import marked

RNG = np.random.default_rng(8)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def without_residual(module, name="dot_product_attention"):
    """(out, nothing) of a function of a module that may not be installed."""

    def call(*arrays, **options):
        return getattr(pytest.importorskip(module), name)(*arrays, **options), ()

    return call


def linen(*arrays, mask=None):
    mask = None if mask is None else mask.astype(bool)
    return without_residual("flax.linen")(*arrays, mask=mask)


def dilworth(module):
    """The functions of flash_attention_jax: under a mask of keys, or causal without one."""

    def call(q, k, v, _, mask=None):
        name = "causal_flash_attention" if mask is None else "flash_attention"
        arrays = (q, k, v) if mask is None else (q, k, v, mask)
        return without_residual(module, name)(*arrays)

    return call


def packax_nn(*arrays, **options):
    return packax.dot_product_attention(*arrays, **options, return_residual=True)


FACES = {  # ours, the original
    "jax.nn": (packax_nn, theirs),
    "flax": (without_residual("packax.integrations.flax"), linen),
    "flash_attention_jax": (
        dilworth("packax.integrations.flash_attention_jax"), dilworth("flash_attention_jax"),
    ),
}  # fmt: skip
TENSORS = {
    "jax.nn": tensors(),
    "jax.nn, no batch": [x[0] for x in tensors(1)],
    "flax": [normal(2, 3, 24, HEADS, 8) for _ in range(3)],
    "flash_attention_jax": [normal(2, 3, 37, 8) for _ in range(3)],
    "flash_attention_jax, causal": [normal(2, 2, n, 8) for n in (5, 70, 70)],
}
KEYS = RNG.random((2, 1, 1, S)) < 0.5
BIAS = RNG.standard_normal((2, HEADS, T, S)).astype(np.float32)
FLAX_MASK = RNG.random((2, 3, HEADS, 24, 24)) < 0.7
FLAX_MASK[..., 0] = True  # no row is without a key
FLAX_BIAS = RNG.standard_normal(FLAX_MASK.shape).astype(np.float32)
CASES = {
    "nothing": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "lengths": {"query_seq_lengths": lengths(T, 4), "key_value_seq_lengths": lengths(9, S)},
    "lengths, causal": {"key_value_seq_lengths": lengths(9, 99), "is_causal": True},
    "left and right": {"local_window_size": (3, 2)},
    "one number": {"local_window_size": 4},
    "window, causal": {"local_window_size": (5, 7), "is_causal": True},
    "window ahead": {"local_window_size": np.array([-2, 6])},
    "wide window": {"local_window_size": (10**6, 0), "query_seq_lengths": lengths(3, 20)},
    "keys": {"mask": KEYS},
    "keys of all": {"mask": KEYS[1, 0, 0]},
    "keys, window": {"mask": KEYS, "local_window_size": (20, 20), "is_causal": True},
    "no batch": {"is_causal": True, "key_value_seq_lengths": lengths(15)},
}
HALF = {  # options combined with each shape of a bias or mask
    "nothing": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "lengths": {"key_value_seq_lengths": lengths(9, S), "local_window_size": (12, 30)},
    "query lengths": {"query_seq_lengths": lengths(20, 12)},
}
SHAPES = ["1111", "0011", "1011", "0111", "0010", "1101", "1001", "0000", "1000"]


def cut(array, shape):
    """For a shape such as "1011", where 0 is an axis of size 1; absent leading axes are dropped."""
    index = tuple(slice(None) if x == "1" else slice(1) for x in shape.zfill(array.ndim))
    return jnp.asarray(array[index].reshape(array[index].shape[array.ndim - len(shape) :]))


def mask_of(shape):
    """Some masks leave whole rows without a key: all with a row axis have one."""
    mask = np.array(cut(DENSE if shape[3] == "1" else DENSE[..., 1:], shape))
    if shape[2] == "1":
        mask[:, :, 3] = False
    return jnp.asarray(mask | (not mask.any()))


def rows():
    """(face, bias, options), and whether it runs every time."""
    for i, (name, options) in enumerate(CASES.items()):
        yield "jax.nn", name, None, options, i in (4, 9, 12, 13)
    for i, (shape, half) in enumerate(itertools.product(SHAPES, HALF)):
        name = f"{shape}, {half}"
        each_time = i in (17, 34)
        yield "jax.nn", f"bias {name}", cut(BIAS, shape), HALF[half], each_time
        yield "jax.nn", f"mask {name}", None, {"mask": mask_of(shape)} | HALF[half], each_time
    for of_bias, of_mask in (("0111", "1011"), ("1101", "0011"), ("0010", "1111")):
        name, options = f"bias {of_bias}, mask {of_mask}", {"mask": cut(DENSE, of_mask)}
        yield "jax.nn", name, cut(BIAS, of_bias), options, of_mask == "0011"
    of_masks = [None, "10111", "00011", "11001"]
    shapes = itertools.product(["11111", "00111", "111", "01011", "10110", "1"], of_masks)
    for i, (shape, mask) in enumerate(shapes):
        options = {} if mask is None else {"mask": cut(FLAX_MASK, mask)}
        bias = cut(FLAX_BIAS, shape)
        yield "flax", f"bias {shape}, mask {mask}", bias, options, i in (10, 13)
    for shape in ("11111", "00111", "11011", "10111", "110", "11"):
        for dtype in (bool, np.float32):
            mask = cut(FLAX_MASK, shape).astype(dtype)
            each_time = shape == "11011" and dtype is bool
            yield "flax", f"mask {shape}", None, {"mask": mask}, each_time
    yield "flash_attention_jax", "keys", None, {"mask": RNG.random((2, 37)) < 0.5}, True
    yield "flash_attention_jax", "causal", None, {}, True


def results_of(call, arrays, bias, options):
    """Output, residual and gradients of the tensors and the bias."""

    @jax.jit
    def all_of_it(*x):
        def one(q, k, v, added=None):
            return call(q, k, v, added, **options)

        out, transpose, residual = jax.vjp(one, *x, has_aux=True)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        return out, residual, transpose(weights)

    return all_of_it(*arrays, *([] if bias is None else [bias]))


@contextlib.contextmanager
def no_fallback(face):
    """Also forbids rank promotion in packax's own, as JAX's tests do."""
    promotion = "raise" if face == "jax.nn" else "allow"
    with warnings.catch_warnings(), jax.numpy_rank_promotion(promotion):
        warnings.simplefilter("error", FallbackWarning)
        yield


@pytest.mark.parametrize(
    "face,name,bias,options",
    [marked(row, every_time) for *row, every_time in rows()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_equals_the_original(face, name, bias, options):
    """Rows without a key are compared under dense masks only: under others, jax.nn gives the mean
    of the values and packax 0."""
    if not RESIDUALS and options.keys() == {"local_window_size"}:
        pytest.skip("this jax.nn (0.7) takes no notice of a window that comes alone")
    arrays = TENSORS.get(f"{face}, {name}", TENSORS[face])
    with no_fallback(face):
        got, expected = (results_of(call, arrays, bias, options) for call in FACES[face])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
    if face != "jax.nn":
        loose = {"rtol": 1e-4, "atol": 5e-6 if face == "flax" else 2e-6}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **loose), got, expected)
        return
    has_key = np.asarray(expected[1]) > -1e30
    assert has_key.mean() > 0.4
    dense = "mask" in options and options["mask"].shape[1:3] not in ((1, 1), ())
    plain = bias is None and name in CASES
    compared = np.ones_like(has_key) if dense else has_key
    for x, y in zip(got[:2], expected[:2], strict=True):
        x, y = np.asarray(x)[compared], np.asarray(y)[compared]
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 if plain else 5e-6)
    if not dense:
        assert not np.any(got[0][~has_key]) and np.all(np.isneginf(got[1][~has_key]))
    for n, (x, y) in enumerate(zip(got[2], expected[2], strict=True)):
        whole = dense or has_key.all() or (plain and "query_seq_lengths" in options)
        if whole or n not in (1, 2):  # jax.nn's include rows without a key
            close = (2e-5, 5e-6) if plain else (5e-5, 2e-5)
            np.testing.assert_allclose(x, y, rtol=close[0], atol=close[1])
