"""What attention.py prints: the board's table, the cost of deterministic=True, and short
sequences."""

from __future__ import annotations

from typing import Any

from lib.cases import Case

PASSES = ("fwd", "bwd", "fwd+bwd", "bwd~")
GRADIENTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}


def _cell(rows: dict[str, Any], implementation: str, what: str) -> dict[str, float] | None:
    return rows.get(implementation, {}).get("times", {}).get(what)


def _error(rows: dict[str, Any], implementation: str, what: str) -> str:
    errors = rows.get(implementation, {}).get("errors", {})
    worst = [errors[name] for name in GRADIENTS.get(what, ()) if name in errors]
    return f"{max(worst):.1e}" if worst else ""


def _ratio(rows: dict[str, Any], what: str, who: str = "cudnn") -> str:
    ratio = rows.get("ratio", {}).get(who, {}).get(what)
    return f"{ratio:.2f}" if ratio else "-"


def table(results: dict[str, Any], peers: dict[str, Any]) -> str:
    """One line per case and pass; the peers' columns are the board's, from another run."""
    head = f"{'case':<20}{'pass':<9}{'packax ms':>10}{'TFLOP/s':>9}{'cuDNN ms':>10}{'TFLOP/s':>9}"
    head += f"{'ratio':>7}{'error':>9}{'cuDNN':>9}{'| board: FA4':>13}{'Flex':>6}{'kvax':>6}"
    lines = [head]
    for name, rows in results.items():
        for what in PASSES:
            cells = f"{name:<20}{what:<9}"
            for implementation in ("packax", "cudnn"):
                cell = _cell(rows, implementation, what)
                cells += (
                    f"{cell['ms']:>10.3f}{cell['tflops']:>9.1f}" if cell else f"{'-':>10}{'-':>9}"
                )
            cells += f"{_ratio(rows, what):>7}"
            cells += "".join(f"{_error(rows, who, what):>9}" for who in ("packax", "cudnn"))
            board = peers["cases"].get(name, {})
            values = [
                board.get(peer, {}).get(what, {}).get("tflops") for peer in ("fa4", "flex", "kvax")
            ]
            cells += "".join(
                f"{'' if v is None else f'{v:.0f}':>{width}}"
                for v, width in zip(values, (13, 6, 6), strict=True)
            )
            lines.append(cells.rstrip())
    return "\n".join(lines)


def deterministic_table(results: dict[str, Any]) -> str:
    """Backward with deterministic=True and the default; `bits`: whether two runs are
    bit-identical."""
    lines = [f"{'deterministic=True':<20}{'bwd ms':>9}{'default':>9}{'ratio':>7}{'error':>9}  bits"]
    for name, rows in results.items():
        row, plain = rows.get("deterministic", {}), _cell(rows, "packax", "bwd")
        cell = _cell(rows, "deterministic", "bwd")
        if row and not (cell and plain):
            lines.append(f"{name:<20} did not run: {row.get('failed') or row.get('wrong')}")
        elif cell and plain:
            same = "the same" if row["bit_identical"] else "DIFFER"
            lines.append(
                f"{name:<20}{cell['ms']:>9.3f}{plain['ms']:>9.3f}{cell['ms'] / plain['ms']:>7.2f}"
                f"{_error(rows, 'deterministic', 'bwd'):>9}  {same}"
            )
    return "\n".join(lines)


NAMES = {"cudnn": "cuDNN", "fa3": "FA3"}


def short_table(results: dict[str, Any], cases: list[Case]) -> str:
    """Time per attended pair of a head, and bandwidth over the minimum bytes to move: both show
    cliffs."""
    peers = [who for who in NAMES if any(who in rows for rows in results.values())]
    head = f"{'case':<22}{'pass':<5}{'packax ms':>10}{'ps/pair':>9}{'GB/s':>7}{'TFLOP/s':>9}"
    lines = [
        head + "".join(f"{NAMES[who] + ' ms':>10}{'ratio':>7}" for who in peers) + f"{'error':>9}"
    ]
    for case in cases:
        rows = results.get(case.name, {})
        for what in ("fwd", "bwd"):
            ours = _cell(rows, "packax", what)
            line = f"{case.name:<22}{what:<5}"
            if ours:
                pair = ours["ms"] * 1e9 / (case.area * case.heads)
                moved = case.least_bytes(what) / ours["ms"] / 1e6
                line += f"{ours['ms']:>10.4f}{pair:>9.2f}{moved:>7.0f}{ours['tflops']:>9.1f}"
            else:
                line += f"{'-':>10}{'-':>9}{'-':>7}{'-':>9}"
            for who in peers:
                theirs = _cell(rows, who, what)
                line += f"{theirs['ms']:>10.4f}" if theirs else f"{'-':>10}"
                line += f"{_ratio(rows, what, who):>7}"
            line += f"{_error(rows, 'packax', what):>9}"
            for who in peers:
                why = rows.get(who, {}).get("failed", {}).get(what)
                line += f"  {NAMES[who]}: {why[:80]}" if why else ""
            lines.append(line.rstrip())
    return "\n".join(lines)
