"""Reads clock, power and energy of the GPU through NVML (the package nvidia-ml-py).

On a GPU that is limited by power, of two kernels with the same number of cycles, the one that uses
more energy takes more time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

SAMPLE_S = 0.01
FIELDS = ("watts", "mhz", "held_by_power", "held_by_heat")


class Meter:
    """Reads the first GPU while a function runs."""

    def __init__(self, nvml: Any = None) -> None:
        if nvml is None:
            import pynvml as nvml
        self.nvml = nvml
        nvml.nvmlInit()
        self.device = nvml.nvmlDeviceGetHandleByIndex(0)

    def _sample(self) -> tuple[int, int]:
        clock = self.nvml.nvmlDeviceGetClockInfo(self.device, self.nvml.NVML_CLOCK_SM)
        return clock, self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.device)

    def during(self, function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        """Calls the function. Returns its result and a reading: watts (energy of the whole card
        over time), MHz (median), and the fractions of samples with a clock limited by power and by
        heat. The function must run much longer than a sample, or the first samples dominate."""
        samples: list[tuple[int, int]] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                samples.append(self._sample())
                done.wait(SAMPLE_S)

        watcher = threading.Thread(target=watch, daemon=True)
        start = time.perf_counter()
        before = self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device)  # mJ
        watcher.start()
        try:
            result = function()
            used = self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device) - before
            took = time.perf_counter() - start
        finally:
            done.set()
            watcher.join()
        reasons = [reason for _, reason in samples]
        power = self.nvml.nvmlClocksThrottleReasonSwPowerCap
        heat = (
            self.nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | self.nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        )
        return result, {
            "watts": round(used / took / 1e3, 1),
            "mhz": statistics.median(clock for clock, _ in samples),
            "held_by_power": round(sum(bool(r & power) for r in reasons) / len(reasons), 3),
            "held_by_heat": round(sum(bool(r & heat) for r in reasons) / len(reasons), 3),
        }


def metered(
    meter: Meter, function: Callable[[], float], read: list[dict[str, float]]
) -> Callable[[], float]:
    """The function, such that each call appends a reading to `read`."""

    def call() -> float:
        took, found = meter.during(function)
        read.append(found)
        return took

    return call


def medians(readings: list[dict[str, float]], ms: float) -> dict[str, float]:
    """The medians of the rounds, and the joules and millions of cycles of a pass of `ms`."""
    found = {name: statistics.median(r[name] for r in readings) for name in FIELDS}
    return found | {
        "joules": round(found["watts"] * ms / 1e3, 3),
        "mcycles": round(found["mhz"] * ms / 1e3, 2),
    }


def line(who: str, what: str, found: dict[str, float]) -> str:
    read = f"{found['watts']:>8.0f} W{found['mhz']:>8.0f} MHz"
    a_pass = f"{found['joules']:>9.3f} J a pass{found['mcycles']:>9.2f} million cycles"
    held = f"held by power {found['held_by_power']:.0%}, by heat {found['held_by_heat']:.0%}"
    return f"{who:<8}{what:<5}{read}{a_pass}; {held}"
