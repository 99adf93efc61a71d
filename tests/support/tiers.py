"""Decides which of many similar tests run every time, and which only under `-m exhaustive`; and
the order of those on a GPU."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def once_each(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes, for `parametrize`. The fewest combinations that contain every value
    of every axis run every time; the others are marked `exhaustive`."""
    lists = [list(axis) for axis in axes]
    steps = range(max(map(len, lists)))
    every_time = {tuple(step % len(values) for values in lists) for step in steps}
    places = itertools.product(*(range(len(values)) for values in lists))
    return [
        marked([values[i] for values, i in zip(lists, place, strict=True)], place in every_time)
        for place in places
    ]


def some(values: Iterable[Any], *every_time: int) -> list[Any]:
    """The values, for `parametrize`. Those at the indices `every_time` run every time, the others
    are marked `exhaustive`."""
    return [
        marked(value if type(value) is tuple else [value], i in every_time)
        for i, value in enumerate(values)
    ]


def repeats(items: Iterable[Any]) -> list[Any]:
    """The pytest items whose parameter values all occur in earlier items of the same function.
    Without them, every value of every parameter is still tested."""
    seen: set[tuple[Any, str, int]] = set()
    found = []
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and not item.get_closest_marker("exhaustive"):
            values = {(item.function, name, id(x)) for name, x in parameters.params.items()}
            if values <= seen:
                found.append(item)
            seen |= values
    return found


def spread(items: Iterable[Any]) -> list[Any]:
    """The pytest items with those of each function evenly spread, in their order: a run that is cut
    short has run the first cases of every test."""
    items = list(items)
    counts = collections.Counter(item.function for item in items)
    seen: collections.Counter[Any] = collections.Counter()

    def place(item: Any) -> float:
        seen[item.function] += 1
        return (seen[item.function] - 0.5) / counts[item.function]

    return sorted(items, key=place)


def marked(values: Iterable[Any], every_time: bool) -> Any:
    return pytest.param(*values, marks=() if every_time else pytest.mark.exhaustive)
