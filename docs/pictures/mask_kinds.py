"""Draws docs/pictures/mask_kinds.svg: what each mask expression means, by its own as_array.

python docs/pictures/mask_kinds.py
"""

from __future__ import annotations

import re

import numpy as np
import packax
import svg

LENGTH = 24
DOCUMENTS = np.repeat([0, 1, -1], [10, 11, 3])  # two documents and padding
POSITIONS = np.concatenate([np.arange(10), np.arange(11), np.zeros(3, int)])
SEGMENTS = np.repeat([0, 1, 2, 3], [6, 7, 5, 6])  # of a tree
BLOCKS = np.tri(4, dtype=bool) & ~np.eye(4, k=-2, dtype=bool)
TOKENS = np.arange(LENGTH)
IMAGES = np.repeat([-1, 0, -1, 1, -1], [3, 5, 5, 4, 7])
PACKED = packax.documents(DOCUMENTS)

KINDS = {
    "full()": packax.full(),
    "causal()": packax.causal(),
    "causal() & documents(ids)": packax.causal() & PACKED,
    "sliding_window(window=6)": packax.sliding_window(window=6),
    "sliding_window(3, 3) & documents(ids)": packax.sliding_window(3, 3) & PACKED,
    "causal() & chunked(8)": packax.causal() & packax.chunked(8),
    "causal() & chunked(4) & documents(ids, positions=p)": packax.causal()
    & packax.chunked(4)
    & packax.documents(DOCUMENTS, positions=POSITIONS),
    "prefix(7)": packax.prefix(7),
    "spans(image_ids)": packax.masks.spans(IMAGES),
    "spans(image_ids, sliding_window(3)) & documents(ids)": packax.masks.spans(
        IMAGES, packax.sliding_window(3)
    )
    & PACKED,
    "causal() & chunked(8) | sliding_window(3)": packax.causal() & packax.chunked(8)
    | packax.sliding_window(3),
    "documents(ids)": PACKED,
    "ranges(lo, hi)": packax.masks.ranges(TOKENS // 3, TOKENS // 2 + 8),
    "causal() & block_sparse(blocks, 6)": packax.causal() & packax.masks.block_sparse(BLOCKS, 6),
    "causal() & shared_prefix(groups, answers)": packax.causal()
    & packax.masks.shared_prefix(np.zeros(LENGTH, int), np.repeat([-1, 0, 1, 2], 6)),
    "causal() & tree(ids, parents)": packax.causal() & packax.masks.tree(SEGMENTS, [-1, 0, 1, 0]),
}
CELL, GAP, TOP = 7, 22, 40
COLUMNS = 4
SIDE = CELL * LENGTH


def runs(row: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of True."""
    steps = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in steps.reshape(-1, 2)]


def main() -> None:
    rows = -(-len(KINDS) // COLUMNS)
    width, height = COLUMNS * (SIDE + GAP) + GAP, rows * (SIDE + TOP) + 26
    picture = svg.Picture(width, height, "Who attends whom, by mask expression")
    for n, (title, expression) in enumerate(KINDS.items()):
        x, y = GAP + n % COLUMNS * (SIDE + GAP), TOP + n // COLUMNS * (SIDE + TOP)
        lines = re.sub(r" (?=[&|] (?!chunked))", "\n", title).splitlines()
        for k, line in enumerate(lines):
            size = 11 if len(line) < 30 else 9
            at = y - 7 - 13 * (len(lines) - 1 - k)
            picture.words(x + SIDE / 2, at, line, size=size, mono=True)
        picture.box(x, y, SIDE, SIDE, svg.PALE, round=0)
        dense = np.asarray(expression.as_array(LENGTH, LENGTH)).reshape(LENGTH, LENGTH)
        bars = [
            (x + begin * CELL, y + row * CELL, (end - begin) * CELL, CELL - 1)
            for row in range(LENGTH)
            for begin, end in runs(dense[row])
        ]
        picture.bars(bars, svg.BLUE)
    picture.words(
        width / 2, height - 8, "24 tokens; down: queries, across: keys, blue: attended",
        size=11.5, fill=svg.GREY,
    )  # fmt: skip
    picture.save(__file__)


if __name__ == "__main__":
    main()
