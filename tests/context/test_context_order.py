"""Which collectives a rank's program has, and which steps wait for which: data dependencies fix the
order of gathers and scatters.

Guards against gathers that all end before the first attention begins, or that are not needed. No
result shows this: XLA may reorder whatever no operand orders.
"""

import functools
import re

import jax
import jax.numpy as jnp
import packax
import pytest
from context import (
    BATCH,
    CONTEXT,
    KV_HEADS,
    LENGTH,
    collectives,
    expression_of,
    mesh_of,
    placed,
    plan_of,
    results,
    tensors,
)
from jax.sharding import PartitionSpec as P
from rank_programs import Program, of_ranks
from tiers import some

GROUPS = 4
FORWARD, BACKWARD = "packax_forward_heads", "packax_backward_heads"


def programs_of(kind, head_groups, ranks=2, **heads):
    sharding = packax.AttentionSharding(query=P(None, "context"), key_value=P(None, "context"))
    plan = kind and packax.context_plan(expression_of("documents"), ranks=ranks, kind=kind)
    with jax.set_mesh(mesh_of(ranks, axes=("context",))):
        mask = packax.create_attention_mask(
            expression_of("documents"), sharding=sharding, plan=plan
        )
        arguments = (*tensors(**heads), mask)
        function = functools.partial(results, gather_head_groups=head_groups)
        jaxpr = jax.make_jaxpr(function)(*arguments)
    all_programs = [Program(x) for x in of_ranks(jaxpr.jaxpr)]
    (forward,) = (x for x in all_programs if FORWARD in x.named)
    (backward,) = (x for x in all_programs if BACKWARD in x.named)
    return {FORWARD: forward, BACKWARD: backward}


@pytest.fixture(scope="module", params=["balanced", None])
def programs(request):
    by_pass = programs_of(request.param, GROUPS, heads=8, kv_heads=GROUPS)
    return by_pass, request.param is not None


@pytest.mark.parametrize("attention", [FORWARD, BACKWARD])
def test_a_gather_overlaps_with_the_previous_attention(programs, attention):
    """Gather n is issued before attention n - 1 and may end after it. It waits for attention n - 2,
    so at most two groups of keys are in memory."""
    program = programs[0][attention]
    for n in range(1, GROUPS):
        assert program.waits_for_operands(attention, n - 1, "all_gather", n)
        assert not program.waits("all_gather", n, attention, n - 1)
        assert n < 2 or program.waits("all_gather", n, attention, n - 2)


def test_a_scatter_overlaps_with_the_next_attention(programs):
    program = programs[0][BACKWARD]
    for n in range(1, GROUPS):
        assert program.waits_for_operands(BACKWARD, n, "reduce_scatter", n - 1)


def test_copies_behind_two_collectives_cannot_be_joined(programs):
    """With a plan, the copies after a gather wait for the previous attention, and those before a
    scatter wait for the previous scatter."""
    by_pass, copies = programs
    for n in range(1, GROUPS):
        if copies:
            assert all(program.waits(name, n, name, n - 1) for name, program in by_pass.items())
        assert by_pass[BACKWARD].waits("reduce_scatter", n, "reduce_scatter", n - 1) == copies


@pytest.mark.parametrize("plan", ["balanced", None])
@pytest.mark.parametrize(
    "kv_heads,forward,backward",
    [(8, 3, (2, 3)), (4, 3, (2, 3)), (3, 2, (2, 3)), (2, 2, (2, 2))],
)
def test_the_default_of_four_ranks(plan, kv_heads, forward, backward):
    """The backward has two gathers, both complete before the first scatter; gradients use smaller
    groups."""
    programs = programs_of(plan, None, 4, heads=24, kv_heads=kv_heads)
    fwd, bwd = programs[FORWARD], programs[BACKWARD]
    assert len(fwd.named["all_gather"]) == len(fwd.named[FORWARD]) == forward
    gathers, groups = backward
    assert len(bwd.named["all_gather"]) == gathers
    assert len(bwd.named["reduce_scatter"]) == len(bwd.named[BACKWARD]) == groups
    assert bwd.waits_for_operands(BACKWARD, 0, "all_gather", 1)
    for n in range(1, groups):
        assert bwd.waits_for_operands(BACKWARD, n, "reduce_scatter", n - 1)
        assert bwd.waits(BACKWARD, n, "all_gather", 1)
        if plan:
            assert bwd.waits(BACKWARD, n, BACKWARD, n - 1)


@pytest.mark.parametrize("kind", ["documents", "positions"])
def test_what_every_rank_reads_whole_is_not_split(kind):
    """Otherwise every attention of a step gathers them first: XLA may shard what has no
    sharding."""
    sharding = packax.AttentionSharding(query=P("data", "context"), key_value=P("data", "context"))
    plan = packax.context_plan(expression_of("documents"), ranks=4)
    with jax.set_mesh(mesh_of(2, 4, axes=("data", "context"))):
        mask = packax.create_attention_mask(expression_of(kind), sharding=sharding, plan=plan)
    whole = [x for x in (mask.kv_plan, mask.kv_ids, mask.kv_pos) if x is not None]
    assert len(whole) == (3 if kind == "positions" else 2)
    assert {x.sharding.spec for x in whole} == {P("data")}


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
