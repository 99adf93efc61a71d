"""Biases that hide keys or rows as additive masks do (-inf, the lowest finite number, -1e9, ...),
and how results with them differ from the reference.

A row with only -inf attends to nothing. A row with only one finite value is the softmax of the
scores. The cotangents of rows that attend to nothing are NaN here, since they must be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dense
import jax.numpy as jnp
import numpy as np
from calls import Arrays, Call

HIDDEN = [  # the mask and bias, and the factor on queries; 0: the softmax of equal logits
    ("bias=keys,batch=1", 1),
    ("interval=causal,selector=packed,bias=shared,batch=1", 0),
    ("interval=causal,selector=packed,bias=rows,batch=1", 1),
]
KINDS = ("left 40", "left 64", "left 100", "left 200", "keys", "rows", "both")


def values_of(dtype: Any) -> dict[str, float]:
    """Hiding values by name. Only "-inf" is infinite: the others are clipped to the dtype."""
    least, most = (float(x) for x in (jnp.finfo(dtype).min, jnp.finfo(dtype).max))
    finite = {"least": least, "0.7 least": 0.7 * least, "-1e9": -1e9, "-1e4": -1e4, "most": most}
    return {"-inf": -np.inf} | {name: max(x, least) for name, x in finite.items()}


def hiding(kind: str, value: float, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A bias of shape (B or 1, H or 1, Sq or 1, Skv) with `value` at the keys or rows of `kind`."""
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal(shape)
    if kind.startswith("left"):
        bias[..., : int(kind.split()[1])] = value
    if kind in ("keys", "both"):
        bias[..., rng.random(shape[-1]) < 0.4] = value
    if kind in ("rows", "both"):
        bias[:, :, rng.random(shape[2]) < 0.4] = value
    return bias


def biases(like: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for kind in KINDS:
        if kind in ("rows", "both") and like.shape[2] == 1:
            continue
        for name, value in values_of(like.dtype).items():
            yield f"{kind} {name}", hiding(kind, value, like.shape).astype(like.dtype)


def wrong(call: Call, run: Callable[[Arrays], Any], a: Arrays) -> list[str]:
    """How the results of a call with such a bias differ from the reference."""
    true, plain = references(call, a)
    return close(run(without_cotangents(a, true)), true, plain, call.factor)


def references(call: Call, a: Arrays) -> Any:
    """Beyond the limits of the tensors' dtype, plain attention would add infinity."""
    true, plain = call.references(a)
    limits = jnp.finfo(a["query"].dtype)
    clipped = np.clip(a["bias"], float(limits.min), float(limits.max))
    bias = np.where(np.isfinite(a["bias"]), clipped, a["bias"])
    same = np.array_equal(bias, a["bias"])
    return true, plain if same else call.references(a | {"bias": bias})[1]


def without_cotangents(a: Arrays, true: Arrays) -> Arrays:
    """NaN for rows that attend to nothing."""
    idle = np.isneginf(true["lse"])
    dout = np.where(idle.swapaxes(1, 2)[..., None], np.nan, a["dout"]).astype(a["dout"].dtype)
    return a | {"dout": dout, "dlse": np.where(idle, np.nan, a["dlse"])}


def close(found: Arrays, true: Arrays, plain: Arrays, factor: float) -> list[str]:
    """`dense.close`, but the log-sum-exp may be so large that this would accept anything: each has
    its own bound, twice the error of plain attention and float32 rounding."""
    got = {name: np.asarray(x) for name, x in found.items() if name != "top"}
    lse = got.pop("lse").astype(float)
    idle = np.isneginf(true["lse"])
    if not np.array_equal(np.isneginf(lse), idle):
        return ["which rows are empty"]
    failures = [
        f"{name} of empty rows"
        for name in ("out", "dquery")
        if np.where(idle.swapaxes(1, 2)[..., None], got.get(name, 0), 0).any()
    ]
    lse, want, near = (x[~idle].astype(float) for x in (lse, true["lse"], plain["lse"]))
    allowed = 2 * np.abs(near - want) + 2.0**-22 * np.maximum(np.abs(want), 16)
    failures += ["lse"] if (np.abs(lse - want) > allowed).any() else []
    others = {name: x for name, x in true.items() if name not in ("lse", "top")}
    return failures + dense.close(got, others, plain, factor)
