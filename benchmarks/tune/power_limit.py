"""Measures the cost of the GPU's power limit: packax and a matrix product on random data and zeros.

    python benchmarks/tune/power_limit.py [--cases causal_16k_d128,docs12_32k_d64] [--rounds 3]
        [--size 8192] [--out DIR]

On zeros, the same instructions switch few bits, so they use less power and the clock stays high:
the difference in time is the cost of the power limit. Times with zeros are not a measure of speed.
Bursts of a second take turns; power and clock are read by power.py.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from lib.cases import select
from lib.implementations import Compiled, packax_attention, random_inputs
from lib.machine import machine
from lib.output import Report, arguments_of
from lib.power import Meter, line, medians, metered
from lib.turns import as_row, burst, in_turns, launches_of


def product(size: int, zeros: bool) -> Any:
    x, y = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    if zeros:
        x, y = jnp.zeros_like(x), jnp.zeros_like(y)
    function = jax.jit(jnp.matmul)
    return lambda: function(x, y)


def passes(size: int, names: str) -> dict[str, tuple[Any, float]]:
    """name -> (function, FLOPs) for each pass, with random inputs and with zeros."""
    found: dict[str, tuple[Any, float]] = {}
    for kind in ("random", "zeros"):
        zeros = kind == "zeros"
        found[f"product {size}, {kind}"] = (product(size, zeros), 2.0 * size**3)
        for case in select(names):
            inputs = random_inputs(case)
            if zeros:
                inputs = jax.tree.map(jnp.zeros_like, inputs)
            compiled = Compiled(packax_attention(case), inputs)
            for what, flops in (("fwd", case.forward_flops), ("bwd", case.backward_flops)):
                found[f"{case.name} {what}, {kind}"] = (compiled.function(what), flops)
    return found


def measure(
    found: dict[str, tuple[Any, float]], rounds: int, round_ms: float, meter: Meter
) -> dict[str, Any]:
    finish = jax.block_until_ready
    launches = {name: launches_of(f, finish, round_ms) for name, (f, _) in found.items()}
    read: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    bursts = {
        name: metered(meter, functools.partial(burst, f, finish, launches[name]), read[name])
        for name, (f, _) in found.items()
    }
    rows = {}
    for name, took in in_turns(bursts, rounds).items():
        row = as_row(took, found[name][1])
        rows[name] = row | medians(read[name], row["ms"])
    return rows


def table(rows: dict[str, Any]) -> str:
    return "\n".join(
        f"{name:<32}{row['ms']:>9.3f} ms{row['tflops']:>8.1f} TFLOP/s  {line('', '', row).strip()}"
        for name, row in rows.items()
    )


def main() -> int:
    parser = arguments_of(__doc__, "names", default="causal_16k_d128,docs12_32k_d64", rounds=3)
    parser.add_argument("--round-ms", type=float, default=1000.0)
    parser.add_argument("--size", type=int, default=8192, help="of the plain product")
    arguments = parser.parse_args()
    meter = Meter()
    found = passes(arguments.size, arguments.cases)
    report = Report(arguments.out, "power_limit", arguments.rounds, machine=machine())
    for name, row in measure(found, arguments.rounds, arguments.round_ms, meter).items():
        report.add(name, row)
    print(table(report["cases"]))
    return report.end([])


if __name__ == "__main__":
    sys.exit(main())
