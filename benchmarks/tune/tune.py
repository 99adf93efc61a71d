"""Compares candidate tiles of one architecture: compiles them, and times them on a GPU machine.

    python benchmarks/tune/tune.py build DIR --arch 90a [--kernels forward_sm90 ...]
        [--dims 128x128 ...] [--try backward_sm90:128:CONSUMER_REGISTERS=232,PING_PONG=0] [--only]
    python benchmarks/tune/tune.py time DIR [--kernels ...] [--dims ...] [--cases ...] [--rounds 11]

`build` needs Triton but no GPU. `time` needs a GPU, its driver and numpy, but no Triton.

`build` compiles the candidates of candidates.py, or with --only just those of --try. `time` first
runs every candidate once in another process (`check`), which may hang or crash; such a candidate is
skipped. Then it compares the results of every candidate with those of the portable kernels: on
small odd documents in full, and on sampled rows of the timed case (the forward output also with
float64). Wrong candidates are not timed. Then all kernels of a case take turns in every round;
medians go to a table and to $OUT/tune.json (default: DIR). `backward` launches the three kernels of
a backward pass together (Hopper's, or with --arch 80@90 those of 8.x), `deterministic` the three
kernels without sums in memory, and `parts` those of head dim 512. Fallback and bias kernels run
without options, and backward_dbias sums over all heads: also time the winners in calls with
options. The library has only square tiles of backward_dbias. Put winners into their rows in
csrc/aot. To compare tiles of decoding, build a wheel with each and run benchmarks/decode.py.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cubin import Driver, Kernel
from lib.cases import Case
from probe import fatal_steps, say_begin, say_end
from work import (
    DETERMINISTIC,
    PARTS,
    SM80_BACKWARD,
    SM90_BACKWARD,
    Built,
    Launch,
    Work,
    difference,
    pair,
    plain,
)

FORWARD = ("forward", "forward_sm90", "forward_sm90_low_occupancy")
PORTABLE_BACKWARD = ("backward_dkdv", "backward_dq")
OPTIONS = ("forward_fallback", "backward_dkdv_fallback", "backward_dq_fallback", "forward_bias",
    "backward_dkdv_bias", "backward_dq_bias")  # fmt: skip
RESULTS = {
    "forward": ("out", "lse"),
    "forward_sm90": ("out", "lse"),
    "forward_sm90_low_occupancy": ("out", "lse"),
    "backward_dkdv": ("dk", "dv"),
    "backward_dq": ("dq",),
    **dict.fromkeys((*SM90_BACKWARD, *SM80_BACKWARD), ("dq", "dk", "dv")),
    **dict(zip(OPTIONS, 2 * (("out",), ("dk", "dv"), ("dq",)), strict=True)),
    "backward_dbias": ("dbias",),
    "backward_dkdv_sm90": ("dk", "dv"),
    "backward_dq_sm90": ("dq",),
    "backward_dkdv_sm90_parts": ("dk", "dv"),
    "backward_dq_sm90_parts": ("dq",),
    **dict.fromkeys(("forward_tangent", "forward_tangent_sm90"), ("tout", "tlse")),
}
KERNELS = tuple(RESULTS)
SUMMED = (SM90_BACKWARD, SM80_BACKWARD)  # these accumulate dQ in memory
PIPELINES = (*SUMMED, DETERMINISTIC, PARTS)
TOGETHER = {  # kernel -> name of the pipeline in which its candidates are also timed
    "backward_sm90": "backward",
    "backward_sm80": "backward",
    "backward_dq_sm90": "deterministic",
    "backward_dq_sm90_parts": "parts",
}
CLOSE = 5e-3  # the largest relative difference of correct candidates, which round P to bfloat16

# Small cases, only compared: documents that do not align with tiles, and many in one tile.
CHECKS = {
    "odd": (1, 700, 65, 1030, 128, 64, 1013),
    "tiny": (16,) * 40 + (1,) * 30 + (7,) * 5,
}
# rows, documents, heads, key/value heads
TIMED = {
    "causal_16k": (16384, 1, 32, 8), "causal_32k": (32768, 1, 32, 8),
    "causal_64k": (65536, 1, 32, 8), "mha32_causal_32k": (32768, 1, 32, 32),
    "docs12_32k": (32768, 12, 32, 8),
    "docs12_128k": (131072, 12, 32, 8),
    "docs64_32k": (32768, 64, 32, 8), "heads1_8k": (8192, 1, 1, 1), "heads3_8k": (8192, 1, 3, 1),
    "heads8_2k": (2048, 1, 8, 2),
}  # fmt: skip


def case(name: str, dims: tuple[int, int]) -> Case:
    if name in CHECKS:
        split = CHECKS[name]
        return Case(name, 1, sum(split), 8, 2, dims[0], len(split), v_dim=dims[1], split=split)
    rows, documents, heads, kv_heads = TIMED[name]
    return Case(name, 1, rows, heads, kv_heads, dims[0], documents, v_dim=dims[1])


def operations(case: Case, kernel: str) -> float | None:
    """The FLOPs of the matrix products; None for a kernel that only moves memory."""
    pairs, qk, v = 2.0 * case.heads * case.area, case.head_dim, case.value_dim
    return {
        **dict.fromkeys(FORWARD, case.forward_flops),
        **dict.fromkeys(("backward_sm90", "backward_sm80"), case.backward_flops),
        **dict.fromkeys(TOGETHER.values(), case.backward_flops),
        **dict.fromkeys(
            ("backward_dkdv", "backward_dkdv_sm90", "backward_dkdv_sm90_parts"),
            pairs * 2 * (qk + v),
        ),
        **dict.fromkeys(
            ("backward_dq", "backward_dq_sm90", "backward_dq_sm90_parts"), pairs * (2 * qk + v)
        ),
        "backward_dbias": pairs * (qk + v),
        **dict.fromkeys(("forward_tangent", "forward_tangent_sm90"), pairs * (3 * qk + 2 * v)),
    }.get(plain(kernel))


def sum_layout(kernel: Kernel) -> tuple[int, ...] | None:
    """The layout of the sum of dQ in memory for kernels of 8.x; None for other kernels."""
    own = kernel.meta["constants"]
    if "DQ_WARPS" not in own:
        return None
    return own.get("ROWS", own.get("BLOCK_M")), own["DQ_WARPS"], kernel.meta["threads"]


class Plan:
    """The launches of the candidates of one case: alone, and as part of their pipeline."""

    def __init__(self, work: Work, built: Built, candidates: dict[str, tuple[str, Kernel]]):
        self.work, self.candidates = work, candidates
        dims = (work.case.head_dim, work.case.value_dim)
        self.alone = {title: work.launch(kernel) for title, (_, kernel) in candidates.items()}
        # The preprocess kernels for pipelines that do not accumulate dQ in memory.
        self.without_sum = {
            title: work.launch(kernel, clear_dq=0)
            for title, (name, kernel) in candidates.items()
            if name == "backward_preprocess"
        }
        # Above head dim 256, only the fallback kernel computes delta.
        names = ("forward", *PORTABLE_BACKWARD, "backward_delta_fallback", "backward_delta")
        self.portables = {
            plain(name): work.launch(portable)
            for name in names
            if (portable := built.portable(name, dims)) is not None
        }

    def first(self, name: str, layout: tuple[int, ...] | None = None) -> Launch | None:
        """The first candidate of a kernel, which is the table's, or the first one with this layout
        of dQ's sum; None if there is none."""
        for title, (other, kernel) in self.candidates.items():
            if other == name and (not layout or sum_layout(kernel) in (None, layout)):
                return self.alone[title]
        return None

    def together(self, title: str) -> Launch | None:
        """The pipeline of three backward kernels with this candidate as one of them; None if one of
        the others is missing."""
        name, kernel = self.candidates[title]
        for names in PIPELINES:
            others = {part: self.first(part, sum_layout(kernel)) for part in names}
            if name not in names or None in others.values():
                continue
            parts = [self.alone[title] if part == name else others[part] for part in names]
            if names not in SUMMED:
                parts[0] = next(iter(self.without_sum.values()))

            def run(parts: list[Any] = parts) -> None:
                for part in parts:
                    part()

            return run
        return None

    def reference(self) -> dict[str, Any]:
        """The results of the portable kernels. Without a portable forward kernel, the table's
        Hopper or fallback kernel computes the forward pass."""
        work = self.work
        work.poison(("out", "lse", "dq", "dk", "dv"))
        others = (self.first(name) for name in ("forward_sm90", "forward_fallback"))
        forward = self.portables.get("forward") or next(filter(None, others), None)
        if forward is None:
            raise SystemExit(f"{work.case.name}: no forward was built, and the backward needs one")
        forward()
        found = work.results(("out", "lse"))
        if all(name in self.portables for name in PORTABLE_BACKWARD):
            for name in ("backward_delta", *PORTABLE_BACKWARD):
                self.portables[name]()
            found |= work.results(("dq", "dk", "dv"))
        self.work.driver.synchronize()
        return found

    def check(self, want: dict[str, Any], announce: str | None = None) -> dict[str, float]:
        """Title -> largest relative difference from `want`. Results without a reference are taken
        from the first candidate."""
        found = {}
        for title, (name, _) in self.candidates.items():
            names = RESULTS[name]
            pipeline = any(name in names for names in PIPELINES)
            run = self.together(title) if pipeline else self.alone[title]
            if run is None:
                print(f"{title}: not compared: not all of its pipeline's kernels were built")
                continue
            if announce:
                say_begin(f"{title} {announce}")
            print(f"  {title} ...", end="", flush=True)
            self.work.poison(names)
            if pipeline:
                self.work.poison(("delta", "lse2", "lo", "hi", "dq_sum"))
            elif plain(name) in PORTABLE_BACKWARD:
                self.portables["backward_delta"]()
            run()
            self.work.driver.synchronize()
            got = self.work.results(names)
            for result in names:
                want.setdefault(result, got[result])
            found[title] = difference(got, {result: want[result] for result in names})
            right = found[title] < CLOSE
            print(f" difference {found[title]:.1e}{'' if right else ' WRONG'}", flush=True)
        return found

    def timed(self, right: list[str]) -> dict[str, Launch]:
        launches = {title: self.alone[title] for title in right}
        for title in right:
            part = self.candidates[title][0]
            if part in TOGETHER and (run := self.together(title)) is not None:
                launches[title.replace(part, TOGETHER[part], 1)] = run
        return launches


def time_case(plan: Plan, differences: dict[str, float], rounds: int) -> list[dict[str, Any]]:
    right = [title for title, value in differences.items() if value < CLOSE]
    case, rows = plan.work.case, []
    launches = plan.timed(right) | {f"mask {name}": run for name, run in plan.work.mask.items()}
    for title, (ms, low, high) in plan.work.driver.interleaved(launches, rounds).items():
        name, _, rest = title.partition(" ")
        flops = operations(case, name)
        wholes = [f"{part} {rest}" for part, whole in TOGETHER.items() if whole == name]
        own = next((x for x in (title, *wholes) if x in plan.candidates), "")
        meta = plan.candidates[own][1].meta if own else {}
        rows.append({
            "case": case.name, "dims": [case.head_dim, case.value_dim], "kernel": name,
            "tile": rest,
            "ms": round(ms, 4), "ms_low": round(low, 4), "ms_high": round(high, 4),
            "tflops": round(flops / ms / 1e9, 1) if flops else None,
            "difference": differences.get(own),
            **{key: meta.get(key) for key in ("registers", "stack", "shared")},
        })  # fmt: skip
    return rows


COLUMNS = {  # title -> (width, function from a row to the value)
    "case": (13, lambda row: row["case"]),
    "dims": (9, lambda row: "x".join(map(str, row["dims"]))),
    "kernel": (28, lambda row: row["kernel"]),
    "tile and assembler": (52, lambda row: row["tile"][:51]),
    "ms": (9, lambda row: f"{row['ms']:.4f}"),
    "low": (9, lambda row: f"{row['ms_low']:.4f}"),
    "high": (9, lambda row: f"{row['ms_high']:.4f}"),
    "TFLOP/s": (9, lambda row: row["tflops"] or ""),
    "to own": (8, lambda row: row.get("to_own", "")),
    "diff": (9, lambda row: "" if row["difference"] is None else f"{row['difference']:.0e}"),
    "registers": (11, lambda row: row["registers"] or ""),
    "stack": (6, lambda row: row["stack"] or ""),
}


def table(rows: list[dict[str, Any]]) -> str:
    """`to own`: the speedup over the table's tile; * marks the fastest tile of a kernel."""
    for row in rows:
        peers = [r for r in rows if all(r[key] == row[key] for key in ("case", "dims", "kernel"))]
        best = "*" if row["ms"] == min(r["ms"] for r in peers) else ""
        if row["kernel"] != "mask":
            row["to_own"] = f"{peers[0]['ms'] / row['ms']:.3f}{best}"
    lines = ["".join(f"{title:<{width}}" for title, (width, _) in COLUMNS.items())]
    lines += ["".join(f"{of(row)!s:<{width}}" for width, of in COLUMNS.values()) for row in rows]
    return "\n".join(lines)


def time_candidates(
    folder: pathlib.Path,
    kernels: list[str],
    dims: list[tuple[int, int]] | None,
    names: list[str],
    rounds: int,
    without: dict[str, str] | None = None,
    announce: bool = False,
) -> int:
    """Compares and times the candidates. Without names, it only compares them. announce: prints
    the name of each candidate before it runs, for probe.py."""
    without = without or {}
    began = time.perf_counter()
    driver = Driver()
    built = Built(driver, folder)
    report: dict[str, Any] = {"device": driver.name, "driver": driver.version, "rounds": rounds,
                              "commit": os.environ.get("PACKAX_COMMIT", "unknown"), "rows": [],
                              "wrong": [], "fatal": without}  # fmt: skip
    out = pathlib.Path(os.environ.get("OUT", folder)) / "tune.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{driver.name}, driver {driver.version}, {rounds} rounds", flush=True)
    built_dims = dict.fromkeys(tuple(row["dims"]) for row in built.rows if row["label"])
    for of in [d for d in built_dims if dims is None or d in dims]:
        size = f"{of[0]}x{of[1]}"
        every = built.candidates(of, KERNELS)
        wanted = {t: c for t, c in every.items() if c[0] in kernels}
        for pipeline in PIPELINES:
            if any(name in pipeline for name, _ in wanted.values()):  # add the pipeline's others
                wanted |= {
                    t: c
                    for t, c in every.items()
                    if c[0] in pipeline
                    and (t.split()[1] == "table" or c[0] == "backward_postprocess_sm80")
                }
        wanted = {t: c for t, c in wanted.items() if f"{t} {size}" not in without}
        for name in [*CHECKS, *names]:
            print(f"{name} {size}, {time.perf_counter() - began:.0f} s", flush=True)
            work = Work(driver, case(name, of), built.masks())
            work.check_mask()
            plan = Plan(work, built, wanted)
            want = plan.reference()
            if wanted and "out" in want:
                print(f"  forward: error against float64 {work.forward_error():.1e}", flush=True)
            differences = plan.check(want, size if announce else None)
            wrong = [title for title, value in differences.items() if not value < CLOSE]
            report["wrong"] += [f"{name} {size} {title}" for title in wrong]
            wanted = {title: c for title, c in wanted.items() if title not in wrong}
            if name in TIMED and wanted:
                rows = time_case(plan, differences, rounds)
                report["rows"] += rows
                print(table(rows), flush=True)
            work.free()
            if not announce:
                out.write_text(json.dumps(report, indent=1) + "\n")
    if announce:
        say_end()
        return 0
    print(f"\n{table(report['rows'])}\n\nwrote {out}, {time.perf_counter() - began:.0f} s")
    for line in report["wrong"]:
        print(f"WRONG, not timed: {line}")
    for title, why in without.items():
        print(f"FATAL, not timed: {title} {why}")
    return 1 if report["wrong"] or without else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="command", required=True)
    first = sub.add_parser("build", help="compile the candidates")
    second = sub.add_parser("time", help="time them")
    third = sub.add_parser("check", help="run them once")
    third.add_argument("--without", nargs="+", default=[])
    for command in (first, second, third):
        command.add_argument("folder", type=pathlib.Path)
        command.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
        command.add_argument("--dims", nargs="+", type=pair, help="e.g. 128x128 (default: all)")
    first.add_argument("--arch", default="90a")
    first.add_argument("--assemblers", nargs="+", default=["12.9", "13.4"])
    first.add_argument("--try", dest="extra", nargs="+", default=[], metavar="KERNEL:DIM:NAME=N")
    first.add_argument(
        "--only", action="store_true", help="of --try alone, beside the table's rows"
    )
    first.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    second.add_argument("--cases", nargs="+", choices=[*TIMED])
    second.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    if args.command == "build":
        from candidates import build

        build(args)
        return 0
    index = json.loads((args.folder / "index.json").read_text())
    built = {row["kernel"] for row in index if row["label"]}
    kernels = [name for name in args.kernels if name in built]
    if args.command == "check":
        without = dict.fromkeys(args.without, "")
        return time_candidates(args.folder, kernels, args.dims, [], 0, without, True)
    child = [sys.executable, __file__, "check", str(args.folder), "--kernels", *kernels]
    if args.dims:
        child += ["--dims", *(f"{qk}x{v}" for qk, v in args.dims)]

    def checking(without: list[str]) -> list[str]:
        return [*child, *(["--without", *without] if without else [])]

    fatal = fatal_steps(checking, 45.0)
    names = args.cases or list(TIMED)
    return time_candidates(args.folder, kernels, args.dims, names, args.rounds, fatal)


if __name__ == "__main__":
    sys.exit(main())
