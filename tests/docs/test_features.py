"""docs/features.md: every test that it names is there, and every call that it lists has one."""

import ast
import functools
import re

from paths import DOCS, TESTS

TEXT = (DOCS / "guide" / "features.md").read_text()
REFERENCE = re.compile(
    r"`(?:tests/\w+/)?(?:(?P<file>test_\w+\.py)::)?(?P<test>test_\w+)?(?P<id>\[[^`]+\])?`"
)


@functools.cache
def sources_of(file):
    """The functions of a test file, each with its source and its decorators'."""
    (path,) = list(TESTS.rglob(file)) or (None,)
    if path is None:
        return {}
    text = path.read_text()
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
    return {x.name: text for x in functions if x.name.startswith("test_")}


def references():
    """(row, file, test, id): a name without a file is of the file before it in its row, or the section's."""
    for section in TEXT.split("\n## ")[1:]:
        stated = re.findall(r"in\s`(?:tests/\w+/)?(test_\w+\.py)`", section.split("\n|")[0])
        for row in section.splitlines():
            if not row.startswith("|"):
                continue
            file, test = (stated or [None])[0], None
            for found in REFERENCE.finditer(row):
                if found["test"] or (found["id"] and test):
                    file, test = found["file"] or file, found["test"] or test
                    yield row, file, test, found["id"]


def test_the_tests_that_it_names_are_there():
    found = list(references())
    assert len(found) > 100
    for row, file, test, name in found:
        assert file, f"{test}: no file is named in its row or above its table: {row}"
        assert test in sources_of(file), f"{file} has no {test}: {row}"
        if name:  # an id of a parametrised test
            assert f'"{name[1:-1]}"' in sources_of(file)[test], f"{file} has no {test}{name}: {row}"
    rows = [row for row in TEXT.splitlines() if row.startswith("|")]
    assert not [row for row in rows if "test_" in REFERENCE.sub("", row)], "not read as a test"


def test_every_call_has_a_test():
    tables = re.findall(r"^\| theirs .*\n\|[-| ]+\n((?:\|.*\n?)+)", TEXT, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    assert not [row for row in rows if "test_" not in row]


def test_every_feature_has_a_test_or_is_not_there():
    table = TEXT[TEXT.index("| | packax |") : TEXT.index("## jax.nn")]
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    assert len(rows) > 30
    assert not [row for row in rows if "test_" not in row and "| **no**" not in row]
