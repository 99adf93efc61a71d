"""Times of asynchronous device work: wall time over several launches, interleaved, medians."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lib.turns import shuffled


@dataclasses.dataclass(frozen=True)
class Time:
    ms: float  # median over the rounds
    low: float
    high: float
    launches: int  # in a round

    def as_dict(self, flops: float | None = None) -> dict[str, float]:
        row: dict[str, float] = {
            "ms": round(self.ms, 4),
            "ms_low": round(self.low, 4),
            "ms_high": round(self.high, 4),
            "launches": self.launches,
        }
        if flops is not None:
            row["tflops"] = round(flops / self.ms / 1e9, 1)
        return row


def wall_ms(function: Callable[[], Any], launches: int) -> float:
    """Milliseconds per launch. The device works in order, so it waits only for the last result."""
    start = time.perf_counter()
    for _ in range(launches):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / launches * 1e3


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    round_ms: float = 120.0,
    inner: int | Mapping[str, int] = 1,
) -> dict[str, Time]:
    """Median times; the functions take turns in every round, so that all run at the same clocks.

    `inner`: passes per call, for all functions or by name; times are per pass.
    """
    launches: dict[str, int] = {}
    passes = {name: inner if isinstance(inner, int) else inner[name] for name in functions}
    for name, function in functions.items():
        jax.block_until_ready(function())
        wall_ms(function, 2)
        launches[name] = max(2, min(200, round(round_ms / wall_ms(function, 3))))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds):
        for name in shuffled(functions, turn):
            samples[name].append(wall_ms(functions[name], launches[name]) / passes[name])
    return {
        name: Time(statistics.median(times), min(times), max(times), launches[name] * passes[name])
        for name, times in samples.items()
    }
