"""Dropout of the softmax's probabilities: checks its random key, and prepares the counters.

The random bits are Philox4x32-10 (Salmon et al., 2011) of the random key and the indices of batch
row, head, row and key. So no bits are stored, and they do not depend on the mesh, the tile or the
pass. `streams` contains the random key and the indices of batch row and head, and is sharded like
batch and heads. `rows` contains the indices of rows, and is sharded like rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.context_mask import ContextMask
from packax._src.core.jax_compat import checks_vma
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import Axes, Layout, varying_axes

WORDS = 2**32
_MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


class OneForAll(NamedTuple):
    """A dropout_key with which all rows and heads drop the same query-key pairs."""

    key: Any


def inverse_keep(threshold: int) -> float:
    """1 / (fraction of elements kept); csrc/ffi/attention.cc computes the same number."""
    return 1.0 / (1.0 - threshold / WORDS)


def check_key(key: Any) -> None:
    """Raises ValueError unless `key` is a single random key of jax."""
    key = key.key if isinstance(key, OneForAll) else key
    if key is None:
        raise ValueError(
            "dropout_rate above 0 needs dropout_key, a key such as jax.random.key(0): pass a "
            "different one for every layer and step"
        )
    shape, dtype = np.shape(key), getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    raw = dtype == jnp.uint32 and len(shape) == 1
    if not (typed and shape == ()) and not raw:
        raise ValueError(
            "dropout_key must be a single key of jax.random, or its uint32 array, but is "
            f"{dtype or type(key).__name__} of shape {shape}"
        )


def streams_of(key: Any, query: jax.Array, layout: Layout) -> jax.Array:
    """(B, H, 4) uint32: two words of the key, the index of the batch row, the index of the head."""
    one_for_all = isinstance(key, OneForAll)
    key = key.key if one_for_all else key
    try:
        words = jax.random.bits(key, (2,), jnp.uint32)
    except TypeError as error:  # a raw key of an implementation other than jax's default
        raise ValueError(f"dropout_key is not a key of jax.random: {error}") from None
    batch, _, heads, _ = query.shape
    index = [
        _indices(query, size, layout, axes).astype(jnp.uint32)
        for size, axes in ((batch, layout.batch), (heads, layout.heads))
    ]
    if one_for_all:
        index = [jnp.zeros_like(x) for x in index]
    parts = (words[0], words[1], index[0][:, None], index[1][None])
    return jnp.stack([jnp.broadcast_to(x, (batch, heads)) for x in parts], -1)


def rows_of(mask: AttentionMask, query: jax.Array, layout: Layout) -> jax.Array:
    """(1 or B, Sq) int32: the sequence index of every query row."""
    numbers = _indices(query, query.shape[1], layout, layout.context)[None]
    if isinstance(mask, ContextMask) and mask.kv_plan is not None:
        chunk = mask.q_len // mask.kv_plan.shape[2]
        order = jnp.take(mask.kv_plan[:, 0], numbers[0] // chunk, axis=1)
        numbers = order * chunk + numbers % chunk
    return numbers


def _indices(query: jax.Array, size: Any, layout: Layout, axes: Axes) -> jax.Array:
    """Indices into the global array, even if the caller's shard_map covers some of `axes`. Over an
    axis along which the query is known to be equal, it is not cut."""
    index = jnp.arange(size, dtype=jnp.int32)
    cut = layout.manual
    if checks_vma():
        cut &= varying_axes(jax.typeof(query))
    manual = tuple(axis for axis in axes if axis in cut)
    if layout.size(manual) == 1:
        return index
    return index + jax.lax.axis_index(manual) * jnp.int32(size)


def philox(counters: Any, keys: Any) -> list[jax.Array]:
    """Philox4x32-10: four uint32 words from four counters and two keys, which are uint32 arrays."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return [c0, c1, c2, c3]


def _product(x: jax.Array, y: np.uint32) -> tuple[jax.Array, jax.Array]:
    """The high and low 32 bits of a product, without 64-bit integers."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = x1 * y0 + (x0 * y0 >> half)
    carry = (middle & low) + x0 * y1
    return x1 * y1 + (middle >> half) + (carry >> half), x * y
