"""Tangents and second derivatives of attention on a GPU, for masks, options, head dims, dtypes and
some of the operands; those of long rows are in test_gpu_sizes.py. `pytest -m gpu`."""

from __future__ import annotations

import dataclasses
import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_runs import of
from packax._src.ops import ffi
from tiers import some

pytestmark = pytest.mark.gpu
DOCUMENTS = "interval=causal,selector=packed,lengths=409x409"
WINDOW = "interval=window 40 7,lengths=409x409"
CALLS = {
    "bfloat16 64": f"{DOCUMENTS},dims=64x64,dtype=bfloat16",
    "bfloat16 128": f"{DOCUMENTS},dims=128x128,dtype=bfloat16",
    "float16 64": f"{WINDOW},dims=64x64,dtype=float16",
    "float16 128": "dims=128x128,dtype=float16,lengths=409x409",
    "256": f"{DOCUMENTS},dims=256x256,dtype=bfloat16",
    "80": f"{DOCUMENTS},dims=80x80,dtype=bfloat16",
    "only query": f"{DOCUMENTS},dims=128x128,dtype=bfloat16,frozen=key+value",
    "key and value": f"{WINDOW},dims=64x64,dtype=bfloat16,frozen=query",
    "only value": f"{DOCUMENTS},dims=128x128,dtype=float16,frozen=query+key",
    "soft cap": f"{DOCUMENTS},dims=128x128,dtype=bfloat16,cap=3",
    "TF32": f"{DOCUMENTS},dims=64x64",
    "TF32 128": "dims=128x128,frozen=value,lengths=409x409",
}
STEP = 1e-4  # of the difference quotients of the reference


@functools.partial(jax.jit, static_argnums=0)
def tangents(call, a, along):
    operands = {name: a[name] for name in along}
    out, lse = jax.jvp(lambda x: call.attend(a | x), (operands,), (along,))[1]
    return {"out": out, "lse": lse}


def operands(call):
    a, other = call.arrays(1), call.arrays(2)
    return a, {name: other[name] for name in call.differentiable()}


@pytest.mark.parametrize("name", some(CALLS, 0, 3, 4, 5, 7, 9, 10))
def test_tangents(name):
    """The root mean square of errors in 16 bits is at most 1.4 units, which is twice that of plain
    attention; in float32 it is at most twice that of XLA with products in TF32, too."""
    call = of(CALLS[name])
    kernel = {"dtype": ffi.kernel_dtype(call.dtype, False), "qk_dim": 64, "v_dim": 64}
    assert ffi.judge("forward_tangent", kernel)["here"]
    a, along = operands(call)
    got = tangents(call, a, along)
    near = {}
    if call.dtype == "float32":
        with jax.default_matmul_precision("tensorfloat32"):
            near = tangents(dataclasses.replace(call, implementation="xla"), a, along)
    sides = []
    for sign in (1, -1):
        moved = {n: a[n].astype(float) + sign * STEP * x.astype(float) for n, x in along.items()}
        sides.append(dense.dense(call.operands(a) | moved, call.allowed(a), **call.options(a)))
    some = np.isfinite(sides[0]["lse"])
    for of_result, x in got.items():
        rows = some if of_result == "lse" else some.swapaxes(1, 2)
        plus, minus = (y[of_result][rows] for y in sides)
        want = (plus - minus) / (2 * STEP)
        x = np.asarray(x, np.float64)
        assert not x[~rows].any()
        unit = 1.4 * float(jnp.finfo(call.dtype).eps) * np.linalg.norm(want)
        if near:
            unit = 2 * np.linalg.norm(np.asarray(near[of_result], np.float64)[rows] - want)
        assert np.linalg.norm(x[rows] - want) <= unit, of_result


def test_padding_may_be_nan():
    """In queries that attend to nothing, and in keys that share no step with an attended one. A
    step of at most 128 keys may begin anywhere."""
    length, end = 609, 300
    call = of(f"{DOCUMENTS},lengths={length}x{length},dims=64x64,dtype=bfloat16,heads=2/2,batch=1")
    a, along = operands(call)
    a["ids"] = np.repeat(np.int32([[0, -1, 1, -1]]), [70, 61, end - 131, length - end], 1)

    def broken(name, x):
        begin = end if name == "query" else end + 128
        return np.where(np.arange(length)[:, None, None] < begin, x, np.nan).astype(x.dtype)

    got = tangents(call, a, along)
    bad = {name: broken(name, a[name]) for name in along}
    found = tangents(call, a | bad, {name: broken(name, x) for name, x in along.items()})
    x, y = (np.float32(z["out"]) for z in (got, found))
    np.testing.assert_array_equal(x[:, :end], y[:, :end])
    assert not y[:, end:].any()


# --- Second derivatives: XLA computes them from residuals of the kernels


def check_equals_xla(derivative):
    call = of(f"{DOCUMENTS},dims=64x64,dtype=bfloat16")
    a, along = operands(call)
    found = []
    for implementation in ("", "xla"):  # "cuda" has no kernels for second derivatives
        one = dataclasses.replace(call, implementation=implementation)

        def out(x, one=one):
            return one.attend(a | x)[0]

        found.append(jax.jit(functools.partial(derivative, out))({n: a[n] for n in along}, along))
    for name, got in found[0].items():
        got, want = (np.float32(x) for x in (got, found[1][name]))
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max(), name


def test_of_the_gradient():
    def derivative(out, x, along):
        gradient = jax.grad(lambda x: jnp.sin(out(x).astype(jnp.float32)).sum())
        return jax.jvp(gradient, (x,), (along,))[1]

    check_equals_xla(derivative)


@pytest.mark.parametrize("stopped", [True, False])
def test_meanflow_gradients(stopped):
    """Of a loss that holds a jvp."""

    def derivative(out, x, along):
        def loss(x):
            y, target = jax.jvp(out, (x,), (along,))
            target = jax.lax.stop_gradient(target) if stopped else target
            return jnp.sum((y.astype(jnp.float32) - target.astype(jnp.float32)) ** 2)

        return jax.grad(loss)(x)

    check_equals_xla(derivative)
