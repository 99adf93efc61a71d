"""What every program prints while it runs, and where its results go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

START = time.perf_counter()
BENCHMARKS = Path(__file__).resolve().parents[1]
PEERS = BENCHMARKS / "compare" / "peers.json"


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def default_out() -> Path:
    """$OUT, else benchmarks/results."""
    return Path(os.environ.get("OUT", BENCHMARKS / "results"))


def to_json(value: Any, column: int = 0, label: str = "") -> str:
    """JSON in which an array or object is on one line if it fits."""
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
    path.write_text(to_json(report) + "\n")
