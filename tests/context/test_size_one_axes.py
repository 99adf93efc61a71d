"""Mesh axes of size 1 have no effect, whether JAX's types name them or not.

MaxText sets jax_remove_size_one_mesh_axis_from_type, with which a value never varies over such an
axis.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import some

AXES = ("data", "fsdp", "context", "sequence", "tensor")
BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 128, 4, 2, 8
WHOLE = P(("data", "fsdp"), "context", "tensor", None)
TUPLES = P(("data", "fsdp"), ("context", "sequence"), "tensor", None)
REPLICATED = P(("data", "fsdp"), None, None, None)

# Sizes of the axes, query's spec, key's and value's.
CASES = {
    "no context": ((2, 2, 1, 1, 2), WHOLE, WHOLE),
    "no fsdp, no tensor": ((2, 1, 4, 1, 1), WHOLE, WHOLE),
    "no data": ((1, 2, 2, 1, 2), WHOLE, WHOLE),
    "context and one more": ((1, 2, 2, 1, 2), TUPLES, TUPLES),
    "one more and context": ((2, 1, 1, 2, 2), TUPLES, TUPLES),
    "keys replicated, no context": ((2, 2, 1, 1, 2), WHOLE, REPLICATED),
    "keys replicated, no tensor": ((2, 1, 2, 1, 1), WHOLE, REPLICATED),
    "all of size one": ((1, 1, 1, 1, 1), TUPLES, TUPLES),
}


@pytest.fixture(params=some([False, True], 1))
def removed(request):
    """With and without jax_remove_size_one_mesh_axis_from_type."""
    name = "jax_remove_size_one_mesh_axis_from_type"
    if not hasattr(jax.config, name):
        pytest.skip("this jax does not have the setting")
    before = getattr(jax.config, name)
    jax.config.update(name, request.param)
    yield request.param
    jax.config.update(name, before)


def mesh_of(sizes, kind):
    count = int(np.prod(sizes))
    devices = jax.devices("cpu")
    if len(devices) < count:
        pytest.skip("needs eight CPU devices: see conftest.py")
    types = (getattr(AxisType, kind),) * len(sizes)
    return jax.make_mesh(sizes, AXES, devices=devices[:count], axis_types=types)


@functools.cache
def operands():
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    ids = np.sort(rng.integers(-1, 4, (BATCH, LENGTH)), axis=1).astype(np.int32)
    return (
        array(BATCH, LENGTH, HEADS, DIM),
        *(array(BATCH, LENGTH, KV_HEADS, DIM) for _ in range(2)),
        array(HEADS),  # sinks, and slopes
        ids,
    )


def attention(query, key, value, sinks, ids, sharding=None, mask=None):
    if mask is None:
        expression = packax.causal() & packax.documents(ids)
        mask = packax.create_attention_mask(expression, sharding=sharding)
    index = np.arange(LENGTH)
    bias = packax.alibi(jnp.abs(sinks), positions=index, kv_positions=index)
    return packax.flash_attention(
        query, key, value, mask, sinks=sinks, bias=bias, sharding=sharding
    )


def both(function):
    def loss(*tensors):
        out = function(*tensors)
        return jnp.sum(out * jnp.cos(out))

    return jax.value_and_grad(loss, (0, 1, 2, 3))


@functools.cache
def expected():
    *tensors, ids = operands()
    return jax.jit(both(functools.partial(attention, ids=ids)))(*tensors)


def assert_same(got):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected()), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=1e-4)


NAMED = (False, "Auto", "no context"), (False, "Explicit", "keys replicated, no context")
REMOVED = *((True, "Auto", name) for name in CASES), (True, "Explicit", "no context")


@pytest.mark.parametrize(
    ("removed", "kind", "name"), some([*NAMED, *REMOVED], 6), indirect=["removed"]
)
def test_equals_one_device(name, kind, removed):
    sizes, query_spec, kv_spec = CASES[name]
    mesh = mesh_of(sizes, kind)
    *tensors, ids = operands()
    sharding = packax.AttentionSharding(query=query_spec, key_value=kv_spec)
    specs = query_spec, kv_spec, kv_spec, P()
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(tensors, specs, strict=True)
        ]
        got = jax.jit(both(functools.partial(attention, ids=ids, sharding=sharding)))(*placed)
        if kind == "Explicit":
            for x, y in zip(got[1], placed, strict=True):
                assert jax.typeof(x).sharding.spec == jax.typeof(y).sharding.spec
    assert_same(got)


@pytest.mark.parametrize(
    ("name", "check_vma", "axes"),
    [
        pytest.param("no context", False, None, marks=pytest.mark.exhaustive),
        pytest.param("one more and context", True, None, marks=pytest.mark.exhaustive),
        ("no fsdp, no tensor", True, ("data", "tensor")),  # packax maps fsdp, of size 1
    ],
)
def test_inside_a_shard_map(name, check_vma, axes, removed):
    """Over all axes, or over some, where packax maps the rest, also an axis of size 1."""
    sizes, spec, _ = CASES[name]
    mesh = mesh_of(sizes, "Auto")
    *tensors, ids = operands()
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(
            packax.causal() & packax.documents(ids), sharding=sharding
        )

        def over(given):
            """The axes in a spec that this shard_map maps."""
            if axes is None:
                return given
            named = [x if isinstance(x, tuple) else (x,) for x in given]
            return P(*(tuple(a for a in entry if a in axes) for entry in named))

        of_mask = jax.tree.map(over, sharding.mask_specs(mask), is_leaf=lambda x: isinstance(x, P))
        mapped = jax.shard_map(
            lambda *x: packax.flash_attention(*x, sharding=sharding),
            in_specs=(over(spec),) * 3 + (of_mask,),
            out_specs=over(spec),
            axis_names=set(axes or AXES),
            check_vma=check_vma,
        )

        def whole(query, key, value):
            return mapped(query, key, value, mask)

        def loss(function):
            return jax.value_and_grad(
                lambda *x: (lambda out: jnp.sum(out * jnp.cos(out)))(function(*x)), (0, 1, 2)
            )

        got = jax.jit(loss(whole))(*tensors[:3])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(plain_expected()), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=1e-4)


@functools.cache
def plain_expected():
    """Without sinks and slopes."""
    *tensors, ids = operands()
    expression = packax.causal() & packax.documents(ids)

    def loss(query, key, value):
        out = packax.flash_attention(query, key, value, expression)
        return jnp.sum(out * jnp.cos(out))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*tensors[:3])


def test_nothing_is_gathered_over_a_context_of_one(removed):
    sizes, spec, _ = CASES["no context"]
    *tensors, ids = operands()
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    with jax.set_mesh(mesh_of(sizes, "Auto")):
        function = both(functools.partial(attention, ids=ids, sharding=sharding))
        jaxpr = str(jax.make_jaxpr(function)(*tensors))
    assert "all_gather" not in jaxpr and "reduce_scatter" not in jaxpr
