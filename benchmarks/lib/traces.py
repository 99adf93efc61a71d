"""Which kernels overlapped: the kernels in a trace of jax.profiler, as text, by GPU."""

from __future__ import annotations

import gzip
import json
import pathlib

LEFT_OUT = "Memset"


Kernel = tuple[float, float, str, str]  # begin and length in microseconds, stream, name


def kernels(folder: pathlib.Path) -> dict[str, list[Kernel]]:
    """What ran, by GPU, in the only trace below `folder`."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if "pid" in event]
    gpus: dict[int, str] = {}
    streams: dict[tuple[int, int], str] = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            gpus[event["pid"]] = event["args"]["name"].rpartition("/")[2]
        if event.get("ph") == "M" and event["name"] == "thread_name":
            streams[event["pid"], event["tid"]] = event["args"]["name"].partition("(")[0]
    found: dict[str, list[Kernel]] = {}
    for event in events:
        gpu = gpus.get(event["pid"], "")
        stream = streams.get((event["pid"], event.get("tid", 0)), "")
        if event.get("ph") == "X" and "GPU" in gpu and "Stream" in stream:
            found.setdefault(gpu, []).append((event["ts"], event["dur"], stream, event["name"]))
    return found


def totals(folder: pathlib.Path) -> dict[str, tuple[int, float]]:
    """Launches and milliseconds of every kernel, all GPUs together."""
    sums: dict[str, tuple[int, float]] = {}
    for ran in kernels(folder).values():
        for _, length, _, name in ran:
            count, ms = sums.get(name, (0, 0.0))
            sums[name] = count + 1, ms + length / 1e3
    return sums


def listing(folder: pathlib.Path) -> str:
    """Begin and length in ms, stream and kernel, of the only trace below `folder`; begins count
    from each GPU's first kernel."""
    lines = []
    for gpu, ran in sorted(kernels(folder).items()):
        short = [(*rest, name.partition("(")[0]) for *rest, name in ran]
        shown = sorted(kernel for kernel in short if not kernel[3].startswith(LEFT_OUT))
        if not shown:
            continue
        lines.append(gpu)
        lines += [
            f"{(begin - shown[0][0]) / 1e3:8.3f} {length / 1e3:8.3f} {stream:<12} {name[:60]}"
            for begin, length, stream, name in shown
        ]
    return "\n".join(lines)
