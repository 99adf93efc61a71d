"""The `Dims` of every primitive: the kinds of its dimensions, for partitioning.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.schema import ROWS
from packax._src.core.spec import Operands
from packax._src.ops.merge import merged
from packax._src.ops.partitioning import Dims
from packax._src.ops.primitives import BLOCK_ARRAYS
from packax._src.ops.score_mods import add_sinks


def documents(q_ids, *operands, **_) -> Dims:
    return Dims(tuple("b" + "." * (x.ndim - 1) for x in (q_ids, *operands)), ("b.",) * 3)


def blocks(*operands, **_) -> Dims:
    return Dims(("b.",) * 3, ("b..", "b..", "b.", "b.", "b."))


def forward(*avals, spec, names) -> Dims:
    letters = _letters(names, avals)
    lse = "bh.." if Operands.of(names, avals).lse_in_two else "bh."
    results = ("b.h.", lse, *(["bh."] if spec.max_logits else []))
    return Dims(tuple(letters.values()), results, _of_kernels(names))


def forward_tangent(*avals, spec, names, tangents) -> Dims:
    primals = avals[: len(names)]
    of_primals = forward(*primals, spec=spec, names=names)
    letters = dict(zip(names, of_primals.operands, strict=True))
    of_tangents = (letters[name] for name in tangents)
    return of_primals._replace(operands=(*of_primals.operands, *of_tangents))


def backward(*avals, spec, names) -> Dims:
    letters = _letters(names, avals)
    gradients = ["b.h.", "b.g.", "b.g."]
    gradients += ["bh.."] * spec.score_grads + ["bh."] * spec.row_delta
    summed = {}
    if spec.bias_grad:  # each device has only its part of the sum over broadcast dimensions
        summed[len(gradients)] = names.index("bias")
        gradients.append(letters["bias"])
    return Dims(tuple(letters.values()), tuple(gradients), _of_kernels(names), summed)


def decode(*avals, spec, names) -> Dims:
    x, letters = Operands.of(names, avals), _letters(names, avals)
    letters["query"] = "b.h."  # few rows, which are gathered if they arrive sharded
    if x.block_table is not None:  # pages do not belong to batch rows
        letters |= {"key": "ppg.", "value": "ppg."}
    if x.key_scale is not None:
        of_scale = (letters["key"][0] if x.key_scale.shape[0] == x.key.shape[0] else ".") + "g"
        letters |= {"key_scale": of_scale, "value_scale": of_scale}
    by_keys = _decode_by_keys if x.block_table is None else None
    return Dims(tuple(letters.values()), ("b.h.", "bh."), by_keys=by_keys)


def _decode_by_keys(bind, axes, *operands, spec, names):
    """Each device attends to its slice of the caches. The parts are merged by their
    log-sum-exps."""
    x = Operands.of(names, operands)
    lo, hi, size = x.kv_start, x.kv_end, x.key.shape[1]
    first = jax.lax.axis_index(axes) * size
    beyond = (lo < hi) & (hi > size * jax.lax.psum(1, axes))  # gives NaN on every device
    lo = jnp.where(beyond, 0, jnp.maximum(lo - first, 0))
    hi = jnp.where(beyond, size + 1, jnp.clip(hi - first, 0, size))
    part = x._replace(kv_start=lo, kv_end=hi, sinks=None)
    out, lse = bind(*part.leaves, spec=spec, names=part.names)
    parts = zip(*(jax.lax.all_gather(y, axes) for y in (out.astype(lse.dtype), lse)), strict=True)
    out, lse = merged(list(parts))
    if x.sinks is not None:
        out, lse = add_sinks(out, lse, x.sinks)
    return out.astype(x.query.dtype), lse


def _of_kernels(names: tuple[str, ...]) -> frozenset[int]:
    """Indices of block bounds, tile orders and lists, which only kernels read."""
    return frozenset(n for n, name in enumerate(names) if name in _KERNELS_READ)


_KERNELS_READ = (*BLOCK_ARRAYS, "kv_block_lists")


def _letters(names: tuple[str, ...], avals: Sequence[Any]) -> dict[str, str]:
    """Letters by name. Broadcast axes of the mask and of optional operands are not sharded."""
    batch, _, heads, _ = avals[0].shape

    whole = {"B": batch, "E": batch, "H": heads}

    def letter(axis: str, size: Any) -> str:
        if axis == "E" and size not in (1, batch):
            return "e"
        if axis in whole:
            axis = "." if size != whole[axis] else "h" if axis == "H" else "b"
        return "." if axis in "rR" else axis

    return {
        name: "".join(map(letter, ROWS[name].axes.ljust(x.ndim, "."), x.shape))
        for name, x in zip(names, avals, strict=True)
    }
