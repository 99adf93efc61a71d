"""Which tiles tune.py compares, and how it compiles them: on the build machine, with Triton and no
GPU.

A candidate changes some constants of its kernel's row in the table (csrc/aot/table.py); {} is
the row itself. Hopper kernels are compiled by both assemblers. Candidates that exceed the table's
limits (spills) are compiled anyway, with a message.
"""

from __future__ import annotations

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

Constants = dict[str, int]
TILE = ("BLOCK_M", "BLOCK_N", "STAGES", "WARPS")  # a row of TILES


def tiles(*rows: tuple[int, ...]) -> list[Constants]:
    return [{}, *(dict(zip(TILE, row, strict=True)) for row in rows)]


# kernel -> (query/key dim, value dim) -> candidates. The build leaves out what a kernel or the
# table does not have, with a message.
CANDIDATES: dict[str, dict[tuple[int, int], list[Constants]]] = {
    "forward_sm90": {
        (64, 64): [{}, {"BLOCK_N": 64, "STAGES": 3}, {"REMATERIALIZE": 1}],
        (128, 128): [{}, {"BLOCK_N": 64, "STAGES": 4}, {"REMATERIALIZE": 1}],
        (192, 128): [{}, {"BLOCK_N": 64}, {"REMATERIALIZE": 1}],
        (256, 256): [{}, {"REMATERIALIZE": 1}],
    },
    "forward_sm90_low_occupancy": {
        (64, 64): [{}, {"REMATERIALIZE": 1}, {"STAGES": 3}, {"BLOCK_N": 64, "STAGES": 4}]
    },
    "backward_sm90": {
        (64, 64): [
            *({}, {"SKIP": 0}, {"PING_PONG": 1}, {"DQ": 1, "CONSUMER_REGISTERS": 240}),
            {"LSE_BY_MMA": 1},
        ],
        (128, 128): [
            *({}, {"SKIP": 1}, {"PING_PONG": 0}, {"REMATERIALIZE": 0}, {"LSE_BY_MMA": 0}),
        ],
    },
    "backward_dkdv_sm90": {
        (64, 64): [{}, {"SKIP": 0}, {"PING_PONG": 1}, {"REMATERIALIZE": 1}, {"LSE_BY_MMA": 1}],
        (128, 128): [{}, {"SKIP": 0}, {"PING_PONG": 0}, {"REMATERIALIZE": 0}, {"LSE_BY_MMA": 0}],
        (192, 128): [{}, {"REMATERIALIZE": 0}],
        (256, 256): [{}, {"QK_CHUNK": 128}, {"QK_CHUNK": 256}, {"REMATERIALIZE": 1},
            {"REMATERIALIZE": 1, "QK_CHUNK": 256}],
    },
    "backward_dq_sm90": {
        (64, 64): [{}, {"DO_REGISTERS": 1}, {"REMATERIALIZE": 1}],
        (128, 128): [{}, {"BLOCK_N": 64, "STAGES": 3}, {"REMATERIALIZE": 1}],
        (192, 128): [{}, {"DO_REGISTERS": 0}, {"REMATERIALIZE": 1}],
        (256, 256): [{}, {"BLOCK_N": 32}, {"QK_CHUNK": 64}],
    },
    "backward_prepare": {
        dims: [{}, {"ROWS": 16}, {"ROWS": 64}]
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256))
    },
    "backward_finish": {
        dims: [{}] for dims in ((64, 64), (128, 128), (192, 128), (256, 256))
    },
    "forward": {
        (128, 128): tiles((128, 128, 2, 8), (128, 64, 3, 8), (128, 64, 4, 8), (64, 128, 2, 4),
            (64, 64, 3, 4)),
        (64, 64): tiles((128, 128, 2, 8), (128, 64, 3, 8), (128, 64, 4, 4), (64, 128, 3, 4),
            (64, 64, 3, 4)),
        (192, 128): tiles((128, 64, 2, 8), (64, 64, 3, 8), (128, 128, 1, 8), (64, 64, 2, 4),
            (128, 32, 3, 8)),
        (256, 256): tiles((128, 64, 2, 8), (64, 64, 2, 8), (128, 64, 1, 8), (64, 64, 2, 4),
            (128, 32, 2, 8)),
    },
    "backward_dkdv": {
        (128, 128): tiles((64, 128, 2, 8), (32, 128, 3, 8), (64, 64, 2, 4), (128, 64, 2, 8),
            (128, 128, 2, 8)),
        (64, 64): tiles((64, 128, 2, 8), (64, 128, 3, 4), (64, 64, 3, 4), (128, 128, 2, 8),
            (32, 128, 3, 4)),
        (192, 128): tiles((32, 128, 2, 8), (64, 128, 2, 8), (32, 64, 2, 8), (32, 64, 2, 4),
            (64, 32, 2, 8)),
        (256, 256): tiles((64, 64, 2, 8), (64, 64, 1, 8), (64, 32, 2, 8), (64, 32, 2, 4),
            (32, 64, 2, 4)),
    },
    "backward_dq": {
        (128, 128): tiles((128, 64, 2, 8), (128, 64, 3, 8), (64, 64, 3, 4), (128, 32, 3, 8),
            (128, 32, 3, 4)),
        (64, 64): tiles((128, 64, 3, 8), (128, 128, 2, 8), (64, 64, 3, 4), (64, 128, 3, 4),
            (128, 32, 3, 4)),
        (192, 128): tiles((128, 64, 2, 8), (128, 64, 1, 8), (128, 32, 2, 8), (64, 32, 2, 8),
            (64, 64, 2, 4)),
        (256, 256): tiles((128, 32, 2, 8), (64, 64, 2, 4), (64, 32, 2, 8), (64, 32, 2, 4),
            (64, 64, 1, 8)),
    },
    "decode": {
        (128, 128): tiles((16, 64, 4, 4), (16, 64, 2, 4), (16, 32, 4, 4), (16, 32, 6, 4),
            (16, 128, 2, 4), (16, 128, 3, 8)),
        (64, 64): tiles((16, 64, 3, 4), (16, 64, 5, 4), (16, 64, 4, 8), (16, 128, 2, 4),
            (16, 128, 3, 4), (16, 128, 3, 8)),
    },
    "decode_tall": {
        (128, 128): tiles((64, 64, 2, 4), (64, 32, 3, 4), (64, 32, 5, 4), (64, 64, 3, 4),
            (64, 64, 3, 8), (64, 64, 4, 8)),
        (64, 64): tiles((64, 64, 3, 4), (64, 64, 5, 4), (64, 32, 4, 4), (64, 32, 6, 4),
            (64, 64, 4, 8)),
    },
}  # fmt: skip
PIPELINES = (  # run together
    {"backward_prepare", "backward_sm90", "backward_finish"},
    {"backward_prepare", "backward_dkdv_sm90", "backward_dq_sm90"},
)
# kernels that candidates run with, or are compared with
TWINS = {"forward", "backward_delta", "backward_dkdv", "backward_dq", *table.MASK_KERNELS}


@dataclasses.dataclass(frozen=True)
class Candidate(table.Variant):
    label: str = "table"

    @property
    def name(self) -> str:
        return f"{super().name}__{self.label.replace('=', '').replace(' ', '_')}"


def label(constants: Constants) -> str:
    return " ".join(f"{name}={n}" for name, n in constants.items()) or "table"


def variant(
    kernel: str, arch: table.Arch, dims: tuple[int, int], changed: Constants, assembler: str
) -> Candidate:
    """The table's variant with `changed` constants; LookupError if there is no such variant."""
    sm90 = kernel in table.SM90_TILES
    portable = table.TILES | table.DECODE_TILES
    rows: dict[Any, Any] = table.SM90_TILES[kernel] if sm90 else portable[kernel]
    wanted = (dims, max(dims)) if sm90 else ((arch.tiles, dims), (arch.tiles, max(dims)))
    key = next((key for key in wanted if key in rows), None)
    if dims not in table.HEAD_DIMS or key is None or (sm90 and arch.tiles != "hopper"):
        raise LookupError(f"no row for {kernel} {dims[0]}x{dims[1]} {arch.name} in table.py")
    kept = rows[key]
    row = dict(kept) if sm90 else dict(zip(TILE, kept, strict=True))
    if assembler == "12.9":
        row |= table.UNDER_12_9.get((kernel, max(dims)), {})
    unknown = set(changed) - set(row)
    if unknown:
        raise LookupError(
            f"{kernel} has no constant {', '.join(sorted(unknown))}: {', '.join(row)}"
        )
    try:  # table.py turns a row into constants and the rows of a program
        rows[key] = row | changed if sm90 else tuple((row | changed).values())
        if sm90:  # of 13.4, which changes no constants
            made = table.sm90(kernel, arch, "bf16", *dims, "13.4")
        else:
            made = table.tiled(kernel, arch, "bf16", *dims)
    finally:
        rows[key] = kept
    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    return Candidate(**fields | {"assembler": assembler, "label": label(changed)})


def parse(text: str) -> tuple[str, tuple[int, int], Constants]:
    """KERNEL:DIM[xDIM]:NAME=N,NAME=N of --try."""
    kernel, dims, changes = text.split(":")
    qk, _, v = dims.partition("x")
    named = (change.split("=") for change in changes.split(",") if change)
    return kernel, (int(qk), int(v or qk)), {name: int(n) for name, n in named}


def chosen(
    arch: str,
    kernels: list[str],
    dims: list[tuple[int, int]] | None,
    assemblers: list[str],
    extra: list[str],
    listed: bool = True,
) -> Iterator[Candidate]:
    """All candidates to compile, or with `listed` False only those of `extra`, and the others that
    a pipeline needs."""
    wanted = {(k, d): list(rows) for k, by_dims in CANDIDATES.items() if listed and k in kernels
              for d, rows in by_dims.items() if dims is None or d in dims}  # fmt: skip
    for kernel, d, changed in map(parse, extra):
        wanted.setdefault((kernel, d), [{}]).append(changed)
    for pipeline, (kernel, d) in itertools.product(PIPELINES, list(wanted)):
        for other in pipeline if kernel in pipeline else ():
            wanted.setdefault((other, d), [{}])
    seen = set()
    for (kernel, d), rows in wanted.items():
        for changed, assembler in itertools.product(rows, assemblers):
            two = kernel in table.TWO_ASSEMBLERS
            try:
                own = table.find_arch(arch).assembler
                made = variant(kernel, table.find_arch(arch), d, changed, assembler if two else own)
            except LookupError as error:
                print(f"left out: {error}", flush=True)
                break
            same = dataclasses.replace(made, label="")  # a change that changes nothing
            if same not in seen:
                seen.add(same)
                yield made


def build(
    folder: pathlib.Path,
    arch: str,
    jobs: int,
    kernels: list[str],
    dims: list[tuple[int, int]] | None,
    assemblers: list[str],
    extra: list[str],
    listed: bool = True,
) -> None:
    import checks
    import compile as aot

    refuse = checks.check_assembly

    def report(*arguments: Any) -> None:
        """A build rejects these; for a candidate they are only slow."""
        try:
            refuse(*arguments)
        except SystemExit as error:
            print(f"  {error}", file=sys.stderr, flush=True)

    checks.check_assembly = report  # the compiling processes are forks
    todo = list(chosen(arch, kernels, dims, assemblers, extra, listed))
    needed = tuple({(v.qk_dim, v.v_dim) for v in todo})
    decodes = {v.kernel in table.DECODE_TILES for v in todo}
    kinds = {"decode_combine"} if True in decodes else set()
    kinds |= TWINS if False in decodes else set()
    twins = [v for v in table.variants((arch,), ("bf16",), needed) if v.kernel in kinds]
    folder.mkdir(parents=True, exist_ok=True)
    failed = aot.compile_table(
        [*todo, *twins], folder / "cubins", ROOT / "build" / "tune_cache", jobs
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
