"""flash_attention under JAX transformations, on the CPU.

Guards against what results do not show: remat that runs a kernel twice, a compilation cache that
never hits, a query that is read with scale 0.
"""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import parse
from jaxprs import count

CALL = parse("interval=causal,selector=packed,dims=16x16,lengths=409x409,batch=3")
ARRAYS = CALL.arrays()
QUERY, KEY, VALUE, DOUT = (jnp.asarray(ARRAYS[x]) for x in ("query", "key", "value", "dout"))


def build(ids):
    return packax.create_attention_mask(packax.causal() & packax.documents(ids))


@pytest.fixture(scope="module")
def mask():
    return build(ARRAYS["ids"])


def loss(query, key, value, mask):
    out, lse = packax.flash_attention(query, key, value, mask, return_lse=True)
    # The lse of padding rows is -inf, so the loss selects the finite values before the sum.
    return jnp.sum(out * DOUT[: len(out)]) + jnp.sum(jnp.where(jnp.isfinite(lse), lse * 0.5, 0))


def test_scale_zero_reads_no_query():
    """With scale 0, infinities and NaN in the query must not reach the results (0 * inf is NaN)."""
    query = QUERY.at[0, 3].set(jnp.inf).at[1, 5].set(jnp.nan)
    step = jax.jit(dataclasses.replace(CALL, scale="0").step)
    clean = step(ARRAYS)
    for name, x in step(ARRAYS | {"query": query}).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_scale_zero_in_float64(mask):
    """In float64, 1e-40 is an ordinary scale and does not count as 0."""
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with x64(True):
        tensors = [jnp.asarray(x, jnp.float64) for x in (QUERY, KEY, VALUE)]
        gradient = jax.grad(
            lambda q: packax.flash_attention(q, *tensors[1:], mask, scale=1e-40).sum()
        )
        assert 0 < np.abs(gradient(tensors[0])).max() < 1e-37


def test_remat_that_keeps_the_results_runs_the_kernel_once(mask):
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    assert packax.CHECKPOINT_NAMES == ("packax_out", "packax_lse")

    def grad(policy):
        return jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))

    assert count("packax_forward", grad(keep), QUERY, KEY, VALUE, mask) == 1
    assert count("packax_backward", grad(keep), QUERY, KEY, VALUE, mask) == 1
    # Checks the counter itself: without the saved names the forward runs again.
    nothing = jax.checkpoint_policies.nothing_saveable
    assert count("packax_forward", grad(nothing), QUERY, KEY, VALUE, mask) == 2


def test_remat_by_a_name_of_the_programs_own(mask):
    def attention(q):
        return jnp.sum(packax.flash_attention(q, KEY, VALUE, mask, checkpoint_name="mine"))

    for name, times in (("mine", 1), (packax.CHECKPOINT_NAMES, 1), ("other", 2)):
        names = (name,) if isinstance(name, str) else name
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        grad = jax.grad(jax.checkpoint(attention, policy=policy))
        assert count("packax_forward", grad, QUERY) == times, name


def test_forward_alone_runs_no_backward(mask):
    assert count("packax_backward", loss, QUERY, KEY, VALUE, mask) == 0


def test_eval_shape_touches_no_device():
    half = jax.ShapeDtypeStruct((2, 1 << 24, 16, 64), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((2, 1 << 24, 4, 64), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((2, 1 << 24, 4, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 1 << 24), jnp.int32)

    def step(query, key, value, ids):
        return packax.flash_attention(query, key, value, build(ids), return_lse=True)

    out, lse = jax.eval_shape(step, half, keys, values, ids)
    assert (out.shape, out.dtype) == ((2, 1 << 24, 16, 128), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 16, 1 << 24), jnp.float32)


PROCESS = """
import json, sys
import jax, numpy as np
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.rsplit("/", 1)[-1]))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
import packax
x = np.ones((1, 40, 2, 8), np.float32)
mask = packax.causal() & packax.documents(np.arange(40) // 9)
step = jax.jit(jax.value_and_grad(lambda q: packax.flash_attention(q, x, x, mask).sum()))
value, grad = step(x)
print(json.dumps([float(value), hits.count("cache_hits"), hits.count("cache_misses")]))
"""


@pytest.mark.exhaustive
def test_persistent_compilation_cache(tmp_path):
    """A second process compiles nothing."""

    def run():
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert first[0] == second[0]
    assert first[2] > 0 and second[1] > 0
    assert second[2] == 0


@pytest.mark.parametrize("logit", [1e2, 1e4, 1e6])
def test_large_logits_without_a_bias(logit):
    """The bound of docs/guide/numerics.md: an error of 2e-7 times the logit, in the gradient
    only."""
    query = jnp.full((1, 200, 1, 16), np.sqrt(logit / 4), jnp.float32)
    value = jnp.asarray(np.random.default_rng(0).standard_normal(query.shape), jnp.float32)
    out, transpose = jax.vjp(
        lambda value: packax.flash_attention(query, query, value, packax.full()), value
    )
    np.testing.assert_allclose(out, np.broadcast_to(value.mean(1), out.shape), atol=1e-5)
    (gradient,) = transpose(jnp.ones_like(out))
    np.testing.assert_allclose(gradient, 1, rtol=1e-5 + 2e-7 * logit)
