"""Which GPU tests run without `-m exhaustive`, and in which order. Needs no GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from tiers import repeats, spread


def item(function, *marks, **parameters):
    return SimpleNamespace(
        function=function,
        callspec=SimpleNamespace(params=parameters),
        get_closest_marker=lambda name: name in marks,
    )


def test_every_value_of_every_parameter_is_left():
    lengths, dtypes, rows = (1, 1000, 70000), ("bfloat16", "float16"), ((1, 2), (3, 4))
    product = list(itertools.product(lengths, dtypes, rows))
    items = [item("f", length=n, dtype=d, rows=r) for n, d, r in product]
    found = repeats(items)
    left = [values for values, x in zip(product, items, strict=True) if x not in found]
    assert [set(values) for values in zip(*left, strict=True)] == [
        set(lengths), set(dtypes), set(rows)
    ]  # fmt: skip
    assert len(left) == 5 and len(found) == 7


def test_items_are_compared_with_those_of_their_function():
    first, other, again = item("f", n=0), item("g", n=0), item("f", n=0)
    plain = SimpleNamespace(function="h", get_closest_marker=lambda name: None)
    assert repeats([first, other, plain, plain, again]) == [again]


def test_exhaustive_items_stand_for_no_others():
    marked, first = item("f", "exhaustive", n=0), item("f", n=0)
    assert repeats([marked, first]) == []


def test_the_first_cases_of_every_test_come_early():
    long, short = [item("f", n=n) for n in range(6)], [item("g", n=n) for n in range(2)]
    one = SimpleNamespace(function="h", get_closest_marker=lambda name: None)
    found = spread([*long, *short, one])
    assert [x.function for x in found] == list("ffgfhffgf")
    assert [x for x in found if x.function == "f"] == long
