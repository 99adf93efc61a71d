"""Inputs that arrive sharded otherwise, and more groups of heads than tests/table has.

Guards against a key/value head of another group. tests/table tests meshes, plans and shard_maps.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import (
    BATCH_AXES,
    FULL,
    ROWS,
    mesh_of,
    tensors,
)
from jax.sharding import PartitionSpec as P
from tiers import some


@pytest.mark.parametrize(
    "arrive,kind",
    some(
        itertools.product(
            ["replicated", "before the mesh", "as numpy", "otherwise"], ["Auto", "Explicit"]
        ),
        7,
    ),
)
def test_inputs_of_another_sharding_are_resharded(arrive, kind):
    """query, key, value and a mask built without the sharding; gradients are sharded as inputs.

    Types of Explicit axes that disagree are rejected.
    """
    mesh = mesh_of(1, 2, 2, 2, kind=kind)
    query, key, value, *_ = tensors()
    expression = packax.causal() & packax.documents(ROWS)
    unsharded = packax.create_attention_mask(expression)
    rows = P(BATCH_AXES, None, "tensor")
    whole = packax.AttentionSharding(query=rows, key_value=rows)

    def gradients(query, key, value, mask, sharding):
        def loss(*tensors):
            return jnp.sum(jnp.sin(packax.flash_attention(*tensors, mask, sharding=sharding)))

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    want = gradients(query, key, value, unsharded, None)
    place = {
        "replicated": lambda x: jax.device_put(x, P()),
        "before the mesh": lambda x: x,
        "as numpy": np.asarray,
        "otherwise": lambda x: jax.device_put(x, P(None, ("context", "fsdp"))),
    }[arrive]
    with jax.set_mesh(mesh):
        args = [place(x) for x in (query, key, value)]
        of_ranks = packax.create_attention_mask(expression, sharding=FULL)
        for mask, sharding in ((expression, FULL), (of_ranks, None), (unsharded, whole)):
            if kind == "Explicit" and arrive == "otherwise":
                with pytest.raises(ValueError, match="sharding"):
                    jax.eval_shape(functools.partial(gradients, sharding=sharding), *args, mask)
                continue
            got = jax.jit(functools.partial(gradients, sharding=sharding))(*args, mask)
            for x, y, z in zip(got, want, args, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
                if kind == "Explicit" and arrive == "replicated":
                    assert jax.typeof(x) == jax.typeof(z)
