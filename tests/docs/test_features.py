"""Every feature and call that a page lists has tests: shown_by.md names them."""

import ast
import functools
import re

from paths import DOCS, TESTS

PAGES = [path.read_text() for path in sorted((DOCS / "guide").glob("*.md"))]
REFERENCE = re.compile(r"(?:(?P<file>test_\w+\.py)::)?(?P<test>test_\w+)(?:\[(?P<case>[^]]+)\])?")


def sections(text):
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = section.partition("\n")
        yield name, rest


SHOWN_BY = {
    name: dict(re.findall(r"^- (.+)\n((?:  .+\n)+)", text, re.MULTILINE))
    for name, text in sections((TESTS / "docs" / "shown_by.md").read_text())
}


def tables():
    """The title of each page with a table, its header row and its other rows, as lists of cells."""
    for page in PAGES:
        name = page.partition("\n")[0].removeprefix("# ")
        for lines in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            head, _, *rows = ([x.strip() for x in re.split(r" \| ", line.strip("| \n"))]
                              for line in lines.splitlines())  # fmt: skip
            yield name, head, rows


@functools.cache
def functions_of(file):
    """Maps each function in a test file to the text of the file."""
    (path,) = TESTS.rglob(file)
    functions = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)]
    return {x.name: path.read_text() for x in functions}


def test_the_tests_are_there():
    found = 0
    for entry, text in (entry for entries in SHOWN_BY.values() for entry in entries.items()):
        file = None
        for test in REFERENCE.finditer(text):
            file, found = test["file"] or file, found + 1
            assert test["test"] in functions_of(file), f"{entry}: {file} has no {test['test']}"
            if test["case"]:
                assert f'"{test["case"]}"' in functions_of(file)[test["test"]], (
                    f"{entry}: {test[0]}"
                )
        assert file, f"{entry} has no test"
        assert not REFERENCE.sub("", text).strip(", \n"), f"{entry}: not read as tests"
    assert found > 100


def test_every_call_has_tests():
    calls = {
        name: [row[0] for row in rows] for name, head, rows in tables() if head[1:] == ["packax"]
    }
    assert calls == {name: [*x] for name, x in SHOWN_BY.items() if name != "Features"}


def test_every_feature_has_tests_or_is_not_there():
    (rows,) = [rows for _, head, rows in tables() if "Flex" in head]
    assert [row[0] for row in rows if row[1] != "**no**"] == [*SHOWN_BY["Features"]]
