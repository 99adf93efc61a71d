"""MaxText's masks as packax's expressions, with MoBA and indexers, and as additive arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax import PADDING_SEGMENT_ID
from packax.extend import as_int32
from packax.masks import (
    MaskExpression,
    block_sparse,
    causal,
    chunked,
    documents,
    full,
    ranges,
    sliding_window,
    spans,
)

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # the value of masked pairs in MaxText
ACTIVE = 1  # when decoding, the id of cache entries that hold tokens


def reorder_sequence(
    tensor: Any, cp_size: int, seq_dim: int = 1, to_contiguous: bool = False
) -> Any:
    """Tokens in MaxText's load-balanced order over cp_size ranks, or back from it.

    Rank r holds the chunks r and 2 * cp_size - 1 - r of 2 * cp_size: the "zigzag" order of
    `packax.context_plan`.

    Examples:
        >>> reorder_sequence(jnp.arange(8), 2, seq_dim=0)
        Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    if tensor is None:
        return None
    chunks = 2 * cp_size
    if tensor.shape[seq_dim] % chunks:
        raise ValueError(
            f"tensor has {tensor.shape[seq_dim]} places along axis {seq_dim}, which must be a "
            f"multiple of 2 * cp_size = {chunks}"
        )
    rank = np.arange(cp_size)
    order = np.stack([rank, chunks - 1 - rank], axis=1).ravel()
    order = np.argsort(order) if to_contiguous else order
    shape = tensor.shape
    split = tensor.reshape(*shape[:seq_dim], chunks, -1, *shape[seq_dim + 1 :])
    return split[(slice(None),) * seq_dim + (order,)].reshape(shape)


def striped(tensor: Any, cp_size: int, seq_dim: int = 1, to_contiguous: bool = False) -> Any:
    """Tokens in TransformerEngine's "striped" order, or back: rank r holds r, r + cp_size, ...

    Examples:
        >>> striped(jnp.arange(6), 2, seq_dim=0)
        Array([0, 2, 4, 1, 3, 5], dtype=int32)
    """
    if tensor is None:
        return None
    length = tensor.shape[seq_dim]
    if length % cp_size:
        raise ValueError(
            f"tensor has {length} places along axis {seq_dim}, which must be a multiple of "
            f"cp_size = {cp_size}"
        )
    sizes = (cp_size, length // cp_size) if to_contiguous else (length // cp_size, cp_size)
    shape = tensor.shape
    split = tensor.reshape(*shape[:seq_dim], *sizes, *shape[seq_dim + 1 :])
    return split.swapaxes(seq_dim, seq_dim + 1).reshape(shape)


def numbers(name: str, ids: Any) -> jax.Array:
    """Maps segment ids to int32 so that equal ids stay equal. MaxText also accepts floats."""
    if not jnp.issubdtype(jnp.asarray(ids).dtype, jnp.floating):
        return jnp.asarray(as_int32(name, ids))
    ids = jnp.asarray(ids)
    if ids.dtype == jnp.float64:
        raise ValueError(f"{name} must be integers or floats of at most 32 bits, but is float64")
    ids = ids.astype(jnp.float32)
    whole = (ids == jnp.round(ids)) & (jnp.abs(ids) < 1 << 24)
    # The bits of other floats, except those near 0, are larger than all of these. NaN is padding,
    # as it is not equal to itself.
    bits = jax.lax.bitcast_convert_type(ids, jnp.int32)
    bits = jnp.where((ids < 0) | jnp.isnan(ids), PADDING_SEGMENT_ID, bits)
    return jnp.where(whole, ids.astype(jnp.int32), bits)


def documents_of(name: str, ids: Any) -> Any:
    """Segment ids for packax: MaxText's negative ids, all of them padding, become -1. None stays
    None."""
    if ids is None:
        return None
    ids = numbers(name, ids)
    return jnp.where(ids < 0, PADDING_SEGMENT_ID, ids)


def runs_of(mask: Any) -> jax.Array:
    """Numbers each run of True; -1 elsewhere."""
    inside = jnp.asarray(mask).astype(bool)
    before = jnp.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    number = jnp.cumsum(inside & ~before, axis=-1, dtype=jnp.int32)
    return jnp.where(inside, number, -1)


def checked_indexer(mask: Any, shape: tuple[int, ...]) -> jax.Array:
    mask = jnp.asarray(mask)
    floating = jnp.issubdtype(mask.dtype, jnp.floating)
    if not floating or mask.shape not in (shape, (1, *shape[1:])):
        raise ValueError(
            f"indexer_mask must be floating point of shape {shape}, but is {mask.dtype} of shape "
            f"{mask.shape}"
        )
    return mask


def indexed(mask: Any) -> jax.Array:
    """An indexer's additive mask as booleans: True for keys that it keeps (0)."""
    return jnp.asarray(mask, jnp.float32) >= MASKED / 2


def moba_chunks(query: jax.Array, key: jax.Array, before: int, size: int, count: int) -> jax.Array:
    """The chunks of `size` keys that MoBA's gate selects for each row (arXiv 2502.13189): bool,
    (B, H, Sq, chunks).

    Each row of each head selects its own chunk and the `count` - 1 earlier chunks whose mean key
    has the largest product with the query. before: the position of the first row. Keys after a row
    must be masked separately.
    """
    batch, rows, heads, dim = query.shape
    keys, kv_heads = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(
            f"the heads of query must be a multiple of those of key, but there are {heads} and "
            f"{kv_heads}"
        )
    chunks = math.ceil(keys / size)
    padded = jnp.pad(key.astype(jnp.float32), ((0, 0), (0, chunks * size - keys), (0, 0), (0, 0)))
    sums = padded.reshape(batch, chunks, size, kv_heads, dim).sum(2)
    held = jnp.minimum(size, keys - size * jnp.arange(chunks, dtype=jnp.int32))
    means = sums / held[:, None, None]
    grouped = query.astype(jnp.float32).reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    gate = jnp.einsum("btkgd,bnkd->bkgtn", grouped, means, precision="highest")
    own = (before + jnp.arange(rows, dtype=jnp.int32))[:, None] // size
    chunk = jnp.arange(chunks, dtype=jnp.int32)
    gate = jnp.where(chunk < own, gate, -jnp.inf)
    gate = jax.lax.stop_gradient(jnp.where(chunk == own, jnp.inf, gate))
    _, chosen = jax.lax.top_k(gate, min(count, chunks))
    attended = jax.nn.one_hot(chosen, chunks, dtype=bool).any(-2)
    return attended.reshape(batch, heads, rows, chunks)


def interval_of(attention_type: str, size: int | None, before: int = 0) -> MaskExpression:
    """The interval of an attention type. before: the number of keys before the first row."""
    if attention_type == "full":
        return full()
    own = causal(before)
    if attention_type not in ("local_sliding", "chunk", "block_diffusion"):
        return own
    if size is None:
        raise ValueError(f"attention_type {attention_type!r} needs a size, but it is None")
    if attention_type == "local_sliding":
        if size == 0:  # no keys: the intersection of two different single keys
            return sliding_window(0, offset=before) & sliding_window(0, offset=before + 1)
        return sliding_window(size - 1, offset=before)
    if attention_type == "chunk":
        return own & chunked(size, offset=before)
    return own | chunked(size, offset=before)  # the row's whole block and all earlier keys


class Tokens(NamedTuple):
    """What a call says about its tokens, (B, S) each, or None."""

    ids: Any = None  # segment ids of all tokens, including keys before the rows; -1 is padding
    kv_ids: Any = None  # those of the keys, if they differ
    positions: Any = None  # of reordered tokens
    images: Any = None  # True in runs that attend to each other in both directions


def expression_of(
    attention_type: str, size: int, before: int, rows: int, tokens: Tokens
) -> MaskExpression:
    """The mask of `rows` rows after `before` keys, from arrays in the original order."""
    ids, kv_ids, positions, images = tokens
    expression = interval_of(attention_type, size, before)
    if images is not None and attention_type != "full":
        expression = spans(runs_of(images), expression)
    if positions is not None and ids is None:
        ids = jnp.zeros_like(positions)
    if ids is None:
        return expression
    if before:
        kv_ids = ids if kv_ids is None else kv_ids
        ids = ids[:, before : before + rows]
    kv_positions = None if kv_ids is None else positions
    return expression & documents(
        ids, kv_segment_ids=kv_ids, positions=positions, kv_positions=kv_positions
    )


def chosen(
    expression: MaskExpression,
    moba: tuple[int, int] | None,
    query: Any,
    key: Any,
    before: int,
    indexer_mask: Any,
) -> MaskExpression:
    """`expression`, restricted to the keys that MoBA and the indexer select."""
    blocks, size = None, 1
    if indexer_mask is not None:
        blocks = indexed(indexer_mask)[:, None]
    if moba is not None:
        size, count = moba
        chunks = moba_chunks(query, key, before, size, count)
        if blocks is not None:
            chunks, size = chunks[..., jnp.arange(key.shape[1], dtype=jnp.int32) // size], 1
        blocks = both(blocks, chunks)
        row = before + np.arange(query.shape[1])  # an index, not a position
        expression = expression & ranges(np.zeros_like(row), row + 1)
    return expression if blocks is None else expression & block_sparse(blocks, (1, size))


def both(first: Any, second: Any) -> Any:
    """The intersection of two boolean arrays; first may be None, for all True."""
    return second if first is None else first & second


class AdditiveMask:
    """The mask of an AttentionOp as an additive array: quadratic in the lengths."""

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
            segment_positions: (B, S), read only if tokens are reordered.
            attention_type: "full", "global" or "mla" for a weaker mask. None: the op's.
            others: as in the call; query and key determine the lengths.

        Returns:
            The mask; None if everything is attended.

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
        if decoding:
            allowed = (numbers("decoder_segment_ids", ids) == ACTIVE)[:, None]
            local = kind in ("local_sliding", "chunk")
            expression = interval_of(kind, self.size, before) if local else full()
        else:
            positions = segment_positions if self.reordered > 1 and not before else None
            ids = documents_of("decoder_segment_ids", ids)
            kv_ids = documents_of("decoder_segment_ids_kv", kv_ids)
            tokens = Tokens(ids, kv_ids, positions, bidirectional_mask)
            expression = expression_of(kind, self.size, before, rows, tokens)
        pairs = jnp.asarray(expression.as_array(rows, keys)).reshape(-1, rows, keys)
        pairs = pairs if allowed is None else pairs & allowed
        return jnp.where(pairs, 0.0, MASKED)[:, None, None]
