"""Draws docs/pictures/mask_kinds.png: what each mask expression means, by its own as_array.

python docs/pictures/mask_kinds.py    # needs matplotlib: pip install 'packax[demo]'
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import packax

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH = 24
DOCUMENTS = np.repeat([0, 1, -1], [10, 11, 3])  # two documents and padding
POSITIONS = np.concatenate([np.arange(10), np.arange(11), np.zeros(3, int)])
IMAGES = np.repeat([-1, 0, -1, 1, -1], [3, 5, 5, 4, 7])
PACKED = packax.documents(DOCUMENTS)

KINDS = {
    "causal()": packax.causal(),
    "causal() & documents(ids)": packax.causal() & PACKED,
    "sliding_window(5)": packax.sliding_window(5),
    "sliding_window(3, 3) & documents(ids)": packax.sliding_window(3, 3) & PACKED,
    "causal() & chunked(8)": packax.causal() & packax.chunked(8),
    "causal() & chunked(4) & documents(ids, positions=p)": packax.causal()
    & packax.chunked(4)
    & packax.documents(DOCUMENTS, positions=POSITIONS),
    "prefix(7)": packax.prefix(7),
    "spans(image_ids)": packax.spans(IMAGES),
    "spans(image_ids, sliding_window(3)) & documents(ids)": packax.spans(
        IMAGES, packax.sliding_window(3)
    )
    & PACKED,
    "causal() & chunked(8) | sliding_window(3)": packax.causal() & packax.chunked(8)
    | packax.sliding_window(3),
}


def main() -> None:
    figure, axes = plt.subplots(2, 5, figsize=(15, 6.9), layout="constrained")
    colours = matplotlib.colors.ListedColormap(["#eef1f4", "#1f6feb"])
    for axis, (title, expression) in zip(axes.flat, KINDS.items(), strict=True):
        axis.imshow(np.asarray(expression.as_array(LENGTH, LENGTH)), cmap=colours, vmin=0, vmax=1)
        axis.set_title(title.replace(" & d", "\n& d").replace(" | ", "\n| "), fontsize=9.5)
        axis.set_xticks(np.arange(LENGTH + 1) - 0.5, labels=[])
        axis.set_yticks(np.arange(LENGTH + 1) - 0.5, labels=[])
        axis.grid(color="white", linewidth=0.6)
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
    axes[0, 0].set_ylabel("query rows", fontsize=9)
    axes[0, 0].set_xlabel("keys", fontsize=9)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
