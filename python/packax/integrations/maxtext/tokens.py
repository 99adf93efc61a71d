"""Order and kinds of tokens as MaxText has them, for `packax.integrations.maxtext`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.integers import as_int32
from packax._src.core.shapes import PADDING_SEGMENT_ID
from packax._src.masks.spans import NO_SPAN


def reorder_sequence(
    tensor: Any, cp_size: int, seq_dim: int = 1, to_contiguous: bool = False
) -> Any:
    """Tokens in MaxText's load-balanced order over cp_size ranks, or back from it.

    Of 2 * cp_size chunks, rank r holds chunks r and 2 * cp_size - 1 - r: the "zigzag" order of
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
    order = np.stack([rank, chunks - 1 - rank], 1).ravel()
    order = np.argsort(order) if to_contiguous else order
    shape = tensor.shape
    split = tensor.reshape(*shape[:seq_dim], chunks, -1, *shape[seq_dim + 1 :])
    return split.take(order, axis=seq_dim).reshape(shape)


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
    """Segment ids as int32, the same for equal ones: MaxText compares floats too."""
    if not jnp.issubdtype(jnp.asarray(ids).dtype, jnp.floating):
        return jnp.asarray(as_int32(name, ids))
    ids = jnp.asarray(ids)
    if ids.dtype == jnp.float64:
        raise ValueError(f"{name} must be integers or floats of 32 bits at most, but is float64")
    ids = ids.astype(jnp.float32)
    whole = (ids == jnp.round(ids)) & (jnp.abs(ids) < 1 << 24)
    # The bits of any other float but those next to 0 are above all of these. A NaN equals nothing.
    bits = jax.lax.bitcast_convert_type(ids, jnp.int32)
    bits = jnp.where((ids < 0) | jnp.isnan(ids), PADDING_SEGMENT_ID, bits)
    return jnp.where(whole, ids.astype(jnp.int32), bits)


def documents_of(name: str, ids: Any) -> jax.Array:
    """Every negative id is padding in MaxText, and 0 is a document."""
    ids = numbers(name, ids)
    return jnp.where(ids < 0, PADDING_SEGMENT_ID, ids)


def runs_of(mask: jax.Array) -> jax.Array:
    """A number for each run of True, -1 elsewhere."""
    inside = mask.astype(bool)
    before = jnp.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    number = jnp.cumsum(inside & ~before, axis=-1, dtype=jnp.int32)
    return jnp.where(inside, number, NO_SPAN)
