"""packax beside cuDNN on the cases of `cases.py`, in one process: ms, TFLOP/s, ratio, error.

    python benchmarks/attention.py [--cases a,b] [--rounds 7] [--quick] [--out DIR]

Every output and gradient is checked against a float32 reference before anything is timed; a wrong
one is not timed and makes the program exit 1. FLOPs are those of attended pairs: 4 * H * D a pair
forward, 2.5 times that backward. The backward is timed alone (the jitted pullback, residuals in
memory); `bwd~` is (forward + backward) - forward, as the peers' board has it.
Writes attention.json and attention.png into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax
from cases import Case, select
from chart import bar_chart
from implementations import (
    Compiled,
    Implementation,
    cudnn_attention,
    packax_attention,
    random_inputs,
)
from machine import machine
from overheads import first_call, handler_time, mask_building
from reference import Reference, wrong
from timing import Time, interleaved

START = time.perf_counter()
HERE = Path(__file__).parent
PASSES = ("fwd", "bwd", "fwd+bwd")


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def usable(
    implementation: Implementation, compiled: Compiled, reference: Reference
) -> dict[str, Any]:
    """Runs every pass once and compares: {"errors", "passes": callables, "failed", "wrong"}."""
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    passes: dict[str, Any] = {}
    try:
        forward = compiled.forward()
        errors |= reference.errors(forward(), None)
        passes["fwd"] = forward
    except Exception as error:  # an implementation that cannot run a case must not end the others
        failed["fwd"] = first_line(error)
        return {"errors": errors, "passes": passes, "failed": failed}
    try:
        both = compiled.both()
        out, gradients = both()
        errors |= reference.errors(None, gradients)
        del out, gradients
        passes["fwd+bwd"] = both
        backward = compiled.backward()
        gradients = backward()
        alone = reference.errors(None, gradients)
        errors |= {name: max(errors[name], value) for name, value in alone.items()}
        passes["bwd"] = backward
    except Exception as error:
        failed["bwd"] = first_line(error)
    bad = wrong(errors)
    if bad:
        say(
            f"WRONG {implementation.name}: "
            + ", ".join(f"{name} {errors[name]:.1e}" for name in bad)
        )
        passes = {}
    return {"errors": errors, "passes": passes, "failed": failed, "wrong": bad}


def run_case(case: Case, rounds: int) -> dict[str, Any]:
    inputs = random_inputs(case)
    reference = Reference(case, inputs)
    candidates = [packax_attention(case)] + ([cudnn_attention(case)] if case.peers else [])
    checked = {item.name: usable(item, Compiled(item, inputs), reference) for item in candidates}
    say(
        f"{case.name}: " + "; ".join(_errors_line(name, result) for name, result in checked.items())
    )
    for name, result in checked.items():
        for what, text in result["failed"].items():
            say(f"{case.name}: {name} {what} did not run: {text}")

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
        for name, measured in interleaved(functions, rounds=rounds).items():
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
    rows["ratio"] = {
        what: round(rows["cudnn"]["times"][what]["ms"] / rows["packax"]["times"][what]["ms"], 3)
        for what in (*PASSES, "bwd~")
        if case.peers and what in rows["cudnn"]["times"] and what in rows["packax"]["times"]
    }
    return rows


def _errors_line(name: str, result: dict[str, Any]) -> str:
    return f"{name} errors " + " ".join(
        f"{what} {error:.1e}" for what, error in result["errors"].items()
    )


def table(results: dict[str, Any], peers: dict[str, Any]) -> str:
    """One line a case and pass; the peers' columns are the board's, from another run."""
    head = f"{'case':<18}{'pass':<9}{'packax ms':>10}{'TFLOP/s':>9}{'cuDNN ms':>10}{'TFLOP/s':>9}"
    head += f"{'ratio':>7}{'error':>9}{'cuDNN':>9}{'| board: FA4':>13}{'Flex':>6}{'kvax':>6}"
    lines = [head]
    for name, rows in results.items():
        for what in (*PASSES, "bwd~"):
            cells = f"{name:<18}{what:<9}"
            for implementation in ("packax", "cudnn"):
                cell = rows.get(implementation, {}).get("times", {}).get(what)
                cells += (
                    f"{cell['ms']:>10.3f}{cell['tflops']:>9.1f}" if cell else f"{'-':>10}{'-':>9}"
                )
            ratio = rows.get("ratio", {}).get(what)
            cells += f"{ratio:>7.2f}" if ratio else f"{'-':>7}"
            names = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}.get(what, ())
            for implementation in ("packax", "cudnn"):
                errors = rows.get(implementation, {}).get("errors", {})
                worst = [errors[key] for key in names if key in errors]
                cells += f"{max(worst):>9.1e}" if worst else f"{'':>9}"
            board = peers["cases"].get(name, {})
            values = [
                board.get(peer, {}).get(what, {}).get("tflops") for peer in ("fa4", "flex", "kvax")
            ]
            cells += "".join(
                f"{'' if v is None else f'{v:.0f}':>{width}}"
                for v, width in zip(values, (13, 6, 6), strict=True)
            )
            lines.append(cells)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="comma-separated names (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds, of which the median is reported"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three rounds, and only the cases up to 32k tokens"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", HERE / "results")))
    arguments = parser.parse_args()
    cases = select(arguments.cases)
    rounds = arguments.rounds
    if arguments.quick:
        rounds = min(rounds, 3)
        cases = [case for case in cases if case.seq <= 32768]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # cuDNN wants room beside jax's
    if jax.default_backend() != "gpu":
        raise SystemExit(
            f"attention.py times GPU kernels, and jax runs on {jax.default_backend()!r} here: "
            f"jax.devices() = {jax.devices()}"
        )

    arguments.out.mkdir(parents=True, exist_ok=True)
    peers = json.loads((HERE / "peers.json").read_text())
    report: dict[str, Any] = {
        "machine": machine(),
        "commit": os.environ.get("PACKAX_COMMIT", "unknown"),
        "rounds": rounds,
    }
    say(", ".join(f"{key} {value}" for key, value in report["machine"].items()))

    def step(name: str, function: Any) -> Any:
        """A failure is reported, and the other measurements go on."""
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
    overheads["first_call"] = step("first call", first_call)
    say(f"first call: {overheads['first_call']}")
    for case in cases:
        report["cases"][case.name] = step(case.name, lambda case=case: run_case(case, rounds))
        if report["cases"][case.name].get("packax", {}).get("wrong") or report["cases"][
            case.name
        ].get("packax", {}).get("failed"):
            failures.append(case.name)
        (arguments.out / "attention.json").write_text(json.dumps(report, indent=1) + "\n")
    overheads["mask_building"] = step("mask building", mask_building)
    overheads["handlers"] = step("handler time", handler_time)
    report["triton_imported"] = "triton" in sys.modules
    (arguments.out / "attention.json").write_text(json.dumps(report, indent=1) + "\n")
    step("chart", lambda: bar_chart(report, peers, arguments.out / "attention.png"))

    print(f"\nfirst call   {overheads['first_call']}")
    print(f"mask         {overheads['mask_building']}")
    print(f"handlers     {overheads['handlers']}\n")
    print(table(report["cases"], peers))
    print(f"\nboard: {peers['machine']}; bwd~ = (fwd+bwd) - fwd; ratio = cuDNN ms / packax ms")
    print(f"wrote {arguments.out / 'attention.json'} and attention.png")
    if failures:
        print(f"FAILED: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
