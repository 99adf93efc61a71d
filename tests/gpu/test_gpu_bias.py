"""A bias that is an array, and dropout, on a GPU: the oracle, and the same bits as XLA.
`pytest -m gpu`."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import philox
import pytest
import score_checks
import score_oracle

pytestmark = pytest.mark.gpu
KEY = jax.random.key(11)


def check(name, dtype, dims, axes, bias_dtype, rate, soft_cap=None):
    """`axes`: whether the bias has the batch, heads and rows; None: there is none."""
    case = cases.BY_NAME[name]
    arrays, dout, dlse = score_checks.arrays_of(case, dtype, dims)
    sizes = (case.batch, case.heads, case.q_len)
    if axes is not None:
        own = tuple(n if has else 1 for n, has in zip(sizes, axes, strict=True))
        rng = np.random.default_rng(0)
        arrays["bias"] = jnp.asarray(rng.standard_normal((*own, case.kv_len)), bias_dtype)
    mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)

    def attention(arrays):
        tensors = [arrays[x] for x in ("query", "key", "value")]
        return packax.flash_attention(
            *tensors, mask, scale=arrays["scale"], bias=arrays.get("bias"), soft_cap=soft_cap,
            return_lse=True, dropout_rate=rate, dropout_key=KEY, implementation="cuda",
        )  # fmt: skip

    got = jax.jit(lambda arrays: score_oracle.run(attention, arrays, dout, dlse))(arrays)
    factors = philox.factors(KEY, rate, (*sizes, case.kv_len)) if rate else None
    true, plain, _ = score_oracle.true_and_plain(
        arrays, case.allowed(), dout, dlse, soft_cap=soft_cap, factors=factors
    )
    score_oracle.check(got, true, plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name,dims,axes,bias_dtype,rate,soft_cap",
    [
        ("documents_odd", (64, 64), (0, 1, 1), "float32", 0.0, None),
        ("batch_of_three", (128, 128), (0, 1, 1), None, 0.0, None),
        ("batch_of_three", (64, 64), (1, 0, 0), None, 0.2, None),
        ("cross_positions", (32, 32), (0, 0, 1), "float32", 0.5, 2.0),
        ("causal_wide", (128, 128), (0, 0, 0), None, 0.0, None),
        ("ids_reappear", (40, 72), (1, 1, 1), None, 0.1, None),
        ("padding", (128, 128), None, None, 0.3, None),
        ("gqa_4", (64, 64), None, None, 0.9, None),
    ],
)
def test_options(name, dims, axes, bias_dtype, rate, soft_cap, dtype):
    check(name, dtype, dims, axes, bias_dtype or dtype, rate, soft_cap)


def packed_case(kind):
    """Documents that begin at no multiple of 8, and as many keys as one."""
    ids = {"odd": cases.ODD, "padding": cases.PADDED, "reappear": cases.BACK}.get(kind)
    if ids is None:
        return cases.Case(kind, "full blocks", packax.full, 131, 264, batch=3, heads=4, kv_heads=2)
    expression = packax.documents(ids[:400])
    if kind != "padding":
        expression = packax.causal() & expression
    return cases.Case(kind, "packed", lambda: expression, 400, 400, batch=2, heads=4, kv_heads=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (24, 40)], ids=str)
@pytest.mark.parametrize(
    "kind,axes",
    [("odd", (0, 1, 1)), ("padding", (1, 0, 1)), ("reappear", (1, 1, 0)), ("full", (0, 1, 1))],
)
def test_a_bias_alone(kind, axes, dims, dtype):
    """Nothing else that changes scores, and a scale that is a number: Hopper has kernels for it."""
    case = packed_case(kind)
    arrays, dout, dlse = score_checks.arrays_of(case, dtype, dims)
    sizes = (case.batch, case.heads, case.q_len)
    own = tuple(n if has else 1 for n, has in zip(sizes, axes, strict=True))
    rng = np.random.default_rng(1)
    arrays["bias"] = jnp.asarray(rng.standard_normal((*own, case.kv_len)), dtype)
    scale = float(arrays.pop("scale"))
    mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)

    def attention(arrays):
        tensors = [arrays[x] for x in ("query", "key", "value")]
        return packax.flash_attention(
            *tensors, mask, scale=scale, bias=arrays["bias"], return_lse=True,
            implementation="cuda",
        )  # fmt: skip

    got = jax.jit(lambda arrays: score_oracle.run(attention, arrays, dout, dlse))(arrays)
    others = {"scale": jnp.float32(scale)}
    true, plain, _ = score_oracle.true_and_plain(arrays | others, case.allowed(), dout, dlse)
    for results in (true, plain):
        del results.gradients["scale"]
    score_oracle.check(got, true, plain)


@pytest.mark.parametrize("precision", ["highest", "tensorfloat32"])
@pytest.mark.parametrize("axes,rate", [((0, 1, 1), 0.0), ((1, 0, 1), 0.2), (None, 0.4)])
def test_float32(axes, rate, precision):
    with jax.default_matmul_precision(precision):
        check("documents_odd", "float32", (64, 64), axes, "float32", rate)


@pytest.mark.parametrize("length", [500, 4097])
def test_the_bits_are_those_of_xla(length):
    """Rows of zeros keep sums of ones: a bit that differs is a difference of 1 / length."""
    query = jnp.zeros((2, length, 3, 64), jnp.float16)
    value = jnp.ones_like(query)

    def run(implementation):
        return packax.flash_attention(
            query, query, value, packax.sliding_window(400, 40), dropout_rate=0.25,
            dropout_key=KEY, implementation=implementation,
        )  # fmt: skip

    x, y = (np.asarray(jax.jit(run, static_argnums=0)(x), np.float32) for x in ("cuda", "xla"))
    np.testing.assert_allclose(x, y, atol=1e-3)


def test_the_same_bits_each_run():
    case = cases.BY_NAME["batch_of_three"]
    query, key, value, dout, _ = case.tensors("bfloat16", 128, 128)
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.standard_normal((1, 1, case.q_len, case.kv_len)), jnp.bfloat16)

    @jax.jit
    def run(bias):
        out, pullback = jax.vjp(
            lambda *x: packax.flash_attention(
                *x[:3], case.expression(), bias=x[3], dropout_rate=0.1, dropout_key=KEY
            ),
            query, key, value, bias,
        )  # fmt: skip
        return out, *pullback(dout)

    first = jax.block_until_ready(run(bias))
    for _ in range(5):
        for x, y in zip(run(bias), first, strict=True):
            np.testing.assert_array_equal(x, y)
