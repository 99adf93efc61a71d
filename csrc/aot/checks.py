"""Checks of the build: kernels take the parameters that the launcher passes, and have no spills
other than accepted ones."""

from __future__ import annotations

import pathlib
import re
import subprocess

import table

PTX_TYPES = {
    "align": "tma",
    "u64": "ptr",
    "u32": "i32",
    "f32": "f32",
    "s32": "i32",
    "b64": "ptr",
    "b32": "i32",
}


def check_parameters(ptx: str, params: list[dict[str, str]], kernel: str) -> None:
    """Require that the PTX takes exactly these parameters, followed by Triton's two scratch
    pointers. A tensor map takes nine: the map of 128 bytes, four sizes and four strides.
    """
    found = re.findall(r"\.param \.(\w+) ?.*?\w+_param_\d+(\[128\])?", ptx.split(")")[0])
    got = [PTX_TYPES.get(kind, kind) for kind, size in found if bool(size) == (kind == "align")]
    want = []
    for p in params:
        want += [p["type"]] + (["i32"] * 4 + ["ptr"] * 4 if p["type"] == "tma" else [])
    want += ["ptr", "ptr"]
    if got != want:
        raise SystemExit(
            f"{kernel}: parameters in the PTX are {got}, the launcher would pass {want}"
        )


def resources(cubin: pathlib.Path) -> dict[str, int]:
    """Registers and stack bytes (local memory: spills) per thread, as recorded in the cubin."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return {
        key: int(re.search(rf"{field}:(\d+)", text).group(1))  # type: ignore[union-attr]
        for key, field in (("registers", "REG"), ("stack", "STACK"))
    }


def check_assembly(variant: table.Variant, stack: int, log: str) -> None:
    """Reject spills beyond the accepted ones, and serialised matrix products where they are
    slow."""
    if "registers" not in log:
        raise SystemExit(f"{variant.name}: the assembler's report is missing")
    if variant.arch.tiles != "hopper":
        return
    if stack > variant.spills:
        raise SystemExit(
            f"{variant.name}: {stack} bytes of local memory a thread, {variant.spills} are "
            f"accepted "
            "(SPILLS in spills.py)"
        )
    serialised = re.search(r".*(C75\d\d|wgmma.*serializ).*", log)
    if serialised and variant.kernel not in table.SERIALISED:
        raise SystemExit(f"{variant.name}: {serialised[0].strip()}")
