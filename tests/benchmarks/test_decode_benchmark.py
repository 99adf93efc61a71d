"""benchmarks/decode.py with XLA in place of the kernels: all columns, and wrong results."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from paths import BENCHMARKS


@pytest.mark.exhaustive
def test_benchmark(tmp_path, monkeypatch, capsys):
    """All columns are filled; a wrong result is not timed and fails the run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("decode_benchmark", BENCHMARKS / "decode.py")
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "COPIED", 1 << 12)
    monkeypatch.setattr(benchmark, "machine", dict)
    small = benchmark.Case("small", (64,), heads=2, kv_heads=1, dim=8, page_size=16)
    arguments = ["--out", str(tmp_path), "--implementation", "xla", "--rounds", "1"]
    assert benchmark.main(arguments, (small,)) == 0
    (row,) = json.loads((tmp_path / "decode.json").read_text())["cases"].values()
    assert row["bytes"] == 2 * 2 * 64 * 8 and set(row["times"]) == {"packax", "fp8", "copy"}
    assert 0 < row["fp8_from_16_bits"] < 0.1 and row["errors"]["fp8"] < 1e-2
    assert row["left_out"] == {"cudnn": "no pages"}
    assert benchmark.main([*arguments, "--dtype", "float32"], (small,)) == 0
    (row,) = json.loads((tmp_path / "decode.json").read_text())["cases"].values()
    assert row["bytes"] == 2 * 4 * 64 * 8 and row["errors"]["packax"] == 0
    assert row["left_out"]["fp8"] == "no kernel"
    dense = small.__class__("dense", (64,), heads=2, kv_heads=1, dim=8)
    monkeypatch.setattr(benchmark, "LIMIT", {"bfloat16": -1.0})
    assert benchmark.main(arguments, (dense,)) == 1
    (row,) = json.loads((tmp_path / "decode.json").read_text())["cases"].values()
    assert row["left_out"]["packax"].startswith("wrong") and "packax" not in row["times"]
    assert "| dense | wrong" in capsys.readouterr().out
