"""Draws docs/pictures/speed.svg: packax compared with its peers, from benchmarks/results.

python docs/pictures/speed.py
"""

from __future__ import annotations

import json
from pathlib import Path

import svg

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "versus_peers_h200.json"
CASES = {
    "causal_16k_d128": ("one document", "16k"),
    "causal_32k_d128": ("one document", "32k"),
    "docs12_32k_d128": ("12 documents", "32k"),
    "docs12_128k_d128": ("12 documents", "128k"),
    "docs64_32k_d128": ("64 documents", "32k"),
    "mean500_128k_d128": ("260 documents", "128k"),
}
PEERS = {
    "packax": ("packax", svg.BLUE),
    "cudnn": ("cuDNN", "#c7cdd4"),
    "fa3": ("FA3", "#a9b2bc"),
    "fa4": ("FA4 (torch)", "#8893a0"),
}
LEFT, BAR, GAP, HIGH, MOST = 84, 30, 22, 130, 700
GROUP = BAR * len(PEERS) + GAP


def main() -> None:
    run = json.loads(RESULTS.read_text())
    width = LEFT + GROUP * len(CASES)
    picture = svg.Picture(width, 410, "TFLOP/s of packax, cuDNN, FA3 and FA4 on H200s")
    for n, (name, fill) in enumerate(PEERS.values()):
        picture.box(LEFT + 110 * n, 10, 14, 14, fill, round=2)
        picture.words(LEFT + 110 * n + 20, 22, name, anchor="start")
    picture.words(width - 10, 22, "TFLOP/s, head dim 128", anchor="end", fill=svg.GREY)
    for part, (key, title) in enumerate((("fwd", "forward"), ("bwd", "backward"))):
        base = 190 + part * 165
        picture.words(LEFT - 8, base - HIGH + 6, title, anchor="end", bold=True, size=12)
        picture.line((LEFT - 6, base), (width - 6, base))
        for n, case in enumerate(CASES):
            for k, (peer, (_, fill)) in enumerate(PEERS.items()):
                found = run["cases"][case][peer]
                x = LEFT + n * GROUP + k * BAR
                if found["wrong"] or key not in found["times"]:
                    said = "wrong" if found["wrong"] else "none"
                    picture.words(x + BAR / 2, base - 5, said, size=9, fill=svg.GREY)
                    continue
                rate = found["times"][key]["tflops"]
                tall = rate / MOST * HIGH
                picture.box(x + 1, base - tall, BAR - 2, tall, fill, round=2)
                picture.words(x + BAR / 2, base - tall - 4, f"{rate:.0f}", size=10)
    for n, (what, length) in enumerate(CASES.values()):
        x = LEFT + n * GROUP + BAR * len(PEERS) / 2
        picture.words(x, 374, what, size=12)
        picture.words(x, 390, f"in {length} tokens", size=11, fill=svg.GREY)
    picture.save(__file__)


if __name__ == "__main__":
    main()
