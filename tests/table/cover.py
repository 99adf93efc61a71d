"""Chooses the calls of the table.

Each time (`each_time`), the properties of a group (the meshes, say) share calls: as few random
calls as contain every feature, the properties taking turns. The properties of values are checked on
the same programs, and each of them on all calls. The exhaustive tier (`every_pair`) has for each
property calls that contain every pair of features.
"""

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
Rows = tuple[Property, ...]


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


def calls_of(rows: Rows, kind: Any, seed: int, parts: Any = singles) -> Iterator[Any]:
    """(property, call): calls that together have every part that is possible for one of the
    properties, and one call at least for each of them."""
    rng = random.Random(zlib.crc32(f"{rows[0].calls} {kind.__name__} {seed}".encode()))
    possible = {
        row: {part for part in every(row, kind, parts) if not impossible(row, kind, part)}
        for row in rng.sample(rows, len(rows))
        if not impossible(row, kind, ())
    }
    missing = set().union(*possible.values())
    turns = itertools.cycle(possible)
    unused = {*possible}
    while missing or unused:
        row = next(turns)
        wanted = sorted(missing & possible[row] or ({()} if row in unused else ()))
        if not wanted:
            continue
        for _ in range(9):
            part = dict(_flat(rng.choice(wanted)))
            drawn = [_draw(rng, row, kind, part) for _ in range(DRAWS)]
            if drawn := [call for call in drawn if not reason(row, call)]:
                best = max(drawn, key=lambda call: (len(parts(call) & missing), -others(call)))
                missing -= parts(best)
                unused.discard(row)
                yield row, best
                break


@functools.cache
def impossible(row: Property, kind: Any, part: Any) -> str | None:
    """Why no call with these features has the property: a reason in each of many draws."""
    if part and (why := impossible(row, kind, ())):
        return why
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


def groups() -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in PROPERTIES.values():
        found[row.group] = (*found.get(row.group, ()), row)
    return found


def each_time(seed: int) -> Iterator[tuple[str, Any]]:
    for name, rows in groups().items():
        for kind in KINDS:
            if name == "values":
                for row in rows:
                    yield from ((row.name, call) for _, call in calls_of((row,), kind, seed))
            else:
                yield from ((row.name, call) for row, call in calls_of(rows, kind, seed))


def every_pair(seed: int) -> Iterator[tuple[str, Any]]:
    for row in PROPERTIES.values():
        for kind in KINDS:
            yield from ((row.name, call) for _, call in calls_of((row,), kind, seed, pairs))


def _draw(rng: random.Random, row: Property, kind: Any, wanted: dict[str, str]) -> Any:
    """A call with these features. Half of the others are the first of each, which rule out less."""
    drawn = {
        n: rng.choice(values) if rng.random() < 0.7 else values[0]
        for n, values in columns(row, kind).items()
    }
    return kind(**drawn | wanted)


def _flat(part: Any) -> Any:
    return [part] if part and isinstance(part[0], str) else part
