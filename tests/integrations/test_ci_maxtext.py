""".ci/maxtext reports what it did not run, and fails if one of its parts does."""

import os
import subprocess

import pytest
from paths import ROOT

# Stands in for Python: prints its arguments, and fails if FAILS occurs in them.
FAKE = """#!/usr/bin/env bash
[ "$1" != -c ] || exit "$ABSENT"
echo "ran $*"
[[ -z "$FAILS" || "$*" != *"$FAILS"* ]]
"""


@pytest.mark.parametrize(
    ("variables", "code", "lines"),
    [
        ({"ABSENT": "1"}, 0, ["maxtext: not installed in {python}: nothing was run"]),
        (
            {"ONLY": "llama, FSDP"},
            0,
            [
                "ran tests/peers/maxtext_trainings.py --only llama, FSDP",
                "maxtext: no CHECKOUT: MaxText's own tests were not run",
                "maxtext: ok",
            ],
        ),
        (
            {"CHECKOUT": "/there", "TESTS": "-k qk_clip", "FAILS": "trainings"},
            1,
            [
                "ran tests/peers/maxtext_trainings.py",
                "ran tests/peers/peer_suites.py maxtext /there -k qk_clip",
                "maxtext: FAILED: trainings",
            ],
        ),
        (
            {"CHECKOUT": "/there", "FAILS": "peer_suites"},
            1,
            [
                "ran tests/peers/maxtext_trainings.py",
                "ran tests/peers/peer_suites.py maxtext /there",
                "maxtext: FAILED: tests",
            ],
        ),
    ],
)
def test_what_is_run_and_said(tmp_path, variables, code, lines):
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    unset = ("CHECKOUT", "ONLY", "TESTS")
    environment = {name: x for name, x in os.environ.items() if name not in unset}
    environment |= {"PYTHON": str(python), "ABSENT": "0", "FAILS": ""} | variables
    command = ["bash", str(ROOT / ".ci" / "maxtext")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    printed = done.stdout.splitlines()
    assert done.returncode == code, done.stdout + done.stderr
    assert len(printed) == len(lines)
    for line, start in zip(printed, lines, strict=True):
        assert line.startswith(start.format(python=python))


def test_a_python_that_is_not_there(tmp_path):
    environment = os.environ | {"PYTHON": str(tmp_path / "python")}
    command = ["bash", str(ROOT / ".ci" / "maxtext")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path) in done.stderr
