"""Context parallelism inside other programs: the caller's shard_map, scan, remat, vmap.

Also checks the collectives of the compiled program.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import (
    AXES,
    BATCH,
    BATCH_AXES,
    CONTEXT,
    FULL,
    KV_HEADS,
    LENGTH,
    ROWS,
    TENSOR_REPLICATED,
    assert_same,
    collectives,
    expression_of,
    mesh_of,
    of_ids_alone,
    one_device,
    placed,
    plan_of,
    restricted,
    results,
    tensors,
)
from jax.sharding import PartitionSpec as P
from tiers import some


def manual_attention(mask, query, key, value):
    if not isinstance(mask, packax.AttentionMask):
        mask = packax.create_attention_mask(of_ids_alone(mask), sharding=TENSOR_REPLICATED)
    out, lse = packax.flash_attention(
        query, key, value, mask, return_lse=True, gather_head_groups=1
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


PARTIAL_HANGS = pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="a shard_map inside another hangs on CPUs in jax 0.7, and does not compile in jax 0.8",
)


@pytest.mark.parametrize(
    "names,inside,check_vma",
    [
        pytest.param(AXES, False, True, marks=pytest.mark.exhaustive),
        pytest.param(AXES, True, True, marks=pytest.mark.exhaustive),
        pytest.param(AXES, False, False, marks=pytest.mark.exhaustive),
        pytest.param(("context",), True, True, marks=PARTIAL_HANGS),
        pytest.param(("context",), True, False, marks=PARTIAL_HANGS),
        pytest.param(
            ("data", "fsdp", "tensor"), False, True, marks=[PARTIAL_HANGS, pytest.mark.exhaustive]
        ),
        pytest.param(
            ("data", "fsdp", "tensor"), False, False, marks=[PARTIAL_HANGS, pytest.mark.exhaustive]
        ),
    ],
)
def test_inside_a_shard_map(names, inside, check_vma):
    """The caller maps all axes, or some. The mask comes from outside, or is built inside from
    ids."""
    kept = functools.partial(restricted, names=names)
    query, key, value, dout, dlse = tensors()
    q_spec, kv_spec = kept(TENSOR_REPLICATED.query), kept(TENSOR_REPLICATED.key_value)
    lse_spec = kept(P(BATCH_AXES, "tensor", "context"))
    with jax.set_mesh(mesh_of(1, 2, 2, 2)):
        if inside:
            mask, mask_spec = jnp.asarray(ROWS), kept(P(BATCH_AXES))
        else:
            mask = packax.create_attention_mask(
                expression_of("of ids alone"), sharding=TENSOR_REPLICATED
            )
            mask_spec = jax.tree.map(kept, TENSOR_REPLICATED.mask_specs(mask))
        mapped = jax.shard_map(
            manual_attention,
            in_specs=(mask_spec, q_spec, kv_spec, kv_spec),
            out_specs=(q_spec, lse_spec),
            axis_names=set(names),
            check_vma=check_vma,
        )

        @jax.jit
        def run(mask, *tensors):
            results, pullback = jax.vjp(functools.partial(mapped, mask), *tensors)
            return *results, *pullback((dout, dlse))

        got = jax.block_until_ready(run(mask, query, key, value))
    assert_same(got, one_device("of ids alone"))


def test_scan_over_layers_and_remat():
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)

    def network(query, key, value, dout, _, mask):
        def loss(query, key, value):
            @functools.partial(jax.checkpoint, policy=keep)
            def layer(x, _):
                return packax.flash_attention(x, key, value, mask), None

            return jnp.sum(jax.lax.scan(layer, query, None, length=2)[0] * dout)

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    expression = expression_of("documents")
    expected = jax.jit(network)(*tensors(), packax.create_attention_mask(expression))
    with jax.set_mesh(mesh_of(1, 2, 2, 2)):
        mask = packax.create_attention_mask(expression, sharding=FULL)
        function = jax.jit(network)
        got = function(*tensors(), mask)
        # With the saved results, the backward pass does not run the forward kernel again.
        text = str(jax.make_jaxpr(function)(*tensors(), mask))
        assert (text.count("packax_forward["), text.count("packax_backward[")) == (1, 1)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_vmap_and_a_given_mesh():
    mesh = mesh_of(2, axes=("context",))
    sharding = dataclasses.replace(CONTEXT, mesh=mesh)
    mask = packax.create_attention_mask(expression_of("one mask for all"), sharding=sharding)
    query, key, value, *_ = tensors()
    one = lambda q, k, v: packax.flash_attention(  # noqa: E731
        q[None], k[None], v[None], mask
    )
    got = jax.jit(jax.vmap(one))(query, key, value)
    np.testing.assert_allclose(got[:, 0], one_device("one mask for all")[0], atol=1e-6)


@pytest.mark.parametrize("dtype", some([jnp.float32, jnp.bfloat16], 1))
def test_gradients_are_reduce_scattered_and_nothing_large_is_all_reduced(dtype):
    """Forward and backward each gather the keys and values of one head at a time; the backward also
    scatters gradients."""
    mesh = mesh_of(2, axes=("context",))
    plan = plan_of("balanced", 2)
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression_of("documents"), sharding=CONTEXT, plan=plan)
        inputs = placed(mesh, tensors(dtype), CONTEXT)
        function = functools.partial(results, gather_head_groups=KV_HEADS)
        lowered = jax.jit(function).lower(*inputs, mask)
    text = lowered.as_text()
    name = "f32" if dtype == jnp.float32 else "bf16"
    own = f"{BATCH}x{LENGTH // 2}x16x{name}"
    assert len(re.findall(rf'"stablehlo.all_gather".*tensor<{own}>', text)) == 2 * KV_HEADS
    scattered = re.findall(r'"stablehlo.reduce_scatter".*?-> tensor<(\S+)>', text, re.DOTALL)
    assert scattered == [own] * KV_HEADS
    assert "stablehlo.all_reduce" not in text

    if dtype != jnp.float32:
        return  # CPUs have no bfloat16 collectives
    compiled = collectives(lowered.compile().as_text())
    whole = BATCH * LENGTH * KV_HEADS * 16
    assert not [x for x in compiled if x[0] in ("all-reduce", "all-to-all")], compiled
    assert sum(n for what, n in compiled if what == "reduce-scatter") == whole // 2
    # Forward and backward gather separately: one shared gather would keep all keys in memory
    # between them. The CPU compilers of older jax drop the barrier that keeps the two apart.
    if jax.__version_info__ >= (0, 11):
        assert sum(n for what, n in compiled if what == "all-gather" and n > 1000) == 2 * whole
