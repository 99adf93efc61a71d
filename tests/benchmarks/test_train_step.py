"""benchmarks/train_step.py: the attention implementations agree, a wrong one is not timed, memory
and kernels are counted.

Its modules are imported in a separate process, so that their jax settings do not reach the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from benchmark_scripts import script
from paths import BENCHMARKS


@pytest.mark.exhaustive
def test_implementations_agree_and_failures_are_reported(tmp_path):
    """On the CPU in float32: packax, packax with its results saved, and dense attention agree."""
    options = ["--who", "packax,names,dense,fa3,cudnn", "--profile", "--out", tmp_path]
    result = subprocess.run(
        [sys.executable, "train_step.py", "--tiny", "--rounds", "2", *options],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (rows,) = json.loads((tmp_path / "train_step.json").read_text())["cases"].values()
    for name in ("packax", "names", "dense"):
        row = rows[name]
        assert not row["wrong"] and not row["failed"] and len(row["rounds_ms"]) == 2, row
        assert max(row["differences"].values()) < 1e-4 and row["tokens_per_s"] > 0
        assert abs(row["loss"] - rows["packax"]["loss"]) < 1e-4
    assert "head dim 128 alone" in rows["fa3"]["failed"]["step"]
    assert rows["cudnn"]["failed"] and "ms" not in rows["cudnn"]
    assert "docs3_0k_2layers cudnn step did not run" in result.stdout


@pytest.mark.exhaustive
def test_windows_by_halo_and_by_all_keys_agree(tmp_path):
    """On two devices in float32: halos give the same gradients with fewer fetched keys."""
    options = ["--tiny", "--window", "40", "--runs", "2048:3:6", "--rounds", "1"]
    result = subprocess.run(
        [sys.executable, "train_step.py", *options, "--out", tmp_path],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=600,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "train_windows.json").read_text())
    (rows,) = report["cases"].values()
    halo, gather, whole = (rows[name] for name in ("halo", "gather", "global"))
    assert halo["fetched"] == [128, 1024] and gather["fetched"] == [1024, 1024]
    assert abs(halo["loss"] - gather["loss"]) < 1e-5 < abs(halo["loss"] - whole["loss"])
    assert max(gather["differences"].values()) < 1e-4 and whole["ms"] > 0


@pytest.mark.exhaustive
def test_a_wrong_implementation_is_not_timed():
    """Attention across documents stands in for a peer."""
    script("""
import jax
import train_step
from lib import llama
from lib.implementations import Implementation

def across(case):
    causal = lambda q, k, v, _: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return Implementation("cudnn", causal, ())

train_step.JAX_PEERS["cudnn"] = across
run = train_step.Run.parse("512:5:2")
config = llama.config_of(2, **train_step.TINY, chunk=64)
stepper = train_step.stepper_of(run, config, ["packax", "cudnn"])
rows = train_step.timed(run, stepper, 1, False)
assert rows["cudnn"]["wrong"] == ["query", "key", "value"] and "ms" not in rows["cudnn"], rows
assert rows["packax"]["ms"] > 0
assert "cudnn WRONG: query, key, value" in train_step.table({"x": rows})
try:
    train_step.Run.parse("32k:12")
except SystemExit as error:
    assert "'32k:12' is not TOKENS:DOCUMENTS:LAYERS" in str(error)
else:
    raise AssertionError
""")


def test_the_count_of_operations():
    """Six operations per step, token and matrix element, besides attention."""
    script("""
import jax
import train_step
from lib import llama

config = llama.config_of(3, **train_step.TINY)
state = jax.eval_shape(lambda: llama.initialize(config, jax.random.key(0)))["parameters"]
layer, last = config.matrices()
assert 3 * layer == sum(x.size for x in state["layers"].values() if x.ndim == 3)
assert last == state["unembedding"].size
case = train_step.Run(256, 3, 3).case(config)
attention = 3 * (4 + 10) * case.heads * case.head_dim * case.area
assert train_step.flops_of([case], config, 3) == 6 * 256 * (3 * layer + last) + attention
""")
