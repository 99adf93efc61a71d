"""Compare the machine code of two builds: every cubin in BEFORE with its counterpart in AFTER.

    python csrc/aot/compare_sass.py BEFORE AFTER [--arch 90a] [--renamed OLD=NEW ...]

BEFORE and AFTER are output folders of compile.py. Two cubins are the same if their machine code and
constants are equal byte for byte, except for the names of kernels and files, and if registers,
shared memory, threads, boxes of tensor maps and the ordered types of parameters are equal. A
variant that only one build has counts as a difference. Needs neither a GPU nor a disassembler.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import struct
import sys

NOBITS = 8  # type of a section that has a size but no bytes in the file
SAME = (
    *("arch", "dtype", "qk_dim", "v_dim", "threads", "shared", "block", "assembler", "registers"),
    *("stack", "driver", "tensor_maps"),
)


def sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit ELF file, by name."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(count)]
    strings = cubin[headers[names][4] :]
    return {
        strings[name : strings.index(b"\0", name)].decode(): (
            b"\0" * length if kind == NOBITS else cubin[offset : offset + length]
        )
        for name, kind, _, _, offset, length in headers
    }


def machine_code(cubin: pathlib.Path, symbol: str) -> dict[str, bytes]:
    """The sections that the GPU executes or reads, by their names without the kernel's name."""
    return {
        name.replace(symbol, "KERNEL"): body
        for name, body in sections(cubin.read_bytes()).items()
        if name.startswith((".text", ".nv.constant", ".nv.global", ".nv.shared"))
    }


def differences(before: pathlib.Path, after: pathlib.Path) -> list[str]:
    """Descriptions of the differences. `before` and `after` are the JSON records of the cubins."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    found = [f"{x} {old[x]} -> {new[x]}" for x in SAME if old[x] != new[x]]
    if [p["type"] for p in old["params"]] != [p["type"] for p in new["params"]]:
        found.append("types of parameters")
    code = [
        machine_code(path.with_suffix(".cubin"), record["symbol"])
        for path, record in ((before, old), (after, new))
    ]
    for name in sorted(code[0].keys() | code[1].keys()):
        body, now = (sizes.get(name, b"") for sizes in code)
        if body != now:
            found.append(f"{name}: {len(body)} bytes -> {len(now)}, not the same")
    return found


def renamed(name: str, kernel: str, renames: dict[str, str]) -> str:
    """The name of a variant after its kernel was renamed."""
    return renames.get(kernel, kernel) + name[len(kernel) :]


def compare(
    before: pathlib.Path, after: pathlib.Path, arch: str, renames: dict[str, str]
) -> tuple[int, list[str]]:
    """The number of variants compared, and all differences."""

    def of(folder: pathlib.Path) -> dict[str, tuple[str, pathlib.Path]]:
        records = ((path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))
        return {
            path.stem: (record["kernel"], path)
            for path, record in records
            if not arch or record["arch"] == f"sm_{arch}"
        }

    old, new = of(before), of(after)
    pairs = [(path, renamed(name, kernel, renames)) for name, (kernel, path) in old.items()]
    found = [f"{name}: only before" for _, name in pairs if name not in new]
    found += [f"{name}: only after" for name in sorted(set(new) - {name for _, name in pairs})]
    pairs = [(path, name) for path, name in pairs if name in new]
    for path, name in pairs:
        if wrong := differences(path, new[name][1]):
            found.append(f"{name}: {'; '.join(wrong)}")
    return len(pairs), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--arch", default="", help="of one architecture alone, e.g. 90a")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW")
    args = parser.parse_args()
    renames = dict(pair.split("=") for pair in args.renamed)
    count, found = compare(args.before, args.after, args.arch.removeprefix("sm_"), renames)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{count} variants compared, {len(found)} differences")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
