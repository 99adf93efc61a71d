"""The variant table and its compiler.

Keys are unique, every row can be built, unexpected PTX is refused, and builds are repeatable.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys

import gpu_runs
import pytest
from aot_modules import ALL, arguments_of, compiler, table, tiles
from paths import BENCHMARKS, ROOT


def test_keys_and_names_are_unique() -> None:
    keys = [(v.kernel, v.arch.name, v.driver, v.dtype, v.qk_dim, v.v_dim) for v in ALL]
    assert len(set(keys)) == len(ALL) == len({v.name for v in ALL})


def test_proxies_are_in_no_build_that_does_not_name_them() -> None:
    assert not set(table.PROXIES) & set(table.ARCHS)
    assert not any("@" in v.arch.name or v.arch.name == "sm_90" for v in ALL)
    for name, arch in table.PROXIES.items():
        of, on = (table.ARCHS.get(x) for x in name.split("@"))
        rows = list(table.variants((name,), ("bf16",), ((128, 128),)))
        same = list(table.variants((name.split("@")[0],), ("bf16",), ((128, 128),)))
        assert on is None and (arch.name, arch.cc) == ("sm_90", 90)
        assert (arch.tiles, arch.shared) == (of.tiles, of.shared)
        assert {v.ptx_arch.name for v in rows} == {"sm_80"}
        constants = {(v.kernel, v.dtype): v.constants for v in same}
        assert all(v.constants == constants[v.kernel, v.dtype] for v in rows if v.dtype != "f32")
    # Blocks per multiprocessor: two of 80 KiB fit into 164 KiB; in 228 KiB, two request 113 KiB.
    assert table.PROXIES["80@90"].asked(80 * 1024) == 115_712
    assert table.PROXIES["80@90"].asked(164_864) == table.PROXIES["86@90"].asked(99_328) == 232_448
    assert table.ARCHS["80"].asked(80 * 1024) == 80 * 1024
    assert compiler.names("80@90", table.ARCHS, "--archs", table.PROXIES) == ("80@90",)
    assert "80@90" not in compiler.names("", table.ARCHS, "--archs", table.PROXIES)


@pytest.mark.parametrize("dtypes", [("e4m3",), ("bf16", "e4m3"), ("e4m3", "f16", "bf16")], ids=str)
def test_queries_over_fp8_caches_have_their_merging_kernel(dtypes) -> None:
    """Also if the build is narrowed to FP8: queries are in bfloat16 or float16."""
    rows = list(table.variants(("80", "90a"), dtypes, (*table.FP8_DIMS, (192, 128))))
    assert len({v.name for v in rows}) == len(rows)
    of = [(v.arch.name, v.dtype, (v.qk_dim, v.v_dim)) for v in rows if v.kernel == "decode_combine"]
    assert {*of} >= {*itertools.product(("sm_80", "sm_90a"), table.DTYPES, table.FP8_DIMS)}
    assert (("sm_80", "f16", (192, 128)) in of) == ("f16" in dtypes)


def test_the_kernel_for_few_tiles_is_the_plain_one_but_for_its_tile() -> None:
    """C++ takes it if there are fewer tiles of 192 rows than multiprocessors."""
    ((few, plain),) = tiles.LOW_OCCUPANCY.items()
    assert arguments_of(few) == [name for name in arguments_of(plain) if name != "choice"]
    assert {(v.block, v.qk_dim) for v in ALL if v.kernel == few} == {(128, 64)}
    assert {v.block for v in ALL if v.kernel == plain and v.qk_dim == 64} == {192}


@pytest.mark.parametrize(
    "arch,kernel,row",
    [
        ("80", "forward", r'\("ampere", 112, 112\) of FORWARD\["forward"\] in tiles_sm80.py'),
        ("90a", "forward", r'\("hopper", 112\) of PORTABLE_TILES\["forward"\]'),
        ("86", "backward_dq_fallback", r'\("small", 112\) of FALLBACK_TILES\["backward_dq_fallb'),
        ("100f", "decode", r'\("blackwell", 112\) of DECODE_TILES\["decode"\]'),
    ],
)
def test_a_missing_tile_is_named(arch, kernel, row) -> None:
    with pytest.raises(LookupError, match=row):
        table.tile_of(table.ARCHS[arch], kernel, "bf16", 112, 112)


def test_the_tests_on_gpus_have_all_head_dims() -> None:
    assert gpu_runs.DIMS == table.HEAD_DIMS


def test_tiles_fit_the_lists_of_a_block_mask() -> None:
    """A list entry is a block of 64, and a list belongs to a tile of 128: a step is an entry or
    part of one, a program part of a tile. Kernels for a bias alone read 8 keys at once, and C++
    reads a single number for the rows and keys of a program of dbias."""
    for v in ALL:
        of, of_keys = dict(v.constants), "dkdv" in v.kernel
        outer, inner = ("BLOCK_N", "BLOCK_M") if of_keys else ("BLOCK_M", "BLOCK_N")
        if v.kernel in (*table.BIAS_TILES, *table.FALLBACK_TILES) and "delta" not in v.kernel:
            assert 64 % of[inner] == 0 and 128 % of[outer] == 0, v.name
        if v.kernel in tiles.BLOCK_SPARSE:
            assert of.get("BLOCK_N", 64) == 64, v.name
            assert v.block == (64 if of_keys and v.row == 256 else 128), v.name
        if v.kernel in table.BIAS_ALONE_TILES:
            assert of["BLOCK_N"] % 8 == of["BLOCK_M"] % 8 == of["FLOAT32_PRODUCTS"] == 0, v.name
            assert v.block == of[outer], v.name
        if v.kernel in ("backward_dbias", "backward_dbias_alone"):
            assert of["BLOCK_M"] == of["BLOCK_N"] == v.block, v.name
    rows = [v for v in ALL if v.dtype in table.FLOAT32]
    assert all(dict(v.constants).get("FLOAT32_PRODUCTS", 1) == (v.dtype == "f32") for v in rows)
    rows = [v for v in ALL if v.dtype == table.FP8]
    native = {v.name for v in rows if dict(v.constants)["NATIVE_FP8"]}
    assert native == {v.name for v in rows if v.arch.tiles in table.NATIVE_FP8}


@pytest.mark.parametrize("archs,kernels", [
    (("80", "86"), {"sm_80"}),  # one set of float32 kernels serves both
    (("86",), {"sm_86"}),
])  # fmt: skip
def test_one_cubin_serves_the_architectures_with_its_tile(archs, kernels) -> None:
    assert {v.arch.name for v in table.variants(archs) if v.dtype == "f32"} == kernels
    for arch in table.ARCHS.values():
        served = [v for v in ALL if arch in table.served_by(v.arch)]
        own = {(v.kernel, v.dtype, v.row) for v in served if v.arch is arch}
        for v in served:
            if v.arch is arch or (v.kernel, v.dtype, v.row) not in own:
                assert v.shared <= arch.shared, (v.name, arch)


def test_tiles_fit_the_order_of_tiles_and_the_blocks() -> None:
    # An entry of q_order covers 128 rows. A program takes a divisor of it: whole blocks of 64,
    # with merged bounds, or a part of one. Kernels with tensor maps take whole entries of q_order
    # or q_order_192. For kv_order they may take halves, and dQ in parts takes halves.
    for v in ALL:
        if v.kernel in table.TILES:
            assert v.block in (16, 32, 64, 128), v.name
        if v.kernel in table.TENSOR_MAPS and not v.kernel.startswith("backward_shared"):
            tiles = (64, 128) if "kv_order" in arguments_of(v.kernel) else (128, 192)
            tiles = (64,) if v.kernel in table.PARTS else tiles
            if v.kernel == "forward_sm90_short":  # halves the tiles of q_order itself
                tiles = (64,)
            assert v.block in tiles, v.name
        # The backward's workspace has whole blocks of 64 rows.
        if v.kernel.startswith(("backward_preprocess", "backward_postprocess")):
            assert 64 % v.block == 0, v.name


FEW_ROWS = ("decode", "decode_fp8", "decode_fp8_pages")


def test_tiles_of_decoding_are_those_that_cpp_counts_with() -> None:
    """csrc/launch/decode_shares.cc chooses between two tile heights by the number of rows before it
    looks up a kernel. A block of decode_combine is the largest number of shares."""
    source = (ROOT / "csrc" / "launch" / "decode_shares.cc").read_text()
    few = int(re.search(r"kFewRows = (\d+)", source)[1])
    assert {v.block for v in ALL if v.kernel in FEW_ROWS} == {few}
    assert {v.block for v in ALL if v.kernel == "decode_tall"} == {32, 64}
    most = int(re.search(r"kMostShares = (\d+)", source)[1])
    assert {v.block for v in ALL if v.kernel == "decode_combine"} == {most} == {table.DECODE_SPLITS}


def test_every_kernel_loads_on_the_oldest_driver_of_its_architecture() -> None:
    drivers = {arch.name: arch.driver for arch in table.ARCHS.values()}
    assert {name for name, driver in drivers.items() if driver > 12000} == {
        *("sm_100f", "sm_110", "sm_120f")  # families, and a GPU that CUDA 12 does not support
    }
    of: dict = {}
    for v in ALL:
        of.setdefault((v.kernel, v.arch, v.dtype, v.row), set()).add((v.driver, v.assembler))
    for v in ALL:
        same = of[v.kernel, v.arch, v.dtype, v.row]
        twice = table.assembled_twice(v.kernel, v.row)
        newer = {(13000, "13.4")} if twice else set()
        assert same == {(v.arch.driver, v.arch.assembler)} | newer
        assert v.name.endswith("_cuda13") == (v.driver > v.arch.driver)


@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_failing_variant_stops_no_other_of_its_ptx(monkeypatch, tmp_path, capfd, ctrl_c) -> None:
    """All are tried, the failure is reported, and the output of an earlier build is removed.
    Ctrl-C stops a process."""
    pytest.importorskip("triton", reason="a build dependency")
    family = ("sm_87", "sm_110", "sm_80")  # they share one PTX
    todo = [v for v in ALL if v.kernel == "blocks_rows" and v.arch.name in family]

    def write(variant, ptx, meta, out):
        assert (ptx, meta) == ("ptx", "meta")
        if ctrl_c:
            (out / f"{variant.name}.tried").touch()
            raise KeyboardInterrupt
        if variant is todo[0]:
            raise SystemExit("too large")
        (out / f"{variant.name}.cubin").write_bytes(b"cubin")
        (out / f"{variant.name}.json").write_text('{"registers": 1, "shared": 2, "stack": 3}')

    monkeypatch.setattr(compiler, "warm_up", lambda _: None)  # Triton may interpret here
    monkeypatch.setattr(compiler.lower, "make_ptx", lambda _: ("ptx", "meta"))
    monkeypatch.setattr(compiler.lower, "write_variant", write)
    (tmp_path / f"{todo[0].name}.json").write_text("{}")
    assert compiler.compile_table(todo, tmp_path, None, 1) == (3 if ctrl_c else 1)
    out, err = capfd.readouterr()
    if ctrl_c:
        assert len([*tmp_path.glob("*.tried")]) == 1 and "KeyboardInterrupt" in err
        return
    assert f"FAILED {todo[0].name} (exit code 1)" in out and "SystemExit: too large" in err
    assert "3 variants, 0 from the cache, 1 kernels to PTX, 1 failed" in out
    assert sorted(f.stem for f in tmp_path.glob("*.json")) == sorted(v.name for v in todo[1:])


@pytest.mark.parametrize("asked", ["", "3"])
def test_how_many_kernels_compile_at_once(monkeypatch, asked) -> None:
    jobs = []
    monkeypatch.setattr(compiler, "compile_table", lambda *arguments: jobs.append(arguments[3]))
    monkeypatch.setattr(sys, "argv", ["compile.py", "--out=.", "--archs=80", "--dtypes=bf16"])
    monkeypatch.setenv("PACKAX_JOBS", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    assert compiler.main() == 0 and jobs == [int(asked or 2)]


@pytest.mark.parametrize("kernel", sorted(table.KERNELS))
def test_every_argument_has_a_type(kernel: str) -> None:
    kinds = {p["name"]: p["type"] for p in compiler.lower.parameters(kernel, arguments_of(kernel))}
    maps = [n for n, t in kinds.items() if t == "tma"]
    assert maps == list(table.TENSOR_MAPS.get(kernel, ())), "tensor maps in the order of the table"
    pointers = [n for n, t in kinds.items() if t in ("ptr", "tma")]
    assert list(kinds)[: len(pointers)] == pointers, "pointers come first"


@pytest.mark.parametrize("kernel", sorted({v.kernel for v in ALL if v.source == "sm90.bwd"}))
def test_every_constant_of_the_backward_for_hopper_is_given(kernel: str) -> None:
    taken = sorted(n for n in arguments_of(kernel) if n.isupper())
    for v in ALL:
        if v.kernel == kernel:
            assert sorted(n for n, _ in v.constants) == taken, v.name


def test_narrowing_names_what_is_accepted() -> None:
    assert compiler.names("90a, 80", dict(table.ARCHS), "--archs") == ("90a", "80")
    with pytest.raises(
        SystemExit,
        match=r"--archs: '75' is not in the table; accepted: 80, 86, 87, 90a, 100a, "
        r"100f, 110, 120a, 120f",
    ):
        compiler.names("75", dict(table.ARCHS), "--archs")


def test_parameters_do_not_depend_on_the_variant() -> None:
    """C++ has one struct per kernel; kernels.txt also declares kernels without a variant."""
    pytest.importorskip("triton", reason="a build dependency")
    lines = [compiler.lower.kernel_line(kernel).split() for kernel in table.KERNELS]
    assert [line[0] for line in lines] == list(table.KERNELS)
    assert lines[0][:3] == ["forward", "query:ptr", "key:ptr"]
    (sm90,) = (line for line in lines if line[0] == "forward_sm90")
    portable = [p.replace(":ptr", ":tma") for p in lines[0][1:5]] + lines[0][5:]
    sm90.remove("counter:ptr")
    sm90.remove("choice:i32")
    assert portable.pop() == "row_heads:i32", "a tensor map has that itself"
    assert sm90[1:] == portable, "the handler fills both in from one call"


def test_the_tuner_names_every_argument_of_its_kernels(monkeypatch) -> None:
    """tune.py fills arguments in by name; without one of them, it fails on the GPU."""
    pytest.importorskip("triton", reason="a build dependency")
    monkeypatch.syspath_prepend(BENCHMARKS / "tune")
    kernels = importlib.import_module("tune").KERNELS
    text = (BENCHMARKS / "tune/work.py").read_text()
    lines = (compiler.lower.kernel_line(kernel).split() for kernel in table.KERNELS)
    names = {x.split(":")[0] for kernel, *rest in lines if kernel in kernels for x in rest}
    assert not [name for name in names if not re.search(rf"[\"']{name}[\"']|\b{name}=", text)]


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
    compiler.checks.check_parameters(PTX, params, "k")
    with pytest.raises(
        SystemExit,
        match=r"k: parameters in the PTX are \['ptr', 'i32', 'f32', 'ptr', 'ptr'\], the launcher",
    ):
        compiler.checks.check_parameters(PTX, params[:2], "k")


def test_a_tensor_map_is_nine_parameters() -> None:
    kinds = [".align 64 .b8", *[".u32"] * 4, *[".u64"] * 4, ".u64 .ptr .global .align 16"]
    kinds += [".u64 .ptr .global .align 1"] * 2
    lines = [f"	.param {kind} k_param_{i}" for i, kind in enumerate(kinds)]
    lines[0] += "[128]"
    ptx = ".visible .entry k(\n" + ",\n".join(lines) + "\n)\n"
    params = [{"name": "a", "type": "tma"}, {"name": "b", "type": "ptr"}]
    compiler.checks.check_parameters(ptx, params, "k")
    for wrong in (params[:1], params[::-1], [{"name": "a", "type": "ptr"}, params[1]]):
        with pytest.raises(SystemExit, match="k: parameters in the PTX"):
            compiler.checks.check_parameters(ptx, wrong, "k")
    with pytest.raises(SystemExit, match="k: parameters in the PTX"):  # no CUtensorMap
        compiler.checks.check_parameters(ptx.replace("[128]", "[64]"), params, "k")


REPORT = "ptxas info    : Used 168 registers, used 1 barriers"


def test_spills_and_serialised_products_are_refused() -> None:
    variant = next(v for v in ALL if v.kernel == "forward_sm90" and v.qk_dim == 64)
    most = table.SPILLS["forward_sm90", 64]
    compiler.checks.check_assembly(variant, most, REPORT)
    with pytest.raises(
        SystemExit, match=rf"{most + 8} bytes of local memory a thread, {most} are accepted"
    ):
        compiler.checks.check_assembly(variant, most + 8, REPORT)
    warning = (
        "ptxas info    : (C7512) Potential Performance Loss: "
        "wgmma.mma_async instructions are serialized"
    )
    with pytest.raises(SystemExit, match=r"forward_sm90_.*C7512"):
        compiler.checks.check_assembly(variant, 0, f"{REPORT}\n{warning}\n")
    with pytest.raises(SystemExit, match="the assembler's report is missing"):
        compiler.checks.check_assembly(variant, 0, "")
    other = next(v for v in ALL if v.kernel == "forward" and v.arch.tiles == "ampere")
    compiler.checks.check_assembly(other, 1000, REPORT)  # accepted, and printed by the build


@pytest.mark.parametrize("key", sorted(table.SPILLS, key=str), ids=str)
def test_accepted_spills_belong_to_a_variant(key: tuple) -> None:
    accepted = [v for v in ALL if (v.kernel, v.row) == key[:2]]
    assert any(v.spills == table.SPILLS[key] for v in accepted)
