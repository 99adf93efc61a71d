"""Segment ids from what a data pipeline has, and what a loss needs of them.

Every function takes numpy or jax arrays and returns the same kind. On numpy arrays nothing of jax
runs, so the workers of a data loader can call them; on jax arrays they work under `jit`, where
sizes that depend on values are arguments. `pack` and `check_packing` are for numpy alone.
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
