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
        for slot, who in enumerate(names):
            label, colour = MEASURED[who]
            times = [report["cases"][case].get(who, {}).get("times", {}) for case in cases]
            bars = [row.get(what, {}).get("tflops", 0.0) for row in times]
            left = [n + (slot - (len(names) - 1) / 2) * width for n in range(len(cases))]
            drawn = axis.bar(left, bars, width * 0.92, color=colour, label=label)
            shown = [f"{value:.0f}" if value else "" for value in bars]
            axis.bar_label(drawn, shown, padding=2, fontsize=7.5)
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_ylabel("TFLOP/s on attended pairs")
        axis.set_xticks(range(len(cases)), [case.replace("_", " ") for case in cases], fontsize=9)
        axis.tick_params(axis="x", length=0, labelbottom=True)
        axis.grid(axis="y", color="#e6e9ed", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(names), frameon=False)
    info = report["machine"]
    figure.suptitle("Attention over packed documents, bfloat16", fontsize=14, fontweight="bold")
    figure.supxlabel(
        f"{info['gpu']}, driver {info['driver']}, jax {info['jax']}, cuDNN {info['cudnn']}, "
        f"{info['date']}, commit {report['commit'][:10]}",
        fontsize=8,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
