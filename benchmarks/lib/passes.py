"""The passes of an implementation, each run once and compared with the reference before it is
timed."""

from __future__ import annotations

from typing import Any

import jax

from lib.implementations import Compiled, Implementation
from lib.output import first_line, say
from lib.reference import Reference, wrong


def usable(
    implementation: Implementation,
    compiled: Compiled,
    reference: Reference,
    skip: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Runs every pass once and compares: {"errors", "passes": callables, "failed", "wrong"}."""
    errors: dict[str, float] = {}
    failed: dict[str, str] = dict(skip or {})
    passes: dict[str, Any] = {}
    if "fwd" in failed:
        return {"errors": errors, "passes": passes, "failed": failed}
    try:
        forward = compiled.forward()
        errors |= reference.errors(forward(), None)
        passes["fwd"] = forward
    except Exception as error:  # the other implementations must still run
        failed["fwd"] = first_line(error)
        return {"errors": errors, "passes": passes, "failed": failed}
    try:
        if "bwd" not in failed:
            both = compiled.both()
            out, gradients = both()
            errors |= reference.errors(None, gradients)
            del out, gradients
            passes["fwd+bwd"] = both
            backward = compiled.backward()
            gradients = backward()
            alone = reference.errors(None, gradients)
            errors |= {name: max(errors[name], value) for name, value in alone.items()}
            passes["bwd"] = backward
    except Exception as error:
        failed["bwd"] = first_line(error)
    bad = wrong(errors)
    if bad:
        say(
            f"WRONG {implementation.name}: "
            + ", ".join(f"{name} {errors[name]:.1e}" for name in bad)
        )
        passes = {}
    return {"errors": errors, "passes": passes, "failed": failed, "wrong": bad}


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
