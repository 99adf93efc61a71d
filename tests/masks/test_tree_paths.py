"""path_predecessors: the previous token on the path, by the definition, in NumPy and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.masks import path_predecessors


def by_definition(expression, length):
    """A token attends to its path under causal(); the predecessor is the last other token of it."""
    dense = np.asarray((packax.causal() & expression).as_array(length, length))
    dense = dense & ~np.eye(length, dtype=bool)
    return np.where(dense.any(-1), length - 1 - dense[..., ::-1].argmax(-1), -1)


def random_tree(rng, length=48, segments=12):
    """Depth-first, with empty segments, several roots, and padding anywhere."""
    parents, path = [], []
    for n in range(segments):
        depth = int(rng.integers(0, len(path) + 1))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(n)
    ids = np.sort(rng.choice(segments, length))
    ids[rng.random(length) < 0.15] = -1
    return ids, np.array(parents)


def test_trees():
    rng = np.random.default_rng(0)
    ids, parents = (np.stack(x) for x in zip(*(random_tree(rng) for _ in range(6)), strict=True))
    found = path_predecessors(packax.masks.tree(ids, parents))
    assert isinstance(found, np.ndarray) and found.dtype == np.int32
    np.testing.assert_array_equal(
        found, by_definition(packax.masks.tree(ids, parents), ids.shape[1])
    )
    traced = jax.jit(lambda *x: path_predecessors(packax.masks.tree(*x) & packax.causal()))
    np.testing.assert_array_equal(traced(jnp.asarray(ids), jnp.asarray(parents)), found)


def test_shared_prefixes():
    groups = np.repeat([4, 4, 4, 2, 2, -1, 4], [3, 2, 2, 1, 2, 2, 2])
    answers = np.repeat([-1, 0, 1, -1, 5, 0, 0], [3, 2, 2, 1, 2, 2, 2])
    expression = packax.masks.shared_prefix(groups, answers)
    found = path_predecessors(expression)
    np.testing.assert_array_equal(found, by_definition(expression, len(groups)))
    assert found.tolist() == [-1, 0, 1, 2, 3, 2, 5, -1, 7, 8, -1, -1, -1, 12]


def test_it_goes_with_depth_positions():
    ids, parents = random_tree(np.random.default_rng(3))
    expression = packax.masks.tree(ids, parents)
    depth, before = packax.masks.tree_positions(expression), path_predecessors(expression)
    has = before >= 0
    np.testing.assert_array_equal(depth[before[has]], depth[has] - 1)
    assert (depth[~has] == 0).all()


def test_no_tokens_and_no_tree():
    assert path_predecessors(packax.masks.tree(np.zeros((2, 0), int), [-1])).shape == (2, 0)
    with pytest.raises(ValueError, match=r"must contain tree\(...\) or shared_prefix"):
        path_predecessors(packax.causal())
    traced = jax.jit(lambda *x: path_predecessors(packax.masks.tree(*x)))
    assert traced(jnp.array([1, 0]), jnp.array([-1, 0])).tolist() == [-1, -1]  # not depth-first
