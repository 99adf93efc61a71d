"""packax and cuDNN for versus_fa4.py: the passes of attention.py, timed a burst at a time when asked.

Its inputs are the other worker's too, through files, and its float32 reference judges both.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other process wants memory

import jax
import jax.numpy as jnp
import numpy as np
from attention import usable
from cases import CASES
from implementations import (
    Compiled,
    cudnn_attention,
    not_tried,
    packax_attention,
    random_inputs,
)
from machine import machine
from reference import Reference, wrong
from turns import burst, launches_of, serve

OPERANDS = ("query", "key", "value", "cotangent")


class State:
    def __init__(self) -> None:
        self.reference: Reference | None = None
        self.passes: dict[str, dict[str, Any]] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request["do"])(**{k: v for k, v in request.items() if k != "do"})

    def hello(self) -> dict[str, str]:
        return machine()

    def prepare(self, case: str, folder: str, round_ms: float) -> dict[str, Any]:
        """Runs and checks every pass; {implementation: {"errors", "failed", "wrong", "launches"}} and what is compared."""
        self.passes = {}
        self.reference = None
        gc.collect()
        (found,) = (item for item in CASES if item.name == case)
        inputs = random_inputs(found)
        for name, x in zip(OPERANDS, inputs, strict=True):
            np.save(Path(folder) / f"{name}.npy", np.asarray(x).view(np.int16))
        self.reference = Reference(found, inputs)
        report: dict[str, Any] = {}
        for item in (packax_attention(found), cudnn_attention(found)):
            skip = not_tried(found) if item.name == "cudnn" else None
            result = usable(item, Compiled(item, inputs), self.reference, skip)
            passes = {
                what: result["passes"][what] for what in ("fwd", "bwd") if what in result["passes"]
            }
            self.passes[item.name] = passes
            launches = {
                what: launches_of(f, jax.block_until_ready, round_ms) for what, f in passes.items()
            }
            report[item.name] = {key: result.get(key) for key in ("errors", "failed", "wrong")} | {
                "launches": launches
            }
        return {"implementations": report, "compared": self.reference.slices()}

    def judge(self, folder: str) -> dict[str, Any]:
        """Errors of the slices that the other worker wrote."""
        assert self.reference is not None
        found = {
            path.stem: jnp.asarray(np.load(path).view(jnp.bfloat16))
            for path in Path(folder).glob("*.npy")
        }
        errors = self.reference.slice_errors(found)
        return {"errors": errors, "wrong": wrong(errors)}

    def time(self, name: str, what: str, launches: int) -> float:
        return burst(self.passes[name][what], jax.block_until_ready, launches)


if __name__ == "__main__":
    serve(State().answer)
