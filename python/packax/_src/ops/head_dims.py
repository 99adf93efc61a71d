"""Head dims between those of Hopper's kernels: operands are padded with zeros to the next of them.

Zeros change no score, and their own results and gradients are cut off. The fallback kernels take
any head dim as it is, but take two to four and a half times as long there (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.mask import Pass
from packax._src.core.shapes import is_symbolic
from packax._src.ops import ffi
from packax._src.ops.attention_calls import choose_algorithm, suffix_of
from packax._src.ops.partitioning import plain
from packax._src.ops.primitives import backward_p, forward_p


def padded(
    direction: Pass, query: Any, value: Any, params: Any, for_export: bool
) -> tuple[int, int] | None:
    """The head dims, of query and value, of the kernels that take a call once it is padded; None:
    it needs no padding, or there are none."""
    suffix, dims = suffix_of(params), (query.shape[3], value.shape[3])
    if ffi.ext is None or suffix is None or any(is_symbolic(x) or x % ffi.MULTIPLE for x in dims):
        return None
    there = ffi.dims_here("forward_sm90" + suffix, str(query.dtype), for_export=for_export)
    wider = sorted((x for x in there if x[0] >= dims[0] and x[1] >= dims[1]), key=sum)
    if dims in there or not wider:
        return None
    if direction == "backward":
        query, value = (
            plain(x).update(shape=(*x.shape[:3], dim))
            for x, dim in zip((query, value), wider[0], strict=True)
        )
        if choose_algorithm(query, value, params, for_export) == "portable":
            return None
    return wider[0]


def forward(
    query: Any, key: Any, value: Any, *mask: Any, dims: tuple[int, int], **params: Any
) -> list[jax.Array]:
    """forward_p of padded operands; the results are those of forward_p."""
    wide = (_wider(query, dims[0]), _wider(key, dims[0]), _wider(value, dims[1]))
    out, *numbers = forward_p.bind(*wide, *mask, **params)
    return [out[..., : value.shape[3]], *numbers]


def backward(
    query: Any, key: Any, value: Any, out: Any, lse: Any, dout: Any, *others: Any,
    dims: tuple[int, int], **params: Any,
) -> list[jax.Array]:  # fmt: skip
    """backward_p, likewise."""
    wide = (_wider(query, dims[0]), _wider(key, dims[0]), _wider(value, dims[1]))
    sums = (_wider(out, dims[1]), lse, _wider(dout, dims[1]))
    gradients = backward_p.bind(*wide, *sums, *others, **params)
    return [x[..., : y.shape[3]] for x, y in zip(gradients, (query, key, value), strict=True)]


def _wider(x: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, dim - x.shape[3])))
