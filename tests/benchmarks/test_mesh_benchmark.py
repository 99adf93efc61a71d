"""benchmarks/meshes.py: plain jit and shard_map agree, in one process and in two."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT


@pytest.mark.exhaustive
def test_ways_and_processes_agree(tmp_path):
    options = ("--quick", "--tokens", "1024", "--rounds", "2", "--out", str(tmp_path))
    program = [sys.executable, str(ROOT / "benchmarks" / "meshes.py"), *options]
    shown = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr[-3000:]
    report = json.loads((tmp_path / "meshes.json").read_text())
    assert list(report["cases"]) == ["1", "2"]
    for rows in report["cases"].values():
        assert list(rows) == ["shard_map", "jit"]
        for row in rows.values():
            assert row["ms"] > 0 and row["mib"] > 0 and row["differs"] < 1e-2
