""".ci/levanter finds the tests in Marin's sources and in Levanter 1.2's, and reports what
failed."""

import os
import subprocess

import pytest
from paths import ROOT

# Stands in for Python: prints its arguments and import path, and fails if FAILS occurs in them.
FAKE = """#!/usr/bin/env bash
[ "$1" != -c ] || exit 0
echo "$* $PYTHONPATH"
[[ -z "$FAILS" || "$*" != *"$FAILS"* ]]
"""
TRAINING = ["tests/peers/levanter_training.py", "-m pytest"]
SUITES = "tests/peers/peer_suites.py levanter {checkout} --name x"


@pytest.mark.parametrize(
    ("folder", "fails", "runs", "imports", "last"),
    [
        ("lib/levanter/tests", "", [*TRAINING, SUITES], "/lib/levanter/tests", "levanter: ok"),
        ("lib/levanter/tests", "peer_", [*TRAINING, SUITES], "", "levanter: FAILED: tests"),
        ("tests", "", [SUITES], "/src:{checkout}/tests", "levanter: ok"),
        (None, "training", TRAINING, "", "levanter: FAILED: training"),
    ],
)
def test_what_is_run_and_said(tmp_path, folder, fails, runs, imports, last):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o755)
    checkout = tmp_path / "checkout"
    environment = {n: x for n, x in os.environ.items() if n not in ("CHECKOUT", "PYTHONPATH")}
    environment |= {"VENV": str(tmp_path / "venv"), "FAILS": fails}
    if folder is not None:
        (checkout / folder).mkdir(parents=True)
        environment["CHECKOUT"] = str(checkout)
    command = ["bash", str(ROOT / ".ci" / "levanter"), "--name", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    *printed, end = done.stdout.splitlines()
    if folder is None:
        assert printed.pop() == "levanter: no CHECKOUT: Levanter's own tests were not run"
    assert end == last and done.returncode == bool(fails), done.stdout + done.stderr
    for line, start in zip(printed, runs, strict=True):
        assert line.startswith(start.format(checkout=checkout))
    assert printed[-1].endswith(imports.format(checkout=checkout))
