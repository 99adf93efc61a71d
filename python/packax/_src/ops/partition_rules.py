"""What the dimensions of every primitive's operands are, for partitioning.py; see `Dims` there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packax._src.core.mask import Pass
from packax._src.ops import operands
from packax._src.ops.partitioning import Dims
from packax._src.ops.primitives import BLOCK_ARRAYS


def documents(q_ids, *operands, **_) -> Dims:
    return Dims(tuple("b" + "." * (x.ndim - 1) for x in (q_ids, *operands)), ("b.",) * 3)


def blocks(*operands, **_) -> Dims:
    return Dims(("b.",) * 3, ("b..", "b..", "b.", "b.", "b."))


def forward(query, key, value, *others, block_size, extras, max_logits, **_) -> Dims:
    rest, _ = _behind_tensors(query, others, 2 if block_size else 0, extras)
    lse = "bh.." if operands.lse_in_two(extras) else "bh."
    results = ("b.h.", lse, *(["bh."] if max_logits else []))
    return Dims((*_TENSORS, *rest), results, _of_kernels("forward", block_size, extras))


def backward(query, key, value, *others, block_size, extras, score_grads, bias_grad, **_) -> Dims:
    rest, of_extra = _behind_tensors(query, others[4:], 3 if block_size else 0, extras)
    # out, lse and their cotangents
    results = tuple(dims + "." * (x.ndim - 3) for dims, x in zip(_RESULTS, others, strict=False))
    all_operands = (*_TENSORS, *results, *rest)
    gradients = ["b.h.", "b.g.", "b.g.", *(["bh.."] if score_grads else [])]
    summed = {}
    if bias_grad:  # each device has a part of it, where it is one for what is divided
        summed[len(gradients)] = len(all_operands) - len(extras) + extras.index("bias")
        gradients.append(of_extra["bias"])
    return Dims(all_operands, tuple(gradients), _of_kernels("backward", block_size, extras), summed)


def decode(query, key, value, q_lo, q_hi, *operands, paged, **_) -> Dims:
    batch, _, heads, _ = query.shape
    cache = "p.g." if paged else "bkg."  # pages belong to no row of the batch
    rest = [_of_batch(x, batch) for x in operands[: int(paged)]]
    rest += [_of_heads(x, batch, heads) for x in operands[int(paged) :]]  # sinks
    return Dims(("bsh.", cache, cache, "b.", "b.", *rest), ("b.h.", "bh."))


def _of_kernels(direction: Pass, block_size: Any, extras: tuple[str, ...]) -> frozenset[int]:
    """Bounds of blocks, orders of tiles and lists, which attention in jax.numpy makes itself."""
    names = operands.names(direction, {"block_size": block_size, "extras": extras})
    return frozenset(n for n, name in enumerate(names) if name in _KERNELS_READ)


_KERNELS_READ = (*BLOCK_ARRAYS, "kv_block_lists")
_TENSORS = ("bsh.", "bkg.", "bkg.")
_RESULTS = ("b.h", "bh.", "b.h", "bh.")
_OF_HEADS = ("slopes", "bias", "dropout_streams")


def _behind_tensors(
    query: Any, operands: Sequence[Any], lists: int, extras: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of the mask, block lists and extras: of the batch, or for all; extras also by name."""
    batch, _, heads, _ = query.shape
    end = len(operands) - len(extras)
    of_extra = {
        name: _of_heads(x, batch, heads) if name in _OF_HEADS else _of_batch(x, batch)
        for name, x in zip(extras, operands[end:], strict=True)
    }
    rest = (
        *(_of_batch(x, batch) for x in operands[: end - lists]),
        *(_of_heads(x, batch, heads) for x in operands[end - lists : end]),
        *of_extra.values(),
    )
    return rest, of_extra


def _of_batch(x: Any, batch: int) -> str:
    return ("b" if x.shape[0] == batch else ".") + "." * (x.ndim - 1)


def _of_heads(x: Any, batch: int, heads: int) -> str:
    return _of_batch(x, batch)[:1] + ("h" if x.shape[1] == heads else ".") + "." * (x.ndim - 2)
