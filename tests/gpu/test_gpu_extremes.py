"""Extreme numbers on a GPU: sinks, additive masks, logits and soft caps. `pytest -m gpu`."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import additive_masks
import dense
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_runs import of
from properties.values import compiled
from tiers import once_each, some

pytestmark = pytest.mark.gpu
DOCUMENTS = "interval=causal,selector=packed,lengths=500x500"


# --- Sinks

SINKS = np.float32([-np.inf, 1.5, 3e38, np.inf])  # none, as large as logits, all of the weight
OPTIONS = {
    "plain": "",
    "cap": "cap=2",
    "alibi": "bias=alibi",
    "bias": "bias=shared",
    "dropout": "dropout=dropout",
    "max": "results=out+lse+top",
    "blocks": "selector=block mask 64 64",
}


@pytest.mark.parametrize(
    "option,length",
    some(itertools.product(OPTIONS, (500, 1500)), 0, 3, 4, 7, 8, 11, 12),
)
def test_extreme_sinks(option, length):
    """Results and gradients are those of XLA; -inf changes no bit of its head."""
    text = f"{DOCUMENTS},lengths={length}x{length},dims=64x64,dtype=bfloat16,{OPTIONS[option]}"
    call = of(f"{text},sinks=sinks")
    a = call.arrays(5) | {"sinks": SINKS}
    got = compiled(call)(a)
    want = compiled(dataclasses.replace(call, implementation="xla"))(a)
    for name, x in got.items():
        x, y = (np.asarray(z, np.float32) for z in (x, want[name]))
        assert not np.isnan(x).any(), name
        np.testing.assert_allclose(x, y, atol=0.05, rtol=0.02, err_msg=name)
    without = compiled(dataclasses.replace(call, sinks="none"))(a)
    np.testing.assert_array_equal(got["out"][:, :, 0], without["out"][:, :, 0])
    np.testing.assert_array_equal(got["lse"][:, 0], without["lse"][:, 0])


# --- A bias

TYPES = [
    "dtype=bfloat16",  # Hopper has kernels for a bias alone
    "dtype=float16",
    "dtype=bfloat16,bias_dtype=float32",
    "dtype=bfloat16,cap=5",
    "dtype=float16,bias_dtype=float32,dropout=dropout",
    "dtype=bfloat16,order=deterministic",
]
DIMS = "64x64", "96x96", "128x128", "40x72"


@pytest.mark.parametrize(
    "hidden,dims,dtype",
    [
        *once_each(additive_masks.HIDDEN, (*DIMS, "256x256", "192x128"), TYPES),
        *some(itertools.product(additive_masks.HIDDEN, DIMS, ["dtype=float32"]), 0),
    ],
)
def test_additive_masks(hidden, dims, dtype):
    """Keys and rows hidden by -inf, the lowest finite number, -1e9 or -1e4, up to whole rows, and
    left padding."""
    mask, times = hidden
    call = of(f"heads=2/1,lengths=264x264,{mask},dims={dims},{dtype}")
    a = call.arrays(1)
    a["query"] = (a["query"] * times).astype(a["query"].dtype)
    with jax.default_matmul_precision("highest" if call.dtype == "float32" else None):
        for where, bias in additive_masks.biases(a["bias"]):
            wrong = additive_masks.wrong(call, compiled(call), a | {"bias": bias})
            assert not wrong, (where, wrong)


@jax.jit
def results(query, key, value, bias=None):
    """The output, and the gradient of value for a cotangent of 1."""

    def attend(value):
        return packax.flash_attention(
            query, key, value, packax.full(), bias=bias, implementation="cuda"
        )

    out, back = jax.vjp(attend, value)
    return out, *back(jnp.ones_like(out))


@pytest.mark.parametrize(
    "dim,dtype",
    [
        *once_each((64, 128, 256, 96, 192), ("bfloat16", "float16")),
        *some(itertools.product((64, 96, 128), ["float32"]), 0),
    ],
)
def test_one_number_on_all_keys_shifts_nothing(dim, dtype):
    query = np.ones((1, 256, 1, dim), dtype)
    ramp = np.broadcast_to(np.arange(256)[:, None, None], query.shape).astype(dtype)
    for value in ("-1e9", "least", "0.7 least", "most"):
        bias = np.full((1, 1, 1, 256), additive_masks.values_of(dtype)[value]).astype(dtype)
        out, gradient = (np.asarray(x, np.float32) for x in results(query, query, ramp, bias))
        np.testing.assert_allclose(out, 127.5, rtol=1e-2, err_msg=value)
        np.testing.assert_allclose(gradient, 1, rtol=1e-2, err_msg=value)


# --- Logits


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_large_logits_without_a_bias(dim, dtype):
    """Within the bound of docs/guide/numerics.md plus the rounding of probabilities."""
    for logit in (1e3, 1e5):
        query = np.full((1, 256, 1, dim), np.sqrt(logit / np.sqrt(dim))).astype(dtype)
        found = results(query, query, np.ones_like(query))
        out, gradient = (np.asarray(x, np.float32) for x in found)
        np.testing.assert_allclose(out, 1, rtol=1e-2)
        bound = float(jnp.finfo(dtype).eps) + 2e-7 * logit
        np.testing.assert_allclose(gradient, 1, rtol=bound)


def test_rows_of_logits_far_below_zero():
    """For logits below -1e30 in base 2, the result is still the mean."""
    query = np.ones((1, 256, 1, 64), jnp.bfloat16)

    @jax.jit
    def run(query):
        low = packax.flash_attention(query, -query, query, packax.full(), scale=1e32)
        far = packax.alibi(jnp.full(1, 1e37), positions=jnp.arange(256))
        attend = functools.partial(packax.flash_attention, mask=packax.full(), bias=far)
        out, back = jax.vjp(attend, query, query, query)
        return low, (out, *back(out))

    low, others = run(query)
    np.testing.assert_array_equal(low, 1)
    for x in others:
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.parametrize("dims", ["64x64", "128x128"])
def test_slopes_of_zero_and_of_less(dims):
    call = of(f"{DOCUMENTS},dims={dims},dtype=bfloat16,bias=alibi,frozen=slopes")
    a = call.arrays(2) | {"slopes": np.float32([0, 0.0625, 0.5, -0.01])}
    assert not (wrong := call.wrong(compiled(call)(a), a)), wrong


# --- Soft caps: on some rows, warps compute tanh from the exponential, on others by a polynomial

LOUD = {"2": 4, "50": 30, "1024": 600}  # the factor on rows
ROWS = np.r_[20:46, 200:203, 499]
MASKS = (
    DOCUMENTS,
    "interval=window 90 20,selector=packed,lengths=500x500",
    "interval=causal,selector=positions,lengths=500x500",
)


@pytest.mark.parametrize(
    "dims,dtype,cap",
    once_each(
        ("64x64", "128x128", "256x256"),
        ("bfloat16", "float16", "bfloat16,order=deterministic"),
        LOUD,
    ),
)
def test_rows_on_both_sides_of_a_soft_cap(dims, dtype, cap):
    """Also without the loud rows, whose errors hide others."""
    mask = MASKS[(len(dims) + len(dtype) + int(cap)) % 3]
    call = of(f"{mask},dims={dims},dtype={dtype},cap={cap}")
    a = call.arrays(1)
    a["query"] = a["query"].copy()
    a["query"][:, ROWS] *= a["query"].dtype.type(LOUD[cap])
    got = {name: np.asarray(x) for name, x in compiled(call)(a).items()}
    true, plain = call.references(a)
    quiet = np.setdiff1d(np.arange(500), ROWS)
    parts = [
        {n: np.take(x[n], quiet, 2 if n == "lse" else 1) for n in ("out", "lse", "dquery")}
        for x in (got, true, plain)
    ]
    wrong = dense.close(got, true, plain, call.factor) + dense.close(*parts, call.factor)
    assert not wrong, wrong
