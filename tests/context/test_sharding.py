"""On a mesh of eight CPU devices: the same values and gradients as on one.

Guards against the silent failure of sharded attention: the forward pass is right, and the gradient
of a replicated operand misses the sum over the devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packax._src.core.sharding import vary_together
from tiers import some

BATCH, LENGTH, HEADS, DIM = 8, 150, 4, 8
RNG = np.random.default_rng(0)
QUERY = jnp.asarray(RNG.standard_normal((BATCH, LENGTH, HEADS, DIM)), jnp.float32)
KEY, VALUE = jnp.asarray(RNG.standard_normal((2, BATCH, LENGTH, 1, DIM)), jnp.float32)
WEIGHTS = jnp.asarray(RNG.standard_normal(QUERY.shape), jnp.float32)
IDS = np.sort(RNG.integers(-1, 5, (BATCH, LENGTH)), axis=1).astype(np.int32)


def mesh_of(kind, shape=(4, 2)):
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight CPU devices: see conftest.py")
    return jax.make_mesh(
        shape, ("data", "model"), devices=devices, axis_types=(getattr(AxisType, kind),) * 2
    )


def build(ids):
    return packax.create_attention_mask(packax.causal() & packax.documents(ids))


def attention(query, key, value, mask):
    out, lse = packax.flash_attention(query, key, value, mask, return_lse=True)
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


HEADS_SPLIT = P("data", None, "model")


def test_gradient_inside_shard_map():
    """The gradient is taken per device and summed by the caller: a data-parallel training step."""

    def step(query, key, value, mask, weights):
        def loss(scale):
            out, _ = attention(query * scale, key, value, mask)
            return jnp.sum(out * weights)

        # Marked as varying, so that each device has only its local gradient.
        (one, *_) = vary_together(jnp.float32(1), query)
        return jax.lax.psum(jax.grad(loss)(one), ("data", "model"))

    mapped = jax.shard_map(
        step,
        mesh=mesh_of("Auto"),
        in_specs=(HEADS_SPLIT, P("data"), P("data"), P("data"), HEADS_SPLIT),
        out_specs=P(),
    )
    got = jax.jit(mapped)(QUERY, KEY, VALUE, build(IDS), WEIGHTS)
    true = jax.grad(
        lambda scale: jnp.sum(attention(QUERY * scale, KEY, VALUE, build(IDS))[0] * WEIGHTS)
    )(1.0)
    np.testing.assert_allclose(got, true, rtol=1e-4)


def test_eager_shard_map_with_replicated_weights():
    """Without jit, and with a weight replicated everywhere, whose gradient is a sum over all
    devices."""
    weight = jnp.asarray(RNG.standard_normal((DIM, DIM)), jnp.float32)

    def local(weight, query, key, value, mask):
        return packax.flash_attention(query @ weight, key, value, mask)

    mapped = jax.shard_map(
        local,
        mesh=mesh_of("Auto"),
        in_specs=(P(), HEADS_SPLIT, P("data"), P("data"), P("data")),
        out_specs=HEADS_SPLIT,
    )
    args = QUERY, KEY, VALUE, build(IDS)
    got = jax.grad(lambda w: jnp.sum(mapped(w, *args) * WEIGHTS))(weight)
    true = jax.grad(lambda w: jnp.sum(local(w, *args) * WEIGHTS))(weight)
    np.testing.assert_allclose(got, true, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shared", some([False, True], 0), ids=["masks of rows", "one mask"])
def test_vmap_with_a_batch_that_is_sharded_in_its_type(shared):
    """The mapped axis is placed after the batch axis: the types allow merging only in that
    order."""
    mesh = mesh_of("Explicit")
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))  # noqa: E731

    def loss(factor, query, key, value, ids):
        mask = packax.causal() if shared else packax.causal() & packax.documents(ids)
        out = packax.flash_attention(query * factor, key, value, mask)
        return jnp.sum(out * WEIGHTS)

    def sums(factor, query, key, value):
        return packax.flash_attention(query * factor, key, value, packax.causal()).sum((0, 1, 3))

    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with x64(True), jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh):
        tensors = tuple(x.astype(jnp.float64) for x in (QUERY, KEY, VALUE))
        args = *tensors, jnp.asarray(IDS)
        both = jax.jit(jax.value_and_grad(loss))
        want = [both(float(f), *args) for f in (1, 2, 3)]
        placed = tuple(map(put, args))
        got = jax.jit(jax.vmap(both, (0, *[None] * 4)))(jnp.arange(1.0, 4), *placed)
        np.testing.assert_allclose(got, np.transpose(want), rtol=1e-10)
        jacobian = jax.jit(jax.jacrev(sums))
        np.testing.assert_allclose(jacobian(1.0, *placed[:3]), jacobian(1.0, *tensors), rtol=1e-10)


def test_an_explicit_mesh_that_is_not_set():
    """With `AttentionSharding(mesh=)` alone. jax.make_mesh makes axes of Explicit type by
    default."""
    mesh = mesh_of("Explicit")
    spec = P("data", "model")
    sharding = packax.AttentionSharding(query=spec, key_value=spec, mesh=mesh)
    operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (QUERY, KEY, VALUE)]
    weights = jax.device_put(WEIGHTS, NamedSharding(mesh, spec))

    def loss(query, key, value):
        expression = packax.causal() & packax.documents(jnp.asarray(IDS))
        mask = packax.create_attention_mask(expression, sharding=sharding)
        return jnp.sum(packax.flash_attention(query, key, value, mask) * weights)

    def on_one(query, key, value):
        return jnp.sum(packax.flash_attention(query, key, value, build(IDS)) * WEIGHTS)

    got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands)
    want = jax.jit(jax.value_and_grad(on_one, (0, 1, 2)))(QUERY, KEY, VALUE)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4)
