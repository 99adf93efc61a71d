"""Mesh axes of size 1 have no effect inside a shard_map of the caller, and cost no collective.

MaxText sets jax_remove_size_one_mesh_axis_from_type, with which a value never varies over such an
axis. tests/table has such axes outside of a shard_map.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import mesh_of
from jax.sharding import PartitionSpec as P
from ranks import size_one
from tiers import some

NAMES = ("data", "fsdp", "context", "sequence", "tensor")
WHOLE = P(("data", "fsdp"), "context", "tensor", None)
removed = pytest.mark.parametrize("removed", some([False, True], 1))


@functools.cache
def operands():
    rng = np.random.default_rng(0)
    shapes = [(4, 128, heads, 8) for heads in (4, 2, 2)]
    ids = np.sort(rng.integers(-1, 4, (4, 128)), axis=1).astype(np.int32)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes], ids


def gradients(function):
    return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))


@removed
def test_inside_a_shard_map(removed):
    """Over some axes. packax maps the rest, also an axis of size 1."""
    tensors, ids = operands()
    expression = packax.causal() & packax.documents(ids)
    sharding = packax.AttentionSharding(query=WHOLE, key_value=WHOLE)
    axes = "data", "tensor"

    def over(given):
        """The axes in a spec that this shard_map maps."""
        named = [x if isinstance(x, tuple) else (x,) for x in given]
        return P(*(tuple(a for a in entry if a in axes) for entry in named))

    with jax.set_mesh(mesh_of(2, 1, 4, 1, 1, axes=NAMES)), size_one(removed):
        mask = packax.create_attention_mask(expression, sharding=sharding)
        of_mask = jax.tree.map(over, sharding.mask_specs(mask), is_leaf=lambda x: isinstance(x, P))
        mapped = jax.shard_map(
            lambda *x: packax.flash_attention(*x, sharding=sharding),
            in_specs=(over(WHOLE),) * 3 + (of_mask,),
            out_specs=over(WHOLE),
            axis_names=set(axes),
        )
        got = jax.jit(gradients(lambda *x: mapped(*x, mask)))(*tensors)
    want = jax.jit(gradients(lambda *x: packax.flash_attention(*x, expression)))(*tensors)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=1e-4)


@removed
def test_nothing_is_gathered_over_a_context_of_one(removed):
    tensors, ids = operands()
    sharding = packax.AttentionSharding(query=WHOLE, key_value=WHOLE)

    def attention(*x):
        return packax.flash_attention(
            *x, packax.causal() & packax.documents(ids), sharding=sharding
        )

    with jax.set_mesh(mesh_of(2, 2, 1, 1, 2, axes=NAMES)), size_one(removed):
        jaxpr = str(jax.make_jaxpr(gradients(attention))(*tensors))
    assert "all_gather" not in jaxpr and "reduce_scatter" not in jaxpr
