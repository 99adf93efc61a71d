"""Calls that tests/table does not have, with derivatives, on meshes of Explicit axes, which shard
batch and heads.

Guards against operations for which jax has no sharding rule, or whose operands' types disagree.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packax.integrations import flax
from packax.integrations.levanter import grug
from plain_jit import mesh_of
from tiers import some

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 24, 4, 2, 8
MESHES = {"one device": (1, 1), "batch": (2, 1), "heads": (1, 2)}


def operands():
    """The arrays of a call, each with the mesh axes of its dimensions."""
    rng = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tensors = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    dense = rng.random((BATCH, HEADS, LENGTH, LENGTH)) < 0.5
    dense[:, :, 3] = False  # a row without keys
    arrays = {
        "ids": (np.sort(rng.integers(-1, 3, (BATCH, LENGTH)), axis=1).astype(np.int32), ("data",)),
        "bias": (rng.standard_normal((BATCH, HEADS, LENGTH, LENGTH)), ("data", "tensor")),
        "dense": (dense, ("data", "tensor")),
        "one for heads": (dense[:, :1], ("data",)),
        "lengths": (np.array([9, LENGTH], np.int32), ("data",)),
    }
    arrays["bias"] = (arrays["bias"][0].astype(np.float32), arrays["bias"][1])
    return tensors, arrays


def attend(expression):
    def call(query, key, value, x):
        return packax.flash_attention(query, key, value, expression(x))

    return call


def documents(x):
    return packax.causal() & packax.documents(x["ids"])


def merged(query, key, value, x):
    index = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    halves = [packax.masks.ranges(*ends) for ends in ((0 * index, index // 2), (index // 2, index))]
    parts = [packax.flash_attention(query, key, value, m, return_lse=True) for m in halves]
    return packax.merge_attention(parts)


CALLS = {
    "merge": merged,
    "vmap": lambda q, k, v, x: jax.vmap(lambda y: attend(documents)(y, k, v, x))(
        jnp.stack([q, 2 * q])
    ),
    "jax.nn": lambda q, k, v, x: packax.dot_product_attention(q, k, v, mask=x["dense"]),
    "jax.nn's residual": lambda q, k, v, x: packax.dot_product_attention(
        q, k, v, mask=x["one for heads"], return_residual=True
    ),
    "jax.nn's lengths": lambda q, k, v, x: packax.dot_product_attention(
        q, k, v, query_seq_lengths=x["lengths"], key_value_seq_lengths=x["lengths"]
    ),
    "Flax": lambda q, k, v, x: flax.attention_fn()(q, q, q, mask=x["dense"]),
    "Flax's bias": lambda q, k, v, x: flax.attention_fn()(q, q, q, mask=x["dense"], bias=x["bias"]),
    "Grug": lambda q, k, v, x: grug.attention(q, k, v, x["one for heads"][:, 0]),
}


def derivatives(call):
    """The results of the call, a jvp, a gradient and its derivative along a direction."""

    def every(query, key, value, x):
        def of_tensors(*tensors):
            return jax.tree.leaves(call(*tensors, x))[0]

        def loss(*tensors):
            return jnp.sum(jnp.sin(of_tensors(*tensors)))

        at = query, key, value
        gradient = jax.grad(loss, (0, 1, 2))
        return (
            call(*at, x),
            jax.jvp(of_tensors, at, at)[1],
            jax.jvp(gradient, at, at),
            jax.grad(lambda y: jnp.sum(jax.grad(loss)(y, key, value) ** 2))(query),
        )

    return every


@functools.cache
def expected(name):
    tensors, arrays = operands()
    x = {of: array for of, (array, _) in arrays.items()}
    return jax.tree.leaves(jax.jit(derivatives(CALLS[name]))(*tensors, x))


@pytest.mark.parametrize(("name", "on"), some(itertools.product(CALLS, MESHES), 2, 19, 21))
def test_every_call_and_its_derivatives(name, on):
    mesh = mesh_of("Explicit", MESHES[on])
    tensors, arrays = operands()

    def placed(x, dims):
        return jax.device_put(x, NamedSharding(mesh, P(*dims)))

    with jax.set_mesh(mesh):
        sharded = [placed(x, ("data", None, "tensor")) for x in tensors]
        x = {of: placed(*array) for of, array in arrays.items()}
        found = jax.jit(derivatives(CALLS[name]))(*sharded, x)
    for y, want in zip(jax.tree.leaves(found), expected(name), strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-4)
