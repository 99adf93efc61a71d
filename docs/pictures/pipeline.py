"""Draws docs/pictures/pipeline.svg: who does what, when, in the forward kernel for Hopper.

python docs/pictures/pipeline.py
"""

from __future__ import annotations

import svg

UNIT, LEFT, ROW = 46, 150, 40
LOAD, PRODUCT, SOFTMAX, VALUES = svg.TINTS[2], svg.TINTS[0], svg.TINTS[3], svg.TINTS[1]


def main() -> None:
    picture = svg.Picture(900, 262, "The forward kernel for Hopper, two warp groups in ping-pong")
    names = ("producer warp", "warp group 0", "warp group 1", "matrix units")
    tops = [30 + n * (ROW + 12) for n in range(4)]
    for name, y in zip(names, tops, strict=True):
        picture.words(LEFT - 14, y + ROW / 2 + 5, name, anchor="end", bold=True)
        picture.line((LEFT, y + ROW + 6), (885, y + ROW + 6), stroke=svg.PALE)

    def step(row: int, at: float, long: float, fill: str, text: str) -> None:
        picture.box(LEFT + at * UNIT, tops[row], long * UNIT - 3, ROW, fill)
        picture.words(LEFT + (at + long / 2) * UNIT - 1, tops[row] + 25, text, size=12)

    at = 0.0
    for text in ("Q", "K 0", "K 1", "V 0", "K 2", "V 1", "K 3", "V 2", "K 4", "V 3"):
        step(0, at, 1, LOAD, text)
        at += 1
    step(0, at, 5.8, LOAD, "Q, K, V of the next tile")
    for group in (0, 1):
        start = 2 + 2 * group
        step(1 + group, start, 1.4, PRODUCT, "S 0")
        step(1 + group, start + 1.4, 2, SOFTMAX, "softmax 0")
        step(3, start, 1.4, PRODUCT if group == 0 else VALUES, f"group {group}")
        at = start + 4.0
        for n in (1, 2):
            step(1 + group, at, 1.8, PRODUCT, f"S {n},  P {n - 1} V {n - 1}")
            step(1 + group, at + 1.8, 2, SOFTMAX, f"softmax {n}")
            step(3, at, 1.8, PRODUCT if group == 0 else VALUES, f"group {group}")
            at += 4.0
    picture.words(
        LEFT, 252, "Time runs to the right. While one group is in its softmax, the other has the "
        "matrix units.", anchor="start", fill=svg.GREY,
    )  # fmt: skip
    picture.save(__file__)


if __name__ == "__main__":
    main()
