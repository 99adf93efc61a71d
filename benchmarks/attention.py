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

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
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
from lib.output import PEERS, default_out, first_line, say, write_json
from lib.overheads import first_call, handler_time, mask_building
from lib.passes import usable, usable_deterministic
from lib.reference import Reference
from lib.tables import deterministic_table, short_table, table
from lib.timing import Time, interleaved

PASSES = ("fwd", "bwd", "fwd+bwd")


def run_case(case: Case, rounds: int, peers: Sequence[str] = ("cudnn",)) -> dict[str, Any]:
    inputs = random_inputs(case)
    reference = Reference(case, inputs)
    others = peers if case.peers else ()
    candidates = [packax_attention(case), *(JAX_PEERS[name](case) for name in others)]
    skip = {name: not_tried(name, case) for name in others}
    compiled = {item.name: Compiled(item, inputs) for item in candidates}
    checked = {
        item.name: usable(item, compiled[item.name], reference, skip.get(item.name))
        for item in candidates
    }
    if case.group in ("board", "dims"):
        item = packax_attention(case, deterministic=True)
        checked[item.name] = usable_deterministic(Compiled(item, inputs), reference)
    say(
        f"{case.name}: " + "; ".join(_errors_line(name, result) for name, result in checked.items())
    )
    for name, result in checked.items():
        for what, text in result["failed"].items():
            say(f"{case.name}: {name} {what} did not run: {text}")

    loops = LOOP if case.group == "short" else 1
    if loops > 1:
        for name, result in checked.items():
            kept = result["passes"].keys() & {"fwd", "bwd"}
            made = {"fwd": compiled[name].forward_loop, "bwd": compiled[name].backward_loop}
            result["passes"] = {what: made[what](loops) for what in kept}
    flops = {
        "fwd": case.forward_flops,
        "bwd": case.backward_flops,
        "fwd+bwd": case.forward_flops + case.backward_flops,
    }
    times: dict[str, dict[str, Time]] = {name: {} for name in checked}
    for what in PASSES:
        functions = {
            name: result["passes"][what]
            for name, result in checked.items()
            if what in result["passes"]
        }
        if functions:
            for name, measured in interleaved(functions, rounds=rounds, inner=loops).items():
                times[name][what] = measured
    rows: dict[str, Any] = {}
    for name, result in checked.items():
        row: dict[str, Any] = {what: t.as_dict(flops[what]) for what, t in times[name].items()}
        if "fwd" in row and "fwd+bwd" in row:
            difference = row["fwd+bwd"]["ms"] - row["fwd"]["ms"]
            row["bwd~"] = {
                "ms": round(difference, 4),
                "tflops": round(flops["bwd"] / difference / 1e9, 1),
            }
        rows[name] = {
            "times": row,
            "errors": result["errors"],
            "failed": result["failed"],
            "wrong": result.get("wrong", []),
        }
        if "bit_identical" in result:
            rows[name]["bit_identical"] = result["bit_identical"]
    ours = rows["packax"]["times"]
    rows["ratio"] = {}
    for name in others:
        theirs = rows[name]["times"]
        rows["ratio"][name] = {
            what: round(theirs[what]["ms"] / ours[what]["ms"], 3)
            for what in (*PASSES, "bwd~")
            if what in theirs and what in ours
        }
    return rows


def _errors_line(name: str, result: dict[str, Any]) -> str:
    return f"{name} errors " + " ".join(
        f"{what} {error:.1e}" for what, error in result["errors"].items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        help="comma-separated names and groups: board, dims, large, short (default: all but short)",
    )
    parser.add_argument("--peers", default="cudnn", help="cudnn, fa3 (default: cudnn)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds, of which the median is reported"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three rounds, and only the cases up to 32k tokens"
    )
    parser.add_argument("--out", type=Path, default=default_out())
    arguments = parser.parse_args()
    cases = select(arguments.cases)
    rounds, beside = arguments.rounds, arguments.peers.split(",")
    if arguments.quick:
        rounds = min(rounds, 3)
        cases = [case for case in cases if case.seq <= 32768]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN
    if jax.default_backend() != "gpu":
        raise SystemExit(
            f"attention.py times GPU kernels, and jax runs on {jax.default_backend()!r} here: "
            f"jax.devices() = {jax.devices()}"
        )

    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "short" if all(case.group == "short" for case in cases) else "attention"
    written = arguments.out / f"{name}.json"
    peers = json.loads(PEERS.read_text())
    report: dict[str, Any] = {
        "machine": machine(),
        "commit": os.environ.get("PACKAX_COMMIT", "unknown"),
        "rounds": rounds,
    }
    say(", ".join(f"{key} {value}" for key, value in report["machine"].items()))

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

    failures: list[str] = []
    overheads: dict[str, Any] = {}
    report["overheads"], report["cases"] = overheads, {}
    if arguments.cases is None:  # with chosen cases, only those: another run has the overheads
        overheads["first_call"] = step("first call", first_call)
        say(f"first call: {overheads['first_call']}")
    for case in cases:
        report["cases"][case.name] = step(
            case.name, lambda case=case: run_case(case, rounds, beside)
        )
        ours = [report["cases"][case.name].get(name, {}) for name in ("packax", "deterministic")]
        if any(row.get("wrong") or row.get("failed") for row in ours):
            failures.append(case.name)
        write_json(written, report)
    if arguments.cases is None:
        overheads["mask_building"] = step("mask building", mask_building)
        overheads["handlers"] = step("handler time", handler_time)
    report["triton_imported"] = "triton" in sys.modules
    write_json(written, report)
    long = {case.name: report["cases"][case.name] for case in cases if case.group != "short"}
    short = [case for case in cases if case.group == "short"]
    for name, value in overheads.items():
        print(f"{name:<14} {value}")
    if long:
        step(
            "chart",
            lambda: bar_chart(report | {"cases": long}, peers, arguments.out / "attention.png"),
        )
        print(f"\n{table(long, peers)}\n\n{deterministic_table(long)}")
    if short:
        print(f"\n{short_table(report['cases'], short)}")
        print(f"(in a jitted loop of {LOOP}; GB/s of the least bytes)")
    print(f"\nboard: {peers['machine']}; bwd~ = (fwd+bwd) - fwd; ratio = the peer's ms / packax ms")
    print(f"wrote {written}")
    if failures:
        print(f"FAILED: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
