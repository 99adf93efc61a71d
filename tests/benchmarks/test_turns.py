"""The worker processes of attention.py: one works at a time, wrong results are not timed, and dead
workers are reported."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from paths import BENCHMARKS, COMPARE, importing

WORKER = """
import sys, time
sys.path.insert(0, "BENCHMARKS")
from lib.turns import serve

NAME, LOG = sys.argv[1:]

def log(text):
    with open(LOG, "a") as file:
        file.write(f"{NAME} {text}\\n")

def answer(request):
    print("a library's chatter is no reply")
    log("begins")
    time.sleep(0.002)
    log("ends")
    do = request["do"]
    if do == "prepare" and NAME != "torch":
        ready = {"errors": {"out": 1e-3}, "failed": {}, "wrong": [],
            "launches": {"fwd": 5, "bwd": 2}}
        cudnn = ready | {"failed": {"bwd": "out of memory"}, "launches": {"fwd": 4}}
        return {"implementations": {"packax": ready, "cudnn": cudnn}, "compared": {"rows": [1]}}
    if do == "prepare":
        if request["case"]["name"] == "causal_16k_d256":
            raise AssertionError("no such head dim")
        return {"failed": {}, "launches": {"fwd": 3, "bwd": 3}}
    if do == "judge":
        return {"errors": {"out": 2e-3, "dq": 1e-3}, "wrong": []}
    if do == "time":
        ms = {"packax": 1.0 + (NAME == "before"), "cudnn": 1.5, "fa4": 1.1}[request["name"]]
        return ms + request["launches"] / 1000
    if do == "die":
        sys.exit(7)

serve(answer)
"""

DRIVER = """
import os, sys
import attention
from lib.cases import select
from lib.turns import Failed, Worker, table

script, log = sys.argv[1:]
workers = {name: Worker(name, [sys.executable, script, name, log], dict(os.environ))
    for name in ("jax", "torch", "before")}
cases = select("causal_16k_d128,causal_16k_d256")
before = workers.pop("before")
rows = {c.name: attention.run_case(c, workers, 3, 1.0) for c in cases}
print(table(rows, attention.ORDER))


class Meter:  # as power.Meter
    def during(self, function):
        found = {"watts": 690.0, "mhz": 1500, "held_by_power": 0.5, "held_by_heat": 0.0}
        return function(), found


row = attention.run_case(cases[0], workers, 3, 1.0, meter=Meter())
joules = round(690 * row["packax"]["times"]["fwd"]["ms"] / 1e3, 3)
assert row["packax"]["power"]["fwd"]["joules"] == joules
print("metered:", table({"metered": row}, attention.ORDER))
try:
    workers.pop("torch").ask(do="die")
except Failed as error:
    print(error)
both = {"jax": workers["jax"], "before": before}  # another packax, and no torch
rows = {"wheels": attention.run_case(cases[0], both, 3, 1.0)}
print("wheels:", table(rows, attention.ORDER))
for worker in both.values():
    worker.end()
"""


def test_workers_take_turns(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER.replace("BENCHMARKS", str(BENCHMARKS)))
    log = tmp_path / "log"
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "worker.py"), str(log)],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        env=importing(COMPARE),
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    events = log.read_text().splitlines()
    for begins, ends in zip(events[::2], events[1::2], strict=True):
        assert begins.split()[1] == "begins" and ends == begins.replace("begins", "ends")
    names = [event.split()[0] for event in events[::2]]
    assert names.count("torch") >= 3 + 3 and names.count("jax") >= 2 * 3 * 2

    lines = [line.split() for line in result.stdout.splitlines()]
    (row,) = (line for line in lines if line[:2] == ["causal_16k_d128", "fwd"])
    assert row[2] == "1.0050" and row[4] == "1.5040" and row[6] == "1.1030"
    assert row[8:] == ["1.497", "1.098", "1.0e-03", "1.0e-03", "2.0e-03"]
    (row,) = (line for line in lines if line[:2] == ["causal_16k_d128", "bwd"])
    assert row[4] == "-" and row[9] == "1.101"
    assert "causal_16k_d128 cudnn bwd did not run: out of memory" in result.stdout
    assert "causal_16k_d256 fa4 fwd did not run: AssertionError: no such head dim" in result.stdout
    metered, _, wheels = result.stdout.partition("metered:")[2].partition("wheels:")
    (row,) = (x.split() for x in wheels.splitlines() if x.split()[:2] == ["wheels", "fwd"])
    assert row[2:6:2] == ["1.0050", "2.0050"] and row[8] == "1.995"
    assert metered.count("690 W") == 5 and "690 W" not in result.stdout.partition("metered:")[0]
    assert "torch ended with status 7" in result.stdout


def test_failed_and_wrong_runs_are_reported(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    turns = importlib.import_module("lib.turns")
    row = {"failed": {"fwd": "no room"}, "wrong": ["dq", "dk"]}
    said = ["a packax fwd did not run: no room", "a packax WRONG: dq, dk"]
    assert turns.troubles("a packax", row) == said
    assert turns.troubles("a packax", {"failed": None, "wrong": []}) == []


def test_every_round_has_a_different_order():
    """The orders are the same in every run, and no name always follows the same other name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        turns = importlib.import_module("lib.turns")
    finally:
        sys.path.remove(str(BENCHMARKS))
    names = [f"scheme {n}" for n in range(10)]
    orders = [turns.shuffled(names, turn) for turn in range(5)]
    assert orders == [turns.shuffled(reversed(names), turn) for turn in range(5)]
    assert all(sorted(order) == sorted(names) for order in orders)
    for name in names:
        before = {order[order.index(name) - 1] for order in orders if order.index(name) > 0}
        assert len(before) > 1, name
    ran = []
    bursts = {name: lambda name=name: ran.append(name) or 1.0 for name in names}
    assert turns.in_turns(bursts, 2) == {name: [1.0, 1.0] for name in names}
    assert ran == orders[0] + orders[1]


@pytest.mark.exhaustive
def test_a_folder_without_packax(tmp_path):
    result = subprocess.run(
        [sys.executable, "attention.py", "--before", tmp_path, "--out", tmp_path],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=120,
    )
    said = f"--before: no packax/__init__.py in {tmp_path}"
    assert result.returncode == 1 and said in result.stderr
