"""Local plans of other documents than the mask's never give a wrong number.

Such a plan splits documents of the mask whose keys no rank gathers. If the host can tell, all keys
are gathered; otherwise the program compares checksums, and results are NaN.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import CONTEXT, LENGTH, assert_same, in_order, mesh_of, moved, results, tensors
from local_packings import EXPRESSION, ROWS
from local_plans import greedy
from tiers import some

OTHER = np.broadcast_to(np.repeat(np.arange(16), 64), ROWS.shape)  # 4 ranks share nothing


@functools.cache
def one_device():
    return jax.jit(results)(*tensors(), packax.create_attention_mask(EXPRESSION))


def run(plan, ids, *inputs):
    """Results in sequence order."""
    expression = packax.causal() & packax.documents(ids)
    mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
    return in_order(plan, results(*moved(plan, inputs), mask, gather_head_groups=1))


def plans_of_other_documents():
    return {
        "nothing shared": greedy(OTHER, 4),
        "a shared part": greedy(OTHER, 4, shared=128),
        "context_plan": packax.context_plan(
            packax.causal() & packax.documents(OTHER), ranks=4, kind="local", shared=0.5
        ),
    }


@pytest.mark.parametrize("name", some([*plans_of_other_documents()], 1))
def test_where_the_host_knows_all_keys_are_gathered(name):
    plan = plans_of_other_documents()[name]
    assert plan.shared < LENGTH // 4
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        got = jax.block_until_ready(jax.jit(functools.partial(run, plan, ROWS))(*tensors()))
    assert_same(got, one_device())


@pytest.mark.parametrize(
    "name,known", some(itertools.product(plans_of_other_documents(), ["nothing", "ids"]), 2)
)
def test_where_only_the_device_knows_results_are_nan(name, known):
    """Every row of the output in every head, and all gradients, so a loss is NaN."""
    plan = plans_of_other_documents()[name]
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        if known == "ids":
            got = jax.jit(lambda plan, *x: run(plan, ROWS, *x))(plan, *tensors())
        else:
            got = jax.jit(run)(plan, jnp.asarray(ROWS), *tensors())
        out, _, *gradients = (np.asarray(x) for x in jax.block_until_ready(got))
    assert np.isnan(out).any(axis=-1).all()
    tokens = ROWS != -1
    for gradient in gradients:
        assert np.isnan(gradient[tokens]).all()


def test_rows_of_the_batch_are_apart():
    """The plan does not match in one batch row: the others are exact."""
    ids = ROWS.copy()
    ids[2, 700:] = ids[2, 300]
    plan = greedy(ids, 4, shared=greedy(ROWS, 4).shared)
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        got = jax.jit(run)(plan, jnp.asarray(ROWS), *tensors())
        got = [np.asarray(x) for x in jax.block_until_ready(got)]
    assert np.isnan(got[0][2]).any(axis=-1).all()
    assert_same([np.delete(x, 2, 0) for x in got], [np.delete(x, 2, 0) for x in one_device()])


def test_a_plan_that_is_known_to_be_right_is_not_checked():
    plan = greedy(ROWS, 4)
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = jax.eval_shape(
            lambda: packax.create_attention_mask(EXPRESSION, sharding=CONTEXT, plan=plan)
        )
    assert mask.private_part is not None and mask.plan_mismatch is None


def test_the_log_sum_exp_is_nan_too():
    plan = greedy(OTHER, 4)

    @jax.jit
    def attend(plan, ids, *x):
        mask = packax.create_attention_mask(packax.documents(ids), sharding=CONTEXT, plan=plan)
        return packax.flash_attention(*x, mask, return_lse=True)[1]

    with jax.set_mesh(mesh_of(4, axes=("context",))):
        assert np.isnan(attend(plan, jnp.asarray(ROWS), *tensors()[:3])).all()
