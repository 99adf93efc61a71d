"""Each benchmark on a tiny case (programs.py): its results are right, a wrong one is found, and it
fills a table. Each runs in a separate process, because benchmarks change jax's settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import BENCHMARKS, COMPARE, SUPPORT, importing
from tiers import marked

EACH_TIME = ("numbers", "pair_biases")
PROGRAMS = Path(__file__).with_name("programs.py")
NAMES = re.findall(r"^def (\w+)", PROGRAMS.read_text(), re.MULTILINE)


def run(*command, devices=1):
    environment = importing(BENCHMARKS, COMPARE, SUPPORT)
    environment["XLA_FLAGS"] = (
        os.environ["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={devices}"
    )
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("name", [marked([name], name in EACH_TIME) for name in NAMES])
def test_program(name, tmp_path):
    run(PROGRAMS, name, tmp_path)


@pytest.mark.exhaustive
def test_the_program_that_times_kvax_traces():
    shown = run("compare/versus_kvax.py", "--trace")
    assert "packax.kvax: traced, results as inputs" in shown and "OTHER" not in shown


@pytest.mark.exhaustive
def test_plans_and_windows_over_ranks(tmp_path):
    """Every plan is right, and the local plan and halos fetch less."""
    options = ["--quick", "--rounds", "1", "--out", tmp_path, "--cases"]
    assert "WRONG" not in run("context.py", *options, "mean40_2k", devices=2)
    found = json.loads((tmp_path / "context_cases.json").read_text())["cases"]["mean40_2k"]
    fetched = {name: row["fetched"] for name, row in found["schemes"].items()}
    assert fetched["none"] == fetched["balanced"] == 1024 * 2 * 8 * 16 * 2 / 2**20
    assert 0 < fetched["local"] < fetched["balanced"] and "zigzag" in fetched
    for row in (*found["schemes"].values(), found["one_gpu"], found["slowest"]):
        assert {name: cell["ms"] > 0 for name, cell in row["times"].items()} == {
            "fwd": True, "bwd": True
        }  # fmt: skip
    run("context.py", *options, "window100_1k", "--only", "zigzag", devices=2)
    found = json.loads((tmp_path / "context_cases.json").read_text())["cases"]["window100_1k"]
    (row,) = found["schemes"].values()
    halos = 2 * 128 * 2 * 8 * 16 * 2  # bytes of two tiles
    assert row["fetched"] == round(halos / 2**20, 1)


@pytest.mark.exhaustive
def test_plain_jit_and_shard_map_agree_in_one_process_and_in_two(tmp_path):
    run("meshes.py", "--quick", "--tokens", 1024, "--rounds", 2, "--out", tmp_path)
    report = json.loads((tmp_path / "meshes.json").read_text())
    assert list(report["cases"]) == ["1", "2"]
    for rows in report["cases"].values():
        assert list(rows) == ["shard_map", "jit"]
        for row in rows.values():
            assert row["ms"] > 0 and row["mib"] > 0 and row["differs"] < 2e-2


@pytest.mark.exhaustive
def test_train_steps_agree(tmp_path):
    """packax, packax with its results saved, and dense attention; windows by halo and by all keys.
    What does not run is reported."""
    options = ["train_step.py", "--tiny", "--out", tmp_path]
    who = ["--who", "packax,names,dense,fa3,cudnn", "--profile"]
    shown = run(*options, "--rounds", 2, *who)
    (rows,) = json.loads((tmp_path / "train_step.json").read_text())["cases"].values()
    for name in ("packax", "names", "dense"):
        row = rows[name]
        assert not row["wrong"] and not row["failed"] and len(row["rounds_ms"]) == 2, row
        assert max(row["differences"].values()) < 1e-4 and row["tokens_per_s"] > 0
        assert abs(row["loss"] - rows["packax"]["loss"]) < 1e-4
    assert "head dim 128 alone" in rows["fa3"]["failed"]["step"] and rows["cudnn"]["failed"]
    assert "docs3_0k_2layers cudnn step did not run" in shown
    windows = ["--window", "40", "--runs", "2048:3:6", "--rounds", 1]
    run(*options, *windows, devices=2)
    (rows,) = json.loads((tmp_path / "train_windows.json").read_text())["cases"].values()
    halo, gather, whole = (rows[name] for name in ("halo", "gather", "global"))
    assert halo["fetched"] == [128, 1024] and gather["fetched"] == [1024, 1024]
    assert abs(halo["loss"] - gather["loss"]) < 1e-5 < abs(halo["loss"] - whole["loss"])
    assert max(gather["differences"].values()) < 1e-4 and whole["ms"] > 0
