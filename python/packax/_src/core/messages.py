"""How errors and reprs describe the caller's arguments."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


def shown(x: Any) -> str:
    """An array as `int32[2, 64]`, a single number as its value."""
    if isinstance(x, (np.ndarray, np.generic)) and x.ndim == 0:
        return str(x)
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return repr(x)


def described(x: Any) -> str:
    """A description of an argument of the wrong type."""
    if x is None:
        return "None"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array, {shown(x) if x.ndim else f'{x.dtype}[]'}"
    if inspect.isroutine(x):
        return f"the function {x.__name__}: call it, as in {x.__name__}(...)"
    article = "an" if type(x).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(x).__name__}"


class NotAnArray:
    """Makes `np.asarray` raise; it would make an array of one object."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            f"{described(self)} is not an array: its as_array() gives the dense boolean, and "
            "jax.tree.leaves the arrays that it holds"
        )
