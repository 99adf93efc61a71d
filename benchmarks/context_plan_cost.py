"""Host time of a plan of kind "local"; needs no GPU.

    python benchmarks/context_plan_cost.py [--length 131072] [--ranks 8] [--documents 1000]

Ten rows of about that many documents with lognormal lengths; for each the fastest of seven runs.
Prints the median of the rows, and the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import packax
from lib.context_cases import lognormal_lengths


def milliseconds(length: int, ranks: int, documents: int) -> list[float]:
    """For each row."""
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
    times = milliseconds(arguments.length, arguments.ranks, arguments.documents)
    print(f"host, {arguments.documents} documents in {arguments.length} tokens, {arguments.ranks} "
          f"ranks: {statistics.median(times):.1f} ms, slowest {max(times):.1f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
