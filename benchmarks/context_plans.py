"""Balance of context-parallel plans on real document lengths; needs no GPU.

    python benchmarks/context_plans.py [--packings 100] [--out DIR]
    python benchmarks/context_plans.py --cost [--ranks 8]

Rows are packed from the sources of this Python's standard library (one document per file, in random
order, each in the fullest row that still has room), and from 12 documents, as in the board's cases.
For each plan it lists the attended pairs of the most loaded rank relative to the mean ("area"), and
the same for the pairs that kernels visit: whole blocks of 128 keys between the first and the last
key of a tile of rows ("tiles").
Writes context_plans.json and context_plans.png into --out (default: $OUT, else benchmarks/results).

--cost prints the host time of making a "local" plan: the median and the slowest of ten rows with
128k tokens and about 1000 documents of lognormal lengths, each the fastest of seven runs.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import packax
from lib.cases import document_lengths
from lib.context_cases import lognormal_lengths
from lib.output import arguments_of, write_json
from packax.demo.data import standard_library

TILE = 128
LENGTHS = (32768, 131072)
RANKS = (4, 8, 16)
SWEEP = (128, 256, 512, 1024, 2048)  # chunk sizes, for the longer rows


def library_rows(length: int, count: int) -> list[list[int]]:
    """The document lengths of `count` rows, at most ten from each packing."""
    sizes = [len(text) + 1 for text in standard_library()]
    pieces: list[int] = []
    for size in sizes:
        pieces += [length] * (size // length) + [size % length] * (size % length > 0)
    rng = np.random.default_rng(0)
    rows: list[list[int]] = []
    while len(rows) < count:
        order = rng.permutation(pieces)
        packed = [[int(order[i]) for i in row] for row in fit(order.tolist(), length)]
        rows += [packed[i] for i in rng.permutation(len(packed))[:10]]
    return rows[:count]


def fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit packing: the indices of `lengths` in each row."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"a document of {length} tokens does not fit in a row of {capacity}")
        place = bisect.bisect_left(free, (length, 0))
        room, row = free.pop(place) if place < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if room > length:
            bisect.insort(free, (room - length, row))
    return rows


def ranges(lengths: list[int], total: int) -> tuple[np.ndarray, np.ndarray]:
    """The row ranges of causal documents; those of padding are empty."""
    lo, hi = np.zeros((2, total), np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for start, end in itertools.pairwise(starts):
        lo[start:end], hi[start:end] = start, np.arange(start, end) + 1
    return lo, hi


def visited(lo: np.ndarray, hi: np.ndarray) -> float:
    """The pairs in the key blocks that kernels visit, for tiles of 128 rows and 128 keys."""
    missing = -len(lo) % TILE
    lo = np.where(lo < hi, lo, 2**40)
    if missing:
        lo, hi = np.pad(lo, (0, missing), constant_values=2**40), np.pad(hi, (0, missing))
    lo, hi = lo.reshape(-1, TILE).min(1), hi.reshape(-1, TILE).max(1)
    first, last = lo // TILE, -(-hi // TILE)
    return float(np.sum(np.where(lo < hi, last - first, 0)) * TILE * TILE)


def expression_of(sizes: list[int], length: int) -> Any:
    """The causal mask of documents of these sizes; the rest of the row is padding."""
    ids = np.full(length, packax.PADDING_SEGMENT_ID, np.int32)
    ids[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    return packax.causal() & packax.documents(ids)


def planned(
    sizes: list[int], length: int, ranks: int | tuple[int, ...], kind: str, chunk: int | None = None
) -> packax.context.ContextPlan | None:
    """The plan of a row with documents of these sizes; None for "none"."""
    if kind == "none":
        return None
    expression = expression_of(sizes, length)
    return packax.context_plan(expression, ranks=ranks, kind=kind, chunk=chunk)


def measure(
    lengths: list[int], total: int, ranks: int, name: str, chunk: int | None = None
) -> dict[str, Any]:
    lo, hi = ranges(lengths, total)
    plan = planned(lengths, total, ranks, name, chunk)
    order = np.arange(total) if plan is None else plan.index()[0]
    lo, hi = (x[order].reshape(ranks, -1) for x in (lo, hi))
    area = (hi - lo).sum(1)
    tiles = [visited(*x) for x in zip(lo, hi, strict=True)]
    return {
        "area": area.max() / area.mean(),
        "tiles": max(tiles) / np.mean(tiles),
        "loads": (area / area.mean()).tolist(),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for key in ("area", "tiles"):
        values = [row[key] for row in rows]
        found |= {key: round(float(np.mean(values)), 4), f"{key}_max": round(max(values), 4)}
    return found


def cost(ranks: int, length: int = 131072, documents: int = 1000) -> list[float]:
    """The milliseconds to make a "local" plan for each row."""
    times = []
    for seed in range(10):
        sizes = lognormal_lengths(length, length // documents, seed)
        expression = expression_of(sizes, length)
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            packax.context_plan(expression, ranks=ranks, kind="local")
            best = min(best, time.perf_counter() - start)
        times.append(1e3 * best)
    return times


def picture(loads: dict[str, list[list[float]]], title: str, path: Path) -> None:
    """Plots the load of each rank, most loaded first: one line per packing, and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, (name, rows) in zip(axes, loads.items(), strict=True):
        x = np.arange(len(rows[0]))
        ordered = np.sort(np.asarray(rows), axis=1)[:, ::-1]
        axis.plot(x, ordered.T, color="0.75", linewidth=0.6)
        axis.plot(x, ordered.mean(0), color="C0", linewidth=2, label="mean of the packings")
        axis.axhline(1, color="C3", linewidth=1, linestyle=":", label="equal work")
        worst = ordered[:, 0]
        axis.set_title(f"{name}: most loaded {worst.mean():.3f}, worst {worst.max():.3f}")
        axis.set_xlabel("rank, most loaded first")
        axis.set_xlim(0, len(x) - 1)
        axis.set_xticks(x[::3])
    axes[0].set_ylabel("attended pairs / mean")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False, loc="upper right")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--packings", type=int, default=100)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--ranks", type=int, default=8, help="of --cost")
    arguments = parser.parse_args()
    if arguments.cost:
        times = cost(arguments.ranks)
        said = f"{statistics.median(times):.1f} ms, slowest {max(times):.1f}"
        print(f"host, 1000 documents in 131072 tokens, {arguments.ranks} ranks: {said}")
        return 0
    count = arguments.packings
    report: dict[str, Any] = {
        "packings": count,
        "python": sys.version.split()[0],
        "documents": "standard library of this Python",
        "plans": {},
        "chunks": {},
    }
    print(f"{'':<44}" + "".join(f"{x:>9}" for x in ("area", "worst", "tiles", "worst")))

    def add(kind: str, name: str, rows: list[list[int]], *plan: Any) -> list[list[float]]:
        """Measures, prints and reports the rows with one plan. Returns the loads of ranks."""
        results = [measure(row, *plan) for row in rows]
        found = report[kind][name] = summary(results)
        print(f"{name:<44}" + "".join(f"{x:>9.3f}" for x in found.values()), flush=True)
        return [row["loads"] for row in results]

    loads: dict[str, list[list[float]]] = {}  # by kind, of the last source: library, 16 ranks
    for total in LENGTHS:
        library = library_rows(total, count)
        sources = {
            "12 documents": [document_lengths(total, 12, seed=seed) for seed in range(count)],
            "library": library,
        }
        for (source, rows), ranks in itertools.product(sources.items(), RANKS):
            for kind in ("none", "zigzag", "balanced"):
                name = f"{source}, {total} rows, {ranks} ranks, {kind}"
                loads[kind] = add("plans", name, rows, total, ranks, kind)
    for chunk, ranks in itertools.product(SWEEP, (4, 16)):
        name = f"{ranks} ranks, chunk {chunk}"
        add("chunks", name, library, LENGTHS[-1], ranks, "balanced", chunk)
    title = (
        f"Load per rank, 16 ranks, {count} rows of 128k tokens of the standard library's sources"
    )
    write_json(arguments.out / "context_plans.json", report)
    picture(loads, title, arguments.out / "context_plans.png")
    worst = max(
        result["area_max"]
        for name, result in report["plans"].items()
        if name.endswith(("8 ranks, balanced", "16 ranks, balanced"))
    )
    print(f"balanced plan, 8 and 16 ranks: most loaded / mean at most {worst:.4f} (limit 1.05)")
    return 0 if worst <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
