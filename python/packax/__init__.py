"""Exact FlashAttention over packed documents, for JAX on NVIDIA GPUs.

>>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
>>> out = packax.flash_attention(query, key, value, mask)
"""

from packax import decode_lowering as _decode_lowering  # noqa: F401 (registers the rules)
from packax.attention import flash_attention
from packax.attention_mask import AttentionMask
from packax.block_sparse import block_sparse
from packax.build import create_attention_mask
from packax.decode import decode_attention
from packax.derivatives import CHECKPOINT_NAMES
from packax.dot_product import dot_product_attention
from packax.intervals import causal, chunked, full, prefix, sliding_window, spans
from packax.lowering import export_checks
from packax.masks import PADDING_SEGMENT_ID, documents, ranges
from packax.plan import ContextPlan, context_plan
from packax.scores import Alibi, alibi
from packax.sharding import AttentionSharding

__version__ = "0.1.0"

__all__ = [
    "CHECKPOINT_NAMES",
    "PADDING_SEGMENT_ID",
    "Alibi",
    "AttentionMask",
    "AttentionSharding",
    "ContextPlan",
    "__version__",
    "alibi",
    "block_sparse",
    "causal",
    "chunked",
    "context_plan",
    "create_attention_mask",
    "decode_attention",
    "documents",
    "dot_product_attention",
    "export_checks",
    "flash_attention",
    "full",
    "prefix",
    "ranges",
    "sliding_window",
    "spans",
]
