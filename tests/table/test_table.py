"""Every property (properties.py) of every feature (tests/support/calls.py) of attention.

Each time, every feature runs once with every property, in calls that a seed chooses
(PACKAX_TABLE_SEED). With `-m exhaustive`, every pair of features does, too. A failure prints the
command that runs its cell alone.
"""

import os

import cover
import pytest
from decode_calls import parse
from properties import PROPERTIES

SEED = int(os.environ.get("PACKAX_TABLE_SEED", "0"))


def pytest_generate_tests(metafunc):
    if "cell" not in metafunc.fixturenames:
        return
    exhaustive = "exhaustive" in metafunc.config.option.markexpr
    if cell := os.environ.get("PACKAX_CELL"):
        metafunc.parametrize("cell", [cell])
    elif metafunc.function.__name__ == "test_each_feature":
        metafunc.parametrize("cell", [f"{name}: {call}" for name, call in cover.cells(SEED)])
    else:
        pairs = cover.cells(SEED, cover.pairs) if exhaustive else ()
        metafunc.parametrize("cell", [f"{name}: {call}" for name, call in pairs])


def test_each_feature(cell):
    check(cell)


@pytest.mark.exhaustive
def test_each_pair_of_features(cell):
    check(cell)


def check(cell):
    name, call = cell.split(": ")
    again = f"PACKAX_CELL={cell!r} python -m pytest tests/table -k test_each_feature"
    row = PROPERTIES[name]
    try:
        wrong = row.check(parse(call).with_multiple(row.multiple))
    except Exception as error:
        error.add_note(again)
        raise
    assert not wrong, f"{'; '.join(wrong)}\n{again}"


def test_every_cell_runs_or_has_a_reason():
    """A feature without a call in a row, or a row without a reason, would be forgotten."""
    reasons = {
        (name, kind, *part): cover.impossible(row, kind, part)
        for name, row in PROPERTIES.items()
        for kind in cover.KINDS
        for part in cover.every(kind)
    }
    cells = cover.cells(SEED)
    run = {(name, type(call), *part) for name, call in cells for part in call.features()}
    left_out = {cell: why for cell, why in reasons.items() if why}
    assert run | {*left_out} == {*reasons}
    assert all(len(why) > 9 for why in left_out.values())
    # A row or feature that comes with a new reason changes this number: look at it.
    assert len(left_out) == LEFT_OUT, left_out


LEFT_OUT = 512
