"""The backward at low occupancy: the query heads of a GQA group are divided among programs.

A program of the kernels that make dK and dV is 128 keys of one key/value head, with all the query
heads that read it. One head of 16k keys is 128 programs, the first of which has 128 times the work
of the last: most of the GPU waits for a few. There the query heads of a group are handed out in
parts. Keys and values are repeated for every part, and the parts' gradients are added in float32.
Where there are programs enough nothing is repeated.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from packax._src.core.shapes import TILE, ceil_div, is_symbolic
from packax._src.ops.primitives import backward_p

# About two and about eight for every multiprocessor of the GPUs that have most. With one each, of
# causal rows, the longest program takes twice the mean.
ALL_BUSY = 256
BALANCED = 1024
# With fewer keys for every query head of a part, repeating costs more than balance brings, on
# paper, where all are busy.
LONG = 32768
# In shorter rows a program has 16 steps a query head at most.
SHORT = 1024


def parts_of_group(query: Any, key: Any) -> int:
    """Into how many parts the query heads of a key/value head are best divided; shapes (B, Sq, H,
    D) and (B, Skv, Hkv, D).
    """
    batch, kv_len, kv_heads, _ = key.shape
    if any(is_symbolic(n) for n in (batch, kv_len, kv_heads, query.shape[2])):
        return 1
    programs = batch * kv_heads * ceil_div(kv_len, TILE)
    group = query.shape[2] // kv_heads
    if programs == 0 or programs >= BALANCED or kv_len < SHORT:
        return 1
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    parts = next((n for n in divisors if n * programs >= BALANCED), group)
    return parts if programs < ALL_BUSY or kv_len * group >= LONG * parts else 1


def backward_in_parts(query: Any, key: Any, value: Any, *operands: Any, parts: int, **params: Any):
    """backward_p, but for `parts` times as many key/value heads; the results are those of
    backward_p.
    """
    repeated = (jnp.repeat(x, parts, axis=2) for x in (key, value))
    dq, dk, dv, *rest = backward_p.bind(query, *repeated, *operands, **params)
    return [dq, _added(dk, parts), _added(dv, parts), *rest]


def _added(gradient: Any, parts: int) -> Any:
    batch, length, heads, dim = gradient.shape
    apart = gradient.reshape(batch, length, heads // parts, parts, dim)
    return apart.sum(3, dtype=jnp.float32).astype(gradient.dtype)
