"""Converts the caller's integer arrays to int32 in numpy or jax.numpy, checked or saturating, and
describes arguments in error messages and reprs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np
from jax.export import is_symbolic_dim

from packax._src.core.provenance import is_permuted, mark_permuted

Array: TypeAlias = jax.Array | np.ndarray
ArrayLike: TypeAlias = jax.typing.ArrayLike | Sequence[Any]  # includes nested sequences

INT32 = np.iinfo(np.int32)


def numpy_of(*arrays: Any) -> ModuleType:
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def plus(x: Any, step: Any) -> Array:
    """x + step for an int32 array x and int32 integers, saturating."""
    xp = numpy_of(x, step)
    with np.errstate(over="ignore"):  # numpy scalars would warn
        total = x + step
    total = xp.where((step > 0) & (total < x), INT32.max, total)
    return xp.where((step < 0) & (total > x), INT32.min, total).astype(np.int32)


def numpy_array(name: str, given: Any) -> np.ndarray:
    """The argument, expected to hold integers, as a numpy array.

    Raises:
        ValueError: not an array, or integers that do not fit any numpy dtype.
    """
    if isinstance(given, np.ma.MaskedArray):  # np.asarray would expose the masked values
        raise ValueError(
            f"{name} must be an array without a mask, but is a masked array: pass "
            f"{name}.filled(...)"
        )
    try:
        x = np.asarray(given)
    except (TypeError, ValueError):  # ragged, or not an array
        rows = " whose rows differ in length" if isinstance(given, (list, tuple)) else ""
        raise ValueError(
            f"{name} must be an array of integers, but is {described(given)}{rows}"
        ) from None
    if x.ndim == 0 and x.dtype.kind in "OUS" and not isinstance(given, int):
        raise ValueError(f"{name} must be an array of integers, but is {described(given)}")
    if x.dtype.kind == "O" and x.size and all(isinstance(n, int) for n in x.flat):
        raise ValueError(f"{name} must fit int32, but holds values from {x.min()} to {x.max()}")
    return x


def as_int32(
    name: str,
    x: Any,
    *,
    saturate: bool = False,
    ranks: tuple[int, ...] = (1, 2),
    shapes: str = "(batch, length) or (length,)",
) -> Array:
    """x as an int32 array with one of the accepted `ranks` (numbers of dimensions).

    Values that do not fit int32 saturate with saturate=True, and otherwise raise ValueError. The
    result of an array that a plan has permuted counts as permuted, too.
    """
    converted = _as_int32(name, x, saturate, ranks, shapes)
    return mark_permuted(converted) if is_permuted(x) else converted


def _as_int32(name: str, x: Any, saturate: bool, ranks: tuple[int, ...], shapes: str) -> Array:
    if is_symbolic_dim(x):  # from jax.export, as in causal(kv_len - q_len)
        x = jnp.asarray(x).astype(jnp.int32)
    if not isinstance(x, jax.Array):
        typed = hasattr(x, "dtype")
        x = numpy_array(name, x)
        if not typed and x.size == 0:  # an empty list, which is float64 in numpy
            x = x.astype(np.int32)
    if x.ndim not in ranks:
        raise ValueError(f"{name} must have shape {shapes}, but has {x.shape}")
    if not jnp.issubdtype(x.dtype, np.integer):  # unlike np.issubdtype, jnp.issubdtype knows int4
        text = f"{name} must be integers, but has dtype {x.dtype}"
        if isinstance(x, np.ndarray) and x.dtype.kind in "USTO":  # strings and objects
            text += f": number them with np.unique({name}, return_inverse=True)[1]"
        raise ValueError(text)
    if jnp.iinfo(x.dtype).bits < 32 or x.dtype == np.int32:
        unchanged = isinstance(x, jax.Array) and x.dtype == np.int32  # needs no copy
        return x if unchanged else x.astype(np.int32)
    if saturate:
        clip = jnp.clip if isinstance(x, jax.Array) else np.clip
        low = max(INT32.min, np.iinfo(x.dtype).min)
        return clip(x, low, INT32.max).astype(np.int32)
    if isinstance(x, jax.Array):  # values may be traced, or on a device
        raise ValueError(
            f"{name} must have an integer dtype that fits int32, but has {x.dtype}: "
            f"cast it with .astype(jnp.int32)"
        )
    low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
    if low < INT32.min or high > INT32.max:
        raise ValueError(f"{name} must fit int32, but holds values from {low} to {high}")
    return x.astype(np.int32)


# --- Messages


def page(title: str) -> str:
    """How messages refer to a page of the documentation: it has no address yet, and a wheel does
    not contain it."""
    return f'"{title}" in packax\'s documentation'


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


class PublicNames(type):
    """The type of classes with many inner fields: `dir`, and so `help`, lists only `public`."""

    public: tuple[str, ...] = ()

    def __init__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> None:
        super().__init__(name, bases, names)
        cls.__signature__ = inspect.Signature()  # no call makes one: functions return them

    def __dir__(cls) -> list[str]:
        return ["__doc__", *cls.public]


class NotAnArray:
    """Base class that makes `np.asarray` raise instead of creating an array of one object."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            f"{described(self)} is not an array: its as_array() is the dense boolean array, and "
            "jax.tree.leaves returns the arrays that it holds"
        )
