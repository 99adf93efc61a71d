"""The tangent of attention on a GPU: equal to float64 to twice the error of dense attention, for
masks, options, head dims, dtypes and some of the tangents. `pytest -m gpu`.
"""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import score_oracle
from packax._src.ops import ffi

pytestmark = pytest.mark.gpu
IDS = np.stack([cases.ODD, cases.PADDED])
MASKS = {
    "full": packax.full(),
    "documents": packax.causal() & packax.documents(IDS),
    "window": packax.sliding_window(40, 7),
}
CALLS = {
    "bfloat16 64": ("documents", "bfloat16", 64, (0, 1, 2), {}),
    "bfloat16 128": ("documents", "bfloat16", 128, (0, 1, 2), {}),
    "float16 64": ("window", "float16", 64, (0, 1, 2), {}),
    "float16 128": ("full", "float16", 128, (0, 1, 2), {}),
    "256": ("documents", "bfloat16", 256, (0, 1, 2), {}),
    "80": ("documents", "bfloat16", 80, (0, 1, 2), {}),
    "only query": ("documents", "bfloat16", 128, (0,), {}),
    "key and value": ("window", "bfloat16", 64, (1, 2), {}),
    "only value": ("documents", "float16", 128, (2,), {}),
    "soft cap": ("documents", "bfloat16", 128, (0, 1, 2), {"soft_cap": 3.0}),
    "TF32": ("documents", "float32", 64, (0, 1, 2), {}),
    "TF32 128": ("full", "float32", 128, (0, 1), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_tangents(name):
    mask, dtype, dim, argnums, options = CALLS[name]
    expression, length, heads = MASKS[mask], cases.LENGTH, (4, 2, 2)
    rng = np.random.default_rng(len(name))
    draw = lambda h: jnp.asarray(rng.standard_normal((2, length, h, dim)), dtype)  # noqa: E731
    x, u = (tuple(map(draw, heads)) for _ in range(2))
    allowed = np.asarray(expression.as_array(length, length))
    allowed = allowed.reshape(-1, 1, length, length)

    def along(function, x, u):
        def of_some(*some):
            return function(*(some[argnums.index(n)] if n in argnums else x[n] for n in range(3)))

        return jax.jvp(of_some, tuple(x[n] for n in argnums), tuple(u[n] for n in argnums))[1]

    def ours(*x):
        return packax.flash_attention(*x, expression, return_lse=True, **options)

    def dense(*x):
        names = ("query", "key", "value")
        arrays = dict(zip(names, x, strict=True)) | {"scale": np.asarray(dim**-0.5)}
        return score_oracle.dense(arrays, allowed, **options)[:2]

    call = {"dtype": ffi.kernel_dtype(dtype, False), "qk_dim": 64, "v_dim": 64}
    assert ffi.judge("forward_tangent", call)["here"]
    got = jax.jit(functools.partial(along, ours))(x, u)
    with jax.default_matmul_precision("tensorfloat32" if dtype == "float32" else "highest"):
        plain = jax.jit(functools.partial(along, dense))(x, u)
    with score_oracle.x64(True):
        doubles = jax.tree.map(lambda y: jnp.asarray(np.asarray(y, np.float64)), (x, u))
        true = jax.jit(functools.partial(along, dense))(*doubles)
        true = jax.tree.map(np.asarray, true)
    some = np.broadcast_to(allowed.any(-1), true[1].shape)
    for a, b, c in zip(got, true, plain, strict=True):
        a, c = (np.asarray(y, np.float64) for y in (a, c))
        if b.ndim == 3:
            a, b, c = (np.where(some, y, 0) for y in (a, b, c))
        error, allowed_error = (np.sqrt(np.mean((y - b) ** 2)) for y in (a, c))
        assert error <= 2 * allowed_error, (error, allowed_error)
    assert not np.asarray(got[0], np.float32)[~some.swapaxes(1, 2)].any()


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("length", [1000, 8192])
def test_along_all_operands_equals_the_sum_of_each(dim, length):
    """Along all operands, a kernel for Hopper runs, and along one of them, the fallback kernel.
    Many tiles: two rows of documents, grouped heads."""
    ids = np.sort(np.random.default_rng(length).integers(0, 7, (2, length))).astype(np.int32)
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    shapes = [(2, length, heads, dim) for heads in (8, 2, 2)]
    x, u = (
        [jax.random.normal(jax.random.key(n + 3 * k), shape, jnp.bfloat16)
            for n, shape in enumerate(shapes)] for k in (0, 1)
    )  # fmt: skip
    if jax.devices()[0].compute_capability == "9.0":
        call = {"dtype": "bf16", "qk_dim": dim, "v_dim": dim, "has_tq": 1, "has_tk": 1, "has_tv": 1}
        found = ffi.ext.select("forward_tangent", 90, 132, call, ffi.ext.driver()["version"])
        assert [kernel for kernel, _ in found] == ["forward_tangent_sm90"]

    @functools.partial(jax.jit, static_argnums=0)
    def along(argnums, u):
        def attend(*some):
            given = dict(zip(argnums, some, strict=True))
            return packax.flash_attention(
                *(given.get(n, x[n]) for n in range(3)), mask, return_lse=True
            )

        tangents = tuple(u[n] for n in argnums)
        return jax.jvp(attend, tuple(x[n] for n in argnums), tangents)[1]

    got = along((0, 1, 2), u)
    for a, *parts in zip(got, *(along((n,), u) for n in range(3)), strict=True):
        want = sum(np.asarray(y, np.float64) for y in parts)
        error = np.asarray(a, np.float64) - want
        assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(want**2))
        assert np.abs(error).max() < 0.05 * np.abs(want).max()
    for a, b in zip(got, along((0, 1, 2), u), strict=True):  # no race
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_padding_may_be_nan():
    """In queries that attend to nothing, and in keys that share no tile with an attended one."""
    mask = packax.causal() & packax.documents(IDS[1:])
    length, valid = cases.LENGTH, IDS[1] >= 0
    end = int(np.flatnonzero(valid)[-1]) + 1
    x = [jnp.asarray(np.random.default_rng(n).standard_normal((1, length, 2, 64)), jnp.bfloat16)
        for n in range(6)]  # fmt: skip
    first = [end if n % 3 == 0 else -(-end // 128) * 128 for n in range(6)]
    assert max(first) < length
    bad = [y.at[:, begin:].set(jnp.nan) for y, begin in zip(x, first, strict=True)]

    @jax.jit
    def tangent(*x):
        return jax.jvp(lambda *x: packax.flash_attention(*x, mask), tuple(x[:3]), tuple(x[3:]))

    for a, b in zip(tangent(*x), tangent(*bad), strict=True):
        np.testing.assert_array_equal(np.float32(a)[:, :end], np.float32(b)[:, :end])
        assert not np.float32(b)[:, end:].any()


def test_meanflow_gradients():
    """A loss that holds a jvp: the gradients equal those with implementation="xla"."""
    x = [jnp.asarray(np.random.default_rng(n).standard_normal((2, cases.LENGTH, 2, 64)),
        jnp.bfloat16) for n in range(6)]  # fmt: skip
    mask = packax.create_attention_mask(packax.causal() & packax.documents(IDS))

    def gradients(implementation, stopped):
        def loss(*y):
            attend = functools.partial(
                packax.flash_attention, mask=mask, implementation=implementation
            )
            out, tout = jax.jvp(attend, y, tuple(x[3:]))
            target = jax.lax.stop_gradient(tout) if stopped else tout
            return jnp.sum((out.astype(jnp.float32) - target.astype(jnp.float32)) ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*x[:3])

    for stopped in (True, False):
        for a, b in zip(gradients(None, stopped), gradients("xla", stopped), strict=True):
            a, b = np.float32(a), np.float32(b)
            assert np.abs(a - b).max() < 0.05 * np.abs(b).max()
