"""With JAX's implicit promotion of dtypes or ranks turned off, calls that tests/table does not have
give the same results."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from tiers import some

pytest.importorskip("flax.nnx")  # in the `test` extra
from packax.integrations import flash_attention_jax, maxtext
from packax.integrations import flax as for_flax

STRICT = {
    "dtypes": ["dtypes"],
    "ranks": ["ranks"],
    "dtypes, with 64 bits": ["64 bits", "dtypes"],
}
MODES = {
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "64 bits": lambda: with_x64(True),
}
with_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
RNG = np.random.default_rng(4)
Q, K, V = (jnp.asarray(RNG.normal(size=(2, 24, h, 8)), jnp.float32) for h in (4, 2, 2))
IDS = np.stack([np.repeat([0, 1, -1], [9, 10, 5]), np.repeat([3, 0], [4, 20])]).astype(np.int32)
KEYS = jnp.asarray(RNG.random((2, 24)) < 0.7)
LONG = jnp.asarray(np.repeat([[0, 1, 2, 3]], [192, 192, 64, 64], axis=1), jnp.int32)


def maxtexts_op():
    images = np.zeros((2, 24), bool)
    images[:, 3:8] = True
    op = maxtext.AttentionOp(attention_type="global")
    return op(Q, K, V, jnp.asarray(IDS) + 1, "train", bidirectional_mask=jnp.asarray(images))


def attention_by(kind, window=None, **shared):
    """By a plan for two ranks; the program compares a "local" plan with the mask's ids."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("context",), axis_types=auto, devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec(None, "context")
    sharding = packax.AttentionSharding(query=spec, key_value=spec, mesh=mesh)
    query, key = (jnp.ones((1, 512, n, 8), jnp.float32) for n in (2, 1))

    def loss(query, key):
        interval = packax.causal() if window is None else packax.sliding_window(window)
        expression = interval & packax.documents(LONG)
        plan = packax.context_plan(expression, sharding=sharding, kind=kind, **shared)
        mask = packax.create_attention_mask(expression, sharding=sharding, plan=plan)
        assert (mask.plan_mismatch is None) == (kind != "local")
        assert (mask.halo is None) == (window is None)
        out = packax.flash_attention(query, key, key, mask, sinks=jnp.ones(2, jnp.float32))
        return jnp.sum(jnp.sin(out))

    return jax.jit(jax.grad(loss, (0, 1)))(query, key)


def cache_of_fp8(scales):
    cache = jnp.zeros((3, 24, 2, 8), jnp.float8_e4m3fn)
    rows, places = np.zeros((2, 24), np.int32), np.arange(48, dtype=np.int32).reshape(2, 24)
    return packax.kv_cache.write(cache, K, rows, places, scale=scales).astype(jnp.float32)


CALLS = {
    "keys of dot_product_attention": lambda: packax.dot_product_attention(
        Q, K, V, mask=KEYS[:, None, None]
    ),
    "keys of Flax": lambda: for_flax.dot_product_attention(Q, Q, Q, mask=KEYS[:, None, None]),
    "keys of flash-attention-jax": lambda: flash_attention_jax.flash_attention(
        *(x.swapaxes(1, 2) for x in (Q, Q, Q)), KEYS
    ),
    "MaxText": maxtexts_op,
    "a local plan": lambda: packax.context_plan(
        packax.documents(LONG), ranks=2, kind="local", shared=0.5
    ),
    "attention by a local plan": lambda: attention_by("local", shared=0.5),
    "attention by a balanced plan": lambda: attention_by("balanced"),
    "attention with halos": lambda: attention_by("balanced", 99, chunk=256),
    "a plan's index": lambda: packax.context_plan(packax.documents(LONG), ranks=2).index(),
    "an FP8 cache": lambda: cache_of_fp8(None),
    "an FP8 cache with scales": lambda: cache_of_fp8(jnp.full((3, 2), 0.5, jnp.float32)),
}


# Each time, every call has one of the settings.
EACH_TIME = [3 * n + n % 3 for n in range(len(CALLS))]


@pytest.mark.parametrize("call,strict", some(itertools.product(CALLS, STRICT), *EACH_TIME))
def test_same_as_without(call, strict):
    want = jax.tree.leaves(CALLS[call]())
    with contextlib.ExitStack() as stack:
        for mode in STRICT[strict]:
            stack.enter_context(MODES[mode]())
        got = jax.tree.leaves(CALLS[call]())
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
