"""What every row of the table has: its `Property`, the reasons and the checks that rows share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
from calls import Arrays, Call

STEP = 1e-5  # of difference quotients
Reason = Callable[[Call], str | None]


@dataclasses.dataclass(frozen=True)
class Property:
    name: str
    check: Callable[[Call], list[str]]
    reason: Reason
    multiple: int  # of the lengths
    calls: str  # rows with the same word here get the same calls
    group: str  # rows with the same word here share calls each time: cover.py
    ranks: bool  # whether the feature "ranks" of a call has a meaning


PROPERTIES: dict[str, Property] = {}


def decodes(call: Any) -> str | None:
    one = call.function in ("decode", "ragged")
    return "decoding has no gradients and no plans" if one else None


def ragged(call: Any) -> str | None:
    return "the sizes of a packed step are static" if call.function == "ragged" else None


def jax_nn(call: Any) -> str | None:
    return "jax.nn has no such argument" if call.function == "jax.nn" else None


def row(
    name: str, reason: Reason = lambda call: None, multiple: int = 1, calls: str | None = None,
    group: str = "", ranks: bool = False,
) -> Any:  # fmt: skip
    """Adds a property to the table."""

    def add(check: Callable[[Call], list[str]]) -> Callable[[Call], list[str]]:
        row = Property(name, check, reason, multiple, calls or name, group or name, ranks)
        PROPERTIES[name] = row
        return check

    return add


def differences(
    call: Call, got: Any, a: Arrays, where: str = "", references: Any = None
) -> list[str]:
    """`references`: those of the call, if they are known."""
    more = {} if references is None else {"references": references}
    return [f"{where}{line}" for line in call.wrong(got, a, **more)]


def as_array(call: Call, given: Any, a: Arrays) -> list[str]:
    """The dense array of the expression is its definition."""
    pairs = dense.four_axes(given(a["query"].shape[1], a["key"].shape[1]))
    same = np.array_equal(*np.broadcast_arrays(pairs, call.defined(a)))
    return [] if same else ["as_array is another mask"]


def mapped(call: Call) -> tuple[list[Arrays], Arrays]:
    """Operands of two calls, and both stacked."""
    both = [call.arrays(seed) for seed in (1, 2)]
    return both, {name: np.stack([a[name] for a in both]) for name in both[0]}


def of_each(call: Call, got: Any, both: list[Arrays]) -> list[str]:
    parts = [{name: x[n] for name, x in got.items()} for n in range(len(both))]
    return [line for n, a in enumerate(both) for line in differences(call, parts[n], a, f"{n}: ")]


def reference(call: Call, a: Arrays) -> Any:
    a = a | {name: np.asarray(a[name], np.float64) for name in (*call.differentiable(), "dout")}
    return dense.true_of(call.operands(a), call.allowed(a), **call.options(a))


def direction(call: Call, a: Arrays) -> Arrays:
    rng = np.random.default_rng(3)
    return {n: rng.standard_normal(np.shape(a[n])).astype("float32") for n in call.differentiable()}


def directional(call: Call, a: Arrays, attend: Any, along: Arrays) -> Any:
    """The jvp of the results and that of the gradients, each as one number: the product of the
    cotangents with the first is that of the gradients with the direction."""
    along = {n: jnp.where(jnp.isfinite(a[n]), x, 0) for n, x in along.items()}
    operands = {name: a[name] for name in along}

    def function(x):
        out, *others = attend(a | x)
        return out, [jnp.where(jnp.isfinite(lse), lse, 0) for lse in others[:1]]

    def gradients(x):
        found = call.step(a | x, attend)
        return {name: found["d" + name] for name in along}

    out, lse = jax.jvp(function, (operands,), (along,))[1]
    second = jax.jvp(gradients, (operands,), (along,))[1]
    first = (out * a["dout"]).sum() + sum((x * a["dlse"]).sum() for x in lse)
    return first, sum((second[n] * along[n]).sum() for n in along)


def of_direction(call: Call, a: Arrays, found: Any) -> list[str]:
    """What is wrong with the numbers of `directional`, in float32."""
    along = {n: np.where(np.isfinite(a[n]), x, 0) for n, x in direction(call, a).items()}
    moved = (
        {n: np.asarray(a[n], np.float64) + s * along[n] for n in along} for s in (0, STEP, -STEP)
    )
    near = [reference(call, a | x) for x in moved]
    sums = [sum((x["d" + n] * along[n]).sum() for n in along) for x in near]
    wanted = sums[0], (sums[1] - sums[2]) / (2 * STEP)
    wrong = []
    for order, x, y in zip(("first", "second"), found, wanted, strict=True):
        if not abs(float(x) - y) <= 1e-3 * max(abs(y), 5):
            wrong.append(f"{order} derivative {float(x):.5g}, not {y:.5g}")
    return wrong
