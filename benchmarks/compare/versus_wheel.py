"""The current packax and another wheel of it on one GPU, taking turns in one session: ms, ratios.

    python benchmarks/compare/versus_wheel.py --before DIR_OR_WHEEL [--cases board,dims]
        [--rounds 5] [--quick] [--out DIR]

Two processes with JAX, one with the packax that Python finds here ("now") and one with the other
wheel first on its path, take turns as in versus_fa4.py: in every round each runs a burst of about
120 ms of the forward and later of the backward, in alternating order, while the other process waits
(turns.py). First, outputs and gradients of each are compared with the float32 reference for sampled
rows and one head, and all elements of both with each other; what is wrong or differs is not timed
and makes the program exit 1.

From an old wheel only flash_attention(query, key, value, mask), create_attention_mask, causal and
documents are used. Without a GPU, --quick tries the program with tiny cases. Writes
versus_wheel.json into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.cases import Case, select
from lib.output import default_out, say, write_json
from lib.turns import Failed, Worker, as_row, in_turns, troubles

HERE = Path(__file__).parent
PASSES = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}
ORDER = ("before", "now")


def unpacked(before: Path, folder: Path) -> Path:
    """The folder for the path: the wheel `before` unpacked into `folder`, or one with packax/."""
    if before.is_file():
        with zipfile.ZipFile(before) as wheel:
            wheel.extractall(folder)
        before = folder
    if not (before / "packax" / "__init__.py").is_file():
        raise SystemExit(f"--before: no packax/__init__.py in {before}")
    return before.resolve()


def started(site: Path, stack: contextlib.ExitStack) -> dict[str, Worker]:
    workers = {}
    for name in ORDER:
        environment = dict(os.environ)
        if name == "before":
            others = filter(None, [environment.get("PYTHONPATH")])
            environment["PYTHONPATH"] = os.pathsep.join([str(site), *others])
        workers[name] = Worker(name, [sys.executable, str(HERE / "jax_worker.py")], environment)
        stack.callback(workers[name].end)
    return workers


def prepare(case: Case, workers: dict[str, Worker], round_ms: float) -> dict[str, Any]:
    """Rows of the report without times: errors, what failed, launches per burst; and `compared`,
    the two with each other."""
    rows: dict[str, Any] = {}
    for name, worker in workers.items():
        try:
            rows[name] = worker.ask(do="prepare_packax", case=case.name, round_ms=round_ms)
        except Failed as error:
            rows[name] = {"failed": {"fwd": str(error)}, "errors": {}, "wrong": [], "launches": {}}
    compared: dict[str, Any] = {"differences": {}, "differ": [], "same_bits": []}
    if all(row["launches"] for row in rows.values()):
        shm = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
            workers["before"].ask(do="keep", folder=folder)
            compared = workers["now"].ask(do="compare", folder=folder)
    for row in rows.values() if compared["differ"] else ():
        row["launches"] = {}
    return rows | {"compared": compared}


def run_case(
    case: Case, workers: dict[str, Worker], rounds: int, round_ms: float
) -> dict[str, Any]:
    rows = prepare(case, workers, round_ms)
    flops = {"fwd": case.forward_flops, "bwd": case.backward_flops}
    for name in ORDER:
        rows[name]["times"] = {}
    rows["ratio"] = {}
    for what in PASSES:
        launches = {name: rows[name]["launches"].get(what) for name in ORDER}
        bursts = {
            name: functools.partial(
                workers[name].ask, do="time", name="packax", what=what, launches=count
            )
            for name, count in launches.items()
            if count
        }
        samples = in_turns(bursts, rounds)
        for name, took in samples.items():
            rows[name]["times"][what] = as_row(took, flops[what])
        if len(samples) == 2:
            before, now = (samples[name] for name in ORDER)
            by_round = [x / y for x, y in zip(before, now, strict=True)]
            rows["ratio"][what] = {
                "of_medians": round(statistics.median(before) / statistics.median(now), 4),
                "low": round(min(by_round), 4),
                "high": round(max(by_round), 4),
            }
    return rows


def table(results: dict[str, Any]) -> str:
    """One line per case and pass. Ratio over 1: the current packax is faster; then the rounds'
    extremes."""
    head = f"{'case':<20}{'pass':<5}" + "".join(f"{who + ' ms':>11}{'TFLOP/s':>9}" for who in ORDER)
    lines = [head + f"{'ratio':>8}{'rounds':>15}{'error':>9}{'before':>9}  results"]
    notes = []
    for name, rows in results.items():
        for what, names in PASSES.items() if rows else ():
            line = f"{name:<20}{what:<5}"
            for who in ORDER:
                cell = rows[who]["times"].get(what)
                line += (
                    f"{cell['ms']:>11.3f}{cell['tflops']:>9.1f}" if cell else f"{'-':>11}{'-':>9}"
                )
            ratio = rows["ratio"].get(what)
            extremes = f"{ratio['low']:.3f}-{ratio['high']:.3f}" if ratio else "-"
            line += f"{ratio['of_medians']:>8.3f}" if ratio else f"{'-':>8}"
            line += f"{extremes:>15}"
            for who in reversed(ORDER):
                found = [rows[who]["errors"][x] for x in names if x in rows[who]["errors"]]
                line += f"{max(found):>9.1e}" if found else f"{'-':>9}"
            lines.append(line + "  " + _said(rows["compared"], names))
        for who in ORDER:
            notes += troubles(f"{name} {who}", rows.get(who, {}))
        if rows and rows["compared"]["differ"]:
            differing = rows["compared"]["differ"]
            notes.append(f"{name}: results of the two DIFFER, not timed: {', '.join(differing)}")
    return "\n".join(lines + notes)


def _said(compared: dict[str, Any], names: tuple[str, ...]) -> str:
    """Whether the two results are bit-identical, or their largest relative difference."""
    found = {x: compared["differences"][x] for x in names if x in compared["differences"]}
    if not found:
        return "-"
    if all(x in compared["same_bits"] for x in found):
        return "same bits"
    return f"{max(found.values()):.1e}"


def complete(rows: dict[str, Any]) -> bool:
    return bool(rows) and not rows["compared"]["differ"] and all(x in rows["ratio"] for x in PASSES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", type=Path, required=True, help="the other wheel, or a folder that has packax/"
    )
    parser.add_argument(
        "--cases", default="board", help="names and groups of cases.py (default: board)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=120.0, help="length of a burst")
    parser.add_argument("--quick", action="store_true", help="tiny cases: tries the program")
    parser.add_argument("--out", type=Path, default=default_out())
    arguments = parser.parse_args()
    cases = select("quick" if arguments.quick else arguments.cases)
    rounds, round_ms = arguments.rounds, 2.0 if arguments.quick else arguments.round_ms
    written = arguments.out / "versus_wheel.json"
    report: dict[str, Any] = {
        "commit": os.environ.get("PACKAX_COMMIT", "unknown"),
        "before": arguments.before.name,
        "rounds": rounds,
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        site = unpacked(arguments.before, folder)
        workers = started(site, stack)
        try:
            packages = {name: worker.ask(do="package") for name, worker in workers.items()}
        except Failed as error:
            raise SystemExit(str(error)) from None
        report["packages"] = packages
        report["machine"] = workers["now"].ask(do="hello")
        say(f"{report['machine']}, {packages}")
        if Path(packages["before"]["path"]) != site / "packax":
            raise SystemExit(f"packax came from {packages['before']['path']}, not from {site}")
        if packages["now"]["sha256"] == packages["before"]["sha256"]:
            say("the two packages are the same files: what their ratios show is the noise")
        if packages["now"]["backend"] != "gpu" and not arguments.quick:
            raise SystemExit(f"without a GPU only --quick: {report['machine']['gpu']}")
        arguments.out.mkdir(parents=True, exist_ok=True)
        report["cases"] = {}
        for case in cases:
            try:
                rows = run_case(case, workers, rounds, round_ms)
            except Failed as error:
                say(f"{case.name} FAILED: {error}")
                rows = {}
            report["cases"][case.name] = rows
            say(f"{case.name}\n{table({case.name: rows})}")
            write_json(written, report)
    print(f"\n{table(report['cases'])}\n")
    print(
        f"ratio: before ms / now ms, of medians of {rounds} rounds in turns; over 1: now is faster"
    )
    print(f"wrote {written}")
    bad = [name for name, rows in report["cases"].items() if not complete(rows)]
    print(f"FAILED: {', '.join(bad)}" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
