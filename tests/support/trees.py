"""Random packed trees, and what they mean, said by walking up from every token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import packax


class Tree(NamedTuple):
    ids: np.ndarray  # (S,)
    parents: np.ndarray  # (N,)


def random_tree(seed: int, length: int, segments: int) -> Tree:
    """In depth-first order: deep, wide or mixed, of several roots, with empty segments, now and
    then with padding anywhere."""
    rng = np.random.default_rng(seed)
    parents, path = [-1], [0]
    stays = rng.choice([0.1, 0.5, 0.95])  # how often a segment goes on below the one before
    for n in range(1, segments):
        depth = len(path) if rng.random() < stays else int(rng.integers(0, len(path) + 1))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(n)
    share = rng.dirichlet(np.full(segments, rng.choice([0.1, 1.0, 10.0])))
    ids = np.repeat(np.arange(segments), rng.multinomial(length, share))
    padded = rng.random(length) < rng.choice([0.0, 0.0, 0.1])
    if rng.random() < 0.3:
        padded[length - int(rng.integers(0, length // 2 + 1)) :] = True
    return Tree(np.where(padded, -1, ids).astype(np.int32), np.asarray(parents, np.int32))


def batch_of_trees(seed: int, batch: int, length: int, segments: int) -> Tree:
    trees = [random_tree(seed * 1000 + n, length, segments) for n in range(batch)]
    return Tree(*(np.stack(x) for x in zip(*trees, strict=True)))


def attended(tree: Tree) -> np.ndarray:
    """(S, S): row i is in the segment of key j or below it."""
    ids, parents = tree
    path = np.zeros((len(parents) + 1, len(parents) + 1), bool)
    for n, parent in enumerate(parents):
        path[n, n] = True
        while parent != -1:
            path[n, parent] = True
            parent = parents[parent]
    return path[np.ix_(ids, ids)]  # padding is the last segment, which none is above or below


def depths(allowed: np.ndarray) -> np.ndarray:
    """How many earlier tokens each one attends, of `attended`."""
    return np.tril(allowed, -1).sum(-1)


# What may stand beside a tree, and what it says of the depths of a row and a key.
BESIDE = {
    "alone": (None, lambda i, j: True),
    "causal": (packax.causal, lambda i, j: j <= i),
    "window": (lambda: packax.sliding_window(9), lambda i, j: (j <= i) & (i - j <= 9)),
    "window both ways": (
        lambda: packax.sliding_window(7, 3),
        lambda i, j: (j - i <= 3) & (i - j <= 7),
    ),
    "ahead": (lambda: packax.sliding_window(None, 5), lambda i, j: j - i <= 5),
    "chunked": (
        lambda: packax.causal() & packax.chunked(6),
        lambda i, j: (j <= i) & (i // 6 == j // 6),
    ),
    "prefix": (lambda: packax.prefix(11), lambda i, j: (j <= i) | (j < 11)),
    "union": (
        lambda: (packax.causal() & packax.chunked(8)) | packax.sliding_window(4),
        lambda i, j: (j <= i) & ((i // 8 == j // 8) | (i - j <= 4)),
    ),
}


def expression(tree: Tree, beside: str = "causal"):
    of = packax.tree(*tree)
    make = BESIDE[beside][0]
    return of if make is None else of & make()


def meaning(tree: Tree, beside: str = "causal") -> np.ndarray:
    """(S, S) of one tree, or (B, S, S)."""
    if tree.ids.ndim == 2:
        return np.stack([meaning(Tree(*x), beside) for x in zip(*tree, strict=True)])
    allowed = attended(tree)
    depth = depths(allowed)
    return allowed & BESIDE[beside][1](depth[:, None], depth[None, :])
