"""Draws docs/pictures/data_flow.svg: the way of a call from Python to a kernel.

python docs/pictures/data_flow.py
"""

from __future__ import annotations

import svg

LEFT = [  # when jax traces and lowers
    ("flash_attention", "checks shapes, dtypes and options; sets defaults"),
    ("autodiff", "gradients, forward mode, checkpoint names"),
    ("context", "with sharding=: each rank its rows; keys gathered"),
    ("primitives", "shapes of results; vmap"),
    ("lowering", "CUDA: an FFI call with attributes.  Else: blockwise XLA"),
]
RIGHT = [  # when XLA runs the program
    ("initialize", "finds the kernel for this GPU, loads it"),
    ("execute", "checks buffers, packs arguments, launches"),
    ("cubin", "compiled when the wheel was built"),
]
WIDTH, STEP, HIGH = 410, 62, 44


def main() -> None:
    picture = svg.Picture(900, 400, "How a call of flash_attention becomes a kernel")
    for x, title, stages, tint in (
        (20, "while jax traces (Python)", LEFT, svg.TINTS[0]),
        (470, "while the program runs (C++)", RIGHT, svg.TINTS[1]),
    ):
        picture.words(x + WIDTH / 2, 30, title, fill=svg.GREY, bold=True)
        for n, (name, what) in enumerate(stages):
            y = 46 + n * STEP
            picture.box(x, y, WIDTH, HIGH, tint)
            picture.words(x + 14, y + 18, name, anchor="start", bold=True, mono=True)
            picture.words(x + 14, y + 36, what, anchor="start", size=12.5)
            if n:
                picture.arrow((x + 30, y - STEP + HIGH), (x + 30, y))
    last = 46 + (len(LEFT) - 1) * STEP + HIGH / 2
    picture.arrow((20 + WIDTH, last), (450, last), (450, 46 + HIGH / 2), (470, 46 + HIGH / 2))

    y = 46 + len(RIGHT) * STEP + 14
    picture.words(470 + WIDTH, y + 10, "once per step", fill=svg.GREY, anchor="end", bold=True)
    picture.box(470, y + 20, WIDTH, HIGH, svg.TINTS[2])
    picture.words(484, y + 38, "create_attention_mask", anchor="start", bold=True, mono=True)
    picture.words(
        484, y + 56, "a range of keys for each row; bounds of blocks", anchor="start", size=12.5
    )
    picture.arrow((470 + 30, y + 20), (470 + 30, 46 + 2 * STEP + HIGH), dashed=True)
    picture.words(470 + 40, y + 10, "read by every layer", anchor="start", size=12, fill=svg.GREY)
    picture.box(20, 46 + len(LEFT) * STEP, 860, 30, svg.PALE)
    picture.words(
        450, 46 + len(LEFT) * STEP + 20,
        "No compiler, no Triton and no Python runs when the attention runs.", size=12.5,
    )  # fmt: skip
    picture.save(__file__)


if __name__ == "__main__":
    main()
