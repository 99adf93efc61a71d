"""Checks the extension modules of wheels: hardening, and the same cubins in every wheel.

    python .ci/check_module.py dist/packax-*.whl    exits 1 if something is wrong

Hardening: relro and `-z now`, a stack protector, no executable stack, no library search path.
Cubins: as many as the table has (in a wheel without a local version), with the same bytes in all
wheels.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = 190  # e_machine of a cubin
PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
DT_RPATH, DT_RUNPATH, DT_FLAGS, DT_FLAGS_1 = 15, 29, 30, 0x6FFFFFFB
BIND_NOW = {DT_FLAGS: 8, DT_FLAGS_1: 1}
EXECUTABLE = 1


def tables(elf: bytes | memoryview) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The program headers (type, flags, offset, size) and section headers (type, offset, size)."""
    at, sections_at = struct.unpack_from("<QQ", elf, 32)
    size, count, section_size, sections = struct.unpack_from("<4H", elf, 54)
    programs = [struct.unpack_from("<IIQ16xQ", elf, at + i * size) for i in range(count)]
    found = [
        struct.unpack_from("<4xI16xQQ", elf, sections_at + i * section_size)
        for i in range(sections)
    ]
    return programs, found


def length(elf: memoryview) -> int:
    """The size of the ELF file that starts at the beginning of `elf`."""
    at, sections_at = struct.unpack_from("<QQ", elf, 32)
    size, count, section_size, sections = struct.unpack_from("<4H", elf, 54)
    in_file = [offset + n for kind, offset, n in tables(elf)[1] if kind != 8]  # SHT_NOBITS
    return max(at + size * count, sections_at + section_size * sections, *in_file)


def cubins(module: bytes) -> Iterator[bytes]:
    at = module.find(b"\x7fELF", 1)
    while at >= 0:
        if struct.unpack_from("<H", module, at + 18)[0] == CUDA:
            size = length(memoryview(module)[at:])
            yield module[at : at + size]
            at += size - 4
        at = module.find(b"\x7fELF", at + 4)


def carelessness(module: bytes) -> list[str]:
    programs = {kind: (flags, offset, n) for kind, flags, offset, n in tables(module)[0]}
    _, at, size = programs[PT_DYNAMIC]
    dynamic = dict(struct.iter_unpack("<QQ", module[at : at + size]))
    problems = []
    if not any(dynamic.get(tag, 0) & bit for tag, bit in BIND_NOW.items()):
        problems.append("not linked with -z now")
    if PT_GNU_RELRO not in programs:
        problems.append("not linked with -z relro")
    if programs.get(PT_GNU_STACK, (EXECUTABLE,))[0] & EXECUTABLE:
        problems.append("asks for an executable stack")
    if DT_RPATH in dynamic or DT_RUNPATH in dynamic:
        problems.append("has a search path for libraries")
    if b"\0__stack_chk_fail\0" not in module:
        problems.append("has no stack protector")
    return problems


def kernels_of_the_table() -> int:
    sys.path.insert(0, str(ROOT / "csrc/aot"))
    import table

    return len(list(table.variants()))


def main(paths: list[str]) -> int:
    digests, failed = {}, False
    for path in paths:
        with zipfile.ZipFile(path) as wheel:
            (name,) = (n for n in wheel.namelist() if n.endswith(".so"))
            module = wheel.read(name)
        found = [hashlib.sha256(cubin).hexdigest() for cubin in cubins(module)]
        digest = hashlib.sha256("".join(sorted(found)).encode()).hexdigest()
        problems = carelessness(module)
        wanted = kernels_of_the_table()
        if "+" not in Path(path).name and len(found) != wanted:
            problems.append(f"{len(found)} cubins, the table has {wanted}")
        digests.setdefault(digest, path)
        if len(digests) > 1:
            problems.append(f"other cubins than {Path(next(iter(digests.values()))).name}")
        print(f"{Path(path).name}: {len(found)} cubins, sha256 of all {digest[:16]}")
        for problem in problems:
            print(f"  wrong: {name} {problem}")
        failed |= bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
