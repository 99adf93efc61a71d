"""Applies each mutant (mutants.txt) to a copy of packax, and reports whether the tests find it:

    python tests/mutants/run.py [word in a name ...] [tests/...]

Prints one line for each mutant. Exit status 1: a mutant survived, or no longer fits the sources.
With paths of tests, these run in place of what the mutants name.
Cells of the table run in a forked process, test files in a new one. Run on request, not in a tier.
"""

from __future__ import annotations

import functools
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "table"))
import xla_flags  # noqa: F401, before jax

# isort: split
import jax  # noqa: F401, so that forked processes need not import it
import numpy as np  # noqa: F401

REPOSITORY = Path(__file__).parents[2]


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    cells: list[str]  # or paths of tests


def mutants() -> Iterator[Mutant]:
    for paragraph in Path(__file__).with_name("mutants.txt").read_text().split("\n\n"):
        if not paragraph.startswith("#"):
            head, *lines = paragraph.strip().splitlines()
            of = {sign: [x[2:] for x in lines if x[0] == sign] for sign in "-+?"}
            yield Mutant(*head.split(" | "), "\n".join(of["-"]), "\n".join(of["+"]), of["?"])


def path_of(mutant: Mutant) -> str:
    in_repository = mutant.file.startswith(("csrc/", "benchmarks/"))
    return mutant.file if in_repository else f"python/packax/_src/{mutant.file}"


def fits(mutant: Mutant) -> bool:
    return (REPOSITORY / path_of(mutant)).read_text().count(mutant.old) >= 1


def killed(mutant: Mutant, copy: Path) -> str:
    """What found the mutant; empty: nothing."""
    for cell in mutant.cells:
        if wrong := unchanged(cell, copy):  # it would find every mutant
            raise SystemExit(f"{cell} fails without a mutant: {wrong}")
    file = copy / path_of(mutant)
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new, 1))
    try:
        for cell in mutant.cells:
            if found := find(cell, copy):
                return found
    finally:
        file.write_text(text)
    return ""


def find(cell: str, copy: Path) -> str:
    """What is wrong with the copy; empty: nothing."""
    return of_file(cell, copy) if cell.startswith("tests/") else of_cell(cell, copy)


unchanged = functools.cache(find)


def of_cell(cell: str, copy: Path) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            found = _wrong(cell, copy)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return found


def _wrong(cell: str, copy: Path) -> str:
    sys.path.insert(0, str(copy / "python"))
    sys.dont_write_bytecode = True
    import packax

    assert str(copy) in packax.__file__, packax.__file__
    if cell.startswith("face: "):
        faces = runpy.run_path(str(REPOSITORY / "tests" / "integrations" / "test_faces.py"))
        return "; ".join(faces["check"](cell.removeprefix("face: ")))
    from decode_calls import parse
    from properties import PROPERTIES

    name, text = cell.split(": ")
    row = PROPERTIES[name]
    return "; ".join(row.check(parse(text).with_multiple(row.multiple)))


def of_file(path: str, copy: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", path, "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(copy / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else ""


def main(words: list[str]) -> int:
    paths = [word for word in words if word.startswith("tests/")]
    words = [word for word in words if word not in paths]
    chosen = [m for m in mutants() if not words or any(word in m.name for word in words)]
    chosen = [m._replace(cells=paths or m.cells) for m in chosen]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "packax"
        ignored = shutil.ignore_patterns(".git", "build", "dist", "__pycache__", "third_party")
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        for mutant in chosen:
            begin = time.monotonic()
            found = killed(mutant, copy) if fits(mutant) else ""
            what = f"killed: {found.splitlines()[0][:100]}" if found else "SURVIVED"
            what = what if fits(mutant) else "DOES NOT FIT the sources"
            survived += not found
            print(f"{mutant.name} ({time.monotonic() - begin:.0f} s): {what}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutants killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
