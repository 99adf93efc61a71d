"""What plans of context parallelism should cost on GPUs, by a stated model; needs no GPU.

    python benchmarks/context_model.py [--packings 100] [--lengths 131072] [--out DIR]

The model, for 32/8 heads of 128 in bfloat16 on H200s: attention at 640 TFLOP/s forward and 560
backward, scaled by the tiles that a plan makes the kernels visit; 330 GB/s of gathered keys inside
a host, 50 GB/s a GPU of what comes from other hosts; 4.8 TB/s to order gathered keys. Gathers
and reduce-scatters go one at a time, by groups of heads as the program has them. With "local"
private rows are attended while shared keys travel: forward before the shared rows, backward half of
the heads before and half behind them. Efficiency is the time of the mean rank's attention alone
over that of the slowest rank with all of this.

First it checks itself against measured times (docs/performance.md), within 10 %. Then rows of
lognormal lengths (sigma 1.2) and of the standard library's sources: area of the most loaded rank,
shared rows of a rank's, efficiency, without a plan, with zigzag, balanced and local. Writes
context_model.json into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import packax
from context_plans import TILE, library_rows, ranges, visited
from lib.cases import document_lengths
from lib.context_cases import MEANS, lognormal_lengths
from lib.output import default_out

HEADS, KV_HEADS, DIM = 32, 8, 128
RATE = {"fwd": 640e12, "bwd": 560e12}
FLOPS = {"fwd": 4 * HEADS * DIM, "bwd": 10 * HEADS * DIM}  # of an attended pair
ROW = 2 * KV_HEADS * DIM * 2  # bytes of keys and values
INSIDE, BETWEEN, MEMORY, HOST = 330e9, 50e9, 4.8e12, 8
PLANS = ("none", "zigzag", "balanced", "local")
MEASURED = (  # documents, ranks, milliseconds: benchmarks/results/context_parallel_*
    ("12 documents, 4 GPUs", 12, 4, {"fwd": 9.6988, "bwd": 27.5997}),
    ("40 documents, 2 GPUs", 40, 2, {"fwd": 6.060, "bwd": 17.312}),
)


def planned(sizes: list[int], length: int, ranks: int, kind: str) -> packax.ContextPlan | None:
    if kind == "none":
        return None
    ids = np.full(length, packax.PADDING_SEGMENT_ID)
    ids[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    expression = packax.causal() & packax.documents(ids)
    return packax.context_plan(expression, ranks=ranks, kind=kind)


def work(sizes: list[int], plan: packax.ContextPlan | None, length: int, ranks: int) -> Any:
    """Of each rank: attended pairs, and pairs in the tiles visited for private and shared rows."""
    lo, hi = ranges(sizes, length)
    own = length // ranks
    order = np.arange(length) if plan is None else plan.index()[0]
    shared = own if plan is None or plan.shared is None else plan.shared
    area = (hi - lo)[order].reshape(ranks, -1).sum(1)
    if shared == own:
        tiles = [visited(lo[rows], hi[rows], TILE) for rows in order.reshape(ranks, -1)]
        return area, np.zeros(ranks), np.array(tiles), shared
    # In each part keys are numbered in the order of the sequence.
    is_shared = np.zeros(length, bool)
    is_shared[order.reshape(ranks, -1)[:, :shared]] = True
    parts = []
    for rows in order.reshape(ranks, -1):
        mine = np.zeros(length, bool)
        mine[rows] = True
        document = lo[rows]
        # A document with a private row is read from the rank's own keys.
        kept = np.isin(document, document[shared:][hi[rows[shared:]] > lo[rows[shared:]]])
        kept[shared:] = True
        tiles = []
        for keys, among, held in ((mine, slice(None), kept), (is_shared, slice(shared), ~kept)):
            before = np.concatenate([[0], np.cumsum(keys)])
            first, last = before[lo[rows]], before[hi[rows]]
            first, last = (np.where(held, x, 0)[among] for x in (first, last))
            tiles.append(visited(first, last, TILE))
        parts.append(tiles)
    private, of_shared = np.array(parts).T
    return area, private, of_shared, shared


def travel(ranks: int, shared: int, per_host: int) -> float:
    """Seconds to gather the shared rows of all ranks."""
    inside = ranks * shared * ROW / INSIDE
    if ranks <= per_host:
        return inside
    return max(inside, (ranks - per_host) * shared * ROW / BETWEEN)


def groups(ranks: int, what: str, one: bool) -> tuple[float, ...]:
    """Shares of the heads that travel together, as core/sharding.py has them."""
    if one or ranks == 2:
        return (1.0,)
    return (1 / 8, 3 / 8, 1 / 2) if what == "fwd" else (1 / 4, 1 / 2, 1 / 4)


def seconds(what: str, private: float, shared: float, wire: float, ranks: int, one: bool) -> float:
    """One rank's pass: attention of private and of shared rows, and a gather of all heads."""
    if wire == 0:
        return private
    parts = groups(ranks, what, one)
    clock = wired = 0.0
    clock += private if what == "fwd" else private / 2
    sent = []
    for part in parts:
        wired += part * wire
        clock = max(clock, wired) + part * shared
        sent.append(clock)
    if what == "bwd":
        for part, ready in zip(parts, sent, strict=True):
            wired = max(wired, ready) + part * wire
        clock = max(clock + private / 2, wired)
    copies = 2 * wire * INSIDE / MEMORY  # read and written, of what came
    return clock + copies * (1 if what == "fwd" else 2)


def predict(
    sizes: list[int], length: int, ranks: int, kind: str, per_host: int = HOST
) -> dict[str, float]:
    plan = planned(sizes, length, ranks, kind)
    lo, hi = ranges(sizes, length)
    in_order = visited(lo, hi, TILE)
    area, private, of_shared, shared = work(sizes, plan, length, ranks)
    pairs = area.sum() / in_order  # attended, of a pair in a visited tile
    one = (length // ranks - shared) >= ranks * shared
    wire = travel(ranks, shared, per_host)
    found: dict[str, float] = {
        "area": float(area.max() / area.mean()),
        "shared": shared * ranks / length,
        "visited": float((private.sum() + of_shared.sum()) / in_order),
    }
    for what, rate in RATE.items():
        speed = rate / FLOPS[what] / pairs  # of pairs in visited tiles a second
        times = [
            seconds(what, mine / speed, other / speed, wire, ranks, one)
            for mine, other in zip(private, of_shared, strict=True)
        ]
        alone = area.mean() * FLOPS[what] / rate
        found[what] = alone / max(times)
        found[f"{what}_ms"] = max(times) * 1e3
    return found


def check() -> tuple[dict[str, Any], bool]:
    """Measured times beside the model's."""
    rows, good = {}, True
    for name, documents, ranks, measured in MEASURED:
        found = predict(document_lengths(131072, documents), 131072, ranks, "balanced")
        row = {}
        for what, ms in measured.items():
            model = found[f"{what}_ms"]
            row[what] = {"measured": ms, "model": round(model, 2), "ratio": round(model / ms, 3)}
            good &= abs(model / ms - 1) <= 0.1
        rows[name] = row
        print(f"{name}: " + ", ".join(f"{k} {v['model']} ms of {v['measured']} measured"
                                      for k, v in row.items()))  # fmt: skip
    return rows, good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packings", type=int, default=100)
    parser.add_argument("--lengths", default="32768,131072,524288,1048576")
    parser.add_argument("--ranks", default="4,8,16,32,64")
    parser.add_argument("--means", default=",".join(map(str, MEANS)))
    parser.add_argument("--out", type=Path, default=default_out())
    arguments = parser.parse_args()
    lengths, ranks_of, means = (
        [int(x) for x in getattr(arguments, name).split(",") if x]
        for name in ("lengths", "ranks", "means")
    )
    start = time.perf_counter()
    measured, good = check()
    report: dict[str, Any] = {
        "model": {
            "heads": [HEADS, KV_HEADS, DIM],
            "tflops": {what: rate / 1e12 for what, rate in RATE.items()},
            "gigabytes_a_second": {"inside": INSIDE / 1e9, "between": BETWEEN / 1e9},
            "gpus_of_a_host": HOST,
        },
        "measured": measured,
        "rows": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "context_model.json"
    print(f"{'rows':<22}{'ranks':>6} {'plan':<9}{'area':>7}{'worst':>7}{'shared':>8}{'worst':>7}"
          f"{'visited':>9}{'fwd':>7}{'bwd':>7}")  # fmt: skip
    for length in lengths:
        count = count_of(length, arguments.packings)
        cases = {
            f"documents of {mean}": [lognormal_lengths(length, mean, seed) for seed in range(count)]
            for mean in means
        }
        if length <= 131072:
            cases["library"] = library_rows(length, count)
        for case, packings in cases.items():
            for ranks in ranks_of:
                if length // ranks < 16 * TILE:
                    continue
                for kind in PLANS:
                    found = [predict(sizes, length, ranks, kind) for sizes in packings]
                    row = {"length": length, "case": case, "ranks": ranks, "plan": kind}
                    row["packings"] = len(packings)
                    for key in ("area", "shared", "visited", "fwd", "bwd"):
                        values = [x[key] for x in found]
                        row[key] = round(float(np.mean(values)), 4)
                        if key in ("area", "shared"):
                            row[f"{key}_worst"] = round(max(values), 4)
                    report["rows"].append(row)
                    print(f"{case + f', {length // 1024}k':<22}{ranks:>6} {kind:<9}"
                          f"{row['area']:>7.3f}{row['area_worst']:>7.3f}{row['shared']:>8.3f}"
                          f"{row['shared_worst']:>7.2f}{row['visited']:>9.3f}{row['fwd']:>7.1%}"
                          f"{row['bwd']:>7.1%}", flush=True)  # fmt: skip
                report["seconds"] = round(time.perf_counter() - start, 1)
                path.write_text(written(report))
    print(f"wrote {path}")
    return 0 if good else 1


def written(report: dict[str, Any]) -> str:
    """As JSON, with a line for each row of the table."""
    rows = ",\n".join("  " + json.dumps(row) for row in report["rows"])
    head = json.dumps(report | {"rows": []}, indent=1)
    return head.replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"


def count_of(length: int, packings: int) -> int:
    """Fewer of the longest rows, which hold more documents."""
    return max(1, packings * 131072 // max(length, 131072))


if __name__ == "__main__":
    sys.exit(main())
