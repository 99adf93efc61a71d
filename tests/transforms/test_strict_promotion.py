"""With jax told to promote neither dtypes nor ranks by itself, every call does what it does
without."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from tiers import once_each

pytest.importorskip("flax.nnx")  # of the `test` extra
from packax.integrations import flash_attention_jax, maxtext
from packax.integrations import flax as for_flax

STRICT = {
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
}
RNG = np.random.default_rng(4)
Q, K, V = (jnp.asarray(RNG.normal(size=(2, 24, h, 8)), jnp.float32) for h in (4, 2, 2))
IDS = np.stack([np.repeat([0, 1, -1], [9, 10, 5]), np.repeat([3, 0], [4, 20])])
KEYS = jnp.asarray(RNG.random((2, 24)) < 0.7)
LONG = jnp.asarray(np.repeat([[0, 1]], [300, 212], axis=1))


def attention():
    def loss(q, k, v):
        mask = packax.causal() & packax.documents(jnp.asarray(IDS))
        out = packax.flash_attention(q, k, v, mask, soft_cap=9.0, bias=packax.alibi(jnp.ones(4)))
        return jnp.sum(jnp.sin(out))

    return jax.grad(loss, (0, 1, 2))(Q, K, V)


def decoding():
    return packax.decode_attention(Q[:, :2], K, V, jnp.array([24, 7]), window=(5, 0))


def maxtexts_op():
    images = np.zeros((2, 24), bool)
    images[:, 3:8] = True
    op = maxtext.AttentionOp(attention_type="global")
    return op(Q, K, V, jnp.asarray(IDS) + 1, "train", bidirectional_mask=jnp.asarray(images))


def attention_by(kind, **shared):
    """By a plan of the device, over two ranks."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("context",), axis_types=auto, devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec(None, "context")
    sharding = packax.AttentionSharding(query=spec, key_value=spec, mesh=mesh)
    query, key = jnp.ones((1, 512, 2, 8)), jnp.ones((1, 512, 1, 8))

    def loss(query, key):
        expression = packax.causal() & packax.documents(LONG)
        plan = packax.context_plan(expression, sharding=sharding, kind=kind, **shared)
        mask = packax.create_attention_mask(expression, sharding=sharding, plan=plan)
        out = packax.flash_attention(query, key, key, mask, sinks=jnp.ones(2))
        return jnp.sum(jnp.sin(out))

    return jax.jit(jax.grad(loss, (0, 1)))(query, key)


CALLS = {
    "attention": attention,
    "decoding": decoding,
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
    "a plan's index": lambda: packax.context_plan(packax.documents(LONG), ranks=2).index(),
}


@pytest.mark.parametrize("call,strict", once_each(CALLS, STRICT))
def test_same_as_without(call, strict):
    want = jax.tree.leaves(CALLS[call]())
    with contextlib.ExitStack() as stack:
        stack.enter_context(STRICT[strict]())
        got = jax.tree.leaves(CALLS[call]())
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
