"""The worker of attention.py for packax and its peers in JAX: times one burst per request.

All workers get the same inputs in files, and the float32 reference of this worker checks all
results. As a separate process with another packax on PYTHONPATH, it times that packax.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for the others

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import packax
from lib.cases import Case
from lib.exchange import load, save
from lib.implementations import (
    JAX_PEERS,
    LOOP,
    Compiled,
    not_tried,
    packax_attention,
    random_inputs,
    unpadded,
)
from lib.machine import machine
from lib.passes import usable
from lib.reference import Reference, wrong
from lib.turns import State, burst, serve


class Jax(State):
    def __init__(self) -> None:
        self.reference: Reference | None = None
        self.passes: dict[str, dict[str, Any]] = {}
        self.loops = 1

    def hello(self) -> dict[str, str]:
        return machine() | {"path": str(packax.__file__)}

    def prepare(
        self, case: dict[str, Any], folder: str, round_ms: float, peers: Sequence[str]
    ) -> dict[str, Any]:
        """Runs and checks every pass. Returns {"implementations": {name: {"errors", "failed",
        "wrong", "launches"}}, "compared": the slices to compare}."""
        self.passes, self.reference = {}, None
        gc.collect()
        found = Case(**case)
        self.loops = LOOP if found.group == "short" else 1
        inputs = random_inputs(found)
        save(Path(folder), inputs)
        reference = self.reference = Reference(found, inputs)
        report = {}
        for name in ("packax", *peers):
            same = name == "deterministic"
            with unpadded() if name == "fallback" else contextlib.nullcontext():
                made = (
                    JAX_PEERS[name](found)
                    if name in JAX_PEERS
                    else packax_attention(found, deterministic=same)
                )
                row = report[name] = usable(
                    Compiled(made, inputs), reference.errors, not_tried(name, found),
                    repeats=same, loops=self.loops, round_ms=round_ms,
                )  # fmt: skip
            self.passes[name] = row.pop("passes")
        return {"implementations": report, "compared": reference.slices()}

    def judge(self, folder: str) -> dict[str, Any]:
        """The errors of the slices that another worker wrote."""
        assert self.reference is not None
        errors = self.reference.slice_errors(load(Path(folder)))
        return {"errors": errors, "wrong": wrong(errors)}

    def time(self, name: str, what: str, launches: int) -> float:
        """Milliseconds per pass."""
        return burst(self.passes[name][what], jax.block_until_ready, launches) / self.loops


if __name__ == "__main__":
    serve(Jax().answer)
