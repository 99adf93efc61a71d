"""Shared by the tests of attention under plain jit: meshes, sharded inputs, single-device results.

A compiled program may all-reduce gradients of replicated operands; it must contain none of `MOVES`.
"""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, LENGTH, HEADS, DIM = 4, 192, 4, 16

MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(kind="Auto", shape=(4, 2), names=("data", "tensor")):
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight CPU devices: see conftest.py")
    devices = devices[: int(np.prod(shape))]
    return jax.make_mesh(
        shape, names, devices=devices, axis_types=(getattr(AxisType, kind),) * len(names)
    )


@contextlib.contextmanager
def partitioner(name):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", name == "shardy")
    jax.clear_caches()
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
        jax.clear_caches()


def collectives(compiled):
    text = compiled.as_text()
    found = re.findall(rf"\b({'|'.join((*MOVES, 'all-reduce'))})(?:-start)?\(", text)
    return collections.Counter(found)


def tensors(kv_heads=2, seed=0):
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    query = array(BATCH, LENGTH, HEADS, DIM)
    key, value = (array(BATCH, LENGTH, kv_heads, DIM) for _ in range(2))
    ids = jnp.asarray(np.sort(rng.integers(-1, 5, (BATCH, LENGTH)), axis=1), jnp.int32)
    return query, key, value, ids


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def shard(mesh, query, key, value, ids):
    heads = "tensor" if key.shape[2] % mesh.shape["tensor"] == 0 else None
    return (
        put(mesh, query, "data", None, "tensor"),
        put(mesh, key, "data", None, heads),
        put(mesh, value, "data", None, heads),
        put(mesh, ids, "data"),
    )


def causal_documents(ids):
    return packax.causal() & packax.documents(ids)


CASES = {
    "documents": lambda q, k, v, ids: packax.flash_attention(q, k, v, causal_documents(ids)),
    "lse": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), return_lse=True
    ),
}


def weights_of(x):
    """numpy constants: the bits of a cotangent then do not depend on what XLA fuses."""
    return np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)


def both(function):
    """A function that returns the gradients of a loss over all results, and the results."""

    def loss(query, key, value, ids):
        results = function(query, key, value, ids)
        terms = [jnp.where(jnp.isfinite(x), x, 0) for x in jax.tree.leaves(results)]
        return sum(jnp.sum(x * weights_of(x)) for x in terms), results

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)


@functools.cache
def expected(name, kv_heads):
    return jax.jit(both(CASES[name]))(*tensors(kv_heads))


def assert_equal(got, want):
    """Bit for bit, including the sign of zero; NaNs compare equal."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
        if jnp.issubdtype(x.dtype, jnp.floating):
            signs = (np.signbit(z) & ~np.isnan(z) for z in (x, y))
            np.testing.assert_array_equal(*signs)
