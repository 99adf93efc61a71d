"""Several masks for one batch, and expressions made from arrays that are already permuted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import ROWS, mesh_of, run_to_end
from jax.sharding import PartitionSpec as P
from tiers import some

SHARDING = packax.AttentionSharding(P("data", "context"), P("data", "context"))
CAUSAL, WINDOW = packax.causal(), packax.sliding_window(100)
EXPRESSION = CAUSAL & packax.documents(ROWS)
shard_batch = functools.partial(packax.context.shard_batch, sharding=SHARDING)
build = functools.partial(packax.create_attention_mask, sharding=SHARDING)


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(mesh_of(2, 4, axes=("data", "context"))):
        yield


@pytest.mark.parametrize("of", some([tuple, list, dict], 2))
def test_a_mask_for_each_expression(of):
    """Equal to the masks of the separate steps, with the plan of the first expression."""
    both = {"global": EXPRESSION, "a window": WINDOW & packax.documents(ROWS)}
    given = both if of is dict else of(both.values())
    permuted, masks, plan = jax.jit(lambda ids: shard_batch(ids, given))(ROWS)
    alone = packax.context_plan(EXPRESSION, sharding=SHARDING)
    np.testing.assert_array_equal(plan.order, alone.order)
    np.testing.assert_array_equal(permuted, alone.permute(ROWS))
    if of is dict:
        masks = tuple(masks[name] for name in both)
    assert isinstance(masks, tuple)
    for mask, expression in zip(masks, both.values(), strict=True):
        expected = build(expression, plan=alone)
        np.testing.assert_array_equal(mask.as_array(), expected.as_array())
        assert mask.fetched == expected.fetched


@pytest.mark.parametrize("jit", [False, True])
def test_a_permuted_array_is_refused(jit):
    """By identity, so also in a traced program, where values are unknown."""

    def step(ids):
        expression = CAUSAL & packax.documents(ids)
        permuted, _, plan = shard_batch({"ids": ids, "index": ids + 1}, expression)
        again = WINDOW & packax.documents(permuted["ids"])
        for call in (
            lambda: build(again, plan=plan),
            lambda: packax.context_plan(again, sharding=SHARDING),
            lambda: build(CAUSAL & packax.documents(plan.permute(ids)), plan=plan),
        ):
            with pytest.raises(ValueError, match="segment_ids of the expression was already perm"):
                call()
        with pytest.raises(ValueError, match="batch was already permuted by a plan: pass it in"):
            shard_batch(permuted, expression)
        with pytest.raises(ValueError, match="permuted by a plan, but the mask has no plan"):
            build(again)
        build(packax.documents(permuted["ids"]))
        build(CAUSAL & packax.documents(permuted["ids"], positions=permuted["index"]))
        build(again_in_order(plan, permuted["ids"]), plan=plan)
        return permuted

    def again_in_order(plan, ids):
        return WINDOW & packax.documents(plan.unpermute(ids))

    (jax.jit(step) if jit else step)(jnp.asarray(ROWS))


def test_numpy_arrays_of_another_dtype_are_refused():
    plan = packax.context_plan(EXPRESSION, ranks=4)
    ids = plan.permute(ROWS.astype(np.int64))
    with pytest.raises(ValueError, match="already permuted"):
        build(CAUSAL & packax.documents(ids), plan=plan)


@pytest.mark.parametrize("kind", ["balanced", "zigzag", "local"])
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_values_tell_outside_jit(kind, of):
    """Where the array is another one: a copy, or loaded from a file."""
    plan = packax.context_plan(CAUSAL & packax.documents(of(ROWS)), ranks=4, kind=kind)
    ids = plan.permute(of(ROWS)) + 0
    with pytest.raises(ValueError, match=r"row [0-3] of the batch the ids in the mask"):
        build(WINDOW & packax.documents(ids), plan=plan)
    build(WINDOW & packax.documents(of(ROWS) + 0), plan=plan)
    build(WINDOW & packax.documents(of(ROWS)[::-1]), plan=plan)  # another batch, in order


@pytest.mark.parametrize("traced", ["ids", "ids and plan"])
def test_values_tell_inside_jit_under_debug_checks(traced):
    plan = packax.context_plan(EXPRESSION, ranks=4)
    ids = plan.permute(ROWS)

    def lengths(ids, of):
        return build(WINDOW & packax.documents(ids), plan=of).kv_end

    if traced == "ids":
        step = jax.jit(lambda ids, _: lengths(ids, plan))
    else:
        step = jax.jit(lambda ids, order: lengths(ids, order))
    run_to_end(lambda: step(ids, plan))  # the checks are off
    with packax.context.debug_checks():
        run_to_end(lambda: step(ROWS, plan))
        errors = ValueError, jax.errors.JaxRuntimeError
        with pytest.raises(errors, match="already permuted by the plan"):
            run_to_end(lambda: step(ids, plan))


def test_one_rank_permutes_nothing():
    with jax.set_mesh(mesh_of(1, 1, axes=("data", "context"))):
        permuted, _, plan = shard_batch(jnp.asarray(ROWS), EXPRESSION)
        build(WINDOW & packax.documents(permuted), plan=plan)
        shard_batch(permuted, WINDOW & packax.documents(permuted))
