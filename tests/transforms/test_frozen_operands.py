"""Gradients of some operands: unwanted ones cost nothing, in XLA and in the kernel calls.

Guards against a gradient computed for a frozen operand, and against a kernel that is requested to
write less than it does.
"""

import jax
import jax.numpy as jnp
import packax
import pytest
from lowered import PORTABLE, Extension, abstract, calls, text_of, with_sm90
from packax._src.ops import ffi
from transformed import EXPRESSION, random


@pytest.mark.parametrize(
    "argnums,products",
    [((0, 1, 2), 5), ((0,), 3), ((1,), 3), ((1, 2), 4)],
)
def test_frozen_operands_cost_no_products(argnums, products):
    """In XLA the forward has 2 products of tiles, S and the output; the backward has at most 5."""
    operands = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in random(0)[:3]]
    gradient = jax.grad(lambda *x: packax.flash_attention(*x, EXPRESSION).sum(), argnums)
    text = jax.jit(gradient).lower(*operands).as_text()
    assert text.count("stablehlo.dot_general") == 2 + products


def calls_of_backward(argnums, monkeypatch, fused, more=(), **kwargs):
    rows = with_sm90() if fused else PORTABLE
    monkeypatch.setattr(ffi, "ext", Extension)
    monkeypatch.setattr(Extension, "variants", staticmethod(lambda: rows))
    monkeypatch.setattr(ffi, "local_capabilities", lambda: None)

    def gradient(*operands):
        return jax.grad(loss_of, argnums)(*operands)

    def loss_of(query, key, value, *scale):
        out = packax.flash_attention(
            query,
            key,
            value,
            packax.causal(),
            **kwargs,
            **dict(zip(["scale"], scale, strict=False)),
        )
        return out.astype(jnp.float32).sum()

    text = text_of(gradient, *abstract(), *more)
    (call,) = (c for c in calls(text) if "backward" in c[0])
    target, attributes, _, results = call
    assert target == "packax_backward_v1"
    return attributes["needs_grad"], results[:3]


@pytest.mark.parametrize("fused", [False, True])
def test_frozen_operands_for_the_kernels(monkeypatch, fused):
    """Unwanted gradients have no elements, unless Hopper's fused kernel writes dk and dv with
    dq."""
    query, key, none = "2x300x8x64xbf16", "2x300x2x64xbf16", "0xbf16"
    keys = key if fused else none
    for argnums, wanted, results in (
        ((0, 1, 2), "3 : i32", [query, key, key]),
        ((0,), "1 : i32", [query, keys, keys]),
        ((1, 2), "2 : i32", [none, key, key]),
        ((2,), "2 : i32", [none, key, key]),
    ):
        assert calls_of_backward(argnums, monkeypatch, fused) == (wanted, results)


def test_frozen_operands_for_the_fallback_kernels(monkeypatch):
    """As above; the dq kernel also computes the partial sums of a scale's gradient."""
    query, key, none = "2x300x8x64xbf16", "2x300x2x64xbf16", "0xbf16"
    number = jax.ShapeDtypeStruct((), jnp.float32)
    for argnums, more, wanted, results in (
        ((0, 1, 2), (), "3 : i32", [query, key, key]),
        ((0,), (), "1 : i32", [query, none, none]),
        ((1,), (), "2 : i32", [none, key, key]),
        ((2,), (number,), "2 : i32", [none, key, key]),
        ((2, 3), (number,), "2 : i32", [query, key, key]),
        ((3,), (number,), "0 : i32", [query, none, none]),
    ):
        got = calls_of_backward(argnums, monkeypatch, True, more, soft_cap=9.0)
        assert got == (wanted, results)
