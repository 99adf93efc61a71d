"""Which part of the table a build makes: PACKAX_ARCHS, PACKAX_HEAD_DIMS, PACKAX_DTYPES and
PACKAX_ASSEMBLERS.

    python csrc/aot/narrow.py    the arguments for compile.py, one a line; why, on stderr

PACKAX_ARCHS has rows of table.ARCHS or capabilities of GPUs, or "all". Without it a machine with
GPUs builds for these alone, and one without builds DEFAULT, whose dtypes and head dims the other
variables replace. With it, variables that are empty or "all" mean everything.
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

# Where no variable and no GPU says what is wanted: what most models run on A100 and H100, compiled
# within minutes. All masks, options and decoding are in it; float32, FP8 caches, other head dims,
# and Hopper's kernels once more by the assembler for newer drivers are not.
DEFAULT = {
    "archs": ["80", "90a"],
    "head-dims": ["128"],
    "dtypes": ["bf16"],
    "assemblers": ["12.9"],
}
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


def archs_here(here: list[int] | None = None) -> list[str]:
    """For this machine's GPUs: those with these capabilities, or the driver's if None."""
    found = map(arch_of, capabilities() if here is None else here)
    return [name for name in dict.fromkeys(found) if name]


def chosen(environment: Mapping[str, str], here: list[int] | None = None) -> dict[str, list[str]]:
    """Option of compile.py -> what is built, for those that narrow the table.

    `here`: the capabilities of this machine's GPUs, asked of the driver if None.
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
    """One line for who installs; empty where nothing is narrowed."""
    if not options:
        return ""
    said = ", ".join(f"{option} {' '.join(values)}" for option, values in options.items())
    if split(environment.get("PACKAX_ARCHS", "")):
        return f"packax: a part of the kernels ({said}), as PACKAX_* variables say"
    if archs_here(here):
        return f"packax: for this machine's GPUs alone ({said}); PACKAX_ARCHS=all builds for all"
    return f"packax: no GPU here: a part of the kernels ({said}); PACKAX_ARCHS=all builds all"


def local_version(options: Mapping[str, list[str]]) -> str:
    """What tells a wheel of a part of the table from the whole: "+sm90a.bf16.64x64", or "".

    PEP 440: letters, digits and dots.
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
