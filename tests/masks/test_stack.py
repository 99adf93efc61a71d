"""stack_masks: layers of several kinds in one scan give the results of a loop over layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
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
