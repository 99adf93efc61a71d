"""The `Dims` of every primitive: the kinds of its dimensions, for partitioning.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.schema import ROWS
from packax._src.core.sharding import Axes
from packax._src.core.spec import Operands
from packax._src.ops.merge import merged
from packax._src.ops.packed_rows import PackedRows
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
    divided: tuple[str, ...] = ("bhk",)
    if x.block_table is not None:  # pages do not belong to batch rows, and are larger than these
        letters |= {"key": "pog.", "value": "pog."}
        divided = ("po", "bh")
    if x.key_scale is not None:
        of_scale = (letters["key"][0] if x.key_scale.shape[0] == x.key.shape[0] else ".") + "g"
        letters |= {"key_scale": of_scale, "value_scale": of_scale}
    results = "b.h.", "bh."
    return Dims(tuple(letters.values()), results, divided=divided, by_keys=_decode_by_keys)


def _decode_by_keys(bind, axes, *operands, spec, names):
    """Each device attends to its part of the caches. The parts are merged by their log-sum-exps."""
    x = Operands.of(names, operands)
    every = tuple(axis for of in axes.values() for axis in of)
    part = _parted(x, axes)._replace(sinks=None)
    out, lse = bind(*part.leaves, spec=spec, names=part.names)
    parts = zip(*(jax.lax.all_gather(y, every) for y in (out.astype(lse.dtype), lse)), strict=True)
    out, lse = merged(list(parts))
    if x.sinks is not None:
        out, lse = add_sinks(out, lse, x.sinks)
    return out.astype(x.query.dtype), lse


def _parted(x: Operands, axes: dict[str, Axes]) -> Operands:
    """The call over this device's keys: those of its pages, or of its slice of every page. A dense
    cache has one page for each sequence.

    A device's keys of a sequence have the order of the sequence, so those in a range are a range.
    """
    lo, hi, size = x.kv_start, x.kv_end, x.key.shape[1]
    index, pieces = {}, {}
    for letter, of in axes.items():
        index[letter] = jax.lax.axis_index(of) if of else 0
        pieces[letter] = jax.lax.psum(1, of) if of else 1
    sliced = "k" if x.block_table is None else "o"
    page_size, first = size * pieces[sliced], size * index[sliced]
    table, width = x.block_table, 1
    if table is not None:
        width, pages = table.shape[1], x.key.shape[0]
        page = table - pages * index["p"]
        wrong = (table < 0) | (table >= pages * pieces["p"])  # gives NaN on every device
        here = (page >= 0) & (page < pages) & ~wrong
        kept = here | wrong
        before = jnp.pad(jnp.cumsum(kept, 1, dtype=jnp.int32), ((0, 0), (1, 0)))
        at = jnp.arange(len(table))[:, None], jnp.where(kept, before[:, :-1], width)
        table = jnp.zeros_like(table).at[at].set(jnp.where(here, page, -1), mode="drop")
        sequence = jnp.arange(len(table))[:, None]
        if x.row_bounds is not None:
            start, end = x.row_bounds
            sequence = PackedRows.of(start, end, lo.shape[1]).sequence[None]

    def below(key: jax.Array) -> jax.Array:
        """How many of the device's keys come before each of these keys of its sequence."""
        block = key // page_size
        count = jnp.clip(key - block * page_size - first, 0, size)
        if table is None:
            return jnp.where(block > 0, size, count)
        count = jnp.where(kept[sequence, jnp.minimum(block, width - 1)], count, 0)
        return before[sequence, block] * size + count

    capacity = page_size * width
    beyond = (lo < hi) & (hi > capacity)  # gives NaN on every device
    lo, hi = (below(jnp.clip(y, 0, capacity)) for y in (lo, hi))
    lo, hi = jnp.where(beyond, 0, lo), jnp.where(beyond, size * width + 1, hi)
    return x._replace(kv_start=lo, kv_end=hi, block_table=table)


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
