"""Hardware counters of packax, cuDNN, FlashAttention-3 and -4, per kernel, by Nsight Compute.

    python benchmarks/tune/counters.py [--cases causal_16k_d128,docs12_32k_d64,vit_h14_224]
        [--who packax,cudnn,fa3] [--fa4 dist/fa4.tar.xz] [--out DIR]

Cases are those of lib/cases.py and, for packax and cuDNN, of lib/model_cases.py. For every
implementation and case, one process runs both passes under `ncu`. Its report of all attention
kernels goes into counters_WHO_CASE.ncu-rep in --out (default: $OUT, else benchmarks/results). The
table shows cycles, the utilization of pipes and issue slots, stall reasons, and the instructions
that a kernel executes: those that do not fit in the instruction cache are waited for (no_inst). The
samples of all warps count, also of idle ones, which wait at a barrier. The tool changes times: use
fractions, not milliseconds. FA4 runs if its archive (pack.sh fa4) exists. Results are not checked
here: attention.py and models.py check the same calls.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.cases import select
from lib.exchange import torch_environment, unpacked
from lib.model_cases import CASES
from lib.output import arguments_of

OF_MODELS: dict[str, list[Any]] = {case.name: [case] for case in CASES}
KERNELS = "sm90|backward_preprocess|backward_postprocess|cudnn|sdpa|cutlass|flash"
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "SchedulerStats"),
    *("InstructionStats", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "LaunchStats"),
    "SourceCounters",
)
SHOWN = (
    *("Duration", "Elapsed Cycles", "SM Busy", "Issue Slots Busy", "Executed Ipc Active"),
    *("Mem Busy", "Mem Pipes Busy", "L1/TEX Hit Rate", "L2 Hit Rate", "DRAM Throughput"),
    *("Executed Instructions", "Warp Cycles Per Issued Instruction", "Registers Per Thread"),
    "Executed Instructions (different)",
)
RANKED = ("stall ", "stall_", "pipe")  # of the metrics with these words, the largest FEW are shown
FEW = 7
BYTES = 16  # of an instruction

Kernel = dict[str, tuple[float, str]]  # metric -> value and unit


def command(program: list[str], report: Path) -> list[str]:
    return [
        *("ncu", "--export", str(report), "--force-overwrite"),
        *("--apply-rules", "no", "--clock-control", "none"),
        *("--kernel-name", f"regex:{KERNELS}", "--launch-count", "24"),
        *(word for name in SECTIONS for word in ("--section", name)),
        *program,
    ]


def page(report: Path, *options: str) -> list[str]:
    """A page of a report, as lines of CSV."""
    words = ["ncu", "--import", str(report), "--csv", "--page", *options]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()


def instructions_of(lines: Iterable[str]) -> dict[str, Kernel]:
    """Of the last launch of each kernel: bytes of executed instructions, and what sampled warps
    waited for, from a page with one row per instruction. A line with its name precedes each
    kernel's."""
    kernels: dict[str, list[str]] = {}
    rows: list[str] = []
    for line in lines:
        if line.startswith('"Kernel Name"'):
            name = next(csv.reader([line]))[1]
            rows = kernels[name.split("(")[0][:60]] = []
        elif line.startswith('"'):
            rows.append(line)
    return {name: of_instructions(list(csv.DictReader(rows))) for name, rows in kernels.items()}


def of_instructions(rows: list[dict[str, str]]) -> Kernel:
    def total(name: str) -> float:
        return sum(float((row.get(name) or "0").replace(",", "")) for row in rows)

    samples = max(total("Warp Stall Sampling (All Samples)"), 1)
    names = [name for name in (rows or [{}])[0] if name.startswith("stall_") and "(" not in name]
    executed = sum(row.get("Instructions Executed", "0") not in ("0", "") for row in rows)
    shares = {f"{name} (samples)": (100 * total(name) / samples, "%") for name in names}
    return {"Executed Instructions (different)": (executed * BYTES / 1e3, "KB")} | shares


def kernels_of(lines: Iterable[str]) -> dict[str, Kernel]:
    """The last launch of each kernel in ncu's output, in which CSV lines start with a quote."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    launches: dict[tuple[str, str], Kernel] = {}
    for row in rows:
        try:
            value = float((row["Metric Value"] or "").replace(",", ""))
        except ValueError:
            continue  # not a number
        launch = launches.setdefault((row["ID"], row["Kernel Name"].split("(")[0][:60]), {})
        launch[row["Metric Name"]] = value, row["Metric Unit"] or ""
    return {name: launch for (_, name), launch in launches.items()}


def table(kernels: dict[str, Kernel]) -> str:
    lines = []
    for name, metrics in kernels.items():
        lines.append(name)
        lines += [
            f"    {metric:<58}{metrics[metric][0]:>16,.2f} {metrics[metric][1]}"
            for metric in SHOWN
            if metric in metrics
        ]
        for word in RANKED:
            some = [
                (value, metric) for metric, (value, _) in metrics.items() if word in metric.lower()
            ]
            lines += [
                f"    {metric:<58}{value:>16,.2f} {metrics[metric][1]}"
                for value, metric in sorted(some, reverse=True)[:FEW]
                if metric not in SHOWN
            ]
    return "\n".join(lines)


def run(who: str, name: str) -> None:
    """Runs both passes in this process, twice each; the last launches are shown."""
    if who == "fa4":
        run_fa4(name)
        return
    import jax
    from lib.implementations import JAX_PEERS, Compiled, packax_attention, random_inputs

    makers = JAX_PEERS | {"packax": packax_attention}
    if name in OF_MODELS:
        import models

        makers = {"packax": models.packax_function, "cudnn": models.cudnn_function}
    (case,) = OF_MODELS.get(name) or select(name)
    compiled = Compiled(makers[who](case), random_inputs(case))
    for what in ("fwd", "bwd"):
        function = compiled.function(what)
        for _ in range(2):
            jax.block_until_ready(function())


def run_fa4(name: str) -> None:
    import torch
    from compare.torch_worker import flash_attention

    (case,) = select(name)
    q, k, v, do = (
        torch.randn(case.batch, case.seq, heads, case.head_dim, device="cuda").bfloat16()
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        torch.autograd.grad(flash_attention(case, "cuda")(*leaves), leaves, do)
    torch.cuda.synchronize()


def main() -> int:
    parser = arguments_of(
        __doc__, "names of model_cases.py, names and groups of cases.py", default="causal_16k_d128"
    )
    parser.add_argument("--who", default="packax,cudnn,fa4")
    parser.add_argument("--fa4", type=Path, default=Path("dist/fa4.tar.xz"))
    parser.add_argument("--run", nargs=2, metavar=("WHO", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(*arguments.run)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    asked = arguments.cases.split(",")
    names = [name for name in asked if name in OF_MODELS]
    if others := ",".join(name for name in asked if name not in OF_MODELS):
        names += [case.name for case in select(others)]
    failed = []
    site: Path | None = None
    with contextlib.ExitStack() as stack:
        for name in names:
            for who in arguments.who.split(","):
                environment = dict(os.environ)
                if who == "fa4" and not arguments.fa4.exists():
                    print(f"fa4: left out, {arguments.fa4} is not there")
                    continue
                if who == "fa4":
                    site = site or unpacked(arguments.fa4, stack)
                    environment = torch_environment(site)
                program = [sys.executable, str(Path(__file__)), "--run", who, name]
                report = arguments.out / f"counters_{who}_{name}.ncu-rep"
                ncu = command(program, report)
                done = subprocess.run(
                    ncu, env=environment, capture_output=True, text=True, check=False
                )
                kernels = kernels_of(page(report, "details", "--print-details", "all"))
                for kernel, metrics in instructions_of(page(report, "source")).items():
                    kernels.setdefault(kernel, {}).update(metrics)
                print(f"== {who}, {name}\n{table(kernels)}", flush=True)
                if done.returncode or not kernels:
                    failed.append(f"{who} {name}")
                    print(f"FAILED ({done.returncode}): {(done.stdout + done.stderr)[-800:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
