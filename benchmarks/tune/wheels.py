"""Compares wheels of packax on the cases of models.py, each in a separate process, in turns.

    python benchmarks/tune/wheels.py NAME=WHEEL ... --cases GROUP,NAME,... [--passes fwd,bwd]
        [--cudnn] [--rounds 5] [--out DIR]

It needs a GPU, and no Triton. Build a wheel with other constants of csrc/aot/tiles_*.py for the
kernels that the cases need: `PACKAX_ARCHS=90a PACKAX_DTYPES=bf16 PACKAX_HEAD_DIMS="64;96"`. Results
are compared with those of the first wheel, which must be right; a wheel with other results is
named, and not timed, and the exit status is 1. Cases are prepared and timed one after another.
Prints the median times of all wheels in ms, and the first wheel's time divided by that of each
other (above 1: faster than the first). Writes wheels.json into --out (default: $OUT, else
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

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from lib.turns import PASSES, Failed, State, Worker, as_row, burst, in_turns, launches_of, serve

ROUND_MS = 30.0
# ‖x - y‖ / ‖y‖ of results in bfloat16: sums may be in another order.
LIMIT = 1e-2
NUMBERS = 1 << 28  # random ones, of which all operands are slices: more than any has


class OneWheel(State):
    """A worker: the wheel on PYTHONPATH, or cuDNN."""

    def __init__(self, name: str) -> None:
        self.name, self.functions, self.launches = name, {}, {}
        self.numbers: Any = None

    def inputs(self, case: Any) -> tuple[Any, ...]:
        """As lib.implementations.random_inputs, which would compile a program for every shape."""
        import jax

        if self.numbers is None:
            self.numbers = jax.random.normal(jax.random.key(0), (NUMBERS,), "bfloat16")
        rows, keys, qk, v = case.seq, case.kv_len, case.head_dim, case.value_dim
        shapes = [(rows, case.heads, qk), (keys, case.kv_heads, qk)]
        shapes += [(keys, case.kv_heads, v), (rows, case.heads, v)]

        @jax.jit
        def slices(numbers: Any) -> tuple[Any, ...]:
            found = []
            for i, shape in enumerate(shapes):
                size = case.batch * int(np.prod(shape))
                first = min(1000 * i + 1, NUMBERS - size)
                found.append(numbers[first : first + size].reshape(case.batch, *shape))
            return tuple(found)

        return slices(self.numbers)

    def prepare(self, case: str, passes: list[str], folder: str) -> dict[str, Any]:
        """Compiles a case, and stores the results of its first batch row."""
        import jax
        import models
        from lib.implementations import Compiled
        from lib.machine import machine
        from lib.model_cases import select

        self.finish, (found,) = jax.block_until_ready, select(case)
        make = models.cudnn_function if self.name == "cudnn" else models.packax_function
        compiled = Compiled(make(found), self.inputs(found))
        self.loops = models.loops_of(found)
        self.functions, self.launches = {}, {}
        for what in passes:
            results = compiled.function(what)()
            results = [results] if what == "fwd" else results
            rows = {str(i): np.asarray(x)[0].astype("f4") for i, x in enumerate(results)}
            np.savez(f"{folder}/{self.name}_{what}.npz", **rows)
            self.functions[what] = compiled.function(what, self.loops)
        return {"machine": machine()}

    def time(self, what: str) -> float:
        function = self.functions[what]
        if what not in self.launches:
            self.launches[what] = launches_of(function, self.finish, ROUND_MS)
        return burst(function, self.finish, self.launches[what]) / self.loops


def started(name: str, site: str) -> Worker:
    environment = os.environ | {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    return Worker(name, [sys.executable, __file__, "--serve", name], environment)


def others(first: str, name: str, what: str, folder: str) -> list[str]:
    """The results that are not those of the first wheel."""
    wrong = []
    with np.load(f"{folder}/{first}_{what}.npz") as want, \
            np.load(f"{folder}/{name}_{what}.npz") as got:  # fmt: skip
        for key in want:
            error = np.linalg.norm(got[key] - want[key]) / np.linalg.norm(want[key])
            if not error <= LIMIT:
                wrong.append(f"{what} {key}: {error:.1e}")
    return wrong


def main(arguments: list[str]) -> int:
    from lib.model_cases import select
    from lib.output import Report, arguments_of, say

    parser = arguments_of(__doc__, "names and groups of lib/model_cases.py", rounds=5)
    parser.add_argument("wheels", nargs="+", metavar="NAME=WHEEL")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--cudnn", action="store_true", help="also time cuDNN")
    options = parser.parse_args(arguments)
    if not options.cases:
        parser.error("--cases: name some")
    passes = options.passes.split(",")
    report, bad = Report(options.out, "wheels", options.rounds), []
    with tempfile.TemporaryDirectory() as folder, \
            concurrent.futures.ThreadPoolExecutor() as pool:  # fmt: skip
        workers = {}
        for name, wheel in (x.split("=", 1) for x in options.wheels):
            zipfile.ZipFile(wheel).extractall(f"{folder}/{name}")
            workers[name] = started(name, f"{folder}/{name}")
        first = next(iter(workers))
        if options.cudnn:
            workers["cudnn"] = started("cudnn", f"{folder}/{first}")
        # cuDNN compiles by capturing streams, during which nothing else may run
        groups = [[x for x in workers if x != "cudnn"], ["cudnn"] if options.cudnn else []]
        say(f"{'case':<34}{'pass':<5}" + "".join(f"{name:>12}" for name in workers))
        for case in (x.name for x in select(options.cases)):
            ready = []
            for group in groups:
                request = {"do": "prepare", "case": case, "passes": passes, "folder": folder}
                answers = {x: pool.submit(workers[x].ask, **request) for x in group}
                for name, future in answers.items():
                    try:
                        report["machine"] = future.result()["machine"]
                        ready.append(name)
                    except Failed as error:
                        say(f"{case}: {name}: {error}")
                        bad.append(f"{case} {name}")
            for what in passes:
                bursts = {}
                for name in ready if first in ready else ():
                    if wrong := others(first, name, what, folder):
                        say(f"WRONG {case}: {name}: {', '.join(wrong)}")
                        bad.append(f"{case} {name}")
                        continue
                    bursts[name] = functools.partial(workers[name].ask, do="time", what=what)
                rows = {name: as_row(x) for name, x in in_turns(bursts, options.rounds).items()}
                report.add(case, (report["cases"].get(case) or {}) | {what: rows})
                times = "".join(f"{rows[n]['ms'] if n in rows else 0:>12.4f}" for n in workers)
                base = rows.get(first, {"ms": 0})["ms"]
                ratios = (f"{base / rows[n]['ms']:.3f}" if n in rows else "-" for n in workers)
                say(f"{case:<34}{what:<5}{times}   {' '.join(ratios)}")
        for worker in workers.values():
            worker.end()
    return report.end(bad)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(OneWheel(sys.argv[2]).answer)
    else:
        sys.exit(main(sys.argv[1:]))
