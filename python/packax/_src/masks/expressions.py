"""Mask expressions: frozen values whose meaning is a dense boolean, `as_array`.

This file has their algebra, documents(...) and ranges(...). Those that are an interval of places,
causal() and its kin, are in intervals.py, block_sparse(...) in block_sparse.py. Nothing here
computes row ranges (build.py does) or knows a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, dataclass_transform

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from packax._src.core.shapes import PADDING_SEGMENT_ID

Array: TypeAlias = jax.Array | np.ndarray
ArrayLike: TypeAlias = Any  # an array, or nested sequences of integers
Limits: TypeAlias = tuple[Any, Any]  # lowest and highest place of each row; None: unbounded

_INT32 = np.iinfo(np.int32)


class Places(NamedTuple):
    """What intervals compare: the positions of documents(...), or else indices. All int32."""

    q: Array  # (Sq,) or (B, Sq)
    kv: Array  # (Skv,) or (B, Skv)
    ids: Array | None  # (Sq,) or (B, Sq): segment ids of the rows, where there are documents
    by_position: bool


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(*arrays: str, static: tuple[str, ...] = ()) -> Callable[[type], Any]:
    """A frozen dataclass that is a pytree of these fields, also in programs that jax.export writes."""

    def decorate(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        jax.tree_util.register_dataclass(cls, data_fields=[*arrays], meta_fields=[*static])
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"packax.{cls.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=_static_fields,
        )
        return cls

    return decorate


def _static_fields(written: bytes) -> Any:
    return tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(written))


class MaskExpression:
    """What `causal()`, `documents(...)` and the others return, and `&` and `|` of them.

    A pytree of its arrays: it may be an argument of jit, and vmap may map it. One without arrays,
    such as `causal() & chunked(8192)`, is equal to others of the same meaning and has a hash, so it
    may be a static argument too.
    """

    once = ""
    """Where `&` can have only one of a kind: what to do with two."""

    @property
    def name(self) -> str:
        """The function that makes it."""
        return type(self).__name__.lower()

    def arguments(self) -> list[str]:
        """The arguments of that function, as `repr` prints them."""
        return []

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.arguments())})"

    def as_array(self, q_len: int, kv_len: int) -> Array:
        """Whether query row i attends key j: boolean, (q_len, kv_len), after the batch if any, and
        after the heads if a block_sparse(...) has them.

        This is the meaning of the expression, and quadratic: for tests, plots and small inputs.

        Raises:
            ValueError: if the expression's own arrays have other lengths.
        """
        check_lengths(self, q_len, kv_len)
        return self._as_array(places_of(documents_of(self), q_len, kv_len))

    def _as_array(self, at: Places) -> Array:
        raise NotImplementedError

    def arrays(self) -> list[tuple[str, Array, str]]:
        """(name, array, side): the arrays held, and what they have one value for.

        Sides: "q" a query row and "kv" a key (last axis, behind the batch if any), "batch".
        """
        return []

    def parts(self) -> tuple[MaskExpression, ...]:
        """What is intersected."""
        return (self,)

    def walk(self) -> Iterator[MaskExpression]:
        """Itself and all that it is made of."""
        yield self

    def check_beside(self, document: Documents | None) -> None:
        """Raises ValueError if it cannot be intersected with these documents."""

    def warn_beside(self, document: Documents | None) -> None:
        """Warns if beside these documents it surely, or as a rule, is not what is meant."""

    def check_sizes(self, q_len: int | None, kv_len: int | None) -> None:
        """Raises ValueError if it is for other lengths; None: not known."""

    __array_ufunc__ = None  # numpy leaves `array & expression` to __rand__

    def __and__(self, other: MaskExpression) -> MaskExpression:
        if not isinstance(other, MaskExpression):
            raise TypeError(_not_joined("&", other))
        both = And(self.parts() + other.parts())
        _check_and(both)
        return both

    def __or__(self, other: MaskExpression) -> MaskExpression:
        if not isinstance(other, MaskExpression):
            raise TypeError(_not_joined("|", other))
        return _union((self, other))

    def __rand__(self, other: Any) -> MaskExpression:
        raise TypeError(_not_joined("&", other))

    def __ror__(self, other: Any) -> MaskExpression:
        raise TypeError(_not_joined("|", other))

    def __invert__(self) -> MaskExpression:
        raise TypeError(
            f"`~` of {self!r}: the keys that a mask leaves out are not one range for every row. Say "
            "what is attended, as in ranges(lo, hi), or block_sparse(~block_map, block_size)"
        )

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, MaskExpression):
            return self is other
        mine = _static_value(self)
        return mine is not None and mine == _static_value(other)

    def __hash__(self) -> int:
        value = _static_value(self)
        if value is None:
            raise TypeError(
                f"{self!r} has no hash, because it holds arrays: it cannot be a static argument of "
                "jit, or a key of a dict. Pass it as an ordinary argument (it is a pytree), or make "
                "it inside of the function from arrays that are arguments"
            )
        return hash(value)

    def __bool__(self) -> bool:
        raise ValueError(
            "a mask expression is neither true nor false: join expressions with `&` and `|`, not "
            "with `and` and `or`"
        )


class Interval(MaskExpression):
    """Row i attends an interval of places that depends on i alone: not on what the keys are.

    A pytree, so that it crosses jit: its arrays have the batch, or 1, as their first axis.
    """

    def limits(self, at: Places) -> Limits:
        """The lowest and the highest place of each row, (B or 1, Sq) int32; None: unbounded.

        Nothing is lost where a limit saturates: no place lies beyond int32.
        """
        raise NotImplementedError

    def anchors(self) -> frozenset[Any] | None:
        """Offsets o so that every row's interval surely holds its place + o; None: all offsets."""
        raise NotImplementedError

    def unbounded(self) -> tuple[bool, bool]:
        """Whether every row's interval is surely unbounded below, and above."""
        raise NotImplementedError


@pytree("lo", "hi")
class Ranges(MaskExpression):
    """See `ranges`."""

    lo: Array
    hi: Array

    def arguments(self) -> list[str]:
        return [shown(self.lo), shown(self.hi)]

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [("lo", self.lo, "q"), ("hi", self.hi, "q")]

    def _as_array(self, at: Places) -> Array:
        index = np.arange(at.kv.shape[-1])
        return (self.lo[..., None] <= index) & (index < self.hi[..., None])


@pytree("q_ids", "kv_ids", "q_pos", "kv_pos")
class Documents(MaskExpression):
    """See `documents`. The key side is None where it is the query side."""

    once = (
        "combine the ids into one array, such as first_ids * (second_ids.max() + 1) + second_ids "
        f"with {PADDING_SEGMENT_ID} where either is padding"
    )

    q_ids: Array
    kv_ids: Array | None
    q_pos: Array | None
    kv_pos: Array | None

    def arguments(self) -> list[str]:
        sides = [shown(x) for x in (self.q_ids, self.kv_ids) if x is not None]
        positions = ("positions", self.q_pos), ("kv_positions", self.kv_pos)
        return sides + [f"{name}={shown(x)}" for name, x in positions if x is not None]

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

    def _as_array(self, at: Places) -> Array:
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        same = self.q_ids[..., :, None] == kv_ids[..., None, :]
        return same & (self.q_ids != PADDING_SEGMENT_ID)[..., :, None]


@pytree("members")
class And(Interval):
    """A pair is attended if every member says so. An interval if all members are."""

    members: tuple[Any, ...]

    def __repr__(self) -> str:
        return " & ".join(f"({x!r})" if isinstance(x, Or) else repr(x) for x in self.members)

    def parts(self) -> tuple[MaskExpression, ...]:
        return self.members

    def walk(self) -> Iterator[MaskExpression]:
        yield self
        for member in self.members:
            yield from member.walk()

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [held for member in self.members for held in member.arrays()]

    def _as_array(self, at: Places) -> Array:
        result: Array = np.ones((at.q.shape[-1], at.kv.shape[-1]), bool)
        arrays = [member._as_array(at) for member in self.members]
        heads = any(x.ndim == 4 for x in arrays)
        for x in arrays:
            result = result & (x[:, None] if heads and x.ndim == 3 else x)
        return result

    def limits(self, at: Places) -> Limits:
        return _combine(self.members, at, "maximum", "minimum", unbounded_wins=False)

    def anchors(self) -> frozenset[Any] | None:
        return _common(self.members)

    def unbounded(self) -> tuple[bool, bool]:
        below, above = zip(*(member.unbounded() for member in self.members), strict=True)
        return all(below), all(above)


@pytree(static=("number",))
class Shared:
    """Stands for one of the offsets that a union holds."""

    number: int


@pytree("sides", "offsets")
class Or(Interval):
    """A pair is attended if a member says so; all are intervals, and so is their union.

    That it is one may rest on equal offsets. So each is held once, and the members share it:
    whatever a transformation puts in its place, they stay equal.
    """

    sides: tuple[Any, ...]  # the members, with Shared for their offsets
    offsets: tuple[Any, ...]  # (): none, or an outer union holds them

    @property
    def members(self) -> tuple[Any, ...]:
        if not self.offsets:
            return self.sides

        def offset(x: Any) -> Any:
            return self.offsets[x.number] if isinstance(x, Shared) else x

        return tuple(_with_offsets(side, offset) for side in self.sides)

    def __repr__(self) -> str:
        return " | ".join(repr(x) for x in self.members)

    def walk(self) -> Iterator[MaskExpression]:
        yield self
        for member in self.members:
            yield from member.walk()

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [held for member in self.members for held in member.arrays()]

    def _as_array(self, at: Places) -> Array:
        first, second = (member._as_array(at) for member in self.members)
        return first | second

    def limits(self, at: Places) -> Limits:
        return _combine(self.members, at, "minimum", "maximum", unbounded_wins=True)

    def anchors(self) -> frozenset[Any] | None:
        sets = [member.anchors() for member in self.members]
        return None if None in sets else frozenset[Any]().union(*sets)

    def unbounded(self) -> tuple[bool, bool]:
        below, above = zip(*(member.unbounded() for member in self.members), strict=True)
        return any(below), any(above)


def _combine(members: Any, at: Places, lower: str, upper: str, unbounded_wins: bool) -> Limits:
    def fold(name: str, limits: Any) -> Any:
        bounded = [x for x in limits if x is not None]
        if not bounded or (unbounded_wins and len(bounded) < len(limits)):
            return None
        return functools.reduce(getattr(numpy_of(*bounded), name), bounded)

    lows, highs = zip(*(member.limits(at) for member in members), strict=True)
    return fold(lower, lows), fold(upper, highs)


def _common(members: Any) -> frozenset[Any] | None:
    sets = [anchors for member in members if (anchors := member.anchors()) is not None]
    return frozenset.intersection(*sets) if sets else None


def _check_and(both: And) -> None:
    for part in both.members:
        if part.once and sum(type(other) is type(part) for other in both.members) > 1:
            raise NotImplementedError(
                f"an expression can hold one {part.name}(...), and `&` was given two: {part.once}"
            )
    document = documents_of(both)
    for part in both.walk():
        part.check_beside(document)


def _union(members: tuple[MaskExpression, ...]) -> Or:
    """`|` of the members, if it is one range for every row whatever the arrays hold."""
    both = Or(members, ())
    for part in both.walk():
        if not isinstance(part, Interval):
            raise NotImplementedError(
                f"`|` cannot take {part.name}(...), whose keys may be many ranges: unite the others "
                f"and intersect the union with it, as in (a | b) & {part.name}(...)"
            )
    sides = [member.unbounded() for member in both.members]
    same_side = any(all(side) for side in zip(*sides, strict=True))
    if not same_side and (True, True) not in sides and _common(both.members) == frozenset():
        raise NotImplementedError(
            "`|` needs a union that surely is one range for every row, and here it may be two. It is "
            "one where all members hold the row's own place, as causal, sliding_window, chunked, "
            "prefix and spans with equal offsets do (an offset that is a jax array: the same int32 "
            "array in all of them, not only equal ones), or all are unbounded on the same side, as "
            "causal, prefix and sliding_window(None) are below. Otherwise give ranges(lo, hi), or "
            "join the attention of two disjoint masks by their log-sum-exps (return_lse=True)"
        )
    offsets: list[Any] = []
    found: dict[Any, Shared] = {}

    def share(x: Any) -> Any:
        held = found.setdefault(offset_value(x), Shared(len(offsets)))
        if held.number == len(offsets):
            offsets.append(x)
        return held

    return Or(tuple(_with_offsets(side, share) for side in both.members), tuple(offsets))


def _with_offsets(expression: Any, function: Any) -> Any:
    """The interval with function(x) for each offset x in it."""
    if isinstance(expression, And):
        return And(tuple(_with_offsets(x, function) for x in expression.members))
    if isinstance(expression, Or):
        return Or(tuple(_with_offsets(x, function) for x in expression.members), ())
    if getattr(expression, "offset", None) is None:
        return expression
    return dataclasses.replace(expression, offset=function(expression.offset))


def offset_value(offset: Any) -> Any:
    """Equal for offsets that surely are. Values of jax arrays may be unknown: equal to itself alone."""
    return id(offset) if isinstance(offset, jax.Array) else np.asarray(offset).tobytes()


def _static_value(expression: MaskExpression) -> Any:
    """What expressions without arrays are compared by; None for others."""
    leaves, structure = jax.tree.flatten(expression)
    if any(not isinstance(x, (np.ndarray, np.generic)) or x.ndim for x in leaves):
        return None
    return tuple(int(x) for x in leaves), structure


def shown(x: Any) -> str:
    """An array as `int32[2, 64]`, one number by its value."""
    if isinstance(x, (np.ndarray, np.generic)) and x.ndim == 0:
        return str(x)
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return repr(x)


def _not_joined(operator: str, other: Any) -> str:
    """Why an expression and something else are not joined."""
    text = f"`{operator}` joins mask expressions, but one side is {described(other)}"
    if hasattr(other, "q_blocks"):
        return f"{text}: join expressions first and build the mask of all of them"
    return f"{text}{instead_of_array(other)}"


def described(x: Any) -> str:
    """What somebody gave in place of a mask or an expression."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array, {shown(x) if x.ndim else f'{x.dtype}[]'}"
    article = "an" if type(x).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(x).__name__}"


def instead_of_array(x: Any) -> str:
    """What to do with a dense mask."""
    if not hasattr(x, "ndim") or x.ndim < 1:
        return ""
    return (
        ". Dense masks are not taken: where a row's keys are one range say ranges(lo, hi), else "
        "block_sparse(block_map, block_size), for a boolean array of rows and keys "
        "block_sparse(array, 1)"
    )


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
        positions: like segment_ids. What `causal()` and all that is not documents(...) or ranges(...)
            compare in place of indices, beside this documents(...). Alone they have no effect.
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
    q_ids = as_int32("segment_ids", segment_ids)
    kv_ids = None if kv_segment_ids is None else as_int32("kv_segment_ids", kv_segment_ids)
    q_pos = None if positions is None else as_int32("positions", positions)
    kv_pos = None if kv_positions is None else as_int32("kv_positions", kv_positions)
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
    expression = Ranges(as_int32("lo", lo, saturate=True), as_int32("hi", hi, saturate=True))
    check_lengths(expression)
    batch_of(expression)
    return expression


def documents_of(expression: MaskExpression) -> Documents | None:
    """The one documents(...) of the expression."""
    for part in expression.parts():
        if isinstance(part, Documents):
            return part
    return None


def places_of(document: Documents | None, q_len: int, kv_len: int) -> Places:
    """What the intervals beside this documents(...), if any, compare."""
    ids = None if document is None else document.q_ids
    if document is None or document.q_pos is None:
        q, kv = (np.arange(length, dtype=np.int32) for length in (q_len, kv_len))
        return Places(q, kv, ids, False)
    kv_pos = document.q_pos if document.kv_pos is None else document.kv_pos
    return Places(document.q_pos, kv_pos, ids, True)


def check_lengths(
    expression: MaskExpression,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    said: tuple[str, str] = ("q_len says", "kv_len says"),
) -> tuple[int | None, int | None]:
    """q_len and kv_len as the arguments and all arrays agree on, None where nothing says.

    `said`: who gave q_len and kv_len, for the text of errors.

    Raises:
        ValueError: if they do not agree.
    """
    known: dict[str, tuple[str, int]] = {}
    if q_len is not None:
        known["q"] = (said[0], q_len)
    if kv_len is not None:
        known["kv"] = (said[1], kv_len)
    for name, x, side in expression.arrays():
        if side == "batch":
            continue
        length = x.shape[-1]
        first, expected = known.setdefault(side, (f"{name} is for", length))
        if length != expected:
            what = "query rows" if side == "q" else "keys"
            more = ""
            if side == "kv" and name == "segment_ids":
                more = ": give the ids of the keys as kv_segment_ids"
            raise ValueError(f"{name} is for {length} {what}, but {first} {expected}{more}")
    nothing = ("", None)
    lengths = known.get("q", nothing)[1], known.get("kv", nothing)[1]
    for part in expression.walk():
        part.check_sizes(*lengths)
    return lengths


def batch_of(expression: MaskExpression, batch: int = 1, said: str = "") -> int:
    """The batch size of the arrays, 1 where none has a batch.

    `batch`, `said`: one that is known before, and who has it, for the text of errors.

    Raises:
        ValueError: if two arrays have different batch sizes, neither of them 1.
    """
    first, note = said, ""
    for name, x, side in expression.arrays():
        size = x.shape[0] if x.ndim == 2 or side == "batch" else 1
        more = ""
        if side == "batch" and x.ndim == 1:
            more = f". {name} of shape {x.shape} is one for each row of the batch"
            if name == "lengths":
                more += f": for one of each token give (1, {size})"
        if size not in (1, batch) and (batch != 1 or said):
            raise ValueError(f"{name} has batch size {size}, but {first} has {batch}{more or note}")
        if size != 1:
            batch, first, note = size, name, more
    return batch


def plus(x: Any, step: Any) -> Array:
    """x + step for an int32 array x and integers of int32: where that leaves int32, its end."""
    xp = numpy_of(x, step)
    with np.errstate(over="ignore"):  # numpy scalars would warn
        total = x + step
    total = xp.where((step > 0) & (total < x), _INT32.max, total)
    return xp.where((step < 0) & (total > x), _INT32.min, total).astype(np.int32)


def numpy_of(*arrays: Any) -> ModuleType:
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def as_int32(
    name: str,
    x: ArrayLike,
    *,
    saturate: bool = False,
    ranks: tuple[int, ...] = (1, 2),
    shapes: str = "(batch, length) or (length,)",
) -> Array:
    """x as int32 of one of these ranks; values that do not fit are an error, or saturate."""
    if is_symbolic_dim(x):  # of jax.export, such as causal(kv_len - q_len)
        x = jnp.asarray(x).astype(jnp.int32)
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    if x.ndim not in ranks:
        raise ValueError(f"{name} must have shape {shapes}, but has {x.shape}")
    if not jnp.issubdtype(x.dtype, np.integer):  # jnp's knows int4
        raise ValueError(f"{name} must be integers, but has dtype {x.dtype}")
    if jnp.iinfo(x.dtype).bits < 32 or x.dtype == np.int32:
        same = isinstance(x, jax.Array) and x.dtype == np.int32  # jax arrays never change
        return x if same else x.astype(np.int32)
    if saturate:
        clip = jnp.clip if isinstance(x, jax.Array) else np.clip
        low = max(_INT32.min, np.iinfo(x.dtype).min)
        return clip(x, low, _INT32.max).astype(np.int32)
    if isinstance(x, jax.Array):  # its values may be unknown here, or cost a transfer to look at
        raise ValueError(
            f"{name} must have an integer dtype that fits int32, but has {x.dtype}: "
            f"cast it with .astype(jnp.int32)"
        )
    low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
    if low < _INT32.min or high > _INT32.max:
        raise ValueError(f"{name} must fit int32, but holds values from {low} to {high}")
    return x.astype(np.int32)
