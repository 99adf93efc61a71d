"""`plot_mask`: a picture of what an expression or a built mask attends."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from packax._src.core.mask import AttentionMask
from packax._src.core.messages import described
from packax._src.core.shapes import PADDING_SEGMENT_ID, ceil_div
from packax._src.masks.expressions import MaskExpression, documents_of
from packax._src.masks.lengths import check_lengths
from packax._src.masks.tree import tree_of

_DOCUMENTS = (
    "#1f6feb",
    "#e08a1e",
    "#2da06f",
    "#c9448f",
    "#7a5af0",
    "#1595a8",
    "#d2502d",
    "#5d7a1f",
)
_PADDING, _NOTHING, _FULL, _PARTIAL = "#d0d7de", "#ffffff", "#1b1f24", "#8c959f"
_MOST = 4096
_FONT_SIZE = 9


def plot_mask(
    mask: MaskExpression | AttentionMask,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    batch: int = 0,
    head: int = 0,
    block_size: int | tuple[int, int] = (128, 64),
    ax: Any = None,
) -> Any:
    """Draw which keys each query row attends, with matplotlib.

    Pairs that are attended have the colour of the row's document (of a tree alone: of its segment
    or group), rows and keys of padding are grey. A built mask does not know the segments or groups
    of its trees: draw the expression. A frame is drawn around each block that has work: solid where
    all of its pairs are attended (the kernels compare nothing there), dashed where some are. Blocks
    without a frame are skipped. A mask of permuted rows is drawn in their order.

    Args:
        mask: an expression, or what `create_attention_mask` returned, of at most 4096 rows and
            keys.
        q_len, kv_len: of an expression whose arrays do not say them.
        batch, head: which row of the batch, and which head of a block_sparse(...) with heads.
        block_size: (rows, keys) of the frames, or one number: by default those of the kernels.
        ax: matplotlib axes to draw on; None: new ones.

    Returns:
        The matplotlib axes.

    Raises:
        ImportError: without matplotlib.
        ValueError: not an expression or mask, lengths that are missing or too large, a batch, head
            or block_size that there is not.

    >>> ax = packax.plot_mask(packax.causal() & packax.documents(segment_ids), block_size=8)
    """
    dense, q_ids, kv_ids = _of_one_row(mask, q_len, kv_len, batch, head)
    sizes = np.atleast_1d(np.asarray(block_size))
    if sizes.shape not in ((1,), (2,)) or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        raise ValueError(f"block_size must be one or two positive integers, but is {block_size!r}")
    rows, keys = int(sizes[0]), int(sizes[-1])
    try:
        import matplotlib.colors
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot_mask needs matplotlib: pip install matplotlib") from error

    if ax is None:
        _, ax = plt.subplots(figsize=(6, 6 * min(2, max(0.5, dense.shape[0] / dense.shape[1]))))
    palette = [_NOTHING, _PADDING, *_DOCUMENTS]
    colours = matplotlib.colors.ListedColormap(palette)
    height, width = dense.shape
    image = _colours(dense, q_ids, kv_ids)
    extent = (0, width, height, 0)
    limits = {"vmin": 0, "vmax": len(palette) - 1, "interpolation": "nearest"}
    ax.imshow(image, cmap=colours, extent=extent, aspect="equal", **limits)
    for kind, top, left in _blocks(dense, rows, keys):
        ax.add_patch(
            plt.Rectangle(
                (left, top),
                min(keys, width - left),
                min(rows, height - top),
                fill=False,
                gid=kind,
                linewidth=0.8,
                edgecolor=_FULL if kind == "full" else _PARTIAL,
                linestyle="-" if kind == "full" else "--",
            )
        )
    ax.set_xlabel("keys")
    ax.set_ylabel("query rows")
    title = repr(mask) if isinstance(mask, MaskExpression) else "AttentionMask"
    width_in_points = ax.get_window_extent().width / ax.figure.dpi * 72
    letters = max(
        20, int(width_in_points / (0.6 * _FONT_SIZE))
    )  # so that neighbours do not overlap
    lines = *textwrap.wrap(title, letters), f"{dense.mean():.1%} of all pairs are attended"
    ax.set_title("\n".join(lines), fontsize=_FONT_SIZE)
    return ax


def _of_one_row(
    mask: Any, q_len: int | None, kv_len: int | None, batch: int, head: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The dense mask of one batch row and head, and the ids of its rows and keys."""
    q_ids: Any
    kv_ids: Any
    if isinstance(mask, MaskExpression):
        q_len, kv_len = check_lengths(mask, q_len, kv_len)
        if q_len is None or kv_len is None:
            name = "q_len" if q_len is None else "kv_len"
            raise ValueError(
                f"{name} is not known: no array of the expression says it, so give {name}="
            )
        document, tree = documents_of(mask), tree_of(mask)
        q_ids = None if document is None else document.q_ids
        kv_ids = None if document is None else document.kv_ids
        if tree is not None:  # for self-attention; padding is what either has as padding
            q_ids = (
                tree.ids if q_ids is None else np.where(tree.ids == PADDING_SEGMENT_ID, -1, q_ids)
            )
    elif isinstance(mask, AttentionMask):
        for name, given, have in (("q_len", q_len, mask.q_len), ("kv_len", kv_len, mask.kv_len)):
            if given not in (None, have):
                raise ValueError(f"{name} is {given}, but mask was built for {have}")
        q_len, kv_len = mask.q_len, mask.kv_len
        q_ids, kv_ids = mask.q_ids, mask.kv_ids
    else:
        raise ValueError(
            "mask must be a mask expression, or come from create_attention_mask, but is "
            f"{described(mask)}"
        )
    if max(q_len, kv_len) > _MOST:
        raise ValueError(
            f"plot_mask is for at most {_MOST} rows and keys, but there are {q_len} and {kv_len}"
        )
    whole = mask.as_array() if isinstance(mask, AttentionMask) else mask.as_array(q_len, kv_len)
    dense = np.asarray(whole)
    dense = dense.reshape((1,) * (3 - dense.ndim) + dense.shape)
    dense = dense if dense.ndim == 4 else dense[:, None]
    for name, index, size in (("batch", batch, dense.shape[0]), ("head", head, dense.shape[1])):
        if size > 1 and not 0 <= index < size:
            raise ValueError(f"{name} must be from 0 to {size - 1}, but is {index}")
    ids = (
        None if x is None else np.atleast_2d(x)[min(batch, np.atleast_2d(x).shape[0] - 1)]
        for x in (q_ids, q_ids if kv_ids is None else kv_ids)
    )
    return dense[min(batch, len(dense) - 1), min(head, dense.shape[1] - 1)], *ids


def _colours(dense: np.ndarray, q_ids: Any, kv_ids: Any) -> np.ndarray:
    """0: nothing, 1: padding, from 2: the colours of documents in their order."""
    number = np.zeros(dense.shape[0], int)
    image = np.zeros(dense.shape, int)
    if q_ids is not None:
        _, first, inverse = np.unique(q_ids, return_index=True, return_inverse=True)
        number = np.argsort(np.argsort(first))[inverse]  # in the order in which they begin
        image[q_ids == PADDING_SEGMENT_ID] = 1
        image[:, kv_ids == PADDING_SEGMENT_ID] = 1
    return np.where(dense, 2 + number[:, None] % len(_DOCUMENTS), image)


def _blocks(dense: np.ndarray, rows: int, keys: int) -> list[tuple[str, int, int]]:
    """("full" or "partial", first row, first key) of the blocks in which a pair is attended."""
    found = []
    for top in range(0, rows * ceil_div(dense.shape[0], rows), rows):
        for left in range(0, keys * ceil_div(dense.shape[1], keys), keys):
            block = dense[top : top + rows, left : left + keys]
            if block.any():
                found.append(("full" if block.all() else "partial", top, left))
    return found
