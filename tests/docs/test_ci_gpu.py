""".ci/gpu rejects unknown parts before it installs anything."""

import os
import re
import subprocess

import pytest
from paths import DOCS, ROOT

SCRIPT = ROOT / ".ci" / "gpu"
PARTS = (
    "info tests memcheck racecheck synccheck bench overheads short decode serving masks biases"
    " models pairs jvp context tune fa4 proxy counters power versus train windows calls demo"
)


def run(tmp_path, parts):
    environment = os.environ | {"PARTS": parts, "PYTHON": "false", "OUT": str(tmp_path / "out")}
    command = ["bash", str(SCRIPT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("parts", ["options", "bench options", "tests,bench", "benc", "*"])
def test_an_unknown_part_is_an_error(tmp_path, parts):
    done = run(tmp_path, parts)
    assert done.returncode == 2
    unknown = next(x for x in parts.split() if x not in PARTS.split())
    assert done.stderr == f"gpu: PARTS has {unknown!r}, which is none of: {PARTS}\n"
    assert done.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("parts", ["bench", "  decode   masks ", PARTS])
def test_known_parts_go_on_to_install_the_wheel(tmp_path, parts):
    """The run fails there because the fake Python does."""
    done = run(tmp_path, parts)
    assert done.returncode == 1 and "none of" not in done.stderr


def test_every_part_is_known():
    text = SCRIPT.read_text()
    named = re.findall(r"^ +(?:part|program) (\w+) ", text, re.MULTILINE)
    for tools in re.findall(r"for tool in ([\w ]+);", text):
        named += tools.split()
    assert sorted(named) == sorted(PARTS.split())


def test_pages_name_parts_that_exist():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md"), ROOT / "benchmarks/results/README.md"):
        for quoted, bare in re.findall(r'PARTS=(?:"([\w ]+)"|([a-z]\w*))', page.read_text()):
            named = set((quoted or bare).split())
            assert named <= set(PARTS.split()), page
