"""Checks wheels: contents, hardening of the extension module, kernels, and the manylinux tag.

    python .ci/check_wheel.py dist/packax-*.whl    exits 1 if something is wrong

Hardening: relro and `-z now`, a stack protector, no executable stack, no library search path.
Kernels: as many cubins as the table has, unless the version or the PACKAX_* variables say that the
build is of some of them, and the same bytes in all wheels. The tag must not be older than the glibc
that auditwheel says the wheel needs.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc/aot"))

import narrow  # noqa: E402
import table  # noqa: E402

KEPT = (".py", ".pyi", ".so", "py.typed")
LARGEST = 64_000_000  # bytes
LICENCES = ("libcxx", "nanobind", "robin_map", "triton", "zig")
NEEDED = (
    *("packax/py.typed", "licenses/LICENSE"),
    *(f"third_party/licenses/{name}.txt" for name in LICENCES),
)
FORBIDDEN = (b"import triton", b"from triton")
NEWEST = (2, 28)  # glibc of RHEL 8; Ubuntu 20.04 and newer have a newer one
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


def wrong_contents(wheel: zipfile.ZipFile) -> Iterator[str]:
    names = wheel.namelist()
    for name in names:
        if ".dist-info/" in name or name.endswith("/"):
            continue
        if not name.startswith("packax/"):
            yield f"{name}: outside the package"
        if not name.endswith(KEPT):
            yield f"{name}: only {', '.join(KEPT)} belong into the wheel"
        if name.endswith((".py", ".pyi")):
            source = wheel.read(name)
            yield from (f"{name}: {word.decode()}" for word in FORBIDDEN if word in source)
    for needed in NEEDED:
        if not any(f"/{name}".endswith(f"/{needed}") for name in names):
            yield f"{needed} is missing"
    if sum(info.compress_size for info in wheel.infolist()) > LARGEST:
        yield f"more than {LARGEST / 1e6:.0f} MB"


def wrong_tag(path: str) -> Iterator[str]:
    show = [sys.executable, "-m", "auditwheel", "show", path]
    text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    found = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_(\w+)"', text)
    if not found:
        yield f"auditwheel names no manylinux tag:\n{text}"
        return
    needs, name = (int(found[1]), int(found[2])), Path(path).stem
    promised = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", name)]
    if not promised or needs > min(min(promised), NEWEST) or not name.endswith(found[3]):
        yield f"the name promises {promised}, auditwheel says {needs} of {found[3]}"


def main(paths: list[str]) -> int:
    digests: dict[str, str] = {}
    failed = False
    for path in paths:
        with zipfile.ZipFile(path) as wheel:
            problems = list(wrong_contents(wheel))
            modules = [name for name in wheel.namelist() if name.endswith(".so")]
            if len(modules) != 1 or not modules[0].startswith("packax/_ext"):
                problems.append(f"one extension module packax/_ext expected, found {modules}")
            module = b"".join(map(wheel.read, modules))
        problems += carelessness(module) if module else []
        found = [hashlib.sha256(cubin).hexdigest() for cubin in cubins(module)]
        wanted, some = len(list(table.variants())), "+" in Path(path).name
        if len(found) != wanted and not (some and narrow.chosen(os.environ)):
            problems.append(f"{len(found)} cubins, the table has {wanted}")
        digest = hashlib.sha256("".join(sorted(found)).encode()).hexdigest()
        digests.setdefault(digest, path)
        if len(digests) > 1:
            problems.append(f"other cubins than {Path(next(iter(digests.values()))).name}")
        if "manylinux" in path:
            problems += wrong_tag(path)
        size = Path(path).stat().st_size / 1e6
        print(f"{Path(path).name}: {size:.1f} MB, {len(found)} cubins, sha256 {digest[:16]}")
        for problem in problems:
            print(f"  wrong: {problem}")
        failed |= bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
