"""Chooses the calls of the table: for each property the fewest random calls that contain every
feature (`singles`), or every pair of features (`pairs`)."""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Iterator
from typing import Any

from calls import Call
from decode_calls import DecodeCall, RaggedCall
from properties import PROPERTIES, Property

KINDS = (Call, DecodeCall, RaggedCall)
DRAWS = 50  # per chosen call: of so many, the one with most of what is missing


def singles(call: Any) -> set[Any]:
    return set(call.features())


def pairs(call: Any) -> set[Any]:
    return set(itertools.combinations(call.features(), 2))


def others(call: Any) -> int:
    """How many features are not the first: these make a call expensive to compile."""
    return sum(value != call.features_of[name][0] for name, value in call.features())


def reason(row: Property, call: Any) -> str | None:
    """Why a cell is not applicable."""
    return call.invalid() or row.reason(call) or None


def columns(row: Property, kind: Any) -> dict[str, tuple[str, ...]]:
    return {n: of for n, of in kind.features_of.items() if row.ranks or n != "ranks"}


def calls_of(row: Property, kind: Any, seed: int, parts: Any = singles) -> Iterator[Any]:
    """Calls that together have every part that is possible."""
    rng = random.Random(zlib.crc32(f"{row.calls} {seed}".encode()))
    if impossible(row, kind, ()):
        return
    missing = {part for part in every(row, kind, parts) if not impossible(row, kind, part)}
    while missing:
        wanted = dict(_flat(rng.choice(sorted(missing))))
        drawn = [_draw(rng, row, kind, wanted) for _ in range(DRAWS)]
        drawn = [call for call in drawn if not reason(row, call)]
        if drawn:
            best = max(drawn, key=lambda call: (len(parts(call) & missing), -others(call)))
            missing -= parts(best)
            yield best


@functools.cache
def impossible(row: Property, kind: Any, part: Any) -> str | None:
    """Why no call with these features has the property: a reason in each of many draws."""
    rng = random.Random(0)
    found = ""
    for _ in range(600):
        why = reason(row, _draw(rng, row, kind, dict(_flat(part))))
        if not why:
            return None
        found = why
    return found


def every(row: Property, kind: Any, parts: Any = singles) -> set[Any]:
    one = [(name, value) for name, values in columns(row, kind).items() for value in values]
    if parts is singles:
        return set(one)
    return {(x, y) for x, y in itertools.combinations(one, 2) if x[0] != y[0]}


def cells(seed: int, parts: Any = singles) -> Iterator[tuple[str, Any]]:
    for name, row in PROPERTIES.items():
        for kind in KINDS:
            for call in calls_of(row, kind, seed, parts):
                yield name, call


def _draw(rng: random.Random, row: Property, kind: Any, wanted: dict[str, str]) -> Any:
    """A call with these features. Half of the others are the first of each, which rule out less."""
    drawn = {
        n: rng.choice(values) if rng.random() < 0.7 else values[0]
        for n, values in columns(row, kind).items()
    }
    return kind(**drawn | wanted)


def _flat(part: Any) -> Any:
    return [part] if part and isinstance(part[0], str) else part
