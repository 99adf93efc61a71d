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
import score_oracle
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


def dense(x, allowed):
    positions = jnp.arange(S)[None]
    out, lse, top = score_oracle.dense(
        x, allowed[:, None], soft_cap=2.0, places=(positions, positions)
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0), jnp.where(jnp.isfinite(top), top, 0)


def derivatives(attention):
    """For two mapped rows, each with its mask: every derivative that docs/guide/transformations.md
    lists."""

    def of_one(x, along, mask):
        def loss(x):
            out, lse, _ = jax.checkpoint(attention)(x, mask)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

        gradient = jax.grad(loss)

        def penalty(x):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(gradient(x)))

        def results(x):
            out, lse, top = attention(x, mask)
            return (out, lse), top

        return (
            jax.jvp(results, (x,), (along,), has_aux=True),
            jax.jvp(gradient, (x,), (along,)),
            jax.grad(penalty)(x),
        )

    return jax.jit(jax.vmap(of_one))


of_ours, of_dense = derivatives(ours), derivatives(dense)  # compiled once for every structure


# The one with the most operands: second derivatives take seconds to compile.
EACH_TIME = ["sliding window by positions"]


@pytest.mark.parametrize("kind", some(KINDS, *map([*KINDS].index, EACH_TIME)))
def test_derivatives_under_vmap_and_checkpoint(kind):
    """In float64, against dense attention with the expression's as_array."""
    given = [arrays(seed=seed) for seed in (1, 2)]

    def build(a):
        return packax.create_attention_mask(KINDS[kind](a), q_len=S, kv_len=S)

    expressions = [KINDS[kind](a) for a in given]
    stacked = {name: np.stack([a[name] for a in given]) for name in given[0]}
    masks = jax.jit(jax.vmap(build))(stacked)
    allowed = np.stack(
        [np.broadcast_to(np.asarray(e.as_array(S, S)), (B, S, S)) for e in expressions]
    )
    assert allowed.any() and (kind == "full" or not allowed.all())
    with score_oracle.x64(True):
        x, along = (
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tensors(float) for _ in range(2)))
            for _ in range(2)
        )
        got, expected = of_ours(x, along, masks), of_dense(x, along, jnp.asarray(allowed))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


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


def test_export_every_option_with_symbolic_sizes():
    """With the mask that has the most operands."""
    function = jax.jit(functools.partial(step, "sliding window by positions"))
    program = restored(jax.export.export(function, platforms=["cpu"])(*symbolic(jnp.float32)))
    operands = tensors(jnp.float32, 70, 3), arrays(70, 3)
    got, expected = program.call(*operands), function(*operands)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


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
