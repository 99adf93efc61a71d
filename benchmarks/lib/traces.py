"""Reads the kernels in a trace of jax.profiler."""

from __future__ import annotations

import gzip
import json
import pathlib


def totals(folder: pathlib.Path) -> dict[str, tuple[int, float]]:
    """The launches and total milliseconds of each kernel on all GPUs, in the only trace below
    `folder`."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if "pid" in event]
    named = [event for event in events if event.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    sums: dict[str, tuple[int, float]] = {}
    for event in events:
        process = processes.get(event["pid"], "")
        thread = threads.get((event["pid"], event.get("tid")), "")
        if event.get("ph") == "X" and "GPU" in process and "Stream" in thread:
            count, ms = sums.get(event["name"], (0, 0.0))
            sums[event["name"]] = count + 1, ms + event["dur"] / 1e3
    return sums
