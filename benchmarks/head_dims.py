"""Head dims between those of Hopper's kernels: padded to the next of them, as packax does there,
compared with the fallback kernels, which need no padding, and cuDNN.

    python benchmarks/head_dims.py [--dims 32,80,96,192] [--rounds 5] [--out DIR] [--quick]

Causal rows, and 12 documents in one row, 32/8 heads in bfloat16. Outputs and gradients of both are
compared before anything is timed; results in bfloat16 may differ by 1 %, and a wrong one makes the
program exit 1. cuDNN is called through jax.nn, only for causal rows. The backward is timed
separately.
Writes head_dims.json into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN

import jax
import jax.numpy as jnp
from lib.cases import Case
from lib.implementations import cudnn_attention, packax_attention, random_inputs
from lib.machine import machine
from lib.output import Report, arguments_of, first_line, say
from lib.reference import relative
from lib.timing import interleaved
from packax._src.ops import lowering

ROWS = ((2048, 1), (16384, 1), (32768, 12), (256, 1))  # tokens, documents
LIMIT = 1e-2
Passes = dict[str, Callable[[], Any]]


@contextlib.contextmanager
def unpadded() -> Iterator[None]:
    """Inside this context nothing is padded at compile time."""
    jax.clear_caches()
    with mock.patch.object(lowering, "padded_dims", lambda *_: None):
        yield
    jax.clear_caches()


def passes_of(implementation: Any, inputs: tuple[jax.Array, ...]) -> tuple[Passes, list[Any]]:
    """Both passes, and what they return: out, dq, dk, dv. They are compiled here, not at their
    first call (lib.implementations.Compiled), which would be after `unpadded` has ended."""
    query, key, value, cotangent = inputs
    function, operands = implementation.function, implementation.operands

    @jax.jit
    def residuals(query, key, value, operands):
        return jax.vjp(lambda *x: function(*x, operands), query, key, value)[1]

    forward = jax.jit(function).lower(query, key, value, operands).compile()
    pullback = residuals(query, key, value, operands)
    backward = jax.jit(lambda pullback, x: pullback(x)).lower(pullback, cotangent).compile()
    passes: Passes = {
        "fwd": lambda: forward(query, key, value, operands),
        "bwd": lambda: backward(pullback, cotangent),
    }
    return passes, jax.block_until_ready([passes["fwd"](), *passes["bwd"]()])


def run(case: Case, rounds: int) -> dict[str, Any]:
    inputs = random_inputs(case)
    found: dict[str, Passes] = {}
    report: dict[str, Any] = {"times": {}, "failed": {}}
    with unpadded():
        found["fallback"], expected = passes_of(packax_attention(case), inputs)
    found["packax"], results = passes_of(packax_attention(case), inputs)
    pairs = zip(results, expected, strict=True)
    report["differences"] = [relative(x, y.astype(jnp.float32)) for x, y in pairs]
    report["wrong"] = not max(report["differences"]) <= LIMIT
    del expected, results
    if case.documents == 1 and jax.default_backend() == "gpu":
        try:
            found["cudnn"], _ = passes_of(cudnn_attention(case), inputs)
        except Exception as error:
            report["failed"]["cudnn"] = first_line(error)
    if report["wrong"]:
        return report
    flops = {"fwd": case.forward_flops, "bwd": case.backward_flops}
    for what, number in flops.items():
        times = interleaved({name: own[what] for name, own in found.items()}, rounds=rounds)
        report["times"][what] = {name: x.as_dict(number) for name, x in times.items()}
    return report


def line(name: str, report: dict[str, Any]) -> str:
    cells = [f"{name:<22}"]
    for row in report["times"].values():
        own = row["packax"]
        cells.append(f"{own['ms']:9.3f} ms {own['tflops']:6.0f} TFLOP/s")
        ratios = (
            (x, f"{row[x]['ms'] / own['ms']:5.2f}") for x in ("fallback", "cudnn") if x in row
        )
        cells.append(" ".join(f"{x} {ratio}" for x, ratio in ratios))
    return "  ".join(cells) + ("  WRONG" if report["wrong"] else "")


def main() -> int:
    parser = arguments_of(__doc__, rounds=5)
    parser.add_argument("--dims", default="96,80,32,192")
    parser.add_argument("--quick", action="store_true", help="tiny rows: tries the program")
    arguments = parser.parse_args()
    rows = ((96, 1), (256, 3)) if arguments.quick else ROWS
    cases = [
        Case(f"{'causal' if n == 1 else f'docs{n}'}_{length}_d{dim}", 1, length, 32, 8, dim, n)
        for length, n in rows
        for dim in map(int, arguments.dims.split(","))
    ]
    report = Report(arguments.out, "head_dims", arguments.rounds, machine=machine())
    say(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    for case in cases:
        report.add(case.name, run(case, arguments.rounds))
        say(line(case.name, report["cases"][case.name]))
    print("\nratios are times over packax's")
    for name, of_case in report["cases"].items():
        print(line(name, of_case))
    return report.end([name for name, row in report["cases"].items() if row["wrong"]])


if __name__ == "__main__":
    sys.exit(main())
