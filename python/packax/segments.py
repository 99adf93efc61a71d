"""Segment ids from the formats of data pipelines, and what a loss needs from them.

Every function takes numpy or jax arrays and returns the same kind. On numpy arrays they do not use
jax, so the workers of a data loader can call them. On jax arrays they work under `jit`, where sizes
that depend on values must be passed. `pack` and `check_packing` take numpy arrays only.
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
