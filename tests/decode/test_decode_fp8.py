"""decode_attention over float8_e4m3fn caches, and kv_cache.write into them, on the CPU.

Guards against a scale of another page, sequence or head, and against NaN bytes in keys that no row
attends to.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import packax
import pytest
from packax import kv_cache

FP8 = jnp.float8_e4m3fn
EVERY = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)


def test_every_byte():
    """A sequence with one key returns its value; a NaN byte affects only its row."""
    value = jnp.asarray(EVERY).reshape(256, 1, 1, 1)
    key = jnp.zeros_like(value)
    lengths = np.ones(256, int)
    out = packax.decode_attention(
        jnp.ones((256, 1, 1, 1)), key, value, lengths, value_scale=np.float32([3])
    )
    np.testing.assert_array_equal(out.ravel(), 3 * EVERY.astype(np.float32))


@pytest.mark.parametrize("keys", [1 << 10, pytest.param(1 << 17, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["normal", "outliers", "needle"])
def test_error_of_rounded_caches(kind, keys):
    """The bounds of docs/guide/numerics.md: the error grows neither with the length nor with
    outlier channels."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((n, 128)) for n in (16, keys, keys))
    if kind == "outliers":
        factors = np.array([10, 20, 30, 50])
        channels = rng.permutation(128)[:8]
        key[:, channels[:4]] *= factors
        query[:, channels[:4]] /= factors
        value[:, channels[4:]] *= factors
    if kind == "needle":
        query = 2.2 * key[rng.integers(0, keys, 16)]
    query = query.astype(ml_dtypes.bfloat16).astype(np.float64)
    weights = np.exp(query @ key.T / np.sqrt(128))
    want = weights @ value / weights.sum(1, keepdims=True)

    def attend(key, value, **scales):
        caches = (jnp.asarray(x)[None, :, None] for x in (key, value))
        out = packax.decode_attention(
            jnp.asarray(query, jnp.float32)[None, None], *caches, np.array([keys]), **scales
        )
        return np.linalg.norm(out[0, 0] - want) / np.linalg.norm(want)

    scales = [np.abs(x).max() / 448 for x in (key, value)]
    small = [(x / s).astype(FP8) for x, s in zip((key, value), scales, strict=True)]
    assert attend(key.astype(np.float32), value.astype(np.float32)) < 1e-5
    assert 0.01 < attend(*small, key_scale=scales[0], value_scale=scales[1]) < 0.1


def test_written_rows_are_read():
    """Prompts and a new token, in pages that each have a scale."""
    rng = np.random.default_rng()
    new = rng.standard_normal((2, 9, 2, 4)).astype(np.float32)
    table = np.array([[3, 0, 5], [1, 4, 2]])
    scale = np.exp(rng.uniform(-5, 0, (6, 2))).astype(np.float32)
    rows, places = np.mgrid[:2, :9]
    pages = kv_cache.write(
        jnp.zeros((6, 3, 2, 4), FP8), new, rows, places, block_table=table, scale=scale
    )
    read = pages[table].astype(jnp.float32) * scale[table][:, :, None, :, None]
    largest = 448 * scale[table][:, :, None, :, None]
    want = np.clip(new.reshape(2, 3, 3, 2, 4), -largest, largest)
    # Half an ulp, which is 1/16 of the value, or half a subnormal step.
    bound = np.maximum(np.abs(want) / 16, largest / 448 * 2.0**-10) * (1 + 1e-6)
    assert (np.abs(read - want) <= bound).all()


def test_written_numbers_are_rounded_as_bytes_are():
    """To the nearest, beyond 448 to 448, NaN to NaN; scales of heads and of one sequence."""
    new = np.array([0.0, -0.0, 1.06, 447, 465, 1e30, -np.inf, np.nan], np.float32)
    write = jax.jit(functools.partial(kv_cache.write, sequence_ids=[[1]], positions=[[0]]))
    cache = jnp.full((2, 1, 1, 8), 2, FP8)
    want = np.clip(new, -448, 448).astype(FP8).astype(np.float32)
    got = write(cache, new[None, None, None]).astype(jnp.float32)
    np.testing.assert_array_equal(got[0], 2)
    np.testing.assert_array_equal(got[1, 0, 0], want)
    np.testing.assert_array_equal(np.signbit(got[1, 0, 0, :2]), [False, True])
    for scale in (0.5, np.float32([0.5]), np.float32([[np.nan], [0.5]])):
        got = write(cache, new[None, None, None] / 2, scale=scale)
        np.testing.assert_array_equal(got[1, 0, 0].astype(jnp.float32), want)


REFUSED = [
    ({"key_scale": np.ones(3, np.float32)}, ValueError,
     r"key_scale must have shape \(\), \(2,\), one for each head of the cache, or \(3, 2\), one "
     r"for each sequence and head, but has \(3,\)"),
    ({"value_scale": np.ones((2, 2), np.float32), "block_table": np.zeros((3, 1), int)}, ValueError,
     r"value_scale must have .* one for each page and head, but has \(2, 2\)"),
    ({"key_scale": np.ones(2, int)}, ValueError, "key_scale must be .* of floats, but is int"),
    ({"key_scale": "1"}, ValueError, "key_scale must be an array, but is "),
    ({"key": jnp.ones((3, 8, 2, 8))}, ValueError,
     "one dtype, or key and value float8_e4m3fn, but have float32, float32 and float8_e4m3fn"),
    ({"value": jnp.ones((3, 8, 2, 8), jnp.float8_e5m2)}, ValueError,
     "value must be one of .*float64, float8_e4m3fn, but is float8_e5m2"),
    ({"query": jnp.ones((3, 1, 2, 8), FP8)}, ValueError,
     "query must be one of bfloat16, float16, float32, float64, but is float8_e4m3fn"),
    ({"key": jnp.ones((3, 8, 2, 8)), "value": jnp.ones((3, 8, 2, 8)), "value_scale": 2.0},
     ValueError, "value_scale is for caches in float8_e4m3fn, but key is float32: omit it"),
]  # fmt: skip


@pytest.mark.parametrize("change,error,message", REFUSED)
def test_refusals(change, error, message):
    cache = jnp.ones((3, 8, 2, 8), FP8)
    call = {"query": jnp.ones((3, 1, 2, 8)), "key": cache, "value": cache}
    with pytest.raises(error, match=message):
        packax.decode_attention(**call | {"kv_lengths": np.array([1, 2, 3])} | change)


def test_refusals_of_write():
    at = {"sequence_ids": [[0]], "positions": [[0]]}
    new, cache = jnp.ones((1, 1, 2, 8)), jnp.zeros((3, 4, 2, 8))
    with pytest.raises(ValueError, match="scale is for caches in float8_e4m3fn, but cache is floa"):
        kv_cache.write(cache, new, scale=1.0, **at)
    with pytest.raises(ValueError, match=r"scale must have shape .*\(3, 2\), one for each seq"):
        kv_cache.write(cache.astype(FP8), new, scale=np.ones((2, 2), np.float32), **at)
