"""`plot_mask` and `plot_plan`: draw the pairs that a mask allows, and the rows of each rank."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from packax._src.context.load_balance import ContextPlan
from packax._src.core.arguments import described
from packax._src.core.mask import AttentionMask
from packax._src.core.spec import PADDING_SEGMENT_ID, ceil_div
from packax._src.masks.expressions import MaskExpression, check_lengths, documents_of
from packax._src.masks.tree import tree_of

_DOCUMENTS = (
    *("#1f6feb", "#e08a1e", "#2da06f", "#c9448f"),
    *("#7a5af0", "#1595a8", "#d2502d", "#5d7a1f"),
)
_PADDING, _NOTHING, _FULL, _PARTIAL = "#d0d7de", "#ffffff", "#1b1f24", "#8c959f"
_MOST = 4096
_MOST_ROWS_OF_PLAN = 8192
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
    """Draw which keys each query attends to, with matplotlib.

    Attended pairs have the color of the query's document (for a tree without documents: of its
    segment or group), and padding is gray. A built mask does not store the segments or groups of
    its trees: draw the expression instead. Each visited block has a frame: solid if all of its
    pairs are attended (the kernels compare nothing there), dashed if only some are. Blocks without
    a frame are skipped. If a plan permuted the queries, they are drawn in permuted order.

    Args:
        mask: an expression, or the result of `create_attention_mask`, of at most 4096 queries and
            keys.
        q_len, kv_len: the lengths, if the arrays of an expression do not determine them.
        batch, head: the row of the batch to draw, and the head to draw if a block mask has heads.
        block_size: the size of the frames, (queries, keys) or one number; by default the kernels'
            blocks.
        ax: matplotlib axes to draw on; None: new ones.

    Returns:
        The matplotlib axes.

    Raises:
        ImportError: without matplotlib.
        ValueError: not an expression or mask; missing lengths, or lengths above 4096; an invalid
            batch, head or block_size.

    Examples:
        >>> expression = packax.causal() & packax.documents(segment_ids)
        >>> ax = packax.masks.plot_mask(expression, block_size=8)
    """
    dense, q_ids, kv_ids = _of_one_row(mask, q_len, kv_len, batch, head)
    sizes = np.atleast_1d(np.asarray(block_size))
    if sizes.shape not in ((1,), (2,)) or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        raise ValueError(f"block_size must be one or two positive integers, but is {block_size!r}")
    rows, keys = int(sizes[0]), int(sizes[-1])
    plt = _pyplot("plot_mask")
    if ax is None:
        size = (6, 6 * min(2, max(0.5, dense.shape[0] / dense.shape[1])))
        _, ax = plt.subplots(figsize=size, layout="constrained")
    palette = [_NOTHING, _PADDING, *_DOCUMENTS]
    colours = _colormap(palette)
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
    ax.set_ylabel("queries")
    title = repr(mask) if isinstance(mask, MaskExpression) else "AttentionMask"
    _set_title(ax, title, f"{dense.mean():.1%} of all pairs are attended")
    return ax


def plot_plan(
    plan: ContextPlan,
    expression: MaskExpression | None = None,
    *,
    batch: int = 0,
    ax: Any = None,
) -> Any:
    """Draw which tokens of the sequence each rank computes, with matplotlib.

    Each rank has a lane in which its tokens are colored, in the order of the sequence, with a line
    between chunks. With an expression, a lane above them shows the documents, and each lane ends
    with the load of its rank: the number of attended query-key pairs, divided by the average over
    all ranks.

    Args:
        plan: from `context_plan`.
        expression: the expression of the plan, of at most 8192 tokens. None: draws no loads.
        batch: which row of the batch.
        ax: matplotlib axes to draw on; None: new ones.

    Returns:
        The matplotlib axes.

    Raises:
        ImportError: without matplotlib.
        ValueError: not a plan, an expression of another length or one that is too long, or an
            invalid batch.

    Examples:
        >>> plan = packax.context_plan(expression, ranks=4, chunk=128)
        >>> ax = packax.context.plot_plan(plan, expression)
    """
    if not isinstance(plan, ContextPlan):
        raise ValueError(f"plan must come from context_plan, but is {described(plan)}")
    plans = plan.order.shape[0]
    if plans > 1 and not 0 <= batch < plans:
        raise ValueError(f"batch must be from 0 to {plans - 1}, but is {batch}")
    index = np.asarray(plan.index())[min(batch, plans - 1)].reshape(plan.ranks, -1)
    own = np.zeros((plan.ranks, plan.length), int)
    np.put_along_axis(own, index, 1, axis=1)
    lanes = [np.where(x == 1, 1 + rank % len(_DOCUMENTS), 0) for rank, x in enumerate(own)]
    names = [f"rank {rank}" for rank in range(plan.ranks)]
    loads = None
    if expression is not None:
        if max(plan.length, 1) > _MOST_ROWS_OF_PLAN:
            raise ValueError(
                f"plot_plan computes loads of at most {_MOST_ROWS_OF_PLAN} tokens, but the plan "
                f"has {plan.length}: leave out expression"
            )
        dense, ids, _ = _of_one_row(
            expression, plan.length, plan.length, batch, 0, _MOST_ROWS_OF_PLAN
        )
        loads = own @ dense.sum(1)
        loads = loads / max(1.0, loads.mean())
        if ids is not None:
            lanes.insert(0, np.where(ids == PADDING_SEGMENT_ID, -1, 1 + _numbers(ids)))
            names.insert(0, "documents")
    plt = _pyplot("plot_plan")
    if ax is None:
        _, ax = plt.subplots(figsize=(8, 0.8 + 0.35 * len(lanes)), layout="constrained")
    colours = _colormap([_PADDING, _NOTHING, *_DOCUMENTS])
    extent = (0, plan.length, len(lanes), 0)
    limits = {"vmin": -1, "vmax": len(_DOCUMENTS), "interpolation": "nearest"}
    ax.imshow(np.stack(lanes), cmap=colours, extent=extent, aspect="auto", **limits)
    for lane, rows in enumerate(own, len(lanes) - plan.ranks):
        inside = rows[1:] & rows[:-1]  # both sides of the border belong to the rank
        chunk_ends = (np.arange(1, plan.length) % plan.chunk == 0) & (plan.chunk > 1)
        borders = 1 + np.flatnonzero(inside & chunk_ends)
        ax.vlines(borders, lane + 0.05, lane + 0.95, color=_NOTHING, linewidth=0.8)
        if loads is not None:
            load = loads[lane - len(lanes)]
            at = (1.01 * plan.length, lane + 0.5)
            ax.text(*at, f"{load:.3f}", va="center", fontsize=_FONT_SIZE)
    ax.set_yticks(np.arange(len(lanes)) + 0.5, names)
    ax.tick_params(axis="y", length=0)
    ax.hlines(range(1, len(lanes)), 0, plan.length, color=_PADDING, linewidth=0.8)
    ax.set_xlabel("tokens of the sequence")
    chunk = f" of {plan.chunk} tokens" if plan.chunk > 1 else ""
    title = f'"{plan.kind}": {plan.ranks} ranks, {plan.length // plan.chunk} chunks{chunk}'
    _set_title(ax, title, *([] if loads is None else [f"largest load {loads.max():.3f}"]))
    return ax


def _pyplot(name: str) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"{name} needs matplotlib: pip install matplotlib") from error
    return plt


def _colormap(palette: list[str]) -> Any:
    import matplotlib.colors

    return matplotlib.colors.ListedColormap(palette)


def _set_title(ax: Any, title: str, *lines: str) -> None:
    """Sets a title, wrapped to the width of the axes so that plots do not overlap."""
    width_in_points = ax.get_window_extent().width / ax.figure.dpi * 72
    letters = max(20, int(width_in_points / (0.6 * _FONT_SIZE)))
    ax.set_title("\n".join([*textwrap.wrap(title, letters), *lines]), fontsize=_FONT_SIZE)


def _of_one_row(
    mask: Any, q_len: int | None, kv_len: int | None, batch: int, head: int, most: int = _MOST
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The dense mask of one batch row and head, and the ids of its rows and keys."""
    q_ids: Any
    kv_ids: Any
    if isinstance(mask, MaskExpression):
        q_len, kv_len = check_lengths(mask, q_len, kv_len)
        if q_len is None or kv_len is None:
            name = "q_len" if q_len is None else "kv_len"
            raise ValueError(f"cannot infer {name} from the arrays of the expression: pass {name}=")
        document, tree = documents_of(mask), tree_of(mask)
        q_ids = None if document is None else document.q_ids
        kv_ids = None if document is None else document.kv_ids
        if tree is not None:  # padding of the tree or of the documents is padding
            padding = np.asarray(tree.ids) == PADDING_SEGMENT_ID
            q_ids = np.where(padding, -1, tree.groups() if q_ids is None else q_ids)
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
    if max(q_len, kv_len) > most:
        raise ValueError(
            f"plot_mask is for at most {most} queries and keys, but there are {q_len} and {kv_len}"
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
    """Indices into the palette: 0 nothing, 1 padding, from 2 the document of the query."""
    number = np.zeros(dense.shape[0], int)
    image = np.zeros(dense.shape, int)
    if q_ids is not None:
        number = _numbers(q_ids)
        image[q_ids == PADDING_SEGMENT_ID] = 1
        image[:, kv_ids == PADDING_SEGMENT_ID] = 1
    return np.where(dense, 2 + number[:, None], image)


def _numbers(ids: np.ndarray) -> np.ndarray:
    """Numbers the ids in the order of their first appearance, modulo the number of colors."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse] % len(_DOCUMENTS)


def _blocks(dense: np.ndarray, rows: int, keys: int) -> list[tuple[str, int, int]]:
    """("full" or "partial", first row, first key) for each block with an attended pair."""
    found = []
    for top in range(0, rows * ceil_div(dense.shape[0], rows), rows):
        for left in range(0, keys * ceil_div(dense.shape[1], keys), keys):
            block = dense[top : top + rows, left : left + keys]
            if block.any():
                found.append(("full" if block.all() else "partial", top, left))
    return found
