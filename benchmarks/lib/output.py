"""Shared by all programs: arguments, progress output, and the JSON report."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

START = time.perf_counter()
BENCHMARKS = Path(__file__).resolve().parents[1]


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def default_out() -> Path:
    """$OUT, else benchmarks/results."""
    return Path(os.environ.get("OUT", BENCHMARKS / "results"))


def to_json(value: Any, column: int = 0, label: str = "") -> str:
    """JSON with each array or object on one line if it fits into 320 columns."""
    line = label + json.dumps(value)
    if column + len(line) <= 320 or not value or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        items = [to_json(v, column + 1, json.dumps(k) + ": ") for k, v in value.items()]
    else:
        items = [to_json(v, column + 1) for v in value]
    indent = "\n" + " " * column
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{label}{first}{indent} " + f",{indent} ".join(items) + f"{indent}{last}"


def write_json(path: Path, report: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(report) + "\n")


def arguments_of(
    doc: str | None, cases: str = "", *, default: str | None = None, rounds: int = 0
) -> argparse.ArgumentParser:
    """A parser with --out and, if the program has them, --cases (help text) and --rounds."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if cases:
        parser.add_argument(
            "--cases", default=default, help=f"{cases} (default: {default or 'all'})"
        )
    if rounds:
        text = "interleaved rounds, of which the median is reported"
        parser.add_argument("--rounds", type=int, default=rounds, help=text)
    parser.add_argument("--out", type=Path, default=default_out(), help="the folder of the JSON")
    return parser


def picked(
    cases: Sequence[Any], names: str | list[str] | None, group_of: Callable[[Any], str]
) -> list[Any]:
    """The cases with these names or groups (a list, or text with commas), in the order of `cases`;
    None: all."""
    if names is None:
        return list(cases)
    groups = dict.fromkeys(filter(None, map(group_of, cases)))
    known = [*groups, *(case.name for case in cases)]
    wanted = names.split(",") if isinstance(names, str) else names
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(
            f"--cases: no case or group named {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return [case for case in cases if case.name in wanted or group_of(case) in wanted]


def require_gpu() -> None:
    import jax

    if jax.default_backend() != "gpu":
        raise SystemExit(f"this times GPU kernels, and jax has {jax.devices()} here")


class Report(dict[str, Any]):
    """The results of a run, written after every case, because a time limit may end the run."""

    def __init__(self, out: Path, name: str, rounds: int, **more: Any) -> None:
        commit = os.environ.get("PACKAX_COMMIT", "unknown")
        super().__init__(more, commit=commit, rounds=rounds, cases={})
        self.path = out / f"{name}.json"

    def add(self, case: str, rows: Any) -> None:
        self["cases"][case] = rows
        write_json(self.path, self)

    def run(
        self,
        cases: Sequence[Any],
        run_case: Callable[[Any], dict[str, Any]],
        table: Callable[[dict[str, Any]], str],
    ) -> dict[str, Any]:
        """Runs all cases and returns their rows. A case that fails has no rows."""
        for case in cases:
            try:
                rows = run_case(case)
            except Exception as error:
                traceback.print_exc(limit=6)
                say(f"{case.name} FAILED: {first_line(error)}")
                rows = {}
            self.add(case.name, rows)
            gc.collect()
            say(f"{case.name}\n{table({case.name: rows})}")
        print(f"\n{table(self['cases'])}\n")
        return self["cases"]

    def end(self, bad: list[str]) -> int:
        """Prints the path and bad cases. Returns the exit status: 1 if there are bad cases."""
        print(f"wrote {self.path}" + (f"\nFAILED: {', '.join(bad)}" if bad else ""))
        return 1 if bad else 0
