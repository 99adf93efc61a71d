"""`path_predecessors`: for each token of a packed tree, the token before it on its path."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.arguments import Array, numpy_of
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.tree import tree_of


def path_predecessors(expression: MaskExpression) -> Array:
    """The index of the token before each one on its path: which row predicts it.

    In a packed tree the first token of every branch follows the last token of the segment above,
    wherever that is in the row. Take the logits, or log-probabilities, of a token from that index.

    Args:
        expression: a `tree` or `shared_prefix`, or one joined with others by `&`.

    Returns:
        int32, shaped like the ids of the tree: (B, S) or (S,); -1 for the first token of a root,
        which nothing predicts, and for padding. numpy for numpy.

    Raises:
        ValueError: an expression without a tree.

    Examples:
        >>> two_answers = packax.masks.tree([0, 0, 1, 2, 2], [-1, 0, 0])
        >>> packax.masks.path_predecessors(two_answers)
        array([-1,  0,  1,  1,  3], dtype=int32)
    """
    found = tree_of(expression) if isinstance(expression, MaskExpression) else None
    if found is None:
        raise ValueError(
            f"expression must contain tree(...) or shared_prefix(...), but is {expression!r}"
        )
    nodes = found.nodes()
    if numpy_of(nodes.position) is np:
        rows = (type(nodes)(*row) for row in zip(*nodes, strict=True))
        before = np.stack([_of_row(row, np) for row in rows])
    else:
        before = jax.vmap(lambda row: _of_row(row, jnp))(nodes)
    flat = found.ids.ndim == 1 and found.others.ndim == 1
    return before[0] if flat else before


def _of_row(nodes: Any, xp: Any) -> Any:
    """A token's predecessor is in its segment, or is the last of the nearest non-empty one above.

    Positions along a path are known, so the segment above with the predecessor is found by
    doubling: climb while the segment 2^k above begins after the predecessor.
    """
    length, padding = nodes.position.shape[0], nodes.start.shape[0] - 1
    if length == 0:
        return nodes.position
    position = nodes.position - 1
    at = nodes.node
    for k in reversed(range(nodes.ups.shape[0])):
        above = nodes.ups[k][at]
        at = xp.where((above != padding) & (nodes.start[above] > position), above, at)
    at = xp.where(nodes.start[at] > position, nodes.ups[0][at], at)
    rank = xp.clip(nodes.rank[at] + position - nodes.start[at], 0, length - 1)
    there = nodes.valid & (nodes.end > 0) & (position >= 0)
    return xp.where(there, nodes.token[rank], -1).astype(np.int32)
