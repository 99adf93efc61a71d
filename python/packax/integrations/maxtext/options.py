"""What MaxText's configuration asks for, checked, for `packax.integrations.maxtext`."""

from __future__ import annotations

from typing import Any

import numpy as np

_TYPES = ("global", "local_sliding", "chunk", "full", "mla", "block_diffusion")
NO_EFFECT = (  # how MaxText computes, or lays out what packax does not have
    "attention_kernel",
    "cache_logical_axis_names",
    "cache_scale_logical_axis_names",
    "compute_axis_order",
    "dtype",
    "flash_axis_names_kv",
    "flash_axis_names_q",
    "flash_axis_names_splash_kernel",
    "float32_logits",
    "float32_qk_product",
    "key_axis_order",
    "max_prefill_predict_length",
    "max_target_length",
    "num_kv_heads",
    "num_query_heads",
    "prefill_cache_logical_axis_names",
    "ragged_block_size",
    "ragged_lengths_names",
    "ragged_qkv_axis_names",
    "reshape_q",
    "rngs",
)


def attention_type_of(config: Any, given: Any) -> str:
    def name(x: Any) -> str:
        return str(getattr(x, "value", x))

    configured = name(getattr(config, "attention_type", "global"))
    kind = configured if given is None else name(given)
    if configured == "block_diffusion" and kind == "global":
        kind = configured
    if kind == "compressed":
        raise NotImplementedError(
            f'attention_type "compressed" has no kernel; there are: {", ".join(_TYPES)}'
        )
    if kind not in _TYPES:
        raise ValueError(f"attention_type must be one of {', '.join(_TYPES)}, but is {kind!r}")
    return kind


def size_of(config: Any, kind: str, window: int | None, chunk: int | None) -> int:
    """The size that goes with an attention type; 0 for those without."""
    sizes = {
        "local_sliding": ("sliding_window_size", window),
        "chunk": ("chunk_attn_window_size", chunk),
        "block_diffusion": (
            "config.causal_block_size",
            getattr(config, "causal_block_size", None),
        ),
    }
    if kind not in sizes:
        return 0
    name, size = sizes[kind]
    least = 0 if kind == "local_sliding" else 1
    if not isinstance(size, (int, np.integer)) or size < least:
        raise ValueError(
            f'{name} must be an integer of {least} or more for attention_type "{kind}", but is '
            f"{size!r}"
        )
    return int(size)


def stripes_of(config: Any) -> bool:
    """Whether tokens are reordered one by one, as TransformerEngine's "striped", not in chunks."""
    strategy = getattr(config, "context_parallel_reorder_strategy", None)
    strategy = str(getattr(strategy, "value", strategy)).lower()
    if strategy != "auto":
        return strategy == "striped"
    return (
        bool(getattr(config, "packing", False))
        and str(getattr(config, "context_parallel_strategy", "")).lower() == "ring"
        and getattr(config, "hardware", "") in ("gpu", "gpu_multiprocess")
    )
