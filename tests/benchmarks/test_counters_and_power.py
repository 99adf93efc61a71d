"""The benchmarks' readings of the hardware (counters, traces, power, clock), through stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmark_scripts import script
from paths import BENCHMARKS


def test_power_and_clock_of_a_burst():
    """With a stand-in for NVML: 700 W, and a clock that drops in the half of the samples that the
    power cap limits."""
    script("""
import itertools, time
from lib.power import Meter, line, medians

class Library:
    NVML_CLOCK_SM = 1
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    clocks = itertools.cycle([1900, 1500])
    reasons = itertools.cycle([0, 4 | 1])
    start = time.perf_counter()
    nvmlInit = lambda self: None
    nvmlDeviceGetHandleByIndex = lambda self, i: ("device", i)

    def nvmlDeviceGetClockInfo(self, device, kind):
        assert device == ("device", 0) and kind == 1
        return next(self.clocks)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return next(self.reasons)

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        return (time.perf_counter() - self.start) * 700e3

result, found = Meter(Library()).during(lambda: (time.sleep(0.3), 7)[1])
assert result == 7 and abs(found["watts"] - 700) < 35, found
assert found["mhz"] in (1500, 1700, 1900) and 0.4 < found["held_by_power"] < 0.6
assert found["held_by_heat"] == 0
whole = medians([found, found, found | {"watts": 1.0}], 10.0)
assert whole["watts"] == found["watts"] and abs(whole["joules"] - 7) < 0.4
assert abs(whole["mcycles"] - found["mhz"] / 100) < 0.01
assert "held by power" in line("packax", "bwd", whole)

def fails():
    raise ValueError("of the burst")

try:
    Meter(Library()).during(fails)
except ValueError as error:
    assert str(error) == "of the burst"
else:
    raise AssertionError
""")


def test_counters_of_kernels(tmp_path):
    """counters.py with a stand-in for ncu: the last launches, numbers with thousands separators,
    the order of stalls, and failures."""
    tool = tmp_path / "ncu"
    tool.write_text(
        """#!/bin/bash
echo "==PROF== Connected to process 1"
cat <<'CSV'
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","backward_sm90(int, TensorMap)","SpeedOfLight","Elapsed Cycles","cycle","9,999"
"0","backward_sm90(int, TensorMap)","SpeedOfLight","SM Busy","%","11.00"
"1","backward_sm90(int, TensorMap)","SpeedOfLight","Elapsed Cycles","cycle","17,123,456"
"1","backward_sm90(int, TensorMap)","LaunchStats","Cache Configuration","","CachePreferNone"
"1","backward_sm90(int, TensorMap)","WarpStateStats","Stall Barrier","inst","1.50"
"1","backward_sm90(int, TensorMap)","WarpStateStats","Stall GMMA","inst","2.50"
CSV
echo "$@" >&2
[ "${!#}" != causal_1k_d64 ]
"""
    )
    tool.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    program = [
        sys.executable,
        BENCHMARKS / "tune" / "counters.py",
        "--who",
        "packax",
        "--out",
        tmp_path,
    ]

    def counted(case):
        return subprocess.run(
            [*program, "--cases", case], env=environment, capture_output=True, text=True
        )

    done = counted("causal_16k_d128")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines == [
        ["==", "packax,", "causal_16k_d128"],
        ["backward_sm90"],
        ["Elapsed", "Cycles", "17,123,456.00", "cycle"],
        ["Stall", "GMMA", "2.50", "inst"],
        ["Stall", "Barrier", "1.50", "inst"],
    ]
    assert "9,999" in (tmp_path / "counters_packax_causal_16k_d128.csv").read_text()
    done = counted("causal_1k_d64")
    assert done.returncode == 1
    assert "FAILED (1)" in done.stdout and "--run packax causal_1k_d64" in done.stdout


def test_kernels_of_a_trace():
    """traces.py counts the kernels of all GPUs, and no host events."""
    script(
        """
import gzip, json, pathlib, tempfile
from lib.traces import totals
name = lambda pid, kind, name, tid=0: {"ph": "M", "pid": pid, "tid": tid, "name": kind,
    "args": {"name": name}}
ran = lambda pid, tid, ts, dur, name: {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur,
    "name": name}
events = [
    name(1, "process_name", "/device:GPU:1"), name(2, "process_name", "/host:CPU"),
    name(1, "thread_name", "Stream #7(Compute)", 3), name(1, "thread_name", "XLA Ops", 4),
    name(2, "thread_name", "Stream #1", 5),
    ran(1, 3, 3500.0, 250.0, "nccl(args<4>)"), ran(1, 3, 2000.0, 1000.0, "forward_sm90"),
    ran(1, 3, 1000.0, 500.0, "forward_sm90"),
    ran(1, 4, 1.0, 1.0, "an op"), ran(2, 5, 1.0, 1.0, "host"), {"name": "no process"},
]
with tempfile.TemporaryDirectory() as folder:
    below = pathlib.Path(folder, "plugins")
    below.mkdir()
    with gzip.open(below / "vm.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = totals(pathlib.Path(folder))
assert found == {"nccl(args<4>)": (1, 0.25), "forward_sm90": (2, 1.5)}, found
"""
    )


@pytest.mark.exhaustive
def test_power_limit_says_what_each_burst_took():
    """With a meter that reads constants: times are measured, energy is power times time."""
    script("""
import time
import jax.numpy as jnp
from power_limit import measure, product, table

class Constant:
    def during(self, function):
        return function(), {"watts": 500.0, "mhz": 1000.0, "held_by_power": 1.0,
            "held_by_heat": 0.0}

def slow():
    time.sleep(0.02)
    return jnp.zeros(())

rows = measure({"slow, random": (slow, 1e9), "quick, zeros": (lambda: jnp.zeros(()), 1e6)}, 3, 50.0,
    Constant())
row = rows["slow, random"]
assert 20 <= row["ms"] < 40 and abs(row["tflops"] - 1 / row["ms"]) < 0.1, row
assert abs(row["joules"] - row["ms"] / 2) < 1e-2 and abs(row["mcycles"] - row["ms"]) < 0.02
assert rows["quick, zeros"]["ms"] < row["ms"]
assert [text.split("  ")[0] for text in table(rows).splitlines()] == list(rows)
assert product(64, True)().any() == False and product(64, False)().any()
""")
