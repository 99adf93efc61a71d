"""The variant table and its compiler.

Keys are unique, every row can be built, unexpected PTX is refused, and builds are repeatable.
"""

from __future__ import annotations

import itertools
import os
import re
import sys

import pytest
from aot_modules import ALL, DECODE, GENERAL, arguments_of, compiler, table, tiles
from paths import ROOT


def test_keys_and_names_are_unique() -> None:
    keys = [(v.kernel, v.arch.name, v.driver, v.dtype, v.qk_dim, v.v_dim) for v in ALL]
    assert len(set(keys)) == len(ALL) == len({v.name for v in ALL})


def test_every_architecture_has_every_kernel() -> None:
    for arch in table.ARCHS.values():
        own = {*table.SM90_TILES, *table.BIAS_ALONE_TILES} if arch.tiles != "hopper" else set()
        of_sm80 = {*table.SM80_KERNELS, *table.SM80_SOFT_CAP}
        with_sm80 = arch.tiles in {kind for kind, *_ in table.SM80_BACKWARD}
        own = own - of_sm80 if with_sm80 else own | of_sm80
        if arch.tiles == "hopper":
            own.remove("backward_preprocess")
        covered = any(arch in table.served_by(other)[1:] for other in table.ARCHS.values())
        one_tile = ("forward_bias", "backward_dbias", *table.TANGENT_TILES, *table.FP8_DECODE_TILES)
        shared = {*one_tile} if covered else set()
        if arch.tiles == "blackwell":
            shared |= {"decode_tall_fp8", "decode_tall_fp8_pages"}
        assert {v.kernel for v in ALL if v.arch is arch} == set(table.KERNELS) - own - shared
        decoding = (*table.DECODE_TILES, "decode_combine")
        for kernel in (
            *table.TILES,
            *decoding,
            *set(table.SM90_TILES) - own - of_sm80,
            "backward_delta",
        ):
            got = {
                (v.dtype, v.qk_dim, v.v_dim)
                for v in ALL
                if v.arch is arch
                and v.kernel == kernel
                and (arch.tiles == "hopper" or (v.qk_dim, v.v_dim) not in table.SM80_DIMS)
            }
            # a Hopper kernel may leave head dims to the portable kernels
            rows = table.SM90_TILES.get(kernel, {max(dims) for dims in table.HEAD_DIMS})
            wanted = [dims for dims in table.ALL_DIMS if table.row_of(*dims) in rows]
            one_set = arch in table.one_set(tuple(table.ARCHS))
            wide = one_set and kernel in ("decode", "decode_combine")
            wide |= kernel in (*table.FALLBACK_TILES, *table.SM90_TILES)
            wanted = [dims for dims in wanted if wide or not table.only_fallback(dims)]
            of_float32 = {row for row in got if row[0] in table.FLOAT32}
            assert got - of_float32 == {(d, *dims) for d in table.DTYPES for dims in wanted}
            assert not of_float32 or kernel in (*table.FALLBACK_TILES, *decoding)


def test_the_kernels_of_sm80_are_complete() -> None:
    """C++ takes all of them or none. The forward's rows replace those of the portable forward, and
    each of its head dims has a backward."""
    for arch in table.ARCHS.values():
        served = [v for v in ALL if v.arch is arch]
        dims = {row[1:] for row in table.SM80_BACKWARD if row[0] == arch.tiles}
        capped = {dims for dims in dims if (arch.tiles, *dims) in table.SM80_SOFT_CAP_BACKWARD}
        if arch.tiles != "hopper":
            own = dict.fromkeys(table.SM80_KERNELS, dims) | {"backward_sm80_soft_cap": capped}
            for kernel, wanted in own.items():
                got = sorted((v.dtype, (v.qk_dim, v.v_dim)) for v in served if v.kernel == kernel)
                assert got == sorted((d, dims) for d in table.DTYPES for dims in wanted)
        for kernel in ("forward", "forward_sm80_soft_cap"):
            for v in (v for v in served if v.kernel == kernel):
                tile = table.SM80_FORWARD[kernel].get((arch.tiles, v.qk_dim, v.v_dim))
                assert v.source == ("sm80.fwd" if tile else "portable.fwd")
                assert not tile or v.constants[2][1] == tile[0]
        own = {(v.qk_dim, v.v_dim) for v in served if v.kernel == "forward"} & set(table.SM80_DIMS)
        assert own == dims & set(table.SM80_DIMS)


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


def test_float32() -> None:
    """Every GPU has both precisions of every general and decoding kernel (tall tiles only in
    float32), and one set serves all GPUs of a family."""
    rows = [v for v in ALL if v.dtype in table.FLOAT32 and v.kernel not in table.SHARED_TILES]
    assert {v.kernel for v in rows} == {*GENERAL, *DECODE} - set(table.FP8_DECODE_TILES)
    for arch in table.ARCHS.values():
        served = [v for v in rows if arch in table.served_by(v.arch)]
        for kernel in (*table.FALLBACK_TILES, *table.DECODE_TILES):
            got = [(v.dtype, v.qk_dim, v.v_dim) for v in served if v.kernel == kernel]
            dtypes = ("f32",) if kernel == "decode_tall" else table.FLOAT32
            assert sorted(got) == sorted((d, *dims) for d in dtypes for dims in table.FLOAT32_DIMS)
        for kernel in ("backward_delta_fallback", "decode_combine"):
            sums = [(v.dtype, v.qk_dim, v.v_dim) for v in served if v.kernel == kernel]
            assert sorted(sums) == [("f32", *dims) for dims in table.FLOAT32_DIMS]
        assert all(v.shared <= arch.shared for v in served)
    assert all(dict(v.constants).get("FLOAT32_PRODUCTS", 1) == (v.dtype == "f32") for v in rows)
    assert {v.dtype for v in table.variants(("86",), ("tf32",))} == {"tf32", "f32", "any"}
    few = [v.arch.name for v in table.variants(("80", "86")) if v.dtype == "f32"]
    assert few and set(few) == {"sm_80"}


def test_every_gpu_has_kernels_for_fp8_caches() -> None:
    """Every GPU has one kernel for each pair of head dims, for all query dtypes. Only GPUs with a
    native conversion have their own PTX."""
    rows = [v for v in ALL if v.dtype == table.FP8]
    assert {v.kernel for v in rows} == set(table.FP8_DECODE_TILES)
    for arch in table.ARCHS.values():
        served = [v for v in rows if arch in table.served_by(v.arch)]
        for kernel in ("decode_fp8", "decode_fp8_pages"):
            few = sorted((v.qk_dim, v.v_dim) for v in served if v.kernel == kernel)
            assert few == sorted(table.FP8_DIMS)
        assert all(v.shared <= arch.shared for v in served)
        converts = arch.tiles in table.NATIVE_FP8
        ptx = {v.ptx_arch.name for v in served}
        assert ptx == ({table.exact(arch).name} if converts else {"sm_80"})
        assert {dict(v.constants)["NATIVE_FP8"] for v in served} == {int(converts)}
    others = (*table.DTYPES, *table.FLOAT32)
    assert not [v for v in table.variants(dtypes=others) if v.dtype == table.FP8]
    few = [v for v in table.variants(("80",), ("e4m3",)) if v.dtype == table.FP8]
    tall = [v for v in few if v.kernel in ("decode_tall_fp8", "decode_tall_fp8_pages")]
    assert len(few) - len(tall) == 2 * len(table.FP8_DIMS)  # for dense and paged caches
    assert {v.qk_dim for v in tall} == {64, 128} and len(tall) == 4


@pytest.mark.parametrize("dtypes", [("e4m3",), ("bf16", "e4m3"), ("e4m3", "f16", "bf16")], ids=str)
def test_queries_over_fp8_caches_have_their_merging_kernel(dtypes) -> None:
    """Also if the build is narrowed to FP8: queries are in bfloat16 or float16."""
    rows = list(table.variants(("80", "90a"), dtypes, (*table.FP8_DIMS, (192, 128))))
    assert len({v.name for v in rows}) == len(rows)
    of = [(v.arch.name, v.dtype, (v.qk_dim, v.v_dim)) for v in rows if v.kernel == "decode_combine"]
    assert {*of} >= {*itertools.product(("sm_80", "sm_90a"), table.DTYPES, table.FP8_DIMS)}
    assert (("sm_80", "f16", (192, 128)) in of) == ("f16" in dtypes)


def of_arch(variants: list, arch: table.Arch) -> list:
    """The variant that C++ takes on an architecture for each kernel, dtype and head dims."""
    found: dict = {}
    for v in variants:
        key = v.kernel, v.dtype, v.qk_dim, v.v_dim
        if arch in table.served_by(v.arch) and (key not in found or v.arch is arch):
            found[key] = v
    return list(found.values())


def test_a_cubin_serves_the_architectures_with_its_tile() -> None:
    for arch in table.ARCHS.values():
        for v in of_arch(ALL, arch):
            assert v.shared <= arch.shared, (v.name, arch)
    few = [v.name for v in ALL if "backward_dkdv_bias_bf16" in v.name and "_sm8" in v.name]
    assert few == [
        *("backward_dkdv_bias_bf16_64x64_sm80", "backward_dkdv_bias_bf16_64x64_sm87"),
        *("backward_dkdv_bias_bf16_128x128_sm80", "backward_dkdv_bias_bf16_128x128_sm87"),
        *(f"backward_dkdv_bias_bf16_256x256_sm{cc}" for cc in (80, 86, 87)),
    ]


def test_head_dims_of_fallback_kernels_alone() -> None:
    """Every GPU has one set of these kernels, which fits its shared memory."""
    wide = [dims for dims in table.HEAD_DIMS if table.only_fallback(dims)]
    assert wide == [(512, 512)]
    kernels = (*GENERAL, "decode", "decode_combine")
    for arch in table.ARCHS.values():
        served = of_arch([v for v in ALL if v.qk_dim == 512], arch)
        served = [v for v in served if v.kernel not in table.SM90_TILES]
        got = sorted((v.kernel, v.dtype) for v in served)
        assert got == sorted((kernel, dtype) for kernel in kernels for dtype in table.DTYPES)
        assert all(v.shared <= arch.shared for v in served)
        if arch.tiles == "blackwell":  # without tcgen05, so with the PTX of other GPUs
            assert {v.ptx_arch.name for v in served} == {"sm_80"}
    few = [v.arch.name for v in table.variants(("86",), ("f16",), ((512, 512),)) if v.qk_dim]
    assert few == ["sm_86"] * len(kernels)


def test_with_a_bias() -> None:
    """Every GPU has all four kernels for each dtype and head dims, up to 256 in 16 bits. A dbias
    program covers as many rows as keys, because C++ reads a single number for both."""
    widest = {dtype: max(dims) for dtype, dims in table.BIAS_DIMS.items()}
    assert widest == dict.fromkeys(table.DTYPES, (256, 256)) | dict.fromkeys(
        table.FLOAT32, (128, 128)
    )
    rows = [v for v in ALL if v.kernel in table.BIAS_TILES]
    for arch in table.ARCHS.values():
        served = of_arch(rows, arch)
        got = sorted((v.kernel, v.dtype, v.qk_dim, v.v_dim) for v in served)
        assert got == sorted(
            (kernel, dtype, *dims)
            for kernel in table.BIAS_TILES
            for dtype, all_dims in table.BIAS_DIMS.items()
            for dims in all_dims
        )
        assert all(v.shared <= arch.shared for v in served)
    for v in rows:
        of = dict(v.constants)
        assert v.kernel != "backward_dbias" or of["BLOCK_M"] == of["BLOCK_N"] == v.block, v.name
        # The lists of a block mask count tiles of 128 and blocks of 64.
        of_keys = v.kernel == "backward_dkdv_bias"
        tile, step = ("BLOCK_N", "BLOCK_M") if of_keys else ("BLOCK_M", "BLOCK_N")
        assert of[tile] <= 128 and of[step] <= 64, v.name
    # Above head dim 128, few GPUs' PTX serves all, and builds without head dim 256 have none of it.
    wide = {(v.kernel, v.arch.name, v.ptx_arch.name) for v in rows if v.qk_dim == 256}
    assert len({(kernel, ptx) for kernel, _, ptx in wide}) == 11
    few = table.variants(("80", "90a"), ("bf16",), ((128, 128),))
    assert not [v for v in few if v.qk_dim == 256]


def test_with_a_bias_alone() -> None:
    rows = [v for v in ALL if v.kernel in table.BIAS_ALONE_TILES]
    got = sorted((v.kernel, v.dtype, v.qk_dim, v.v_dim) for v in rows)
    assert got == sorted(
        (kernel, dtype, dim, dim)
        for kernel in table.BIAS_ALONE_TILES
        for dtype in table.DTYPES
        for dim in (64, 128, 256)
    )
    for v in rows:
        of = dict(v.constants)
        assert v.arch is table.ARCHS["90a"] and of["FLOAT32_PRODUCTS"] == 0
        of_keys = v.kernel.startswith("backward_dkdv")
        assert v.block == of["BLOCK_N" if of_keys else "BLOCK_M"], v.name
        assert v.kernel != "backward_dbias_alone" or of["BLOCK_M"] == of["BLOCK_N"], v.name
        assert of["BLOCK_N"] % 8 == 0 and of["BLOCK_M"] % 8 == 0, v.name  # keys are read by 8


def test_a_head_dim_without_an_sm90_kernel_has_the_portable_ones(monkeypatch):
    few = {
        kernel: {dim: tile for dim, tile in rows.items() if dim == 64}
        for kernel, rows in table.SM90_TILES.items()
    }
    monkeypatch.setattr(table, "SM90_TILES", few)
    left = list(table.variants())

    def of_sm90(v: table.Variant) -> bool:
        return v.kernel in few and v.arch.tiles == "hopper"

    assert {v.row for v in left if of_sm90(v)} == {64}
    assert [v for v in left if not of_sm90(v)] == [v for v in ALL if not of_sm90(v)]


def test_the_backward_kernels_of_sm90_are_complete() -> None:
    """C++ takes all kernels of a backward or none; with backward_sm90 the workspace is large."""
    names = ("preprocess", "sm90", "postprocess", "dkdv_sm90", "dq_sm90")
    prepare, one, finish, keys, rows = (set(table.SM90_TILES[f"backward_{k}"]) for k in names)
    parts = {kernel: set(table.SM90_TILES[kernel]) for kernel in table.PARTS}
    assert one == finish and keys == rows and prepare == one | keys | {512}
    assert list(parts.values()) == [{512}, {512}] and 512 in table.SM90_TILES["forward_sm90"]
    names = ("forward", "backward", "backward_dkdv", "backward_dq")
    forward, one, keys, rows = (set(table.SM90_TILES[f"{k}_sm90_soft_cap"]) for k in names)
    assert one < finish and forward == keys == rows and prepare > one | keys
    forward, keys, rows = (
        set(table.SM90_TILES[f"{k}_sm90_block_lists"])
        for k in ("forward", "backward_dkdv", "backward_dq")
    )
    assert forward == keys == rows < prepare
    forward, one = (set(table.SM90_TILES[f"{k}_sm90_alibi"]) for k in ("forward", "backward"))
    assert forward == one < finish


def test_kernels_with_a_soft_cap_take_one_number_more() -> None:
    """Otherwise their arguments are those of the kernels without: C++ fills in both from one
    call."""
    for capped, plain in tiles.SOFT_CAP.items():
        assert capped == f"{plain}_soft_cap" and table.KERNELS[capped] == table.KERNELS[plain]
        for source in {v.source for v in ALL if v.kernel == capped}:
            names = arguments_of(capped, source)
            assert names.pop(names.index("soft_cap")) == "soft_cap"
            assert names == arguments_of(plain, source)


def test_kernels_with_a_bias_take_its_slopes() -> None:
    """Otherwise their arguments are those of the kernels without a bias."""
    for biased, plain in tiles.ALIBI.items():
        assert biased == f"{plain}_alibi" and table.KERNELS[biased] == table.KERNELS[plain]
        names = arguments_of(biased)
        assert names.pop(names.index("scale") - 1) == "slopes"
        assert names == arguments_of(plain)


def test_the_kernel_for_few_tiles_is_the_plain_one_but_for_its_tile() -> None:
    """C++ fills in both alike, and takes this one if there are fewer tiles of 192 rows than
    multiprocessors."""
    ((few, plain),) = tiles.LOW_OCCUPANCY.items()
    assert table.KERNELS[few] == table.KERNELS[plain] and arguments_of(few) == arguments_of(plain)
    rows = {v.block: v.qk_dim for v in ALL if v.kernel == few}
    assert rows == {128: 64}
    assert {v.block for v in ALL if v.kernel == plain and v.qk_dim == 64} == {192}


def test_kernels_with_a_block_mask_take_its_lists_and_sizes() -> None:
    """Otherwise their arguments are those of the kernels without. A step is one list entry of 64,
    and a list belongs to a tile of 128."""
    numbers = ["block_mask_batch", "block_mask_heads", "q_block", "kv_block"]
    for mapped, plain in tiles.BLOCK_SPARSE.items():
        assert mapped == f"{plain}_block_lists" and table.KERNELS[mapped] == table.KERNELS[plain]
        lists = "kv_block_lists" if "dkdv" in mapped else "q_block_lists"
        names = [n for n in arguments_of(mapped) if not n.isupper()]
        assert names[names.index("scale") - 2 : names.index("scale")] == ["block_mask", lists]
        at = names.index("sink_batch" if "sink_batch" in names else "mask_batch") + 1
        assert names[at : at + 4] == numbers
        left = [n for n in names if n not in ("block_mask", lists, *numbers)]
        assert left == [n for n in arguments_of(plain) if not n.isupper()]
        for v in ALL:
            if v.kernel == mapped:
                assert dict(v.constants).get("BLOCK_N", 64) == 64, v.name
                # half of a key tile uses the lists of the whole tile
                assert v.block == (64 if "dkdv" in mapped and v.row == 256 else 128), v.name


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
        if v.kernel in ("backward_preprocess", "backward_postprocess"):
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
    for v in ALL:
        same = {
            (w.driver, w.assembler)
            for w in ALL
            if (w.kernel, w.arch, w.dtype, w.row) == (v.kernel, v.arch, v.dtype, v.row)
        }
        twice = table.assembled_twice(v.kernel, v.row)
        newer = {(13000, "13.4")} if twice else set()
        assert same == {(v.arch.driver, v.arch.assembler)} | newer
        assert v.name.endswith("_cuda13") == (v.driver > v.arch.driver)


def test_a_failing_variant_stops_no_other_of_its_ptx(monkeypatch, tmp_path, capfd) -> None:
    """All are tried, the failure is reported, and the output of an earlier build is removed."""
    pytest.importorskip("triton", reason="a build dependency")
    family = ("sm_87", "sm_110", "sm_80")  # they share one PTX
    todo = [v for v in ALL if v.kernel == "blocks_rows" and v.arch.name in family]

    def write(variant, ptx, meta, out):
        assert (ptx, meta) == ("ptx", "meta")
        if variant is todo[0]:
            raise SystemExit("too large")
        (out / f"{variant.name}.cubin").write_bytes(b"cubin")
        (out / f"{variant.name}.json").write_text('{"registers": 1, "shared": 2, "stack": 3}')

    monkeypatch.setattr(compiler, "warm_up", lambda _: None)  # Triton may interpret here
    monkeypatch.setattr(compiler.lower, "make_ptx", lambda _: ("ptx", "meta"))
    monkeypatch.setattr(compiler.lower, "write_variant", write)
    (tmp_path / f"{todo[0].name}.json").write_text("{}")
    assert compiler.compile_table(todo, tmp_path, None, 2) == 1
    out, err = capfd.readouterr()
    assert f"FAILED {todo[0].name} (exit code 1)" in out and "SystemExit: too large" in err
    assert "3 variants, 0 from the cache, 1 kernels to PTX, 1 failed" in out
    assert sorted(f.stem for f in tmp_path.glob("*.json")) == sorted(v.name for v in todo[1:])


def test_ctrl_c_stops_a_process(monkeypatch, tmp_path, capfd) -> None:
    pytest.importorskip("triton", reason="a build dependency")
    todo = [v for v in ALL if v.kernel == "blocks_rows" and v.arch.name in ("sm_87", "sm_80")]

    def interrupted(variant, ptx, meta, out):
        (out / variant.name).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "warm_up", lambda _: None)
    monkeypatch.setattr(compiler.lower, "make_ptx", lambda _: ("ptx", "meta"))
    monkeypatch.setattr(compiler.lower, "write_variant", interrupted)
    assert compiler.compile_table(todo, tmp_path, None, 1) == len(todo) == 2
    assert len([*tmp_path.glob("blocks_rows*")]) == 1
    assert "KeyboardInterrupt" in capfd.readouterr().err


@pytest.mark.parametrize("asked", ["", "3"])
def test_how_many_kernels_compile_at_once(monkeypatch, asked) -> None:
    jobs = []
    monkeypatch.setattr(compiler, "compile_table", lambda *arguments: jobs.append(arguments[3]))
    monkeypatch.setattr(sys, "argv", ["compile.py", "--out=.", "--archs=80", "--dtypes=bf16"])
    monkeypatch.setenv("PACKAX_JOBS", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    assert compiler.main() == 0 and jobs == [int(asked or 2)]


@pytest.mark.parametrize(
    "kernel", ["forward_fallback", "backward_dkdv_fallback", "backward_dq_fallback"]
)
def test_steps_of_fallback_kernels_fit_the_lists_of_a_map(kernel: str) -> None:
    """List entries are blocks of 64: a step is an entry or part of one, a program part of a tile of
    128."""
    inner, outer = ("BLOCK_M", "BLOCK_N") if "dkdv" in kernel else ("BLOCK_N", "BLOCK_M")
    for v in ALL:
        if v.kernel == kernel:
            sizes = dict(v.constants)
            assert 64 % sizes[inner] == 0 and 128 % sizes[outer] == 0, v.name


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
    assert portable.pop() == "row_heads:i32", "a tensor map has that itself"
    assert sm90[1:] == portable, "the handler fills both in from one call"


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
