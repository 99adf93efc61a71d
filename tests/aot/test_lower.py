"""Sharing of PTX and cubins between variants: it equals what Triton and ptxas make for each one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from aot_modules import ALL, compiler, table, tiles
from paths import ROOT
from tiers import some

# Runs in a separate process: LLVM aborts the process on an error, and other tests import Triton
# with its interpreter, which replaces the compiler.
COMPARE = """
import sys
sys.path[:0] = ["csrc/aot", "csrc/kernels"]
import lower, table
for variant in [v for v in table.variants() if v.name in sys.argv[1:]]:
    shared, _ = lower.make_ptx(variant)
    renamed = lower.retarget(shared, variant)
    with_property, table.Variant.ptx_dtype = table.Variant.ptx_dtype, variant.dtype
    own, _ = lower.make_ptx(variant)
    assert ".bf16" in shared and ".bf16" not in own, f"{variant.name}: the dtypes are not there"
    assert renamed == lower.retarget(own, variant), f"{variant.name} differs"
    table.Variant.ptx_dtype = with_property
    tcgen05 = variant.ptx_arch.name == "sm_100a"
    assert ("tcgen05.mma" in own) == tcgen05, f"{variant.name}: whose PTX?"
    print("equal", variant.name)
"""


def equal(program: str, names: list[str]) -> None:
    pytest.importorskip("triton", reason="a build dependency")
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["equal"] * len(names) + names)


@pytest.mark.exhaustive
def test_float16_takes_the_ptx_of_bfloat16() -> None:
    own = {v.ptx for v in ALL if v.ptx_dtype == "f16"}
    assert len(own) < sum(v.dtype == "f16" for v in ALL) * 0.3
    names = (
        "forward_f16_64x64_sm80",
        "backward_dq_sm90_f16_64x64_sm90a",
        "forward_f16_64x64_sm100a",
    )
    equal(COMPARE, list(names))


@pytest.mark.parametrize(
    "line,apart",
    [
        ("selp.b16 %rs7, 32704, %rs6, %p22;", True),
        ("selp.b16 %rs7, 1, 0, %p22;", False),
        ("selp.b16 %rs7, -1, 0, %p22;", False),
        ("shl.b16 %rs2, %rs1, 2;", False),
        ("and.b16 \t%rs5, %rs4, 8192;", False),  # one of several bools packed into a word
        ("and.b16 \t%rs5, %rs4, 3;", False),  # two of these bools
        ("and.b16 \t%rs5, %rs4, 255;", False),  # one of several bytes
        ("and.b16 \t%rs5, %rs4, 127;", True),  # the fraction of a bfloat16
        ("and.b16 \t%rs5, %rs4, -128;", True),  # sign and exponent
        ("and.b16 \t%rs5, %rs4, -32768;", False),  # the sign
        ("and.b16 \t%rs5, %rs4, 32767;", True),
        ("mov.b16 %rs1, 0x3F80;", True),
        ("fma.rn.bf16x2 %r1, %r2, %r3, 0x80008000;", True),
        ("mov.b16 %rs1, 0x0000;", False),
        ("st.shared.b16 [%r1+256], %rs7;", False),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0, 1, 1;", False),
        ("add.s32 %r1, %r2, 256;", False),
    ],
)
def test_numbers_of_a_dtype_are_not_shared(line: str, apart: bool) -> None:
    variant = next(v for v in ALL if v.name == "forward_f16_64x64_sm80")
    ptx = f".version 8.8\n.target sm_80\n\t{line}\n"
    if apart:
        with pytest.raises(SystemExit, match="float16 cannot take the PTX of bfloat16"):
            compiler.lower.retarget(ptx, variant)
    else:
        assert compiler.lower.retarget(ptx, variant) == ptx.replace("bf16", "f16")


PRODUCTS = """.version 8.8
.target sm_100a
	mov.b32 	%r7, 135267472;
	@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r2 + 0 ], %rd1, %rd2, %r7, %p2;
	@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r2 + 0 ], [ %r3 + 0 ], %rd2, %r7, %p2;
"""


def test_descriptors_of_tcgen05_become_those_of_float16() -> None:
    variant = next(v for v in ALL if v.name == "forward_f16_64x64_sm100a")
    made = compiler.lower.retarget(PRODUCTS, variant)
    # Triton's PTX for float16 has this descriptor.
    assert made == PRODUCTS.replace("135267472", "135266320")


@pytest.mark.parametrize(
    "old,new,match",
    [
        ("135267472", "135266320", "does not describe products of bfloat16"),  # for float16
        ("135267472", "135268624", "does not describe products of bfloat16"),  # for another type
        ("mov.b32", "add.s32", "does not describe products of bfloat16"),
        (".target sm_100a\n", ".target sm_100a\n\tadd.s32 %r8, %r7, 1;\n", "does not describe"),
        ("kind::f16", "kind::tf32", "is not as those seen"),
        ("%r7, %p2", "135267472, %p2", "is not as those seen"),
    ],
)
def test_descriptors_that_are_not_as_seen_are_refused(old: str, new: str, match: str) -> None:
    variant = next(v for v in ALL if v.name == "forward_f16_64x64_sm100a")
    with pytest.raises(SystemExit, match=match):
        compiler.lower.retarget(PRODUCTS.replace(old, new), variant)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_every_kernel_of_float16_takes_the_ptx_of_bfloat16(arch: str) -> None:
    of_kernel = {}
    for v in ALL:  # one head dim per source; portable kernels only for sm_80
        shares = v.ptx_arch is v.arch and v.dtype == "f16" and v.ptx_dtype == "bf16"
        if shares and v.arch.name == arch and v.source.startswith("sm90") == (arch == "sm_90a"):
            of_kernel[v.kernel, v.source] = v.name
    equal(COMPARE, list(of_kernel.values()))


def test_variants_that_differ_in_target_or_assembler_share_ptx() -> None:
    """Generating PTX dominates a build, so new targets and assemblers should only cost assembly."""
    own = [name for name, arch in table.ARCHS.items() if not arch.ptx]
    assert all(not table.ARCHS[arch.ptx].ptx for arch in table.ARCHS.values() if arch.ptx)
    few = {v.ptx for v in table.variants((*own, "86", "120a"))}  # 86: smaller tiles; 120a: f32
    assert {v.ptx for v in ALL} == few and len(few) < len(ALL) * 0.26
    twice = [v for v in ALL if v.assembler != v.arch.assembler]
    alone = {v.ptx for v in ALL if v.assembler == v.arch.assembler}
    shared = [v for v in twice if v.ptx in alone]
    assert shared and {v.kernel for v in twice if v not in shared} <= {
        kernel for kernel, _ in tiles.UNDER_12_9
    }


def test_kernels_without_tcgen05_share_the_ptx_of_older_gpus() -> None:
    """10.x uses tcgen05 for tiles of 64 rows or more; smaller tiles use the instructions of 8.0."""
    of = {v.name: v.ptx_arch.name for v in ALL if v.arch.name in ("sm_100a", "sm_100f")}
    for stem, made_for in {
        "forward_bf16_128x128": "sm_100a",
        "backward_dkdv_bf16_256x256": "sm_100a",  # 64 keys, 32 rows
        "decode_tall_f16_64x64": "sm_100a",
        "forward_fallback_tf32_64x64": "sm_100a",
        "forward_fallback_tf32_256x256": "sm_80",  # 32 rows
        "forward_fallback_f32_64x64": "sm_100a",  # would spill
        "decode_bf16_128x128": "sm_80",
        "decode_combine_bf16_64x64": "sm_80",
        "backward_delta_f16_64x64": "sm_80",
        "documents_rows": "sm_80",
    }.items():
        assert {of[f"{stem}_sm100a"], of[f"{stem}_sm100f"]} == {made_for}, stem


def retargeted(text: str, **fields) -> str:
    arch = table.Arch("sm_100f", 100, False, 0, "blackwell", **{"ptx": "100a", **fields})
    return compiler.lower.retarget(text, table.Variant("forward", arch, "bf16", 64, 64, (), 128, 4))


def test_ptx_for_another_target_differs_in_its_header() -> None:
    ptx = ".version 8.8\n.target sm_100a\n.address_size 64\n// .target sm_100a\n"
    assert retargeted(ptx, ptx_isa=90) == (
        ".version 9.0\n.target sm_100f\n.address_size 64\n// .target sm_100a\n"
    )
    assert retargeted(ptx) == ptx.replace(".target sm_100a", ".target sm_100f", 1)
    with pytest.raises(SystemExit, match="forward_bf16_64x64_sm100f: the PTX is not for sm_80"):
        retargeted(ptx, ptx="80")


# Compares ptxas's cubins for a family and for 8.9 with the ones that are used in their place.
ASSEMBLE = """
import sys
sys.path[:0] = ["csrc/aot", "csrc/kernels"]
import dataclasses
import compare_sass, lower, table
for variant in [v for v in table.variants() if v.name in sys.argv[1:]]:
    ptx, _ = lower.make_ptx(variant)
    made, _ = lower.machine_code(ptx, variant)
    if variant.arch.name == "sm_86":
        ada = dataclasses.replace(variant.arch, name="sm_89", cc=89)
        own = dataclasses.replace(variant, arch=ada)
        parts = [compare_sass.sections(x) for x in (made, lower.machine_code(ptx, own)[0])]
        made, image = ({n: x for n, x in part.items() if n.startswith(".text")} for part in parts)
    else:
        own = lower.retarget(ptx, variant)
        image, _ = lower.assemble(own, variant.arch.name, variant.assembler)
    assert made and made == image, f"{variant.name} differs"
    print("equal", variant.name)
"""


@pytest.mark.parametrize(
    "name", some(["blocks_rows_sm100f", "blocks_keys_sm120f", "blocks_rows_sm86"], 0, 2)
)
def test_cubins_that_stand_for_others(name: str) -> None:
    """A family's cubin, by changing two bytes, and 8.6's code for 8.9 equal the assembler's."""
    equal(ASSEMBLE, [name])


def test_a_cubin_that_a_family_does_not_differ_from_so_is_refused() -> None:
    cubin = bytes(48) + b"\x0a" + bytes(20) + b"sm_100a" + bytes(5)
    made = compiler.lower.for_family(cubin, "sm_100a")
    assert made == cubin.replace(b"\x0a", b"\x02").replace(b"100a", b"100f")
    for other in (cubin.replace(b"\x0a", b"\x0b"), cubin + b"sm_100a", cubin.replace(b"1", b"2")):
        with pytest.raises(SystemExit, match="is not as a family's was seen to differ"):
            compiler.lower.for_family(other, "sm_100a")
