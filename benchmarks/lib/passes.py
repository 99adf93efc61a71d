"""The passes of an implementation, run once and compared with a reference before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from lib.implementations import Compiled
from lib.output import first_line, say
from lib.reference import Reference, wrong
from lib.timing import interleaved
from lib.turns import launches_of


def usable(
    compiled: Compiled,
    errors_of: Callable[[Any, Any], dict[str, float]] | None = None,
    skip: dict[str, str] | None = None,
    *,
    both: bool = False,
    round_ms: float = 0.0,
) -> dict[str, Any]:
    """Runs every pass once and compares: {"errors", "failed", "wrong", "passes": callables}.

    `errors_of(out, gradients)`, of which one is None; without it nothing is compared. `both`: also
    "fwd+bwd". With `round_ms`, "launches" says how many launches of a pass take that long.
    """
    errors: dict[str, float] = {}
    failed, passes = dict(skip or {}), {}

    def run(what: str, make: Callable[[], Any], results: Callable[[Any], tuple[Any, Any]]) -> None:
        part = "fwd" if what == "fwd" else "bwd"
        if "fwd" in failed or part in failed:
            return
        try:
            function = make()
            found = results(function())
            for name, error in errors_of(*found).items() if errors_of else ():
                errors[name] = float(np.maximum(errors.get(name, 0.0), error))
            passes[what] = function
        except Exception as error:  # the other implementations must still run
            failed[part] = first_line(error)

    run("fwd", compiled.forward, lambda out: (out, None))
    if both:
        run("fwd+bwd", compiled.both, lambda results: (None, results[1]))
    run("bwd", compiled.backward, lambda gradients: (None, gradients))
    bad = wrong(errors)
    if bad:
        said = ", ".join(f"{name} {errors[name]:.1e}" for name in bad)
        say(f"WRONG {compiled.implementation.name}: {said}")
        passes = {}
    row = {"errors": errors, "failed": failed, "wrong": bad, "passes": passes}
    if round_ms:
        finish = jax.block_until_ready
        row["launches"] = {what: launches_of(f, finish, round_ms) for what, f in passes.items()}
    return row


def time_passes(
    rows: Mapping[str, dict[str, Any]], flops: Mapping[str, float], rounds: int, inner: int = 1
) -> None:
    """Times the rows' passes in turns: adds "times" to each, and removes the passes."""
    for row in rows.values():
        row["times"] = {}
    for what, number in flops.items():
        functions = {n: row["passes"][what] for n, row in rows.items() if what in row["passes"]}
        for name, time in interleaved(functions, rounds=rounds, inner=inner).items():
            rows[name]["times"][what] = time.as_dict(number)
    for row in rows.values():
        del row["passes"]


def usable_deterministic(compiled: Compiled, reference: Reference) -> dict[str, Any]:
    """Its backward, compared with the reference and, bit by bit, with itself."""
    result: dict[str, Any] = {"errors": {}, "passes": {}, "failed": {}, "wrong": []}
    try:
        backward = compiled.backward()
        first, second = backward(), backward()
        result["errors"] = reference.errors(None, first)
        result["bit_identical"] = all(
            bool(jax.numpy.array_equal(x.view("uint16"), y.view("uint16")))
            for x, y in zip(first, second, strict=True)
        )
    except Exception as error:
        result["failed"]["bwd"] = first_line(error)
        return result
    result["wrong"] = wrong(result["errors"]) + ["bits"] * (not result["bit_identical"])
    if result["wrong"]:
        say(f"WRONG deterministic: {', '.join(result['wrong'])}")
    else:
        result["passes"]["bwd"] = backward
    return result
