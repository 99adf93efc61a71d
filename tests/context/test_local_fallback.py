"""Plans that keep documents local and do not fit the mask: results equal one device's all the same.

A plan that was made of other segment ids divides documents of the mask whose keys nobody gathers.
Guards against the wrong numbers of that, and against a right plan's program that can gather all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import CONTEXT, LENGTH, assert_same, mesh_of, results, tensors
from local_cases import ROWS, expression_of
from local_plans import greedy
from tiers import some

OTHER = np.broadcast_to(np.repeat(np.arange(32), 32), ROWS.shape)  # fits 4 ranks, sharing nothing


@functools.cache
def one_device():
    return jax.jit(results)(*tensors(), packax.create_attention_mask(expression_of("documents")))


def in_plans_order(plan, inputs, mask):
    """Results in the order of the sequence."""
    *rows, dlse = inputs
    moved = (*plan.permute(tuple(rows)), plan.permute(dlse, 2))
    got = results(*moved, mask, gather_head_groups=1)
    return [plan.unpermute(x, 2 if n == 1 else 1) for n, x in enumerate(got)]


def plans_of_other_documents():
    ids = ROWS.copy()
    ids[2, 700:] = ids[2, 300]  # one row of the batch is enough
    return {
        "nothing shared": greedy(OTHER, 4),
        "a shared part": greedy(OTHER, 4, shared=128),
        "one row": greedy(ids, 4, shared=greedy(ROWS, 4).shared),
        "context_plan": packax.context_plan(
            packax.causal() & packax.documents(OTHER), ranks=4, kind="local", shared=0.5
        ),
    }


@pytest.mark.parametrize(
    "name,known",
    some(
        [
            ("nothing shared", "ids and plan"),
            ("a shared part", "nothing"),
            ("one row", "nothing"),
            ("context_plan", "ids"),
        ],
        0,
        1,
    ),
)
def test_a_plan_of_other_documents(name, known):
    """Known: while the program is traced. The plan is the host's, which has no fallback."""
    plan = plans_of_other_documents()[name]
    assert plan.fallback is None and plan.shared < LENGTH // 4

    def run(plan, ids, *inputs):
        expression = packax.causal() & packax.documents(ids)
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        return in_plans_order(plan, inputs, mask)

    with jax.set_mesh(mesh_of(4, axes=("context",))):
        if known == "ids and plan":
            got = jax.jit(functools.partial(run, plan, ROWS))(*tensors())
        elif known == "ids":
            got = jax.jit(lambda plan, *x: run(plan, ROWS, *x))(plan, *tensors())
        else:
            got = jax.jit(run)(plan, jnp.asarray(ROWS), *tensors())
        got = jax.block_until_ready(got)
    assert_same(got, one_device())


def test_a_right_plan_that_is_known_leaves_no_choice_in_the_program():
    """Also one of fewer documents: those of the mask lie inside the plan's."""
    plan = greedy(ROWS, 4)
    finer = np.where(ROWS < 0, ROWS, ROWS * LENGTH + np.arange(LENGTH) // 50)
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        for ids in (ROWS, finer):
            expression = packax.causal() & packax.documents(ids)
            mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
            assert mask.private_part is not None and mask.fallback is None
            assert "stablehlo.case" not in jax.jit(results).lower(*tensors(), mask).as_text()


def test_a_right_plan_falls_back_nowhere():
    """Found in the program: of the test's own plans, and of the package's."""

    @jax.jit
    def fallback(plan, ids):
        expression = packax.causal() & packax.documents(ids)
        return packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan).fallback

    of_host = packax.context_plan(expression_of("documents"), ranks=2, kind="local", shared=0.75)
    assert of_host.shared < LENGTH // 2
    for plan in (greedy(ROWS, 2, shared=300), of_host):
        with jax.set_mesh(mesh_of(2, axes=("context",))):
            assert not fallback(plan, ROWS).any()


@pytest.mark.parametrize("where", some(["host", "device"], 1))
def test_inputs_of_a_local_plan_through_attention(where):
    """`context_parallel_inputs` to output and gradients in one program; the documents fit."""
    query, key, value, dout, _ = tensors()

    def gradients(batch, mask):
        def attend(*x):
            return packax.flash_attention(*x, mask)

        out, pullback = jax.vjp(attend, *batch[:3])
        return out, *pullback(batch[3])

    @jax.jit
    def run(ids, *batch):
        expression = packax.causal() & packax.documents(ROWS if where == "host" else ids)
        batch, mask, plan = packax.context_parallel_inputs(
            batch, expression, sharding=CONTEXT, kind="local", shared=0.75
        )
        assert mask.private_part is not None
        assert plan.shared == 384 and (plan.fallback is None) == (where == "host")
        return plan.unpermute(gradients(batch, mask)), mask.fallback

    batch = (query, key, value, dout)
    expected = jax.jit(gradients)(batch, packax.create_attention_mask(expression_of("documents")))
    with jax.set_mesh(mesh_of(2, axes=("context",))):
        got, fallback = jax.block_until_ready(run(jnp.asarray(ROWS), *batch))
    assert fallback is None if where == "host" else not fallback.any()
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
