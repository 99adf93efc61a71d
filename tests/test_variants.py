"""The variant table and its compiler: keys unique, every row buildable, a surprise in the PTX refused, builds repeatable."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
AOT = ROOT / "csrc" / "aot"


def load(name: str):  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location(f"packax_aot_{name}", AOT / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(AOT))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(AOT))
    return module


table = load("variants")
compiler = load("compile")
ALL = list(table.variants())


def test_keys_and_names_are_unique() -> None:
    keys = [(v.kernel, v.arch.name, v.dtype, v.qk_dim, v.v_dim) for v in ALL]
    assert len(set(keys)) == len(ALL) == len({v.name for v in ALL})


def test_every_architecture_has_every_kernel() -> None:
    for arch in table.ARCHS.values():
        assert {v.kernel for v in ALL if v.arch is arch} == set(table.KERNELS)
        for kernel in (*table.TILES, "backward_delta"):
            got = {(v.dtype, v.qk_dim, v.v_dim) for v in ALL if v.arch is arch and v.kernel == kernel}
            assert got == {(d, *dims) for d in table.DTYPES for dims in table.HEAD_DIMS}


def test_tiles_fit_the_order_of_tiles_and_the_blocks() -> None:
    # an entry of q_order is 128 rows: a program takes a divisor of it, in whole blocks of 64 where it merges bounds
    for v in ALL:
        if v.kernel in table.TILES:
            assert 128 % v.block == 0 and v.block % 64 == 0, v.name


@pytest.mark.parametrize("kernel", sorted(table.KERNELS))
def test_every_argument_has_a_type(kernel: str) -> None:
    text = (ROOT / "csrc" / "kernels" / f"{table.KERNELS[kernel]}.py").read_text()
    found = re.search(rf"def {kernel}\((.*?)\):", text, re.S)
    assert found, f"{kernel} is not in the file that the table names"
    arguments = [a.split(":")[0].strip() for a in found[1].split(",") if a.strip()]
    _, params = compiler.signature(kernel, arguments, "bf16")
    kinds = {p["name"]: p["type"] for p in params}
    pointers = [n for n, t in kinds.items() if t == "ptr"]
    assert list(kinds)[: len(pointers)] == pointers, "pointers come first"
    documented = (ROOT / "docs" / "design.md").read_text()
    row = re.search(rf"^\| `{kernel}` \| (.*?) \|", documented, re.M)
    assert row, f"docs/design.md does not list {kernel}"
    names = re.sub(r"\(.*?\)|;", " ", row[1]).split()
    assert names == list(kinds), "docs/design.md and the kernel disagree on the arguments"


def test_narrowing_names_what_is_accepted() -> None:
    assert compiler.names("90a, 80", dict(table.ARCHS), "--archs") == ("90a", "80")
    with pytest.raises(SystemExit, match=r"--archs: '75' is not in the table; accepted: 80, 86, 89, 90a, 100a, 120a"):
        compiler.names("75", dict(table.ARCHS), "--archs")


PTX = """
.visible .entry blocks_rows(
	.param .u64 .ptr .global .align 16 blocks_rows_param_0,
	.param .u32 blocks_rows_param_1,
	.param .f32 blocks_rows_param_2,
	.param .u64 .ptr .global .align 1 blocks_rows_param_3,
	.param .u64 .ptr .global .align 1 blocks_rows_param_4
)
{
"""


def test_parameters_in_the_ptx_are_checked() -> None:
    params = [{"name": n, "type": t} for n, t in (("a", "ptr"), ("b", "i32"), ("c", "f32"))]
    compiler.check_parameters(PTX, params, "k")
    with pytest.raises(SystemExit, match=r"k: parameters in the PTX are \['ptr', 'i32', 'f32', 'ptr', 'ptr'\], the launcher would pass"):
        compiler.check_parameters(PTX, params[:2], "k")


@pytest.mark.parametrize("dtype,dims", [("bf16", "64x64")])
def test_two_builds_give_the_same_bytes(tmp_path: pathlib.Path, dtype: str, dims: str) -> None:
    pytest.importorskip("triton", reason="a build dependency")
    built = []
    for place in ("one", "other/and/deeper"):
        # a copy of the sources elsewhere: no path may reach the cubin
        root = tmp_path / place
        for part in ("kernels", "aot"):
            target = root / "csrc" / part
            target.mkdir(parents=True)
            for f in (ROOT / "csrc" / part).glob("*.py"):
                (target / f.name).write_bytes(f.read_bytes())
        out = root / "out"
        script = (
            "import sys, pathlib; sys.path.insert(0, 'csrc/aot'); import compile as c, variants as t;"
            "todo = [v for v in t.variants(('80', '90a'), ('bf16',), ((64, 64),)) if v.kernel in ('forward', 'blocks_rows')];"
            "sys.exit(c.compile_table(todo, pathlib.Path('out'), None, 2))"
        )
        env = {"PATH": "/usr/bin:/bin", "HOME": str(root), "TRITON_CACHE_DIR": str(root / "cache")}
        subprocess.run([sys.executable, "-c", script], cwd=root, check=True, env=env)
        files = sorted(out.iterdir())
        assert len(files) == 8
        built.append({f.name: f.read_bytes() for f in files})
    assert built[0] == built[1]
    record = json.loads(built[0]["forward_bf16_64x64_sm90a.json"])
    assert record["arch"] == "sm_90a" and record["exact"] and record["params"][0] == {"name": "query", "type": "ptr"}
    assert {len(b) > 1000 for n, b in built[0].items() if n.endswith(".cubin")} == {True}
