"""A bias that is an array: output, log-sum-exp and every gradient against float64, for every axis
that may be 1; what a row of -inf leaves; transformations; and what is refused.

Guards against a tile of another head or row, a sum over the wrong axes, a gradient where the mask
attends nothing, an array expanded over the axes it does not have.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import packax
import pytest
import score_checks
import score_oracle
from cases import BY_NAME, Case
from tiers import once_each

SMALL = Case(
    "bias", "odd lengths, groups", lambda: packax.sliding_window(40, 9), 150, 187, batch=2, heads=4,
    kv_heads=2,
)  # fmt: skip
SHAPES = [
    tuple(n if has else 1 for n, has in zip((2, 4, 150), axes, strict=True))
    for axes in itertools.product((True, False), repeat=3)
]


def drawn(shape, keys, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((*shape, keys)), dtype)


def of(case, **static):
    mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)

    def attention(arrays):
        tensors = [arrays[name] for name in ("query", "key", "value")]
        return packax.flash_attention(
            *tensors, mask, scale=arrays["scale"], bias=arrays["bias"], return_lse=True, **static
        )

    return attention


def check(case, bias, dtype=jnp.float32, *, soft_cap=None, dims=(16, 16)):
    arrays, dout, dlse = score_checks.arrays_of(case, dtype, dims, bias=bias)
    attention = of(case, soft_cap=soft_cap)
    got = jax.jit(lambda arrays: score_oracle.run(attention, arrays, dout, dlse))(arrays)
    true, plain, _ = score_oracle.true_and_plain(
        arrays, case.allowed(), dout, dlse, soft_cap=soft_cap
    )
    score_oracle.check(got, true, plain)
    assert got.gradients["bias"].dtype == bias.dtype
    return got, true


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape):
    check(SMALL, drawn(shape, SMALL.kv_len))


@pytest.mark.parametrize("name", ["documents_odd", "batch_of_three", "cross_positions", "one_row"])
def test_masks(name):
    case = BY_NAME[name]
    got, _ = check(case, drawn((1, case.heads, case.q_len), case.kv_len))
    allowed = case.allowed()
    idle = ~(allowed if allowed.ndim == 3 else allowed[None]).any(0)
    assert not np.asarray(got.gradients["bias"])[:, :, idle].any()


@pytest.mark.parametrize(
    "dtype,bias_dtype",
    once_each([jnp.bfloat16, jnp.float16], [jnp.bfloat16, jnp.float16, jnp.float32]),
)
def test_dtypes(dtype, bias_dtype):
    check(SMALL, drawn((1, 4, 150), SMALL.kv_len, bias_dtype), dtype)


def test_soft_cap_comes_before_it():
    check(SMALL, drawn((2, 1, 150), SMALL.kv_len), soft_cap=1.5)


def test_minus_infinity():
    """In single entries, and in all of a row, which then attends nothing."""
    bias = drawn((1, 4, 150), SMALL.kv_len)
    bias = bias.at[:, :, 7].set(-jnp.inf).at[:, 1, 60:90].set(-jnp.inf)
    bias = bias.at[..., ::5].set(-jnp.inf)
    got, _ = check(SMALL, bias)
    assert not np.asarray(got.out)[:, 7].any() and (np.asarray(got.lse)[:, :, 7] == -np.inf).all()
    for gradient in got.gradients.values():
        assert np.isfinite(gradient).all()


def test_it_equals_alibi():
    """The one kind of bias that is no array."""
    case = BY_NAME["causal_tiles"]
    slopes = score_checks.slopes_of(case.heads)
    index = jnp.arange(case.q_len)
    far = jnp.abs(index[:, None] - index[None])
    query, key, value, *_ = case.tensors(jnp.float32, 16, 16)

    def run(bias):
        return packax.flash_attention(query, key, value, packax.causal(), bias=bias)

    array = -slopes[None, :, None, None] * far
    np.testing.assert_allclose(run(array), run(packax.alibi(slopes)), atol=2e-5)


def test_second_derivatives_and_forward_mode():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((1, 20, 2, 8)), jnp.float32) for _ in range(3)
    )
    bias, direction = (
        jnp.asarray(rng.standard_normal((1, 1, 20, 20)), jnp.float32) for _ in range(2)
    )
    mask = packax.create_attention_mask(packax.causal(), q_len=20, kv_len=20)
    allowed = np.tril(np.ones((20, 20), bool))

    def ours(bias):
        return jnp.sin(packax.flash_attention(query, key, value, mask, bias=bias)).sum()

    def plain(bias):
        arrays = {"query": query, "key": key, "value": value, "scale": jnp.float32(8**-0.5)}
        return jnp.sin(score_oracle.dense(arrays | {"bias": bias}, allowed)[0]).sum()

    for way in (
        lambda f: jax.jvp(f, (bias,), (direction,))[1],
        lambda f: jax.jvp(jax.grad(f), (bias,), (direction,))[1],
        lambda f: jax.grad(lambda x: (jax.grad(f)(x) * direction).sum())(bias),
    ):
        np.testing.assert_allclose(way(ours), way(plain), atol=2e-5)


@pytest.mark.parametrize("mapped", [True, False])
def test_vmap(mapped):
    """Over models of their own bias, or over a batch that shares one."""
    rng = np.random.default_rng(1)
    query, key, value = (
        jnp.asarray(rng.standard_normal((3, 2, 40, 2, 8)), jnp.float32) for _ in range(3)
    )
    bias = jnp.asarray(rng.standard_normal((3, 1, 2, 40, 40)), jnp.float32)
    bias = bias if mapped else bias[0]
    mask = packax.create_attention_mask(packax.causal(), q_len=40, kv_len=40)

    def one(query, key, value, bias):
        return jnp.sin(packax.flash_attention(query, key, value, mask, bias=bias)).sum()

    axes = (0, 0, 0, 0 if mapped else None)
    got = jax.grad(lambda b: jax.vmap(one, axes)(query, key, value, b).sum())(bias)
    apart = [jax.grad(one, 3)(*(x[n] for x in (query, key, value)),
        bias[n] if mapped else bias) for n in range(3)]  # fmt: skip
    np.testing.assert_allclose(got, np.stack(apart) if mapped else sum(apart), atol=2e-5)


@pytest.mark.parametrize("way", ["out", "gradient", "tangent", "gradient of a sum"])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
def test_vmap_does_not_repeat_it_for_the_batch(batch, mapped, way):
    """Of an array for all batch rows, nothing is larger than one for each mapped element."""
    n, length = 3, 256
    bias = jnp.zeros((n, 1, 2, length, length)[not mapped :])
    query = jnp.zeros((n, batch, length, 2, 8))

    def one(query, bias):
        out = packax.flash_attention(query, query, query, packax.causal(), bias=bias)
        return jnp.sin(out).sum()

    ways = {
        "out": lambda q, b: packax.flash_attention(q, q, q, packax.causal(), bias=b),
        "gradient": jax.grad(one, 1),
        "tangent": lambda q, b: jax.jvp(one, (q, b), (q, b)),
    }
    axes = (0, 0 if mapped else None)
    function = jax.vmap(ways.get(way, one), axes)
    if way not in ways:
        function = jax.grad(lambda q, b: jax.vmap(one, axes)(q, b).sum(), 1)
    assert jaxprs.largest(function, query, bias) <= n * 2 * length**2


@pytest.mark.parametrize(
    "bias,text",
    [
        (np.zeros((2, 4, 150), np.float32), "must have shape (1 or 2, 1 or 4, 1 or 150, 187)"),
        (np.zeros((2, 3, 150, 187), np.float32), "but has (2, 3, 150, 187)"),
        (np.zeros((1, 1, 1, 1), np.float32), "but has (1, 1, 1, 1)"),
        (np.zeros((1, 1, 150, 187), np.int32), "bias must be an array of floats, but is int32"),
        (np.zeros((1, 1, 150, 187), bool), "a mask is an expression, not a bias"),
        ([[0.0]], "bias must be None, alibi(slopes) or an array of floats, but is a list"),
    ],
)
def test_wrong_requests(bias, text):
    tensors = SMALL.tensors(jnp.float32, 8, 8)[:3]
    with pytest.raises(ValueError, match="bias must") as error:
        packax.flash_attention(*tensors, packax.full(), bias=bias)
    assert text in str(error.value)


def test_it_is_not_expanded():
    """One row for all heads and rows stays one in the program."""
    case = SMALL
    query, key, value, *_ = case.tensors(jnp.float32, 8, 8)
    bias = drawn((1, 1, 1), case.kv_len)

    def loss(bias):
        return packax.flash_attention(query, key, value, packax.full(), bias=bias).sum()

    text = jax.jit(jax.grad(loss)).lower(bias).as_text()
    assert "x150x187xf32" not in text and f"tensor<1x1x1x{case.kv_len}xf32>" in text
