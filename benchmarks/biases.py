"""Biases with gradients and dropout: packax compared with jax.nn in XLA and cuDNN, and with itself
without them.

    python benchmarks/biases.py [--cases NAME,NAME] [--rounds 5] [--out DIR]

Cases: lib/bias_cases.py. Every output and gradient, including the bias's, is compared with a
float32 reference before anything is timed; a wrong one is not timed and makes the program exit 1.
The peers' dropout drops different elements, so only the mean of their output is compared. FLOPs are
those of attention without the bias, 4 * H * D per attended pair forward, 2.5 times that backward;
the gradient of a bias is not counted. `plain` is packax without bias and dropout, on the kernels
for such calls. The backward is timed separately. Ratios are over packax's time. Writes biases.json
into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN
# jax 0.11.2 ends the process if cuDNN's attention with dropout becomes part of a CUDA graph
# ("Check failed: local_device_ordinal.has_value()"), so all run without graphs.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
).strip()

import jax
import jax.numpy as jnp
from lib.bias_cases import (
    BiasCase,
    Function,
    cudnn_function,
    jax_function,
    packax_function,
    select,
)
from lib.bias_reference import Reference
from lib.implementations import Compiled, Implementation
from lib.machine import machine
from lib.output import Report, arguments_of, first_line, require_gpu, say
from lib.passes import time_passes, usable
from lib.turns import troubles

PASSES = ("fwd", "bwd")
ORDER = ("packax", "plain", "xla", "cudnn")


def inputs_of(case: BiasCase) -> tuple[jax.Array, ...]:
    """query, key, value and the output's cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return tuple(
        jax.random.normal(key, (case.batch, case.seq, n, case.dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )


def checked(
    name: str, function: Function, case: BiasCase, inputs: Any, operand: Any, reference: Reference
) -> dict[str, Any]:
    """The row of `usable`: a bias is differentiated, too."""
    *tensors, dout = inputs
    more = () if operand is None else (operand,)

    def attention(q: Any, k: Any, v: Any, *others: Any) -> jax.Array:
        return function(q, k, v, others[0] if more else None)

    other_bits = bool(case.dropout) and name != "packax"
    errors_of = functools.partial(reference.errors, other_bits=other_bits)
    compiled = Compiled(Implementation(name, attention, ()), (*tensors, *more, dout))
    return usable(compiled, None if name == "plain" else errors_of)


def run_case(case: BiasCase, rounds: int) -> dict[str, Any]:
    inputs, operand = inputs_of(case), case.operand()
    reference = Reference(case, inputs, operand)
    functions = {
        "packax": packax_function(case),
        "plain": packax_function(case, plain=True),
        "xla": jax_function(case),
        "cudnn": cudnn_function(case),
    }
    rows: dict[str, Any] = {}
    for name, function in functions.items():
        row = rows[name] = checked(name, function, case, inputs, operand, reference)
        errors = " ".join(f"{what} {error:.1e}" for what, error in row["errors"].items())
        say(f"{case.name}: {name} {errors} {'; '.join(troubles('', row))}")
    time_passes(rows, {what: case.flops(what) for what in PASSES}, rounds)
    return rows


def table(results: dict[str, Any]) -> str:
    """One line per case and pass: milliseconds of each, the ratios, and packax's largest error."""
    lines = [
        f"{'case':<20}{'pass':<5}" + "".join(f"{name:>18}" for name in ORDER) + f"{'error':>9}"
    ]
    for name, rows in results.items():
        for what in PASSES:
            ours = rows.get("packax", {}).get("times", {}).get(what)
            line = f"{name:<20}{what:<5}"
            for who in ORDER:
                cell = rows.get(who, {}).get("times", {}).get(what)
                ratio = f"{cell['ms'] / ours['ms']:.2f}" if cell and ours else "-"
                line += f"{cell['ms']:>12.3f}{ratio:>6}" if cell else f"{'-':>12}{'-':>6}"
            errors = rows.get("packax", {}).get("errors", {}).values()
            lines.append(line + (f"{max(errors):>9.1e}" if errors else f"{'-':>9}"))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = arguments_of(__doc__, "comma-separated names", rounds=5).parse_args(arguments)
    cases = select(options.cases)
    require_gpu()
    report = Report(options.out, "biases", options.rounds, machine=machine())
    failures = []
    for case in cases:
        try:
            rows = run_case(case, options.rounds)
            if any(row["wrong"] for row in rows.values()) or rows["packax"]["failed"]:
                failures.append(case.name)
        except Exception as error:
            traceback.print_exc(limit=6)
            rows = {"failed": first_line(error)}
            failures.append(case.name)
        report.add(case.name, rows)
        gc.collect()
    print(table({name: rows for name, rows in report["cases"].items() if "failed" not in rows}))
    print("ms, and the ratio to packax's; plain: packax without bias and dropout")
    return report.end(failures)


if __name__ == "__main__":
    sys.exit(main())
