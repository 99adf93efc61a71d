"""Draws the document mask of a real row and the training loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import packax

PIXELS = 1200
INK, MUTED, GRID = "#1b1f24", "#57606a", "#e6e9ed"
LINE = "#1f6feb"


def document_mask(segment_ids: np.ndarray, path: Path) -> None:
    """Draws the pairs that are attended; of a long row, only every n-th token."""
    length = len(segment_ids)
    documents = int(segment_ids.max()) + 1
    step = -(-length // PIXELS)
    ids = segment_ids[::step]
    lengths = np.bincount(segment_ids[segment_ids >= 0]).astype(float)
    share = np.sum(lengths * (lengths + 1)) / 2 / length**2
    padding = int(np.sum(segment_ids == packax.PADDING_SEGMENT_ID))
    figure, axis = _figure((7.2, 7.6))
    expression = packax.causal() & packax.documents(ids)
    packax.masks.plot_mask(expression, block_size=len(ids), ax=axis)
    axis.set_xlabel("key token")
    axis.set_ylabel("query token")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(lambda at, _: f"{at * step:,.0f}")
    axis.spines[:].set_color(GRID)
    axis.tick_params(color=GRID, labelcolor=MUTED)
    axis.set_title(
        f"{_count(documents, 'document')}, {_count(padding, 'padding token')}; "
        f"{share:.1%} of all pairs are attended",
        loc="left",
        fontsize=10,
        color=MUTED,
    )
    _save(figure, path, f"Document mask of one packed row of {length:,} tokens")


def loss_curve(losses: list[float], last: float, subtitle: str, path: Path) -> None:
    steps = np.arange(1, len(losses) + 1)
    figure, axis = _figure((8.4, 4.6))
    axis.plot(steps, losses, color=LINE, alpha=0.3, linewidth=1)
    axis.plot(steps, _smooth(losses), color=LINE, linewidth=2)
    uniform = float(np.log(256))
    axis.axhline(uniform, color=MUTED, linewidth=0.8, linestyle=(0, (4, 4)))
    axis.text(
        steps[-1], uniform + 0.06, "uniform over 256 bytes", ha="right", color=MUTED, fontsize=8
    )
    axis.set_ylim(bottom=0, top=max(*losses, uniform) * 1.12)
    axis.set_xlim(1, max(2, len(losses)))
    axis.set_xlabel("step")
    axis.set_ylabel("loss of the next byte (nats)")
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(color=GRID, labelcolor=MUTED)
    axis.set_title(subtitle, loc="left", fontsize=9, color=MUTED)
    _save(figure, path, f"Training loss: {losses[0]:.2f} to {last:.2f} in {len(losses)} steps")


def _smooth(losses: list[float]) -> np.ndarray:
    """A centered moving average over at most a tenth of the steps, narrower at both ends."""
    steps = np.arange(len(losses))
    reach = np.minimum(len(losses) // 20, np.minimum(steps, steps[::-1]))
    sums = np.cumsum([0.0, *losses])
    return (sums[steps + reach + 1] - sums[steps - reach]) / (2 * reach + 1)


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")


def _save(figure: Any, path: Path, title: str) -> None:
    import matplotlib.pyplot as plt

    figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
