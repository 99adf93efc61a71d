"""Compile the table: one kernel for one architecture to NAME.cubin and NAME.json.

docs/internals/kernels.md says what comes of them.

    python csrc/aot/compile.py --out build/cubins [--archs 90a;80] [--dtypes bf16]
        [--head-dims 128x128] [--jobs 2] [--cache DIR]

Needs Triton, no GPU, no driver, no torch. Every variant is compiled in a process of its own,
because LLVM aborts the process on an error. Refuses a parameter layout in the PTX other than the
one the launcher will use, and a variant over its architecture's shared memory. Also writes
kernels.txt, the parameters of every kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import inspect
import io
import json
import multiprocessing
import os
import pathlib
import re
import sys
import time
import traceback
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
KERNEL_DIR = HERE.parent / "kernels"
sys.path[:0] = [str(HERE), str(KERNEL_DIR)]

import checks  # noqa: E402
import table  # noqa: E402
from checks import check_assembly, check_parameters, resources  # noqa: E402

TRITON_VERSION = "3.9.0"
TRITON_DTYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "tf32": "fp32"}


def tensor_map_type(
    dtype: str, tile: tuple[str, int | str, int | str], constants: dict[str, int]
) -> str:
    """Gluon's type of a host tensor map that moves `tile` (table.TENSOR_MAPS)."""
    from triton.experimental.gluon import language as gl

    element, *sizes = tile
    shape = [1, *(constants[n] if isinstance(n, str) else n for n in sizes)]
    if element:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    else:
        half = {"bf16": gl.bfloat16, "f16": gl.float16}[dtype]
        layout = gl.NVMMASharedLayout.get_default_for(shape, half)
    element = element or TRITON_DTYPES[dtype]
    return f"tensordesc<{element}[{','.join(map(str, shape))}],{layout!r}>"


def kernel_function(kernel: str, source: str = "") -> Any:
    module = source or table.KERNELS[kernel]
    return getattr(importlib.import_module(module), table.FUNCTIONS.get(module, kernel))


def argument_names(kernel: str, source: str = "") -> list[str]:
    """As the kernel's source has them; those in upper case are compile-time constants."""
    return list(inspect.signature(kernel_function(kernel, source).fn).parameters)


def parameters(kernel: str, arguments: list[str]) -> list[dict[str, str]]:
    """What the launcher passes, in order: the same for every variant of a kernel."""
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
    """kernels.txt: "forward query:ptr key:ptr ... kv_heads:i32"."""
    params = parameters(kernel, argument_names(kernel))
    return " ".join([kernel, *(f"{p['name']}:{p['type']}" for p in params)]) + "\n"


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
            types[name] = "*" + (table.POINTERS[name] or TRITON_DTYPES[dtype])
        else:
            types[name] = "fp32" if kind == "f32" else kind
    return types


def compile_variant(variant: table.Variant, out: pathlib.Path) -> None:
    """Write `out`/NAME.cubin and NAME.json."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    ptxas = (
        pathlib.Path(triton.__file__).parent
        / "backends/nvidia/bin"
        / table.ASSEMBLERS[variant.assembler][0]
    )
    os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = str(
        ptxas
    )  # Triton would take 13.4 for all of sm_90 and above
    os.environ["TRITON_PTXAS_PATH"] = str(ptxas)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # paths and a third of the size
    fn = kernel_function(variant.kernel, variant.source)
    arguments = argument_names(variant.kernel, variant.source)
    constants: dict[str, Any] = dict(variant.constants)
    params = parameters(variant.kernel, arguments)
    types = triton_types(variant.kernel, arguments, variant.dtype, constants)
    # XLA's buffers are aligned; a view of one never reaches a custom call
    aligned = {
        (i,): [["tt.divisibility", table.MULTIPLES.get(a, 16)]]
        for i, a in enumerate(arguments)
        if types[a][0] == "*" or a in table.MULTIPLES
    }
    constants |= {
        name: None for name in types if name not in constants and types[name] == "constexpr"
    }
    fn._repr = lambda _: variant.kernel  # the symbol: a profile tells kernels of one function apart
    is_gluon = isinstance(fn, GluonJITFunction)
    source = (GluonASTSource if is_gluon else ASTSource)(
        fn, types, constexprs=constants, attrs=aligned
    )
    options = {"num_warps": variant.warps, "num_stages": 2, "enable_fp_fusion": True}
    target = GPUTarget("cuda", variant.arch.cc, 32)
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # to standard output
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # Triton's own cache keeps no log
    with contextlib.redirect_stdout(io.StringIO()) as log:
        binary = triton.compile(source, target=target, options=options)
    meta = binary.metadata
    check_parameters(binary.asm["ptx"], params, variant.name)
    if f".target {variant.arch.name}" not in binary.asm["ptx"]:
        raise SystemExit(f"{variant.name}: the PTX is not for {variant.arch.name}")
    if meta.shared > variant.shared:
        raise SystemExit(
            f"{variant.name}: {meta.shared} bytes of shared memory, "
            f"{variant.arch.name} has {variant.shared}: smaller tile"
        )
    if meta.global_scratch_size or meta.profile_scratch_size or meta.num_ctas != 1:
        raise SystemExit(
            f"{variant.name}: needs scratch memory or a cluster, which the launcher does not give"
        )
    cubin = out / f"{variant.name}.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    used = resources(cubin)
    check_assembly(variant, used["stack"], log.getvalue())
    record = {
        "kernel": variant.kernel,
        "arch": variant.arch.name,
        "cc": variant.arch.cc,
        "exact": variant.arch.exact,
        "dtype": variant.dtype,
        "qk_dim": variant.qk_dim,
        "v_dim": variant.v_dim,
        "symbol": meta.name,
        "threads": 32 * meta.num_warps,
        "shared": meta.shared,
        "block": variant.block,
        "assembler": variant.assembler,
        "driver": variant.driver,
        "params": params,
        # What TMA moves at once, as the compiler cut the tile, and how it swizzles it; in the
        # order of the "tma" parameters.
        "tensor_maps": [
            {"box": list(t["block_size"]), "swizzle": t["swizzle"]}
            for t in meta.tensordesc_meta or ()
        ],
        **used,
    }
    (out / f"{variant.name}.json").write_text(json.dumps(record, indent=1) + "\n")


def worker(variant: table.Variant, out: str) -> None:
    try:
        compile_variant(variant, pathlib.Path(out))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def fingerprint(variant: table.Variant) -> str:
    """Of all that decides what is compiled, and whether it is accepted."""
    table_says = (
        *(variant, table.TENSOR_MAPS.get(variant.kernel), table.POINTERS, table.FLOATS),
        *(table.MULTIPLES, table.ASSEMBLERS[variant.assembler], TRITON_VERSION),
        *(variant.spills, variant.kernel in table.SERIALISED),
    )
    return hashlib.sha256(repr(table_says).encode() + source_bytes(variant.source)).hexdigest()[:24]


def keep(variant: table.Variant, out: pathlib.Path, store: pathlib.Path) -> None:
    """Into the cache, whole or not at all; the JSON last, by which it is found."""
    store.mkdir(parents=True, exist_ok=True)
    for suffix in (".cubin", ".json"):
        name = f"{variant.name}{suffix}"
        part = store / f"{name}.{os.getpid()}"
        part.write_bytes((out / name).read_bytes())
        part.replace(store / name)


def module_file(module: str) -> pathlib.Path:
    return KERNEL_DIR / f"{module.replace('.', '/')}.py"


@functools.cache
def source_bytes(source: str) -> bytes:
    """A kernel's file, those it imports, theirs, and this one."""
    files = [pathlib.Path(__file__), pathlib.Path(checks.__file__), module_file(source)]
    for file in files:  # grows
        for name in re.findall(r"^from ([\w.]+) import", file.read_text(), re.MULTILINE):
            found = module_file(name)
            if found.exists() and found not in files:
                files.append(found)
    return b"\0".join(f.read_bytes() for f in files)


def warm_up(todo: list[table.Variant]) -> None:
    """Do once what every fork would do again: imports, and Triton's hash of its own files.

    The hash alone takes half a second of each compilation, and no cubin depends on it.
    """
    import triton.compiler
    import triton.experimental.gluon._runtime  # noqa: F401
    from triton.runtime.cache import triton_key

    triton_key()
    for source in {variant.source for variant in todo}:
        importlib.import_module(source)


def compile_table(
    todo: list[table.Variant], out: pathlib.Path, cache: pathlib.Path | None, jobs: int
) -> int:
    """Compile in parallel with progress; returns the number of failures."""
    import triton

    if triton.__version__ != TRITON_VERSION:
        raise SystemExit(
            f"Triton {triton.__version__} found, {TRITON_VERSION} needed: "
            "cubins depend on the version"
        )
    warm_up(todo)

    out.mkdir(parents=True, exist_ok=True)
    kept = {f"{v.name}{suffix}" for v in todo for suffix in (".cubin", ".json")}
    for old in out.iterdir():
        if old.suffix in (".cubin", ".json") and old.name not in kept:
            old.unlink()
    context = multiprocessing.get_context("fork")
    running: dict[str, tuple[multiprocessing.process.BaseProcess, table.Variant, float]] = {}
    queue = list(todo)
    done = failed = cached = 0
    while queue or running:
        while queue and len(running) < jobs:
            v = queue.pop(0)
            store = cache / fingerprint(v) if cache else None
            if store and (store / f"{v.name}.json").exists():
                for suffix in (".cubin", ".json"):
                    (out / f"{v.name}{suffix}").write_bytes(
                        (store / f"{v.name}{suffix}").read_bytes()
                    )
                done, cached = done + 1, cached + 1
                continue
            child = context.Process(target=worker, args=(v, str(out)))
            child.start()
            running[v.name] = (child, v, time.monotonic())
        for name, (p, v, began) in list(running.items()):
            if p.exitcode is None:
                continue
            del running[name]
            done += 1
            if p.exitcode != 0:
                failed += 1
                print(f"[{done}/{len(todo)}] FAILED {name} (exit code {p.exitcode})", flush=True)
                continue
            record = json.loads((out / f"{name}.json").read_text())
            print(
                f"[{done}/{len(todo)}] {name}  {time.monotonic() - began:.1f} s"
                f"  {record['registers']} registers"
                f"  {record['shared']} B shared  {record['stack']} B stack",
                flush=True,
            )
            if cache:
                keep(v, out, cache / fingerprint(v))
        time.sleep(0.02)
    # Of every kernel, also one that this build has no variant of: C++ calls them all by name.
    (out / "kernels.txt").write_text("".join(map(kernel_line, table.KERNELS)))
    print(f"{len(todo)} variants, {cached} from the cache, {failed} failed", flush=True)
    return failed


def names(text: str, known: dict[str, object], option: str) -> tuple[str, ...]:
    chosen = tuple(x for x in re.split(r"[;,\s]+", text) if x)
    for x in chosen:
        if x not in known:
            raise SystemExit(f"{option}: {x!r} is not in the table; accepted: {', '.join(known)}")
    return chosen or tuple(known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cache", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--archs", default="", help="architectures, e.g. 90a;80 (default: all)")
    parser.add_argument("--dtypes", default="", help="e.g. bf16;f16 (default: all)")
    parser.add_argument(
        "--head-dims", default="", help="64x64;128x128, or 64 for 64x64 (default: all)"
    )
    args = parser.parse_args()
    archs = names(args.archs.replace("sm_", ""), dict(table.ARCHS), "--archs")
    dtypes = names(args.dtypes, dict.fromkeys(table.DTYPES + table.FLOAT32), "--dtypes")
    known = {f"{a}x{b}": (a, b) for a, b in table.HEAD_DIMS}
    dims = names(
        re.sub(r"(?<![x\d])(\d+)(?![x\d])", r"\1x\1", args.head_dims), dict(known), "--head-dims"
    )
    todo = list(table.variants(archs, dtypes, tuple(known[d] for d in dims)))
    return 1 if compile_table(todo, args.out, args.cache, args.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
