"""Segment ids from the formats of data pipelines, and what a loss needs from them.

Every function takes numpy or jax arrays and returns the same kind, except `pack`, which returns
numpy arrays. With numpy arrays they do not run jax, so the workers of a data loader can call them.
With jax arrays they work under `jit`, except `pack` and `check_packing`; sizes that depend on
values must be passed.
"""

from packax._src.segments.ids import (
    NextTokens,
    cu_seqlens,
    from_attention_mask,
    from_cu_seqlens,
    from_lengths,
    from_one_based,
    from_positions,
    next_tokens,
    positions,
)
from packax._src.segments.packing import Packed, PackingReport, check_packing, pack

__all__ = [
    "NextTokens",
    "Packed",
    "PackingReport",
    "check_packing",
    "cu_seqlens",
    "from_attention_mask",
    "from_cu_seqlens",
    "from_lengths",
    "from_one_based",
    "from_positions",
    "next_tokens",
    "pack",
    "positions",
]
