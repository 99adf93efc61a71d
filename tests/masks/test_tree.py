"""tree and shared_prefix: their meaning, the arrays of their masks, and what they reject.

Guards against a row that attends to a sibling or misses an ancestor, a depth that differs from the
path's length, a block visited without need or marked full and not full, and arrays accepted as a
tree that are none.
"""

from __future__ import annotations

import functools
import operator
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import trees
from calls import Call
from packax.masks import path_predecessors
from tiers import some

INTERVALS = ["full", "causal", "window 200 9"]


@pytest.mark.parametrize("interval", some(INTERVALS, 2))
def test_what_kernels_attend(interval):
    """Lists, flags and ranges together, of both passes; lists of whole paths are exact."""
    length = 460
    call = Call(interval=interval, selector="tree", lengths=f"{length}x{length}", batch=12)
    a = call.arrays()
    a["segments"][0] = np.repeat(np.arange(4), 115)  # gives full blocks
    a["parents"][0, :4] = [-1, 0, 1, 0]
    mask, allowed = call.built(a), call.defined(a)[:, 0]
    for got in trees.as_kernels_see_it(mask):
        np.testing.assert_array_equal(got, allowed)
    lists = np.asarray(mask.q_block_lists), np.asarray(mask.kv_block_lists)
    assert lists[0][0, 0, :, 1].sum() > 0 and lists[1][0, 0, :, 1].sum() > 0
    flags = np.asarray(mask.q_blocks)[:, 4]
    assert (flags & 1).any() and not (flags & 1).all()
    if "window" not in interval:
        padded = np.pad(allowed, ((0, 0), (0, -length % 128), (0, -length % 128)))
        tiles = padded.reshape(12, 4, 128, 8, 64).any((2, 4)).sum(2)
        np.testing.assert_array_equal(lists[0][:, 0, :, :2].sum(2), tiles)
        tiles = padded.reshape(12, 8, 64, 4, 128).any((2, 4)).sum(1)
        np.testing.assert_array_equal(lists[1][:, 0, :, :2].sum(2), tiles)


@pytest.mark.parametrize("name", some(trees.LARGE, 0))
def test_blocks_of_siblings_are_skipped(name):
    """At sizes used in training, hardly more blocks are visited than have a pair."""
    tree = trees.LARGE[name]()
    mask, _ = jax.jit(
        lambda *x: (packax.create_attention_mask(packax.masks.tree(*x) & packax.causal()), 0)
    )(*tree)
    for visited, attended in zip(
        trees.blocks_visited(mask), trees.blocks_attended(tree), strict=True
    ):
        assert attended <= visited <= 1.15 * attended
    full = int(np.asarray(mask.q_block_lists)[..., 1].sum())
    assert full > 0.85 * trees.blocks_visited(mask)[0]


def test_shared_prefix():
    """Runs of ids, with padding left out, equal a tree of the same segments."""
    groups = [7, 7, 7, -1, 7, 7, 7, 7, 3, 3, 3, -1, 3, 7, 7, 7]
    answers = [-1, -1, 4, 9, 4, 4, 5, 4, 2, 2, 3, 0, 3, -1, -1, 1]
    segments = [0, 0, 1, -1, 1, 1, 2, 3, 4, 4, 5, -1, 5, 6, 6, 7]
    tree = packax.masks.tree(segments, [-1, 0, 0, 0, -1, -1, -1, 6]) & packax.causal()
    expression = packax.masks.shared_prefix(groups, answers) & packax.causal()
    traced = packax.masks.shared_prefix(jnp.array([groups]), jnp.array(answers)) & packax.causal()

    @jax.jit
    def arrays():
        built = packax.create_attention_mask(expression).as_array()
        return expression.as_array(16, 16), built[0], traced.as_array(16, 16)[0]

    for got in arrays():
        np.testing.assert_array_equal(got, tree.as_array(16, 16))
    depth = packax.masks.tree_positions(tree)
    np.testing.assert_array_equal(packax.masks.tree_positions(expression), depth)
    assert packax.masks.tree_positions(traced).shape == (1, 16)


@pytest.mark.parametrize("kind", ["tree", "tree and documents"])
def test_spans_end_with_documents_and_segments(kind):
    call = Call(interval="spans", selector=kind, lengths="149x149")
    arrays = call.arrays()
    for order in (0, 1):
        first, *others = [*call.expression(arrays).parts()][:: 1 - 2 * order]
        expression = functools.reduce(operator.and_, others, first)
        for got in (
            expression.as_array(149, 149),
            packax.create_attention_mask(expression).as_array(),
        ):
            np.testing.assert_array_equal(got, call.defined(arrays)[:, 0])


def test_a_span_ends_where_a_document_reappears():
    documents, tree = packax.documents([3, 5, 3]), packax.masks.tree([0, 0, 0], [-1])
    expression = packax.masks.spans([0, 0, 0]) & documents & tree
    np.testing.assert_array_equal(expression.as_array(3, 3), [[1, 0, 0], [0, 1, 0], [1, 0, 1]])


BROKEN = {  # (segment_ids, parents), and a part of the error
    "cycle": ([0, 1, 2], [-1, 2, 1], "of segment 1 is 2"),
    "itself": ([0, 1], [-1, 1], "of segment 1 is 1"),
    "below -1": ([0], [-2], "of segment 0 is -2"),
    "no such segment": ([0, 2], [-1, 0], "from 0 to 1 .*, but holds 2"),
    "other padding": ([0, -2], [-1, 0], "holds -2"),
    "decreasing": (
        [0, 2, -1, 1],
        [-1, 0, 0],
        "token 3 of row 0 is in segment 1, after .* 2",
    ),
    "breadth first": ([0, 1, 2, 3], [-1, 0, 0, 1], "segment 3 is below segment 1, and segment 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_tree(name):
    *arrays, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        packax.masks.tree(*arrays)


def test_what_is_no_tree_and_is_not_known():
    """When traced, a batch row that is not a tree attends to nothing; the other rows are
    unaffected."""
    broken = [*BROKEN.values(), ([0, 0, 1, 1], [-1, 0, -1, -1], "")]
    ids = np.array([[*x, *[-1] * (4 - len(x))] for x, _, _ in broken])
    parents = np.array([[*x, *[-1] * (4 - len(x))] for _, x, _ in broken])
    ids[list(BROKEN).index("no such segment"), 3] = 7

    @jax.jit
    def results_of(*tree):
        expression = packax.masks.tree(*tree)
        mask = packax.create_attention_mask(expression)
        return mask.as_array(), expression.as_array(4, 4), packax.masks.tree_positions(expression)

    attended, meant, depth = map(np.asarray, results_of(ids, parents))
    np.testing.assert_array_equal(attended, meant)
    assert not attended[:-1].any() and not depth[:-1].any()
    np.testing.assert_array_equal(attended[-1].sum(1), [2, 2, 4, 4])
    np.testing.assert_array_equal(depth[-1], [0, 1, 2, 3])


def test_a_prompt_behind_an_answer():
    ids, answers = [0, 0, 0, 1], [-1, 2, -1, -1]
    with pytest.raises(ValueError, match=r"prompt .* after an answer of the same group, in row"):
        packax.masks.shared_prefix(ids, answers)

    @jax.jit
    def masks(ids):
        expression = packax.masks.shared_prefix(ids, answers)
        return expression.as_array(4, 4), packax.create_attention_mask(expression).as_array()

    for mask in masks(jnp.asarray(ids)):
        assert not np.asarray(mask).any()


TREE = packax.masks.tree([0, 0, 1], [-1, 0])


@pytest.mark.parametrize("deep", [False, True])
def test_the_dense_array_of_4096_rows_takes_little_memory(deep):
    length = 4096
    index = np.arange(length, dtype=np.int32)
    if deep:  # a chain of segments of one token
        expression, want = packax.masks.tree(index, index - 1), np.tri(length, dtype=bool)
    else:  # an answer for every token of the second half
        half = length // 2
        expression = packax.masks.shared_prefix(0 * index, np.maximum(index - half, -1))
        want = (index < half) | (index == index[:, None])
        want[:half] = index < half
    tracemalloc.start()
    got = expression.as_array(length, length)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(got, want)
    assert peak < 12 * length**2


def test_text_and_static_fields():
    assert repr(TREE & packax.causal()) == "tree(int32[3], int32[2]) & causal()"
    expression = packax.masks.shared_prefix([0, 0, 0], [-1, 0, 1])
    assert repr(expression) == "shared_prefix(int32[3], int32[3])"
    mask = packax.create_attention_mask(expression)
    assert "built from shared_prefix(int32[3], int32[3])>" in repr(mask)
    assert "built from a tree" in repr(jax.tree.map(lambda x: x, mask))
    assert mask.block_size == (1 << 30, 1 << 30)


@pytest.mark.parametrize("kind", ["tree", "shared prefix"])
def test_the_token_before_each_on_its_path(kind):
    """The last other token that it attends to under causal(), with depth one less."""
    call = Call(selector=kind, batch=6)
    arrays = call.arrays()
    expression = call.expression(arrays)
    dense = (packax.causal() & expression).as_array(33, 33) & ~np.eye(33, dtype=bool)
    wanted = np.where(dense.any(-1), 32 - dense[..., ::-1].argmax(-1), -1)
    found = path_predecessors(expression)
    assert isinstance(found, np.ndarray) and found.dtype == np.int32
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(
        jax.jit(lambda a: path_predecessors(call.expression(a) & packax.causal()))(arrays), found
    )
    depth = packax.masks.tree_positions(expression)
    before = np.take_along_axis(depth, np.maximum(found, 0), 1)
    np.testing.assert_array_equal(depth, np.where(found < 0, 0, before + 1))


def test_paths_of_no_tree():
    assert path_predecessors(packax.masks.tree(np.zeros((2, 0), int), [-1])).shape == (2, 0)
    traced = jax.jit(lambda *x: path_predecessors(packax.masks.tree(*x)))
    assert traced(jnp.array([1, 0]), jnp.array([-1, 0])).tolist() == [-1, -1]  # not depth-first
