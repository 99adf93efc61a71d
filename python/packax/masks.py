"""Mask expressions, built masks, and functions on them.

The names that most programs use are also in `packax`.
"""

from packax._src.core.mask import AttentionMask
from packax._src.masks.block_sparse import block_sparse
from packax._src.masks.build import create_attention_mask
from packax._src.masks.documents import documents, ranges
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.intervals import causal, chunked, full, prefix, sliding_window
from packax._src.masks.plot import plot_mask
from packax._src.masks.spans import spans
from packax._src.masks.stack import MaskStack, stack_masks
from packax._src.masks.tree import path_predecessors, shared_prefix, tree, tree_positions

__all__ = [
    "AttentionMask",
    "MaskExpression",
    "MaskStack",
    "block_sparse",
    "causal",
    "chunked",
    "create_attention_mask",
    "documents",
    "full",
    "path_predecessors",
    "plot_mask",
    "prefix",
    "ranges",
    "shared_prefix",
    "sliding_window",
    "spans",
    "stack_masks",
    "tree",
    "tree_positions",
]
