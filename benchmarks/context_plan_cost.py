"""What making a plan of kind "local" costs: on the host by the clock, inside `jit` on a GPU by its
operations.

    python benchmarks/context_plan_cost.py [--length 131072] [--ranks 8] [--documents 1000]

On the host: ten rows of about so many documents, lognormal lengths, the quickest of seven plans of
each; the median of the rows, and the slowest.

Inside `jit`. Needs no GPU: operations are counted in the program that XLA compiles for the CPU,
those of a loop as often as it runs. The model: each launches a kernel, 3 to 5 us, and all move the
bytes of XLA's cost analysis at 3 TB/s. XLA fuses more for GPUs, so that this is an upper bound of
launches.
"""

from __future__ import annotations

import argparse
import collections
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.context_cases import lognormal_lengths

FREE = {"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "after-all"}
LAUNCH, MEMORY = (3e-6, 5e-6), 3e12


def operations(text: str) -> tuple[collections.Counter[str], list[tuple[int, int]]]:
    """How often each kind runs in compiled HLO, and (times, operations) of each loop."""
    text = re.sub(r"/\*.*?\*/", "", text)
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = header[2]
            entry = name if header[1] else entry
            bodies[name] = []
        elif " = " in line and name:
            bodies[name].append(line)
    loops: list[tuple[int, int]] = []

    def of(name: str) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        for line in bodies[name]:
            kind = re.search(r" = (?:\([^=]*?\)|\S+) ([\w-]+)\(", line)
            assert kind is not None, line
            if kind[1] == "while":
                body, times = re.search(r"body=%?([\w.-]+)", line), re.search(r'"n":"(\d+)"', line)
                assert body is not None and times is not None, line
                inside = of(body[1])
                loops.append((int(times[1]), inside.total()))
                found.update({key: int(times[1]) * number for key, number in inside.items()})
            elif kind[1] == "call":
                called = re.search(r"to_apply=%?([\w.-]+)", line)
                assert called is not None, line
                found.update(of(called[1]))
            elif kind[1] not in FREE:
                found[kind[1]] += 1
        return found

    return of(entry), loops


def on_host(length: int, ranks: int, documents: int) -> list[float]:
    """Milliseconds for each row."""
    times = []
    for seed in range(10):
        sizes = lognormal_lengths(length, length // documents, seed)
        ids = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            expression = packax.causal() & packax.documents(ids)
            packax.context_plan(expression, ranks=ranks, kind="local")
            best = min(best, time.perf_counter() - start)
        times.append(1e3 * best)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--documents", type=int, default=1000)
    arguments = parser.parse_args()
    times = on_host(arguments.length, arguments.ranks, arguments.documents)
    print(f"host, {arguments.documents} documents in {arguments.length} tokens, {arguments.ranks} "
          f"ranks: {statistics.median(times):.1f} ms, slowest {max(times):.1f}")  # fmt: skip

    def plan(ids: jax.Array) -> tuple[jax.Array, ...]:
        expression = packax.causal() & packax.documents(ids)
        made = packax.context_plan(expression, ranks=arguments.ranks, kind="local", shared=0.25)
        return made.order, made.inverse, made.split, made.fallback

    ids = jax.ShapeDtypeStruct((1, arguments.length), jnp.int32)
    compiled = jax.jit(plan).lower(ids).compile()
    found, loops = operations(compiled.as_text())
    cost = compiled.cost_analysis()
    size = (cost[0] if isinstance(cost, list) else cost)["bytes accessed"]
    looped = sum(times * number for times, number in loops)
    print(f"{found.total()} operations, of them {looped} in loops: "
          + ", ".join(f"{times} x {number}" for times, number in loops))  # fmt: skip
    print("kinds: " + ", ".join(f"{number} {kind}" for kind, number in found.most_common()))
    least, most = (1e3 * (found.total() * launch + size / MEMORY) for launch in LAUNCH)
    print(f"{size / 1e6:.0f} MB: {1e3 * size / MEMORY:.2f} ms; in all {least:.1f} to {most:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
