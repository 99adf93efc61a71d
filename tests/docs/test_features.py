"""The features and the calls that the guide lists: every test that it names is there, and each has
one."""

import ast
import functools
import re

from paths import DOCS, TESTS

FEATURES, CALLS = ((DOCS / "guide" / name).read_text() for name in ("features.md", "calls.md"))
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


def tables(text):
    """(what stands above it, header, rows) of each table; a row without a first cell goes on with
    the last."""
    for above, lines in re.findall(r"((?:^(?!\|).*\n)*)((?:^\|.*\n)+)", text, re.MULTILINE):
        header, _, *rows = lines.splitlines()
        joined = []
        for row in rows:
            if row.startswith("| |"):
                joined[-1] += row
            else:
                joined.append(row)
        yield above, header, joined


def references(text):
    """(row, file, test, id): a name without a file is of the file before it in its row, or the
    section's."""
    for above, _, rows in tables(text):
        stated = re.findall(r"in\s`(?:tests/\w+/)?(test_\w+\.py)`", above)
        for row in rows:
            file, test = (stated or [None])[-1], None
            for found in REFERENCE.finditer(row):
                if found["test"] or (found["id"] and test):
                    file, test = found["file"] or file, found["test"] or test
                    yield row, file, test, found["id"]


def test_the_tests_that_they_name_are_there():
    found = [x for text in (FEATURES, CALLS) for x in references(text)]
    assert len(found) > 100
    for row, file, test, name in found:
        assert file, f"{test}: no file is named in its row or above its table: {row}"
        assert test in sources_of(file), f"{file} has no {test}: {row}"
        if name:  # an id of a parametrised test
            assert f'"{name[1:-1]}"' in sources_of(file)[test], f"{file} has no {test}{name}: {row}"
    rows = [x for x in (FEATURES + CALLS).splitlines() if x.startswith("|")]
    assert not [row for row in rows if "test_" in REFERENCE.sub("", row)], "not read as a test"


def test_every_call_has_a_test():
    rows = [row for _, head, rows in tables(CALLS) if "theirs" in head for row in rows]
    assert len(rows) > 30
    assert not [row for row in rows if "test_" not in row]


def test_every_feature_has_a_test_or_is_not_there():
    compared = next(rows for _, head, rows in tables(FEATURES) if head.startswith("| | packax |"))
    shown = next(rows for _, head, rows in tables(FEATURES) if "shown by" in head)
    assert len(compared) > 30
    there = [row.split(" | ")[0] for row in compared if "| **no** |" not in row]
    assert [row.split(" | ")[0] for row in shown] == there
    assert not [row for row in shown if "test_" not in row]
