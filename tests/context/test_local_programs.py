"""What the programs of local plans move, and which steps wait for which.

Guards against bytes that no rank reads, which no result shows, and a gather or scatter that
overlaps with nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import (
    BATCH,
    CONTEXT,
    DIM,
    KV_HEADS,
    LENGTH,
    collectives,
    mesh_of,
    placed,
    results,
    tensors,
)
from jax.sharding import PartitionSpec as P
from local_packings import EXPRESSION, ROWS
from local_plans import greedy
from lowered import calls
from rank_programs import Program, of_ranks
from tiers import some

ALL, SOME = "packax_{}", "packax_{}_heads"


def mask_of(expression, plan, sharding=CONTEXT):
    """Shapes only: these programs do not run, so nothing is compiled for the mask."""
    return jax.eval_shape(
        lambda: packax.create_attention_mask(expression, sharding=sharding, plan=plan)
    )


def of_rank(function, *operands):
    """A rank's programs: forward and backward."""
    rank_programs = [Program(x) for x in of_ranks(jax.make_jaxpr(function)(*operands).jaxpr)]
    found = []
    for way in ("forward", "backward"):
        names = {ALL.format(way), SOME.format(way)}
        (program,) = (x for x in rank_programs if names & set(x.named))
        found.append(program)
    return found


@pytest.mark.parametrize("heads,kv_heads", [(8, 4), (8, 1)])
def test_private_rows_overlap_with_the_gather_and_the_scatter(heads, kv_heads):
    """One key/value head cannot be split in halves: its whole private backward overlaps with the
    scatter."""
    plan = greedy(ROWS, 4)
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = mask_of(EXPRESSION, plan)
        function = functools.partial(results, gather_head_groups=1)
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
        shared, private = 0, 1  # private rows: the second half
        assert len(backward.named[half]) == 2 and len(backward.named[name]) == 1
        for gather in range(2):
            assert backward.waits_for_operands(half, 0, "all_gather", gather)
        assert backward.waits(name, shared, half, 0)
    for scatter in range(2):
        assert backward.waits("reduce_scatter", scatter, name, shared)
        assert backward.waits_for_operands(half, private, "reduce_scatter", scatter)


def test_nothing_is_shared():
    """The program then has no collective, forward or backward."""
    ids = np.broadcast_to(np.repeat(np.arange(32), 32), (BATCH, LENGTH))
    expression, plan = packax.causal() & packax.documents(ids), greedy(ids, 4)
    assert plan.shared == 0
    mesh = mesh_of(4, axes=("context",))
    with jax.set_mesh(mesh):
        inputs = placed(mesh, tensors(), CONTEXT)
        compiled = jax.jit(results).lower(*inputs, mask_of(expression, plan)).compile()
    assert not collectives(compiled.as_text())


def test_no_result_is_updated_at_a_place_that_xla_knows():
    """With a constant index, XLA of jax 0.11 takes an update at the end of a program for part of
    the kernel's result, and fails: "DUS target must be a fusion parameter"."""
    plan = greedy(ROWS, 4)
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = mask_of(EXPRESSION, plan)
        programs = of_rank(results, *tensors(), mask)
    for program, way in zip(programs, ("forward", "backward"), strict=True):
        found = program.updates_wait([ALL.format(way), SOME.format(way)])
        assert found and all(found), way


@pytest.mark.parametrize("shared,gathers", some([(50, 2), (52, 3)], 1))
def test_groups_of_heads_where_private_rows_are_fewer_than_shared_keys(shared, gathers):
    """Otherwise there is one gather of keys and one of values, which the private rows hide."""
    ids = np.broadcast_to(np.repeat(np.arange(32), 32), (BATCH, LENGTH))
    plan = greedy(ids, 4, shared=shared)
    assert plan.shared == shared
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = mask_of(packax.causal() & packax.documents(ids), plan)
        inputs = tensors(heads=8, kv_heads=4)[:3]
        text = jax.jit(packax.flash_attention).lower(*inputs, mask).as_text()
    assert text.count('"stablehlo.all_gather"') == gathers


def test_gathers_over_hosts_and_inside_a_host_overlap():
    """Private rows first, then what is shared in a host, then what is shared over hosts."""
    plan = greedy(ROWS, (2, 2))
    spec = P(None, ("host", "gpu"))
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    assert 0 < plan.shared[0] < plan.shared[1]
    with jax.set_mesh(mesh_of(2, 2, axes=("host", "gpu"))):
        mask = mask_of(EXPRESSION, plan, sharding)
        function = functools.partial(results, gather_head_groups=1)
        forward, backward = of_rank(function, *tensors(), mask)
    name = ALL.format("forward")
    private, inner, outer = 0, 1, 2
    # Keys and values: first inside the host, then over hosts and inside.
    steps = {inner: (0, 1), outer: (2, 3, 4, 5)}
    assert len(forward.named[name]) == 3 and len(forward.named["all_gather"]) == 6
    for part, gathers in steps.items():
        for gather in gathers:
            assert forward.waits(name, part, "all_gather", gather)
            assert not forward.waits("all_gather", gather, name, private)
    assert not any(forward.waits(name, inner, "all_gather", n) for n in steps[outer])
    assert forward.waits(name, inner, name, private)
    assert forward.waits(name, outer, name, private)

    half, name = SOME.format("backward"), ALL.format("backward")
    assert len(backward.named[half]) == len(backward.named[name]) == 2
    assert len(backward.named["all_gather"]) == len(backward.named["reduce_scatter"]) == 6
    for part in (0, 1):  # the shared parts; then the second half of private rows
        assert backward.waits(name, part, half, 0)
    for scatter, part in ((0, 0), (1, 0), (2, 1), (3, 1)):
        assert backward.waits("reduce_scatter", scatter, name, part)
        if scatter < 4:
            assert backward.waits_for_operands(half, 1, "reduce_scatter", scatter)


@pytest.mark.parametrize("groups", some([1, 2], 1))
def test_collectives_move_what_the_plan_says(groups):
    """Read from the compiled program, forward and backward: shared rows of keys and values and
    their gradients, once each, and nothing else."""
    plan = greedy(ROWS, 4)
    mesh = mesh_of(4, axes=("context",))
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(EXPRESSION, sharding=CONTEXT, plan=plan)
        inputs = placed(mesh, tensors(), CONTEXT)
        function = functools.partial(results, gather_head_groups=groups)
        lowered = jax.jit(function).lower(*inputs, mask)
    of_row = BATCH * KV_HEADS * 2 * DIM  # keys and values
    text = lowered.as_text()
    assert text.count('"stablehlo.all_gather"') == 4  # forward and backward
    assert text.count('"stablehlo.reduce_scatter"') == 2
    compiled = collectives(lowered.compile().as_text())
    moved = {what: sum(n for name, n in compiled if name == what) for what, _ in compiled}
    assert set(moved) == {"all-gather", "reduce-scatter"}, compiled
    gathered = (plan.fetched + plan.shared) * of_row  # own shared rows and those of others
    # The CPU compilers of older jax gather once for both passes.
    again = 2 if jax.__version_info__ >= (0, 11) else 1
    assert moved["all-gather"] in (gathered * 2, gathered * again)
    assert moved["reduce-scatter"] == plan.shared * of_row


def test_kernels_of_both_parts_are_in_the_program_for_cuda(extension):
    """In the lowered text: all heads of all rows, then the shared rows; the backward runs the
    private rows in two halves around these."""
    plan = greedy(ROWS, 4)
    shapes = [jax.ShapeDtypeStruct((BATCH, LENGTH, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = mask_of(EXPRESSION, plan)

        def loss(*x):
            out = packax.flash_attention(*x, gather_head_groups=1)
            return out.astype(jnp.float32).sum()

        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes, mask)
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
