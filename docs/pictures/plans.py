"""Draws docs/pictures/plans.svg: one packed row over four ranks, by three orders of its chunks.

python docs/pictures/plans.py
"""

from __future__ import annotations

import numpy as np
import packax
import svg

RANKS, LENGTH, CHUNK = 4, 8192, 256
LENGTHS = [2816, 640, 1152, 256, 1664, 384, 1280]  # of the documents; they fill the row
COLOURS = ["#1f6feb", "#2a9d8f", "#e9a23b", "#d1495b", "#7a5cd6", "#6a994e", "#4f8fba"]
WIDTH, HIGH, LEFT, BARS, UNIT = 430, 20, 70, 540, 130


def chunks_of(kind: str | None, expression: packax.masks.MaskExpression) -> np.ndarray:
    """(ranks, chunks of a rank): which chunk of CHUNK rows stands where."""
    rows = np.arange(LENGTH)
    if kind is not None:
        chunk = CHUNK if kind == "balanced" else None
        plan = packax.context_plan(expression, ranks=RANKS, kind=kind, chunk=chunk)
        rows = plan.permute(rows[None])[0]
    return rows[::CHUNK].reshape(RANKS, -1) // CHUNK


def main() -> None:
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    assert len(ids) == LENGTH
    expression = packax.causal() & packax.documents(ids[None])
    area = np.concatenate([np.arange(1, n + 1) for n in LENGTHS]).reshape(-1, CHUNK).sum(1)

    picture = svg.Picture(760, 400, "One packed row over four ranks, by three orders of its chunks")
    cell = WIDTH / (LENGTH / CHUNK / RANKS)
    y = 14
    for kind, title in ((None, "no plan"), ("zigzag", "zigzag"), ("balanced", "balanced")):
        chunks = chunks_of(kind, expression)
        loads = area[chunks].sum(1) / area.sum() * RANKS
        picture.words(LEFT, y + 10, title, anchor="start", bold=True)
        picture.words(
            BARS, y + 10, f"largest load: {loads.max():.2f} of the mean", anchor="start",
            size=11.5, fill=svg.GREY,
        )  # fmt: skip
        for rank in range(RANKS):
            top = y + 20 + rank * (HIGH + 3)
            picture.words(LEFT - 8, top + 14, f"rank {rank}", anchor="end", size=11.5)
            for place, chunk in enumerate(chunks[rank]):
                held = ids[chunk * CHUNK : (chunk + 1) * CHUNK]
                for document in np.unique(held):  # a chunk may hold the end of one and another
                    inside = np.flatnonzero(held == document)
                    x = LEFT + (place + inside[0] / CHUNK) * cell
                    wide = len(inside) / CHUNK * cell - 1
                    picture.box(x, top, wide, HIGH, COLOURS[document], round=1)
            picture.box(BARS, top, loads[rank] * UNIT / 2.2, HIGH, svg.GREY, round=2)
        mean = BARS + UNIT / 2.2
        bottom = y + 20 + RANKS * (HIGH + 3)
        picture.line((mean, y + 17), (mean, bottom), stroke=svg.INK)
        y += 126
    picture.words(
        LEFT, y + 4, "Colours: documents. Bars: attended pairs of a rank; the line is the mean.",
        anchor="start", size=11.5, fill=svg.GREY,
    )  # fmt: skip
    picture.save(__file__)


if __name__ == "__main__":
    main()
