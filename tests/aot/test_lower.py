"""What variants share is what Triton and the assembler make for each of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from aot_modules import ALL, compiler
from paths import ROOT

# In a process of its own: LLVM aborts the process on an error, and Triton's interpreter, which
# other tests switch on, replaces what compiles.
COMPARE = """
import sys
sys.path[:0] = ["csrc/aot", "csrc/kernels"]
import lower, table
for variant in [v for v in table.variants() if v.name in sys.argv[1:]]:
    shared, _ = lower.make_ptx(variant)
    with_property, table.Variant.ptx_dtype = table.Variant.ptx_dtype, variant.dtype
    own, _ = lower.make_ptx(variant)
    table.Variant.ptx_dtype = with_property
    assert ".bf16" in shared and ".bf16" not in own, f"{variant.name}: the dtypes are not there"
    shared, own = (lower.retarget(ptx, variant) for ptx in (shared, own))
    assert shared == own, f"{variant.name} differs"
    print("equal", variant.name)
"""


def equal(program: str, names: list[str]) -> None:
    pytest.importorskip("triton", reason="a build dependency")
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["equal"] * len(names) + names)


def test_float16_takes_the_ptx_of_bfloat16() -> None:
    own = {v.ptx for v in ALL if v.ptx_dtype == "f16"}
    assert len(own) < sum(v.dtype == "f16" for v in ALL) * 0.3
    names = (
        "forward_f16_64x64_sm80",
        "backward_dq_sm90_f16_64x64_sm90a",
        "decode_f16_64x64_sm120a",
    )
    equal(COMPARE, list(names))


@pytest.mark.parametrize(
    "line,apart",
    [
        ("selp.b16 %rs7, 32704, %rs6, %p22;", True),
        ("selp.b16 %rs7, 1, 0, %p22;", False),
        ("selp.b16 %rs7, -1, 0, %p22;", False),
        ("shl.b16 %rs2, %rs1, 2;", False),
        ("mov.b16 %rs1, 0x3F80;", True),
        ("fma.rn.bf16x2 %r1, %r2, %r3, 0x80008000;", True),
        ("mov.b16 %rs1, 0x0000;", False),
        ("st.shared.b16 [%r1+256], %rs7;", False),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0, 1, 1;", False),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;", True),
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_every_kernel_of_float16_takes_the_ptx_of_bfloat16(arch: str) -> None:
    of_kernel = {}
    for v in ALL:  # one head dim of every source; portable kernels for sm_80 alone
        shares = v.arch.name == arch and v.dtype == "f16" and v.ptx_dtype == "bf16"
        if shares and v.source.startswith("sm90") == (arch == "sm_90a"):
            of_kernel[v.kernel, v.source] = v.name
    equal(COMPARE, list(of_kernel.values()))


# ptxas's own cubins of a family and of 8.9, beside those that stand for them.
ASSEMBLE = """
import sys
sys.path[:0] = ["csrc/aot", "csrc/kernels"]
import dataclasses
import compare_sass, lower, table
for variant in [v for v in table.variants() if v.name in sys.argv[1:]]:
    ptx, _ = lower.make_ptx(variant)
    made, _ = lower.machine_code(ptx, variant)
    if variant.arch.name == "sm_86":
        ada = dataclasses.replace(variant.arch, name="sm_89", cc=89, ptx="86")
        own = dataclasses.replace(variant, arch=ada)
        parts = [compare_sass.sections(x) for x in (made, lower.machine_code(ptx, own)[0])]
        made, image = ({n: x for n, x in part.items() if n.startswith(".text")} for part in parts)
    else:
        own = lower.retarget(ptx, variant)
        image, _ = lower.assemble(own, variant.arch.name, variant.assembler)
    assert made and made == image, f"{variant.name} differs"
    print("equal", variant.name)
"""


@pytest.mark.parametrize("name", ["blocks_rows_sm100f", "blocks_keys_sm120f", "blocks_rows_sm86"])
def test_cubins_that_stand_for_others(name: str) -> None:
    """A family's two bytes, and 8.6's machine code for 8.9, as the assembler makes them."""
    equal(ASSEMBLE, [name])


def test_a_cubin_that_a_family_does_not_differ_from_so_is_refused() -> None:
    cubin = bytes(48) + b"\x0a" + bytes(20) + b"sm_100a" + bytes(5)
    made = compiler.lower.for_family(cubin, "sm_100a")
    assert made == cubin.replace(b"\x0a", b"\x02").replace(b"100a", b"100f")
    for other in (cubin.replace(b"\x0a", b"\x0b"), cubin + b"sm_100a", cubin.replace(b"1", b"2")):
        with pytest.raises(SystemExit, match="is not as a family's was seen to differ"):
            compiler.lower.for_family(other, "sm_100a")
