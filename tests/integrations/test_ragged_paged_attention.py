"""JAX's ragged_paged_attention on packax gives the results of JAX's reference."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packax.integrations.ragged_paged_attention import ragged_paged_attention

theirs = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
LENS, CU = np.array([9, 14, 5, 0], np.int32), np.array([0, 1, 9, 11, 11], np.int32)


def inputs():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((16, 4, 8)), jnp.float32)
    pages = jnp.asarray(rng.standard_normal((20, 4, 4, 8)), jnp.float32)
    table = rng.permutation(20)[:16].reshape(4, 4).astype(np.int32)
    return q, pages, jnp.asarray(LENS), jnp.asarray(table), jnp.asarray(CU), jnp.array([3])


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 3, "soft_cap": 1.5, "k_scale": 0.5, "v_scale": 3.0},
        {"sliding_window": 1, "mask_value": -1e9, "num_kv_pages_per_block": 2},
        {"k_scale": 0.5, "v_scale": 2.0, "sm_scale": 0.4},
    ],
)
def test_equals_jax(options):
    q, pages, *others = inputs()
    if "sm_scale" in options:
        pages = pages.astype(jnp.float8_e4m3fn)
    known = {n: x for n, x in options.items() if n != "num_kv_pages_per_block"}
    want = theirs.ref_ragged_paged_attention(q, pages, *others, **known)
    out = jax.jit(lambda *x: ragged_paged_attention(*x, **options))(q, pages, *others)
    np.testing.assert_allclose(out[:11], want, atol=2e-6)
    assert not out[11:].any()


def test_arguments():
    """Every argument of JAX's, with its default; earlier ones have fewer."""
    ours, jax_ = (
        dict(inspect.signature(f).parameters)
        for f in (ragged_paged_attention, theirs.ragged_paged_attention)
    )
    assert [name for name in ours if name in jax_] == [*jax_]
    different = {name for name, x in jax_.items() if ours[name].default != x.default}
    assert different <= {"mask_value"}
