"""The example and the host benchmark of context parallelism, each run in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT
from xla_flags import of_devices


def run(*arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": of_devices(1), **environment},
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["balanced", "local"])
def test_the_example_trains_and_equals_one_device(plan):
    pytest.importorskip("optax")
    pytest.importorskip("tqdm")
    script = ROOT / "examples" / "train_context_parallel.py"
    settings = ("--steps", "3", "--seq-len", "512", "--devices", "4", "--mesh", "2,2,1")
    shown = run(str(script), "--cpu", "--plan", plan, *settings)
    assert "mesh       {'fsdp': 2, 'context': 2, 'tensor': 1} on 4 x cpu" in shown
    assert "first loss equals one device's" in shown


@pytest.mark.exhaustive
def test_the_plans_are_balanced(tmp_path):
    pytest.importorskip("matplotlib")
    script = ROOT / "benchmarks" / "context_plans.py"
    shown = run(str(script), "--packings", "2", "--out", str(tmp_path), JAX_PLATFORMS="cpu")
    assert "(limit 1.05)" in shown
    report = json.loads((tmp_path / "context_plans.json").read_text())
    row = report["plans"]["library, 131072 rows, 16 ranks, balanced"]
    assert 1 <= row["area"] <= row["area_max"] <= 1.05 and row["tiles"] >= row["area"]
    assert report["plans"]["library, 131072 rows, 16 ranks, none"]["area"] > 1.2
    assert (tmp_path / "context_plans.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_the_benchmark_moves_data_as_kvax_does(tmp_path):
    script = ROOT / "benchmarks" / "context.py"
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": of_devices(2)}
    settings = ("--quick", "--only", "kvax-like", "--rounds", "1", "--out", str(tmp_path))
    assert "wrote" in run(str(script), *settings, **devices)
    (found,) = json.loads((tmp_path / "context.json").read_text())["cases"].values()
    (row,) = found["schemes"].values()
    assert not row["wrong"] and set(row["times"]) == {"fwd", "bwd"}
