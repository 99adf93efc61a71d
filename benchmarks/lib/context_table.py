"""The table of context.py."""

from __future__ import annotations

from typing import Any


def table(report: dict[str, Any]) -> str:
    head = (
        f"{'':<44}{'fwd ms':>9}{'TFLOP/s':>9}{'of one':>8}{'bwd ms':>9}{'TFLOP/s':>9}{'of one':>8}"
    )
    lines = [head + f"{'MiB':>9}{'fetched':>9}{'error':>9}"]
    one = report["one_gpu"]
    rows = {"one GPU, one rank's share": one, "slowest GPU, its rank's share": report["slowest"]}
    for name, row in {**rows, **report["schemes"]}.items():
        line = f"{name:<44}"
        for what in ("fwd", "bwd"):
            cell = row["times"].get(what)
            if cell is None:
                line += f"{'-':>9}{'-':>9}{'-':>8}"
                continue
            share = cell["tflops"] / one["times"][what]["tflops"] if cell["tflops"] else 0.0
            line += f"{cell['ms']:>9.3f}{cell['tflops']:>9.1f}{share:>8.1%}"
        if "memory" in row:
            line += f"{row['memory']['temp'] + row['memory']['output']:>9.0f}"
            line += f"{row['fetched']:>9.1f}{max(row['errors'].values()):>9.1e}"
        lines.append(line)
    for name, cell in report["collectives"].items():
        lines.append(f"{name + ' of keys and values, alone':<44}{cell['ms']:>9.3f}")
    return "\n".join(lines)
