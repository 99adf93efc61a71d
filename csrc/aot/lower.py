"""Lowers a kernel to PTX, and the PTX to cubins for all targets and assemblers that share it.

Triton generates PTX for one architecture and dtype, and assemblers turn it into machine code.
Variants that differ only in these (with equal `Variant.ptx`) share the PTX, because generating it
takes four times as long as assembling it. This file determines what a cubin contains, so its code
is part of the cache's key (compile.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import checks
import table

# "e4m3": pairs of elements, and the bits of a 16-bit query, since only some GPUs support the type
TRITON_DTYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "tf32": "fp32", "e4m3": "i16"}
PTX_ISA = 88  # PTX version of the older assembler, which all others also accept
# The operand types in the instruction descriptor of tcgen05.mma of kind f16: their bits, and the
# values for bfloat16.
OPERAND_TYPES, BFLOAT16_OPERANDS = 7 << 7 | 7 << 10, 1 << 7 | 1 << 10
EXACT_FLAG, FAMILY_FLAG = 0x0A, 0x02  # in the flags of a cubin's ELF header


def tensor_map_type(
    dtype: str, tile: tuple[str, int | str, int | str], constants: dict[str, int]
) -> str:
    """Gluon's type of a host tensor map that copies `tile` (table.TENSOR_MAPS)."""
    from triton.experimental.gluon import language as gl

    element, *sizes = tile
    shape = [1, 1, *(constants[n] if isinstance(n, str) else n for n in sizes)]
    if element and shape[2] > 1:
        layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float32)
    elif element:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    else:
        half = {"bf16": gl.bfloat16, "f16": gl.float16}[dtype]
        layout = gl.NVMMASharedLayout.get_default_for(shape, half)
    element = element or TRITON_DTYPES[dtype]
    dims = ",".join(map(str, shape))
    return f"tensordesc<{element}[{dims}],{layout!r}>"


def kernel_function(kernel: str, source: str = "") -> Any:
    module = source or table.KERNELS[kernel]
    return getattr(importlib.import_module(module), table.function(kernel, module))


def argument_names(kernel: str, source: str = "") -> list[str]:
    """The argument names in the kernel's source; upper case ones are compile-time constants."""
    return list(inspect.signature(kernel_function(kernel, source).fn).parameters)


def parameters(kernel: str, arguments: list[str]) -> list[dict[str, str]]:
    """What the launcher passes, in order. It is the same for all variants of a kernel."""
    params = []
    absent = table.absent_arguments(kernel)
    for name in arguments:
        if name.isupper() or name in absent:
            continue
        if name in table.TENSOR_MAPS.get(kernel, {}):
            kind = "tma"
        elif name in table.POINTERS:
            kind = "ptr"
        else:
            kind = "f32" if name in table.FLOATS else "i32"
        params.append({"name": name, "type": kind})
    return params


def kernel_line(kernel: str) -> str:
    """The kernel's line in kernels.txt: "forward query:ptr key:ptr ... kv_heads:i32"."""
    params = parameters(kernel, argument_names(kernel))
    return " ".join([kernel, *map("{name}:{type}".format_map, params)]) + "\n"


def triton_types(
    kernel: str, arguments: list[str], dtype: str, constants: dict[str, int]
) -> dict[str, str]:
    """Triton's signature of one variant."""
    kinds = {p["name"]: p["type"] for p in parameters(kernel, arguments)}
    types = {}
    for name in arguments:
        kind = kinds.get(name, "constexpr")
        if kind == "tma":
            types[name] = tensor_map_type(dtype, table.TENSOR_MAPS[kernel][name], constants)
        elif kind == "ptr":
            pointers = table.POINTERS | table.POINTERS_OF_KERNEL.get(kernel, {})
            types[name] = "*" + (pointers[name] or TRITON_DTYPES[dtype])
        else:
            types[name] = "fp32" if kind == "f32" else kind
    return types


def without_assembling(*arguments: Any) -> Any:
    """A hook for Triton's compilation stages that replaces the last one by an empty cubin."""
    if not arguments:
        return "", ""  # adds nothing to the key of Triton's cache
    _, stages, *_ = arguments
    stages["cubin"] = lambda ptx, metadata: b""
    return None


def make_ptx(variant: table.Variant) -> tuple[str, Any]:
    """PTX for the variant's `ptx_arch` and `ptx_dtype`, and Triton's metadata."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # it contains paths, and is a third of the size
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    knobs.runtime.add_stages_inspection_hook = without_assembling
    fn = kernel_function(variant.kernel, variant.source)
    arguments = argument_names(variant.kernel, variant.source)
    constants: dict[str, Any] = dict(variant.constants)
    types = triton_types(variant.kernel, arguments, variant.ptx_dtype, constants)
    # XLA's buffers are aligned, and a custom call never receives a view into one
    aligned = {
        (i,): [["tt.divisibility", table.MULTIPLES.get(a, 16)]]
        for i, a in enumerate(arguments)
        if types[a][0] == "*" or (a in table.MULTIPLES and types[a] != "constexpr")
    }
    constants |= {
        name: None for name in types if name not in constants and types[name] == "constexpr"
    }
    fn._repr = lambda _: variant.kernel  # the symbol, which distinguishes kernels in a profile
    is_gluon = isinstance(fn, GluonJITFunction)
    source = (GluonASTSource if is_gluon else ASTSource)(
        fn, types, constexprs=constants, attrs=aligned
    )
    options = {
        "num_warps": variant.warps,
        "num_stages": 2,
        "enable_fp_fusion": True,
        "ptx_version": PTX_ISA,
        "maxnreg": variant.registers or None,
    }
    target = GPUTarget("cuda", variant.ptx_arch.cc, 32)
    with tempfile.TemporaryDirectory() as cache:  # nothing in it would be read again
        os.environ["TRITON_CACHE_DIR"] = cache
        binary = triton.compile(source, target=target, options=options)
    meta = binary.metadata
    if meta.global_scratch_size or meta.profile_scratch_size or meta.num_ctas != 1:
        raise SystemExit(
            f"{variant.name}: needs scratch memory or a cluster, which the launcher does not give"
        )
    return binary.asm["ptx"], meta


# Masks of a bfloat16's fraction, exponent and magnitude, and the complements of the first two. The
# mask of the sign is the same as for float16.
BFLOAT16_FIELDS = (0x007F, 0x7F80, 0x7FFF, 0xFF80, 0x807F)


def tells_dtypes_apart(statement: str) -> bool:
    """Whether a PTX statement may contain a number that depends on the dtype.

    Small numbers are integers and bools: as 16-bit floats, they would be almost 0.
    """
    if "mma" in statement:  # its numbers are flags
        return False
    if mask := re.search(r"\band\.b16\s.*, (-?\d+)$", statement):  # often bools in a word
        return int(mask[1]) & 0xFFFF in BFLOAT16_FIELDS
    numbers = re.findall(r"[\s,](0x\w+|-?\d+)(?=,|$)", statement)
    of_16_bits = re.search(r"\.(b16|bf16|bf16x2)\s", statement)
    return bool(of_16_bits) and any(int(n, 0) not in range(-1, 256) for n in numbers)


def float16_descriptors(ptx: str) -> str:
    """The PTX with float16 instead of bfloat16 in the instruction descriptors of tcgen05.mma, which
    are constants in registers with no other use."""
    operands = r"\[[^]]*\], (?:\[[^]]*\]|%\w+), %\w+, (%r\d+)\b"
    described = re.findall(rf"\btcgen05\.mma\.cta_group::1\.kind::f16 {operands}", ptx)
    uses = collections.Counter(re.findall(r"%r\d+\b", ptx)) if described else {}
    if len(described) != ptx.count("tcgen05.mma"):
        raise SystemExit("a product of tcgen05 is not as those seen: see float16_descriptors")
    for register, products in collections.Counter(described).items():
        loads = re.findall(rf"^\tmov\.b32 \t{register}, (\d+);$", ptx, re.MULTILINE)
        types = int(loads[0]) & OPERAND_TYPES if loads else 0
        if len(loads) != 1 or uses[register] != 1 + products or types != BFLOAT16_OPERANDS:
            raise SystemExit(f"{register} does not describe products of bfloat16 alone")
        now = int(loads[0]) - BFLOAT16_OPERANDS
        ptx = ptx.replace(f"\tmov.b32 \t{register}, {loads[0]};", f"\tmov.b32 \t{register}, {now};")
    return ptx


def retarget(ptx: str, variant: table.Variant) -> str:
    """Converts PTX to the variant's architecture and dtype.

    The architecture is only in the header. Triton's PTX for the two 16-bit dtypes differs only in
    the names of types and in the descriptors of tcgen05.mma (tests/aot/test_lower.py compares), if
    it has no number of such a type. PTX with one is rejected.
    """
    made_for = rf"^\.target {variant.ptx_arch.name}$"
    if not re.search(made_for, ptx, re.MULTILINE):
        raise SystemExit(f"{variant.name}: the PTX is not for {variant.ptx_arch.name}")
    isa = max(PTX_ISA, variant.arch.ptx_isa)
    ptx = re.sub(r"^\.version .*$", f".version {isa // 10}.{isa % 10}", ptx, flags=re.MULTILINE)
    ptx = re.sub(made_for, f".target {variant.arch.name}", ptx, flags=re.MULTILINE)
    if variant.ptx_dtype == variant.dtype:
        return ptx
    apart = next((x.strip() for x in ptx.split(";") if tells_dtypes_apart(x.rstrip())), None)
    if apart:
        raise SystemExit(
            f"{variant.name}: float16 cannot take the PTX of bfloat16, which has a number of 16 "
            f"bits ({apart}): see Variant.ptx_dtype in table.py"
        )
    return float16_descriptors(ptx).replace(variant.ptx_dtype, variant.dtype)


@functools.lru_cache(maxsize=8)
def assemble(ptx: str, arch: str, assembler: str) -> tuple[bytes, str]:
    """The cubin and the assembler's report, with the flags that Triton uses."""
    import triton

    tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    tool = tools / table.ASSEMBLERS[assembler][0]
    with tempfile.TemporaryDirectory() as work:
        source, cubin = pathlib.Path(work, "kernel.ptx"), pathlib.Path(work, "kernel.cubin")
        source.write_text(ptx)
        flags = ["-lineinfo", "-suppress-debug-info", "-v", "--regAllocOptLevel=2"]
        done = subprocess.run(
            [tool, *flags, f"--gpu-name={arch}", source, "-o", cubin],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{tool.name} failed for {arch}: {done.stderr.strip()}")
        return cubin.read_bytes(), done.stdout + done.stderr


def for_family(cubin: bytes, exact: str) -> bytes:
    """Converts a cubin for an exact architecture (`sm_100a`) to one for the family (`sm_100f`).

    The assembler's cubins for both differ in two bytes: a flag in the ELF header, and the name of
    the architecture (tests/aot/test_lower.py compares them).
    """
    flags, name = 48, exact.encode()
    if cubin[flags] != EXACT_FLAG or cubin.count(name) != 1:
        raise SystemExit(f"a cubin for {exact} is not as a family's was seen to differ from it")
    cubin = cubin[:flags] + bytes([FAMILY_FLAG]) + cubin[flags + 1 :]
    return cubin.replace(name, name[:-1] + b"f")


def machine_code(ptx: str, variant: table.Variant) -> tuple[bytes, str]:
    """The variant's cubin and the assembler's report. For a family, it is converted from the exact
    architecture's."""
    exact = dataclasses.replace(variant, arch=table.exact(variant.arch))
    image, log = assemble(retarget(ptx, exact), exact.arch.name, variant.assembler)
    return image if exact == variant else for_family(image, exact.arch.name), log


def write_variant(variant: table.Variant, ptx: str, meta: Any, out: pathlib.Path) -> None:
    """Writes `out`/NAME.cubin and NAME.json, after the checks."""
    params = parameters(variant.kernel, argument_names(variant.kernel, variant.source))
    checks.check_parameters(ptx, params, variant.name)
    if meta.shared > variant.shared:
        raise SystemExit(
            f"{variant.name}: {meta.shared} bytes of shared memory, "
            f"{variant.arch.name} has {variant.shared}: smaller tile"
        )
    image, log = machine_code(ptx, variant)
    cubin = out / f"{variant.name}.cubin"
    cubin.write_bytes(image)
    used = checks.resources(cubin)
    checks.check_assembly(variant, used["stack"], log)
    record = {
        "kernel": variant.kernel,
        "arch": variant.arch.name,
        "cc": variant.arch.cc,
        "arch_specific": variant.arch.arch_specific,
        "dtype": variant.dtype,
        "qk_dim": variant.qk_dim,
        "v_dim": variant.v_dim,
        "symbol": meta.name,
        "threads": 32 * meta.num_warps,
        "shared": variant.arch.asked(meta.shared),
        "block": variant.block,
        "assembler": variant.assembler,
        "driver": variant.driver,
        "sha256": hashlib.sha256(image).hexdigest(),
        "params": params,
        # The box and the swizzle mode that the compiler chose for each tensor map, in the order of
        # the "tma" parameters.
        "tensor_maps": [
            {"box": list(t["block_size"]), "swizzle": t["swizzle"]}
            for t in meta.tensordesc_meta or ()
        ],
        **used,
    }
    (out / f"{variant.name}.json").write_text(json.dumps(record, indent=1) + "\n")
