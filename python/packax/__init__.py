"""Exact FlashAttention over packed documents, for JAX on NVIDIA GPUs.

The documentation is in docs/ of packax's source repository, as text and as a site
(`python -m mkdocs serve`). Docstrings and errors name its pages by their titles.

Examples:
    >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    >>> out = packax.flash_attention(query, key, value, mask)
"""

from packax import context, kv_cache, masks, segments
from packax._src.attention import flash_attention
from packax._src.autodiff import CHECKPOINT_NAMES
from packax._src.cascade import decode_shared_prefix
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import AttentionSharding
from packax._src.core.spec import PADDING_SEGMENT_ID
from packax._src.decode import decode_attention
from packax._src.explain import explain
from packax._src.masks.build import create_attention_mask
from packax._src.masks.documents import documents
from packax._src.masks.intervals import causal, chunked, full, prefix, sliding_window
from packax._src.masks.planning import context_plan
from packax._src.ops.lowering import export_checks
from packax._src.ops.merge import merge_attention
from packax._src.ops.score_mods import alibi
from packax._src.ragged import ragged_paged_attention
from packax.integrations.jax_nn import dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "CHECKPOINT_NAMES",
    "PADDING_SEGMENT_ID",
    "AttentionMask",
    "AttentionSharding",
    "__version__",
    "alibi",
    "causal",
    "chunked",
    "context",
    "context_plan",
    "create_attention_mask",
    "decode_attention",
    "decode_shared_prefix",
    "documents",
    "dot_product_attention",
    "explain",
    "export_checks",
    "flash_attention",
    "full",
    "kv_cache",
    "masks",
    "merge_attention",
    "prefix",
    "ragged_paged_attention",
    "segments",
    "sliding_window",
]
