"""benchmarks/tune/tune_decode.py against a driver whose kernels are NumPy (fake_driver.py): what is
launched, compared and timed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from paths import BENCHMARKS, SIMULATORS, TUNE

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,  # not imported: see triton_launch.py
    reason="a build dependency: kernels are declared in it",
)

SETUP = """
import dataclasses, json, pathlib, sys
sys.path[:0] = [sys.argv[1] + "/../../../csrc/aot"]
sys.path.append(sys.argv[1])
import candidates, cubin, decode_work, fake_driver, tune, tune_decode
from lib import decode_cases
import compile as aot, table  # last: a kernel file has the name of a benchmark

folder = pathlib.Path(sys.argv[2])
(folder / "cubins").mkdir(parents=True)
cuda = fake_driver.install(cubin)
DIMS = [(64, 64), (128, 128)]
some = list(candidates.chosen("90a", tune_decode.DECODE, DIMS, ["12.9", "13.4"], []))
some += [v for v in table.variants(("90a",), ("bf16",), DIMS) if v.kernel == "decode_combine"]
rows = []
for v in some:
    params = aot.lower.parameters(v.kernel, aot.lower.argument_names(v.kernel, v.source))
    meta = {"kernel": v.kernel, "symbol": v.kernel, "block": v.block, "params": params,
        "tensor_maps": [], "threads": 128,
            "shared": 7, "registers": 99, "stack": 0, "driver": v.driver}
    (folder / "cubins" / f"{v.name}.json").write_text(json.dumps(meta))
    (folder / "cubins" / f"{v.name}.cubin").write_text(json.dumps(meta | {"file": v.name}))
    rows.append({"kernel": v.kernel, "dims": [v.qk_dim, v.v_dim], "file": v.name,
        "assembler": v.assembler,
                 "label": getattr(v, "label", None), "constants": dict(v.constants)})
(folder / "index.json").write_text(json.dumps(rows))
small = decode_cases.Case("small", (300, 0, 70), q_len=5, heads=6, kv_heads=2, page_size=16)
assert [v for v in some if v.kernel == "decode_tall"] and len(some) > 20
"""


def script(tmp_path: Path, code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", SETUP + code, str(SIMULATORS), str(tmp_path / "built")],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "OUT": str(tmp_path), "PYTHONPATH": str(TUNE)},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout


def test_compares_and_times(tmp_path):
    """NumPy attention in the kernels' place, from the addresses that they got, is right; a kernel
    that is not is named."""
    shown = script(
        tmp_path,
        """
tune_decode.TIMED = (small,)
tune_decode.SPLITS = {"small": (2,)}
tune_decode.COPIED = 1 << 10
bad = next(r for r in rows if r["kernel"] == "decode" and r["dims"][0] == 128
    and r["label"] != "table")
image = folder / "cubins" / f"{bad['file']}.cubin"
image.write_text(json.dumps(json.loads(image.read_text()) | {"file": "bad"}))
assert tune_decode.time_decode(folder, ["decode", "decode_tall"], None, None, 3) == 1
report = json.loads((folder.parent / "tune_decode.json").read_text())
assert report["wrong"] == [f"odd d128 decode {bad['label']} 12.9"], report["wrong"]
tiles = [row["tile"] for row in report["rows"]]
assert tiles[0] == "table 12.9" and tiles[-1] == "table 12.9 by 2"
assert f"{bad['label']} 12.9" not in tiles
assert all(row["case"] == "small" and row["error"] < 3e-3 for row in report["rows"])
assert report["rows"][-1]["splits"] == 2
row = report["rows"][0]
moved = small.bytes("bfloat16")
assert abs(row["gb_per_s"] * row["ms"] * 1e6 - moved) < 1e-3 * moved + 1e5
assert not cuda.memory
before = len(cuda.launches)
assert tune_decode.time_decode(folder, ["decode_tall"], [(64, 64)], [], 3) == 0
assert {x["kernel"] for x in cuda.launches[before:]} == {"decode_tall", "decode_combine"}
""",
    )
    assert "WRONG, not timed: odd d128 decode" in shown
    assert "tall pages d64" in shown and "odd pages d128" in shown


def test_every_argument_and_the_grid(tmp_path):
    script(
        tmp_path,
        """
driver = cubin.Driver()
built = tune_decode.Built(driver, folder)
work = decode_work.DecodeWork(driver, small)
_, kernel = built.candidates((128, 128), tune_decode.DECODE)["decode table 12.9"]
combine = built.twin("decode_combine", (128, 128))
work.launch(kernel, combine, 2, False)()
shares, _ = cuda.launches
assert shares["grid"] == (1 * 2 * 3 * 2, 1, 1) and (shares["splits"], shares["shares"]) == (2, 0)
del cuda.launches[:]
work.launch(kernel, combine, 3, True)()
shares, merged = cuda.launches
assert shares["grid"] == (1 * 2 * (3 * 3 + 3), 1, 1) and merged["grid"] == (3 * 5 * 6, 1, 1)
sizes = {"batch": 3, "q_len": 5, "kv_len": 304, "pages": 57, "page_size": 16, "table_width": 19,
    "heads": 6, "kv_heads": 2,
         "qk_eighths": 16, "v_eighths": 16, "splits": 3, "shares": 9, "soft_cap": 0}
assert {name: shares[name] for name in sizes} == sizes and abs(shares["scale"] - 128**-0.5) < 1e-7
assert merged["has_sinks"] == 0 and merged["sink_batch"] == 1 and merged["splits"] == 3
for launch in cuda.launches:
    for name in ("query", "key", "value", "q_lo", "q_hi", "block_table", "partial", "sums", "out",
        "lse"):
        assert launch.get(name, work.given[name].pointer.value) == work.given[name].pointer.value
""",
    )


def test_shares_are_those_of_the_handler(tmp_path):
    """By hand, of 132 multiprocessors: csrc/launch/decode_shares.cc, ChooseDecodeShares."""
    script(
        tmp_path,
        """
cases = {case.name: case for case in decode_cases.CASES}
for name, block, splits, dealt in (("1x128k", 16, 33, None), ("8x32k", 16, 25, 4),
    ("8x32k, 16 rows", 64, 6, 4), ("64x8k", 16, 6, 1),
                                   ("8x32k, multi-query", 64, 32, 32),
                                   ("1x128k and 31x1k", 16, 33, 1), ("short", 16, 11, None),
                                   ("65", 16, 6, None)):
    case = cases.get(name) or decode_cases.Case(name, (8192,) * 65 if name == "65" else (2559,) * 6)
    found = [decode_work.splits_of(132, case, block, dealing) for dealing in (False, True)]
    want = [(splits, False), (splits, False) if dealt is None else (dealt, True)]
    assert found == want, (name, found)
""",
    )
