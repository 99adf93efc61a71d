"""Times packax and its peers in turns on the cases of lib/cases.py: TFLOP/s and ratios.

    python benchmarks/attention.py [--cases board,short,NAME] [--peers cudnn,fa3,deterministic]
        [--fa4 dist/fa4.tar.xz | --fa2 [8.0|8.6]] [--before WHEEL] [--rounds 7] [--power]
        [--out DIR]

Every output and gradient is first compared with one float32 reference. Wrong implementations are
not timed, and the exit status is 1. In each round every implementation runs a burst of about
120 ms, in a different order per round (lib/turns.py); ratios are of medians. FLOPs count attended
pairs: 4 * H * D per pair in the forward pass, 2.5 times that in the backward pass (for head dims
192/128 see performance.md). The backward pass is timed separately (the pullback, with residuals in
memory). Cases of the group `short` run LOOP times in one jitted call.

--peers: cuDNN; FA3 from flash-attn3-jax; `jla` and `jla_ranged` from jax-linear-attention, one for
each of its backward passes; `deterministic`, packax with deterministic=True, whose second run must
be bit-identical; `fallback`, packax without padded head dims. --fa4 and --fa2 time FlashAttention-4
and torch's FlashAttention-2 in another process on the same arrays. --fa2 is for builds of kernels
for other GPUs (docs/internals/proxy.md): with 8.0 or 8.6, it uses the tiles and the shared memory
of such a GPU (compare/smaller_gpu.c, which needs a C compiler). --before: another wheel of packax,
or a folder with packax/, in another process. --power: bursts of two seconds (--round-ms), with the
GPU's power and clock for each time (lib/power.py).

FA3 and FA4 come in archives that `bash benchmarks/compare/pack.sh` makes on a machine with access
to a package registry; the script lists what else they need. FA4 compiles its kernels at first use,
and needs torch 2.11 for CUDA 13. Writes attention.json (or short.json, versus_fa4.json,
versus_fa2.json, versus_before.json) and a chart into --out (default: $OUT, else
benchmarks/results).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "csrc" / "aot"))

from archs import PROXIES
from compare.jax_worker import Jax
from lib.cases import Case, select
from lib.chart import bar_chart
from lib.exchange import folders, torch_environment, unpacked
from lib.machine import machine
from lib.output import Report, arguments_of, require_gpu, say
from lib.power import Meter
from lib.turns import Failed, State, Worker, bad_cases, not_run, table, time_rows

COMPARE = Path(__file__).parent / "compare"
ORDER = ("packax", "before", "deterministic", "fallback", "cudnn", "fa2", "fa3", "fa4", "jla",
    "jla_ranged")  # fmt: skip
TORCH = ("fa2", "fa4")
SMALLER = {"8.0": PROXIES["80@90"], "8.6": PROXIES["86@90"]}  # --fa2


def fa2_environment(capability: str, stack: contextlib.ExitStack) -> dict[str, str]:
    """The environment for torch, which makes it see a GPU of that compute capability."""
    environment = os.environ | {"PYTHONPATH": ""}
    if capability not in SMALLER:
        return environment
    library = Path(stack.enter_context(tempfile.TemporaryDirectory()), "smaller_gpu.so")
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", str(library)]
    subprocess.run([*compiler, str(COMPARE / "smaller_gpu.c"), "-ldl"], check=True)
    gpu = SMALLER[capability]
    numbers = f"{capability.replace('.', ' ')} {gpu.shared} {gpu.multiprocessor}"
    return environment | {"LD_PRELOAD": str(library), "SMALLER_GPU": numbers}


def wheel_environment(before: Path, stack: contextlib.ExitStack) -> dict[str, str]:
    """The environment with another packax first on PYTHONPATH."""
    if before.is_file():
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with zipfile.ZipFile(before) as wheel:
            wheel.extractall(folder)
        before = Path(folder)
    if not (before / "packax" / "__init__.py").is_file():
        raise SystemExit(f"--before: no packax/__init__.py in {before}")
    paths = filter(None, [str(before.resolve()), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def prepare(
    case: Case,
    workers: Mapping[str, Worker | State],
    round_ms: float,
    peers: Sequence[str],
    torch_peer: str,
) -> dict[str, Any]:
    """The rows of the report without times: errors, failures, launches per burst."""
    ask = {"do": "prepare", "case": dataclasses.asdict(case), "round_ms": round_ms}
    with folders() as (inputs, results):
        found = workers["jax"].ask(**ask, folder=str(inputs), peers=peers if case.peers else ())
        rows = found["implementations"]
        if "torch" in workers:
            try:
                row = workers["torch"].ask(
                    **ask, peer=torch_peer, folder=str(inputs), results=str(results),
                    compared=found["compared"],
                )  # fmt: skip
                row |= workers["jax"].ask(do="judge", folder=str(results))
            except Failed as error:
                row = not_run(error)
            rows[torch_peer] = row | ({"launches": {}} if row["wrong"] else {})
        if "before" in workers:  # it draws the same inputs and computes its own reference
            try:
                row = workers["before"].ask(**ask, folder=str(inputs), peers=[])
                rows["before"] = row["implementations"]["packax"]
            except Failed as error:
                rows["before"] = not_run(error)
    return rows


def run_case(
    case: Case,
    workers: Mapping[str, Worker | State],
    rounds: int,
    round_ms: float,
    peers: Sequence[str] = (),
    torch_peer: str = "fa4",
    meter: Meter | None = None,
) -> dict[str, Any]:
    rows = prepare(case, workers, round_ms, peers, torch_peer)
    places = dict.fromkeys(TORCH, "torch") | {"before": "before"}

    def ask(name: str, what: str, launches: int) -> float:
        worker = workers[places.get(name, "jax")]
        name = "packax" if name == "before" else name
        return worker.ask(do="time", name=name, what=what, launches=launches)

    flops = {"fwd": case.forward_flops, "bwd": case.backward_flops}
    time_rows(rows, ask, flops, rounds, meter)
    return rows


def bandwidths(results: dict[str, Any], cases: Sequence[Case]) -> str:
    """A table of time per attended pair and head, and of bandwidth by the minimum of bytes to move.
    Both reveal performance cliffs."""
    lines = [f"{'case':<26}{'pass':<5}{'ps/pair':>9}{'GB/s':>7}"]
    for case in cases:
        for what, cell in results[case.name].get("packax", {}).get("times", {}).items():
            pair = cell["ms"] * 1e9 / (case.area * case.heads)
            moved = case.least_bytes(what) / cell["ms"] / 1e6
            lines.append(f"{case.name:<26}{what:<5}{pair:>9.2f}{moved:>7.0f}")
    return "\n".join(lines)


def main() -> int:
    parser = arguments_of(
        __doc__, "names and groups of lib/cases.py", default="board,dims,large", rounds=7
    )
    parser.add_argument("--peers", default="cudnn,deterministic", help="see above")
    parser.add_argument(
        "--fa4", type=Path, help="the archive of pack.sh fa4, or a folder unpacked from it"
    )
    parser.add_argument(
        "--fa2", nargs="?", const="9.0", choices=("9.0", *SMALLER), help="FlashAttention-2 instead"
    )
    parser.add_argument("--before", type=Path, help="another packax: a wheel or a folder")
    parser.add_argument("--round-ms", type=float, help="length of a burst; 120, with --power 2000")
    parser.add_argument("--power", action="store_true", help="read power and clock, too")
    arguments = parser.parse_args()
    cases = select(arguments.cases)
    peers = [name for name in arguments.peers.split(",") if name]
    torch_peer = "fa2" if arguments.fa2 else "fa4"
    name = "short" if all(case.group == "short" for case in cases) else "attention"
    name = "versus_before" if arguments.before else name
    name = f"versus_{torch_peer}" if arguments.fa2 or arguments.fa4 else name
    with contextlib.ExitStack() as stack:
        programs = {}
        if arguments.before:
            programs["before"] = "jax_worker.py", wheel_environment(arguments.before, stack)
        if arguments.fa2:
            programs["torch"] = "torch_worker.py", fa2_environment(arguments.fa2, stack)
        elif arguments.fa4:
            site = unpacked(arguments.fa4, stack)
            programs["torch"] = "torch_worker.py", torch_environment(site)
        require_gpu()
        report = Report(arguments.out, name, arguments.rounds, machine=machine())
        workers: dict[str, Worker | State] = {"jax": Jax()}
        for worker, (script, environment) in programs.items():
            command = [sys.executable, str(COMPARE / script)]
            workers[worker] = made = Worker(worker, command, environment)
            stack.callback(made.end)
        for worker, answers in workers.items():
            report[worker] = answers.ask(do="hello")
            say(f"{worker}: {report[worker]}")
        meter = Meter() if arguments.power else None
        round_ms = arguments.round_ms or (2000.0 if meter else 120.0)
        results = report.run(
            cases,
            lambda case: run_case(
                case, workers, arguments.rounds, round_ms, peers, torch_peer, meter
            ),
            lambda results: table(results, ORDER),
        )
    print(f"{bandwidths(results, cases)}\n\nmedians of rounds; `to X`: X's ms / packax's ms")
    if any(results.values()):
        bar_chart(report, report.path.with_suffix(".png"))
    return report.end(bad_cases(results, ("packax", "deterministic")))


if __name__ == "__main__":
    sys.exit(main())
