"""packax compared with cuDNN and FlashAttention-3 on the cases of `cases.py`, in one process: ms,
TFLOP/s, ratio, error.

    python benchmarks/attention.py [--cases board,short,NAME] [--peers cudnn,fa3] [--rounds 7]
        [--quick] [--out DIR]

Every output and gradient is checked against a float32 reference before anything is timed; a wrong
one is not timed and makes the program exit 1. FLOPs are those of attended pairs: 4 * H * D per pair
forward, 2.5 times that backward. The backward is timed separately (the jitted pullback, residuals
in memory); `bwd~` is (forward + backward) - forward, as in the peers' board. The backward with
deterministic=True is timed, too. Cases of the group `short` are short: they run LOOP times inside
one jitted call. Writes attention.json and attention.png, or short.json, into --out (default: $OUT,
else benchmarks/results).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from lib.cases import Case, select
from lib.chart import bar_chart
from lib.implementations import (
    JAX_PEERS,
    LOOP,
    Compiled,
    not_tried,
    packax_attention,
    random_inputs,
)
from lib.machine import machine
from lib.output import PEERS, Report, arguments_of, first_line, require_gpu, say, write_json
from lib.overheads import first_call, handler_time, mask_building
from lib.passes import time_passes, usable, usable_deterministic
from lib.reference import Reference
from lib.tables import deterministic_table, short_table, table


def run_case(case: Case, rounds: int, peers: Sequence[str] = ("cudnn",)) -> dict[str, Any]:
    inputs = random_inputs(case)
    reference = Reference(case, inputs)
    others = peers if case.peers else ()
    candidates = [packax_attention(case), *(JAX_PEERS[name](case) for name in others)]
    skip = {name: not_tried(name, case) for name in others}
    compiled = {item.name: Compiled(item, inputs) for item in candidates}
    rows = {
        name: usable(item, reference.errors, skip.get(name), both=True)
        for name, item in compiled.items()
    }
    if case.group in ("board", "dims"):
        item = packax_attention(case, deterministic=True)
        rows[item.name] = usable_deterministic(Compiled(item, inputs), reference)
    for name, row in rows.items():
        say(
            f"{case.name}: {name} errors "
            + " ".join(f"{x} {e:.1e}" for x, e in row["errors"].items())
        )
        for what, text in row["failed"].items():
            say(f"{case.name}: {name} {what} did not run: {text}")

    loops = LOOP if case.group == "short" else 1
    for name, row in rows.items() if loops > 1 else ():
        made = {"fwd": compiled[name].forward_loop, "bwd": compiled[name].backward_loop}
        row["passes"] = {what: made[what](loops) for what in made if what in row["passes"]}
    flops = {"fwd": case.forward_flops, "bwd": case.backward_flops}
    time_passes(rows, flops | {"fwd+bwd": sum(flops.values())}, rounds, loops)
    for row in rows.values():
        times = row["times"]
        if "fwd" in times and "fwd+bwd" in times:
            difference = times["fwd+bwd"]["ms"] - times["fwd"]["ms"]
            tflops = round(flops["bwd"] / difference / 1e9, 1)
            times["bwd~"] = {"ms": round(difference, 4), "tflops": tflops}
    ours = rows["packax"]["times"]
    ratio = {
        name: {
            what: round(theirs["ms"] / ours[what]["ms"], 3)
            for what, theirs in rows[name]["times"].items()
            if what in ours
        }
        for name in others
    }
    return rows | {"ratio": ratio}


def main() -> int:
    parser = arguments_of(__doc__, "names and groups; short ones only if they are named", rounds=7)
    parser.add_argument("--peers", default="cudnn", help="cudnn, fa3 (default: cudnn)")
    parser.add_argument(
        "--quick", action="store_true", help="three rounds, and only the cases up to 32k tokens"
    )
    arguments = parser.parse_args()
    cases = select(arguments.cases)
    rounds, others = arguments.rounds, arguments.peers.split(",")
    if arguments.quick:
        rounds = min(rounds, 3)
        cases = [case for case in cases if case.seq <= 32768]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN
    require_gpu()

    name = "short" if all(case.group == "short" for case in cases) else "attention"
    overheads: dict[str, Any] = {}
    report = Report(arguments.out, name, rounds, machine=machine(), overheads=overheads)
    peers = json.loads(PEERS.read_text())
    say(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    failures: list[str] = []

    def step(name: str, function: Any) -> Any:
        """Runs it; a failure is reported, and the other measurements continue."""
        try:
            return function()
        except Exception as error:
            traceback.print_exc(limit=6)
            say(f"{name} FAILED: {first_line(error)}")
            failures.append(name)
            return {"failed": first_line(error)}
        finally:
            gc.collect()

    if arguments.cases is None:  # with chosen cases, only those: another run has the overheads
        overheads["first_call"] = step("first call", first_call)
        say(f"first call: {overheads['first_call']}")
    for case in cases:
        rows = step(case.name, lambda case=case: run_case(case, rounds, others))
        ours = [rows.get(name, {}) for name in ("packax", "deterministic")]
        if any(row.get("wrong") or row.get("failed") for row in ours):
            failures.append(case.name)
        report.add(case.name, rows)
    if arguments.cases is None:
        overheads["mask_building"] = step("mask building", mask_building)
        overheads["handlers"] = step("handler time", handler_time)
    report["triton_imported"] = "triton" in sys.modules
    write_json(report.path, report)
    long = {case.name: report["cases"][case.name] for case in cases if case.group != "short"}
    short = [case for case in cases if case.group == "short"]
    for name, value in overheads.items():
        print(f"{name:<14} {value}")
    if long:
        chart = arguments.out / "attention.png"
        step("chart", lambda: bar_chart(report | {"cases": long}, peers, chart))
        print(f"\n{table(long, peers)}\n\n{deterministic_table(long)}")
    if short:
        print(f"\n{short_table(report['cases'], short)}")
        print(f"(in a jitted loop of {LOOP}; GB/s of the least bytes)")
    print(f"\nboard: {peers['machine']}; bwd~ = (fwd+bwd) - fwd; ratio = the peer's ms / packax ms")
    return report.end(failures)


if __name__ == "__main__":
    sys.exit(main())
