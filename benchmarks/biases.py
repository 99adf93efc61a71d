"""Times biases with their gradients, and dropout, in packax and in jax.nn with XLA and cuDNN.

    python benchmarks/biases.py [--cases NAME,NAME] [--rounds 5] [--out DIR]

Cases: lib/bias_cases.py. Every output and gradient, including the bias's, is first compared with a
float32 reference. Wrong implementations are not timed, and the exit status is 1. Peers drop
different elements, so of their outputs with dropout only the mean is compared. FLOPs are those of
attention without a bias: 4 * H * D per attended pair in the forward pass, 2.5 times that in the
backward pass. `plain` is packax without bias and dropout, on its usual kernels. The backward pass
is timed separately. Ratios are relative to packax's time. Writes biases.json into --out (default:
$OUT, else benchmarks/results).
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN
# jax 0.11.2 aborts the process if cuDNN's attention with dropout is captured in a CUDA graph
# ("Check failed: local_device_ordinal.has_value()"), so CUDA graphs are disabled for all.
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
    """The row of `usable`, with the bias among the differentiated operands."""
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
