"""packax, cuDNN and FlashAttention 2, 3 and 4 on one GPU, taking turns: TFLOP/s and ratios.

    python benchmarks/compare/versus_fa4.py [--fa4 dist/fa4.tar.xz | --fa2] [--peers cudnn,fa3]
        [--before WHEEL] [--cases board,long] [--rounds 7] [--power] [--out DIR]

Two processes, one with JAX (packax from the wheel, and --peers: cuDNN, FA3 from flash-attn3-jax)
and one with torch (FA4), take turns: in every round each implementation runs a burst of about 120
ms, in another order every round, while the other process waits (turns.py). Ratios are of medians.
Inputs are the same arrays, and every output and gradient is first compared with one float32
reference; a wrong one is not timed. --power: bursts of two seconds (--round-ms), with the GPU's
power and clock for each time (power.py). --fa2 uses torch's FlashAttention-2 instead of FA4, for
builds of kernels for other GPUs (docs/internals/proxy.md); with neither, torch does not run.
--before: another wheel of packax, or a folder that has packax/, in a second process with JAX.

The machine needs torch 2.11 for CUDA 13 and, in addition to JAX, the Python packages einops,
cuda-bindings, protobuf and typing-extensions. The other packages come in the archives that `bash
benchmarks/compare/pack_fa4.sh` (and pack_fa3.sh) makes on a machine with a package registry:
flash-attn-4, nvidia-cutlass-dsl with its libs-base, libs-core and libs-cu13, quack-kernels,
apache-tvm-ffi, torch-c-dlpack-ext. FA4 compiles its kernels at first use. Writes versus_fa4.json,
or versus_fa2.json, into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.cases import Case, select
from lib.chart import bar_chart
from lib.exchange import folders
from lib.output import PEERS, Report, arguments_of, say
from lib.power import Meter
from lib.power import line as power_line
from lib.turns import (
    Failed,
    Worker,
    bad_cases,
    cells,
    not_run,
    ratio,
    time_rows,
    troubles,
    worst_error,
)

HERE = Path(__file__).parent
PASSES = ("fwd", "bwd")
ORDER = ("packax", "before", "cudnn", "fa2", "fa3", "fa4")
TITLES = {
    "before": "to before",
    "cudnn": "to cuDNN",
    "fa2": "to FA2",
    "fa3": "to FA3",
    "fa4": "to FA4",
}
TORCH = ("fa2", "fa4")


def unpacked(fa4: Path, stack: contextlib.ExitStack) -> Path:
    """The folder with FA4's packages: `fa4`, or its unpacked content while `stack` is open."""
    if fa4.is_dir():
        return fa4.resolve()
    site = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    with tarfile.open(fa4) as archive:
        archive.extractall(site, filter="data")
    say(f"unpacked {fa4}")
    return site


def torch_environment(site: Path) -> dict[str, str]:
    """This process's environment, with FA4's packages and without what disables Triton for packax
    (.ci/gpu)."""
    parts = [str(site), str(site / "nvidia_cutlass_dsl" / "dsl_packages")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(parts)}


def wheel_environment(before: Path, stack: contextlib.ExitStack) -> dict[str, str]:
    """This process's environment with another packax first on its path."""
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
    workers: Mapping[str, Worker],
    round_ms: float,
    peers: Sequence[str],
    torch_peer: str,
) -> dict[str, Any]:
    """Rows of the report without times: errors, what failed, launches per burst."""
    ask = {"do": "prepare", "case": case.name, "round_ms": round_ms}
    with folders() as (inputs, results):
        found = workers["jax"].ask(**ask, folder=str(inputs), peers=peers)
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
        if "before" in workers:  # the same inputs, drawn there, and its own reference
            try:
                row = workers["before"].ask(**ask, folder=str(inputs), peers=[])
                rows["before"] = row["implementations"]["packax"]
            except Failed as error:
                rows["before"] = not_run(error)
    return rows


def run_case(
    case: Case,
    workers: Mapping[str, Worker],
    rounds: int,
    round_ms: float,
    meter: Meter | None = None,
    peers: Sequence[str] = ("cudnn",),
    torch_peer: str = "fa4",
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


def table(results: dict[str, Any]) -> str:
    """One line per case and pass: ms and TFLOP/s of each, and packax compared with the others (over
    1: packax is faster)."""
    order = [who for who in ORDER if any(who in rows for rows in results.values())]
    head = f"{'case':<20}{'pass':<5}"
    head += "".join(f"{who + ' ms':>11}{'TFLOP/s':>9}" for who in order)
    head += "".join(f"{TITLES[who]:>10}" for who in order if who in TITLES)
    lines = [head + "".join(f"{who + ' error':>13}" for who in order)]
    notes = []
    for name, rows in results.items():
        for what in PASSES:
            found, line = cells(rows, what, order)
            line += "".join(
                ratio(found[who], found.get("packax"), 10) for who in order if who in TITLES
            )
            line += "".join(worst_error(rows.get(who, {}), what, 13) for who in order)
            lines.append(f"{name:<20}{what:<5}{line}")
        for who in order:
            power = rows.get(who, {}).get("power", {})
            lines += [power_line(who, what, power[what]) for what in PASSES if what in power]
            notes += troubles(f"{name} {who}", rows.get(who, {}))
    return "\n".join(lines + notes)


def main() -> int:
    parser = arguments_of(__doc__, "names and groups of cases.py", default="board", rounds=7)
    parser.add_argument(
        "--fa4",
        type=Path,
        help="the archive of pack_fa4.sh, or a folder unpacked from it (default: without FA4)",
    )
    parser.add_argument("--fa2", action="store_true", help="torch's own FlashAttention-2 instead")
    parser.add_argument(
        "--peers", default="cudnn", help="of implementations.py: cudnn, fa3 (default: cudnn)"
    )
    parser.add_argument("--before", type=Path, help="another packax: a wheel or a folder")
    parser.add_argument("--round-ms", type=float, help="length of a burst; 120, with --power 2000")
    parser.add_argument("--power", action="store_true", help="read power and clock, too")
    arguments = parser.parse_args()
    cases = select(arguments.cases)
    peers = [name for name in arguments.peers.split(",") if name]
    torch_peer = "fa2" if arguments.fa2 else "fa4"
    meter = Meter() if arguments.power else None
    round_ms = arguments.round_ms or (2000.0 if arguments.power else 120.0)
    report = Report(arguments.out, f"versus_{torch_peer}", arguments.rounds)
    with contextlib.ExitStack() as stack:
        programs = {"jax": ("jax_worker.py", dict(os.environ))}
        if arguments.fa2:
            programs["torch"] = ("peers_torch.py", os.environ | {"PYTHONPATH": ""})
        elif arguments.fa4:
            site = unpacked(arguments.fa4, stack)
            programs["torch"] = ("peers_torch.py", torch_environment(site))
        if arguments.before:
            environment = wheel_environment(arguments.before, stack)
            programs["before"] = ("jax_worker.py", environment)
        workers = {}
        for name, (script, environment) in programs.items():
            workers[name] = Worker(name, [sys.executable, str(HERE / script)], environment)
            stack.callback(workers[name].end)
        for name, worker in workers.items():
            report[name] = worker.ask(do="hello")
            say(f"{name}: {report[name]}")
        for case in cases:
            try:
                rows = run_case(case, workers, arguments.rounds, round_ms, meter, peers, torch_peer)
            except Failed as error:
                say(f"{case.name} FAILED: {error}")
                rows = {}
            say(f"{case.name}\n{table({case.name: rows})}")
            report.add(case.name, rows)
    print(f"\n{table(report['cases'])}\n")
    rounds = f"medians of {arguments.rounds} rounds in turns"
    print(f"{', '.join(TITLES.values())}: their ms / packax ms, {rounds}")
    board = json.loads(PEERS.read_text())
    if any(rows for rows in report["cases"].values()):
        bar_chart(report | {"machine": report["jax"]}, board, report.path.with_suffix(".png"))
    return report.end(bad_cases(report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
