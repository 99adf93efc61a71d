"""Times functions or worker processes in turns; workers answer requests as JSON lines over pipes.

A worker handles one request at a time and is idle between requests. The parent sends the next
request only after the answer, so no other worker uses the GPU while one is timed. This file imports
neither jax nor torch.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lib import power

PASSES = ("fwd", "bwd")
ERRORS = {  # the results of each pass that are compared
    "fwd": ("out", "mean"),
    "bwd": ("dq", "dk", "dv", "dbias", "dtable"),
}


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The worker's loop: answers requests from standard input until it closes. Printed text goes to
    standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"value": answer(json.loads(line))}
        except Exception as error:
            traceback.print_exc(limit=4)
            text = (str(error).strip().splitlines() or [""])[0]
            reply = {"error": f"{type(error).__name__}: {text}"[:300]}
        replies.write(json.dumps(reply) + "\n")


class State:
    """A worker whose methods answer requests; "do" in the request is the name of the method."""

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request["do"])(**{k: v for k, v in request.items() if k != "do"})

    def ask(self, **request: Any) -> Any:
        """Like `Worker.ask`, but in this process."""
        return self.answer(request)


class Failed(Exception):
    """A worker's request failed, or the worker ended."""


class Worker:
    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **request: Any) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(f"{self.name} ended with status {self.process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply["value"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def burst(function: Callable[[], Any], finish: Callable[[Any], Any], launches: int) -> float:
    """Milliseconds per launch. The first launch is not timed: another worker just used the GPU."""
    finish(function())
    start = time.perf_counter()
    for _ in range(launches):
        result = function()
    finish(result)
    return (time.perf_counter() - start) / launches * 1e3


def launches_of(function: Callable[[], Any], finish: Callable[[Any], Any], round_ms: float) -> int:
    """The number of launches that take about `round_ms`."""
    burst(function, finish, 1)
    return max(2, min(1000, round(round_ms / burst(function, finish, 3))))


def shuffled(names: Iterable[str], turn: int) -> list[str]:
    """The order of a round, the same in every run. It differs by round, so that no implementation
    always runs after the one that heats the GPU most."""
    order = sorted(names)
    random.Random(turn).shuffle(order)
    return order


def in_turns(bursts: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The times of the bursts in each round; the order differs by round."""
    samples: dict[str, list[float]] = {name: [] for name in bursts}
    for turn in range(rounds):
        for name in shuffled(bursts, turn):
            samples[name].append(bursts[name]())
    return samples


def as_row(took: list[float], flops: float = 0.0) -> dict[str, float]:
    """A row of a report: median, minimum and maximum of the rounds in ms, and TFLOP/s."""
    ms = statistics.median(took)
    row = {"ms": round(ms, 4), "ms_low": round(min(took), 4), "ms_high": round(max(took), 4)}
    return row | ({"tflops": round(flops / ms / 1e9, 1)} if flops else {})


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    finish: Callable[[Any], Any],
    rounds: int,
    round_ms: float = 120.0,
) -> dict[str, list[float]]:
    """The milliseconds per call of each function in each round."""
    bursts = {
        name: functools.partial(burst, function, finish, launches_of(function, finish, round_ms))
        for name, function in functions.items()
    }
    return in_turns(bursts, rounds)


def time_rows(
    rows: Mapping[str, dict[str, Any]],
    ask: Callable[[str, str, int], float],
    flops: Mapping[str, float],
    rounds: int,
    meter: power.Meter | None = None,
) -> None:
    """Times the passes of a case's rows in turns: adds "times", and with a meter "power".

    `ask(name, pass, launches)` runs a burst. A row's "launches" has the passes that can run.
    """
    for row in rows.values():
        row["times"] = {}
    for what in flops:
        bursts = {
            name: functools.partial(ask, name, what, row["launches"][what])
            for name, row in rows.items()
            if what in row["launches"]
        }
        read: dict[str, list[dict[str, float]]] = {name: [] for name in bursts}
        if meter is not None:
            bursts = {name: power.metered(meter, f, read[name]) for name, f in bursts.items()}
        for name, took in in_turns(bursts, rounds).items():
            rows[name]["times"][what] = row = as_row(took, flops[what])
            if read[name]:
                rows[name].setdefault("power", {})[what] = power.medians(read[name], row["ms"])


def not_run(error: Exception) -> dict[str, Any]:
    """The row of an implementation that could not be prepared."""
    return {"failed": {"fwd": str(error)}, "errors": {}, "wrong": [], "launches": {}}


def bad_cases(results: Mapping[str, Any], of: Iterable[str] = ("packax",)) -> list[str]:
    """The cases in which packax did not run, or an implementation in `of` failed or is wrong."""
    names = set(of)
    return [
        case
        for case, rows in results.items()
        if "packax" not in rows
        or any(row["wrong"] or row["failed"] for who, row in rows.items() if who in names)
    ]


def table(results: Mapping[str, Any], order: Iterable[str]) -> str:
    """One line per case and pass: ms and TFLOP/s of each implementation, the others' times divided
    by packax's (above 1: packax is faster), errors; then power, failures and wrong results."""
    order = [who for who in order if any(who in rows for rows in results.values())]
    others = [who for who in order if who != "packax"]
    head = f"{'case':<26}{'pass':<5}" + "".join(f"{who + ' ms':>17}{'TFLOP/s':>9}" for who in order)
    head += "".join(f"{'to ' + who:>17}" for who in others)
    lines, notes = [head + "".join(f"{who + ' error':>20}" for who in order)], []
    for name, rows in results.items():
        for what in ERRORS:
            found = {who: rows.get(who, {}).get("times", {}).get(what) for who in order}
            line = f"{name:<26}{what:<5}"
            for x in found.values():
                line += f"{x['ms']:>17.4f}{x['tflops']:>9.1f}" if x else f"{'-':>17}{'-':>9}"
            line += "".join(ratio(found[who], found.get("packax"), 17) for who in others)
            line += "".join(worst_error(rows.get(who, {}), what, 20) for who in order)
            lines.append(line)
        for who in order:
            row = rows.get(who, {})
            lines += [power.line(who, what, read) for what, read in row.get("power", {}).items()]
            notes += troubles(f"{name} {who}", row)
    return "\n".join(lines + notes)


def ratio(theirs: Any, ours: Any, width: int) -> str:
    return f"{theirs['ms'] / ours['ms']:>{width}.3f}" if ours and theirs else f"{'-':>{width}}"


def worst_error(row: Mapping[str, Any], what: str, width: int) -> str:
    errors = row.get("errors") or {}
    found = [errors[x] for x in ERRORS[what] if x in errors]
    return f"{max(found):>{width}.1e}" if found else f"{'-':>{width}}"


def troubles(name: str, row: dict[str, Any]) -> list[str]:
    """The lines below a table for passes of a row that failed or are wrong."""
    failed = row.get("failed") or {}
    lines = [f"{name} {what} did not run: {text}" for what, text in failed.items()]
    return lines + ([f"{name} WRONG: {', '.join(row['wrong'])}"] if row.get("wrong") else [])
