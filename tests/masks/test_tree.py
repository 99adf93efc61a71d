"""tree and shared_prefix: what they mean, the arrays of their masks, and what they refuse.

Guards against a row that attends a sibling or misses an ancestor, a depth that is not that of the
path, a block that is visited in vain or called full and is not, and arrays that are no trees and
are taken for one.
"""

from __future__ import annotations

import functools

import jax
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


@pytest.mark.parametrize("beside", ["alone", "causal", "wide window"])
def test_what_kernels_attend(beside):
    """Lists, flags and ranges together, of both passes; the lists of whole paths are exact."""
    length = 460
    tree = trees.batch_of_trees(2, 12, length, SEGMENTS)
    tree.ids[0] = np.repeat(np.arange(4), 115)  # full blocks
    tree.parents[0] = [-1, 0, 1, 0, *range(3, SEGMENTS - 1)]
    mask, _ = built(*tree, beside)
    allowed = trees.meaning(tree, beside)
    for got in trees.as_kernels_see_it(mask):
        np.testing.assert_array_equal(got, allowed)
    lists = np.asarray(mask.q_block_lists), np.asarray(mask.kv_block_lists)
    assert lists[0][0, 0, :, 1].sum() > 0 and lists[1][0, 0, :, 1].sum() > 0
    flags = np.asarray(mask.q_blocks)[:, 4]
    assert (flags & 1).any() and not (flags & 1).all()
    if "window" not in beside:
        padded = np.pad(allowed, ((0, 0), (0, -length % 128), (0, -length % 128)))
        tiles = padded.reshape(12, 4, 128, 8, 64).any((2, 4)).sum(2)
        np.testing.assert_array_equal(lists[0][:, 0, :, :2].sum(2), tiles)
        tiles = padded.reshape(12, 8, 64, 4, 128).any((2, 4)).sum(1)
        np.testing.assert_array_equal(lists[1][:, 0, :, :2].sum(2), tiles)


@pytest.mark.parametrize("name", trees.LARGE)
def test_blocks_of_siblings_are_skipped(name):
    """What is visited is what has a pair, at the sizes that models train on."""
    tree = trees.LARGE[name]()
    mask, _ = jax.jit(
        lambda *x: (packax.create_attention_mask(packax.tree(*x) & packax.causal()), 0)
    )(*tree)
    for visited, attended in zip(
        trees.blocks_visited(mask), trees.blocks_attended(tree), strict=True
    ):
        assert attended <= visited <= 1.15 * attended
    full = int(np.asarray(mask.q_block_lists)[..., 1].sum())
    assert full > 0.85 * trees.blocks_visited(mask)[0]
