"""Packed trees of training, and what kernels read of the masks of trees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tree(NamedTuple):
    ids: np.ndarray  # (S,)
    parents: np.ndarray  # (N,)


def as_kernels_see_it(mask) -> tuple[np.ndarray, np.ndarray]:
    """Two (B, S, S) masks that the kernels attend: by the lists of row tiles, and of key tiles.

    In a partial block the row ranges apply, and the element check if its flag is set. A full block
    is attended entirely.
    """
    lo, hi = np.asarray(mask.kv_start)[..., None], np.asarray(mask.kv_end)[..., None]
    q_ids, q_pos, kv_pos = (np.asarray(x) for x in (mask.q_ids, mask.q_pos, mask.kv_pos))
    kv_ids = q_ids if mask.kv_ids is None else np.asarray(mask.kv_ids)
    length = mask.kv_len
    index = np.arange(length)
    ranges = (lo <= index) & (index < hi)
    tested = ranges & (q_ids[..., None] == kv_ids[:, None]) & (kv_pos[:, None] <= q_pos[..., None])
    flags = np.asarray(mask.q_blocks)[:, 4] & 1 != 0
    by_rows, by_keys = np.zeros_like(ranges), np.zeros_like(ranges)
    for b in range(len(ranges)):
        for tile, listed in enumerate(np.asarray(mask.q_block_lists)[b, 0]):
            rows = slice(128 * tile, 128 * tile + 128)
            check = flags[b, 2 * tile : 2 * tile + 2].any()
            for n, block in enumerate(listed[2 : 2 + listed[0] + listed[1]]):
                keys = slice(64 * block, 64 * block + 64)
                some = (tested if check else ranges)[b, rows, keys]
                every = np.broadcast_to((lo < hi)[b, rows], some.shape)
                by_rows[b, rows, keys] = every if n >= listed[0] else some
        for tile, listed in enumerate(np.asarray(mask.kv_block_lists)[b, 0]):
            keys = slice(128 * tile, 128 * tile + 128)
            for n, block in enumerate(listed[2 : 2 + listed[0] + listed[1]]):
                rows = slice(64 * block, 64 * block + 64)
                some = (tested if flags[b, block] else ranges)[b, rows, keys]
                by_keys[b, rows, keys] = True if n >= listed[0] else some
    return by_rows, by_keys


def blocks_visited(mask) -> tuple[int, int]:
    """The number of 128 x 64 blocks in the lists of row tiles, and in the lists of key tiles."""
    lists = mask.q_block_lists, mask.kv_block_lists
    rows, keys = (int(np.asarray(x)[..., :2].sum()) for x in lists)
    return rows, keys


def blocks_attended(tree: Tree) -> tuple[int, int]:
    """The same numbers for the blocks with a pair that a causal tree attends, for one batch row."""
    ids, parents = tree
    end = np.zeros(len(ids), np.int64)  # where the subtree of each token ends
    last = np.arange(len(parents))
    for n in reversed(range(len(parents))):
        if parents[n] >= 0:
            last[parents[n]] = max(last[parents[n]], last[n])
    end = np.where(ids < 0, 0, np.searchsorted(ids[ids >= 0], last[ids], "right"))
    assert (ids >= 0).all()  # so that a token's index counts the tokens before it
    index, length = np.arange(len(ids)), len(ids)
    starts = np.arange(0, length, 64)
    of_rows = of_keys = 0
    for first in range(0, length, 128):
        rows = index[first : first + 128, None]
        found = (index[None, : first + 128] <= rows) & (rows < end[None, : first + 128])
        of_rows += np.add.reduceat(found.any(0), starts[starts < first + 128]).astype(bool).sum()
        keys = index[None, first : first + 128]
        found = (keys <= index[first:, None]) & (index[first:, None] < end[first : first + 128])
        of_keys += np.add.reduceat(found.any(1), starts[starts >= first] - first).astype(bool).sum()
    return int(of_rows), int(of_keys)


def of_lengths(lengths, parents) -> Tree:
    return Tree(np.repeat(np.arange(len(lengths)), lengths).astype(np.int32), np.asarray(parents))


def prompt_and_answers(prompt: int, answers: int, length: int) -> Tree:
    return of_lengths([prompt] + answers * [length], [-1] + answers * [0])


def binary(depth: int, length: int) -> Tree:
    """A full binary tree in depth-first order, with `depth` levels."""
    parents: list[int] = []

    def grow(parent: int, levels: int) -> None:
        segment = len(parents)
        parents.append(parent)
        for _ in range(2 * (levels > 1)):
            grow(segment, levels - 1)

    grow(-1, depth)
    return of_lengths(len(parents) * [length], parents)


# From issue 25: GRPO packings, and a search tree.
LARGE = {
    "prompt4k_16x2k": lambda: prompt_and_answers(4096, 16, 2048),
    "prompt16k_8x1k": lambda: prompt_and_answers(16384, 8, 1024),
    "binary6_512": lambda: binary(6, 512),
    "prompt4001_16x1999": lambda: prompt_and_answers(4001, 16, 1999),
}
