"""Batch packing: rows of a batch that are shorter than a tile run as documents of one row.

A tile of the attention kernels is 128 rows of one batch row, so thousands of batch rows of 16
tokens would be thousands of tiles that are nearly empty, and the backward's sum of dq is padded to
64 rows for each. As one row of documents they fill the tiles. The mask's row ranges move by the
keys before them, which keeps documents apart; nothing else changes but where a NaN may spread
(docs/guide/numerics.md).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import Pass, operand_names
from packax._src.core.shapes import BLOCK, MAX_LENGTH, TILE, is_symbolic
from packax._src.ops.primitives import BLOCK_ARRAYS, backward_p, blocks_p, forward_p

ROWS = BLOCK  # two fit a tile
KEYS = TILE  # of more, a tile takes as many steps as before
# Below, on paper, a tile of 3.5 us on one of 132 multiprocessors takes no longer than making the
# mask again.
TILES = 1024


def worth_merging(query: Any, key: Any) -> bool:
    """Of shapes (B, Sq, H, D) and (B, Skv, Hkv, D)."""
    batch, q_len, heads, _ = query.shape
    if any(is_symbolic(n) for n in (*query.shape, *key.shape)):
        return False
    short = q_len <= ROWS and key.shape[1] <= KEYS
    rows = batch * max(q_len, key.shape[1])
    return short and batch > 1 and batch * heads >= TILES and rows <= MAX_LENGTH


def forward(query: Any, key: Any, value: Any, *mask: Any, **params: Any) -> list[jax.Array]:
    """forward_p, of one row; the results are those of forward_p."""
    batch, q_len, heads, _ = query.shape
    row = _one_row("forward", query, key, mask, params)
    tensors = (_joined(x) for x in (query, key, value))
    out, *numbers = forward_p.bind(*tensors, *row, **params)
    apart = (x.reshape(heads, batch, q_len).swapaxes(0, 1) for x in numbers)
    return [out.reshape(*query.shape[:3], out.shape[3]), *apart]


def backward(
    query: Any, key: Any, value: Any, out: Any, lse: Any, dout: Any, dlse: Any, *mask: Any,
    **params: Any,
) -> list[jax.Array]:  # fmt: skip
    """backward_p, likewise."""
    row = _one_row("backward", query, key, mask, params)
    lse, dlse = (_flat(x, query.shape[0]) for x in (lse, dlse))
    tensors = (*(_joined(x) for x in (query, key, value, out)), lse, _joined(dout), dlse)
    gradients = backward_p.bind(*tensors, *row, **params)
    return [x.reshape(y.shape) for x, y in zip(gradients, (query, key, value), strict=True)]


def _joined(x: jax.Array) -> jax.Array:
    """(B, S, ...) to (1, B * S, ...)."""
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def _flat(x: jax.Array, batch: int) -> jax.Array:
    """(1 or B, ..., S) to (1, ..., B * S)."""
    x = jnp.moveaxis(jnp.broadcast_to(x, (batch, *x.shape[1:])), 0, -2)
    return x.reshape(1, *x.shape[:-2], -1)


def _one_row(
    direction: Pass, query: Any, key: Any, mask: Any, params: dict[str, Any]
) -> list[jax.Array]:
    """The mask's operands: row ranges moved, and those of its blocks, which are made again."""
    of = dict(zip(operand_names(False, direction), mask, strict=True))
    batch, kv_len = query.shape[0], key.shape[1]
    before, q_lo, q_hi = vary_together(
        jnp.arange(batch, dtype=jnp.int32)[:, None], of["q_lo"], of["q_hi"]
    )
    lo, hi = (_flat(x + before * kv_len, batch) for x in (q_lo, q_hi))
    # A block of the mask is a whole batch row here.
    segment_checked = _flat(jnp.broadcast_to(of["q_blocks"][:, 4] & 1, q_lo.shape), batch)
    made = {"q_lo": lo, "q_hi": hi}
    # What is not read stays what stands in for it.
    for level, names in ((1, ("q_ids", "kv_ids")), (2, ("q_pos", "kv_pos"))):
        for name in names:
            made[name] = _flat(of[name], batch) if params["segment_check"] >= level else lo
    blocks = blocks_p.bind(
        *vary_together(lo, hi, segment_checked),
        kv_len=batch * kv_len,
        implementation=params["implementation"],
    )
    made |= zip(BLOCK_ARRAYS, blocks, strict=True)
    return [made[name] for name in of]
