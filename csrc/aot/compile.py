"""Compile the table: every variant to NAME.cubin and NAME.json.

docs/internals/kernels.md explains how they are used.

    python csrc/aot/compile.py --out build/cubins [--archs 90a;80] [--dtypes bf16]
        [--head-dims 128x128] [--assemblers 12.9] [--jobs 2] [--cache DIR]

Needs Triton, but no GPU, driver or PyTorch. Variants that share PTX form a group, which lower.py
compiles in a separate process, because LLVM aborts the process on an error. Also writes
kernels.txt, the parameters of every kernel.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping

HERE = pathlib.Path(__file__).resolve().parent
KERNEL_DIR = HERE.parent / "kernels"
sys.path[:0] = [str(HERE), str(KERNEL_DIR)]

import checks  # noqa: E402
import lower  # noqa: E402
import table  # noqa: E402

TRITON_VERSION = "3.9.0"


def worker(group: list[table.Variant], out: pathlib.Path) -> None:
    """Generate the PTX of a group and assemble it for each variant; the others go on after a
    failure, but not after Ctrl-C."""
    gc.disable()  # saves an eighth of the time, and the process ends soon
    code = 0
    try:
        ptx, meta = lower.make_ptx(group[0])
        for variant in group:
            try:
                lower.write_variant(variant, ptx, meta, out)
            except (Exception, SystemExit):
                traceback.print_exc()
                code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def fingerprint(variant: table.Variant) -> str:
    """A hash of everything that determines a cubin and whether it is accepted."""
    table_says = (
        *(variant, table.TENSOR_MAPS.get(variant.kernel), sorted(table.POINTERS.items())),
        *(sorted(table.FLOATS), table.POINTERS_OF_KERNEL.get(variant.kernel)),
        *(table.MULTIPLES, table.ASSEMBLERS[variant.assembler], TRITON_VERSION),
        *(variant.spills, variant.kernel in table.SERIALISED, variant.ptx),
        *(variant.driver, variant.shared, table.exact(variant.arch).name),
        *(table.function(variant.kernel, variant.source), table.absent_arguments(variant.kernel)),
    )
    text = repr(table_says) + source_code(variant.source)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def keep(variant: table.Variant, out: pathlib.Path, store: pathlib.Path) -> None:
    """Copy a variant to the cache. Each file appears atomically."""
    store.mkdir(parents=True, exist_ok=True)
    for suffix in (".cubin", ".json"):
        name = f"{variant.name}{suffix}"
        part = store / f"{name}.{uuid.uuid4().hex}"  # also unique if containers share the cache
        part.write_bytes((out / name).read_bytes())
        part.replace(store / name)


def is_kept(variant: table.Variant, store: pathlib.Path) -> bool:
    """Whether the cache has a variant, with the cubin whose hash its JSON file records."""
    try:
        record = json.loads((store / f"{variant.name}.json").read_text())
        image = (store / f"{variant.name}.cubin").read_bytes()
        return record["sha256"] == hashlib.sha256(image).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def module_file(module: str) -> pathlib.Path:
    return KERNEL_DIR / f"{module.replace('.', '/')}.py"


@functools.cache
def source_code(source: str) -> str:
    """The statements of a kernel's file, of all files that it imports, also indirectly, and of the
    two modules that generate and check cubins."""
    files = [pathlib.Path(lower.__file__), pathlib.Path(checks.__file__), module_file(source)]
    for file in files:  # grows during the loop
        for name in re.findall(r"^from ([\w.]+) import", file.read_text(), re.MULTILINE):
            found = module_file(name)
            if found.exists() and found not in files:
                files.append(found)
    return "\0".join(map(statements, files))


def statements(file: pathlib.Path) -> str:
    """The code without comments and docstrings, which can change without recompiling anything."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.unparse(tree)


def warm_up(todo: list[table.Variant]) -> None:
    """Do once, before forking, what every process would repeat: imports, and hashes of Triton's
    files and of functions. Cubins do not depend on them.
    """
    import triton.compiler
    import triton.experimental.gluon._runtime  # noqa: F401
    from triton.runtime.cache import triton_key

    triton_key()
    for kernel, source in {(variant.kernel, variant.source) for variant in todo}:
        _ = lower.kernel_function(kernel, source).cache_key


@contextlib.contextmanager
def bare_environment() -> Iterator[None]:
    """Hides all variables but these, since dozens of them change what Triton and LLVM generate."""
    saved = dict(os.environ)
    for name in saved.keys() - {"PATH", "TMPDIR", "LD_LIBRARY_PATH"}:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@bare_environment()
def compile_table(
    todo: list[table.Variant], out: pathlib.Path, cache: pathlib.Path | None, jobs: int
) -> int:
    """Compile in parallel and print the progress; returns the number of failures."""
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
    groups: dict[tuple, list[table.Variant]] = {}
    cached = failed = 0
    for v in todo:
        store = cache / fingerprint(v) if cache else None
        if store and is_kept(v, store):
            for suffix in (".cubin", ".json"):
                kept_file = store / f"{v.name}{suffix}"
                (out / kept_file.name).write_bytes(kept_file.read_bytes())
            cached += 1
        else:
            (out / f"{v.name}.json").unlink(missing_ok=True)  # left by an earlier build
            groups.setdefault(v.ptx, []).append(v)
    context = multiprocessing.get_context("fork")
    running: list[tuple[multiprocessing.process.BaseProcess, list[table.Variant], float]] = []
    queue, done = list(groups.values()), cached
    while queue or running:
        while queue and len(running) < max(jobs, 1):
            group = queue.pop(0)
            child = context.Process(target=worker, args=(group, out))
            child.start()
            running.append((child, group, time.monotonic()))
        multiprocessing.connection.wait([process.sentinel for process, *_ in running])
        for entry in list(running):
            process, group, began = entry
            if process.exitcode is None:
                continue
            running.remove(entry)
            took = f"{(time.monotonic() - began) / len(group):.1f} s"
            for v in group:
                done += 1
                where = f"[{done}/{len(todo)}]"
                path = out / f"{v.name}.json"
                if not path.exists():
                    failed += 1
                    print(f"{where} FAILED {v.name} (exit code {process.exitcode})", flush=True)
                    continue
                record = json.loads(path.read_text())
                print(
                    f"{where} {v.name}  {took}  {record['registers']} registers"
                    f"  {record['shared']} B shared  {record['stack']} B stack",
                    flush=True,
                )
                if cache:
                    keep(v, out, cache / fingerprint(v))
    # All kernels, also those without a variant in this build, because C++ names all of them.
    (out / "kernels.txt").write_text("".join(map(lower.kernel_line, table.KERNELS)))
    print(
        f"{len(todo)} variants, {cached} from the cache, {len(groups)} kernels to PTX, "
        f"{failed} failed",
        flush=True,
    )
    return failed


def names(
    text: str, known: Mapping[str, object], option: str, hidden: Mapping[str, object] | None = None
) -> tuple[str, ...]:
    """The names in `text`, which must be `known` or `hidden`; all known ones if it is empty."""
    chosen = tuple(x for x in re.split(r"[;,\s]+", text) if x)
    for x in chosen:
        if x not in known and x not in (hidden or {}):
            raise SystemExit(f"{option}: {x!r} is not in the table; accepted: {', '.join(known)}")
    return chosen or tuple(known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cache", type=pathlib.Path)
    jobs = os.environ.get("PACKAX_JOBS") or len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=jobs, help="default: PACKAX_JOBS, else all")
    parser.add_argument("--archs", default="", help="architectures, e.g. 90a;80 (default: all)")
    parser.add_argument("--dtypes", default="", help="e.g. bf16;f16 (default: all)")
    parser.add_argument(
        "--head-dims", default="", help="64x64;128x128, or 64 for 64x64 (default: all)"
    )
    parser.add_argument("--assemblers", default="", help="e.g. 12.9 (default: all)")
    args = parser.parse_args()
    archs = names(args.archs.replace("sm_", ""), table.ARCHS, "--archs", table.PROXIES)
    dtypes = names(args.dtypes, dict.fromkeys(table.ALL_DTYPES), "--dtypes")
    known = {f"{a}x{b}": (a, b) for a, b in table.ALL_DIMS}
    dims = names(
        re.sub(r"(?<![x\d])(\d+)(?![x\d])", r"\1x\1", args.head_dims), dict(known), "--head-dims"
    )
    assemblers = names(args.assemblers, table.ASSEMBLERS, "--assemblers")
    narrowed = table.variants(archs, dtypes, tuple(known[d] for d in dims))
    todo = [variant for variant in narrowed if variant.assembler in assemblers]
    return 1 if compile_table(todo, args.out, args.cache, args.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
