"""The bar chart of a report: TFLOP/s of packax, cuDNN, FA3 and FA4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MEASURED = {
    "packax": ("packax", "#1f6feb"),
    "cudnn": ("cuDNN in JAX", "#e08a1e"),
    "fa3": ("FA3 in JAX", "#8250df"),
    "fa4": ("FA4 in torch", "#2f9e6e"),
}


def bar_chart(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [name for name, rows in report["cases"].items() if "packax" in rows]
    if not cases:
        raise ValueError("no case was measured, so there is nothing to draw")
    names = [who for who in MEASURED if any(who in report["cases"][case] for case in cases)]
    width = 0.84 / len(names)
    size = (max(12.5, 1.7 * len(cases)), 8.2)
    figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    for axis, (what, title) in zip(axes, (("fwd", "Forward"), ("bwd", "Backward")), strict=True):
        labelled: set[str] = set()
        for index, case in enumerate(cases):
            times = {who: report["cases"][case].get(who, {}).get("times", {}) for who in names}
            present = [(who, row[what]["tflops"]) for who, row in times.items() if what in row]
            for slot, (who, value) in enumerate(present):
                x = index + (slot - (len(present) - 1) / 2) * width
                label, colour = MEASURED[who]
                axis.bar(
                    x, value, width * 0.92, color=colour, label=None if who in labelled else label
                )
                labelled.add(who)
                style = {"ha": "center", "va": "bottom", "fontsize": 7.5, "color": "#1b1f24"}
                axis.text(x, value + 6, f"{value:.0f}", **style)
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
    figure.supxlabel(
        f"{info['gpu']}, driver {info['driver']}, jax {info['jax']}, cuDNN {info['cudnn']}, "
        f"{info['date']}, commit {report['commit'][:10]}",
        fontsize=8,
        color="#57606a",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
