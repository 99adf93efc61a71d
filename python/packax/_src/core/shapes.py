"""Sizes and dtypes that every layer uses, and arithmetic on sizes that may be symbolic
(jax.export)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 64  # rows or keys summarised by one entry of q_blocks and kv_blocks
TILE = 128  # rows or keys per entry of q_order and kv_order
TILE_192 = 192  # rows per entry of q_order_192
INT_MAX = 2**31 - 1
MAX_LENGTH = 1 << 29  # of a sequence, as in csrc/call/sizes.h
ONE_BLOCK = (1 << 30, 1 << 30)
"""The block size of a mask with block lists whose elements are checked by segment alone: its block
mask is one block, which is attended."""

FP8 = "float8_e4m3fn"
"""The dtype of 8 bits that a cache of keys and values may have."""

PADDING_SEGMENT_ID = -1
"""The segment id of padding: its rows attend nothing and no row attends its keys."""


def ceil_div(size: Any, by: int) -> Any:
    """size / by, rounded up; size may be a symbolic dimension of jax.export."""
    return -(-size // by)


def is_symbolic(size: Any) -> bool:
    """Whether the size is known only when an exported program runs."""
    return not isinstance(size, int)


def fill_up(x: jax.Array, axis: int, size: Any, value: int = 0) -> jax.Array:
    """x padded at the end of the axis with `value` up to the size."""
    missing = size - x.shape[axis]
    if not is_symbolic(missing) and missing == 0:
        return x
    shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
    return jnp.concatenate([x, jnp.full(shape, value, x.dtype)], axis)


def is_fp8(x: Any) -> bool:
    return str(x.dtype) == FP8


def accumulator(dtype: Any) -> Any:
    """The dtype in which values of this dtype are summed: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def is_exact(precision: jax.lax.Precision) -> bool:
    """Whether products of float32 operands must be computed in float32, not TF32."""
    return precision == jax.lax.Precision.HIGHEST
