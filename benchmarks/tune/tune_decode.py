"""The kernels of decoding in tune.py: candidate tiles on the cases of decode.py, both kernels of a
call together.

A candidate is compared with attention in float32 and with the first candidate, on small odd cases
first; a wrong one is not timed. GB/s count the attended keys and values once, and "of copy" is the
fraction of the rate of copying 1 GiB inside the device. The first candidate also runs with the
numbers of shares in SPLITS.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
import json
import os
import pathlib
import time
from typing import Any

from built import Built
from cubin import Buffer, Driver
from decode_work import DecodeWork, Launch, difference
from lib.decode_cases import CASES, Case
from listing import TILE, listing, ratios
from probe import say_begin, say_end

DECODE = ("decode", "decode_tall")
FEW_ROWS = 16  # of a group, in a tile of `decode`: csrc/launch/decode_shares.cc
CLOSE = 5e-3  # relative difference in bfloat16, which also rounds P
COPIED = 1 << 30

CHECKS = (  # head dims come from the candidates
    Case("odd", (1013, 1, 0, 257, 64), heads=8, kv_heads=2),
    Case("odd rows", (1000, 3, 0, 129), q_len=3, heads=8, kv_heads=2),
    Case("odd pages", (1013, 1, 0, 250), q_len=2, heads=8, kv_heads=2, page_size=24),
    Case("tall", (1001, 7, 0, 130), q_len=16, heads=8, kv_heads=2),
    Case("tall pages", (1001, 7, 0, 130), q_len=13, heads=12, kv_heads=1, page_size=16),
)
BY_NAME = {case.name: case for case in CASES}
LONG = BY_NAME["8x32k, 16 rows"]
TIMED = (
    LONG,
    BY_NAME["8x32k, multi-query"],
    dataclasses.replace(LONG, name="8x32k, 16 rows, d64", dim=64),
    BY_NAME["8x32k, 4 rows"],
    BY_NAME["8x32k"],
    BY_NAME["1x128k"],
    BY_NAME["8x32k, pages of 16"],
    BY_NAME["1x128k and 31x1k"],
    BY_NAME["8x32k, d64"],
)
SPLITS = {  # shares of a sequence, on average
    LONG.name: (6, 8),
    "8x32k, multi-query": (64,),
    "8x32k, 4 rows": (8, 16),
    "8x32k": (8, 16, 25),
    "1x128k": (66, 99),
    "1x128k and 31x1k": (2, 4, 8),
    "8x32k, d64": (8, 16),
}


def kernel_of(case: Case) -> str:
    return DECODE[case.q_len * (case.heads // case.kv_heads) > FEW_ROWS]


def copy_rate(driver: Driver) -> float:
    """GB/s read and written."""
    one, other = (Buffer(driver, (COPIED,), "uint8") for _ in range(2))

    def copy() -> None:
        size = C.c_size_t(COPIED)
        driver.ok(driver.cu.cuMemcpyDtoDAsync_v2(one.pointer, other.pointer, size, None), "copy")

    ms = driver.interleaved({"copy": copy}, 5)["copy"][0]
    for buffer in (one, other):
        buffer.free()
    return 2 * COPIED / ms / 1e6


def compare(
    work: DecodeWork, launches: dict[str, Launch], announce: str | None
) -> dict[str, tuple[float, float]]:
    """Title -> difference from the first correct one and error against float32; infinite if
    something is not finite."""
    found, want = {}, None
    for title, run in launches.items():
        if announce:
            say_begin(f"{title} {announce}")
        print(f"  {title} ...", end="", flush=True)
        work.poison()
        run()
        work.driver.synchronize()
        got, error = work.results(), work.error()
        if want is None and error < CLOSE:
            want = got
        found[title] = (error if want is None else difference(got, want), error)
        right = max(found[title]) < CLOSE
        print(f" {found[title][0]:.1e}, float32 {error:.1e}{'' if right else ' WRONG'}", flush=True)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    to_own = ratios(rows, ("case",))
    columns = (
        ("case", -22, lambda row: row["case"]),
        ("kernel", -12, lambda row: row["kernel"]),
        TILE,
        ("splits", 7, lambda row: row["splits"]),
        ("us", 9, lambda row: f"{1e3 * row['ms']:.1f}"),
        ("low", 9, lambda row: f"{1e3 * row['ms_low']:.1f}"),
        ("high", 9, lambda row: f"{1e3 * row['ms_high']:.1f}"),
        ("GB/s", 7, lambda row: f"{row['gb_per_s']:.0f}"),
        ("of copy", 8, lambda row: f"{row['of_copy']:.3f}"),
        ("to own", 8, lambda row: to_own[id(row)]),
        ("diff", 9, lambda row: f"{row['difference']:.0e}"),
        ("float32", 9, lambda row: f"{row['error']:.0e}"),
    )
    return listing(rows, columns, ("registers", "stack", "shared"))


def time_decode(
    folder: pathlib.Path,
    kernels: list[str],
    dims: list[tuple[int, int]] | None,
    names: list[str] | None,
    rounds: int,
    without: dict[str, str] | None = None,
    announce: bool = False,
) -> int:
    """Like tune.time_candidates; `names` None: all cases."""
    without, began = without or {}, time.perf_counter()
    driver = Driver()
    built = Built(driver, folder)
    copied = 0.0 if announce else copy_rate(driver)
    report: dict[str, Any] = {"device": driver.name, "driver": driver.version, "rounds": rounds,
                              "commit": os.environ.get("PACKAX_COMMIT", "unknown"),
                              "copy_gb_per_s": round(copied),
                              "rows": [], "wrong": [], "fatal": without}  # fmt: skip
    out = pathlib.Path(os.environ.get("OUT", folder)) / "tune_decode.json"
    print(f"{driver.name}, driver {driver.version}, {rounds} rounds, copy {copied:.0f} GB/s")
    there = dict.fromkeys(tuple(row["dims"]) for row in built.rows if row["label"])
    everywhere = {
        pair: built.candidates(pair, DECODE) for pair in there if dims is None or pair in dims
    }
    cases = [
        dataclasses.replace(c, name=f"{c.name} d{qk}", dim=qk)
        for qk, _ in everywhere
        for c in CHECKS
    ]
    if not announce:
        cases += [c for c in TIMED if names is None or c.name in names]
    for case in cases:
        pair, kernel = (case.dim, case.dim), kernel_of(case)
        wanted = {
            title: made
            for title, (name, made) in everywhere.get(pair, {}).items()
            if name == kernel and name in kernels and f"{title} {case.dim}" not in without
        }
        combine = built.twin("decode_combine", pair)
        if not wanted or combine is None:
            continue
        print(f"{case.name}, {time.perf_counter() - began:.0f} s", flush=True)
        work = DecodeWork(driver, case)
        splits = {title: work.splits(made) for title, made in wanted.items()}
        launches = {t: work.launch(made, combine, *splits[t]) for t, made in wanted.items()}
        own = next(iter(wanted))
        for n in SPLITS.get(case.name, ()):
            by = f"{own} by {n}"
            wanted[by], splits[by] = wanted[own], (n, splits[own][1])
            launches[by] = work.launch(wanted[by], combine, *splits[by])
        differences = compare(work, launches, str(case.dim) if announce else None)
        for title in [t for t, both in differences.items() if not max(both) < CLOSE]:
            report["wrong"].append(f"{case.name} {title}")
            del launches[title]
            everywhere[pair].pop(title, None)
        if case in TIMED and launches:
            for title, (ms, low, high) in driver.interleaved(launches, rounds, 10.0).items():
                name, _, tile = title.partition(" ")
                rate = case.bytes("bfloat16") / ms / 1e6
                meta = wanted[title].meta
                report["rows"].append({
                    "case": case.name, "kernel": name, "tile": tile, "splits": splits[title][0],
                    "dealt": splits[title][1],
                    "ms": round(ms, 4), "ms_low": round(low, 4), "ms_high": round(high, 4),
                    "gb_per_s": round(rate, 1), "of_copy": round(rate / copied, 3),
                    "difference": differences[title][0], "error": differences[title][1],
                    **{key: meta.get(key) for key in ("registers", "stack", "shared")},
                })  # fmt: skip
        work.free()
        if not announce:
            out.write_text(json.dumps(report, indent=1) + "\n")
    if announce:
        say_end()
        return 0
    print(f"\n{table(report['rows'])}\n\nwrote {out}, {time.perf_counter() - began:.0f} s")
    for line in report["wrong"]:
        print(f"WRONG, not timed: {line}")
    for title, why in without.items():
        print(f"FATAL, not timed: {title} {why}")
    return 1 if report["wrong"] or without else 0
