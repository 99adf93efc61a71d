"""Every kind of mask under the transformations that docs/guide/transformations.md lists.

test_transformations.py tests one mask in depth. Here each kind, with every option that changes
scores, goes through derivatives of both orders under vmap and checkpoint, an exported program with
symbolic sizes, and lowering for CUDA.
"""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from every_kind import KINDS, B, S, arrays
from exported import restored
from lowered import Extension
from packax._src.ops import ffi
from tiers import some

HEADS, KV_HEADS, DIM = 2, 1, 8
RNG = np.random.default_rng(21)


def tensors(dtype, length=S, batch=B):
    shapes = {"query": (batch, length, HEADS, DIM), "sinks": (HEADS,), "slopes": (HEADS,)}
    shapes |= {"key": (batch, length, KV_HEADS, DIM), "value": (batch, length, KV_HEADS, DIM)}
    operands = {
        name: jnp.asarray(RNG.standard_normal(shape), dtype) for name, shape in shapes.items()
    }
    return operands | {"scale": jnp.asarray(0.7, dtype)}


def ours(x, mask):
    out, lse, top = packax.flash_attention(
        x["query"],
        x["key"],
        x["value"],
        mask,
        scale=x["scale"],
        sinks=x["sinks"],
        bias=packax.alibi(x["slopes"]),
        soft_cap=2.0,
        return_lse=True,
        return_max_logits=True,
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0), jnp.where(jnp.isfinite(top), top, 0)


def test_as_array_of_traced_arrays():
    given = arrays()

    @jax.jit
    def traced(a):
        return {kind: make(a).as_array(S, S) for kind, make in KINDS.items()}

    for kind, got in traced(given).items():
        np.testing.assert_array_equal(got, KINDS[kind](given).as_array(S, S), err_msg=kind)


def symbolic(dtype):
    """Shapes of `tensors` and `arrays` with unknown batch and length."""
    batch, length = jax.export.symbolic_shape("b, s")
    sizes = {B: batch, S: length}

    def shape(x):
        lead = [sizes.get(n, n) for n in x.shape[:2]]
        return jax.ShapeDtypeStruct((*lead, *x.shape[2:]), x.dtype)

    x = tensors(dtype)
    for name in ("query", "key", "value"):
        x[name] = shape(x[name])
    a = {name: shape(y) for name, y in arrays().items()}
    return x, a | {"map": jax.ShapeDtypeStruct((batch, length, length), bool)}


@pytest.mark.parametrize("kinds", some([([*KINDS][1::6],), ([*KINDS],)], 0), ids=["some", "all"])
def test_export_every_mask_with_symbolic_sizes(monkeypatch, kinds):
    """One program builds all kinds for every batch and length, with the same integers as jit.

    The expressions are arguments, since they are pytrees.
    """
    monkeypatch.setattr(ffi, "ext", Extension)  # for CUDA too, without a GPU

    def build(expressions, length):
        lengths = {"q_len": length, "kv_len": length}
        return {
            kind: jax.tree.leaves(packax.create_attention_mask(expression, **lengths))
            for kind, expression in expressions.items()
        }

    def expressions(a):
        return {kind: KINDS[kind](a) for kind in kinds}

    x, a = symbolic(jnp.float32)
    function = jax.jit(lambda query, a: build(expressions(a), query.shape[1]))
    export = jax.export.export(
        function, platforms=["cpu", "cuda"], disabled_checks=packax.export_checks()
    )
    program = restored(export(x["query"], a))
    x, a = tensors(jnp.float32, 70, 3), arrays(70, 3)
    got = program.call(x["query"], a)
    expected = jax.jit(build, static_argnums=1)(expressions(a), 70)
    for kind in kinds:
        for one, other in zip(got[kind], expected[kind], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=kind)


def step(kind, x, a):
    """Builds the mask inside; returns gradients and results."""

    def loss(x):
        lengths = {"q_len": x["query"].shape[1], "kv_len": x["key"].shape[1]}
        results = ours(x, packax.create_attention_mask(KINDS[kind](a), **lengths))
        return sum(jnp.sum(jnp.sin(y)) for y in results[:2]), results

    return jax.grad(loss, has_aux=True)(x)


STRUCTURES = [  # attention gets different operands for each
    "full",
    "documents, other ids of keys",
    "documents by positions",
    "sliding window by positions",
]


@pytest.mark.parametrize("kind", some(STRUCTURES, 0))
def test_export_for_cuda(kind, monkeypatch):
    """With symbolic sizes, forward and backward call the kernels, on a machine without a GPU."""
    monkeypatch.setattr(ffi, "ext", Extension)
    export = jax.export.export(
        jax.jit(functools.partial(step, kind)),
        platforms=["cuda"],
        disabled_checks=packax.export_checks(),
    )
    text = export(*symbolic(jnp.bfloat16)).mlir_module()
    assert "@packax_forward_v1" in text and "@packax_backward_v1" in text
