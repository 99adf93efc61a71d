"""versus_wheel.py on the CPU: two packages in turns, compared with each other beyond what the
reference samples."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import packax
import pytest
from paths import BENCHMARKS

# The reference samples the first batch row: what this does to the second only the other package
# shows.
BEFORE = """

__version__ = "0.0.9"
_flash_attention = flash_attention


def flash_attention(query, key, value, mask):
    out = _flash_attention(query, key, value, mask)
    return out if len(out) == 1 else out.at[1].multiply(1.05)
"""


def versus(before, out, *arguments):
    return subprocess.run(
        [sys.executable, "compare/versus_wheel.py", "--before", before, "--out", out, *arguments],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=300,
    )


@pytest.mark.exhaustive
def test_a_wheel_and_the_current_package(tmp_path):
    root, wheel = Path(packax.__file__).parent, tmp_path / "packax-0.0.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in root.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                more = BEFORE.encode() * (path == root / "__init__.py")
                archive.writestr(
                    str(Path("packax", path.relative_to(root))), path.read_bytes() + more
                )
    result = versus(wheel, tmp_path / "out", "--quick", "--rounds", "3")
    assert result.returncode == 1, result.stderr[-3000:]
    report = json.loads((tmp_path / "out" / "versus_wheel.json").read_text())
    packages = report["packages"]
    assert packages["now"]["path"] == str(root) and report["before"] == wheel.name
    assert packages["before"]["path"] != str(root)
    assert packages["before"]["sha256"] != packages["now"]["sha256"]

    rows = report["cases"]["docs3_200_d16"]
    for who in ("before", "now"):
        assert set(rows[who]["times"]) == {"fwd", "bwd"} and not rows[who]["wrong"]
        assert set(rows[who]["errors"]) == {"out", "dq", "dk", "dv"}
    assert rows["compared"]["same_bits"] == ["out", "dq", "dk", "dv"]
    for what, ratio in rows["ratio"].items():
        ms = [rows[who]["times"][what]["ms"] for who in ("before", "now")]
        assert abs(ratio["of_medians"] - ms[0] / ms[1]) < 0.02 * ratio["of_medians"]
        assert ratio["low"] <= ratio["high"]

    rows = report["cases"]["causal_2x96_d24"]
    assert not rows["before"]["wrong"] and set(rows["compared"]["differ"]) == {
        "out",
        "dq",
        "dk",
        "dv",
    }
    assert rows["compared"]["same_bits"] == [] and rows["ratio"] == {}
    assert "causal_2x96_d24: results of the two DIFFER, not timed: out, dq, dk, dv" in result.stdout
    last = result.stdout.split("\n\n")[-2].splitlines()
    assert [line.split()[:2] for line in last[1:5]] == [
        [case, what] for case in report["cases"] for what in ("fwd", "bwd")
    ]
    assert last[1].endswith("same bits") and last[3].split()[2:8] == ["-"] * 6
    assert "FAILED: causal_2x96_d24\n" in result.stdout


def test_a_folder_without_packax(tmp_path):
    result = versus(tmp_path, tmp_path)
    assert (
        result.returncode == 1 and f"--before: no packax/__init__.py in {tmp_path}" in result.stderr
    )
