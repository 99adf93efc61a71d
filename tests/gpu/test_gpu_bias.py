"""An array bias and dropout on a GPU: results against the oracle, dropout bits against XLA.
`pytest -m gpu`."""

from __future__ import annotations

import itertools

import additive_masks
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
    """`axes`: whether the bias has the axes batch, heads and rows; None: no bias."""
    case = cases.BY_NAME[name]
    arrays, dout, dlse = score_checks.arrays_of(case, dtype, dims)
    sizes = (case.batch, case.heads, case.q_len)
    if axes is not None:
        shape = tuple(n if has else 1 for n, has in zip(sizes, axes, strict=True))
        rng = np.random.default_rng(0)
        arrays["bias"] = jnp.asarray(rng.standard_normal((*shape, case.kv_len)), bias_dtype)
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
        ("documents_odd", (256, 256), (0, 1, 1), "float32", 0.0, None),
        ("batch_of_three", (192, 128), (1, 0, 0), None, 0.2, None),
        ("cross_positions", (192, 192), (0, 0, 1), "float32", 0.5, 2.0),
        ("causal_wide", (256, 256), (0, 0, 0), None, 0.0, None),
        ("ids_reappear", (136, 200), (1, 1, 1), None, 0.1, None),
        ("padding", (256, 256), None, None, 0.3, None),
        ("gqa_4", (192, 128), None, None, 0.9, None),
    ],
)
def test_options(name, dims, axes, bias_dtype, rate, soft_cap, dtype):
    check(name, dtype, dims, axes, bias_dtype or dtype, rate, soft_cap)


def packed_case(kind, fewer=0):
    """Documents that start at no multiple of 8, with a number of keys that is a multiple of 8,
    less `fewer`."""
    ids = {"odd": cases.ODD, "padding": cases.PADDED, "reappear": cases.BACK}.get(kind)
    if ids is None:
        more = {"batch": 3, "heads": 4, "kv_heads": 2}
        return cases.Case(kind, "full blocks", packax.full, 131, 264 - fewer, **more)
    length = 400 - fewer
    expression = packax.documents(ids[:length])
    if kind != "padding":
        expression = packax.causal() & expression
    more = {"batch": 2, "heads": 4, "kv_heads": 2}
    return cases.Case(kind, "packed", lambda: expression, length, length, **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (24, 40), (256, 256), (136, 72)], ids=str)
@pytest.mark.parametrize(
    "kind,axes",
    [
        *(("odd", (0, 1, 1)), ("padding", (1, 0, 1)), ("reappear", (1, 1, 0)), ("full", (0, 1, 1))),
        *((kind, (1, 1, 1)) for kind in ("odd", "padding", "reappear", "full")),
    ],
)
def test_a_bias_alone(kind, axes, dims, dtype):
    """Only a bias, and a scale that is a number: Hopper has kernels for this. With all axes, the
    kernel of dK and dV writes the bias's gradient."""
    check_alone(packed_case(kind), axes, dims, dtype, dtype)


@pytest.mark.parametrize("dims", [(24, 40), (64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("axes", [(0, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("kind", ["odd", "padding", "reappear", "full"])
@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
def test_a_bias_of_odd_rows(bias_dtype, kind, axes, dims):
    """Rows of no whole 16 bytes, which Hopper's kernels get padded."""
    check_alone(packed_case(kind, fewer=3), axes, dims, "bfloat16", bias_dtype)


def check_alone(case, axes, dims, dtype, bias_dtype):
    arrays, dout, dlse = score_checks.arrays_of(case, dtype, dims)
    sizes = (case.batch, case.heads, case.q_len)
    shape = tuple(n if has else 1 for n, has in zip(sizes, axes, strict=True))
    rng = np.random.default_rng(1)
    arrays["bias"] = jnp.asarray(rng.standard_normal((*shape, case.kv_len)), bias_dtype)
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


@pytest.mark.parametrize("length,dim", [(500, 64), (4097, 64), (500, 256)])
def test_the_bits_are_those_of_xla(length, dim):
    """Each output is a mean of ones: a dropout bit that differs changes it by 1 / length."""
    query = jnp.zeros((2, length, 3, dim), jnp.float16)
    value = jnp.ones_like(query)

    def run(implementation):
        return packax.flash_attention(
            query, query, value, packax.sliding_window(400, 40), dropout_rate=0.25,
            dropout_key=KEY, implementation=implementation,
        )  # fmt: skip

    x, y = (np.asarray(jax.jit(run, static_argnums=0)(x), np.float32) for x in ("cuda", "xla"))
    np.testing.assert_allclose(x, y, atol=1e-3)


@pytest.mark.parametrize("dim", [128, 256])
def test_the_same_bits_each_run(dim):
    case = cases.BY_NAME["batch_of_three"]
    query, key, value, dout, _ = case.tensors("bfloat16", dim, dim)
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


IDS = np.repeat(np.arange(5), (3, 61, 70, 66, 64))
HIDDEN = {"full": packax.full(), "packed": packax.causal() & packax.documents(IDS)}


DIMS = [(64, 64), (96, 96), (128, 128), (40, 72)]
DTYPES = [
    ("bfloat16", "bfloat16", {}),  # Hopper's kernels for a bias alone
    ("float16", "float16", {}),
    ("bfloat16", "float32", {}),
    ("bfloat16", "bfloat16", {"soft_cap": 5.0}),
    ("float16", "float32", {"dropout_rate": 0.2, "dropout_key": KEY}),
    ("bfloat16", "bfloat16", {"deterministic": True}),
]


@pytest.mark.parametrize(
    "dims,dtype,bias_dtype,options",
    [
        *((dims, *dtypes) for dims in [*DIMS, (256, 256), (192, 128)] for dtypes in DTYPES),
        *((dims, "float32", "float32", {}) for dims in DIMS),
    ],
)
@pytest.mark.parametrize(
    "name,axes,times", [("full", (1, 1), 1), ("packed", (2, 264), 0), ("packed", (1, 264), 1)]
)
def test_additive_masks(name, axes, times, dims, dtype, bias_dtype, options):
    """Keys and rows hidden by -inf, the lowest finite number, -1e9 or -1e4, up to whole rows, and
    left padding. Queries times 0 give the softmax of equal logits."""
    expression = HIDDEN[name]
    case = cases.Case(name, "additive masks", lambda: expression, 264, 264, heads=2, kv_heads=1)
    arrays, dout, dlse = score_checks.arrays_of(case, dtype, dims, bias=None)
    arrays["query"] *= times
    scale = float(arrays.pop("scale"))  # an array would select other kernels
    mask = packax.create_attention_mask(expression, q_len=264, kv_len=264)

    def attention(arrays):
        tensors = [arrays[x] for x in ("query", "key", "value")]
        return packax.flash_attention(
            *tensors, mask, scale=scale, bias=arrays["bias"], return_lse=True,
            implementation="cuda", **options,
        )  # fmt: skip

    rate = options.get("dropout_rate")
    factors = philox.factors(KEY, rate, (1, 2, 264, 264)) if rate else None
    check = additive_masks.checker(attention, case.allowed())
    with jax.default_matmul_precision("highest" if dtype == "float32" else None):
        for where, bias in additive_masks.biases((1, *axes, case.kv_len), bias_dtype):
            check(
                arrays | {"bias": bias}, dout, dlse, where, scale=scale,
                soft_cap=options.get("soft_cap"), factors=factors,
                float32_products=dtype == "float32",
            )  # fmt: skip


@pytest.mark.parametrize("value", ["-1e9", "least", "0.7 least", "most"])
@pytest.mark.parametrize(
    "dim,dtype",
    [
        *itertools.product([64, 96, 128, 192, 256], ["bfloat16", "float16"]),
        *((dim, "float32") for dim in (64, 96, 128)),
    ],
)
def test_one_number_on_all_keys_shifts_nothing(dim, dtype, value):
    query = jnp.ones((1, 256, 1, dim), dtype)
    bias = jnp.full((1, 1, 1, 256), additive_masks.values_of(dtype)[value], dtype)
    ramp = jnp.broadcast_to(jnp.arange(256, dtype=dtype)[None, :, None, None], query.shape)

    def run(ramp):
        return packax.flash_attention(
            query, query, ramp, packax.full(), bias=bias, implementation="cuda"
        )

    out, transpose = jax.vjp(jax.jit(run), ramp)
    np.testing.assert_allclose(np.asarray(out, np.float32), 127.5, rtol=1e-2)
    (gradient,) = transpose(jnp.ones_like(out) / 256)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), 1 / 256, rtol=1e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype,logit", [("bfloat16", 1e3), ("bfloat16", 1e5), ("float16", 1e5)])
def test_large_logits_without_a_bias(dim, dtype, logit):
    """Within the bound of docs/guide/numerics.md plus the rounding of probabilities."""
    each = float(jnp.asarray(np.sqrt(logit / np.sqrt(dim)), dtype))
    query = jnp.full((1, 256, 1, dim), each, dtype)
    value = jnp.ones_like(query)
    out, transpose = jax.vjp(
        jax.jit(lambda value: packax.flash_attention(query, query, value, packax.full())), value
    )
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, rtol=1e-2)
    (gradient,) = transpose(jnp.ones_like(out))
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32), 1, rtol=float(jnp.finfo(dtype).eps) + 2e-7 * logit
    )


def test_rows_of_logits_far_below_zero():
    """For logits below -1e30 in base 2, the result is still the mean."""
    query = jnp.ones((1, 256, 1, 64), jnp.bfloat16)

    def run(value):
        return packax.flash_attention(query, -query, value, packax.full(), scale=1e32)

    np.testing.assert_array_equal(jax.jit(run)(query), 1)
    slopes = jnp.full(1, 1e37)
    index = jnp.arange(256)
    far = packax.alibi(slopes, positions=index)
    out, transpose = jax.vjp(
        lambda *x: packax.flash_attention(*x, packax.full(), bias=far), query, query, query
    )
    for x in (out, *transpose(out)):
        assert np.isfinite(np.asarray(x, np.float32)).all()
