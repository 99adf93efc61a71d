"""What every program says while it runs, and where its results go."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
