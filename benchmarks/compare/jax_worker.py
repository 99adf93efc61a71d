"""packax and its peers in JAX for versus_fa4.py: the passes of attention.py, timed one burst per
request.

Both workers get the same inputs, through files, and its float32 reference checks both. For
versus_wheel.py it runs only packax, the one on its PYTHONPATH, and two workers compare results.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other process wants memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.cases import CASES, Case
from lib.implementations import (
    JAX_PEERS,
    LOOP,
    Arrays,
    Compiled,
    Implementation,
    not_tried,
    packax_attention,
    random_inputs,
)
from lib.machine import machine
from lib.passes import usable
from lib.reference import Reference, relative, wrong
from lib.turns import burst, launches_of, serve

OPERANDS = ("query", "key", "value", "cotangent")
SHORT = 0.2  # ms; decode_h200.json has single dispatches of 0.054 to 0.123


class State:
    def __init__(self) -> None:
        self.reference: Reference | None = None
        self.passes: dict[str, dict[str, Any]] = {}
        self.loops: dict[str, Any] = {}  # of passes that are short, LOOP in one call

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request["do"])(**{k: v for k, v in request.items() if k != "do"})

    def hello(self) -> dict[str, str]:
        return machine()

    def prepare(
        self, case: str, folder: str, round_ms: float, peers: Sequence[str] = ("cudnn",)
    ) -> dict[str, Any]:
        """Runs and checks every pass; {implementation: {"errors", "failed", "wrong", "launches"}}
        and what is compared."""
        found, inputs = self._begin(case)
        for name, x in zip(OPERANDS, inputs, strict=True):
            np.save(Path(folder) / f"{name}.npy", np.asarray(x).view(np.int16))
        self.reference = Reference(found, inputs)
        report = {
            item.name: self._checked(item, inputs, round_ms, skip)
            for item, skip in (
                (packax_attention(found), None),
                *((JAX_PEERS[name](found), not_tried(name, found)) for name in peers),
            )
        }
        return {"implementations": report, "compared": self.reference.slices()}

    def prepare_packax(self, case: str, round_ms: float) -> dict[str, Any]:
        """prepare for packax only: its row, which says what is timed in a loop."""
        found, inputs = self._begin(case)
        self.reference = Reference(found, inputs)
        item = packax_attention(found)
        row = self._checked(item, inputs, round_ms)
        compiled = Compiled(item, inputs)
        make = {"fwd": compiled.forward_loop, "bwd": compiled.backward_loop}
        for what, function in self.passes[item.name].items():
            if min(burst(function, jax.block_until_ready, 10) for _ in range(3)) < SHORT:
                self.loops[what] = make[what](LOOP)
                launches = launches_of(self.loops[what], jax.block_until_ready, round_ms)
                row["launches"][what] = launches
        return row | {"in_a_loop": sorted(self.loops)}

    def _begin(self, case: str) -> tuple[Case, Arrays]:
        self.passes = {}
        self.loops = {}
        self.reference = None
        gc.collect()
        (found,) = (item for item in CASES if item.name == case)
        return found, random_inputs(found)

    def _checked(
        self,
        item: Implementation,
        inputs: Arrays,
        round_ms: float,
        skip: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        assert self.reference is not None
        result = usable(item, Compiled(item, inputs), self.reference, skip)
        passes = {what: f for what, f in result["passes"].items() if what in ("fwd", "bwd")}
        self.passes[item.name] = passes
        row = {key: result.get(key) for key in ("errors", "failed", "wrong")}
        return row | {
            "launches": {
                what: launches_of(f, jax.block_until_ready, round_ms) for what, f in passes.items()
            }
        }

    def judge(self, folder: str) -> dict[str, Any]:
        """Errors of the slices that the other worker wrote."""
        assert self.reference is not None
        found = {
            path.stem: jnp.asarray(np.load(path).view(jnp.bfloat16))
            for path in Path(folder).glob("*.npy")
        }
        errors = self.reference.slice_errors(found)
        return {"errors": errors, "wrong": wrong(errors)}

    def package(self) -> dict[str, str]:
        """Where packax comes from, a digest of its files, and what jax runs on."""
        assert packax.__file__ is not None
        root = Path(packax.__file__).parent
        digest = hashlib.sha256()
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
        return {
            "path": str(root),
            "sha256": digest.hexdigest()[:16],
            "backend": jax.default_backend(),
        }

    def _results(self) -> dict[str, jax.Array]:
        """The whole results of the passes that are timed."""
        passes, found = self.passes["packax"], {}
        if "fwd" in passes:
            found["out"] = passes["fwd"]()
        if "bwd" in passes:
            found |= zip(("dq", "dk", "dv"), passes["bwd"](), strict=True)
        return found

    def keep(self, folder: str) -> None:
        """Writes packax's results for another worker's `compare`."""
        for name, x in self._results().items():
            np.save(Path(folder) / f"{name}.npy", np.asarray(x).view(np.int16))

    def compare(self, folder: str) -> dict[str, Any]:
        """Compares every element of packax's results with those kept: relative differences, those
        over the limit, bit equality."""
        differences, same = {}, []
        for name, x in self._results().items():
            path = Path(folder) / f"{name}.npy"
            if not path.exists():
                continue
            kept = np.load(path)
            other = jnp.asarray(kept.view(jnp.bfloat16)).astype(jnp.float32)
            differences[name] = relative(x, other)
            if np.array_equal(np.asarray(x).view(np.int16), kept):
                same.append(name)
        return {"differences": differences, "differ": wrong(differences), "same_bits": same}

    def time(self, name: str, what: str, launches: int) -> float:
        """Milliseconds per pass."""
        if what in self.loops:
            return burst(self.loops[what], jax.block_until_ready, launches) / LOOP
        return burst(self.passes[name][what], jax.block_until_ready, launches)


if __name__ == "__main__":
    serve(State().answer)
