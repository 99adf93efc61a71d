"""MaxText's attention op, by packax: `AttentionOp` is called as MaxText's is.

    from packax.integrations.maxtext import AttentionOp

    op = AttentionOp(config=config, mesh=mesh, attention_type="local_sliding", sliding_window_size=4096)
    out = op(query, key, value, decoder_segment_ids, inputs_positions, model_mode)

What a call means is what MaxText's dense path says (`generate_attention_mask` and
`apply_attention_dot` of its attention_op.py, as of commit 001b727), without a dense mask. Queries
arrive scaled: the op's own scale is 1. Where it differs: docs/integrations.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from packax import intervals, masks
from packax.attention import flash_attention
from packax.build import create_attention_mask
from packax.dot_product import key_mask
from packax.integrations import maxtext_dense
from packax.integrations import maxtext_selection as selection
from packax.integrations.maxtext_decode import decode, merged
from packax.integrations.maxtext_tokens import documents_of, reorder_sequence, runs_of
from packax.masks import MaskExpression
from packax.plan import context_plan
from packax.scores import scores_of
from packax.sharding import AttentionSharding

__all__ = ["AttentionOp", "reorder_sequence"]

TRAIN, PREFILL, AUTOREGRESSIVE = "train", "prefill", "autoregressive"
ACTIVE = 1  # the id of a cache's tokens while decoding: all others are no tokens
_TYPES = ("global", "local_sliding", "chunk", "full", "mla", "block_diffusion")
_LOCAL = ("local_sliding", "chunk")
_NO_EFFECT = (  # how MaxText computes, or lays out what packax does not have
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


class AttentionOp(nnx.Module):
    """Attention by MaxText's calling convention.

    Args:
        config: MaxText's, or anything with the fields that are read, each of them optional:
            attention_type, causal_block_size, moba (with moba_chunk_size and moba_topk),
            context_parallel_load_balance, context_sharding (the mesh axis, "context").
        mesh: of MaxText; its size along context_sharding says how the tokens were reordered.
        attention_type: "global", "local_sliding", "chunk", "full", "mla", "block_diffusion", or
            MaxText's AttentionType. None: the config's, or global.
        attn_logits_soft_cap: logits become cap * tanh(logits / cap); None or 0: no cap.
        sliding_window_size: keys that a row attends at most, its own included.
        chunk_attn_window_size: the length of a chunk.
        dropout_rate: must be 0.
        quant, kv_quant: must be None.
        use_ragged_attention: must be False; the result would be the same.
        sharding: a `packax.AttentionSharding` for context parallelism.
        implementation: as of `packax.flash_attention`; "dense": plain XLA with memory quadratic in
            the lengths, which takes MoBA and indexer masks too, and no notice of sharding.
        others: MaxText's other keyword arguments are accepted and have no effect.

    Raises:
        ValueError: an attention type or a size that is not as above.
        NotImplementedError: a type, an option or a config that has no kernel.
        TypeError: an argument that MaxText does not have either.
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
        implementation: Any = None,
        **others: Any,
    ):
        unknown = sorted(others.keys() - set(_NO_EFFECT))
        if unknown:
            raise TypeError(f"AttentionOp has no argument {', '.join(unknown)}")
        self.attention_type = _attention_type(config, attention_type)
        self.dense = implementation == "dense"
        self.moba = None
        if getattr(config, "moba", False):
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
                    f"{what}: there is no kernel for it; MaxText's dot_product attention takes it"
                )
        self.attn_logits_soft_cap = attn_logits_soft_cap or None
        self.size: Any = {
            "local_sliding": sliding_window_size,
            "chunk": chunk_attn_window_size,
            "block_diffusion": getattr(config, "causal_block_size", None),
        }.get(self.attention_type)
        sized = {
            "local_sliding": "sliding_window_size",
            "chunk": "chunk_attn_window_size",
            "block_diffusion": "config.causal_block_size",
        }.get(self.attention_type)
        if sized is not None and (not isinstance(self.size, (int, np.integer)) or self.size < 1):
            raise ValueError(
                f"{sized} must be a positive integer for attention_type "
                f'"{self.attention_type}", but is {self.size!r}'
            )
        axis = getattr(config, "context_sharding", "context")
        balanced = getattr(config, "context_parallel_load_balance", False)
        self.reordered = mesh.shape.get(axis, 1) if balanced and mesh is not None else 1
        self.sharding = sharding
        self.implementation = None if self.dense else implementation

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
    ) -> jax.Array:
        """Attention of query (B, Sq, H, D), scaled, to key and value (B, Skv, Hkv, D) or a cache.

        Args:
            decoder_segment_ids: (B, Skv): rows attend keys of their own id; negative: padding. While
                decoding, the keys of id 1 are attended.
            inputs_positions: (B, Sq); read where MaxText reads them: for tokens reordered over a
                context-parallel mesh.
            model_mode: "train"; "prefill" or "autoregressive", with cached_values.
            cached_values: (prefill, autoregressive): (key, value, segment ids), and None or (key,
                value, segment ids, lengths).
            previous_chunk: of shape (B, n, ...): the n keys before this chunk of a prompt, which
                key, value and decoder_segment_ids hold too.
            bidirectional_mask: (B, S): runs of True attend each other both ways, inside a document.
            sinks: (H,), a logit of each head in the softmax's denominator.
            indexer_mask: (B, Sq, Skv) additive, 0 or very negative; the keys of both caches while
                decoding. With implementation="dense", or for decoding one row.
            record_max_logits: keep the largest logit of each head as `self.max_logits`, an
                nnx.Intermediate of shape (B, H): capped, of attended pairs; -inf where there are none.
            decoder_segment_ids_kv: (B, Skv), the keys' ids where they differ.

        Returns:
            (B, Sq, H, Dv), dtype of query; 0 for rows that attend nothing.

        Raises:
            ValueError: shapes, dtypes or arguments that are not as above.
            NotImplementedError: indexer_mask without implementation="dense", compressed_mask and
                compressed_kv, whose keys no range holds; no kernel for the dtype or head dim.
        """
        for name, x in (("compressed_mask", compressed_mask), ("compressed_kv", compressed_kv)):
            if x is not None:
                raise NotImplementedError(
                    f"{name} must be None: there is no kernel for compressed attention; MaxText's "
                    "dot_product attention takes it"
                )
        if model_mode not in (TRAIN, PREFILL, AUTOREGRESSIVE):
            raise ValueError(
                f'model_mode must be "train", "prefill" or "autoregressive", but is {model_mode!r}'
            )
        cache = None
        if model_mode != TRAIN:
            if cached_values is None or cached_values[0] is None:
                raise ValueError(f'cached_values must hold the prefill cache in "{model_mode}"')
            (key, value, decoder_segment_ids), cache = cached_values
        decoding = model_mode == AUTOREGRESSIVE
        if cache is not None and not decoding:
            raise ValueError('the autoregressive cache is for model_mode "autoregressive"')
        query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
        if decoding:
            own = key, value, decoder_segment_ids
            caches = [own] if cache is None else [own, cache[:3]]
        if indexer_mask is not None:
            keys = sum(one[0].shape[1] for one in caches) if decoding else key.shape[1]
            indexer_mask = selection.checked_indexer(indexer_mask, (*query.shape[:2], keys))
        if decoding:
            for name, x in (
                ("previous_chunk", previous_chunk),
                ("bidirectional_mask", bidirectional_mask),
                ("decoder_segment_ids_kv", decoder_segment_ids_kv),
            ):
                if x is not None:
                    raise ValueError(f'{name} must be None in model_mode "autoregressive"')
            parts, at = [], 0
            for key, value, ids in caches:
                to = at + key.shape[1]
                indexer = None if indexer_mask is None else indexer_mask[..., at:to]
                record = record_max_logits and at == 0
                parts.append(self._decode(query, key, value, ids, indexer, record))
                at = to
            return merged(parts, scores_of(query, 0, 0, 1.0, sinks, None, None)[0].sinks)
        mask = self._mask(
            query,
            key,
            decoder_segment_ids,
            decoder_segment_ids_kv,
            inputs_positions,
            previous_chunk,
            bidirectional_mask,
        )
        before = _length(previous_chunk)
        return self._attend(
            query, key, value, mask, before, indexer_mask, sinks, record_max_logits
        )[0]

    def _decode(
        self, query: Any, key: Any, value: Any, ids: Any, indexer: Any, record: bool
    ) -> tuple[jax.Array, jax.Array]:
        """(out, lse) of one cache."""
        key, value = jnp.asarray(key), jnp.asarray(value)
        rows, keys = query.shape[1], key.shape[1]
        before = keys - 1 if rows == 1 else 0  # the place of the row, as MaxText counts it
        active = None
        if ids is not None:
            active = jnp.asarray(masks.as_int32("the segment ids of a cache", ids) == ACTIVE)
            if active.shape not in ((query.shape[0], keys), (1, keys)):
                raise ValueError(
                    f"the segment ids of a cache must have shape {(query.shape[0], keys)}, as its "
                    f"keys, but have {active.shape}"
                )
        if self.dense or self.sharding is not None or record or rows != 1:
            expression = intervals.full()
            if active is not None:
                expression = key_mask(active, rows)
                if self.attention_type in _LOCAL:
                    expression = expression & self._interval(before)
            mask = self._built(expression, rows, keys, None)
            return self._attend(query, key, value, mask, before, indexer, None, record)
        place = jnp.arange(keys, dtype=jnp.int32)
        most, attended = keys, active
        if active is not None and self.attention_type in _LOCAL:
            size = int(self.size)
            first = keys - size if self.attention_type == "local_sliding" else before // size * size
            most, attended = min(size, keys), active & (place >= first)
        if indexer is not None:
            attended = _and(attended, selection.indexed(indexer)[:, 0])
        if self.moba is not None:
            size, count = self.moba
            chunks = selection.moba(query, key, before, size, count)[:, :, 0]
            most = min(most, size * count)
            attended = _and(
                None if attended is None else attended[:, None], chunks[..., place // size]
            )
        if attended is not None:
            attended = jnp.broadcast_to(attended, (query.shape[0], *attended.shape[1:]))
        cap = self.attn_logits_soft_cap
        return decode(
            query, key, value, attended, most, soft_cap=cap, implementation=self.implementation
        )

    def _attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        before: int,
        indexer_mask: Any,
        sinks: Any,
        record: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """(out, lse); `before`: the place of the first row, by which MoBA counts."""
        results: Any
        refused = {
            "config.moba must be False": self.moba,
            "indexer_mask must be None": indexer_mask,
        }
        for what, given in refused.items():
            if given is not None and not self.dense:
                raise NotImplementedError(
                    f"{what}: its keys are no range for a row, and only decoding of one row has a "
                    'kernel for them; AttentionOp(implementation="dense") takes it'
                )
        if self.dense:
            allowed = jnp.reshape(mask, (-1, 1, 1, *mask.shape[-2:]))
            if self.moba is not None:
                chosen = selection.moba(query, key, before, *self.moba)
                allowed = allowed & maxtext_dense.by_chunks(chosen, key, before, self.moba[0])
            if indexer_mask is not None:
                allowed = allowed & selection.indexed(indexer_mask)[:, None, None]
            cap = self.attn_logits_soft_cap
            results = maxtext_dense.attend(query, key, value, allowed, cap, sinks)
        else:
            options: dict[str, Any] = {}
            if self.attn_logits_soft_cap is not None:
                options["soft_cap"] = self.attn_logits_soft_cap
            if record:
                options["return_max_logits"] = True
            results = flash_attention(
                query,
                key,
                value,
                mask,
                scale=1.0,
                sinks=sinks,
                return_lse=True,
                implementation=self.implementation,
                sharding=self.sharding,
                checkpoint_name="context",
                **options,
            )
        if record:
            self.max_logits = nnx.Intermediate(results[2])
        return results[0], results[1]

    def _built(self, expression: MaskExpression, rows: int, keys: int, plan: Any) -> Any:
        """An AttentionMask; for the dense path the boolean (B or 1, rows, keys)."""
        if not self.dense:
            sharding = self.sharding
            return create_attention_mask(
                expression, q_len=rows, kv_len=keys, sharding=sharding, plan=plan
            )
        allowed = jnp.asarray(expression.as_array(rows, keys))
        allowed = allowed.reshape(-1, rows, keys)
        if plan is not None:  # the expression is about tokens in order
            allowed = plan.permute(plan.permute(allowed, axis=1), axis=2)
        return allowed

    def _mask(
        self,
        query: Any,
        key: Any,
        ids: Any,
        kv_ids: Any,
        positions: Any,
        previous_chunk: Any,
        bidirectional_mask: Any,
    ) -> Any:
        rows, keys = query.shape[1], key.shape[1]
        before = _length(previous_chunk)
        if ids is None and kv_ids is not None:
            raise ValueError("decoder_segment_ids_kv was given without decoder_segment_ids")
        if ids is not None:
            ids = documents_of("decoder_segment_ids", ids)
            if kv_ids is not None or before:
                kv_ids = ids if kv_ids is None else documents_of("decoder_segment_ids_kv", kv_ids)
            if before:
                ids = ids[:, before : before + rows]
        plan = None
        if self.reordered > 1 and not before:
            if positions is None:
                raise ValueError(
                    "inputs_positions must be given: the tokens are reordered over "
                    f"{self.reordered} context-parallel ranks"
                )
            if self.moba is not None:
                raise NotImplementedError(
                    "config.moba must be False for reordered tokens: its chunks are of the sequence"
                )
            plan = context_plan("head_tail", self.reordered, length=rows)
            ids, kv_ids, positions, bidirectional_mask = (
                None if x is None else plan.unpermute(x)
                for x in (ids, kv_ids, positions, bidirectional_mask)
            )
            if ids is None:
                ids = jnp.zeros_like(positions)
            by_position = masks.documents(
                ids,
                kv_ids,
                positions=positions,
                kv_positions=None if kv_ids is None else positions,
            )
        if bidirectional_mask is not None and (before or rows != keys):
            raise NotImplementedError(
                "bidirectional_mask is for self-attention without previous_chunk: "
                f"there are {rows} rows and {keys} keys"
            )
        expression = self._interval(before)
        if bidirectional_mask is not None and self.attention_type != "full":
            expression = intervals.spans(runs_of(jnp.asarray(bidirectional_mask)), expression)
        if plan is not None:
            expression = expression & by_position
        elif ids is not None:
            expression = expression & masks.documents(ids, kv_ids)
        return self._built(expression, rows, keys, plan)

    def _interval(self, before: int = 0) -> MaskExpression:
        """What the type says of places; the first row comes after `before` keys."""
        if self.attention_type == "full":
            return intervals.full()
        if self.attention_type == "local_sliding":
            return intervals.sliding_window(int(self.size) - 1, offset=before)
        causal = intervals.causal(before)
        if self.attention_type == "chunk":
            return causal & intervals.chunked(int(self.size), offset=before)
        if self.attention_type == "block_diffusion":  # a row's block to its end, and all before
            return causal | intervals.chunked(int(self.size), offset=before)
        return causal


def _attention_type(config: Any, given: Any) -> str:
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


def _length(previous_chunk: Any) -> int:
    return 0 if previous_chunk is None else previous_chunk.shape[1]


def _and(a: Any, b: Any) -> Any:
    return b if a is None else a & b
