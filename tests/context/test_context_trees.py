"""Packed trees under context parallelism: every rank has the lists of its rows.

Guards against a row's index on a rank used as its index in the tree, lists of another rank's rows,
and a plan that counts all preceding tokens as the path.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import trees
from context import (
    BATCH,
    LENGTH,
)
from tiers import some

TREE = trees.batch_of_trees(4, BATCH, LENGTH, 9)


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
