"""Would a backward that is launched in slices of heads, on several streams, be faster? What moves memory alone (backward_prepare,
backward_finish) would run under the products of other slices, and the last programs of one slice beside the first of the next.

    python benchmarks/slices.py FOLDER [--dims 128x128 ...] [--cases causal_16k ...] [--rounds 7]      (FOLDER of tune.py build)

Hopper's kernels of the table, alone, as tune.py launches them: whole, and in 2 to 8 slices of the key/value heads that take turns on
2 to 4 streams. `backward`: prepare, backward, finish of a slice, one after the other. `deterministic`: prepare, dK and dV, dQ; with
`apart` dQ of a slice has another stream than its dK and dV. Gradients are compared with those of the whole first; a wrong one is not
timed. The table goes to standard output and $OUT/slices.json (default: FOLDER).
"""

from __future__ import annotations

import argparse
import ctypes as C
import dataclasses
import functools
import json
import os
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from built import Built
from cubin import Driver, Kernel
from tune import CLOSE, TIMED, case, operations, pair
from work import DETERMINISTIC, HOPPER_BACKWARD, Launch, Work, difference

RESULTS = ("dq", "dk", "dv")
SCRATCH = ("delta", "lse2", "lo", "hi", "dq_sum")


@dataclasses.dataclass(frozen=True)
class Way:
    slices: int = 1
    streams: int = 1
    apart: bool = False

    def __str__(self) -> str:
        if self.slices == 1 and not self.apart:
            return "whole"
        return f"{self.slices} on {self.streams}{', apart' if self.apart else ''}"


WAYS = {
    "backward": [Way(), *(Way(n, m) for n, m in ((2, 2), (4, 2), (8, 2), (4, 3), (8, 3), (4, 4)))],
    "deterministic": [
        *(Way(), Way(1, 2, True), Way(2, 2), Way(4, 2), Way(8, 2)),
        *(Way(2, 2, True), Way(4, 2, True), Way(4, 4, True)),
    ],
}
NEEDED = ("forward_hopper", *dict.fromkeys((*HOPPER_BACKWARD, *DETERMINISTIC)))
PIPELINES = {"backward": HOPPER_BACKWARD, "deterministic": DETERMINISTIC}


class Slices:
    def __init__(self, work: Work, kernels: dict[str, Kernel], streams: int = 4):
        self.work, self.kernels = work, kernels
        self.streams = [C.c_void_p() for _ in range(streams)]
        self.event = C.c_void_p()
        driver = work.driver
        for stream in self.streams:  # each waits for the null stream, and the null stream for each
            driver.ok(driver.cu.cuStreamCreate(C.byref(stream), 0), "cuStreamCreate")
        driver.ok(driver.cu.cuEventCreate(C.byref(self.event), 2), "cuEventCreate")

    def launches(self, pipeline: str, way: Way) -> list[Launch]:
        work, names = self.work, PIPELINES[pipeline]
        clear = int(pipeline == "backward")
        if str(way) == "whole":
            return [work.launch(self.kernels[name], clear_dq=clear) for name in names]
        each = work.case.kv_heads // way.slices
        found: list[Launch] = []
        for n in range(way.slices):
            some = work.heads(n * each, each) | {"clear_dq": clear, "counter": work.counter()}
            stream = self.streams[n % way.streams]
            first, *rest = (
                functools.partial(work.launch, self.kernels[name], **some) for name in names
            )
            found.append(first(stream=stream))
            if way.apart:  # dQ behind prepare alone, beside dK and dV
                beside = self.streams[(n + 1) % way.streams]
                found += [self.behind(beside, stream), rest.pop()(stream=beside)]
            found += [launch(stream=stream) for launch in rest]
        # on the null stream: the next call begins when all of this one is done
        return [*found, self.end]

    def end(self) -> None:
        driver, word = self.work.driver, self.work.given["counter"].pointer
        driver.ok(driver.cu.cuMemsetD32Async(word, 0, 1, None), "cuMemsetD32Async")

    def behind(self, stream: C.c_void_p, other: C.c_void_p) -> Launch:
        """`stream` goes on when what `other` has now is done."""
        driver = self.work.driver

        def run() -> None:
            driver.ok(driver.cu.cuEventRecord(self.event, other), "cuEventRecord")
            driver.ok(driver.cu.cuStreamWaitEvent(stream, self.event, 0), "cuStreamWaitEvent")

        return run

    def compare(self, pipeline: str, way: Way, want: dict[str, Any]) -> float:
        """The largest relative difference from `want`, which the first to come fills."""
        self.work.poison((*RESULTS, *SCRATCH))
        for launch in self.launches(pipeline, way):
            launch()
        self.work.driver.synchronize()
        got = self.work.results(RESULTS)
        for name in RESULTS:
            want.setdefault(name, got[name])
        return difference(got, want)


def together(launches: list[Launch]) -> Launch:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def table(rows: list[dict[str, Any]]) -> str:
    same = ("case", "dims", "pipeline")
    head = f"{'case':<13}{'dims':<9}{'pipeline':<15}{'launched':<14}"
    lines = [head + f"{'ms':>9}{'low':>9}{'high':>9}{'TFLOP/s':>9}{'ratio':>7}{'diff':>9}"]
    whole = {}
    for row in rows:
        key = str([row[name] for name in same])
        if row["launched"] == "whole":
            whole[key] = row["ms"]
        lines.append(
            f"{row['case']:<13}{'x'.join(map(str, row['dims'])):<9}{row['pipeline']:<15}{row['launched']:<14}{row['ms']:>9.4f}"
            f"{row['ms_low']:>9.4f}{row['ms_high']:>9.4f}{row['tflops']:>9.1f}{whole[key] / row['ms']:>7.3f}{row['difference']:>9.0e}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--dims", nargs="+", type=pair, default=[(128, 128), (64, 64)])
    parser.add_argument("--cases", nargs="+", choices=TIMED, default=["causal_16k", "docs12_32k", "docs64_32k"])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    driver = Driver()
    built = Built(driver, arguments.folder)
    report: dict[str, Any] = {"device": driver.name, "driver": driver.version, "rounds": arguments.rounds,
                              "commit": os.environ.get("PACKAX_COMMIT", "unknown"), "rows": [], "wrong": []}  # fmt: skip
    for dims in arguments.dims:
        kernels: dict[str, Kernel] = {}
        for name, kernel in built.candidates(dims, NEEDED).values():
            kernels.setdefault(name, kernel)  # the table's own
        for name in ["odd", *arguments.cases]:
            work = Work(driver, case(name, dims), built.masks())
            work.launch(kernels["forward_hopper"])()
            slices, want = Slices(work, kernels), {}
            timed: dict[tuple[str, str], tuple[list[Launch], float]] = {}
            for pipeline, ways in WAYS.items():
                for way in (way for way in ways if work.case.kv_heads % way.slices == 0):
                    found = slices.compare(pipeline, way, want)
                    title = f"{name} {dims[0]}x{dims[1]} {pipeline} {way}"
                    print(f"{title}: difference {found:.1e}", flush=True)
                    if not found < CLOSE:
                        report["wrong"].append(title)
                    elif name in TIMED:
                        timed[pipeline, str(way)] = slices.launches(pipeline, way), found
            bursts = {f"{a} {b}": together(launches) for (a, b), (launches, _) in timed.items()}
            took = driver.interleaved(bursts, arguments.rounds)
            for (pipeline, launched), (_, found) in timed.items():
                ms, low, high = took[f"{pipeline} {launched}"]
                flops = operations(work.case, pipeline) or 0.0
                report["rows"].append(
                    {"case": name, "dims": list(dims), "pipeline": pipeline, "launched": launched, "ms": ms, "ms_low": low,
                     "ms_high": high, "tflops": flops / ms / 1e9, "difference": found}
                )  # fmt: skip
            work.free()
    out = pathlib.Path(os.environ.get("OUT", arguments.folder)) / "slices.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{table(report['rows'])}\n\nwrote {out}")
    for title in report["wrong"]:
        print(f"WRONG, not timed: {title}")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
