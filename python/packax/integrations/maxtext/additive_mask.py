"""The additive mask of a call, as MaxText's sparse indexer asks its attention op for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax._src.masks.documents import documents
from packax._src.masks.intervals import full
from packax._src.masks.spans import spans
from packax.integrations.maxtext.expressions import interval_of
from packax.integrations.maxtext.selection import MASKED
from packax.integrations.maxtext.tokens import documents_of, numbers, runs_of

ACTIVE = 1  # the id of a cache's tokens while decoding


class AdditiveMask:
    """What an AttentionOp says of pairs, as numbers: quadratic in the lengths."""

    attention_type: str
    size: int
    reordered: int

    def generate_attention_mask(
        self,
        query: Any,
        key: Any,
        decoder_segment_ids: Any,
        model_mode: str,
        previous_chunk: Any = None,
        bidirectional_mask: Any = None,
        compressed_mask: Any = None,
        segment_positions: Any = None,
        pad_kv_total: int = 0,
        decoder_segment_ids_kv: Any = None,
        attention_type: Any = None,
    ) -> jax.Array | None:
        """MaxText's method of that name: (B or 1, 1, 1, Sq, Skv), 0 or very negative.

        Args:
            segment_positions: (B, S), read where tokens are reordered.
            attention_type: None: the op's; or "full", "global", "mla" for less.
            others: as of the call, of which query and key give the lengths.

        Returns:
            None where everything is attended.

        Raises:
            NotImplementedError: compressed_mask.
            ValueError: an attention_type that needs a size, other than the op's.
        """
        if compressed_mask is not None or pad_kv_total:
            raise NotImplementedError(
                "compressed_mask must be None and pad_kv_total 0: there is no kernel for "
                "compressed attention"
            )
        kind = str(getattr(attention_type, "value", attention_type or self.attention_type))
        if kind not in ("full", "global", "mla", self.attention_type):
            raise ValueError(
                f'attention_type must be that of the op, "{self.attention_type}", "global", "mla" '
                f'or "full", but is "{kind}"'
            )
        rows, keys = query.shape[1], key.shape[1]
        decoding = model_mode == "autoregressive"
        before = 0 if previous_chunk is None else previous_chunk.shape[1]
        if decoding and rows == 1:
            before = keys - 1
        ids, kv_ids = decoder_segment_ids, decoder_segment_ids_kv
        if ids is None and (decoding or kind == "full"):
            return None
        allowed: Any = None
        expression = interval_of(kind, self.size, before)
        if decoding:
            allowed = (numbers("decoder_segment_ids", ids) == ACTIVE)[:, None]
            if kind not in ("local_sliding", "chunk"):
                expression = full()
        else:
            if bidirectional_mask is not None and kind != "full":
                expression = spans(runs_of(jnp.asarray(bidirectional_mask)), expression)
            places: dict[str, Any] = {}
            if self.reordered > 1 and segment_positions is not None and not before:
                places["positions"] = segment_positions
                ids = jnp.zeros_like(segment_positions) if ids is None else ids
            if ids is not None:
                ids = documents_of("decoder_segment_ids", ids)
                if kv_ids is not None:
                    kv_ids = documents_of("decoder_segment_ids_kv", kv_ids)
                elif before:
                    kv_ids = ids
                if kv_ids is not None and places:
                    places["kv_positions"] = segment_positions
                ids = ids[:, before : before + rows] if before else ids
                expression = expression & documents(ids, kv_segment_ids=kv_ids, **places)
        pairs = jnp.asarray(expression.as_array(rows, keys)).reshape(-1, rows, keys)
        pairs = pairs if allowed is None else pairs & allowed
        return jnp.where(pairs, 0.0, MASKED)[:, None, None]
