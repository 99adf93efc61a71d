"""packax and its peers in JAX for versus_fa4.py: the passes of attention.py, timed one burst per
request.

All workers get the same inputs, through files, and its float32 reference checks them all. Another
worker, with another packax on its PYTHONPATH, may do the same for that.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other process wants memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import packax
from lib.cases import CASES
from lib.exchange import load, save
from lib.implementations import JAX_PEERS, Compiled, not_tried, packax_attention, random_inputs
from lib.machine import machine
from lib.passes import usable
from lib.reference import Reference, wrong
from lib.turns import State, burst, serve


class Jax(State):
    def __init__(self) -> None:
        self.reference: Reference | None = None
        self.passes: dict[str, dict[str, Any]] = {}

    def hello(self) -> dict[str, str]:
        return machine() | {"path": str(packax.__file__)}

    def prepare(
        self, case: str, folder: str, round_ms: float, peers: Sequence[str] = ("cudnn",)
    ) -> dict[str, Any]:
        """Runs and checks every pass; {implementation: {"errors", "failed", "wrong", "launches"}}
        and what is compared."""
        self.passes, self.reference = {}, None
        gc.collect()
        (found,) = (item for item in CASES if item.name == case)
        inputs = random_inputs(found)
        save(Path(folder), inputs)
        reference = self.reference = Reference(found, inputs)
        report = {}
        for name, make in ({"packax": packax_attention} | JAX_PEERS).items():
            if name != "packax" and name not in peers:
                continue
            compiled = Compiled(make(found), inputs)
            skip = not_tried(name, found)
            row = report[name] = usable(compiled, reference.errors, skip, round_ms=round_ms)
            self.passes[name] = row.pop("passes")
        return {"implementations": report, "compared": reference.slices()}

    def judge(self, folder: str) -> dict[str, Any]:
        """Errors of the slices that another worker wrote."""
        assert self.reference is not None
        errors = self.reference.slice_errors(load(Path(folder)))
        return {"errors": errors, "wrong": wrong(errors)}

    def time(self, name: str, what: str, launches: int) -> float:
        """Milliseconds per pass."""
        return burst(self.passes[name][what], jax.block_until_ready, launches)


if __name__ == "__main__":
    serve(Jax().answer)
