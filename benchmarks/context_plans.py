"""Balance of context-parallel plans on real document lengths; needs no GPU.

    python benchmarks/context_plans.py [--packings 100] [--out DIR]
    python benchmarks/context_plans.py --cost [--ranks 8]

Rows are packed from the sources of this Python's standard library, one document per file, in random
order, each into the fullest row that still has room; and from the lengths of the board's case with
12 documents. For each plan: attended pairs of the most loaded rank over the mean ("area"), the same
for the pairs that the kernels visit (whole blocks of 128 keys inside the hull of a tile of rows:
"tiles"), all ranks' visited pairs over those of the row in order ("visited": the cost of cutting
into chunks), and the keys that no row of a rank attends to, so that it need not fetch them
("unread").
Writes context_plans.json and context_plans.png into --out (default: $OUT, else benchmarks/results).

--cost prints the host time of a plan of kind "local": for ten rows of 128k tokens and about 1000
documents with lognormal lengths, the fastest of seven runs each; their median, and the slowest.
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
SWEEP = (128, 256, 512, 1024, 2048)  # chunks, at the longer length


def library_rows(length: int, count: int) -> list[list[int]]:
    """Document lengths of `count` rows, at most ten of one packing."""
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
    """Best fit: the indices of `lengths` by row, each in the fullest row that has room."""
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
    """Row ranges of causal documents; padding is empty."""
    lo, hi = np.zeros((2, total), np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for start, end in itertools.pairwise(starts):
        lo[start:end], hi[start:end] = start, np.arange(start, end) + 1
    return lo, hi


def visited(lo: np.ndarray, hi: np.ndarray, tile: int) -> float:
    """Pairs in whole blocks of 128 keys of the hulls of tiles of rows."""
    missing = -len(lo) % tile
    lo = np.where(lo < hi, lo, 2**40)
    if missing:
        lo, hi = np.pad(lo, (0, missing), constant_values=2**40), np.pad(hi, (0, missing))
    lo, hi = lo.reshape(-1, tile).min(1), hi.reshape(-1, tile).max(1)
    first, last = lo // TILE, -(-hi // TILE)
    return float(np.sum(np.where(lo < hi, last - first, 0)) * TILE * tile)


def read(lo: np.ndarray, hi: np.ndarray, total: int) -> np.ndarray:
    """Whether some row attends to each key."""
    change = np.zeros(total + 1, np.int64)
    np.add.at(change, lo[lo < hi], 1)
    np.add.at(change, hi[lo < hi], -1)
    return np.cumsum(change[:-1]) > 0


def planned(
    sizes: list[int], length: int, ranks: int | tuple[int, ...], kind: str, chunk: int | None = None
) -> packax.context.ContextPlan | None:
    """The plan of a row with documents of these sizes; None for "none"."""
    if kind == "none":
        return None
    ids = np.full(length, packax.PADDING_SEGMENT_ID)
    ids[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    expression = packax.causal() & packax.documents(ids)
    return packax.context_plan(expression, ranks=ranks, kind=kind, chunk=chunk)


def measure(
    lengths: list[int], total: int, ranks: int, name: str, chunk: int | None = None
) -> dict[str, Any]:
    lo, hi = ranges(lengths, total)
    in_order = {tile: visited(lo, hi, tile) for tile in (TILE, 192)}
    plan = planned(lengths, total, ranks, name, chunk)
    order = np.arange(total) if plan is None else plan.index()[0]
    lo, hi = (x[order].reshape(ranks, -1) for x in (lo, hi))
    area = (hi - lo).sum(1)
    tiles = {tile: [visited(*x, tile) for x in zip(lo, hi, strict=True)] for tile in in_order}
    others = 1 - 1 / ranks  # what a rank fetches of the keys, all of them
    mine = np.sort(order.reshape(ranks, -1), axis=1)
    fetched = []
    for rank in range(ranks):
        keys = read(lo[rank], hi[rank], total)
        fetched.append((keys.sum() - keys[mine[rank]].sum()) / total / others)
    return {
        "area": area.max() / area.mean(),
        "tiles": max(tiles[TILE]) / np.mean(tiles[TILE]),
        "visited": sum(tiles[TILE]) / in_order[TILE],
        "visited_192": sum(tiles[192]) / in_order[192],
        "unread": 1 - float(np.mean(fetched)),
        "unread_least": 1 - max(fetched),
        "loads": (area / area.mean()).tolist(),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("area", "tiles", "visited", "visited_192", "unread", "unread_least")
    means = {key: round(float(np.mean([row[key] for row in rows])), 4) for key in keys}
    worst = {f"{key}_max": round(max(row[key] for row in rows), 4) for key in keys[:2]}
    return means | worst


def cost(ranks: int, length: int = 131072, documents: int = 1000) -> list[float]:
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


def picture(loads: dict[str, list[list[float]]], title: str, path: Path) -> None:
    """Load per rank: one line per packing, the most loaded ranks first, and the worst packing."""
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
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    count = arguments.packings
    report: dict[str, Any] = {
        "packings": count,
        "python": sys.version.split()[0],
        "documents": "standard library of this Python",
        "plans": {},
        "chunks": {},
    }
    lines = [
        f"{'rows':<14}{'ranks':>6} {'plan':<11}{'area':>7}{'worst':>7}{'tiles':>7}{'worst':>7}"
        f"{'visited':>9}{'(192)':>7}{'unread':>8}"
    ]
    loads: dict[str, list[list[float]]] = {}
    for total in LENGTHS:
        sources = {
            "library": library_rows(total, count),
            "12 documents": [document_lengths(total, 12, seed=seed) for seed in range(count)],
        }
        for source, rows in sources.items():
            for ranks in RANKS:
                for name in ("none", "zigzag", "balanced"):
                    results = [measure(row, total, ranks, name) for row in rows]
                    result = summary(results)
                    report["plans"][f"{source}, {total} rows, {ranks} ranks, {name}"] = result
                    lines.append(line(f"{source[:7]} {total // 1024}k", ranks, name, result))
                    if (source, total, ranks) == ("library", LENGTHS[-1], 16):
                        loads[name] = [row["loads"] for row in results]
        if total == LENGTHS[-1]:
            for chunk in SWEEP:
                for ranks in (4, 16):
                    rows = sources["library"]
                    results = [measure(row, total, ranks, "balanced", chunk) for row in rows]
                    result = summary(results)
                    report["chunks"][f"{ranks} ranks, chunk {chunk}"] = result
                    lines.append(line(f"chunk {chunk}", ranks, "balanced", result))
    title = (
        f"Load per rank, 16 ranks, {count} rows of 128k tokens of the standard library's sources"
    )
    picture(loads, title, arguments.out / "context_plans.png")
    report["seconds"] = round(time.perf_counter() - start, 1)
    write_json(arguments.out / "context_plans.json", report)
    print("\n".join(lines))
    print(f"wrote {arguments.out / 'context_plans.json'} and context_plans.png")
    worst = max(
        result["area_max"]
        for name, result in report["plans"].items()
        if name.endswith(("8 ranks, balanced", "16 ranks, balanced"))
    )
    print(f"balanced plan, 8 and 16 ranks: most loaded / mean at most {worst:.4f} (limit 1.05)")
    return 0 if worst <= 1.05 else 1


def line(rows: str, ranks: int, name: str, result: dict[str, float]) -> str:
    return (
        f"{rows:<14}{ranks:>6} {name:<11}{result['area']:>7.3f}{result['area_max']:>7.3f}"
        f"{result['tiles']:>7.3f}{result['tiles_max']:>7.3f}{result['visited']:>9.3f}"
        f"{result['visited_192']:>7.3f}{result['unread']:>8.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
