"""Draws docs/pictures/blocks.svg: which blocks a kernel skips, compares and computes freely.

python docs/pictures/blocks.py
"""

from __future__ import annotations

import numpy as np
import packax
import svg

BLOCKS, TOKENS, CELL = 20, 4, 15  # blocks of 4 tokens stand for blocks of 64
IDS = np.repeat([0, 1, 2, -1], [27, 34, 13, 6])
NAMES = {0: ("skipped", svg.PALE), 1: ("partial", "#9cc3ff"), 2: ("full", svg.BLUE)}


def main() -> None:
    length = BLOCKS * TOKENS
    expression = packax.causal() & packax.documents(IDS)
    dense = np.asarray(expression.as_array(length, length)).reshape(length, length)
    blocks = dense.reshape(BLOCKS, TOKENS, BLOCKS, TOKENS).swapaxes(1, 2)
    kinds = blocks.any((2, 3)).astype(int) + blocks.all((2, 3))

    side = BLOCKS * CELL
    picture = svg.Picture(740, side + 50, "Blocks of causal attention over three documents")
    picture.box(46, 28, side, side, svg.PALE, round=1)
    for row, column in zip(*np.nonzero(kinds), strict=True):
        _, fill = NAMES[int(kinds[row, column])]
        at = 46 + column * CELL, 28 + row * CELL
        picture.box(*at, CELL - 1, CELL - 1, fill, round=1)
    picture.words(46 + side / 2, 18, "blocks of keys", fill=svg.GREY)
    picture.words(40, 28 + 8, "rows", fill=svg.GREY, anchor="end")
    x = side + 90
    for n, kind in enumerate((0, 1, 2)):
        name, fill = NAMES[kind]
        share = np.mean(kinds == kind)
        y = 70 + 34 * n
        picture.box(x, y, 18, 18, fill, round=2)
        picture.words(x + 28, y + 14, f"{name}: {share:.0%} of the blocks", anchor="start")
    for n, line in enumerate(
        (
            "Three causal documents, then padding.",
            "Skipped blocks are not even loaded.",
            "Full blocks run in a loop without a mask.",
            "Partial ones compare  lo[row] <= key < hi[row].",
        )
    ):
        picture.words(x, 200 + 22 * n, line, anchor="start", fill=svg.GREY)
    picture.save(__file__)


if __name__ == "__main__":
    main()
