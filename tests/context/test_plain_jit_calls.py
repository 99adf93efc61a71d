"""Calls other than flash_attention under plain `jit` with sharded inputs: drop-ins, decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from plain_jit import (
    BATCH,
    DIM,
    HEADS,
    LENGTH,
    MOVES,
    assert_equal,
    both,
    collectives,
    mesh_of,
    put,
    shard,
    tensors,
)
from tiers import some


def test_flax_layers():
    """Weights sharded over tensor, batch over data, as in a Flax module."""
    linen = pytest.importorskip("flax.linen")
    from packax.integrations.flax import dot_product_attention

    layer = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, qkv_features=64, attention_fn=dot_product_attention
    )
    x = jnp.asarray(np.random.default_rng(7).standard_normal((BATCH, 64, 32)), jnp.float32)
    weights = layer.init(jax.random.key(0), x, mask=packax.causal())
    mesh = mesh_of()

    def placed(path, leaf):
        last = "out" in jax.tree_util.keystr(path)
        heads = 0 if last else leaf.ndim - 2
        spec = [None] * leaf.ndim
        if not (last and leaf.ndim == 1):  # the bias of the last layer has no heads
            spec[heads] = "tensor"
        return put(mesh, leaf, *spec)

    def loss(weights, x):
        return jnp.sum(layer.apply(weights, x, mask=packax.causal()) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    args = jax.tree_util.tree_map_with_path(placed, weights), put(mesh, x, "data")
    compiled = step.lower(*args).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    for got, want in zip(
        jax.tree.leaves(compiled(*args)), jax.tree.leaves(step(weights, x)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", some(["global", "local_sliding"], 1))
def test_maxtexts_op(kind):
    """With segment ids and sinks; forward and gradients."""
    pytest.importorskip("flax.nnx")
    from packax.integrations.maxtext import AttentionOp

    mesh = mesh_of()
    window = {"sliding_window_size": 40} if kind == "local_sliding" else {}
    op = AttentionOp(config=None, attention_type=kind, **window)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0])

    def attention(query, key, value, ids):
        return op(query, key, value, ids, positions, "train", sinks=sinks)

    step = jax.jit(both(attention))
    args = tensors()
    compiled = step.lower(*shard(mesh, *args)).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    gradients, out = got = compiled(*shard(mesh, *args))
    for x in (*gradients, out):
        assert x.sharding.spec[0] == "data" and x.sharding.spec[2] == "tensor", x.sharding
    assert_equal(got, step(*args))


def test_calls_of_flash_attention_jax():
    """Its arrays are (batch, heads, length, dim)."""
    from packax.integrations.flash_attention_jax import causal_flash_attention

    mesh = mesh_of()
    args = [jnp.swapaxes(x, 1, 2) for x in tensors(HEADS)[:3]]
    sharded = [put(mesh, x, "data", "tensor") for x in args]
    function = jax.jit(causal_flash_attention)
    compiled = function.lower(*sharded).compile()
    assert not collectives(compiled), collectives(compiled)
    assert_equal(compiled(*sharded), function(*args))


def test_pages_of_values_that_are_sharded_differently_are_gathered_with_a_warning():
    mesh = mesh_of()
    pages = jnp.ones((8, 16, 2, DIM))
    key, value = put(mesh, pages, "data"), put(mesh, pages, "tensor")
    query, table = jnp.ones((2, 1, HEADS, DIM)), jnp.asarray([[0, 1], [2, 3]])
    message = "pages of key and value are sharded over 'tensor', but unevenly, or differently"
    with pytest.warns(UserWarning, match=message):
        out = jax.jit(packax.decode_attention)(
            query, key, value, jnp.asarray([20, 9]), block_table=table
        )
    np.testing.assert_allclose(out, 1, rtol=1e-6)
