"""The precision of float32 products: the requested precision reaches every product, forward,
backward and second derivative.

Guards against a default that differs from JAX's, a gradient in another precision than its forward,
and a kernel of the wrong precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.lax import DotAlgorithmPreset, Precision
from lowered import MASK, Extension, abstract, calls, loss, text_of
from packax._src.ops import ffi
from packax._src.requests import checked_precision


@pytest.mark.parametrize(
    "asked,least",
    [
        (None, Precision.DEFAULT),
        ("default", Precision.DEFAULT),
        ("bfloat16", Precision.DEFAULT),
        (DotAlgorithmPreset.BF16_BF16_F32, Precision.DEFAULT),
        ("high", Precision.HIGH),
        ("tensorfloat32", Precision.HIGH),
        (DotAlgorithmPreset.TF32_TF32_F32, Precision.HIGH),
        ("highest", Precision.HIGHEST),
        (Precision.HIGHEST, Precision.HIGHEST),
        ("float32", Precision.HIGHEST),
        ("TF32_TF32_F32_X3", Precision.HIGHEST),
        ("BF16_BF16_F32_X3", Precision.HIGHEST),
        (DotAlgorithmPreset.F32_F32_F32, Precision.HIGHEST),
        (("default", "highest"), Precision.HIGHEST),
        ((None, Precision.HIGH), Precision.HIGH),
    ],
    ids=str,
)
def test_the_least_that_keeps_what_is_asked_for(asked, least):
    assert checked_precision(asked) is least
    if not isinstance(asked, tuple):
        with jax.default_matmul_precision("highest"):
            assert checked_precision(asked) is (Precision.HIGHEST if asked is None else least)


def precisions(function, *operands):
    """The number of products in XLA's text, and their precisions."""
    text = jax.jit(function).lower(*operands).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    asked = {line.split("precision = ")[1].split("]")[0] + "]" for line in products}
    return len(products), asked


def test_of_every_product_in_xla():
    """Also in second derivatives, and by the JAX setting at the time of the call."""
    x = jax.ShapeDtypeStruct((1, 9, 2, 4), jnp.float32)

    def second(precision):
        def total(*x):
            return jnp.sum(packax.flash_attention(*x, packax.causal(), precision=precision) ** 2)

        return jax.grad(lambda *x: jnp.sum(jax.grad(total)(*x) ** 2), (0, 1, 2))

    number, asked = precisions(second("highest"), x, x, x)
    assert number > 7 and asked == {"[HIGHEST, HIGHEST]"}
    assert precisions(second(None), x, x, x) == (number, {"[DEFAULT, DEFAULT]"})
    with jax.default_matmul_precision("tensorfloat32"):
        assert precisions(second(None), x, x, x) == (number, {"[HIGH, HIGH]"})
        gradient = jax.grad(lambda *x: jnp.sum(packax.flash_attention(*x, packax.causal())))
    assert precisions(gradient, x, x, x)[1] == {"[DEFAULT, DEFAULT]"}  # traced outside the setting


@pytest.mark.parametrize(
    "precision,exact", [(None, 0), ("tensorfloat32", 0), ("highest", 1), ("float32", 1)]
)
def test_of_the_kernels(monkeypatch, precision, exact):
    """float32 uses the fallback kernels, also without any option; gradients have the forward's
    precision."""
    monkeypatch.setattr(ffi, "ext", Extension)
    gradient = jax.grad(lambda *x: loss(*x, MASK, precision=precision), (0, 1, 2))
    made = calls(text_of(gradient, *abstract(jnp.float32)))
    assert [c[0] for c in made] == ["packax_forward_v1", "packax_backward_v1"]
    assert [c[1]["float32_products"] for c in made] == [f"{exact} : i32"] * 2
    query, key = "2x300x8x64xf32", "2x300x2x64xf32"
    assert made[1][2][:3] == [query, key, key] and made[1][3][:3] == [query, key, key]
    for dtype in (jnp.bfloat16, jnp.float16):
        halves = calls(text_of(gradient, *abstract(dtype)))
        assert [c[0] for c in halves] == ["packax_forward_v1", "packax_backward_v1"]


def test_a_build_may_have_one_of_them(monkeypatch):
    rows = [row for row in Extension.variants() if row["dtype"] != "f32"]
    monkeypatch.setattr(ffi, "ext", Extension)
    monkeypatch.setattr(Extension, "variants", staticmethod(lambda: rows))
    monkeypatch.setattr(Extension, "whole_table", staticmethod(lambda: rows))
    query, key, value = abstract(jnp.float32)
    assert not ffi.has_kernels(query, key, value)
    assert ffi.has_kernels(*abstract(jnp.bfloat16))
    text_of(lambda *x: loss(*x, MASK), query, key, value)
    with pytest.raises(NotImplementedError, match="no forward kernel for float32"):
        text_of(lambda *x: loss(*x, MASK, precision="highest"), query, key, value)


def test_on_the_cpu_it_changes_nothing():
    rng = np.random.default_rng(0)
    x = [jnp.asarray(rng.standard_normal((1, 40, 2, 8)), jnp.float32) for _ in range(3)]
    plain, exact = (
        packax.flash_attention(*x, packax.causal(), precision=p) for p in (None, "highest")
    )
    np.testing.assert_array_equal(plain, exact)
