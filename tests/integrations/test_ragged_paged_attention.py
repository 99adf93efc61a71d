"""JAX's ragged_paged_attention on packax gives the results of JAX's reference."""

from __future__ import annotations

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from packax.integrations.ragged_paged_attention import ragged_paged_attention

theirs = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
LENS, CU = np.array([9, 14, 5, 0], np.int32), np.array([0, 1, 9, 11, 11], np.int32)


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((16, 4, 8)), dtype)
    pages = jnp.asarray(rng.standard_normal((20, 4, 4, 8)), dtype)
    table = rng.permutation(20)[:16].reshape(4, 4).astype(np.int32)
    return q, pages, jnp.asarray(LENS), jnp.asarray(table), jnp.asarray(CU), jnp.array([3])


@pytest.mark.parametrize(
    "options",
    [
        {"sm_scale": 0.3},
        {"sliding_window": 3, "soft_cap": 1.5, "k_scale": 0.5, "v_scale": 3.0},
        {"sliding_window": 1, "mask_value": -1e9, "num_kv_pages_per_block": 2},
    ],
)
def test_equals_jax(options):
    ours = {n: x for n, x in options.items() if n != "num_kv_pages_per_block"}
    want = theirs.ref_ragged_paged_attention(*inputs(), **ours)
    out = ragged_paged_attention(*inputs(), **options)
    np.testing.assert_allclose(out[:11], want, atol=2e-6)
    assert not out[11:].any()


def test_float8_pages():
    q, pages, *others = inputs()
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    attend = functools.partial(ragged_paged_attention, sm_scale=0.4, **scales)
    small = pages.astype(jnp.float8_e4m3fn)
    want = theirs.ref_ragged_paged_attention(q, small, *others, sm_scale=0.4, **scales)
    np.testing.assert_allclose(attend(q, small, *others)[:11], want, atol=2e-6)


def test_arguments():
    """Every argument of JAX's, with its default; earlier ones have fewer."""
    ours, jax_ = (
        dict(inspect.signature(f).parameters)
        for f in (ragged_paged_attention, theirs.ragged_paged_attention)
    )
    assert [name for name in ours if name in jax_] == [*jax_]
    different = {name for name, x in jax_.items() if ours[name].default != x.default}
    assert different <= {"mask_value"}


@pytest.mark.parametrize(
    "n,wrong,message",
    [
        (1, jnp.ones((20, 4, 3, 8)), r"2 \* kv_heads, dim\), but have \(16, 4, 8\) and"),
        (0, jnp.ones((1, 16, 4, 8)), r"\(tokens, heads, dim\) and .* have \(1, 16, 4, 8\)"),
    ],
)
def test_errors(n, wrong, message):
    call = list(inputs())
    call[n] = wrong
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*call)
    with pytest.raises(ValueError, match="sliding_window must be at least 1 or None, but is 0"):
        ragged_paged_attention(*inputs(), sliding_window=0)
