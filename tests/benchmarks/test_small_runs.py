"""Each benchmark on a tiny case: its results are right, wrong ones are found, and it fills a table.

Their modules are imported in a separate process, so that their jax settings do not reach the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmark_scripts import script
from paths import ROOT
from tiers import marked

CODES = {
    "cpu": """
import cpu

row = cpu.measured(length=64, documents=4, rounds=1)
assert set(row) == {"forward", "both passes"}
for found in row.values():
    ours, theirs = found["packax"], found["jax.nn"]
    assert found["jax.nn / packax, ms"] == theirs["ms"] / ours["ms"] > 0
    assert found["jax.nn / packax, MiB"] == theirs["MiB"] / ours["MiB"] > 0
""",
    "forward_mode": """
import packax
import forward_mode as f

more = {"causal": True, "documents": 2, "dtype": "float32"}
case = f.ModeCase("small", 1, 192, 2, 1, 16, along=(0, 2), **more)
programs = f.programs
f.programs = lambda *x: {n: p for n, p in programs(*x).items() if n in ("forward", "jvp")}
assert all(ratio <= 2 for ratio in f.check(case).values())
f._packax = lambda q, k, v, mask, **options: packax.flash_attention(q, k, v, packax.full())
assert f.check(case)["jvp"] > 2
times = {f"packax {name}": {"ms": 2.0} for name in f.NAMES}
line = f.table({"small": times}).splitlines()[1]
assert line.split() == ["small", *["2.000"] * 5, "1.00", "1.00"]
""",
    "pair_biases": """
import dataclasses
import jax
import jax.numpy as jnp
import pair_biases

def row_of(case, function):
    inputs = case.inputs()
    expected = jax.jit(pair_biases.reference)(*inputs)
    return pair_biases.prepared("packax", function, inputs, expected)

case = pair_biases.PairCase(3, 16, 2, 16, "float32")
for of in (case, dataclasses.replace(case, samples=2)):
    row = row_of(of, pair_biases.packax_function)
    assert not row["wrong"] and not row["failed"] and set(row["passes"]) == {"fwd", "bwd"}, row
    assert set(row["errors"]) == {"out", "dq", "dk", "dv", "dbias"}
bad = row_of(case, lambda q, k, v, bias: pair_biases.packax_function(q, k, v, jnp.zeros_like(bias)))
assert "dbias" in bad["wrong"] and not bad["passes"]
times = {what: {"ms": 1.25} for what in ("fwd", "bwd")}
(head, line) = pair_biases.short({case.name: {"packax": row | {"times": times}}}).splitlines()
assert "1.250 / 1.250" in line and line.startswith("3x16_h2_d16_f32")
""",
    "decode": """
import json, pathlib, sys
import decode

decode.COPIED, decode.machine = 1 << 12, dict
small = decode.Case("small", (64,), heads=2, kv_heads=1, dim=8, page_size=16)

def run(status, case, *more):
    options = ["--out", sys.argv[1], "--implementation", "xla", "--rounds", "1", *more]
    assert decode.main(options, (case,)) == status
    (row,) = json.loads(pathlib.Path(sys.argv[1], "decode.json").read_text())["cases"].values()
    return row

row = run(0, small)
assert row["bytes"] == 2 * 2 * 64 * 8 and set(row["times"]) == {"packax", "fp8", "copy"}
assert 0 < row["fp8_from_16_bits"] < 0.1 and row["errors"]["fp8"] < 1e-2
assert row["left_out"] == {"cudnn": "no pages"}
row = run(0, small, "--dtype", "float32")
assert row["bytes"] == 2 * 4 * 64 * 8 and row["errors"]["packax"] == 0
assert row["left_out"]["fp8"] == "no kernel"
decode.LIMIT = {"bfloat16": -1.0}
row = run(1, decode.Case("dense", (64,), heads=2, kv_heads=1, dim=8))
assert row["left_out"]["packax"].startswith("wrong") and "packax" not in row["times"]
""",
    "serving": """
import json, pathlib, sys
import serving

serving.machine = dict
sizes = {"heads": 2, "kv_heads": 1, "dim": 8, "page_size": 4}
cases = {
    "flash_attention": serving.Case("chunk", (64,), (20,), **sizes),
    "decoding alone, chunk alone": serving.Case("mix", (30, 30, 40), (1, 1, 17), **sizes),
    "decode_attention": serving.Case("decoding", (30, 40), (2, 2), room=9, fp8=True, **sizes),
}
options = ["--out", sys.argv[1], "--implementation", "xla", "--rounds", "1"]
assert serving.main(options, tuple(cases.values())) == 0
rows = json.loads(pathlib.Path(sys.argv[1], "serving.json").read_text())["cases"].values()
for row, others in zip(rows, cases, strict=True):
    assert [*row["times"]] == ["packax", *others.split(", ")] and row["ratio"] > 0
    assert row["errors"]["packax"] == 0
""",
}


@pytest.mark.parametrize("name", [marked([name], name != "decode") for name in CODES])
def test_small_case(name, tmp_path):
    script(CODES[name], str(tmp_path))


@pytest.mark.exhaustive
def test_plain_jit_and_shard_map_agree_in_one_process_and_in_two(tmp_path):
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
