"""What the programs of plans that keep documents local move, and what in them waits for what.

Guards against bytes that no rank reads, which no result shows, and against a gather or a scatter
that nothing runs beside.
"""

import functools

import jax
import jax.numpy as jnp
import packax
import pytest
from context import BATCH, DIM, KV_HEADS, LENGTH, collectives, mesh_of, results, tensors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from local_cases import ROWS, expression_of
from local_plans import greedy
from lowered import calls
from rank_programs import Program, of_ranks

CONTEXT = packax.AttentionSharding(query=P(None, "context"), key_value=P(None, "context"))
ALL, SOME = "packax_{}", "packax_{}_heads"


def of_rank(function, *operands):
    """The jaxprs of a rank: forward and backward."""
    made = [Program(x) for x in of_ranks(jax.make_jaxpr(function)(*operands).jaxpr)]
    found = []
    for way in ("forward", "backward"):
        names = {ALL.format(way), SOME.format(way)}
        (program,) = (x for x in made if names & set(x.named))
        found.append(program)
    return found


@pytest.mark.parametrize("groups", [1, None])
@pytest.mark.parametrize("heads,kv_heads", [(8, 4), (8, 1)])
def test_private_rows_are_attended_beside_the_gather_and_the_scatter(groups, heads, kv_heads):
    """One key/value head has no halves: its backward runs beside the scatter."""
    plan = greedy(ROWS, 4)
    assert 2 * plan.shared <= LENGTH // 4  # so that the default is one gather
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = packax.create_attention_mask(expression_of("documents"), sharding=CONTEXT, plan=plan)
        function = functools.partial(results, gather_head_groups=groups)
        inputs = tensors(heads=heads, kv_heads=kv_heads)
        forward, backward = of_rank(function, *inputs, mask)
    name = ALL.format("forward")
    private, shared = 0, 1
    assert len(forward.named[name]) == len(forward.named["all_gather"]) == 2  # keys, values
    for gather in range(2):
        assert forward.waits_for_operands(name, private, "all_gather", gather)
        assert not forward.waits("all_gather", gather, name, private)
        assert forward.waits(name, shared, "all_gather", gather)
    assert forward.waits(name, shared, name, private)

    half, name = SOME.format("backward"), ALL.format("backward")
    assert len(backward.named["all_gather"]) == len(backward.named["reduce_scatter"]) == 2
    if kv_heads == 1:
        half, shared, private = name, 0, 1
    else:
        shared, private = 0, 1  # its second half
        assert len(backward.named[half]) == 2 and len(backward.named[name]) == 1
        for gather in range(2):
            assert backward.waits_for_operands(half, 0, "all_gather", gather)
        assert backward.waits(name, shared, half, 0)
    for scatter in range(2):
        assert backward.waits("reduce_scatter", scatter, name, shared)
        assert backward.waits_for_operands(half, private, "reduce_scatter", scatter)


@pytest.mark.parametrize("groups", [1, 2])
def test_collectives_move_what_the_plan_says(groups):
    """Read from the compiled program, forward and backward: shared rows of keys and values, and
    their gradients, once each; nothing else."""
    plan = greedy(ROWS, 4)
    specs = (*[P(None, "context")] * 4, P(None, None, "context"))
    mesh = mesh_of(4, axes=("context",))
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression_of("documents"), sharding=CONTEXT, plan=plan)
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(tensors(), specs, strict=True)
        ]
        function = functools.partial(results, gather_head_groups=groups)
        lowered = jax.jit(function).lower(*placed, mask)
    of_row = BATCH * KV_HEADS * 2 * DIM  # keys and values
    text = lowered.as_text()
    assert text.count('"stablehlo.all_gather"') == 4  # forward and backward
    assert text.count('"stablehlo.reduce_scatter"') == 2
    compiled = collectives(lowered.compile().as_text())
    moved = {what: sum(n for name, n in compiled if name == what) for what, _ in compiled}
    assert set(moved) == {"all-gather", "reduce-scatter"}, compiled
    gathered = (
        plan.fetched + plan.shared
    ) * of_row  # what a rank holds is its own part and others'
    # The CPU compilers of older jax gather once for both passes.
    again = 2 if jax.__version_info__ >= (0, 11) else 1
    assert moved["all-gather"] in (gathered * 2, gathered * again)
    assert moved["reduce-scatter"] == plan.shared * of_row


def test_kernels_of_both_parts_are_in_the_program_for_cuda(extension):
    """As text: all heads of all rows, then shared rows; backward in halves around those."""
    plan = greedy(ROWS, 4)
    shapes = [jax.ShapeDtypeStruct((BATCH, LENGTH, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = packax.create_attention_mask(expression_of("documents"), sharding=CONTEXT, plan=plan)

        def loss(*x):
            return packax.flash_attention(*x, mask).astype(jnp.float32).sum()

        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes)
        found = calls(traced.lower(lowering_platforms=("cuda",)).as_text())
    rows = [(target, operands) for target, _, operands, _ in found]
    own, shared = LENGTH // 4, plan.shared
    first = {
        "forward": [f"{BATCH}x{n}x8x64xbf16" for n in (own, shared)],
        "backward": [f"{BATCH}x{n}x8x64xbf16" for n in (own, shared, own)],
    }
    for way, expected in first.items():
        got = [operands[0] for target, operands in rows if target.startswith(f"packax_{way}")]
        assert got == expected, rows
    keys = [operands[1] for target, operands in rows if target == "packax_forward_v1"]
    assert keys == [f"{BATCH}x{n}x4x64xbf16" for n in (own, 4 * shared)]
