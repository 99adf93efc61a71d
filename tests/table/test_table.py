"""Every property (properties/) of every feature (tests/support/calls.py) of attention.

Each time, every feature runs with every property of values, and with one of the properties of each
group of others (cover.py), in calls that a seed chooses (PACKAX_TABLE_SEED). With `-m exhaustive`,
every pair of features runs with every property. The summary prints the command that runs the cell
of a failure alone.
"""

import os
import runpy

import cover
import pytest
from decode_calls import parse
from paths import TESTS
from properties import PROPERTIES

SEED = int(os.environ.get("PACKAX_TABLE_SEED", "0"))


def pytest_generate_tests(metafunc):
    if "cell" not in metafunc.fixturenames:
        return
    pairs = metafunc.function.__name__ == "test_each_pair_of_features"
    if cell := os.environ.get("PACKAX_CELL"):
        cells = [] if pairs else [cell]
    elif pairs and "exhaustive" not in metafunc.config.option.markexpr:
        cells = []
    else:
        chosen = (cover.every_pair if pairs else cover.each_time)(SEED)
        cells = [f"{name}: {call}" for name, call in chosen]
    metafunc.parametrize("cell", cells, ids=cells)  # pytest shortens long values, but no ids


def test_each_feature(cell):
    check(cell)


@pytest.mark.exhaustive
def test_each_pair_of_features(cell):
    check(cell)


def check(cell):
    name, call = cell.split(": ")
    row = PROPERTIES[name]
    wrong = row.check(parse(call).with_multiple(row.multiple))
    assert not wrong, "; ".join(wrong)


def test_every_cell_is_possible_or_has_a_reason():
    """A feature without a call in a row, or a row without a reason, would be forgotten."""
    reasons = {
        (name, kind, *part): cover.impossible(row, kind, part)
        for name, row in PROPERTIES.items()
        for kind in cover.KINDS
        for part in cover.every(row, kind)
    }
    left_out = {cell: why for cell, why in reasons.items() if why}
    assert all(len(why) > 9 for why in left_out.values())
    # A row or feature that comes with a new reason changes this number: look at it.
    assert len(left_out) == LEFT_OUT, left_out
    group = {row.name: name for name, rows in cover.groups().items() for row in rows}
    run = {
        (group[name], type(call), *part)
        for name, call in cover.each_time(SEED)
        for part in call.features()
    }
    possible = {(group[name], *cell) for name, *cell in {*reasons} - {*left_out}}
    assert possible <= run


LEFT_OUT = 1166


def test_every_mutant_fits_the_sources():
    """Otherwise a renamed line would leave its proof out without a word."""
    run = runpy.run_path(str(TESTS / "mutants" / "run.py"))
    assert not [mutant.name for mutant in run["mutants"]() if not run["fits"](mutant)]
