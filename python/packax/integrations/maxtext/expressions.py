"""The mask expression of a call of `packax.integrations.maxtext`, by its options."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from packax._src.masks.block_sparse import block_sparse
from packax._src.masks.documents import ranges
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.intervals import causal, chunked, full, sliding_window
from packax.integrations.maxtext import selection


def interval_of(attention_type: str, size: int | None, before: int = 0) -> MaskExpression:
    """What the type says of places; the first row comes after `before` keys."""
    if attention_type == "full":
        return full()
    if attention_type == "local_sliding":
        assert size is not None
        if size == 0:  # no key lies in a window of none
            return sliding_window(0, offset=before) & sliding_window(0, offset=before + 1)
        return sliding_window(size - 1, offset=before)
    own = causal(before)
    if attention_type == "chunk":
        assert size is not None
        return own & chunked(size, offset=before)
    if attention_type == "block_diffusion":  # a row's block to its end, and all before
        assert size is not None
        return own | chunked(size, offset=before)
    return own


def chosen(
    expression: MaskExpression,
    moba: tuple[int, int] | None,
    query: Any,
    key: Any,
    before: int,
    indexer_mask: Any,
) -> MaskExpression:
    """Of what `expression` says, the keys that MoBA and the indexer choose."""
    blocks, size = None, 1
    if indexer_mask is not None:
        blocks = selection.indexed(indexer_mask)[:, None]
    if moba is not None:
        size, count = moba
        chunks = selection.moba(query, key, before, size, count)
        if blocks is not None:
            chunks, size = chunks[..., jnp.arange(key.shape[1], dtype=jnp.int32) // size], 1
        blocks = both(blocks, chunks)
        row = before + np.arange(query.shape[1])  # by index, whatever the positions say
        expression = expression & ranges(np.zeros_like(row), row + 1)
    return expression if blocks is None else expression & block_sparse(blocks, (1, size))


def both(first: Any, second: Any) -> Any:
    """What both let in; None: everything."""
    return second if first is None else first & second
