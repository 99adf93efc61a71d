"""The operands of forward_p and backward_p by name: tensors, the mask's arrays, extras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packax._src.core.mask import Pass, operand_names

TENSORS: dict[Pass, tuple[str, ...]] = {
    "forward": ("query", "key", "value"),
    "backward": ("query", "key", "value", "out", "lse", "dout", "dlse"),
}
EXTRAS = ("scales", "slopes", "q_bias_pos", "kv_bias_pos")
"""What changes scores: none of them, scales, scales and slopes, or all four."""


def names(direction: Pass, params: dict[str, Any]) -> tuple[str, ...]:
    """Of all operands, by the primitive's parameters `block_size` and `extras`."""
    mask = operand_names(params["block_size"] is not None, direction)
    return (*TENSORS[direction], *mask, *EXTRAS[: params["extras"]])


def call_names(direction: Pass) -> tuple[str, ...]:
    """Of the operands of an FFI call, which has all of them; `before` is out or dq."""
    return (*TENSORS[direction], *operand_names(True, direction), *EXTRAS, "before")


def named(direction: Pass, operands: Sequence[Any], params: dict[str, Any]) -> dict[str, Any]:
    """Operands, or what there is one of for each (avals, MLIR values), by name and in order."""
    return dict(zip(names(direction, params), operands, strict=True))
