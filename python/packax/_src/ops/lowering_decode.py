"""From decode_p to platforms, as lowering.py does it for the other primitives.

The workspace is a result of the call, so how many shares of the keys it has room for is said here,
from sizes alone; which GPU it will be, and how many it then takes, only C++ knows
(csrc/launch/heuristics.cc).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.precision import is_exact
from packax._src.core.shapes import is_symbolic
from packax._src.ops import ffi, partition_rules, xla_decode
from packax._src.ops.primitives import decode_p
from packax._src.ops.rules import ABSENT, ffi_call, lower_xla, register, without_kernels, zeros

_PROGRAMS = 1024  # that csrc/launch/heuristics.cc may want at once, on the largest GPU
_MOST = 128  # shares: csrc/launch/decode.cc takes no more


def _xla(query, key, value, q_lo, q_hi, *rest, scale, soft_cap, precision, paged, has_sinks):
    table = rest[0] if paged else None
    sinks = rest[-1] if has_sinks else None
    return xla_decode.decode(
        query,
        key,
        value,
        q_lo,
        q_hi,
        table,
        sinks,
        scale=scale,
        soft_cap=soft_cap,
        precision=precision,
    )


_STATIC = ("scale", "soft_cap", "precision", "paged", "has_sinks")
_lowered_xla = lower_xla(_xla, _STATIC)


def _cuda(ctx, *operands, implementation, **static):
    if implementation == "xla":
        return _lowered_xla(ctx, *operands, **static)
    scale, soft_cap, precision, paged, has_sinks = (static[name] for name in _STATIC)
    query, key, value = ctx.avals_in[:3]
    float32_products = is_exact(precision)
    _require_kernel(query, value, float32_products)
    buffers, avals = list(operands), list(ctx.avals_in)
    for place, there in ((5, paged), (6, has_sinks)):
        if not there:
            avals.insert(place, ABSENT)
            buffers.insert(place, zeros(ctx, ABSENT))
    batch, q_len, heads, _ = query.shape
    keys = key.shape[1] * (avals[5].shape[1] if paged else 1)
    rows = (splits(batch, q_len, heads, key.shape[2], keys), batch, q_len, heads)
    workspace = ((*rows, value.shape[3]), rows)
    return ffi_call(
        ctx.replace(avals_in=avals),
        "packax_decode_v1",
        buffers,
        tuple(jax.core.ShapedArray(shape, jnp.dtype(jnp.float32)) for shape in workspace),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap),
        float32_products=np.int32(float32_products),
    )


def splits(batch: int, q_len: int, heads: int, kv_heads: int, keys: int) -> int:
    """Shares of the keys that the workspace has room for: csrc/launch/decode.cc takes no more."""
    if is_symbolic(keys):  # of jax.export: room for the most that any size takes
        return _MOST
    most = min(_MOST, -(-keys // 128))
    if is_symbolic(batch):
        return most
    rows = q_len * (heads // kv_heads)
    fill = -(-_PROGRAMS // max(batch * kv_heads * -(-rows // 64), 1))
    balance = keys // (1024 + 64 * rows)
    return max(1, min(most, max(fill, balance)))


def _require_kernel(query: Any, value: Any, float32_products: bool) -> None:
    ffi.require_extension()
    rows = [row for row in ffi.variants() if row["kernel"] == "decode"]
    qk_dim, v_dim = query.shape[3], value.shape[3]
    dtype = ffi.kernel_dtype(query.dtype, float32_products)
    rooms = [row for row in rows if row["qk_dim"] >= qk_dim and row["v_dim"] >= v_dim]
    if qk_dim % 8 == v_dim % 8 == 0 and any(row["dtype"] == dtype for row in rooms):
        return
    raise NotImplementedError(
        f"no decode kernel for {query.dtype} with head dims {qk_dim}/{v_dim} (query and key / "
        f"value); there are, for multiples of 8 up to these: {ffi.listed(rows)}"
        f"{ffi.whole_build()}. "
        'implementation="xla" takes any head dim, and float64'
    )


register(decode_p, partition_rules.decode, without_kernels(_lowered_xla), _cuda)
