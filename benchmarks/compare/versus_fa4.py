"""packax, cuDNN and FlashAttention 2, 3 and 4 on one GPU, taking turns: TFLOP/s and ratios.

    python benchmarks/compare/versus_fa4.py [--fa4 dist/fa4.tar.xz | --fa2] [--peers cudnn,fa3]
        [--cases board,long] [--rounds 7] [--power] [--out DIR]

Two processes, one with JAX (packax from the wheel, and --peers: cuDNN, FA3 from flash-attn3-jax)
and one with torch (FA4), take turns: in every round each implementation runs a burst of about 120
ms, in another order every round, while the other process waits (turns.py). Ratios are of medians.
Inputs are the same arrays, and every output and gradient is first compared with one float32
reference; a wrong one is not timed. --power: bursts of two seconds (--round-ms), with the GPU's
power and clock for each time (power.py). --fa2 uses torch's FlashAttention-2 instead of FA4, for
builds of kernels for other GPUs (docs/internals/proxy.md); with neither, only the JAX process runs.

The machine needs torch 2.11 for CUDA 13 and, in addition to JAX, the Python packages einops,
cuda-bindings, protobuf and typing-extensions. The other packages come in the archives that `bash
benchmarks/compare/pack_fa4.sh` (and pack_fa3.sh) makes on a machine with a package registry:
flash-attn-4, nvidia-cutlass-dsl with its libs-base, libs-core and libs-cu13, quack-kernels,
apache-tvm-ffi, torch-c-dlpack-ext. FA4 compiles its kernels at first use. Writes versus_fa4.json,
or versus_fa2.json, into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.cases import Case, select
from lib.chart import bar_chart
from lib.output import PEERS, default_out, say, write_json
from lib.power import Meter, medians, metered
from lib.power import line as power_line
from lib.turns import Failed, Worker, as_row, in_turns, troubles

HERE = Path(__file__).parent
PASSES = ("fwd", "bwd")
ORDER = ("packax", "cudnn", "fa2", "fa3", "fa4")
TITLES = {"cudnn": "to cuDNN", "fa2": "to FA2", "fa3": "to FA3", "fa4": "to FA4"}
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


def prepare(
    case: Case,
    jax: Worker,
    torch: Worker | None,
    scratch: Path,
    round_ms: float,
    peers: tuple[str, ...],
    torch_peer: str = "fa4",
) -> dict[str, Any]:
    """Rows of the report without times: errors, what failed, launches per burst."""
    with (
        tempfile.TemporaryDirectory(dir=scratch) as inputs,
        tempfile.TemporaryDirectory() as results,
    ):
        found = jax.ask(do="prepare", case=case.name, folder=inputs, round_ms=round_ms, peers=peers)
        rows = found["implementations"]
        if torch is None:
            return rows
        try:
            found_there = torch.ask(
                do="prepare",
                peer=torch_peer,
                case=case.name,
                folder=inputs,
                results=results,
                compared=found["compared"],
                round_ms=round_ms,
            )
            row = found_there | jax.ask(do="judge", folder=results)
        except Failed as error:
            row = {"failed": {"fwd": str(error)}, "errors": {}, "wrong": [], "launches": {}}
        if row["wrong"]:
            row["launches"] = {}
        rows[torch_peer] = row
        return rows


def run_case(
    case: Case,
    jax: Worker,
    torch: Worker | None,
    scratch: Path,
    rounds: int,
    round_ms: float,
    meter: Meter | None = None,
    peers: tuple[str, ...] = ("cudnn",),
    torch_peer: str = "fa4",
) -> dict[str, Any]:
    rows = prepare(case, jax, torch, scratch, round_ms, peers, torch_peer)
    flops = {"fwd": case.forward_flops, "bwd": case.backward_flops}
    for row in rows.values():
        row["times"] = {}
        row["power"] = {}
    for what in PASSES:
        names = [name for name in ORDER if name in rows and what in rows[name]["launches"]]
        bursts = {
            name: functools.partial(
                (torch if torch and name in TORCH else jax).ask,
                do="time",
                name=name,
                what=what,
                launches=rows[name]["launches"][what],
            )
            for name in names
        }
        read: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        if meter is not None:
            bursts = {name: metered(meter, f, read[name]) for name, f in bursts.items()}
        for name, took in in_turns(bursts, rounds).items():
            rows[name]["times"][what] = row = as_row(took, flops[what])
            if read[name]:
                rows[name]["power"][what] = medians(read[name], row["ms"])
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
            cells = {who: rows.get(who, {}).get("times", {}).get(what) for who in order}
            line = f"{name:<20}{what:<5}"
            for cell in cells.values():
                line += (
                    f"{cell['ms']:>11.3f}{cell['tflops']:>9.1f}" if cell else f"{'-':>11}{'-':>9}"
                )
            ours = cells.get("packax")
            for who, cell in cells.items():
                if who in TITLES:
                    line += f"{cell['ms'] / ours['ms']:>10.3f}" if ours and cell else f"{'-':>10}"
            for who in order:
                errors = rows.get(who, {}).get("errors") or {}
                results_of = ("out",) if what == "fwd" else ("dq", "dk", "dv")
                worst = [errors[x] for x in results_of if x in errors]
                line += f"{max(worst):>13.1e}" if worst else f"{'-':>13}"
            lines.append(line)
        for who in order:
            power = rows.get(who, {}).get("power", {})
            lines += [power_line(who, what, power[what]) for what in PASSES if what in power]
            notes += troubles(f"{name} {who}", rows.get(who, {}))
    return "\n".join(lines + notes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fa4",
        type=Path,
        help="the archive of pack_fa4.sh, or a folder unpacked from it (default: without FA4)",
    )
    parser.add_argument("--fa2", action="store_true", help="torch's own FlashAttention-2 instead")
    parser.add_argument(
        "--peers", default="cudnn", help="of implementations.py: cudnn, fa3 (default: cudnn)"
    )
    parser.add_argument(
        "--cases", default="board", help="names and groups of cases.py (default: board)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, help="length of a burst; 120, with --power 2000")
    parser.add_argument("--power", action="store_true", help="read power and clock, too")
    parser.add_argument("--out", type=Path, default=default_out())
    arguments = parser.parse_args()
    cases = select(arguments.cases)
    peers = tuple(name for name in arguments.peers.split(",") if name)
    torch_peer = "fa2" if arguments.fa2 else "fa4"
    file = arguments.out / f"versus_{torch_peer}.json"
    meter = Meter() if arguments.power else None
    round_ms = arguments.round_ms or (2000.0 if arguments.power else 120.0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    shm = Path("/dev/shm")
    report: dict[str, Any] = {
        "commit": os.environ.get("PACKAX_COMMIT", "unknown"),
        "rounds": arguments.rounds,
        "cases": {},
    }
    with contextlib.ExitStack() as stack:
        programs = {"jax": ("jax_worker.py", dict(os.environ))}
        if arguments.fa2:
            programs["torch"] = ("peers_torch.py", os.environ | {"PYTHONPATH": ""})
        elif arguments.fa4:
            site = unpacked(arguments.fa4, stack)
            programs["torch"] = ("peers_torch.py", torch_environment(site))
        workers = {}
        for name, (script, environment) in programs.items():
            workers[name] = Worker(name, [sys.executable, str(HERE / script)], environment)
            stack.callback(workers[name].end)
        for name, worker in workers.items():
            report[name] = worker.ask(do="hello")
            say(f"{name}: {report[name]}")
        for case in cases:
            scratch = shm if shm.is_dir() else Path(tempfile.gettempdir())
            try:
                rows = run_case(
                    case,
                    workers["jax"],
                    workers.get("torch"),
                    scratch,
                    arguments.rounds,
                    round_ms,
                    meter,
                    peers,
                    torch_peer,
                )
            except Failed as error:
                say(f"{case.name} FAILED: {error}")
                rows = {}
            report["cases"][case.name] = rows
            say(f"{case.name}\n{table({case.name: rows})}")
            write_json(file, report)
    print(f"\n{table(report['cases'])}\n")
    rounds = f"medians of {arguments.rounds} rounds in turns"
    print(f"{', '.join(TITLES.values())}: their ms / packax ms, {rounds}")
    board = json.loads(PEERS.read_text())
    if any(rows for rows in report["cases"].values()):
        bar_chart(report | {"machine": report["jax"]}, board, file.with_suffix(".png"))
    print(f"wrote {file} and, of what was measured, {file.with_suffix('.png').name}")
    bad = [
        name
        for name, rows in report["cases"].items()
        if not rows or rows["packax"]["wrong"] or rows["packax"]["failed"]
    ]
    print(f"FAILED: {', '.join(bad)}" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
