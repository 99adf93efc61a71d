"""stack_masks: layers of several kinds in one scan give the results of a loop over layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.masks import stack_masks


def test_the_body_is_compiled_once():
    """A scan over a stack contains the attention of one layer; lax.cond contains both kinds."""
    masks = [
        packax.create_attention_mask(x & packax.documents(np.arange(64) // 20))
        for x in (packax.sliding_window(15), packax.causal())
    ]
    stack, x, kinds = stack_masks(masks), jnp.ones((2, 64, 2, 8)), jnp.asarray([0, 1, 0])

    def count(mask_of):
        def layer(x, kind):
            return packax.flash_attention(x, x, x, mask_of(kind)), None

        text = str(jax.make_jaxpr(lambda x: jax.lax.scan(layer, x, kinds))(x))
        return text.count("packax_forward")

    one = count(lambda kind: stack[kind])
    assert one >= 1 and one == count(lambda kind: masks[0])

    def cond(x, kind):
        attend = [functools.partial(packax.flash_attention, x, x, x, mask) for mask in masks]
        return jax.lax.cond(kind == 1, attend[1], attend[0]), None

    both = str(jax.make_jaxpr(lambda x: jax.lax.scan(cond, x, kinds))(x))
    assert both.count("packax_forward") == 2 * one


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
