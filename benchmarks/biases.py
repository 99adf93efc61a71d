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
import os
import sys
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN
# jax 0.11.2 ends the process if cuDNN's attention with dropout becomes part of a CUDA graph
# ("Check failed: local_device_ordinal.has_value()"), so all run without graphs.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
).strip()

import jax
from lib.bias_cases import (
    CASES,
    BiasCase,
    Function,
    cudnn_function,
    jax_function,
    packax_function,
)
from lib.bias_reference import Reference
from lib.implementations import Compiled, Implementation, random_inputs
from lib.machine import machine
from lib.output import Report, arguments_of, picked, require_gpu
from lib.passes import time_passes, usable
from lib.turns import PASSES, bad_cases, table

ORDER = ("packax", "plain", "xla", "cudnn")


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
    inputs, operand = random_inputs(case), case.operand()
    reference = Reference(case, inputs, operand)
    functions = {
        "packax": packax_function(case),
        "plain": packax_function(case, plain=True),
        "xla": jax_function(case),
        "cudnn": cudnn_function(case),
    }
    rows = {
        name: checked(name, function, case, inputs, operand, reference)
        for name, function in functions.items()
    }
    time_passes(rows, {what: case.flops(what) for what in PASSES}, rounds)
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = arguments_of(__doc__, "comma-separated names", rounds=5).parse_args(arguments)
    cases = picked(CASES, options.cases, lambda case: "")
    require_gpu()
    report = Report(options.out, "biases", options.rounds, machine=machine())
    results = report.run(
        cases,
        lambda case: run_case(case, options.rounds),
        lambda results: table(results, ORDER),
    )
    print("plain: packax without bias and dropout")
    return report.end(bad_cases(results, ORDER[:2]))


if __name__ == "__main__":
    sys.exit(main())
