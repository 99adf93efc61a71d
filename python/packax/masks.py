"""Mask expressions: frozen values whose meaning is a dense boolean, `as_array`.

Nothing here computes row ranges (build.py does) or knows a kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PADDING_SEGMENT_ID = -1
"""The one segment id that is no document: its rows attend nothing and no row attends its keys."""

Array: TypeAlias = jax.Array | np.ndarray
ArrayLike: TypeAlias = Any  # an array, or nested sequences of integers

_INT32 = np.iinfo(np.int32)


class MaskExpression:
    """What `causal()`, `full()`, `documents(...)`, `ranges(...)` and `&` of them return."""

    def as_array(self, q_len: int, kv_len: int) -> Array:
        """Whether query row i attends key j: boolean, (q_len, kv_len), after the batch if any.

        This is the meaning of the expression, and quadratic: for tests, plots and small inputs.

        Raises:
            ValueError: if the expression's own arrays have other lengths.
        """
        check_lengths(self, q_len, kv_len)
        return self._as_array(q_len, kv_len)

    def _as_array(self, q_len: int, kv_len: int) -> Array:
        raise NotImplementedError

    def arrays(self) -> list[tuple[str, Array, str]]:
        """(name, array, "q" or "kv"): the arrays held, and the length that each one must have."""
        return []

    def parts(self) -> tuple[MaskExpression, ...]:
        return (self,)

    def __and__(self, other: MaskExpression) -> MaskExpression:
        if not isinstance(other, MaskExpression):
            return NotImplemented
        both = self.parts() + other.parts()
        if sum(isinstance(part, Documents) for part in both) > 1:
            raise NotImplementedError(
                "an expression can hold one documents(...), and `&` was given two: combine the "
                "ids into one array, such as first_ids * (second_ids.max() + 1) + second_ids "
                f"with {PADDING_SEGMENT_ID} where either is padding"
            )
        return And(both)


@dataclasses.dataclass(frozen=True, eq=False)
class Full(MaskExpression):
    """See `full`."""

    def _as_array(self, q_len: int, kv_len: int) -> Array:
        return np.ones((q_len, kv_len), bool)


@dataclasses.dataclass(frozen=True, eq=False)
class Causal(MaskExpression):
    """See `causal`."""

    def _as_array(self, q_len: int, kv_len: int) -> Array:
        return np.arange(q_len)[:, None] >= np.arange(kv_len)[None, :]


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges(MaskExpression):
    """See `ranges`."""

    lo: Array
    hi: Array

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [("lo", self.lo, "q"), ("hi", self.hi, "q")]

    def _as_array(self, q_len: int, kv_len: int) -> Array:
        index = np.arange(kv_len)
        return (self.lo[..., None] <= index) & (index < self.hi[..., None])


@dataclasses.dataclass(frozen=True, eq=False)
class Documents(MaskExpression):
    """See `documents`. The key side is None where it is the query side."""

    q_ids: Array
    kv_ids: Array | None
    q_pos: Array | None
    kv_pos: Array | None

    def arrays(self) -> list[tuple[str, Array, str]]:
        held: list[tuple[str, Array | None, str]] = [
            ("segment_ids", self.q_ids, "q"),
            ("kv_segment_ids", self.kv_ids, "kv"),
            ("positions", self.q_pos, "q"),
            ("kv_positions", self.kv_pos, "kv"),
        ]
        if self.kv_ids is None:
            held.append(("segment_ids", self.q_ids, "kv"))
        return [(name, x, side) for name, x, side in held if x is not None]

    def _as_array(self, q_len: int, kv_len: int) -> Array:
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        same = self.q_ids[..., :, None] == kv_ids[..., None, :]
        return same & (self.q_ids != PADDING_SEGMENT_ID)[..., :, None]

    def causal_array(self) -> Array:
        """What causal() means beside positions."""
        assert self.q_pos is not None
        kv_pos = self.q_pos if self.kv_pos is None else self.kv_pos
        return self.q_pos[..., :, None] >= kv_pos[..., None, :]


@dataclasses.dataclass(frozen=True, eq=False)
class And(MaskExpression):
    """A pair is attended if every member says so."""

    members: tuple[MaskExpression, ...]

    def parts(self) -> tuple[MaskExpression, ...]:
        return self.members

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [held for member in self.members for held in member.arrays()]

    def _as_array(self, q_len: int, kv_len: int) -> Array:
        document = documents_of(self)
        result: Array = np.ones((q_len, kv_len), bool)
        for member in self.members:
            if isinstance(member, Causal) and document is not None and document.q_pos is not None:
                result = result & document.causal_array()
            else:
                result = result & member.as_array(q_len, kv_len)
        return result


def full() -> MaskExpression:
    """Every query row attends every key.

    >>> packax.full().as_array(2, 3)
    array([[ True,  True,  True],
           [ True,  True,  True]])
    """
    return Full()


def causal() -> MaskExpression:
    """Query row i attends the keys j <= i, counted from the first row and the first key.

    Beside `documents(..., positions=...)` positions are compared in place of indices: row i
    attends key j if the row's position is at least the key's.

    >>> packax.causal().as_array(2, 3)
    array([[ True, False, False],
           [ True,  True, False]])
    """
    return Causal()


def documents(
    segment_ids: ArrayLike,
    kv_segment_ids: ArrayLike | None = None,
    *,
    positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
) -> MaskExpression:
    """Query row i attends the keys with its own segment id; -1 is padding and attends nothing.

    Ids and positions may hold anything: ids in any order, negative, hashed, an id that comes
    back later in the row (it is the same document), positions that restart or go down. All of it
    is exact; rows whose keys are one stretch (ordinary packing) cost least.

    Args:
        segment_ids: (B, Sq) or (Sq,), any integer dtype that fits int32. Only -1
            (`PADDING_SEGMENT_ID`) is padding.
        kv_segment_ids: (B, Skv) or (Skv,), the keys' ids; None: the same as segment_ids.
        positions: like segment_ids. What `causal()` compares, beside this documents(...).
            Without `causal()` they have no effect.
        kv_positions: like kv_segment_ids; None: the same as positions, which needs
            kv_segment_ids to be None too.

    Raises:
        ValueError: a rank, dtype, value or length that is not as above.

    >>> packax.documents([7, 7, -1, 3]).as_array(4, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 0, 0],
           [0, 0, 0, 1]])
    """
    q_ids = _int32("segment_ids", segment_ids)
    kv_ids = None if kv_segment_ids is None else _int32("kv_segment_ids", kv_segment_ids)
    q_pos = None if positions is None else _int32("positions", positions)
    kv_pos = None if kv_positions is None else _int32("kv_positions", kv_positions)
    if kv_pos is not None and q_pos is None:
        raise ValueError("kv_positions was given without positions: give both, or neither")
    if kv_ids is not None and q_pos is not None and kv_pos is None:
        raise ValueError(
            "positions was given with kv_segment_ids but without kv_positions: give "
            "kv_positions, one for every key"
        )
    expression = Documents(q_ids, kv_ids, q_pos, kv_pos)
    check_lengths(expression)
    batch_of(expression)
    return expression


def ranges(lo: ArrayLike, hi: ArrayLike) -> MaskExpression:
    """Query row i attends the keys lo[i] <= j < hi[i]: an empty range attends nothing.

    Args:
        lo, hi: (B, Sq) or (Sq,), any integer dtype, in keys. Values are clipped to [0, Skv].

    Raises:
        ValueError: a rank or dtype that is not as above, or lengths that differ.

    >>> packax.ranges([0, 1], [1, 3]).as_array(2, 3).astype(int)
    array([[1, 0, 0],
           [0, 1, 1]])
    """
    expression = Ranges(_int32("lo", lo, saturate=True), _int32("hi", hi, saturate=True))
    check_lengths(expression)
    batch_of(expression)
    return expression


def documents_of(expression: MaskExpression) -> Documents | None:
    """The one documents(...) of the expression."""
    for part in expression.parts():
        if isinstance(part, Documents):
            return part
    return None


def check_lengths(
    expression: MaskExpression, q_len: int | None = None, kv_len: int | None = None
) -> tuple[int | None, int | None]:
    """q_len and kv_len as the arguments and all arrays agree on, None where nothing says.

    Raises:
        ValueError: if they do not agree.
    """
    known: dict[str, tuple[str, int]] = {}
    if q_len is not None:
        known["q"] = ("q_len", q_len)
    if kv_len is not None:
        known["kv"] = ("kv_len", kv_len)
    for name, x, side in expression.arrays():
        length = x.shape[-1]
        first, expected = known.setdefault(side, (name, length))
        if length != expected:
            what = "query rows" if side == "q" else "keys"
            where = f"{first} says" if first in ("q_len", "kv_len") else f"{first} is for"
            raise ValueError(f"{name} is for {length} {what}, but {where} {expected}")
    nothing = ("", None)
    return known.get("q", nothing)[1], known.get("kv", nothing)[1]


def batch_of(expression: MaskExpression) -> int:
    """The batch size of the arrays, 1 where none has a batch.

    Raises:
        ValueError: if two arrays have different batch sizes, neither of them 1.
    """
    batch, first = 1, ""
    for name, x, _ in expression.arrays():
        size = x.shape[0] if x.ndim == 2 else 1
        if size not in (1, batch) and batch != 1:
            raise ValueError(f"{name} has batch size {size}, but {first} has {batch}")
        if size != 1:
            batch, first = size, name
    return batch


def _int32(name: str, x: ArrayLike, *, saturate: bool = False) -> Array:
    """x as int32 of rank 1 or 2; values that do not fit are an error, or saturate."""
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    if x.ndim not in (1, 2) or 0 in x.shape:
        raise ValueError(f"{name} must have shape (batch, length) or (length,), but has {x.shape}")
    if not np.issubdtype(x.dtype, np.integer):
        raise ValueError(f"{name} must be integers, but has dtype {x.dtype}")
    if np.can_cast(x.dtype, np.int32):
        return x.astype(np.int32)
    if saturate:
        clip = jnp.clip if isinstance(x, jax.Array) else np.clip
        low = max(_INT32.min, np.iinfo(x.dtype).min)
        return clip(x, low, _INT32.max).astype(np.int32)
    if isinstance(x, jax.Array):  # its values may be unknown here, or cost a transfer to look at
        raise ValueError(
            f"{name} must have an integer dtype that fits int32, but has {x.dtype}: "
            f"cast it with .astype(jnp.int32)"
        )
    low, high = int(x.min()), int(x.max())
    if low < _INT32.min or high > _INT32.max:
        raise ValueError(f"{name} must fit int32, but holds values from {low} to {high}")
    return x.astype(np.int32)
