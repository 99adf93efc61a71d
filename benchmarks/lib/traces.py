"""What ran beside what: the kernels in a trace of jax.profiler, as text, by GPU."""

from __future__ import annotations

import gzip
import json
import pathlib

LEFT_OUT = "Memset"


def listing(folder: pathlib.Path) -> str:
    """Begin and length in ms, stream and kernel, of the only trace below `folder`; begins count
    from each GPU's first kernel."""
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
    kernels: dict[str, list[tuple[float, float, str, str]]] = {}
    for event in events:
        gpu = gpus.get(event["pid"], "")
        stream = streams.get((event["pid"], event.get("tid", 0)), "")
        if event.get("ph") == "X" and "GPU" in gpu and "Stream" in stream:
            name = event["name"].partition("(")[0]
            if not name.startswith(LEFT_OUT):
                kernels.setdefault(gpu, []).append((event["ts"], event["dur"], stream, name))
    lines = []
    for gpu, ran in sorted(kernels.items()):
        first = min(ran)[0]
        lines.append(gpu)
        lines += [
            f"{(begin - first) / 1e3:8.3f} {length / 1e3:8.3f} {stream:<12} {name[:60]}"
            for begin, length, stream, name in sorted(ran)
        ]
    return "\n".join(lines)
