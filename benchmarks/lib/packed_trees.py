"""Packed trees for mask_cases.py: a prompt with answers as in GRPO, a binary search tree, and the
same trees as documents, one for each path from a root to a leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class PackedTree:
    """The lengths of segments in depth-first order, and their parents, -1 for a root."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def tables(self) -> dict[str, np.ndarray]:
        """The segment of each token, the parents, and the end of each token's subtree."""
        last = list(range(len(self.lengths)))
        for n in reversed(last.copy()):
            if self.parents[n] >= 0:
                last[self.parents[n]] = max(last[self.parents[n]], last[n])
        segments = np.repeat(np.arange(len(self.lengths)), self.lengths)
        end = np.cumsum(self.lengths)[last][segments]
        made = {"segments": segments, "parents": np.asarray(self.parents), "end": end}
        return {name: x.astype(np.int32) for name, x in made.items()}

    def depths(self) -> list[int]:
        """The number of tokens before each segment on its path."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + self.lengths[parent])
        return found

    def pairs(self) -> int:
        """The attended pairs of one head: each token attends to its path."""
        both = zip(self.depths(), self.lengths, strict=True)
        return sum(depth * own + own * (own + 1) // 2 for depth, own in both)

    def paths(self) -> list[int]:
        """The lengths of the paths from a root to a leaf, as documents without a tree."""
        leaves = set(range(len(self.parents))) - set(self.parents)
        return [self.depths()[n] + self.lengths[n] for n in sorted(leaves)]


def prompt_and_answers(prompt: int, answers: int, length: int) -> PackedTree:
    return PackedTree((prompt, *answers * [length]), (-1, *answers * [0]))


def binary(levels: int, length: int) -> PackedTree:
    parents: list[int] = []

    def grow(parent: int, below: int) -> None:
        own = len(parents)
        parents.append(parent)
        for _ in range(2 * (below > 1)):
            grow(own, below - 1)

    grow(-1, levels)
    return PackedTree((length,) * len(parents), tuple(parents))


def as_documents(case: Any) -> Any:
    """The case with the tree's paths as packed documents, which repeat shared tokens."""
    lengths = case.tree.paths()
    ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return dataclasses.replace(
        case, seq=len(ids), tree=None, mask=lambda p, _: p.causal() & p.documents(ids)
    )
