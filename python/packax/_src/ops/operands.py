"""The operands of forward_p and backward_p by name: tensors, the mask's arrays, extras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packax._src.core.mask import Pass, operand_names

TENSORS: dict[Pass, tuple[str, ...]] = {
    "forward": ("query", "key", "value"),
    "backward": ("query", "key", "value", "out", "lse", "dout", "dlse"),
}
LINEAR_BIAS = ("scales", "slopes", "q_bias_pos", "kv_bias_pos")
ARRAYS = ("bias", "dropout_streams", "dropout_rows")
"""Extras that calls of the second version alone have."""
EXTRAS = (*LINEAR_BIAS, *ARRAYS)
"""What changes scores and probabilities: the primitives' parameter `extras` has the names of those
that are there, in this order. Slopes come with scales, without positions where those are indices;
the two of dropout come together."""
MOVING = ("scales", "slopes", "bias")
"""Extras that may have a tangent."""


def names(direction: Pass, params: dict[str, Any]) -> tuple[str, ...]:
    """Of all operands, by the primitive's parameters `block_size` and `extras`."""
    mask = operand_names(params["block_size"] is not None, direction)
    return (*TENSORS[direction], *mask, *params["extras"])


def version(params: dict[str, Any]) -> int:
    """Of the FFI call: the second where it has an operand that the first has not."""
    return 2 if lse_in_two(params["extras"]) else 1


def lse_in_two(extras: Sequence[str]) -> bool:
    """Whether lse is two numbers a row (row_sums.py), here and in the kernels that take arrays."""
    return not set(extras).isdisjoint(ARRAYS)


def call_names(direction: Pass, version: int) -> tuple[str, ...]:
    """Of the operands of an FFI call, which has all of them; `before` is out or dq."""
    more = ARRAYS if version > 1 else ()
    return (*more, *TENSORS[direction], *operand_names(True, direction), *LINEAR_BIAS, "before")


def of_indices(params: dict[str, Any]) -> bool:
    """Whether there are slopes of positions that are indices."""
    return "slopes" in params["extras"] and "q_bias_pos" not in params["extras"]


def named(direction: Pass, operands: Sequence[Any], params: dict[str, Any]) -> dict[str, Any]:
    """Operands, or what there is one of for each (avals, MLIR values), by name and in order."""
    return dict(zip(names(direction, params), operands, strict=True))
