"""The tuning harness packs what kernels declare, refuses wrong candidates, and prints a table.

It runs with a fake driver (fake_driver.py), in a separate process.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from paths import BENCHMARKS, SIMULATORS, TUNE

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,  # must not be imported here: see triton_launch.py
    reason="a build dependency: kernels are declared in it",
)

SETUP = """
import json, pathlib, sys
sys.path[:0] = [sys.argv[1] + "/../../../csrc/aot"]
sys.path.append(sys.argv[1])
import compile as aot, table
import candidates, cubin, fake_driver, tune

folder = pathlib.Path(sys.argv[2])
(folder / "cubins").mkdir(parents=True)
cuda = fake_driver.install(cubin)
SM90 = table.ARCHS["90a"]
DIMS = (128, 128)

def write(variant, label):
    names = aot.lower.argument_names(variant.kernel, variant.source)
    params = aot.lower.parameters(variant.kernel, names)
    constants = dict(variant.constants)
    boxes = []
    for _, *sizes in table.TENSOR_MAPS.get(variant.kernel, {}).values():
        rows, columns = (constants[n] if isinstance(n, str) else n for n in sizes)
        boxes.append({"box": [1, rows, min(columns, 64)], "swizzle": 3})
    meta = {"kernel": variant.kernel, "symbol": variant.kernel, "block": variant.block,
        "params": params, "tensor_maps": boxes, "threads": 32 * variant.warps, "shared": 0,
        "registers": 99, "stack": 0, "driver": variant.driver}
    image = folder / "cubins" / f"{variant.name}.cubin"
    image.with_suffix(".json").write_text(json.dumps(meta))
    image.write_text(json.dumps(meta | {"file": variant.name}))
    return {"kernel": variant.kernel, "dims": [variant.qk_dim, variant.v_dim], "file": variant.name,
            "assembler": variant.assembler, "label": label, "constants": constants}

def built(*kernels, arch="90a", portable=True):
    some = candidates.chosen(arch, kernels, [DIMS], ["12.9", "13.4"], [])
    rows = [write(v, v.label) for v in some]
    if portable:
        rows += [write(v, None) for v in table.variants((arch,), ("bf16",), (DIMS,))
                 if v.kernel not in table.SM90_TILES and "sm80" not in v.kernel
                 and not v.kernel.startswith("decode")
                 # not in the harness:
                 and not v.kernel.endswith(("_fallback", "bias", "_alone", "tangent"))]
    (folder / "index.json").write_text(json.dumps(rows))
    return rows
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


def test_every_kernel_gets_every_argument_that_it_declares(tmp_path):
    script(
        tmp_path,
        """
built(*tune.KERNELS)
driver = cubin.Driver()
rows = tune.Built(driver, folder)
case = tune.case("odd", DIMS)  # 3001 rows, 8 query and 2 key/value heads
work = tune.Work(driver, case, rows.masks())
work.check_mask()
for row in rows.rows:
    if row["dims"] != [0, 0]:
        cuda.launches.clear()
        work.launch(rows.kernel(row))()
        (launch,) = cuda.launches
        block = rows.kernel(row).meta["block"]
        padded, per_tile = 3008, -(-3001 // 128) * (128 // block)
        own = {"BLOCK_M": block, "BLOCK_N": block} | row["constants"]
        assert launch["grid"] == ({
            "forward": 8 * per_tile, "forward_sm90": 10, "backward_dq": 8 * per_tile,
            "backward_dkdv": 2 * per_tile, "backward_delta": 8 * -(-3001 // block),
            "backward_preprocess": 8 * padded // block, "backward_sm90": 2 * per_tile,
            "backward_dkdv_sm90": 2 * per_tile, "backward_dq_sm90": 10,
            "backward_dbias": -(-3001 // own["BLOCK_M"]) * -(-3001 // own["BLOCK_N"]),
            "backward_postprocess": 8 * padded // block}[tune.plain(row["kernel"])], 1, 1), launch
        others = {"lse": work.row_sums} if "bias" in row["kernel"] else {}
        others |= {"bias_axes": 4} if row["kernel"] == "backward_dbias" else {}
        others |= {"q_order": work.given["q_order_192"]} if block == 192 else {}
        for name, value in launch.items():
            kept = (work.given | others).get(name)
            if isinstance(kept, cubin.Buffer):
                assert value == kept.pointer.value, (row, name)
            elif kept is not None:
                assert abs(value - kept) < 1e-6, (row, name)
            elif name in work.given:
                assert value == 0, (row, name)
        if row["kernel"] in ("forward_sm90", "backward_dq_sm90"):
            assert cuda.memsets[-1] == work.given["counter"].pointer.value
work.free()
assert not cuda.memory
""",
    )


def test_maps_of_flat_and_headed_buffers(tmp_path):
    script(
        tmp_path,
        """
assert cubin.view((70, 4, 64), [1, 64, 64]) == [1, 70, 256]
assert cubin.view((4096,), [1, 1, 64]) == [1, 1, 4096]
assert cubin.view((4096,), [1, 64, 32]) == [1, 128, 32]
""",
    )


@pytest.mark.exhaustive
def test_a_wrong_candidate_is_named_and_not_timed(tmp_path):
    shown = script(
        tmp_path,
        """
rows = built("forward_sm90", "backward_sm90")
bad = next(r for r in rows if r["kernel"] == "backward_sm90" and r["label"] != "table")
image = folder / "cubins" / f"{bad['file']}.cubin"
image.write_text(json.dumps(json.loads(image.read_text()) | {"file": "bad"}))
tune.TIMED = {"small": (256, 2, 32, 8)}
status = tune.time_candidates(folder, ["forward_sm90", "backward_sm90"], None, ["small"], 3)
assert status == 1
title = f"backward_sm90 {bad['label']} {bad['assembler']}"
report = json.loads((pathlib.Path(sys.argv[2]).parent / "tune.json").read_text())
assert report["wrong"] == [f"odd 128x128 {title}"], report["wrong"]  # and in no later case
timed = {(row["kernel"], row["tile"]) for row in report["rows"]}
assert ("backward_sm90", f"{bad['label']} {bad['assembler']}") not in timed
assert ("backward_sm90", "table 13.4") in timed and ("backward", "table 13.4") in timed
assert ("backward_preprocess", "table 12.9") in timed  # it ran with these
assert report["rows"][0]["tile"] == "table 13.4"
assert all(row["case"] == "small" for row in report["rows"])
flops = {row["kernel"]: row["ms"] * row["tflops"] for row in report["rows"] if row["tflops"]}
assert abs(flops["backward"] / flops["forward_sm90"] - 2.5) < 0.2
""",
    )
    assert "backward_sm90 table 13.4 ... difference 0.0e+00\n" in shown
    assert "WRONG, not timed: odd 128x128 backward_sm90" in shown
    lines = [x.split() for x in shown.splitlines()]
    line = [x for x in lines if x[2:5] == ["forward_sm90", "table", "13.4"]][-1]
    assert line[:2] == ["small", "128x128"] and any(x.startswith("1.000") for x in line)


def test_candidates_for_sm80_run_with_the_matching_postprocess(tmp_path):
    """The memory layout of dQ's partial sums depends on the tile and the number of warps."""
    shown = script(
        tmp_path,
        """
rows = {row["file"]: row for row in built("backward_sm80", "forward", arch="80@90")}
tune.TIMED = {"small": (256, 2, 32, 8)}
assert tune.time_candidates(folder, ["backward_sm80", "forward"], None, ["small"], 1) == 0
report = json.loads((pathlib.Path(sys.argv[2]).parent / "tune.json").read_text())
timed = {(row["kernel"], row["tile"]) for row in report["rows"]}
for tile in ("table", "BLOCK_M=32", "DQ_WARPS=2"):
    assert {("backward", f"{tile} 12.9"), ("backward_sm80", f"{tile} 12.9")} <= timed, timed
assert ("forward", "BLOCK_N=32 12.9") in timed
assert not any("BLOCK_M=128" in tile for kernel, tile in timed if kernel == "backward_sm80")

def layout(launch):
    kernel = rows[launch["file"]]["constants"]
    meta = json.loads((folder / "cubins" / f"{launch['file']}.json").read_text())
    return kernel.get("ROWS", kernel.get("BLOCK_M")), kernel["DQ_WARPS"], meta["threads"]

pipeline = ("backward_preprocess", "backward_sm80", "backward_postprocess_sm80")
pairs = [(a, b) for first, a, b in zip(cuda.launches, cuda.launches[1:], cuda.launches[2:])
         if (first["kernel"], a["kernel"], b["kernel"]) == pipeline]
assert len({layout(a) for a, _ in pairs}) > 2 and all(layout(a) == layout(b) for a, b in pairs)
for a, _ in pairs:
    per_tile = 128 // rows[a["file"]]["constants"]["BLOCK_N"]
    assert a["grid"][0] == a["kv_heads"] * -(-a["q_len"] // 128) * per_tile
for _, b in pairs:
    assert b["grid"][0] == b["heads"] * -(-b["q_len"] // 64) * 64 // layout(b)[0]
""",
    )
    assert "takes at most 64 rows" in shown


def test_candidates_change_the_tables_row_and_leave_it(tmp_path):
    shown = script(
        tmp_path,
        """
before = repr(table.SM90_TILES)
made = candidates.variant("forward_sm90", SM90, (64, 64), {"WARP_GROUPS": 2}, "13.4")
assert made.block == 128 and dict(made.constants)["WARP_GROUPS"] == 2
assert made.name == "forward_sm90_bf16_64x64_sm90a_cuda13__WARP_GROUPS2" and made.driver == 13000
assert dict(made.constants) | {"WARP_GROUPS": 3} == dict(table.sm90("forward_sm90", SM90, "bf16",
    64, 64).constants)
assert repr(table.SM90_TILES) == before
for assembler, changed, anew in (("13.4", {}, 0), ("12.9", {}, 1),
    ("12.9", {"REMATERIALIZE": 0}, 0),
    ("13.4", {"REMATERIALIZE": 1}, 1)):
    made = candidates.variant("backward_dq_sm90", SM90, DIMS, changed, assembler)
    assert dict(made.constants)["REMATERIALIZE"] == anew and made.assembler == assembler
    if not changed:
        assert made.constants == table.sm90("backward_dq_sm90", SM90, "bf16", *DIMS,
            assembler).constants
made = candidates.variant("backward_dkdv", SM90, (64, 64), {"BLOCK_N": 128, "WARPS": 8}, "12.9")
assert made.block == 128 and made.warps == 8
for kernel, dims, change in (("forward_sm90", (64, 64), {"ROWS": 1}),
    ("forward_sm90", (32, 32), {})):
    try:
        candidates.variant(kernel, SM90, dims, change, "12.9")
    except LookupError as error:
        print(error)
names = [v.name for v in candidates.chosen("90a", ["backward_preprocess"], [DIMS], ["12.9", "13.4"],
    ["backward_preprocess:128:ROWS=128"])]
assert len(names) == len(set(names)) and any("ROWS128" in name for name in names)
assert sum("backward_sm90" in name for name in names) == 2  # its pipeline, by both assemblers
only = candidates.chosen("90a", ["forward_sm90"], None, ["13.4"],
    ["backward_sm90:128:LSE_BY_MMA=0"],
    listed=False)
assert sorted(v.name.rpartition("sm90a")[2] + " " + v.kernel for v in only) == [
    "__table backward_postprocess", "__table backward_preprocess",
    "_cuda13__LSE_BY_MMA0 backward_sm90", "_cuda13__table backward_sm90"]
""",
    )
    assert "forward_sm90 has no constant ROWS: " in shown
    assert "no row for forward_sm90 32x32" in shown


CHILD = """
import sys, time
from probe import say_begin, say_end
for name in "abcd":
    if name not in sys.argv[1:]:
        say_begin(name)
        time.sleep(99 if name == "b" else 0)
        assert name != "d"
say_end()
"""


def test_fatal_steps_are_left_out(monkeypatch, capfd):
    """A step that hangs, a step that dies, and a child that fails before its first step."""
    monkeypatch.syspath_prepend(str(TUNE))
    monkeypatch.setenv("PYTHONPATH", str(TUNE))
    from probe import fatal_steps

    found = fatal_steps(lambda without: [sys.executable, "-c", CHILD, *without], 5.0)
    assert found == {"b": "was silent for 5 s", "d": "ended the process"}
    assert "AssertionError" in capfd.readouterr().err
    with pytest.raises(
        RuntimeError, match=r"ended the process before it began a step:(.|\n)*no GPU"
    ):
        fatal_steps(lambda _: [sys.executable, "-c", "raise OSError('no GPU')"], 5.0)


def test_check_announces_and_leaves_out(tmp_path):
    shown = script(
        tmp_path,
        """
built("backward_sm90")
without = {"backward_sm90 table 13.4 128x128": ""}
assert tune.time_candidates(folder, ["backward_sm90"], None, [], 0, without, True) == 0
""",
    )
    begun = [x for x in shown.splitlines() if x.startswith("@begin ")]
    assert "@begin backward_sm90 table 12.9 128x128" in begun and shown.endswith("@end\n")
    assert "@begin backward_sm90 table 13.4 128x128" not in begun
