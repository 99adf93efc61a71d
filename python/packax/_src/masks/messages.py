"""Errors about what a caller gave in place of a mask or an expression."""

from __future__ import annotations

from typing import Any

from packax._src.core.messages import described


def not_joined(operator: str, other: Any) -> str:
    """Why an expression and something else are not joined."""
    text = f"`{operator}` joins mask expressions, but one side is {described(other)}"
    if hasattr(other, "q_blocks"):
        return f"{text}: join expressions first and build the mask of all of them"
    return f"{text}{instead_of_array(other)}"


def instead_of_array(x: Any) -> str:
    """What to do with a dense mask."""
    if not hasattr(x, "ndim") or x.ndim < 1:
        return ""
    return (
        ". Dense masks are not taken: where a row's keys are one range say ranges(lo, hi), else "
        "block_sparse(block_mask, block_size), for a boolean array of rows and keys "
        "block_sparse(array, 1)"
    )
