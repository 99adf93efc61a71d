"""Settings, sharding specs and the permutation that context parallelism uses."""

from packax.kvax.utils.common import PADDING_SEGMENT_ID, FlashAttentionParamsConfig
from packax.kvax.utils.permutation import (
    permute_tokens_context_parallelism,
    unpermute_tokens_context_parallelism,
)
from packax.kvax.utils.specs import attention_specs, get_attention_specs, set_attention_specs

__all__ = [
    "PADDING_SEGMENT_ID",
    "FlashAttentionParamsConfig",
    "attention_specs",
    "get_attention_specs",
    "permute_tokens_context_parallelism",
    "set_attention_specs",
    "unpermute_tokens_context_parallelism",
]
