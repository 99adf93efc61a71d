"""Draws docs/pictures/packed_tree.svg: a prompt and three answers as documents and as a tree, and a
conversation with branches, by their own as_array.

python docs/pictures/packed_tree.py
"""

from __future__ import annotations

import itertools

import numpy as np
import packax
import svg

PROMPT, ANSWERS = 6, (4, 3, 4)
SHARED = np.repeat([-1, 0, 1, 2], [PROMPT, *ANSWERS])
APART = np.repeat([0, 1, 2], [PROMPT + n for n in ANSWERS])
LENGTHS, PARENTS = (4, 3, 2, 3, 3, 2), (-1, 0, 1, 1, 0, 4)
PICTURES = {
    "documents: the prompt three times": (packax.documents(APART), APART),
    "tree: the prompt once": (packax.masks.shared_prefix(0 * SHARED, SHARED), SHARED + 1),
    "a conversation with branches": (
        packax.masks.tree(np.repeat(np.arange(6), LENGTHS), PARENTS),
        np.repeat(np.arange(6), LENGTHS),
    ),
}
CELL, GAP, TOP = 9, 26, 30


def main() -> None:
    most = CELL * len(APART)
    width = sum(CELL * len(ids) for _, ids in PICTURES.values()) + GAP * (len(PICTURES) + 1)
    picture = svg.Picture(width, TOP + most + 30, "Packed documents and packed trees")
    x = GAP
    for title, (expression, ids) in PICTURES.items():
        length = len(ids)
        side = CELL * length
        picture.words(x + side / 2, TOP - 10, title, size=11.5)
        picture.box(x, TOP, side, side, svg.PALE, round=0)
        dense = np.asarray((packax.causal() & expression).as_array(length, length))
        colours = [svg.BLUE, svg.TEAL, svg.AMBER, svg.ROSE, svg.GREY, svg.INK]
        for row in range(length):
            ends = np.flatnonzero(np.diff([-1, *np.where(dense[row], ids, -1), -1]))
            for begin, end in itertools.pairwise(ends):
                if dense[row, begin]:
                    at = x + begin * CELL, TOP + row * CELL
                    size = (end - begin) * CELL, CELL - 1
                    picture.box(*at, *size, colours[ids[begin]], round=0)
        x += side + GAP
    words = "down: queries, across: keys; a color for each document or segment of keys"
    picture.words(width / 2, TOP + most + 20, words, size=11.5, fill=svg.GREY)
    picture.save(__file__)


if __name__ == "__main__":
    main()
