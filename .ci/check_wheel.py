"""Checks the contents of a packax wheel: package, extension module, metadata; no kernel sources.

    python .ci/check_wheel.py packax-0.1.0-cp312-abi3-linux_x86_64.whl    exits 1 if it is wrong

If the PACKAX_* variables select the whole table, as for all published wheels, the wheel must
contain every kernel.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "csrc/aot")]

import check_module  # noqa: E402
import narrow  # noqa: E402

KEPT = (".py", ".pyi", ".so", "py.typed")
LARGEST = 60_000_000  # bytes
LICENCES = ("libcxx", "nanobind", "robin_map", "triton", "zig")
NEEDED = (
    *("packax/py.typed", "licenses/LICENSE"),
    *(f"third_party/licenses/{name}.txt" for name in LICENCES),
)
FORBIDDEN = (b"import triton", b"from triton")


def main(path: str) -> int:
    problems = []
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        for name in names:
            if ".dist-info/" in name or name.endswith("/"):
                continue
            if not name.startswith("packax/"):
                problems.append(f"{name}: outside the package")
            if not name.endswith(KEPT):
                problems.append(f"{name}: only {', '.join(KEPT)} belong into the wheel")
            if name.endswith((".py", ".pyi")):
                source = wheel.read(name)
                problems += [f"{name}: {word.decode()}" for word in FORBIDDEN if word in source]
        extensions = [name for name in names if name.endswith(".so")]
        if len(extensions) != 1 or not extensions[0].startswith("packax/_ext"):
            problems.append(f"one extension module packax/_ext expected, found {extensions}")
        problems += [
            f"{needed} is missing"
            for needed in NEEDED
            if not any(f"/{name}".endswith(f"/{needed}") for name in names)
        ]
        if not narrow.chosen(os.environ):
            found = sum(len(list(check_module.cubins(wheel.read(name)))) for name in extensions)
            wanted = check_module.kernels_of_the_table()
            if found != wanted or "+" in Path(path).name:
                problems.append(f"{found} cubins, and all {wanted} are asked for")
        size = sum(info.compress_size for info in wheel.infolist())
        if size > LARGEST:
            problems.append(f"more than {LARGEST / 1e6:.0f} MB")
    print(f"{path.rsplit('/', 1)[-1]}: {len(names)} files, {size / 1e6:.1f} MB")
    for problem in problems:
        print(f"  wrong: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
