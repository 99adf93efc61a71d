"""Which of many like tests run every time, and which under `-m exhaustive` alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def once_each(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes, for `parametrize`. Every time: every value of every axis, in as few
    of the products as have them. The others are marked `exhaustive`."""
    lists = [list(axis) for axis in axes]
    steps = range(max(map(len, lists)))
    every_time = {tuple(step % len(values) for values in lists) for step in steps}
    places = itertools.product(*(range(len(values)) for values in lists))
    return [
        marked([values[i] for values, i in zip(lists, place, strict=True)], place in every_time)
        for place in places
    ]


def some(values: Iterable[Any], *every_time: int) -> list[Any]:
    """The values, for `parametrize`: those at these places every time, the others exhaustively."""
    return [
        marked(value if type(value) is tuple else [value], i in every_time)
        for i, value in enumerate(values)
    ]


def marked(values: Iterable[Any], every_time: bool) -> Any:
    return pytest.param(*values, marks=() if every_time else pytest.mark.exhaustive)
