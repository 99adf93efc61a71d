"""Mask expressions: immutable values whose meaning `as_array` defines as a dense boolean array.

This file defines `&` and `|`, checks that the arrays of an expression agree on sizes, and registers
expressions as pytrees. The leaf expressions are in documents.py, intervals.py, spans.py, tree.py
and block_sparse.py. Row ranges are computed in build.py; nothing in this file depends on kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, dataclass_transform

import jax
import numpy as np
from jax.export import is_symbolic_dim

from packax._src.core.arguments import Array, NotAnArray, described, numpy_of, shown
from packax._src.core.mask import register_pytree
from packax._src.core.spec import PADDING_SEGMENT_ID

Reach: TypeAlias = tuple[int | None, int | None]
Limits: TypeAlias = tuple[Any, Any]  # lowest, highest position a row attends to; None: unbounded


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(*arrays: str, static: tuple[str, ...] = ()) -> Callable[[type], Any]:
    """Makes a class a frozen dataclass and a pytree with these fields."""

    def decorate(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        register_pytree(cls, [*arrays], [*static])
        return cls

    return decorate


def static_value(expression: Any) -> Any:
    """A hashable value that identifies an expression without arrays; None if it has arrays."""
    leaves, structure = jax.tree.flatten(expression)
    if any(not isinstance(x, (np.ndarray, np.generic)) or x.ndim for x in leaves):
        return None
    return tuple(int(x) for x in leaves), structure


def offset_value(offset: Any) -> Any:
    """A value for comparing offsets, equal only if the offsets are certainly equal. The elements of
    a jax array may be unknown, so a jax array is equal only to itself.
    """
    return id(offset) if isinstance(offset, jax.Array) else np.asarray(offset).tobytes()


class Positions(NamedTuple):
    """What intervals compare: positions if a part defines them, otherwise indices. All int32."""

    q: Array  # (Sq,) or (B, Sq)
    kv: Array  # (Skv,) or (B, Skv)
    ids: tuple[Array, ...]  # segment ids, (Sq,) or (B, Sq) each; spans end where one changes
    by_position: bool  # positions, not indices


class MaskExpression(NotAnArray):
    """The type of `causal()`, `documents(...)` and so on, and of their combinations by `&` and `|`.

    It is for `flash_attention` and `create_attention_mask`, and is a pytree of its arrays: it may
    be an argument of jit, and vmap may map it. An expression without arrays, such as `causal() &
    chunked(8192)`, compares equal to others of the same meaning and has a hash, so it may also be a
    static argument.
    """

    once = ""
    """Not empty if `&` accepts only one such expression: what the user should do instead."""
    of_rows = True
    """Whether the intervals joined with it compare indices, and equal ids are the only check per
    element. `And.reach` is unknown otherwise."""

    @property
    def name(self) -> str:
        """The name of the public function that returns this expression."""
        return type(self).__name__.lower()

    def arguments(self) -> list[str]:
        """The arguments of that function, as text for `repr`."""
        return []

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.arguments())})"

    def as_array(self, q_len: int, kv_len: int) -> Array:
        """The expression as a dense boolean array, quadratic in the length: for tests and plots.

        It defines the meaning of the expression.

        Args:
            q_len: number of queries.
            kv_len: number of keys.

        Returns:
            bool, (q_len, kv_len), after a batch axis and an axis of heads if the expression has
            them: whether query i attends to key j.

        Raises:
            ValueError: the expression's arrays have other lengths.

        Examples:
            >>> packax.sliding_window(1).as_array(2, 2).astype(int)
            array([[1, 0],
                   [1, 1]])
        """
        check_lengths(self, q_len, kv_len)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return self._as_array(places_of(self, q_len, kv_len))

    def _as_array(self, at: Positions) -> Array:
        raise NotImplementedError

    def arrays(self) -> list[tuple[str, Array, str]]:
        """(name, array, side) for each array.

        The side is "q" if the last axis is the queries, "kv" if it is the keys (a batch axis may
        come first), and "batch" if the array has one value for each row of the batch.
        """
        return []

    def parts(self) -> tuple[MaskExpression, ...]:
        """The members of an `&`, or the expression itself."""
        return (self,)

    def walk(self) -> Iterator[MaskExpression]:
        """The expression and all of its subexpressions."""
        yield self

    def places(self, q_len: int, kv_len: int) -> Positions | None:
        """The positions that this expression defines for the intervals joined with it, or None. See
        `places_of`.
        """
        return None

    def check_others(self, both: And) -> None:
        """Raises ValueError if `both` cannot contain this expression."""

    def warn_with(self, document: Documents | None) -> None:
        """Warns if, with these documents, the meaning is certainly or probably not intended."""

    def check_sizes(self, q_len: int | None, kv_len: int | None) -> None:
        """Raises ValueError if the expression is for other lengths; None: unknown."""

    def reach(self, chunk: int) -> Reach:
        """Upper bounds on how many keys before and after its own chunk a row attends to, in
        self-attention; None: unknown. Chunks have `chunk` rows, and the first starts at row 0. If
        the first bound is n, only the first n rows of a chunk attend to keys before it."""
        return None, None

    def row_keys(self) -> int | None:
        """An upper bound on how many keys a row attends to, if sizes in the expression give one."""
        return None

    def without_positions(self) -> MaskExpression:
        """The same expression with documents(...) that has no positions."""
        return self

    __array_ufunc__ = None  # numpy leaves `array & expression` to __rand__

    def __and__(self, other: MaskExpression) -> MaskExpression:
        if not isinstance(other, MaskExpression):
            raise TypeError(not_joined("&", other))
        both = And(self.parts() + other.parts())
        _check_and(both)
        return both

    def __or__(self, other: MaskExpression) -> MaskExpression:
        if not isinstance(other, MaskExpression):
            raise TypeError(not_joined("|", other))
        return _union((self, other))

    def __rand__(self, other: Any) -> MaskExpression:
        raise TypeError(not_joined("&", other))

    def __ror__(self, other: Any) -> MaskExpression:
        raise TypeError(not_joined("|", other))

    def __invert__(self) -> MaskExpression:
        raise TypeError(
            f"`~` of {self!r}: the keys that a mask leaves out are not one range for every query. "
            "Describe what is attended: packax.masks.ranges(lo, hi), or "
            "packax.masks.block_sparse(~block_mask, block_size)"
        )

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, MaskExpression):
            return self is other
        mine = static_value(self)
        return mine is not None and mine == static_value(other)

    def __hash__(self) -> int:
        value = static_value(self)
        if value is None:
            raise TypeError(
                f"{self!r} has no hash, because it holds arrays: it cannot be a static argument of "
                "jit, or a key of a dict. Pass it as an ordinary argument (it is a pytree), or "
                "make it inside the function from arrays that are arguments"
            )
        return hash(value)

    def __bool__(self) -> bool:
        raise ValueError(
            "a mask expression is neither true nor false: join expressions with `&` and `|`, not "
            "with `and` and `or`"
        )


class Interval(MaskExpression):
    """Row i attends to one interval of positions, which depends only on i.

    The first axis of the arrays is the batch, or 1.
    """

    def limits(self, at: Positions) -> Limits:
        """The lowest and the highest position that each row attends to, (B or 1, Sq) int32; None:
        unbounded.

        Limits saturate at the range of int32, which is exact because all positions are int32.
        """
        raise NotImplementedError

    def anchors(self) -> frozenset[Any] | None:
        """The offsets n for which every row at position p certainly attends to position p + n;
        None: all offsets.

        With this and `unbounded`, `|` makes sure that a union is one interval.
        """
        return frozenset()

    def unbounded(self) -> tuple[bool, bool]:
        """Whether every row's interval is certainly unbounded below, and above."""
        return False, False


@pytree("q_ids", "kv_ids", "q_pos", "kv_pos")
class Documents(MaskExpression):
    """See `documents`. kv_ids and kv_pos are None if they equal those of the queries."""

    once = (
        "combine the ids into one array, such as first_ids * (second_ids.max() + 1) + second_ids "
        f"with {PADDING_SEGMENT_ID} where either is padding"
    )

    q_ids: Array
    kv_ids: Array | None
    q_pos: Array | None
    kv_pos: Array | None

    @property
    def of_rows(self) -> bool:  # type: ignore[override]
        return self.q_pos is None

    def arguments(self) -> list[str]:
        named = {name: shown(x) for name, x, _ in self.arrays()}
        return [named.pop("segment_ids"), *(f"{name}={x}" for name, x in named.items())]

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

    def without_positions(self) -> Documents:
        return dataclasses.replace(self, q_pos=None, kv_pos=None)

    def places(self, q_len: int, kv_len: int) -> Positions | None:
        if self.q_pos is None:
            return None
        kv_pos = self.q_pos if self.kv_pos is None else self.kv_pos
        return Positions(self.q_pos, kv_pos, (), True)

    def _as_array(self, at: Positions) -> Array:
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        same = self.q_ids[..., :, None] == kv_ids[..., None, :]
        return same & (self.q_ids != PADDING_SEGMENT_ID)[..., :, None]


class _Joined(Interval):
    """Several expressions, joined by `&` or `|`."""

    members: tuple[Any, ...]

    def walk(self) -> Iterator[MaskExpression]:
        yield self
        for member in self.members:
            yield from member.walk()

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [held for member in self.members for held in member.arrays()]


@pytree("members")
class And(_Joined):
    """A pair is attended if every member allows it. It is an interval if all members are."""

    members: tuple[Any, ...]

    def __repr__(self) -> str:
        return " & ".join(f"({x!r})" if isinstance(x, Or) else repr(x) for x in self.members)

    def parts(self) -> tuple[MaskExpression, ...]:
        return self.members

    def _as_array(self, at: Positions) -> Array:
        result: Array = np.ones((at.q.shape[-1], at.kv.shape[-1]), bool)
        arrays = [member._as_array(at) for member in self.members]
        heads = any(x.ndim == 4 for x in arrays)
        for x in arrays:
            result = result & (x[:, None] if heads and x.ndim == 3 else x)
        return result

    def limits(self, at: Positions) -> Limits:
        return _combine(self.members, at, "maximum", "minimum", unbounded_wins=False)

    def anchors(self) -> frozenset[Any] | None:
        return _common(self.members)

    def unbounded(self) -> tuple[bool, bool]:
        below, above = zip(*(member.unbounded() for member in self.members), strict=True)
        return all(below), all(above)

    def reach(self, chunk: int) -> Reach:
        if not all(member.of_rows for member in self.members):
            return None, None
        sides = zip(*(member.reach(chunk) for member in self.members), strict=True)
        before, after = (min((x for x in side if x is not None), default=None) for side in sides)
        return before, after

    def row_keys(self) -> int | None:
        return min((x for m in self.members if (x := m.row_keys()) is not None), default=None)

    def without_positions(self) -> And:
        return And(tuple(member.without_positions() for member in self.members))


@pytree(static=("number",))
class Shared:
    """A placeholder for one of the offsets that an `Or` stores."""

    number: int


@pytree("sides", "offsets")
class Or(_Joined):
    """A pair is attended if any member allows it. All members and their union are intervals.

    The union may be an interval only because offsets of members are equal. Each offset is therefore
    stored once, so that the members still share it after a transformation replaces the array.
    """

    sides: tuple[Any, ...]  # the members, with each offset replaced by a Shared
    offsets: tuple[Any, ...]  # (): there are none, or an outer union stores them

    @property
    def members(self) -> tuple[Any, ...]:  # type: ignore[override]
        if not self.offsets:
            return self.sides

        def offset(x: Any) -> Any:
            return self.offsets[x.number] if isinstance(x, Shared) else x

        return tuple(_with_offsets(side, offset) for side in self.sides)

    def __repr__(self) -> str:
        return " | ".join(repr(x) for x in self.members)

    def _as_array(self, at: Positions) -> Array:
        first, second = (member._as_array(at) for member in self.members)
        return first | second

    def limits(self, at: Positions) -> Limits:
        return _combine(self.members, at, "minimum", "maximum", unbounded_wins=True)

    def anchors(self) -> frozenset[Any] | None:
        sets = [member.anchors() for member in self.members]
        return None if None in sets else frozenset[Any]().union(*sets)

    def unbounded(self) -> tuple[bool, bool]:
        below, above = zip(*(member.unbounded() for member in self.members), strict=True)
        return any(below), any(above)

    def reach(self, chunk: int) -> Reach:
        sides = zip(*(member.reach(chunk) for member in self.members), strict=True)
        before, after = (None if None in side else max(side) for side in sides)
        return before, after

    def row_keys(self) -> int | None:
        counts = [member.row_keys() for member in self.members]
        return None if None in counts else sum(counts)


def _combine(members: Any, at: Positions, lower: str, upper: str, unbounded_wins: bool) -> Limits:
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
    for part in both.walk():
        part.check_others(both)


def _union(members: tuple[MaskExpression, ...]) -> Or:
    """The `|` of two members. Raises unless it is one range per row for any array values."""
    both = Or(members, ())
    for part in both.walk():
        if not isinstance(part, Interval):
            raise NotImplementedError(
                f"`|` cannot take {part.name}(...), whose keys may be many ranges: join only the "
                f"others by `|` and intersect the result with it: (a | b) & {part.name}(...)"
            )
    sides = [member.unbounded() for member in both.members]
    same_side = any(all(side) for side in zip(*sides, strict=True))
    if not same_side and (True, True) not in sides and _common(both.members) == frozenset():
        raise NotImplementedError(
            "`|` needs a union that is certainly one range for every query, and this one may be "
            "two. It is one range if all members attend to the query's own position, as causal, "
            "sliding_window, chunked, prefix and spans with equal offsets do (for offsets that are "
            "jax arrays: the same int32 array, not just equal ones), or if none has a lower limit, "
            "as causal, prefix and sliding_window(None), or none has an upper limit. Otherwise use "
            "packax.masks.ranges(lo, hi), or join the attention of disjoint masks by "
            "packax.merge_attention (return_lse=True)"
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
    """The expression with each offset x replaced by function(x)."""
    if isinstance(expression, And):
        return And(tuple(_with_offsets(x, function) for x in expression.members))
    if isinstance(expression, Or):
        return Or(tuple(_with_offsets(x, function) for x in expression.members), ())
    if getattr(expression, "offset", None) is None:
        return expression
    return dataclasses.replace(expression, offset=function(expression.offset))


def documents_of(expression: MaskExpression) -> Documents | None:
    """The documents(...) of the expression, if any."""
    for part in expression.parts():
        if isinstance(part, Documents):
            return part
    return None


def intervals_of(expression: MaskExpression) -> And:
    """The intersection of all intervals of the expression."""
    return And(tuple(part for part in expression.parts() if isinstance(part, Interval)))


def places_of(expression: MaskExpression, q_len: int, kv_len: int) -> Positions:
    """What the intervals of the expression compare: positions of a part, or indices."""
    q, kv = (np.arange(length, dtype=np.int32) for length in (q_len, kv_len))
    said = (part.places(q_len, kv_len) for part in expression.parts())
    places = next((x for x in said if x is not None), Positions(q, kv, (), False))
    document = documents_of(expression)
    return places if document is None else places._replace(ids=(*places.ids, document.q_ids))


# --- Checks that the arrays of an expression agree on sizes.


def check_lengths(
    expression: MaskExpression,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    said: tuple[str, str] = ("q_len says", "kv_len says"),
) -> tuple[int | None, int | None]:
    """Infers q_len and kv_len from the arguments and all arrays; None if nothing determines them.

    `said`: the origin of q_len and kv_len, for error messages.

    Raises:
        ValueError: if they do not agree.
    """
    q_len, kv_len = _length("q_len", q_len), _length("kv_len", kv_len)
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
            what = "queries" if side == "q" else "keys"
            more = ""
            if side == "kv" and name == "segment_ids":
                more = ": pass the ids of the keys as kv_segment_ids"
            raise ValueError(f"{name} is for {length} {what}, but {first} {expected}{more}")
    nothing = ("", None)
    lengths = known.get("q", nothing)[1], known.get("kv", nothing)[1]
    for part in expression.walk():
        part.check_sizes(*lengths)
    return lengths


def batch_of(expression: MaskExpression, batch: int = 1, said: str = "") -> int:
    """The batch size of the arrays, or 1 if none has a batch axis.

    `batch`, `said`: a batch size that is already known, and its origin, for error messages.

    Raises:
        ValueError: if two arrays have different batch sizes, neither of them 1.
    """
    first, note = said, ""
    for name, x, side in expression.arrays():
        size = x.shape[0] if x.ndim == 2 or side == "batch" else 1
        more = ""
        if side == "batch" and x.ndim == 1:
            more = f". {name} of shape {x.shape} has one value per row"
            if name == "lengths":
                more += f": for one value per token pass shape (1, {size})"
        if size not in (1, batch) and (batch != 1 or said):
            raise ValueError(f"{name} has batch size {size}, but {first} has {batch}{more or note}")
        if size != 1:
            batch, first, note = size, name, more
    return batch


def _length(name: str, length: Any) -> Any:
    if length is None or is_symbolic_dim(length):
        return length
    try:
        length = operator.index(length)
    except TypeError:
        raise ValueError(f"{name} must be an integer, but is {length!r}") from None
    if not 0 <= length < 2**31:
        raise ValueError(f"{name} must be from 0 to 2**31 - 1, but is {length}")
    return length


# --- Errors for arguments that are not a mask or an expression.


def not_joined(operator: str, other: Any) -> str:
    """The error message for joining an expression with something else."""
    text = f"`{operator}` joins mask expressions, but one side is {described(other)}"
    if hasattr(other, "q_blocks"):
        return f"{text}: join the expressions, then build one mask from the result"
    return f"{text}{instead_of_array(other)}"


def instead_of_array(x: Any) -> str:
    """A hint for an array passed as an expression: segment ids or a dense mask."""
    if not hasattr(x, "ndim") or x.ndim < 1:
        return ""
    return (
        f"{instead_of_ids(x)}. Dense masks are not accepted: if each query's keys are one range, "
        "use packax.masks.ranges(lo, hi), otherwise packax.masks.block_sparse(block_mask, "
        "block_size), or for a boolean array of queries and keys "
        "packax.masks.block_sparse(array, 1)"
    )


def instead_of_ids(x: Any) -> str:
    """A hint for an array that may be segment ids, (length,) or (batch, length)."""
    if x.ndim not in (1, 2) or not np.issubdtype(x.dtype, np.integer):
        return ""
    return (
        ". If these are segment ids, use packax.documents(array), or for causal attention "
        "packax.causal() & packax.documents(array)"
    )
