"""`AttentionOp`: MaxText's attention op, computed by packax.

    from packax.integrations.maxtext import AttentionOp

    op = AttentionOp(
        config=config, mesh=mesh, attention_type="local_sliding", sliding_window_size=4096
    )
    out = op(query, key, value, decoder_segment_ids, inputs_positions, model_mode)

A call computes the same as MaxText's dense path (`generate_attention_mask` and
`apply_attention_dot` of its attention_op.py, as of commit 001b727), without a dense mask. Queries
arrive scaled: the op's own scale is 1. For differences see "MaxText" in
the documentation.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import packax
from packax import AttentionSharding
from packax.extend import as_array, as_arrays, checked_precision
from packax.integrations.maxtext.decode import one_cache
from packax.integrations.maxtext.masks import (
    AdditiveMask,
    Tokens,
    checked_indexer,
    chosen,
    documents_of,
    expression_of,
    reorder_sequence,
    striped,
)
from packax.masks import AttentionMask, MaskExpression

__all__ = ["AttentionOp", "reorder_sequence"]

TRAIN, PREFILL, AUTOREGRESSIVE = "train", "prefill", "autoregressive"
_TYPES = ("global", "local_sliding", "chunk", "full", "mla", "block_diffusion")
_NO_EFFECT = {  # arguments for MaxText's own kernels and layouts
    *("attention_kernel", "dtype", "float32_logits", "float32_qk_product", "reshape_q", "rngs"),
    *("num_kv_heads", "num_query_heads", "max_prefill_predict_length", "max_target_length"),
    *("compute_axis_order", "key_axis_order", "ragged_block_size"),
    *("flash_axis_names_kv", "flash_axis_names_q", "flash_axis_names_splash_kernel"),
    *("cache_logical_axis_names", "cache_scale_logical_axis_names"),
    *("prefill_cache_logical_axis_names", "ragged_lengths_names", "ragged_qkv_axis_names"),
}


class AttentionOp(AdditiveMask, nnx.Module):
    """Attention with MaxText's calling convention.

    Args:
        config: MaxText's config, or any object with some of the fields that are read:
            attention_type, causal_block_size, moba (with moba_chunk_size and moba_topk),
            matmul_precision (of float32 operands), context_parallel_load_balance, context_sharding
            (the mesh axis, "context"), context_parallel_reorder_strategy (with packing,
            context_parallel_strategy and hardware if it is "auto").
        mesh: MaxText's mesh; its size along context_sharding determines how the tokens were
            reordered.
        attention_type: "global", "local_sliding", "chunk", "full", "mla", "block_diffusion", or
            MaxText's AttentionType. None: the config's, or global.
        attn_logits_soft_cap: logits become cap * tanh(logits / cap); None or 0: no cap.
        sliding_window_size: the largest number of keys that a query attends to, including its own;
            0: none.
        chunk_attn_window_size: the length of a chunk.
        dropout_rate: must be 0.
        quant, kv_quant: must be None.
        use_ragged_attention: must be False; the result would be the same.
        sharding: a `packax.AttentionSharding` for context parallelism.
        gather_head_groups: as in `packax.flash_attention`.
        implementation: as in `packax.flash_attention`.
        others: MaxText's other keyword arguments are accepted and have no effect.

    Raises:
        ValueError: an unknown attention type, or a size out of range.
        NotImplementedError: a type, an option or a config without a kernel.
        TypeError: an argument that MaxText does not have.

    Examples:
        >>> op = AttentionOp(
        ...     config=config, mesh=mesh, attention_type="local_sliding", sliding_window_size=4096
        ... )
        >>> out = op(query, key, value, decoder_segment_ids, inputs_positions, "train")
    """

    def __init__(
        self,
        config: Any = None,
        mesh: Any = None,
        *,
        attention_type: Any = None,
        attn_logits_soft_cap: float | None = None,
        sliding_window_size: int | None = None,
        chunk_attn_window_size: int | None = None,
        dropout_rate: float = 0.0,
        quant: Any = None,
        kv_quant: Any = None,
        use_ragged_attention: bool = False,
        sharding: AttentionSharding | None = None,
        gather_head_groups: int | tuple[int, ...] | None = None,
        implementation: Any = None,
        **others: Any,
    ):
        unknown = sorted(others.keys() - _NO_EFFECT)
        if unknown:
            raise TypeError(f"AttentionOp has no argument {', '.join(unknown)}")
        self.attention_type = _attention_type_of(config, attention_type)
        self.moba = None
        if getattr(config, "moba", False):
            fields = ("moba_chunk_size", "moba_topk")
            missing = [f"config.{name}" for name in fields if not hasattr(config, name)]
            if missing:
                raise ValueError(f"config.moba needs {' and '.join(missing)}")
            self.moba = (config.moba_chunk_size, config.moba_topk)
        refused = {
            "dropout_rate must be 0": dropout_rate,
            "quant must be None": quant is not None,
            "kv_quant must be None": kv_quant is not None,
            "use_ragged_attention must be False": use_ragged_attention,
        }
        for what, given in refused.items():
            if given:
                raise NotImplementedError(
                    f"{what}: there is no kernel for it, but MaxText's dot_product attention"
                    " supports it"
                )
        self.attn_logits_soft_cap = attn_logits_soft_cap or None
        self.size = _size_of(
            config, self.attention_type, sliding_window_size, chunk_attn_window_size
        )
        self.reordered = reordered_ranks(mesh, config)
        self.stripes = self.reordered if _stripes_of(config) else 1
        self.sharding = sharding
        self.divided = sharding is not None and sharding.query[1] is not None  # the sequence
        self.gather_head_groups = gather_head_groups
        precision = getattr(config, "matmul_precision", None)
        self.precision = precision
        if precision is not None:  # None: jax's setting when it is called
            self.precision = checked_precision(getattr(precision, "value", precision))
        self.implementation = implementation

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        decoder_segment_ids: Any = None,
        inputs_positions: Any = None,
        model_mode: str = TRAIN,
        cached_values: Any = None,
        previous_chunk: Any = None,
        bidirectional_mask: Any = None,
        sinks: Any = None,
        indexer_mask: Any = None,
        compressed_mask: Any = None,
        compressed_kv: Any = None,
        slot: int | None = None,
        record_max_logits: bool = False,
        decoder_segment_ids_kv: Any = None,
        pad_kv_total: int = 0,
        compress_ratio: int = 0,
    ) -> jax.Array:
        """Attention of query (B, Sq, H, D), scaled, to key and value (B, Skv, Hkv, D) or a cache.

        Args:
            decoder_segment_ids: (B, Skv), integers or floats: queries attend to keys with the same
                id; negative ids are padding. When decoding, the keys with id 1 are attended.
            inputs_positions: (B, Sq); read only where MaxText reads them: for tokens reordered over
                a context-parallel mesh.
            model_mode: "train"; "prefill" or "autoregressive", with cached_values.
            cached_values: (prefill, autoregressive): (key, value, segment ids), and None or (key,
                value, segment ids, lengths).
            previous_chunk: of shape (B, n, ...): the n keys before this chunk of a prompt, which
                key, value and decoder_segment_ids also include.
            bidirectional_mask: (B, S): within a document, tokens in a run of True attend to each
                other in both directions.
            sinks: (H,), one more logit per head in the softmax's denominator.
            indexer_mask: (B, Sq, Skv) additive, 0 or very negative; when decoding for the keys of
                both caches.
            record_max_logits: store the largest logit of each head as `self.max_logits`, an
                nnx.Intermediate of shape (B, H): after the soft cap, over attended pairs; -inf if
                there are none.
            decoder_segment_ids_kv: (B, Skv), the keys' ids if they differ.
            pad_kv_total, compress_ratio: for compressed_kv; no effect without it.

        Returns:
            (B, Sq, H, Dv), dtype of query; 0 for queries that attend to nothing.

        Raises:
            ValueError: wrong shapes, dtypes or arguments.
            NotImplementedError: compressed_mask or compressed_kv; no kernel for the dtype or head
                dim.
        """
        for name, x in (("compressed_mask", compressed_mask), ("compressed_kv", compressed_kv)):
            if x is not None:
                raise NotImplementedError(
                    f"{name} must be None: there is no kernel for compressed attention, but "
                    "MaxText's dot_product attention supports it"
                )
        if model_mode not in (TRAIN, PREFILL, AUTOREGRESSIVE):
            raise ValueError(
                f'model_mode must be "train", "prefill" or "autoregressive", but is {model_mode!r}'
            )
        stripes = self.stripes if model_mode == TRAIN and previous_chunk is None else 1

        def moved(x: Any, back: bool = False, seq_dim: int = 1) -> Any:
            """Reorders from stripes over the ranks to two chunks per rank, or back."""
            if stripes == 1:
                return x
            if back:
                return striped(reorder_sequence(x, stripes, to_contiguous=True), stripes)
            x = striped(x, stripes, seq_dim, to_contiguous=True)
            return reorder_sequence(x, stripes, seq_dim)

        tokens = Tokens(
            decoder_segment_ids, decoder_segment_ids_kv, inputs_positions, bidirectional_mask
        )
        # From here on, reordered tokens are in two chunks per rank.
        query, key, value = map(moved, (query, key, value))
        tokens = Tokens(*map(moved, tokens))
        indexer_mask = moved(moved(indexer_mask), seq_dim=2)
        cache = None
        if model_mode != TRAIN:
            if cached_values is None or cached_values[0] is None:
                raise ValueError(f'cached_values must hold the prefill cache in "{model_mode}"')
            (key, value, ids), cache = cached_values
            tokens = tokens._replace(ids=ids)
        decoding = model_mode == AUTOREGRESSIVE
        if cache is not None and not decoding:
            raise ValueError('the autoregressive cache is for model_mode "autoregressive"')
        query, key, value = as_arrays(query=query, key=key, value=value)
        if decoding:
            own = key, value, tokens.ids
            caches = [own] if cache is None else [own, cache[:3]]
        if indexer_mask is not None:
            keys = sum(one[0].shape[1] for one in caches) if decoding else key.shape[1]
            indexer_mask = checked_indexer(indexer_mask, (*query.shape[:2], keys))
        if decoding:
            for name, x in (
                ("previous_chunk", previous_chunk),
                ("bidirectional_mask", bidirectional_mask),
                ("decoder_segment_ids_kv", decoder_segment_ids_kv),
            ):
                if x is not None:
                    raise ValueError(f'{name} must be None in model_mode "autoregressive"')
            parts: list[Any] = []
            at = 0
            for key, value, own_ids in caches:
                to = at + key.shape[1]
                indexer = None if indexer_mask is None else indexer_mask[..., at:to]
                record = record_max_logits and at == 0
                parts.append(one_cache(self, query, key, value, own_ids, indexer, record))
                at = to
            if sinks is not None:
                sinks = as_array("sinks", sinks)
                if sinks.shape != query.shape[2:3]:
                    raise ValueError(
                        f"sinks must have shape {query.shape[2:3]}, but has {sinks.shape}"
                    )
                out, lse = parts[0]
                logits = jnp.broadcast_to(sinks[:, None].astype(lse.dtype), lse.shape)
                parts.append((jnp.zeros_like(out), logits))
            return packax.merge_attention(parts)[0]
        if tokens.ids is None and tokens.kv_ids is not None:
            raise ValueError("decoder_segment_ids_kv was given without decoder_segment_ids")
        names = ("decoder_segment_ids", "decoder_segment_ids_kv")
        ids, kv_ids = map(documents_of, names, tokens[:2])
        before = 0 if previous_chunk is None else previous_chunk.shape[1]
        ranks = 1 if before else self.reordered
        if ranks > 1 and inputs_positions is None:
            raise ValueError(
                "inputs_positions must be given: the tokens are reordered over "
                f"{ranks} context-parallel ranks"
            )
        positions = tokens.positions if ranks > 1 else None
        tokens = Tokens(ids, kv_ids, positions, tokens.images)
        # If rows are not sharded, attention is faster in the order of the sequence.
        in_order = ranks > 1 and not self.divided
        if in_order:
            back = functools.partial(reorder_sequence, cp_size=ranks, to_contiguous=True)
            query, key, value = map(back, (query, key, value))
            tokens = Tokens(*map(back, tokens))
            indexer_mask = back(back(indexer_mask), seq_dim=2)
        mask = self._mask(query, key, tokens, indexer_mask, before)
        out, _ = self.attend(query, key, value, mask, sinks, record_max_logits)
        return moved(reorder_sequence(out, ranks) if in_order else out, back=True)

    def attend(
        self, query: Any, key: Any, value: Any, mask: Any, sinks: Any, record: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The output and the log-sum-exp."""
        options: dict[str, Any] = {"return_max_logits": bool(record)}
        results: Any = packax.flash_attention(
            query,
            key,
            value,
            mask,
            scale=1.0,
            soft_cap=self.attn_logits_soft_cap,
            sinks=sinks,
            return_lse=True,
            precision=self.precision,
            implementation=self.implementation,
            sharding=self.sharding,
            gather_head_groups=self.gather_head_groups,
            checkpoint_name="context",
            **options,
        )
        if record:
            self.max_logits = nnx.Intermediate(results[2])
        return results[0], results[1]

    def built(self, expression: MaskExpression, rows: int, keys: int, plan: Any) -> AttentionMask:
        return packax.create_attention_mask(
            expression,
            q_len=rows,
            kv_len=keys,
            sharding=self.sharding,
            plan=plan,
            implementation=self.implementation,
        )

    def _mask(self, query: Any, key: Any, tokens: Tokens, indexer_mask: Any, before: int) -> Any:
        """The mask of a call without cache. Tokens are in the original order unless the sequence is
        sharded."""
        rows, keys = query.shape[1], key.shape[1]
        plan = None
        if tokens.positions is not None and self.divided:
            plan = packax.context_plan(
                packax.full(), ranks=self.reordered, length=rows, kind="zigzag"
            )
            if self.moba is not None:  # MoBA selects keys in the order of the sequence
                query, key = plan.unpermute((query, key))
            if indexer_mask is not None:
                indexer_mask = plan.unpermute(plan.unpermute(jnp.asarray(indexer_mask)), axis=2)
            tokens = Tokens(*(None if x is None else plan.unpermute(x) for x in tokens))
        if tokens.images is not None and (before or rows != keys):
            raise NotImplementedError(
                "bidirectional_mask is for self-attention without previous_chunk: "
                f"there are {rows} queries and {keys} keys"
            )
        expression = expression_of(self.attention_type, self.size, before, rows, tokens)
        expression = chosen(expression, self.moba, query, key, before, indexer_mask)
        return self.built(expression, rows, keys, plan)


# --- Checks of MaxText's configuration.


def _attention_type_of(config: Any, given: Any) -> str:
    def name(x: Any) -> str:
        return str(getattr(x, "value", x))

    configured = name(getattr(config, "attention_type", "global"))
    kind = configured if given is None else name(given)
    if configured == "block_diffusion" and kind == "global":
        kind = configured
    if kind == "compressed":
        raise NotImplementedError(
            f'attention_type "compressed" has no kernel; available: {", ".join(_TYPES)}'
        )
    if kind not in _TYPES:
        raise ValueError(f"attention_type must be one of {', '.join(_TYPES)}, but is {kind!r}")
    return kind


def _size_of(config: Any, kind: str, window: int | None, chunk: int | None) -> int:
    """The window, chunk or block size of an attention type; 0 for types without one."""
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
            f'{name} must be an integer of at least {least} for attention_type "{kind}", but is '
            f"{size!r}"
        )
    return int(size)


def _stripes_of(config: Any) -> bool:
    """Whether tokens are in TransformerEngine's "striped" order, not in two chunks per rank."""
    strategy = getattr(config, "context_parallel_reorder_strategy", None)
    strategy = str(getattr(strategy, "value", strategy)).lower()
    if strategy != "auto":
        return strategy == "striped"
    return (
        bool(getattr(config, "packing", False))
        and str(getattr(config, "context_parallel_strategy", "")).lower() == "ring"
        and getattr(config, "hardware", "") in ("gpu", "gpu_multiprocess")
    )


def reordered_ranks(mesh: Any, config: Any) -> int:
    """The number of ranks for which MaxText's input pipeline reordered tokens; 1: no reordering."""
    if mesh is None or not getattr(config, "context_parallel_load_balance", False):
        return 1
    return mesh.shape.get(getattr(config, "context_sharding", "context"), 1)
