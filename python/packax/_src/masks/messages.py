"""How errors and reprs name what a caller gave in place of a mask or an expression."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


def shown(x: Any) -> str:
    """An array as `int32[2, 64]`, one number by its value."""
    if isinstance(x, (np.ndarray, np.generic)) and x.ndim == 0:
        return str(x)
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return repr(x)


def described(x: Any) -> str:
    """What somebody gave in place of a mask or an expression."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array, {shown(x) if x.ndim else f'{x.dtype}[]'}"
    article = "an" if type(x).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(x).__name__}"


def not_joined(operator: str, other: Any) -> str:
    """Why an expression and something else are not joined."""
    text = f"`{operator}` joins mask expressions, but one side is {described(other)}"
    if hasattr(other, "q_blocks"):
        return f"{text}: join expressions first and build the mask of all of them"
    if inspect.isfunction(other):
        return f"{text}, {other.__name__}: call it, as in {other.__name__}(...)"
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
