"""Exact FlashAttention over packed documents, for JAX on NVIDIA GPUs.

Examples:
    >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    >>> out = packax.flash_attention(query, key, value, mask)
"""

from packax import context, kv_cache, masks, segments
from packax._src.attention import flash_attention
from packax._src.autodiff import CHECKPOINT_NAMES
from packax._src.cascade import decode_shared_prefix
from packax._src.context.load_balance import ContextPlan
from packax._src.context.plan_check import check_plan, debug_checks
from packax._src.context.processes import check_same_rows, local_rows
from packax._src.core.mask import AttentionMask
from packax._src.core.shapes import PADDING_SEGMENT_ID
from packax._src.core.sharding import AttentionSharding
from packax._src.decode import decode_attention
from packax._src.masks.block_sparse import block_sparse
from packax._src.masks.build import create_attention_mask
from packax._src.masks.documents import documents, ranges
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.intervals import causal, chunked, full, prefix, sliding_window
from packax._src.masks.planning import (
    ContextParallelInputs,
    context_parallel_inputs,
    context_plan,
)
from packax._src.masks.plot import plot_mask
from packax._src.masks.spans import spans
from packax._src.masks.tree import depth_positions, shared_prefix, tree
from packax._src.ops.lowering import export_checks
from packax._src.ops.merge import merge_attention
from packax._src.ops.score_mods import Alibi, alibi
from packax.integrations.jax_nn import dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "CHECKPOINT_NAMES",
    "PADDING_SEGMENT_ID",
    "Alibi",
    "AttentionMask",
    "AttentionSharding",
    "ContextParallelInputs",
    "ContextPlan",
    "MaskExpression",
    "__version__",
    "alibi",
    "block_sparse",
    "causal",
    "check_plan",
    "check_same_rows",
    "chunked",
    "context",
    "context_parallel_inputs",
    "context_plan",
    "create_attention_mask",
    "debug_checks",
    "decode_attention",
    "decode_shared_prefix",
    "depth_positions",
    "documents",
    "dot_product_attention",
    "export_checks",
    "flash_attention",
    "full",
    "kv_cache",
    "local_rows",
    "masks",
    "merge_attention",
    "plot_mask",
    "prefix",
    "ranges",
    "segments",
    "shared_prefix",
    "sliding_window",
    "spans",
    "tree",
]
