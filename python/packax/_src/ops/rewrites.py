"""Calls that run faster on CUDA when rewritten: short rows packed into one row, query heads divided
into parts, head dims padded. `rewritten` chooses; results are those of the original call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import Pass
from packax._src.core.shapes import BLOCK, MAX_LENGTH, TILE, ceil_div, is_symbolic
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import ffi, primitives
from packax._src.ops.ffi_calls import choose_algorithm, suffix_of
from packax._src.ops.partitioning import plain
from packax._src.ops.primitives import BLOCK_ARRAYS, blocks_p

Rewrite = Callable[..., list[jax.Array]]


def rewritten(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool
) -> tuple[Rewrite, Any] | None:
    """A function of (direction, spec, operands, the second result) for these avals; None: no
    rewrite."""
    # Positions and block masks refer to a single row.
    if not of.extras and not spec.block_size and worth_packing(of.query, of.key):
        return packed, None
    if direction == "backward" and ("key" in spec.needs_grad or "value" in spec.needs_grad):
        parts = parts_of_group(of.query, of.key)
        if parts > 1:
            return in_parts, parts
    dims = padded_dims(direction, of, spec, for_export)
    return None if dims is None else (padded, dims)


def _run(direction: Pass, spec: AttentionSpec, operands: Operands) -> list[jax.Array]:
    function = primitives.forward if direction == "forward" else primitives.backward
    return function(spec, operands)


# --- Batch packing: rows of a batch that are shorter than a tile run as documents of one row.
#
# A tile of the attention kernels is 128 rows of one batch row, so thousands of batch rows of 16
# tokens would be thousands of nearly empty tiles, and the backward's sum of dq would be padded to
# 64 rows for each. As documents of one row they fill the tiles. The mask's row ranges are shifted
# by the keys before them, which separates the batch rows; nothing else changes, except where a NaN
# may spread (docs/guide/numerics.md).

PACKED_ROWS = BLOCK  # two fit into a tile
PACKED_KEYS = TILE  # with more, a tile takes as many steps as before
# Below this, by calculation, a tile of 3.5 us on one of 132 multiprocessors takes no longer than
# building the mask again.
PACKED_TILES = 1024


def worth_packing(query: Any, key: Any) -> bool:
    """Whether packing is faster, for shapes (B, Sq, H, D) and (B, Skv, Hkv, D)."""
    batch, q_len, heads, _ = query.shape
    if any(is_symbolic(n) for n in (*query.shape, *key.shape)):
        return False
    short = q_len <= PACKED_ROWS and key.shape[1] <= PACKED_KEYS
    rows = batch * max(q_len, key.shape[1])
    return short and batch > 1 and batch * heads >= PACKED_TILES and rows <= MAX_LENGTH


def packed(direction: Pass, spec: AttentionSpec, x: Operands, _: Any = None) -> list[jax.Array]:
    """The call as documents of one row."""
    batch, q_len, heads, _ = x.query.shape
    joined = {
        name: y.reshape(1, batch * y.shape[1], *y.shape[2:])
        for name, y in x._asdict().items()
        if name in ("query", "key", "value", "out", "dout") and y is not None
    }
    joined |= {
        name: _flat(y, batch) for name, y in (("lse", x.lse), ("dlse", x.dlse)) if y is not None
    }
    results = _run(direction, spec, x._replace(**joined, **one_row(spec, x)))
    if direction == "backward":
        return [y.reshape(like.shape) for y, like in zip(results, x[:3], strict=True)]
    out, *numbers = results
    apart = (y.reshape(heads, batch, q_len).swapaxes(0, 1) for y in numbers)
    return [out.reshape(*x.query.shape[:3], out.shape[3]), *apart]


def _flat(x: jax.Array, batch: int) -> jax.Array:
    """(1 or B, ..., S) to (1, ..., B * S)."""
    x = jnp.moveaxis(jnp.broadcast_to(x, (batch, *x.shape[1:])), 0, -2)
    return x.reshape(1, *x.shape[:-2], -1)


def one_row(spec: AttentionSpec, x: Operands) -> dict[str, jax.Array]:
    """The mask's arrays for one row: row ranges shifted, and bounds of blocks computed again."""
    batch, kv_len = x.query.shape[0], x.key.shape[1]
    before, q_lo, q_hi = vary_together(jnp.arange(batch, dtype=jnp.int32)[:, None], x.q_lo, x.q_hi)
    lo, hi = (_flat(y + before * kv_len, batch) for y in (q_lo, q_hi))
    # A block of the mask is a whole batch row here.
    segment_checked = _flat(jnp.broadcast_to(x.q_blocks[:, 4] & 1, q_lo.shape), batch)
    made = {"q_lo": lo, "q_hi": hi}
    for level, names in ((1, ("q_ids", "kv_ids")), (2, ("q_pos", "kv_pos"))):
        for name in names:
            y = getattr(x, name)
            if spec.segment_check >= level:
                made[name] = _flat(y, batch)
            elif y is not None:  # and not read
                made[name] = lo
    blocks = blocks_p.bind(
        *vary_together(lo, hi, segment_checked),
        kv_len=batch * kv_len,
        implementation=spec.implementation,
    )
    there = x.names
    return made | {n: y for n, y in zip(BLOCK_ARRAYS, blocks, strict=True) if n in there}


# --- Low occupancy: the query heads of a GQA group are divided among programs.
#
# In the kernels for dK and dV a program computes 128 keys of one key/value head, with all query
# heads that read it. One head of 16k keys is 128 programs, and the first has 128 times the work of
# the last: most of the GPU waits for a few. In this case the query heads of a group are divided
# into parts. Keys and values are repeated for every part, and the parts' gradients are added in
# float32. If there are enough programs, nothing is repeated.

# About two and about eight per multiprocessor of the largest GPUs. With one each, for causal rows,
# the longest program takes twice the mean.
ALL_BUSY = 256
BALANCED = 1024
# With fewer keys per query head of a part, by calculation, repeating costs more than balancing
# gains when all multiprocessors are busy.
LONG = 32768
# In shorter rows a program has at most 16 steps per query head.
SHORT = 1024


def parts_of_group(query: Any, key: Any) -> int:
    """Into how many parts to divide the query heads of a key/value head, for shapes (B, Sq, H, D)
    and (B, Skv, Hkv, D).
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


def in_parts(direction: Pass, spec: AttentionSpec, x: Operands, parts: int) -> list[jax.Array]:
    """The call with `parts` times as many key/value heads."""
    key, value = (jnp.repeat(y, parts, axis=2) for y in (x.key, x.value))
    dq, dk, dv, *rest = _run(direction, spec, x._replace(key=key, value=value))
    return [dq, _added(dk, parts), _added(dv, parts), *rest]


def _added(gradient: Any, parts: int) -> Any:
    batch, length, heads, dim = gradient.shape
    apart = gradient.reshape(batch, length, heads // parts, parts, dim)
    return apart.sum(3, dtype=jnp.float32).astype(gradient.dtype)


# --- Head dims between those of Hopper's kernels: padded with zeros to the next larger one.
#
# Zeros do not change scores, and the padding of results and gradients is cut off. The fallback
# kernels take any head dim without padding, but take two to four and a half times as long on Hopper
# (docs/performance.md).


def padded_dims(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool
) -> tuple[int, int] | None:
    """The head dims of query and value to which to pad a call; None: it needs no padding, or no
    kernel takes it padded."""
    suffix, dims = suffix_of(of, spec), (of.query.shape[3], of.value.shape[3])
    if ffi.ext is None or suffix is None or any(is_symbolic(x) or x % ffi.MULTIPLE for x in dims):
        return None
    there = ffi.dims_here("forward_sm90" + suffix, str(of.query.dtype), for_export=for_export)
    wider = sorted((x for x in there if x[0] >= dims[0] and x[1] >= dims[1]), key=sum)
    if dims in there or not wider:
        return None
    if direction == "backward":
        query, value = (
            plain(x).update(shape=(*x.shape[:3], dim))
            for x, dim in zip((of.query, of.value), wider[0], strict=True)
        )
        wide = of._replace(query=query, value=value)
        if choose_algorithm(wide, spec, for_export) == "portable":
            return None
    return wider[0]


def padded(
    direction: Pass, spec: AttentionSpec, x: Operands, dims: tuple[int, int]
) -> list[jax.Array]:
    """The call padded with zeros to these head dims."""
    of_name = {"query": dims[0], "key": dims[0], "value": dims[1], "out": dims[1], "dout": dims[1]}
    wide = {
        name: _wider(y, dim) for name, dim in of_name.items() if (y := getattr(x, name)) is not None
    }
    results = _run(direction, spec, x._replace(**wide))
    if direction == "forward":
        out, *numbers = results
        return [out[..., : x.value.shape[3]], *numbers]
    return [y[..., : like.shape[3]] for y, like in zip(results, x[:3], strict=True)]


def _wider(x: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, dim - x.shape[3])))
