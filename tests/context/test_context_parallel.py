"""On fake CPU devices, for every combination of axes: forward and gradients equal one device's.

Guards against silent failures: a key/value head of another group, a gradient that misses the sum
over an axis, a gradient summed in the wrong order of ranks. test_context_masks.py tests the masks
of ranks, test_context_transforms.py loops and transformations.
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
    CONTEXT,
    FULL,
    LENGTH,
    ROWS,
    assert_same,
    expression_of,
    in_order,
    mesh_of,
    moved,
    one_device,
    placed,
    plan_of,
    results,
    specs_of,
    tensors,
)
from jax.sharding import PartitionSpec as P
from tiers import some


def sharded(mesh, sharding, kind, plan=None, *, inputs=None, explicit=False, groups=1):
    """Results in sequence order; the plan permutes the rows before attention.

    One group of heads compiles fastest; test_head_groups has more.
    """
    inputs = tensors() if inputs is None else inputs
    inputs = moved(plan, inputs)
    if explicit:
        inputs = placed(mesh, inputs, sharding)

    @jax.jit
    def run(plan, *tensors):
        mask = packax.create_attention_mask(
            expression_of(kind), q_len=LENGTH, kv_len=LENGTH, sharding=sharding, plan=plan
        )
        return results(*tensors, mask, gather_head_groups=groups)  # the mask has the sharding

    with jax.set_mesh(mesh):
        # Fake devices share one thread pool and wait for each other there: run one program at a
        # time.
        got = jax.block_until_ready(run(plan, *inputs))
    if explicit:
        *specs, _, lse_spec = specs_of(sharding)
        for x, spec in zip(got, (specs[0], lse_spec, *specs), strict=True):
            full = [*spec, *[None] * (x.ndim - len(spec))]
            assert [*jax.typeof(x).sharding.spec] == full
    return in_order(plan, jax.device_get(got))


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


@pytest.mark.parametrize(
    "groups,heads,plan",
    some(
        [
            ((1, 3, 2), (12, 6), "balanced"),
            ((1, 3, 2), (12, 6), None),
            (2, (8, 2), "balanced"),
            (None, (8, 4), None),
            (None, (12, 12), "balanced"),
        ],
        0,
    ),
)
def test_head_groups(groups, heads, plan):
    """More than two groups, where each waits for the previous one; equal groups; and the default
    for four ranks."""
    mesh = mesh_of(4, axes=("context",))
    inputs = tensors(heads=heads[0], kv_heads=heads[1])
    got = sharded(mesh, CONTEXT, "documents", plan_of(plan, 4), inputs=inputs, groups=groups)
    assert_same(got, one_device("documents", heads[1], heads[0]))


def test_context_over_two_axes():
    """The axes are ordered major first, as in a PartitionSpec; the wrong order scrambles the
    keys."""
    spec = P("tensor", ("fsdp", "context"))
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    got = sharded(mesh_of(1, 2, 2, 2), sharding, "documents", plan_of("balanced", 4))
    assert_same(got, one_device("documents"))


def test_keys_in_the_order_of_the_sequence():
    """permuted_keys=False: only the queries are permuted."""
    mesh = mesh_of(4, axes=("context",))
    plan = plan_of("balanced", 4)
    query, key, value, dout, dlse = tensors()
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(
            expression_of("documents"), sharding=CONTEXT, plan=plan, permuted_keys=False
        )
        got = jax.jit(functools.partial(results, gather_head_groups=1))(
            plan.permute(query), key, value, plan.permute(dout), plan.permute(dlse, 2), mask
        )
    out, lse, dq, dk, dv = map(np.asarray, got)
    got = plan.unpermute(out), plan.unpermute(lse, 2), plan.unpermute(dq), dk, dv
    assert_same(got, one_device("documents"))


def test_a_plan_without_a_mesh():
    """One device with permuted rows: what one rank of a larger mesh does, and a debugging aid."""
    plan = plan_of("balanced", 4)
    mask = packax.create_attention_mask(expression_of("documents"), plan=plan)
    got = jax.jit(results)(*moved(plan, tensors()), mask)
    assert_same(in_order(plan, jax.device_get(got)), one_device("documents"))
