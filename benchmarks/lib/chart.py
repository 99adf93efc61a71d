"""The bar chart of a report: TFLOP/s of packax, cuDNN, FA3 and FA4 as measured, the board's peers
in grey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PEERS = {"fa4": "FA4 (board)", "flex": "FlexAttention (board)", "kvax": "kvax (board)"}
GREY = {"fa4": "#9aa4af", "flex": "#bcc4cc", "kvax": "#dde2e7"}
MEASURED = {
    "packax": "packax",
    "cudnn": "cuDNN in JAX",
    "fa3": "FA3 in JAX",
    "fa4": "FA4 in torch",
}
COLOURS = {"packax": "#1f6feb", "cudnn": "#e08a1e", "fa3": "#8250df", "fa4": "#2f9e6e"}


def _tflops(
    report: dict[str, Any], peers: dict[str, Any], case: str, who: str, what: str, measured: bool
) -> float | None:
    if measured:
        cell = report["cases"][case].get(who, {}).get("times", {}).get(what)
    else:
        cell = peers["cases"].get(case, {}).get(who, {}).get(what)
    return cell["tflops"] if cell else None


def bar_chart(report: dict[str, Any], peers: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [name for name, rows in report["cases"].items() if "packax" in rows]
    if not cases:
        raise ValueError("no case was measured, so there is nothing to draw")
    measured = [who for who in MEASURED if any(who in report["cases"][case] for case in cases)]
    names = [*measured, *(peer for peer in PEERS if peer not in measured)]
    labels = {who: MEASURED[who] if who in measured else PEERS[who] for who in names}
    colours = {who: COLOURS[who] if who in measured else GREY[who] for who in names}
    width = 0.84 / len(names)
    size = (max(12.5, 1.7 * len(cases)), 8.2)
    figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    for axis, (what, title) in zip(axes, (("fwd", "Forward"), ("bwd", "Backward")), strict=True):
        labelled: set[str] = set()
        for index, case in enumerate(cases):
            values = {
                who: _tflops(report, peers, case, who, what, who in measured) for who in names
            }
            present = [(who, value) for who, value in values.items() if value is not None]
            for slot, (who, value) in enumerate(present):
                x = index + (slot - (len(present) - 1) / 2) * width
                label = None if who in labelled else labels[who]
                labelled.add(who)
                axis.bar(x, value, width * 0.92, color=colours[who], label=label)
                ink = "#1b1f24" if who in measured else "#6b7682"
                axis.text(
                    x, value + 6, f"{value:.0f}", ha="center", va="bottom", fontsize=7.5, color=ink
                )
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axis.set_ylabel("TFLOP/s on attended pairs")
        axis.set_xticks(range(len(cases)), [case.replace("_", " ") for case in cases], fontsize=9)
        axis.tick_params(axis="x", length=0, labelbottom=True)
        axis.grid(axis="y", color="#e6e9ed", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_xlim(-0.55, len(cases) - 0.45)
        axis.margins(y=0.12)
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {
            label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside upper right",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
    info = report["machine"]
    figure.suptitle(
        "Attention over packed documents, bfloat16",
        x=0.01,
        ha="left",
        fontsize=14,
        fontweight="bold",
    )
    board = peers["machine"]
    figure.supxlabel(
        f"{info['gpu']}, driver {info['driver']}, jax {info['jax']}, cuDNN {info['cudnn']}, "
        f"{info['date']}, commit {report['commit'][:10]}.  "
        f"Grey: {board.split(',')[0]}, another run, {board.rsplit(', ', 1)[-1]}",
        fontsize=8,
        color="#57606a",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
