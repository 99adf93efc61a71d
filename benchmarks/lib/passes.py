"""Runs the passes of an implementation, compares them with a reference, and times them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lib.implementations import Compiled
from lib.output import first_line, say
from lib.reference import wrong
from lib.turns import PASSES, burst, launches_of, time_rows


def usable(
    compiled: Compiled,
    errors_of: Callable[[Any, Any], dict[str, float]] | None = None,
    skip: dict[str, str] | None = None,
    *,
    passes: Sequence[str] = PASSES,
    limit: float | None = None,
    repeats: bool = False,
    loops: int = 1,
    round_ms: float = 120.0,
) -> dict[str, Any]:
    """Runs and compares every pass. Returns {"errors", "failed", "wrong", "passes": callables,
    "launches": the number of calls that take `round_ms`}.

    errors_of: a function of (out, gradients), one of which is None; None: nothing is compared.
    repeats: a second run must be bit-identical. limit: replaces the limits of errors. loops: the
    number of passes per call, for short passes.
    """
    errors: dict[str, float] = {}
    failed, functions = dict(skip or {}), {}
    bad: list[str] = []
    for what in passes:
        if "fwd" in failed or what in failed:
            continue
        try:
            function = compiled.function(what)
            found = function()
            both = (found, None) if what == "fwd" else (None, found)
            for name, error in errors_of(*both).items() if errors_of else ():
                errors[name] = float(np.maximum(errors.get(name, 0.0), error))
            if repeats and not jax.tree.all(jax.tree.map(same_bits, found, function())):
                bad.append(f"bits of {what}")
            functions[what] = function if loops == 1 else compiled.function(what, loops)
        except Exception as error:  # the other passes and implementations must still run
            failed[what] = first_line(error)
    bad += wrong(errors, limit)
    if bad:
        said = ", ".join(f"{name} {errors.get(name, 0):.1e}" for name in bad)
        say(f"WRONG {compiled.implementation.name}: {said}")
        functions = {}
    finish = jax.block_until_ready
    launches = {what: launches_of(f, finish, round_ms) for what, f in functions.items()}
    return {
        "errors": errors, "failed": failed, "wrong": bad, "passes": functions,
        "launches": launches,
    }  # fmt: skip


def same_bits(x: jax.Array, y: jax.Array) -> bool:
    return bool(jax.numpy.array_equal(x.view("uint16"), y.view("uint16")))


def time_passes(
    rows: Mapping[str, dict[str, Any]], flops: Mapping[str, float], rounds: int
) -> None:
    """Times the passes of all rows in turns: adds "times" and removes "passes"."""

    def ask(name: str, what: str, launches: int) -> float:
        return burst(rows[name]["passes"][what], jax.block_until_ready, launches)

    time_rows(rows, ask, flops, rounds)
    for row in rows.values():
        del row["passes"]
