"""Candidates and their times as a table: one line each, compared with the table's tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
# title, width (negative: left-aligned), the value from a row
Column = tuple[str, int, Callable[[Row], object]]
TILE: Column = ("tile and assembler", -52, lambda row: row["tile"][:51])


def listing(rows: list[Row], columns: tuple[Column, ...], used: tuple[str, ...]) -> str:
    """`used` are the last columns: registers, stack and so on, if the row has them."""

    def line(cells: list[object], last: str) -> str:
        widths = [width for _, width, _ in columns]
        texts = (
            f"{c!s:{'<' if w < 0 else '>'}{abs(w)}}" for c, w in zip(cells, widths, strict=True)
        )
        return "".join(texts) + f"  {last}"

    lines = [line([title for title, *_ in columns], ", ".join(used))]
    for row in rows:
        there = row[used[0]] is not None
        cells = [of(row) for *_, of in columns]
        lines.append(line(cells, ", ".join(str(row[name]) for name in used) if there else ""))
    return "\n".join(lines)


def ratios(rows: list[Row], same: tuple[str, ...]) -> dict[int, str]:
    """id of a row -> how much faster than the first of its peers; * marks the fastest of them."""
    found = {}
    for row in rows:
        peers = [r for r in rows if all(r[key] == row[key] for key in same)]
        best = "*" if row["ms"] == min(r["ms"] for r in peers) else " "
        found[id(row)] = f"{peers[0]['ms'] / row['ms']:.3f}{best}"
    return found
