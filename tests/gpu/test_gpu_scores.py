"""The fallback kernels on a GPU: score parameters, and head dims between the compiled ones.
`pytest -m gpu`."""

from __future__ import annotations

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from score_checks import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name,dims,options",
    [
        ("causal_long", (64, 64), {"soft_cap": 2.0}),
        ("batch_of_three", (128, 128), {"slopes": True, "sinks": True}),
        ("positions_fall", (192, 128), {"soft_cap": 3.0, "slopes": True}),
        ("padding", (256, 256), {"soft_cap": 3.0, "slopes": True, "sinks": True}),
        ("padding", (512, 512), {"soft_cap": 3.0, "slopes": True, "sinks": True}),
        ("gqa_4", (320, 320), {"soft_cap": 2.0, "sinks": True}),
        ("gqa_4", (128, 128), {"scale": -0.2}),
        ("cross_documents", (64, 64), {"scale": 0.0, "slopes": True}),
    ],
)
def test_options(name, dims, options, dtype):
    case = cases.BY_NAME[name]
    check(case, dtype, dims, **options)


@pytest.mark.parametrize("name", ["causal_long", "padding", "gqa_4"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (96, 96), (256, 256), (192, 192), (512, 512)]
)
def test_sinks(name, dims):
    """Without other options: the plain kernels."""
    check(cases.BY_NAME[name], "bfloat16", dims, sinks=True)


SINKS = jnp.array([-jnp.inf, 1.5, 3e38, jnp.inf])  # none, as large as logits, all of the weight


@pytest.mark.parametrize("length", [500, 1500])
@pytest.mark.parametrize("option", ["plain", "cap", "alibi", "bias", "blocks", "dropout", "max"])
def test_extreme_sinks(option, length):
    """Results and gradients are those of XLA, finite but for the infinite sink; -inf changes no bit
    of its head."""
    rng = np.random.default_rng(5)
    query, key, value, dout = (
        jnp.asarray(rng.standard_normal((2, length, heads, 64)), jnp.bfloat16)
        for heads in (4, 2, 2, 4)
    )
    ids = np.repeat([0, 1, 2, -1], [length // 5, length // 2, length // 5, length // 10])
    expression = packax.causal() & packax.documents(ids.astype(np.int32))
    options = {
        "cap": {"soft_cap": 2.0},
        "alibi": {"bias": packax.alibi(jnp.array([0.5, 0.1, 0.02, 0.004]))},
        "bias": {"bias": jnp.asarray(rng.standard_normal((1, 4, length, length)), jnp.bfloat16)},
        "dropout": {"dropout_rate": 0.2, "dropout_key": jax.random.key(0)},
        "max": {"return_max_logits": True},
    }.get(option, {})
    if option == "blocks":
        blocks = rng.random((1, 4, -(-length // 64), -(-length // 64))) < 0.6
        expression &= packax.masks.block_sparse(blocks, 64)
    mask = packax.create_attention_mask(expression)

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(sinks, implementation):
        def attend(*x):
            tensors, sinks = x[:3], x[3] if len(x) > 3 else None
            out, lse, *_ = packax.flash_attention(
                *tensors, mask, sinks=sinks, return_lse=True, implementation=implementation,
                **options,
            )  # fmt: skip
            return out, lse

        given = (query, key, value) if sinks is None else (query, key, value, sinks)
        results, back = jax.vjp(attend, *given)
        return *results, *back((dout, jnp.ones_like(results[1])))

    got, want = run(SINKS, "cuda"), run(SINKS, "xla")
    names = ("out", "lse", "query", "key", "value", "sinks")
    for name, x, y in zip(names, got, want, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, atol=0.05, rtol=0.02, err_msg=name)
        assert not np.isnan(x).any(), name
    for x, y in zip(got[:2], run(None, "cuda")[:2], strict=True):
        head = np.s_[:, :, 0] if x.ndim == 4 else np.s_[:, 0]
        np.testing.assert_array_equal(np.asarray(x[head]), np.asarray(y[head]))


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("window", [9, 128, 500])
def test_windows_in_long_rows(window, sinks):
    """`row_keys` chooses the kernel on Hopper; every choice gives the results of XLA."""
    rng = np.random.default_rng(window)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, 3001, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2)
    )
    ids = np.repeat(np.int32([0, 1, 2, -1]), [1000, 1700, 101, 200])
    mask = packax.create_attention_mask(packax.sliding_window(window - 1) & packax.documents(ids))
    assert mask.row_keys in (128, 512)

    @functools.partial(jax.jit, static_argnames="implementation")
    def attend(mask, implementation):
        return packax.flash_attention(
            query, key, value, mask, sinks=sinks, return_lse=True, implementation=implementation
        )

    want = attend(mask, "xla")
    for row_keys in (0, 1):
        got = attend(dataclasses.replace(mask, row_keys=row_keys), "cuda")
        for x, y in zip(got, want, strict=True):
            x, y = (np.asarray(z, np.float32) for z in (x, y))
            np.testing.assert_allclose(x, y, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    "dims",
    [
        *((8, 8), (16, 24), (40, 64), (64, 72), (96, 96), (136, 80), (200, 232), (256, 8)),
        *((320, 320), (264, 512), (504, 72)),
    ],
)
@pytest.mark.parametrize("name", ["documents_odd", "ids_reappear"])
def test_head_dims(name, dims):
    check(cases.BY_NAME[name], "bfloat16", dims)


@pytest.mark.parametrize("precision,close", [("highest", 1e-5), ("tensorfloat32", 1e-2)])
@pytest.mark.parametrize(
    "name,dims,options",
    [
        ("documents_odd", (64, 64), {}),
        ("causal_long", (128, 128), {"soft_cap": 2.0}),
        ("gqa_4", (192, 128), {}),
        ("padding", (256, 256), {"slopes": True}),
        ("ids_reappear", (40, 72), {}),
    ],
)
def test_float32(name, dims, options, precision, close):
    """The yardstick is plain jax.numpy in float32 at the same precision."""
    case = cases.BY_NAME[name]
    with jax.default_matmul_precision(precision):
        check(case, "float32", dims, close=close, **options)


@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (320, 320), (512, 512)],
)
@pytest.mark.parametrize("name", ["causal_long", "padding", "ids_reappear", "gqa_4"])
def test_largest_logits(name, dims):
    """Without other score parameters: Hopper has dedicated kernels."""
    case = cases.BY_NAME[name]
    query, key, value, *_ = case.tensors("bfloat16", *dims)
    mask = case.expression()

    def largest(*x, **options):
        return packax.flash_attention(*x, mask, return_max_logits=True, **options)

    out, top = largest(query, key, value)
    plain = packax.flash_attention(query, key, value, mask)
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    _, want = largest(*wide, implementation="xla")
    np.testing.assert_allclose(np.asarray(top), np.asarray(want), rtol=1e-5, atol=1e-5)
    x, y = (np.asarray(x, np.float32) for x in (plain, out))
    np.testing.assert_allclose(x, y, rtol=2.0**-7, atol=2.0**-7)  # one bfloat16 ulp


def test_fallback_kernels_agree_with_the_plain_ones():
    """Without score parameters, both agree to rounding."""
    query, key, value, *_ = cases.BY_NAME["causal_long"].tensors("bfloat16", 128, 128)
    plain = packax.flash_attention(query, key, value, packax.causal())
    general, top = packax.flash_attention(
        query, key, value, packax.causal(), return_max_logits=True
    )
    x, y = (np.asarray(x, np.float32) for x in (plain, general))
    np.testing.assert_allclose(x, y, atol=2.0**-7)
    assert top.dtype == jnp.float32 and np.isfinite(top).all()
