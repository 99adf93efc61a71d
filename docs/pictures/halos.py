"""Draws docs/pictures/halos.svg: what ranks fetch for a window, by a zigzag plan.

python docs/pictures/halos.py
"""

from __future__ import annotations

import numpy as np
import packax
import svg

RANKS, LENGTH, WINDOW = 4, 8192, 256
COLOURS = [svg.BLUE, svg.TEAL, svg.AMBER, svg.ROSE]
LEFT, WIDTH, HIGH = 70, 640, 24


def main() -> None:
    expression = packax.sliding_window(WINDOW - 1) & packax.documents(np.zeros(LENGTH, int))
    plan = packax.context_plan(expression, ranks=RANKS, kind="zigzag")
    halo = plan.halo(expression)
    assert halo is not None
    owner = {int(number): rank for (rank, _), number in np.ndenumerate(halo.places)}
    rows = WIDTH / LENGTH  # pixels of a row
    wide = halo.chunk * rows
    edge = halo.before * rows

    picture = svg.Picture(740, 276, "The keys that four ranks fetch for a window, by a zigzag plan")
    picture.words(LEFT, 22, "the row, in chunks of two for each rank", anchor="start", bold=True)
    for number, rank in owner.items():
        x = LEFT + number * wide
        picture.box(x, 32, wide - 2, HIGH, COLOURS[rank], round=2)
        picture.words(x + wide / 2, 49, f"{number}: rank {rank}", size=11.5, fill=svg.PAPER)
    picture.words(
        LEFT, 92, "the keys of each rank: its chunks, and a halo before each", anchor="start",
        bold=True,
    )  # fmt: skip
    for rank, numbers in enumerate(halo.places):
        top = 104 + rank * (HIGH + 8)
        picture.words(LEFT - 8, top + 16, f"rank {rank}", anchor="end", size=11.5)
        x = float(LEFT)
        for number in map(int, numbers):
            if number:
                x_wide = max(edge, 24)
                picture.box(x, top, x_wide - 1, HIGH, COLOURS[owner[number - 1]], round=2)
                picture.words(x + x_wide / 2, top + 16, str(number - 1), size=10, fill=svg.PAPER)
                x += x_wide
            picture.box(x, top, wide - 2, HIGH, COLOURS[rank], round=2)
            picture.words(x + wide / 2, top + 16, str(number), size=11.5, fill=svg.PAPER)
            x += wide + 14
        from_others = halo.before * sum(owner.get(int(n) - 1, rank) != rank for n in numbers)
        picture.words(
            LEFT + 300, top + 16, f"{from_others} keys fetched", anchor="start", size=11.5
        )
    picture.words(
        LEFT, 258,
        f"{LENGTH} rows, a window of {WINDOW}. Colours: the rank that has the keys. Gathering all "
        f"keys would fetch {LENGTH - LENGTH // RANKS}.",
        anchor="start", size=11.5, fill=svg.GREY,
    )  # fmt: skip
    picture.save(__file__)


if __name__ == "__main__":
    main()
