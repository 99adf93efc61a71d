"""Under plain `jit`, key and value projections sharded over more devices than there are heads.

XLA then shards the heads over part of a mesh axis, which no PartitionSpec expresses. Guards against
the error that JAX raises when it decodes such a sharding.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_jit import mesh_of, partitioner
from tiers import some

BATCH, LENGTH, HEADS, KV_HEADS, DIM, WIDTH = 4, 64, 8, 2, 8, 16
CALLS = {
    "flash": lambda q, k, v: packax.flash_attention(q, k, v, packax.causal()),
    "drop-in": lambda q, k, v: packax.dot_product_attention(q, k, v, is_causal=True),
    "decode": lambda q, k, v: packax.decode_attention(q[:, -1:], k, v, jnp.full(BATCH, LENGTH)),
}


def model(call, x, *weights):
    """Query heads over "tensor"; key and value heads as XLA chooses, or replicated by Explicit
    types."""
    explicit = AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
    tensors = []
    for w in weights:
        y = x @ w
        heads = "tensor" if w.shape[1] == HEADS * DIM else None
        if explicit:
            y = jax.sharding.reshard(y, P("data", None, heads))
        tensors.append(y.reshape(BATCH, LENGTH, -1, DIM))
    return CALLS[call](*tensors)


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, WIDTH), *((WIDTH, n * DIM) for n in (HEADS, KV_HEADS, KV_HEADS))]
    x, *weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    return [x, *(w / WIDTH**0.5 for w in weights)]


@pytest.mark.parametrize(
    ("call", "devices", "kind", "name"),
    some(itertools.product(CALLS, [4, 8], ["Auto", "Explicit"], ["shardy", "gspmd"]), 0, 16),
)
def test_results_and_gradients(call, devices, kind, name):
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this jax has one partitioner")
    mesh = mesh_of(kind, (8 // devices, devices))

    def loss(*args):
        out = model(call, *args)
        return jnp.sum(jnp.sin(out)), out

    step = loss if call == "decode" else jax.value_and_grad(loss, range(4), has_aux=True)
    x, *weights = arrays()
    want = jax.jit(step)(x, *weights)
    with partitioner(name), jax.set_mesh(mesh):
        args = [jax.device_put(w, NamedSharding(mesh, P(None, "tensor"))) for w in weights]
        got = jax.jit(step)(jax.device_put(x, NamedSharding(mesh, P("data"))), *args)
    for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(y), np.asarray(z), rtol=1e-4, atol=1e-4)
