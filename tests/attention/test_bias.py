"""A bias array beyond the table's calls: masks of large negative numbers, -inf and the least finite
numbers, a sink above them, what `vmap` repeats, and that broadcast axes are not expanded."""

from __future__ import annotations

import itertools

import additive_masks
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import packax
import pytest
from decode_calls import parse
from properties.values import compiled
from tiers import some


@pytest.mark.parametrize(
    "hidden,dtype",
    some(itertools.product(additive_masks.HIDDEN, ["float32", "bfloat16", "float16"]), 0, 4),
)
@pytest.mark.parametrize("every", some([False, True], 0))
def test_additive_masks(hidden, dtype, every):
    """Additive masks of every kind and size, also ones that mask all keys of a row; all pairs only
    in the exhaustive run. With the query times 0 all logits are equal, so plain attention computes
    their softmax exactly."""
    text, times = hidden
    call = parse(f"{text},heads=2/1,lengths=264x264,scale=array,dtype={dtype}")
    a = call.arrays(1)
    a["query"] = (a["query"] * times).astype(a["query"].dtype)
    biases = additive_masks.biases(a["bias"])
    for where, bias in biases if every else itertools.islice(biases, 1, None, 5):
        wrong = additive_masks.wrong(call, compiled(call), a | {"bias": bias})
        assert not wrong, (where, wrong)


@pytest.mark.parametrize("value", [-1e9, "least", "0.7 least", "most"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_number_on_all_keys_shifts_nothing(dtype, value):
    """The output is the mean of the values, and their gradient is 1 over the number of keys."""
    value = additive_masks.values_of(dtype).get(value, value)
    query = jnp.ones((1, 256, 1, 64), dtype)
    bias = jnp.full((1, 1, 1, 256), value, dtype)
    ramp = jnp.broadcast_to(jnp.arange(256, dtype=dtype)[None, :, None, None], query.shape)

    def run(ramp):
        return packax.flash_attention(query, query, ramp, packax.full(), bias=bias)

    out, transpose = jax.vjp(run, ramp)
    np.testing.assert_allclose(np.asarray(out, np.float32), 127.5, rtol=1e-2)
    (gradient,) = transpose(jnp.ones_like(out) / 256)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), 1 / 256, rtol=1e-2)


@pytest.mark.parametrize("masked", [-1e4, -1e9, float(jnp.finfo(jnp.float32).min)])
def test_a_sink_above_rows_of_large_negative_numbers(masked):
    """The log-sum-exp is the sink, to float32 rounding of the sink and not of the bias."""
    query = jnp.ones((1, 6, 3, 16))
    sinks = jnp.asarray([-2.5, 0.25, 7.5])
    bias = jnp.full((1, 1, 6, 6), masked).at[..., 4:, :3].set(0.5)

    def run(sinks):
        return packax.flash_attention(
            query, query, query, packax.full(), bias=bias, sinks=sinks, return_lse=True
        )

    (out, lse), transpose = jax.vjp(run, sinks)
    some = np.logaddexp(4.5 + np.log(3), sinks)  # logit 16 / sqrt(16), plus the bias 0.5
    wanted = np.where(np.arange(6) < 4, sinks[:, None], some[:, None])
    np.testing.assert_allclose(lse[0], wanted, rtol=1e-6)
    np.testing.assert_array_equal(out[0, :4], 0)
    (gradient,) = transpose((jnp.zeros_like(out), jnp.ones_like(lse)))
    np.testing.assert_allclose(gradient, np.exp(sinks[:, None] - wanted).sum(1), rtol=1e-6)


@pytest.mark.parametrize("given", [np.asarray, jnp.asarray])
def test_the_least_float64_is_finite(given):
    """With queries of a smaller dtype, a float64 bias is clipped to that dtype's finite range and
    does not become infinite."""
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with x64(True):
        bias = given(np.full((1, 1, 1, 16), np.finfo(np.float64).min))
        query = jnp.ones((1, 16, 1, 8), jnp.float32)
        out = packax.flash_attention(query, query, query, packax.full(), bias=bias)
        np.testing.assert_allclose(out, 1)
        none = packax.flash_attention(query, query, query, packax.full(), bias=bias * np.inf)
        np.testing.assert_array_equal(none, 0)


@pytest.mark.parametrize("way", ["out", "gradient", "tangent", "gradient of a sum"])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
def test_vmap_does_not_repeat_it_for_the_batch(batch, mapped, way):
    """With one bias array for all batch rows, no intermediate is larger than one bias per mapped
    element."""
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


def test_it_is_not_expanded():
    """A bias of one row for all heads and query rows is not broadcast in the program."""
    query, key = (np.ones((1, length, 2, 8), np.float32) for length in (300, 317))
    bias = np.ones((1, 1, 1, 317), np.float32)

    def loss(bias):
        return packax.flash_attention(query, key, key, packax.full(), bias=bias).sum()

    text = jax.jit(jax.grad(loss)).lower(bias).as_text()
    assert "x300x317xf32" not in text and "tensor<1x1x1x317xf32>" in text
