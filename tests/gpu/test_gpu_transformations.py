"""jax's transformations of kernels on a GPU, beyond test_transformations.py. `pytest -m gpu`."""

from __future__ import annotations

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from exported import restored
from gpu_runs import assert_identical, tensors

pytestmark = pytest.mark.gpu
IDS = np.stack([cases.ODD, cases.PADDED])


def causal_documents(ids):
    return packax.causal() & packax.documents(ids)


def operands(length=cases.LENGTH):
    x = tensors(2, length, length, 4, 2, 64, "bfloat16")
    return [x.query, x.key, x.value], x.dout.astype(jnp.float32)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_frozen_operands(argnums, deterministic):
    """The gradients equal those of a call for all: no omitted kernel computes a part of them."""
    x, dout = operands()
    mask = packax.create_attention_mask(causal_documents(IDS))

    def loss(*x):
        out = packax.flash_attention(*x, mask, deterministic=deterministic)
        return jnp.sum(out.astype(jnp.float32) * dout)

    every = jax.jit(jax.grad(loss, (0, 1, 2)))(*x)
    some = jax.jit(jax.grad(loss, argnums))(*x)
    for n, got in zip(argnums, some, strict=True):
        if n == 0 and not deterministic:  # on Hopper its summation order varies
            np.testing.assert_allclose(
                *(np.float32(y) for y in (got, every[n])), rtol=0.02, atol=0.02
            )
        else:
            assert_identical([got], [every[n]], f"gradient {n}: ")


def test_forward_mode_and_second_derivatives_with_the_kernels():
    """Equal to implementation="xla": XLA computes the tangents, from residuals of the kernels."""
    x, dout = operands()

    def results(implementation):
        def loss(*x):
            mask = causal_documents(IDS)
            out = packax.flash_attention(*x, mask, implementation=implementation)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)) * dout)

        gradient = jax.grad(loss, (0, 1, 2))
        return jax.jit(lambda *x: jax.jvp(gradient, x, x)[1])(*x)

    for got, expected in zip(results(None), results("xla"), strict=True):
        got, expected = np.float32(got), np.float32(expected)
        assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


def test_exported_programs():
    """One deserialized program with symbolic sizes gives the same bits as jit at every size."""

    def step(query, key, value, ids, dout):
        def out(*x):
            return packax.flash_attention(*x, causal_documents(ids), deterministic=True)

        return jax.vjp(out, query, key, value)[1](dout.astype(query.dtype))

    batch, length = jax.export.symbolic_shape("b, s")
    rows, keys = ((batch, length, heads, 64) for heads in (4, 2))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (rows, keys, keys)]
    shapes += [
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    ]
    exported = jax.export.export(
        jax.jit(step), platforms=["cuda"], disabled_checks=packax.export_checks()
    )(*shapes)
    program = restored(exported)
    for size in (1, 130, len(cases.ODD)):
        x, dout = operands(size)
        ids = jnp.asarray(IDS[:, :size])
        assert_identical(
            program.call(*x, ids, dout), jax.jit(step)(*x, ids, dout), f"length {size}: "
        )


def test_exported_decoding():
    """The workspace also has room for the shares of the largest size."""

    def step(query, key, value, lengths):
        return packax.decode_attention(query, key, value, lengths, return_lse=True)

    batch, length = jax.export.symbolic_shape("b, s")
    shapes = [jax.ShapeDtypeStruct((batch, 1, 8, 64), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct((batch, length, 2, 64), jnp.bfloat16)] * 2
    shapes.append(jax.ShapeDtypeStruct((batch,), jnp.int32))
    program = restored(
        jax.export.export(
            jax.jit(step), platforms=["cuda"], disabled_checks=packax.export_checks()
        )(*shapes)
    )
    keys = jax.random.split(jax.random.key(0), 3)
    for size, capacity in ((1, 1), (3, 4097)):
        x = [
            jax.random.normal(key, (size, n, heads, 64), jnp.bfloat16)
            for key, n, heads in zip(keys, (1, capacity, capacity), (8, 2, 2), strict=True)
        ]
        lengths = capacity - jnp.arange(size, dtype=jnp.int32)
        expected = jax.jit(step)(*x, lengths)
        for one, other in zip(program.call(*x, lengths), expected, strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-2)
