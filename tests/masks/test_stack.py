"""stack_masks: layers of several kinds in one scan give the results of a loop over layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import mesh_of
from jax.sharding import PartitionSpec as P
from packax.masks import stack_masks

LENGTH = 256
IDS = np.stack([np.repeat([0, 1, -1], [100, 120, 36]), np.repeat([3, 7], [56, 200])])
POSITIONS = np.asarray(packax.segments.positions(IDS))
KINDS = {
    "ids": (packax.documents(IDS),) * 2,
    "positions": (packax.documents(IDS, positions=POSITIONS),) * 2,
    "positions of one": (packax.documents(IDS, positions=POSITIONS), packax.documents(IDS)),
    "no ids in one": (packax.documents(IDS, positions=POSITIONS), packax.full()),
    "none": (packax.full(), packax.full()),
    "keys have ids": (packax.documents(IDS, kv_segment_ids=IDS.copy()), packax.documents(IDS)),
}


def expressions(name):
    local, whole = KINDS[name]
    return packax.sliding_window(15) & local, packax.causal() & whole


def built(name, **options):
    sizes = {"q_len": LENGTH, "kv_len": LENGTH}
    return [packax.create_attention_mask(x, **sizes, **options) for x in expressions(name)]


def tensors(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(k, (2, LENGTH, h, 16)) for k, h in zip(keys, (4, 2, 2), strict=True)]


def model(x, key, value, mask_of, kinds, *, scan, remat=False, **options):
    """Layers that add attention of some kind; keys and values are shared."""

    def layer(x, kind):
        return x + packax.flash_attention(x, key, value, mask_of(kind), **options), None

    if not scan:
        for kind in kinds:
            x, _ = layer(x, kind)
        return x
    policy = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    body = jax.checkpoint(layer, policy=policy) if remat else layer
    return jax.lax.scan(body, x, jnp.asarray(kinds))[0]


LAYERS = (0, 1, 0)


def test_the_body_is_compiled_once():
    """A scan over a stack contains the attention of one layer; lax.cond contains both kinds."""
    stack = stack_masks(built("positions"))
    masks = built("positions")

    def count(mask_of):
        text = str(jax.make_jaxpr(lambda *x: model(*x, mask_of, LAYERS, scan=True))(*tensors()))
        return text.count("packax_forward")

    one = count(lambda kind: stack[kind])
    assert one >= 1
    assert one == count(lambda kind: masks[0])

    def cond(x, kind):
        attend = [functools.partial(packax.flash_attention, *tensors(), mask) for mask in masks]
        return x + jax.lax.cond(kind == 1, attend[1], attend[0]), None

    branches = str(
        jax.make_jaxpr(lambda x: jax.lax.scan(cond, x, jnp.asarray(LAYERS)))(tensors()[0])
    )
    assert branches.count("packax_forward") == 2 * one


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mask_for_all_rows_on_a_mesh(kind, context):
    """Stacked with a mask whose batch is sharded; the types of Explicit axes say so."""
    mesh = mesh_of(2, 2, kind=kind, axes=("data", "context"))
    spec = P("data", "context") if context else P("data")
    sharding = packax.AttentionSharding(spec, spec) if context else None
    ids = np.repeat([[0, 1], [2, 3]], LENGTH // 2, axis=1).astype(np.int32)
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 2, 8)).astype(np.float32)

    def attend(x, ids, sharding=None):
        kinds = packax.causal() & packax.documents(ids), packax.sliding_window(15)
        options = {"sharding": sharding, "q_len": LENGTH, "kv_len": LENGTH}
        masks = [packax.create_attention_mask(y, **options) for y in kinds]
        stack = stack_masks(masks)
        return [packax.flash_attention(x, x, x, stack[n]) for n in range(2)]

    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(attend, sharding=sharding))(
            jax.device_put(x, spec), jax.device_put(ids, P("data"))
        )
    for y, z in zip(got, jax.jit(attend)(x, ids), strict=True):
        np.testing.assert_allclose(np.asarray(y), np.asarray(z), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [True, np.True_, np.int8(1), -1], ids=repr)
def test_what_selects_a_mask(kind):
    masks = [
        packax.create_attention_mask(x, q_len=8, kv_len=8) for x in (packax.causal(), packax.full())
    ]
    stack = stack_masks(masks)
    np.testing.assert_array_equal(stack[kind].kv_end, masks[1].kv_end)
    if kind != -1:
        np.testing.assert_array_equal(jax.jit(lambda x: stack[x].kv_end)(kind), masks[1].kv_end)
    for wrong in (1.0, jnp.float32(1), np.zeros(2, int), "1"):
        with pytest.raises(
            ValueError, match="kind must be the index of a mask, an integer or bool"
        ):
            stack[wrong]


def test_symbolic_sizes():
    """One exported program for any batch and length, with a traced index."""

    def dense(ids, kind):
        document = packax.documents(ids)
        kinds = packax.sliding_window(2) & document, packax.causal() & document
        stack = stack_masks([packax.create_attention_mask(x) for x in kinds])
        return stack[kind].as_array()

    batch, length = jax.export.symbolic_shape("b, s")
    types = jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    exported = jax.export.export(jax.jit(dense), platforms=["cpu"])(*types)
    ids = np.sort(np.random.default_rng(0).integers(-1, 3, (3, 70)), axis=1).astype(np.int32)
    for kind in (0, 1):
        np.testing.assert_array_equal(exported.call(ids, np.int32(kind)), dense(ids, kind))
