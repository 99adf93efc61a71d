"""Maps of blocks in the general kernels on a GPU. `pytest -m gpu`."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from test_scores import check, sinks_of, slopes_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "name,dtype,dims,options",
    [
        *((case.name, "bfloat16", (64, 64), {}) for case in cases.SPARSE),
        *((case.name, "float16", (128, 128), {"soft_cap": 3.0}) for case in cases.SPARSE),
        ("moba", "bfloat16", (192, 128), {"slopes": True, "sinks": True}),
        ("sparse_tiles", "bfloat16", (256, 256), {}),
        ("sparse_threes", "bfloat16", (96, 40), {"slopes": True}),
        ("sparse_threes", "bfloat16", (256, 256), {"soft_cap": 3.0}),
        ("indexer", "float32", (64, 64), {}),
    ],
)
def test_cases(name, dtype, dims, options):
    case = cases.BY_NAME[name]
    options = dict(options)
    for option, made in (("sinks", sinks_of), ("slopes", slopes_of)):
        if options.pop(option, False):
            options[option] = made(case.heads)
    with jax.default_matmul_precision("highest"):
        check(case, dtype, dims, **options)


@pytest.mark.parametrize("size,share", [((128, 128), 0.4), ((1, 512), 0.3), ((64, 16), 0.1)])
def test_long_sequences_equal_xla_and_every_time(size, share):
    """Long lists, full blocks and others, NaNs in rows that attend nothing; the same bits in each run."""
    length, heads = 4096, 8
    chosen, _ = cases.random_map(1, size, share, (2, heads), (length, length))
    chosen[0, 3, : len(chosen[0, 0]) // 2] = False  # rows that attend nothing
    expression = packax.causal() & packax.block_sparse(chosen, size)
    mask = packax.create_attention_mask(expression, q_len=length, kv_len=length)
    rng = np.random.default_rng(0)
    query, key, value, dout = (
        jnp.asarray(rng.standard_normal((2, length, n, 64)), jnp.bfloat16)
        for n in (heads, 2, 2, heads)
    )

    @jax.jit
    def step(query, key, value, dout, dlse):
        def of(implementation):
            def attention(*tensors):
                return packax.flash_attention(
                    *tensors, mask, return_lse=True, implementation=implementation
                )

            results, pullback = jax.vjp(attention, query, key, value)
            return *results, *pullback((dout, dlse))

        return of("cubin"), of("xla")

    dlse = jnp.asarray(rng.standard_normal((2, heads, length)), jnp.float32)
    _, (_, lse, *_) = step(query, key, value, dout, dlse)
    idle = (np.asarray(lse) == -np.inf).swapaxes(1, 2)
    assert idle.any()
    query, dout = (jnp.where(idle[..., None], jnp.nan, x) for x in (query, dout))
    got, wanted = step(query, key, value, dout, dlse)
    again, _ = step(query, key, value, dout, dlse)
    for name, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, again, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(z, np.float32), name)
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_array_equal(x == -np.inf, y == -np.inf, name)
        some = y > -np.inf
        size_of = np.abs(y[some]).max()
        np.testing.assert_allclose(x[some], y[some], atol=2.0**-6 * size_of, err_msg=name)
