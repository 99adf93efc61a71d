"""Gradients of some operands: unwanted ones cost nothing in XLA. test_workspaces.py tests what
kernels write.

Guards against a gradient computed for a frozen operand.
"""

import jax
import jax.numpy as jnp
import packax
import pytest
from transformed import EXPRESSION, random


@pytest.mark.parametrize(
    "argnums,products",
    [((0, 1, 2), 5), ((0,), 3), ((1,), 3), ((1, 2), 4)],
)
def test_frozen_operands_cost_no_products(argnums, products):
    """In XLA the forward has 2 products of tiles, S and the output; the backward has at most 5."""
    operands = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in random(0)[:3]]
    gradient = jax.grad(lambda *x: packax.flash_attention(*x, EXPRESSION).sum(), argnums)
    text = jax.jit(gradient).lower(*operands).as_text()
    assert text.count("stablehlo.dot_general") == 2 + products
