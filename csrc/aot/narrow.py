"""Selects the part of the table to build, from PACKAX_ARCHS, PACKAX_HEAD_DIMS, PACKAX_DTYPES and
PACKAX_ASSEMBLERS.

    python csrc/aot/narrow.py    prints the arguments for compile.py, one per line, and the reason
                                 for them on stderr

PACKAX_ARCHS lists keys of table.ARCHS or compute capabilities, or is "all". Without it, a machine
with GPUs builds only for these, and a machine without GPUs builds DEFAULT, which the other
variables override. "all" selects everything, as does an empty variable without DEFAULT.
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

# Built without PACKAX_ARCHS and without a GPU: what most models run on A100 and H100, compiled
# within minutes. It includes all masks, options and decoding. It does not include float32, FP8
# caches, other head dims, or the copies of Hopper's kernels for newer drivers.
DEFAULT = {
    "archs": ["80", "90a"],
    "head-dims": ["128"],
    "dtypes": ["bf16"],
    "assemblers": ["12.9"],
}
COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def capabilities() -> list[int]:
    """The compute capabilities of this machine's GPUs, 90 for 9.0; empty without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    gpus = set()
    for ordinal in range(count.value):
        device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal):
            continue
        codes = [
            cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            for number, attribute in zip(numbers, COMPUTE_CAPABILITY, strict=True)
        ]
        if not any(codes):
            gpus.add(10 * numbers[0].value + numbers[1].value)
    return sorted(gpus)


def arch_of(cc: int) -> str | None:
    """The key in table.ARCHS for a compute capability: the exact one, or the newest that runs on
    it."""
    exact = [name for name, arch in table.ARCHS.items() if arch.cc == cc]
    if exact:
        return exact[0]
    runs = [
        (arch.cc, name)
        for name, arch in table.ARCHS.items()
        if not arch.arch_specific and arch.cc // 10 == cc // 10 and arch.cc < cc
    ]
    return max(runs)[1] if runs else None


def arch_named(text: str) -> str:
    """The key in table.ARCHS for a name or a compute capability: 89, 8.9 and sm_89 become 86.

    Other names are returned unchanged, and compile.py reports what is accepted.
    """
    name = text.lower().removeprefix("sm_").replace(".", "")
    known = name in table.ARCHS or not name.isdecimal()
    return name if known else arch_of(int(name)) or text


def split(text: str) -> list[str]:
    return [part for part in re.split(r"[;,\s]+", text) if part]


def archs_here(here: list[int] | None = None) -> list[str]:
    """The architectures for GPUs with the compute capabilities `here`, or for this machine's GPUs
    if it is None."""
    found = map(arch_of, capabilities() if here is None else here)
    return [name for name in dict.fromkeys(found) if name]


def chosen(environment: Mapping[str, str], here: list[int] | None = None) -> dict[str, list[str]]:
    """The options of compile.py that narrow the table, and their values.

    `here` are the compute capabilities of this machine's GPUs; None queries the driver.
    """
    asked = {
        option: split(environment.get(f"PACKAX_{option.replace('-', '_').upper()}", ""))
        for option in DEFAULT
    }
    if asked["archs"]:
        asked["archs"] = list(dict.fromkeys(map(arch_named, asked["archs"])))
    elif archs := archs_here(here):
        asked["archs"] = archs
    else:
        asked = {option: values or DEFAULT[option] for option, values in asked.items()}
    return {
        option: values
        for option, values in asked.items()
        if values and [value.lower() for value in values] != ["all"]
    }


def reason(
    environment: Mapping[str, str],
    options: Mapping[str, list[str]],
    here: list[int] | None = None,
) -> str:
    """A line that tells the user why the table is narrowed; empty if it is not."""
    if not options:
        return ""
    parts = ", ".join(f"{option} {' '.join(values)}" for option, values in options.items())
    if split(environment.get("PACKAX_ARCHS", "")):
        return f"packax: a part of the kernels ({parts}), as PACKAX_* variables say"
    if archs_here(here):
        return f"packax: for this machine's GPUs alone ({parts}); PACKAX_ARCHS=all builds for all"
    return f"packax: no GPU here: a part of the kernels ({parts}); PACKAX_ARCHS=all builds all"


def local_version(options: Mapping[str, list[str]]) -> str:
    """The local version label of a wheel with a part of the table, such as "+sm90a.bf16.64x64"; ""
    for the whole table. PEP 440 allows letters, digits and dots.
    """
    labels = [
        f"sm{x.lower().removeprefix('sm_').replace('@', 'on')}" for x in options.get("archs", ())
    ]
    for option in ("dtypes", "head-dims"):
        labels += [x.lower() for x in options.get(option, ())]
    labels += [f"ptxas{x.lower()}" for x in options.get("assemblers", ())]
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
