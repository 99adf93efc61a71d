"""The candidates of tune.py and their compilation, which needs Triton but no GPU.

A candidate changes one constant of its kernel's row in the table (csrc/aot/table.py), or the
constants of --try; {} is the row itself. Hopper kernels are compiled with both assemblers.
Candidates that exceed the table's limits (spills) are compiled anyway, with a message.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc" / "aot"))

import table  # noqa: E402
from work import DETERMINISTIC, PARTS, SM80_BACKWARD, SM90_BACKWARD, pair  # noqa: E402

Constants = dict[str, int]
TILE = ("BLOCK_M", "BLOCK_N", "STAGES", "WARPS")  # the entries of a row of TILES
SM80_TILE = ("BLOCK_M", "BLOCK_N", "ROW_WARPS", "WARPS")  # the entries of a row of SM80_FORWARD

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512))
SWITCHES = ("SKIP", "PING_PONG", "REMATERIALIZE", "LSE_BY_MMA", "DO_REGISTERS", "V_REGISTERS")
SIZES = {  # constant -> the smallest and the largest value
    "BLOCK_M": (16, 128),
    "BLOCK_N": (16, 128),
    "QK_CHUNK": (64, 256),
    "ROWS": (16, 64),
    "WARPS": (4, 8),
    **dict.fromkeys(("S_WARPS", "KV_WARPS", "DQ_WARPS"), (1, 4)),
    "ROW_WARPS": (1, 2),
    "STAGES": (1, 6),
    "DO_STAGES": (1, 2),
}


def neighbours(row: Constants) -> list[Constants]:
    """No change; then changes of one constant: a flipped switch, a halved or doubled size, one more
    or one less stage. The build omits candidates that do not compile, with a message."""
    found: list[Constants] = [{}]
    for name, n in row.items():
        if name in SWITCHES:
            found.append({name: 1 - n})
        if name in SIZES:
            least, most = SIZES[name]
            both = (n - 1, n + 1) if name == "STAGES" else (n // 2, 2 * n)
            found += [{name: x} for x in both if least <= x <= most]
    return found


# The kernels that run with the candidates, or with which they are compared.
TWINS = {"forward", "backward_delta", "backward_delta_fallback", "backward_dkdv", "backward_dq",
    *table.MASK_KERNELS}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Candidate(table.Variant):
    label: str = "table"

    @property
    def name(self) -> str:
        return f"{super().name}__{self.label.replace('=', '').replace(' ', '_')}"


def label(constants: Constants) -> str:
    return " ".join(f"{name}={n}" for name, n in constants.items()) or "table"


def row_of(
    kernel: str, arch: table.Arch, dims: tuple[int, int]
) -> tuple[dict[Any, Any], Any, Constants]:
    """A kernel's rows in the table, the key of the row for these dims, and its constants."""
    rows: dict[Any, Any]
    key: Any = (arch.tiles, *dims)
    if arch.tiles == "hopper" and kernel in table.SM90_TILES:
        rows, key = table.SM90_TILES[kernel], table.row_of(*dims)
    elif kernel in SM80_BACKWARD:  # all kernels share one row
        rows = table.SM80_BACKWARD
    elif key in table.SM80_FORWARD.get(kernel, {}):
        rows = table.SM80_FORWARD[kernel]
    else:
        every = table.TILES | table.SHARED_TILES
        rows, key = every.get(kernel, {}), (arch.tiles, max(dims))
    if dims not in table.ALL_DIMS or key not in rows:
        raise LookupError(f"no row for {kernel} {dims[0]}x{dims[1]} {arch.name} in table.py")
    row = rows[key]
    names = SM80_TILE if rows is table.SM80_FORWARD.get(kernel) else TILE
    return rows, key, dict(row if isinstance(row, dict) else zip(names, row, strict=True))


def variant(
    kernel: str, arch: table.Arch, dims: tuple[int, int], changed: Constants, assembler: str
) -> Candidate:
    """The table's variant with `changed` constants. Raises LookupError if there is none."""
    rows, key, row = row_of(kernel, arch, dims)
    kept = rows[key]
    if assembler == "12.9":
        row |= table.UNDER_12_9.get((kernel, table.row_of(*dims)), {})
    unknown = set(changed) - set(row)
    if unknown:
        raise LookupError(
            f"{kernel} has no constant {', '.join(sorted(unknown))}: {', '.join(row)}"
        )
    if rows is table.SM80_BACKWARD and (row | changed)["BLOCK_M"] > 64:
        raise LookupError(f"{kernel} takes at most 64 rows: its masks are of blocks of 64")
    try:  # table.py computes a variant from its row, so change the row temporarily
        tried = row | changed
        rows[key] = tried if isinstance(kept, dict) else tuple(tried.values())
        if rows is table.SM80_BACKWARD:
            made = next(v for v in table.sm80_backward(arch, "bf16", *dims) if v.kernel == kernel)
        elif isinstance(kept, dict):  # as for 13.4, which overrides no constants
            made = table.sm90(kernel, arch, "bf16", *dims, "13.4")
        else:
            made = table.tiled(kernel, arch, "bf16", *dims)
    finally:
        rows[key] = kept
    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    return Candidate(**fields | {"assembler": assembler, "label": label(changed)})


def parse(text: str) -> tuple[str, tuple[int, int], Constants]:
    """Parses --try's KERNEL:DIM[xDIM]:NAME=N,NAME=N."""
    kernel, dims, changes = text.split(":")
    named = (change.split("=") for change in changes.split(",") if change)
    return kernel, pair(dims), {name: int(n) for name, n in named}


def chosen(
    arch: str,
    kernels: list[str],
    dims: list[tuple[int, int]] | None,
    assemblers: list[str],
    extra: list[str],
    listed: bool = True,
) -> Iterator[Candidate]:
    """The candidates to compile: all, or with `listed` False those of `extra`; and the candidates
    that their pipelines need."""
    of_arch = table.find_arch(arch)
    wanted: dict[tuple[str, tuple[int, int]], list[Constants]] = {}
    for kernel, d in itertools.product(kernels if listed else (), dims or DIMS):
        try:
            wanted[kernel, d] = neighbours(row_of(kernel, of_arch, d)[2])
        except LookupError as error:
            print(f"left out: {error}", flush=True)
    for kernel, d, changed in map(parse, extra):
        wanted.setdefault((kernel, d), [{}]).append(changed)
    hopper = (SM90_BACKWARD, DETERMINISTIC, PARTS)
    pipelines = hopper if of_arch.tiles == "hopper" else (SM80_BACKWARD,)
    for pipeline, (kernel, d) in itertools.product(pipelines, list(wanted)):
        for other in pipeline if kernel in pipeline else ():
            # The tile of 8.x's kernel sets the layout of dQ's sum, which another kernel reads.
            wanted.setdefault((other, d), [{}] if pipeline in hopper else wanted[kernel, d])
    for kernel, d in list(wanted):
        if "bias" in kernel:  # these kernels read the row statistics of forward_bias
            wanted.setdefault(("forward_bias", d), [{}])
    seen = set()
    for (kernel, d), rows in wanted.items():
        for changed, assembler in itertools.product(rows, assemblers):
            two = kernel in table.TWO_ASSEMBLERS
            try:
                used = assembler if two else of_arch.assembler
                made = variant(kernel, of_arch, d, changed, used)
            except LookupError as error:
                print(f"left out: {error}", flush=True)
                continue
            same = dataclasses.replace(made, label="")  # omits changes without effect
            if same not in seen:
                seen.add(same)
                yield made


def build(args: argparse.Namespace) -> None:
    """Compiles the candidates of tune.py's arguments."""
    import checks
    import compile as aot

    refuse = checks.check_assembly

    def report(*arguments: Any) -> None:
        """Prints what would fail a build of the library: such a candidate is only slow."""
        try:
            refuse(*arguments)
        except SystemExit as error:
            print(f"  {error}", file=sys.stderr, flush=True)

    checks.check_assembly = report  # inherited by the compiling processes, which are forks
    folder = args.folder
    todo = list(
        chosen(args.arch, args.kernels, args.dims, args.assemblers, args.extra, not args.only)
    )
    needed = tuple({(v.qk_dim, v.v_dim) for v in todo})
    twins = [v for v in table.variants((args.arch,), ("bf16",), needed) if v.kernel in TWINS]
    folder.mkdir(parents=True, exist_ok=True)
    failed = aot.compile_table(
        [*todo, *twins], folder / "cubins", ROOT / "build" / "tune_cache", args.jobs
    )
    rows = [
        {"kernel": v.kernel, "dims": [v.qk_dim, v.v_dim], "file": v.name, "assembler": v.assembler,
         "label": getattr(v, "label", None), "constants": dict(v.constants)}
        for v in [*todo, *twins]
        if (folder / "cubins" / f"{v.name}.json").exists()
    ]  # fmt: skip
    (folder / "index.json").write_text(json.dumps(rows, indent=1) + "\n")
    size = sum(f.stat().st_size for f in (folder / "cubins").iterdir())
    print(f"{failed} do not compile and are left out; {size / 1e6:.1f} MB in {folder}")
