"""docs/features.md: every test that it names is there, and every call that it lists has one."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "features.md").read_text()


def test_the_tests_that_it_names_are_there():
    files = list(TESTS.glob("test_*.py"))
    defined = {path.stem for path in files}
    for path in files:
        defined |= set(re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE))
    named = set(re.findall(r"\btest_\w+", TEXT))
    assert len(named) > 30
    assert named <= defined, f"not there: {sorted(named - defined)}"


def test_every_call_has_a_test():
    tables = re.findall(r"^\| theirs .*\n\|[-| ]+\n((?:\|.*\n?)+)", TEXT, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    assert not [row for row in rows if "test_" not in row]
