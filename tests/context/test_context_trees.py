"""Packed trees under context parallelism: every rank has the lists of its rows.

Guards against a row's index on a rank used as its index in the tree, lists of another rank's rows,
and a plan that counts all preceding tokens as the path.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import trees
from context import (
    BATCH,
    HEADS,
    LENGTH,
    assert_same,
    in_order,
    mesh_of,
    moved,
    placed,
    results,
    tensors,
)
from jax.sharding import PartitionSpec as P
from tiers import some

SHARDING = packax.AttentionSharding(
    query=P("data", "context", "tensor"), key_value=P("data", "context", "tensor")
)
TREE = trees.batch_of_trees(4, BATCH, LENGTH, 9)
CHOSEN = np.random.default_rng(3).random((1, HEADS, LENGTH // 64, LENGTH // 32)) < 0.6
JOINED = {
    "causal": packax.causal(),
    "window": packax.sliding_window(150, 3),
    "blocks": packax.causal() & packax.masks.block_sparse(CHOSEN, (64, 32)),  # differ between ranks
}


def expression_of(joined, batch=BATCH):
    tree = packax.masks.tree(TREE.ids[:batch], TREE.parents[:batch])
    return tree & JOINED[joined]


@functools.cache
def one_device(joined, batch):
    mask = packax.create_attention_mask(expression_of(joined, batch))
    return jax.jit(results)(*tensors(), mask)


@pytest.mark.parametrize(
    "joined,sizes,kind,plan,batch",
    some(
        [
            ("blocks", (1, 4, 2), "Auto", "balanced", BATCH),
            ("window", (2, 2, 2), "Explicit", "zigzag", BATCH),
            ("causal", (1, 8, 1), "Auto", "local", 1),
            ("window", (2, 4, 1), "Auto", None, 1),
        ],
        *(3,),
    ),
)
def test_results_are_those_of_one_device(joined, sizes, kind, plan, batch):
    mesh = mesh_of(*sizes, kind=kind, axes=("data", "context", "tensor"))
    expression = expression_of(joined, batch)
    if plan is not None:
        shared = {"shared": 1.0} if plan == "local" else {}
        plan = packax.context_plan(expression, ranks=sizes[1], kind=plan, **shared)

    @jax.jit
    def run(expression, plan, *x):
        mask = packax.create_attention_mask(expression, sharding=SHARDING, plan=plan)
        return results(*x, mask, gather_head_groups=1)

    with jax.set_mesh(mesh):
        inputs = placed(mesh, moved(plan, tensors()), SHARDING)
        got = in_order(plan, jax.device_get(run(expression, plan, *inputs)))
    assert_same(got, one_device(joined, batch))


@pytest.mark.parametrize("joined", some(trees.JOINED, 0, 4))
def test_plans_weigh_rows_by_what_they_attend(joined):
    """On the host and on the device; a row's path has as many keys as its depth."""
    tree = trees.Tree(TREE.ids[:2], TREE.parents[:2])
    attended = trees.meaning(tree, joined).sum(2)
    expressions = (
        trees.expression(tree, joined),
        trees.expression(trees.Tree(*map(jnp.asarray, tree)), joined),
    )
    for expression in expressions:
        keys = packax._src.masks.planning._keys(expression, LENGTH, LENGTH)
        np.testing.assert_array_equal(keys, attended)
        assert isinstance(keys, jax.Array) == (expression is expressions[1])


def test_a_plan_balances_answers():
    """For a prompt and its answers, ranks get equal work with "balanced", but not with "zigzag"."""
    tree = trees.prompt_and_answers(8192, 16, 512)
    expression = packax.masks.tree(*tree) & packax.causal()
    keys_per_row = packax.masks.tree_positions(expression) + 1

    def most(kind):
        plan = packax.context_plan(expression, ranks=4, kind=kind)
        load = np.asarray(plan.permute(keys_per_row, 0)).reshape(4, -1).sum(1, dtype=np.int64)
        return load.max() / load.mean()

    assert most("balanced") < 1.03 < most("zigzag")


def test_expressions_joined_with_a_tree_count_too():
    """Their work is counted by the blocks that the mask visits."""
    tree = trees.Tree(TREE.ids[:1], TREE.parents[:1])
    index = np.arange(LENGTH)
    expression = trees.expression(tree) & packax.masks.ranges(index - 100, index + 1)
    keys = np.asarray(packax._src.masks.planning._keys(expression, LENGTH, LENGTH))
    assert keys.shape == (1, LENGTH) and keys.max() <= 100 + 4 * 64
