"""Draws docs/pictures/local_plan.svg: a row of many documents over four ranks, balanced and local.

python docs/pictures/local_plan.py
"""

from __future__ import annotations

import itertools

import numpy as np
import packax
import svg

RANKS, LENGTH = 4, 16384
LENGTHS = [  # of the documents
    384, 192, 448, 256, 128, 320, 576, 192, 2816, 320, 256, 448, 128, 384, 256,
    512, 192, 320, 640, 256, 192, 448, 128, 320, 256, 384, 384, 192, 448, 256,
    128, 320, 576, 192, 320, 256, 448, 128, 384, 256, 512, 192, 320,
]  # fmt: skip
COLOURS = ["#1f6feb", "#2a9d8f", "#e9a23b", "#d1495b", "#7a5cd6", "#6a994e", "#4f8fba", "#b5838d"]
WIDTH, HIGH, LEFT, RIGHT = 460, 20, 70, 552


def main() -> None:
    documents = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    ids = np.full(LENGTH, packax.PADDING_SEGMENT_ID)
    ids[: len(documents)] = documents
    expression = packax.causal() & packax.documents(ids)
    keys = np.concatenate(
        [np.arange(1, n + 1) for n in LENGTHS] + [np.zeros(LENGTH - len(documents))]
    )

    picture = svg.Picture(760, 300, "A row of many documents over four ranks: balanced, and local")
    y = 14
    for kind in ("balanced", "local"):
        plan = packax.context_plan(expression, ranks=RANKS, kind=kind)
        order = plan.index()[0].reshape(RANKS, -1)
        own = LENGTH // RANKS
        shared = own if plan.shared is None else plan.shared
        unit = WIDTH / own
        picture.words(LEFT, y + 10, kind, anchor="start", bold=True)
        if shared < own:
            edge = LEFT + shared * unit
            bottom = y + 20 + RANKS * (HIGH + 3)
            picture.words(edge - 6, y + 10, "shared", anchor="end", size=11.5, fill=svg.GREY)
            picture.words(edge + 6, y + 10, "private", anchor="start", size=11.5, fill=svg.GREY)
            picture.line((edge, y), (edge, bottom), stroke=svg.INK, width=1.5)
        loads = keys[order].sum(1)
        lines = (
            f"keys that a rank fetches: {plan.fetched}",
            f"of {LENGTH - own} on other ranks",
            f"largest load: {loads.max() / loads.mean():.2f} of the mean",
        )
        for number, text in enumerate(lines):
            picture.words(
                RIGHT, y + 42 + 18 * number, text, anchor="start", size=11.5, fill=svg.GREY
            )
        for rank, rows in enumerate(order):
            top = y + 20 + rank * (HIGH + 3)
            picture.words(LEFT - 8, top + 14, f"rank {rank}", anchor="end", size=11.5)
            held = ids[rows]
            changes = np.flatnonzero(np.diff(held)) + 1
            for begin, end in itertools.pairwise([0, *changes, own]):
                if held[begin] != packax.PADDING_SEGMENT_ID:
                    longest = LENGTHS[held[begin]] == max(LENGTHS)
                    colour = svg.INK if longest else COLOURS[held[begin] % len(COLOURS)]
                    wide = max((end - begin) * unit - 1, 0.5)
                    picture.box(round(LEFT + begin * unit, 1), top, round(wide, 1), HIGH, colour,
                                round=1)  # fmt: skip
        y += 130
    picture.words(
        LEFT, y + 8,
        "Colours: documents, the dark one long. Keys of shared rows are gathered, no others.",
        anchor="start", size=11.5, fill=svg.GREY,
    )  # fmt: skip
    picture.save(__file__)


if __name__ == "__main__":
    main()
