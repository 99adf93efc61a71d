"""Compares wheels of packax on the cases of models.py, each in a separate process, in turns.

    python benchmarks/tune/wheels.py NAME=WHEEL ... --cases GROUP,NAME,... [--passes fwd,bwd]
        [--cudnn] [--rounds 5] [--out DIR]

It needs a GPU, and no Triton. Build a wheel with other constants of csrc/aot/tiles_*.py for the
kernels that the cases need: `PACKAX_ARCHS=90a PACKAX_DTYPES=bf16 PACKAX_HEAD_DIMS="64;96"`. Results
are compared with a float32 reference; a wheel with wrong results is named, and not timed. Prints
the median times of all wheels in ms, and the first wheel's time divided by that of each other
(above 1: faster than the first). Writes wheels.json into --out (default: $OUT, else
benchmarks/results).
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import pathlib
import sys
import tempfile
import zipfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from lib.turns import PASSES, Failed, State, Worker, as_row, burst, in_turns, launches_of, serve

ROUND_MS = 30.0


class OneWheel(State):
    """A worker: the wheel on PYTHONPATH, or cuDNN."""

    def __init__(self, name: str) -> None:
        self.name, self.rows, self.launches = name, {}, {}

    def prepare(self, cases: list[str], passes: list[str]) -> dict[str, Any]:
        """What fails or is wrong, by case. cuDNN compiles one case at a time (models.py)."""
        import jax
        import models
        from lib.implementations import Compiled, random_inputs
        from lib.machine import machine
        from lib.model_cases import select
        from lib.passes import usable

        self.finish = jax.block_until_ready
        make = models.cudnn_function if self.name == "cudnn" else models.packax_function

        def one(case: Any) -> tuple[str, dict[str, Any], int]:
            compiled = Compiled(make(case), random_inputs(case))
            loops = models.loops_of(case)
            errors = models.reference_of(case).errors
            return case.name, usable(compiled, errors, passes=passes, loops=loops), loops

        troubles = {}
        with concurrent.futures.ThreadPoolExecutor(1 if self.name == "cudnn" else 6) as pool:
            for name, row, loops in pool.map(one, select(",".join(cases))):
                for what, function in row["passes"].items():
                    self.rows[name, what] = function, loops
                if row["failed"] or row["wrong"]:
                    troubles[name] = [row["failed"], row["wrong"]]
        for key, (function, _) in self.rows.items():
            self.launches[key] = launches_of(function, self.finish, ROUND_MS)
        ready = [list(key) for key in self.rows]
        return {"troubles": troubles, "ready": ready, "machine": machine()}

    def time(self, case: str, what: str) -> float:
        function, loops = self.rows[case, what]
        return burst(function, self.finish, self.launches[case, what]) / loops


def started(name: str, site: str) -> Worker:
    environment = os.environ | {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    return Worker(name, [sys.executable, __file__, "--serve", name], environment)


def main(arguments: list[str]) -> int:
    from lib.output import Report, arguments_of, say

    parser = arguments_of(__doc__, "names and groups of lib/model_cases.py", rounds=5)
    parser.add_argument("wheels", nargs="+", metavar="NAME=WHEEL")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--cudnn", action="store_true", help="also time cuDNN")
    options = parser.parse_args(arguments)
    if not options.cases:
        parser.error("--cases: name some")
    passes = options.passes.split(",")
    report = Report(options.out, "wheels", options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        workers = {}
        for name, wheel in (x.split("=", 1) for x in options.wheels):
            zipfile.ZipFile(wheel).extractall(f"{folder}/{name}")
            workers[name] = started(name, f"{folder}/{name}")
        if options.cudnn:
            workers["cudnn"] = started("cudnn", f"{folder}/{next(iter(workers))}")
        request = {"do": "prepare", "cases": options.cases.split(","), "passes": passes}
        ready: dict[tuple[str, str], dict[str, Any]] = {}
        with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
            # cuDNN compiles by capturing streams, during which nothing else may run
            others = [worker for name, worker in workers.items() if name != "cudnn"]
            found = {w.name: pool.submit(w.ask, **request) for w in others}
            concurrent.futures.wait(found.values())
            found |= {name: pool.submit(w.ask, **request) for name, w in workers.items()
                if name not in found}  # fmt: skip
        for name, future in found.items():
            try:
                answer = future.result()
            except Failed as error:
                say(f"{name}: {error}")
                continue
            report["machine"] = answer["machine"]
            say(f"{name} is ready{''.join(f'; {x}: {y}' for x, y in answer['troubles'].items())}")
            for case, what in answer["ready"]:
                ask = functools.partial(workers[name].ask, do="time", case=case, what=what)
                ready.setdefault((case, what), {})[name] = ask
        names = list(workers)
        say(f"{'case':<34}{'pass':<5}" + "".join(f"{name:>12}" for name in names))
        for (case, what), bursts in ready.items():
            rows = {name: as_row(x) for name, x in in_turns(bursts, options.rounds).items()}
            report.add(case, report["cases"].get(case, {}) | {what: rows})
            times = "".join(f"{rows[n]['ms'] if n in rows else 0:>12.4f}" for n in names)
            first = rows.get(names[0], {"ms": 0})["ms"]
            ratios = (f"{first / rows[n]['ms']:.3f}" if n in rows else "-" for n in names[1:])
            say(f"{case:<34}{what:<5}{times}   {' '.join(ratios)}")
        for worker in workers.values():
            worker.end()
    return report.end([])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(OneWheel(sys.argv[2]).answer)
    else:
        sys.exit(main(sys.argv[1:]))
