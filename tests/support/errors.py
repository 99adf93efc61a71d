"""Reads the tables of tests/errors, which hold calls and what their errors say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from paths import ROOT

FOLDER = ROOT / "tests" / "errors"


def rows(name: str) -> Iterator[tuple[str, str, list[str]]]:
    """(call, type of the error, what its message has, in order) for each row of a table."""
    text = (FOLDER / f"{name}.txt").read_text().replace("\n    ", " ")
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            function = line[1:-1]
        elif line and not line.startswith("#"):
            call, message = line.split(" => ")
            error = re.match(r"(\w+Error):\s*", message)
            said = message[error.end() :] if error else message
            yield function + call, error[1] if error else "ValueError", said.split(" ... ")


def check(call: str, error: str, said: list[str], names: dict[str, Any]) -> None:
    with pytest.raises(Exception) as caught:
        eval(call, names)
    assert type(caught.value).__name__ == error, caught.value
    pattern = ".*".join(map(re.escape, said)).replace(r"\$", "$")
    assert re.search(pattern, str(caught.value), re.DOTALL), caught.value
