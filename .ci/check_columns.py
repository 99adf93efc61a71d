"""Checks that no line is over 100 columns, in any file that is written by hand.

    python .ci/check_columns.py          from anywhere in the repository; lists the lines, exits 1

Generated files and lines that are a single word (links) are not checked.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

COLUMNS = 100
WRITTEN_BY_PROGRAMS = (".json", ".svg", ".png", ".lock")
FOLDERS_WRITTEN_BY_PROGRAMS = ("benchmarks/results/", "third_party/licenses/")
WRITTEN_BY_HAND = ("benchmarks/results/README.md",)


def checked(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        in_folder = name.startswith(FOLDERS_WRITTEN_BY_PROGRAMS) and name not in WRITTEN_BY_HAND
        if not in_folder and not name.endswith(WRITTEN_BY_PROGRAMS):
            yield name


def long_lines(text: str) -> list[tuple[int, int]]:
    """(line, columns) of lines that are too long and could be broken."""
    lines = enumerate(text.splitlines(), 1)
    return [(n, len(x)) for n, x in lines if len(x) > COLUMNS and " " in x.strip()]


def tracked_texts(chosen: Callable[[Iterable[str]], Iterator[str]]) -> Iterator[tuple[str, str]]:
    """(name, text) of the files that git tracks and `chosen` keeps."""
    git = ["git", "rev-parse", "--show-toplevel"]
    root = Path(subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip())
    git = ["git", "ls-files", "-z"]
    listed = subprocess.run(git, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in chosen(filter(None, listed.split("\0"))):
        path = root / name
        if not path.is_file():  # deleted, and not yet committed
            continue
        try:
            yield name, path.read_text()
        except UnicodeDecodeError:
            continue


def main() -> int:
    found = 0
    for name, text in tracked_texts(checked):
        for line, columns in long_lines(text):
            print(f"{name}:{line}: {columns} columns, {COLUMNS} are accepted")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
