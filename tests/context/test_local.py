"""Attention with plans that keep documents local: results and gradients equal one device's.

Guards against keys of another part, and gradients that are added by no rank or by two.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
from context import (
    AXES,
    BATCH,
    BATCH_AXES,
    CONTEXT,
    FULL,
    LENGTH,
    TENSOR_REPLICATED,
    assert_same,
    in_order,
    mesh_of,
    moved,
    placed,
    restricted,
    results,
    specs_of,
    tensors,
)
from jax.sharding import PartitionSpec as P
from local_cases import ROWS, expression_of
from local_plans import check_local, greedy
from tiers import some

TWO = P("data", ("fsdp", "context"), "tensor", None)
LEVELS = packax.AttentionSharding(query=TWO, key_value=TWO)


@functools.cache
def one_device(kind):
    mask = packax.create_attention_mask(expression_of(kind))
    return jax.jit(results)(*tensors(), mask)


def local(plan, kind, mesh, sharding=CONTEXT, inputs=None, **keywords):
    """Permutes the rows by the plan and returns results in sequence order."""

    @jax.jit
    def run(*inputs):
        mask = packax.create_attention_mask(expression_of(kind), sharding=sharding, plan=plan)
        assert mask.private_part is not None
        return in_order(plan, results(*moved(plan, inputs), mask, **keywords))

    with jax.set_mesh(mesh):
        return jax.block_until_ready(run(*(inputs or tensors())))


@pytest.mark.parametrize(
    "kind,sizes,sharding,groups",
    some(
        [
            ("documents", (1, 1, 4, 1), CONTEXT, 1),
            ("ranges", (1, 1, 8, 1), CONTEXT, 2),
            ("chunked", (2, 1, 2, 2), TENSOR_REPLICATED, None),
            ("union", (1, 2, 4, 1), LEVELS, None),
        ],
        0,
    ),
)
def test_equals_one_device(kind, sizes, sharding, groups):
    """test_local_breadth.py covers every mask kind. In LEVELS, fsdp stands for hosts."""
    plan = greedy(ROWS, sizes[1:3] if sharding is LEVELS else sizes[2])
    assert len(plan.parts) == (2 if sharding is LEVELS else 1)
    check_local(plan, ROWS)
    got = local(plan, kind, mesh_of(*sizes), sharding, gather_head_groups=groups)
    assert_same(got, one_device(kind))


def test_nothing_is_shared():
    """The program then has no collective, forward or backward."""
    ids = np.broadcast_to(np.repeat(np.arange(32), 32), (BATCH, LENGTH))
    expression = packax.causal() & packax.documents(ids)
    plan = greedy(ids, 4)
    assert plan.shared == 0
    expected = jax.jit(results)(*tensors(), packax.create_attention_mask(expression))
    mesh = mesh_of(4, axes=("context",))
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        inputs = placed(mesh, moved(plan, tensors()), CONTEXT)
        compiled = jax.jit(results).lower(*inputs, mask).compile()
        got = in_order(plan, jax.block_until_ready(compiled(*inputs, mask)))
    text = compiled.as_text()
    for what in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        assert what not in text
    assert_same(got, expected)


PARTIAL_HANGS = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="a shard_map inside another hangs on CPUs in jax 0.7"
)


@pytest.mark.parametrize(
    "names,inside",
    [
        pytest.param(AXES, True, marks=pytest.mark.exhaustive),
        pytest.param(("context",), False, marks=[PARTIAL_HANGS, pytest.mark.exhaustive]),
    ],
)
def test_inside_a_shard_map(names, inside):
    """The mask is built inside, or built outside and passed in by its specs, including
    plan_mismatch."""
    plan = jax.tree.map(jnp.asarray, greedy(ROWS, 2))
    kept = functools.partial(restricted, names=names)

    def attend(ids_or_mask, plan, *inputs):
        mask = ids_or_mask
        if inside:
            expression = packax.causal() & packax.documents(ids_or_mask)
            mask = packax.create_attention_mask(expression, sharding=FULL, plan=plan)
        return results(*inputs, mask, gather_head_groups=1)

    rows, lse = kept(FULL.query), kept(P(BATCH_AXES, "tensor", "context"))
    batch = kept(P(BATCH_AXES))
    plan_specs = jax.tree.map(lambda x: batch, plan)
    with jax.set_mesh(mesh_of(1, 2, 2, 2)):
        first, first_specs = jnp.asarray(ROWS), batch
        if not inside:
            first = packax.create_attention_mask(
                expression_of("documents"), sharding=FULL, plan=plan
            )
            first_specs = jax.tree.map(kept, FULL.mask_specs(first))
        function = jax.shard_map(
            attend,
            in_specs=(first_specs, plan_specs, *[rows] * 4, lse),
            out_specs=(rows, lse, *[rows] * 3),
            axis_names=set(names),
        )
        got = jax.block_until_ready(jax.jit(function)(first, plan, *moved(plan, tensors())))
        got = in_order(plan, got)
    assert_same(got, one_device("documents"))


@pytest.mark.exhaustive
def test_explicit_axes_and_a_context_of_two():
    """Types define the sharding; two axes form one context, major first."""
    spec = P(None, ("fsdp", "context"), "tensor")
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    plan = greedy(ROWS, 4)
    mesh = mesh_of(1, 2, 2, 2, kind="Explicit")
    specs = specs_of(sharding)
    with jax.set_mesh(mesh):
        inputs = placed(mesh, moved(plan, tensors()), sharding)

        @jax.jit
        def run(plan, *inputs):
            mask = packax.create_attention_mask(
                expression_of("positions"), sharding=sharding, plan=plan
            )
            return results(*inputs, mask)

        got = jax.block_until_ready(run(plan, *inputs))
        for x, spec in zip(got, (specs[0], specs[4], *specs[:3]), strict=True):
            assert [*jax.typeof(x).sharding.spec] == [*spec, *[None] * (x.ndim - len(spec))]
        got = in_order(plan, jax.device_get(got))
    assert_same(got, one_device("positions"))


@pytest.mark.exhaustive
def test_scan_remat_and_vmap():
    """Over layers with saved results, and over a batch that is mapped together with its mask."""
    plan = greedy(ROWS, 2)
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)

    def gradients(query, key, value, dout, mask):
        def one(query, key, value, mask):
            return packax.flash_attention(query[None], key[None], value[None], mask)[0]

        def loss(query, key, value):
            @functools.partial(jax.checkpoint, policy=keep)
            def layer(x, _):
                axes = (0, 0, 0, mask.vmap_axes())
                return jax.vmap(one, in_axes=axes)(x, key, value, mask), None

            return jnp.sum(jax.lax.scan(layer, query, None, length=2)[0] * dout)

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    expression = expression_of("documents")
    inputs = tensors()[:4]
    expected = jax.jit(gradients)(*inputs, packax.create_attention_mask(expression))
    with jax.set_mesh(mesh_of(2, axes=("context",))):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        got = jax.jit(gradients)(*plan.permute(inputs), mask)
        got = plan.unpermute(jax.block_until_ready(got))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.exhaustive
def test_forward_mode_and_second_derivatives():
    """Along one direction: J u, and the Hessian of a scalar times u, also by reverse over
    reverse."""
    query, key, value, dout, _ = tensors()
    along = tensors(seed=1)[:3]
    plan = greedy(ROWS, 2)

    def derivatives(x, u, dout, mask):
        def attend(x):
            return packax.flash_attention(*x, mask, gather_head_groups=1)

        def gradient(x):
            return jax.grad(lambda x: jnp.sum(jnp.sin(attend(x)) * dout))(x)

        def product(x):
            return sum(jnp.vdot(g, v) for g, v in zip(gradient(x), u, strict=True))

        return (
            jax.jvp(attend, (x,), (u,))[1],
            jax.jvp(gradient, (x,), (u,))[1],
            jax.grad(product)(x),
        )

    expression = expression_of("documents")
    x = (query, key, value)
    expected = jax.jit(derivatives)(x, along, dout, packax.create_attention_mask(expression))
    with jax.set_mesh(mesh_of(2, axes=("context",))):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        got = jax.jit(derivatives)(*plan.permute((x, along, dout)), mask)
        got = plan.unpermute(jax.block_until_ready(got))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


@pytest.mark.exhaustive
def test_bfloat16_meets_the_rule_of_the_oracle():
    """With huge values in padding; a split document's gradients are summed over four ranks."""
    ids = ROWS[1]
    inputs = tensors(jnp.bfloat16, batch=1)
    padding = jnp.asarray(ids == -1)[None, :, None, None]
    *rows, dlse = inputs
    rows = [jnp.where(padding, jnp.asarray(1e30, x.dtype), x) for x in rows]
    inputs = (*rows, dlse)
    plan = greedy(ids, 4)
    got = local(plan, "one mask for all", mesh_of(4, axes=("context",)), inputs=inputs)
    query, key, value, dout = (jnp.where(padding, 0, x) for x in rows)
    allowed = expression_of("one mask for all").as_array(LENGTH, LENGTH)
    scale = query.shape[3] ** -0.5
    true = oracle.exact(query, key, value, allowed, scale, dout, dlse)
    plain = oracle.plain(query, key, value, allowed, scale, dout, dlse)
    got[1] = jnp.where(allowed.any(-1), got[1], -jnp.inf)
    oracle.check(oracle.Results(*got), true, plain)
