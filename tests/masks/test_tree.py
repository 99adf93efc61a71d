"""tree and shared_prefix: what they mean, the arrays of their masks, and what they refuse.

Guards against a row that attends a sibling or misses an ancestor, a depth that is not that of the
path, a block that is visited in vain or called full and is not, and arrays that are no trees and
are taken for one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import trees

LENGTH, SEGMENTS = 149, 12


@functools.partial(jax.jit, static_argnames="beside")
def built(ids, parents, beside):
    mask = packax.create_attention_mask(trees.expression(trees.Tree(ids, parents), beside))
    return mask, mask.as_array()


@pytest.mark.parametrize("beside", trees.BESIDE)
def test_definition(beside):
    """as_array, by squaring, is what walking up says."""
    for seed in range(6):
        tree = trees.random_tree(seed, 41, 9)
        allowed = trees.meaning(tree, beside)
        got = trees.expression(tree, beside).as_array(41, 41)
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, allowed)
        depth = trees.depths(trees.attended(tree))
        of = packax.depth_positions(packax.tree(*tree))
        assert isinstance(of, np.ndarray) and of.dtype == np.int32
        np.testing.assert_array_equal(of, depth)


def check_masks(seed, beside, batch):
    tree = trees.batch_of_trees(seed, batch, LENGTH, SEGMENTS)
    mask, got = built(*tree, beside)
    np.testing.assert_array_equal(got, trees.meaning(tree, beside))
    return mask


@pytest.mark.parametrize("beside", trees.BESIDE)
def test_masks(beside):
    check_masks(1, beside, 24)
