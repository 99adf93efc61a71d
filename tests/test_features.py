"""docs/features.md names a test for every row, and each of them is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "features.md").read_text()


def test_every_row_names_tests_that_are_there():
    defined = {name for path in TESTS.glob("test_*.py") for name in _tests(path.read_text())}
    defined |= {path.stem for path in TESTS.glob("test_*.py")}
    rows = re.findall(r"^\| (?!theirs|---).*\|$", TEXT, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"\btest_\w+", row)
        assert named, f"no test: {row}"
        assert set(named) <= defined, f"not there: {set(named) - defined}"


def _tests(text: str) -> list[str]:
    return re.findall(r"^def (test_\w+)", text, re.MULTILINE)
