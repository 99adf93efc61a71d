"""Predicts the cost of context-parallel plans on GPUs by the model below; needs no GPU.

    python benchmarks/context_model.py [--packings 100] [--lengths 131072] [--out DIR]
    python benchmarks/context_model.py --windows [--out DIR]

The model is for 32/8 heads of 128 in bfloat16 on H200s. Attention runs at 640 TFLOP/s in the
forward and 560 in the backward pass, scaled by the number of tiles that the kernels visit with a
plan. Keys are gathered at 330 GB/s inside a host, and at 50 GB/s per GPU from other hosts; gathered
keys are reordered at 4.8 TB/s. Gathers and reduce-scatters run one at a time, in the program's
groups of heads. With "local", private rows are computed while shared keys are in flight: in the
forward pass before the shared rows, in the backward pass half of the heads before and half after
them (packax computes all of them before, if few keys are fetched). Beyond one host of eight GPUs,
"local" has two levels: keys that all hosts share cross hosts once per GPU and are then gathered
inside the host. The other plans gather in one step, in which each GPU separately fetches the keys
of other hosts. Efficiency is the mean rank's time for attention without communication, divided by
the slowest rank's time with all of this.

The program first checks the model against measured times (docs/performance.md), within 10 %. Then,
for rows with lognormal lengths (sigma 1.2) and rows of the standard library's sources, it lists the
area of the most loaded rank, the shared fraction of a rank's rows, and the efficiency: without a
plan, with zigzag, balanced and local, and beyond one host also with local plans of one level.
Writes context_model.json into --out (default: $OUT, else benchmarks/results).

--windows: one document with windows of 128 to 4096 keys on 4 to 64 ranks, for each plan: with
halos, as packax fetches them, and with all keys gathered. Rows that need halos are computed after
the others, and their keys are copied once. The latency of collectives is ignored. Writes
context_windows.json.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import packax
from context_plans import TILE, library_rows, planned, ranges, visited
from lib.cases import document_lengths
from lib.context_cases import MEANS, lognormal_lengths
from lib.output import arguments_of, write_json

HEADS, KV_HEADS, DIM = 32, 8, 128
RATE = {"fwd": 640e12, "bwd": 560e12}
FLOPS = {"fwd": 4 * HEADS * DIM, "bwd": 10 * HEADS * DIM}  # per attended pair
ROW = 2 * KV_HEADS * DIM * 2  # bytes of keys and values per token
INSIDE, BETWEEN, MEMORY, HOST = 330e9, 50e9, 4.8e12, 8
PLANS = ("none", "zigzag", "balanced", "local")
RANKS = (4, 8, 16, 32, 64)
MEASURED = (  # documents, ranks, milliseconds: benchmarks/results/context_parallel_*
    ("12 documents, 4 GPUs", 12, 4, {"fwd": 9.6988, "bwd": 27.5997}),
    ("40 documents, 2 GPUs", 40, 2, {"fwd": 6.060, "bwd": 17.312}),
)


def work(
    lo: np.ndarray, hi: np.ndarray, plan: packax.context.ContextPlan | None, ranks: int
) -> Any:
    """The attended pairs, (ranks,), and for each part the pairs in visited tiles, (ranks,): first
    private rows, then shared parts, those of the fewest ranks first."""
    length = len(lo)
    own = length // ranks
    order = np.arange(length) if plan is None else plan.index()[0]
    pieces = order.reshape(ranks, own)
    area = (hi - lo)[pieces].sum(1)
    if plan is None or plan.split is None:
        tiles = [visited(lo[rows], hi[rows]) for rows in pieces]
        return area, [np.zeros(ranks), np.array(tiles)]
    split = plan.split[0]
    found = [np.zeros(ranks)]
    for rank, rows in enumerate(pieces):
        begin = split[rank, -1]
        mine = rows[begin:]
        first, last = np.zeros((2, own), np.int64)
        first[begin:] = begin + np.searchsorted(mine, lo[mine])
        last[begin:] = np.where(hi[mine] > lo[mine], np.arange(begin, own) + 1, 0)
        found[0][rank] = visited(first, last)
    for level, (groups, number) in reversed([*enumerate(plan.parts)]):
        each = np.zeros(ranks)
        for group in np.split(np.arange(ranks), groups):
            begins = split[group, level - 1] if level else np.zeros(len(group), int)
            bounds = list(zip(group, begins, split[group, level], strict=True))
            keys = [pieces[rank][begin:end] for rank, begin, end in bounds]
            slots = slots_of(np.concatenate(keys), lo, number * len(group))
            for rank, begin, end in bounds:
                rows = pieces[rank][begin:end]
                first, last = np.zeros((2, number), np.int64)
                some = hi[rows] > lo[rows]
                first[begin:end] = np.where(some, slots[lo[rows]], 0)
                last[begin:end] = np.where(some, slots[rows] + 1, 0)
                each[rank] = visited(first, last)
        found.append(each)
    return area, found


def slots_of(keys: np.ndarray, lo: np.ndarray, room: int) -> np.ndarray:
    """The index of each key in a shared part, or -1: in order, with documents that end at the end
    of a tile if there is room (packax/_src/masks/local_mask.py)."""
    keys = np.sort(keys)
    begins = np.flatnonzero(np.diff(lo[keys], prepend=-1))
    gaps = np.cumsum(-np.diff(begins, append=len(keys)) % TILE)
    gaps = np.maximum.accumulate(np.where(gaps <= room - len(keys), gaps, 0))
    slots = np.full(len(lo), -1)
    slots[keys] = np.arange(len(keys)) + np.repeat(gaps, np.diff(begins, append=len(keys)))
    return slots


def travel(
    plan: packax.context.ContextPlan | None, length: int, ranks: int
) -> list[tuple[int, float]]:
    """For each shared part, those of the fewest ranks first: its keys and seconds to gather."""
    if plan is None or len(plan.levels) < 2:
        parts = ((1, length // ranks),) if plan is None else plan.parts or ((1, length // ranks),)
        found = []
        for _, rows in parts:
            seconds = ranks * rows * ROW / INSIDE
            if ranks > HOST:  # one step, in which each GPU fetches all keys of other hosts
                seconds = max(seconds, (ranks - HOST) * rows * ROW / BETWEEN)
            found.append((ranks * rows, seconds))
        return found
    found = []
    for groups, rows in reversed(plan.parts):
        seconds, held = 0.0, rows
        for size, stride in plan.steps(groups):
            if stride >= HOST:
                seconds += (size - 1) * held * ROW / BETWEEN
            else:
                seconds += size * held * ROW / INSIDE
            held *= size
        found.append((held, seconds))
    return found


def groups(ranks: int, what: str, one: bool) -> tuple[float, ...]:
    """The fractions of heads per group of gathers, as in core/sharding.py."""
    if one or ranks == 2:
        return (1.0,)
    return (1 / 8, 3 / 8, 1 / 2) if what == "fwd" else (1 / 4, 1 / 2, 1 / 4)


def seconds(
    what: str, works: list[float], sent: list[tuple[int, float]], ranks: list[int], one: list[bool]
) -> float:
    """One rank's pass: attention of private rows and of each shared part, and their gathers."""
    private, *shared = works
    clock = private if what == "fwd" or not shared else private / 2
    wired = copies = 0.0
    ready = []
    for work_, (keys, wire), among, together in zip(shared, sent, ranks, one, strict=True):
        for part in groups(among, what, together):
            wired += part * wire
            clock = max(clock, wired) + part * work_
            ready.append((clock, part * wire))
        copies += 2 * keys * ROW / MEMORY  # gathered keys are read and written
    if what == "bwd" and shared:
        for done, wire in ready:
            wired = max(wired, done) + wire
        clock = max(clock + private / 2, wired)
    return clock + copies * (1 if what == "fwd" else 2)


def efficiency(
    area: np.ndarray,
    works: list[np.ndarray],
    in_order: float,
    sent: list[tuple[int, float]],
    among: list[int],
    one: list[bool],
) -> dict[str, float]:
    """The efficiency of each pass, and the milliseconds of its slowest rank.

    in_order: the pairs in visited tiles without a plan.
    """
    found = {}
    for what, rate in RATE.items():
        speed = rate / FLOPS[what] / (area.sum() / in_order)  # pairs of visited tiles per second
        slowest = max(
            seconds(what, [x[rank] / speed for x in works], sent, among, one)
            for rank in range(len(area))
        )
        found[what] = area.mean() * FLOPS[what] / rate / slowest
        found[f"{what}_ms"] = slowest * 1e3
    return found


def predict(
    sizes: list[int], length: int, ranks: int, kind: str, levels: tuple[int, ...] = ()
) -> dict[str, float]:
    plan = planned(sizes, length, levels or (ranks,), kind)
    lo, hi = ranges(sizes, length)
    in_order = visited(lo, hi)
    area, works = work(lo, hi, plan, ranks)
    own = length // ranks
    parts = plan.parts if plan is not None and plan.parts else ((1, own),)
    sent = travel(plan, length, ranks)
    private = own - parts[-1][1]
    among = [ranks // number for number, _ in reversed(parts)]
    one = [
        private >= number * rows for number, (_, rows) in zip(among, reversed(parts), strict=True)
    ]
    if len(works) == 1:
        sent, among, one = [], [], []
    return {
        "area": float(area.max() / area.mean()),
        "shared": parts[-1][1] / own,
        "between": parts[0][1] / own,
        "visited": float(sum(x.sum() for x in works) / in_order),
        **efficiency(area, works, in_order, sent, among, one),
    }


def of_window(length: int, window: int, ranks: int, kind: str, halos: bool) -> dict[str, float]:
    """The efficiency for one document with a window, and the MiB that a rank fetches."""
    plan = planned([length], length, (ranks,), kind)
    assert plan is not None
    hi = np.arange(length) + 1
    lo = np.maximum(hi - window, 0)
    halo = plan.halo(packax.sliding_window(window - 1)) if halos else None
    area, works = work(lo, hi, plan, ranks)
    rows, sent = length - length // ranks, travel(plan, length, ranks)
    if halo is not None:
        share = halo.rows / halo.chunk
        works = [works[1] * (1 - share), works[1] * share]
        inside, between = halo.traffic(min(ranks, HOST))
        rows = halo.fetched
        sent = [(halo.chunks * halo.edge.keys, max(inside * ROW / INSIDE, between * ROW / BETWEEN))]
    found = efficiency(area, works, visited(lo, hi), sent, [ranks], [halo is not None])
    return {"MiB": rows * ROW / 2**20, "fwd": found["fwd"], "bwd": found["bwd"]}


def windows(path: Path) -> None:
    """Prints the table of --windows and writes it to `path`."""
    rows = []
    sizes = (131072, 524288), (128, 512, 1024, 4096), (4, 8, 16, 32, 64)
    for length, window, ranks in itertools.product(*sizes):
        found = {
            f"{kind}, {name}": of_window(length, window, ranks, kind, name == "halos")
            for kind in ("zigzag", "balanced")
            for name in ("halos", "all")
        }
        row: dict[str, Any] = {"length": length, "window": window, "ranks": ranks}
        for name, values in found.items():
            row[name] = {key: round(x, 4) for key, x in values.items()}
        rows.append(row)
        print(f"{length >> 10}k, window {window}, {ranks} ranks: " + "; ".join(
            f"{name} {x['MiB']:.0f} MiB {x['fwd']:.0%} / {x['bwd']:.0%}"
            for name, x in found.items()
        ))  # fmt: skip
    write_json(path, {"rows": rows})
    print(f"wrote {path}")


def check() -> tuple[dict[str, Any], bool]:
    """Compares the model with measured times: rows, and whether all are within 10 %."""
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
    parser = arguments_of(__doc__)
    parser.add_argument("--packings", type=int, default=100)
    parser.add_argument("--lengths", default="32768,131072,524288,1048576")
    parser.add_argument("--windows", action="store_true", help="windows, in place of documents")
    arguments = parser.parse_args()
    if arguments.windows:
        windows(arguments.out / "context_windows.json")
        return 0
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
    path = arguments.out / "context_model.json"
    print(f"{'rows':<22}{'ranks':>6} {'plan':<10}{'area':>7}{'worst':>7}{'shared':>8}{'worst':>7}"
          f"{'between':>9}{'visited':>9}{'fwd':>7}{'bwd':>7}")  # fmt: skip
    for length in map(int, arguments.lengths.split(",")):
        count = arguments.packings
        cases = {
            f"documents of {mean}": [lognormal_lengths(length, mean, seed) for seed in range(count)]
            for mean in MEANS
        }
        if length <= 131072:
            cases["library"] = library_rows(length, count)
        for (case, packings), ranks in itertools.product(cases.items(), RANKS):
            if length // ranks < 16 * TILE:
                continue
            plans: dict[str, tuple[int, ...]] = dict.fromkeys(PLANS, ())
            if ranks > HOST:
                plans |= {"local": (ranks // HOST, HOST), "one level": ()}
            for kind, levels in plans.items():
                of_kind = "local" if kind == "one level" else kind
                found = [predict(sizes, length, ranks, of_kind, levels) for sizes in packings]
                row = {"length": length, "case": case, "ranks": ranks, "plan": kind}
                row["packings"] = len(packings)
                for key in ("area", "shared", "between", "visited", "fwd", "bwd"):
                    values = [x[key] for x in found]
                    row[key] = round(float(np.mean(values)), 4)
                    if key in ("area", "shared"):
                        row[f"{key}_worst"] = round(max(values), 4)
                report["rows"].append(row)
                print(f"{case + f', {length // 1024}k':<22}{ranks:>6} {kind:<10}"
                      f"{row['area']:>7.3f}{row['area_worst']:>7.3f}{row['shared']:>8.3f}"
                      f"{row['shared_worst']:>7.2f}{row['between']:>9.3f}"
                      f"{row['visited']:>9.3f}{row['fwd']:>7.1%}{row['bwd']:>7.1%}",
                      flush=True)  # fmt: skip
            write_json(path, report)
    print(f"wrote {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
