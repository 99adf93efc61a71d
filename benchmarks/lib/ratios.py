"""The ratios of a report of models.py: sorted, what falls short, and their picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.turns import PASSES

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "pictures"))

import svg

PARITY = 1.0
LEFT, TOP, LINE, WIDE, MOST = 240, 44, 15, 420, 2.0  # MOST: longer bars are cut


def ratios(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """case -> pass -> cuDNN's time / packax's, of the passes that both ran, lowest first."""
    found = {}
    for case, rows in results.items():
        ours, theirs = (rows.get(who, {}).get("times", {}) for who in ("packax", "cudnn"))
        both = [what for what in PASSES if what in ours and what in theirs]
        if both:
            found[case] = {what: theirs[what]["ms"] / ours[what]["ms"] for what in both}
    return dict(sorted(found.items(), key=lambda item: min(item[1].values())))


def summary(results: Mapping[str, Any]) -> str:
    """How many passes reach cuDNN, and those that do not, worst first."""
    pairs = [(r, case, what) for case, of in ratios(results).items() for what, r in of.items()]
    short = sorted(pair for pair in pairs if pair[0] < PARITY)
    lines = [
        f"cuDNN's time / packax's: {len(pairs) - len(short)} of {len(pairs)} passes at least 1"
    ]
    if short:
        lines.append(
            f"{'short of cuDNN':<34}{'pass':<5}{'ratio':>7}{'packax ms':>11}{'cuDNN ms':>10}"
        )
    for r, case, what in short:
        ours, theirs = (results[case][who]["times"][what]["ms"] for who in ("packax", "cudnn"))
        lines.append(f"{case:<34}{what:<5}{r:>7.2f}{ours:>11.4f}{theirs:>10.4f}")
    return "\n".join(lines)


def draw(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(picture_of(report).text())


def picture_of(report: Mapping[str, Any]) -> svg.Picture:
    """One line for each case with two bars, forward and backward, lowest ratio first."""
    found = ratios(report["cases"])
    high = TOP + LINE * len(found) + 30
    picture = svg.Picture(LEFT + WIDE + 60, high, "cuDNN's time / packax's, by model")
    for n, (what, fill) in enumerate((("forward", svg.BLUE), ("backward", svg.TEAL))):
        picture.box(LEFT + 90 * n, 8, 12, 12, fill, round=2)
        picture.words(LEFT + 90 * n + 18, 18, what, anchor="start", size=12)
    info = report["machine"]
    picture.words(
        LEFT + WIDE + 50, 18, f"cuDNN's time / packax's, {info['gpu']}", anchor="end", size=11,
        fill=svg.GREY,
    )  # fmt: skip
    for mark in (0.5, 1.0, 1.5, 2.0):
        x = LEFT + mark / MOST * WIDE
        strong = mark == PARITY
        picture.line((x, TOP - 8), (x, high - 26), stroke=svg.INK if strong else svg.PALE, width=1)
        picture.words(x, high - 12, f"{mark:g}", size=11, fill=svg.GREY)
    for n, (case, of) in enumerate(found.items()):
        y = TOP + LINE * n
        picture.words(LEFT - 8, y + 8, case.replace("_", " "), anchor="end", size=10)
        for k, (what, fill) in enumerate((("fwd", svg.BLUE), ("bwd", svg.TEAL))):
            if what in of:
                picture.box(LEFT, y + 6 * k, min(of[what], MOST) / MOST * WIDE, 5, fill, round=1)
        said = " / ".join(f"{of[what]:.2f}" if what in of else "-" for what in PASSES)
        picture.words(LEFT + WIDE + 6, y + 8, said, anchor="start", size=9, fill=svg.GREY)
    return picture
