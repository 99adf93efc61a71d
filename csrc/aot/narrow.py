"""Which part of the table a build makes: PACKAX_ARCHS, PACKAX_HEAD_DIMS and PACKAX_DTYPES.

    python csrc/aot/narrow.py    the arguments for compile.py, one a line; why, on stderr

PACKAX_ARCHS has rows of table.ARCHS or capabilities of GPUs. Without it a machine with GPUs builds
for these alone, and PACKAX_ARCHS=all builds for every GPU. Other variables that are empty or "all"
mean everything.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import sys
from collections.abc import Mapping

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import table

COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def capabilities() -> list[int]:
    """Of the GPUs that the driver shows, 90 for 9.0; none without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = set()
    for ordinal in range(count.value):
        device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal):
            continue
        codes = [
            cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            for number, attribute in zip(numbers, COMPUTE_CAPABILITY, strict=True)
        ]
        if not any(codes):
            found.add(10 * numbers[0].value + numbers[1].value)
    return sorted(found)


def arch_of(cc: int) -> str | None:
    """The row of table.ARCHS for that capability: the chip's own, else the newest that it runs."""
    own = [name for name, arch in table.ARCHS.items() if arch.cc == cc]
    if own:
        return own[0]
    runs = [
        (arch.cc, name)
        for name, arch in table.ARCHS.items()
        if not arch.arch_specific and arch.cc // 10 == cc // 10 and arch.cc < cc
    ]
    return max(runs)[1] if runs else None


def arch_named(text: str) -> str:
    """A row of table.ARCHS by its name or by a GPU's capability: 89, 8.9 and sm_89 are 86.

    What names none stays, and compile.py says what is accepted.
    """
    name = text.lower().removeprefix("sm_").replace(".", "")
    known = name in table.ARCHS or not name.isdecimal()
    return name if known else arch_of(int(name)) or text


def split(text: str) -> list[str]:
    return [part for part in re.split(r"[;,\s]+", text) if part]


def chosen(environment: Mapping[str, str], here: list[int] | None = None) -> dict[str, list[str]]:
    """Option of compile.py -> what is built, for those that narrow the table.

    `here`: the capabilities of this machine's GPUs, asked of the driver if None.
    """
    options = {}
    for option in ("archs", "head-dims", "dtypes"):
        asked = environment.get(f"PACKAX_{option.replace('-', '_').upper()}", "")
        if asked.strip().lower() != "all" and split(asked):
            options[option] = split(asked)
    if "archs" in options:
        options["archs"] = list(dict.fromkeys(map(arch_named, options["archs"])))
    if not split(environment.get("PACKAX_ARCHS", "")):
        found = capabilities() if here is None else here
        named = dict.fromkeys(arch_of(cc) for cc in found)
        if found and None not in named:
            options["archs"] = [name for name in named if name]
    return options


def reason(environment: Mapping[str, str], options: Mapping[str, list[str]]) -> str:
    """One line for who installs; empty where nothing is narrowed."""
    if not options:
        return ""
    said = ", ".join(f"{option} {' '.join(values)}" for option, values in options.items())
    if "archs" in options and not split(environment.get("PACKAX_ARCHS", "")):
        return f"packax: for this machine's GPUs alone ({said}); PACKAX_ARCHS=all builds for all"
    return f"packax: a part of the kernels ({said}), as PACKAX_* variables say"


def local_version(options: Mapping[str, list[str]]) -> str:
    """What tells a wheel of a part of the table from the whole: "+sm90a.bf16.64x64", or "".

    PEP 440: letters, digits and dots.
    """
    labels = [f"sm{x.lower().removeprefix('sm_')}" for x in options.get("archs", ())]
    for option in ("dtypes", "head-dims"):
        labels += [x.lower() for x in options.get(option, ())]
    return f"+{'.'.join(labels)}" if labels else ""


def main() -> int:
    options = chosen(os.environ)
    for option, values in options.items():
        print(f"--{option}={','.join(values)}")
    if line := reason(os.environ, options):
        print(line, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
