"""Head dims between those of the plain kernels, which are clipped, padded or have kernels of their
size: `pytest -m gpu`.

Guards against a scale from the padded head dim, padding in results, and columns of another head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_kinds import THREE_ROWS, causal_documents
from gpu_runs import assert_close, build, packed, passes, run, tensors
from lowered import calls
from packax._src.ops import ffi

pytest_plugins = ("gpu_fixtures",)
pytestmark = pytest.mark.gpu

DIMS = ((8, 8), (24, 40), (72, 72), (80, 80), (96, 96), (40, 120), (136, 128), (160, 160))
DIMS += ((192, 192), (248, 16), (264, 64), (320, 320), (512, 512))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("deterministic", (False, True))
def test_documents(dims, dtype, deterministic):
    x = tensors(3, 500, 500, 8, 2, dims, dtype)
    expression = causal_documents(THREE_ROWS)
    got = run(x, expression, deterministic=deterministic)
    assert_close(x, got, expression.as_array(500, 500))


@pytest.mark.parametrize("dims", ((24, 24), (96, 96), (160, 160), (320, 320), (512, 512)), ids=str)
def test_a_scale_other_than_the_default(dims):
    x = tensors(2, 129, 300, 6, 3, dims, "bfloat16")
    mask = packax.sliding_window(40)
    assert_close(x, run(x, mask, 0.3), mask.as_array(129, 300), 0.3)


@pytest.mark.parametrize("dims", ((24, 24), (96, 96), (136, 128), (160, 160)), ids=str)
@pytest.mark.parametrize("option", ("soft cap", "alibi", "sinks", "block mask"))
def test_options_equal_xla(dims, option):
    """To bfloat16 rounding: the kernels and XLA round in different places."""
    x = tensors(3, 500, 500, 8, 2, dims, "bfloat16")
    expression, options = causal_documents(THREE_ROWS), {}
    if option == "soft cap":
        options = {"soft_cap": 20.0}
    elif option == "alibi":
        options = {"bias": packax.alibi(jnp.linspace(0.01, 0.5, 8))}
    elif option == "sinks":
        options = {"sinks": jnp.linspace(-1.0, 1.0, 8)}
    else:
        expression = (
            packax.masks.block_sparse(np.tri(8, dtype=bool)[None, None], 64) & packax.causal()
        )
    mask = build(expression, x)

    def both(x, implementation):
        def attention(*y):
            return packax.flash_attention(*y, mask, **options, implementation=implementation)

        out, pullback = jax.vjp(attention, x.query, x.key, x.value)
        return out, *pullback(x.dout)

    both = jax.jit(both, static_argnums=1)
    wide = jax.tree.map(lambda y: y.astype(jnp.float32), x)
    found, expected, plain = both(x, "cuda"), both(wide, "xla"), both(x, "xla")
    for got, true, same in zip(found, expected, plain, strict=True):
        error, allowed = (float(jnp.linalg.norm(y.astype(jnp.float32) - true)) for y in (got, same))
        assert error <= 2 * allowed


WIDE_MASKS = {
    "causal": (packax.causal(), 1000, 1000),
    "documents": (causal_documents(THREE_ROWS), 500, 500),
    "ids that come back": (packax.documents(np.arange(700, dtype=np.int32) // 90 % 3), 700, 700),
    "window": (packax.sliding_window(200, 0), 900, 900),
    "longer keys": (packax.full(), 70, 933),
    "longer queries": (packax.causal(), 933, 70),
    "one row": (packax.full(), 1, 130),
}


@pytest.mark.parametrize("name", WIDE_MASKS)
@pytest.mark.parametrize("heads", ((4, 4), (4, 2), (8, 1)), ids=str)
def test_head_dim_512(name, heads):
    """Two runs give the same bits: these kernels do not accumulate in memory, and a barrier that
    releases too early would show."""
    expression, q_len, kv_len = WIDE_MASKS[name]
    x = tensors(3, q_len, kv_len, *heads, 512, "bfloat16")
    got, again = run(x, expression), run(x, expression)
    assert_close(x, got, expression.as_array(q_len, kv_len))
    for first, second in zip(got, again, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


@pytest.mark.parametrize("which", (0, 1, 2))
def test_one_gradient_of_head_dim_512(which):
    """It has the same bits as in a call for all three."""
    x = tensors(1, 500, 500, 4, 2, 512, "bfloat16")
    mask = build(packax.causal(), x)

    def loss(*y):
        return jnp.sum(packax.flash_attention(*y, mask).astype(jnp.float32))

    every = jax.jit(jax.grad(loss, (0, 1, 2)))(*x[:3])
    alone = jax.jit(jax.grad(loss, which))(*x[:3])
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(every[which]))


def test_long_rows_of_head_dim_512():
    """Hundreds of steps per program and more programs than run at once: five runs give the same
    bits, and dV has the right sum."""
    x = tensors(1, 8192, 8192, 8, 2, 512, "bfloat16")
    mask = build(causal_documents(packed(5000, 3192)[None]), x)
    first = run(x, mask)
    for _ in range(4):
        for one, other in zip(first, run(x, mask), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    # The rows of P sum to 1, so dV summed over all keys is the sum of dout.
    of_heads = x.dout.astype(jnp.float32).reshape(1, 8192, 2, 4, 512).sum((1, 3))
    np.testing.assert_allclose(
        np.asarray(first.dv.astype(jnp.float32).sum(1)), np.asarray(of_heads), atol=3.0
    )


def test_no_gpu_runs_the_fallback_kernels():
    x = tensors(1, 256, 256, 4, 4, 96, jnp.bfloat16)
    mask = build(packax.causal(), x)
    lowered = passes.lower(x, mask, None, "cuda")
    dims = {operands[0].split("x")[3] for _, _, operands, _ in calls(lowered.as_text())}
    call = {"dtype": "bf16", "q_len": 256, "kv_len": 256, "heads": 4, "qk_dim": 96, "v_dim": 96}
    native = ffi.judge("forward", call)["native"]
    assert dims == ({"96"} if native else {"128"})


@pytest.mark.parametrize("dim", (8, 72, 104))
def test_columns_of_another_head_are_neither_read_nor_written(dim):
    """NaN in one head, and columns that the kernels have but the call does not."""
    x = tensors(2, 200, 300, 6, 3, dim, "bfloat16")
    mask = packax.causal(100)
    want = run(x, mask)
    broken = x._replace(
        query=x.query.at[:, :, 2].set(jnp.nan), key=x.key.at[:, :, 1].set(jnp.nan),
        value=x.value.at[:, :, 1].set(jnp.inf), dout=x.dout.at[:, :, 2:4].set(jnp.nan),
    )  # fmt: skip
    got = run(broken, mask)
    for name, group in (("out", 2), ("dq", 2), ("dk", 1), ("dv", 1)):
        a, b = (np.asarray(getattr(r, name).astype(jnp.float32)) for r in (got, want))
        kept = [h for h in range(a.shape[2]) if h // group != 1]
        np.testing.assert_allclose(a[:, :, kept], b[:, :, kept], rtol=2e-2, atol=2e-2)
        assert np.isnan(a[:, :, group : 2 * group]).any()
