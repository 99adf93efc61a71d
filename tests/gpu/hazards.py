"""Runs sanitize.py under a tool of compute-sanitizer and counts the reports by kernel:

    python tests/gpu/hazards.py memcheck|racecheck|synccheck
        [options of compute-sanitizer ...] [-- program ...]

XLA compiles slowly under the tool, so the program first runs once without it, into a compilation
cache for the run that counts. A program after -- replaces sanitize.py, as in
-- tests/gpu/sanitize.py --dims 128x128. To run only the kernels, in a fraction of the time:

    python tests/gpu/hazards.py racecheck --kernel-name kernel_substring=sm90
        -- benchmarks/tune/tune.py check FOLDER

The tool's whole output goes to $OUT/TOOL.txt. This program prints the results, a count by kernel,
and the first reports of each. The counts include kernels that are not packax's. Exit status 1: a
report, a wrong result, or no closing line of the tool.

racecheck watches shared memory. Its support of mbarriers and TMA differs by release (the release
notes list false reports and misses), so a report about a kernel with TMA may be false, and silence
proves nothing; the version is printed for this reason. It reports the arguments that Triton passes
to the warps of a partition (docs/experiments.md), so its exit status is 1 for the current kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

TOOLS = {
    "memcheck": ["--print-limit", "1000"],
    # Barriers in a block: the tool's guess can be too small, which breaks the context.
    "racecheck": ["--racecheck-report", "analysis", "--print-limit", "1000", "--num-cuda-barriers",
        "64"],
    "synccheck": ["--print-limit", "1000", "--num-cuda-barriers", "64"],
}  # fmt: skip
SLOW = ("racecheck", "synccheck")
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": "{folder}",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
SHOWN = 3  # reports per kernel
LINES = 8  # lines per report
PREFIX = "========= "
CLOSING = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
# CUDA 12 and 13: "... access at void name<int>(float*)+0x1a0 in file.py:3"; before: "... at 0x1a0
# in file.cu:3:name(float*)".
KERNEL = re.compile(
    r"(?:\b(?:at|in) |[\s:])(?:void )?([A-Za-z_]\w*(?:::\w+)*)[^\s+]*(?:\([^)]*\))?\+0x[0-9a-f]+"
)
OLD_KERNEL = re.compile(r"\bat 0x[0-9a-f]+ in (?:\S+:\d+:)?([A-Za-z_]\w*)")
HAZARDS = re.compile(r"\[(\d+) hazards?\]")


def reports(text: str) -> list[list[str]]:
    """The tool's reports. A report begins at a line of the tool that is not indented and ends at an
    empty one."""
    found: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith(PREFIX.rstrip()):
            continue  # a line of the program
        body = line[len(PREFIX) :]
        if not body.strip():
            inside = False
        elif not body.startswith(" "):
            skipped = body.startswith("COMPUTE-SANITIZER") or CLOSING.search(body)
            inside = not skipped
            if inside:
                found.append([body])
        elif inside:
            found[-1].append(body)
    return found


def kernel_of(report: list[str]) -> str:
    for line in report:
        if match := KERNEL.search(line) or OLD_KERNEL.search(line):
            return match[1]
    return "(no kernel named)"


def weight(report: list[str]) -> int:
    """The number of hazards in a report, or 1 if it states none."""
    return sum(int(n) for line in report for n in HAZARDS.findall(line)) or 1


def summary(text: str) -> tuple[str, bool]:
    """(text to print, whether the tool finished without reports)."""
    found = reports(text)
    by_kernel: dict[str, list[list[str]]] = defaultdict(list)
    for report in found:
        by_kernel[kernel_of(report)].append(report)
    lines = []
    for kernel, some in sorted(by_kernel.items(), key=lambda item: -sum(map(weight, item[1]))):
        kinds: dict[str, int] = defaultdict(int)
        for report in some:
            kinds[re.split(r" at | between | \(|0x", report[0])[0].strip()] += weight(report)
        counts = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
        lines.append(f"{kernel}: {len(some)} reports: {counts}")
        for report in some[:SHOWN]:
            lines += [f"    {line}" for line in report[:LINES]]
            lines += [f"      ({len(report) - LINES} more lines)"] * (len(report) > LINES)
    closing = [line for line in text.splitlines() if CLOSING.search(line)]
    lines += closing or ["the tool's closing line is missing: it did not end"]
    clean = bool(closing) and not found
    clean &= all(int(n) == 0 for line in closing for n in CLOSING.findall(line))
    return "\n".join(lines), clean


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in TOOLS:
        raise SystemExit(f"{__doc__}\nthe tool is one of {', '.join(TOOLS)}")
    tool, *options = sys.argv[1:]
    script = [str(Path(__file__).parent / "sanitize.py"), *(["--small"] if tool in SLOW else [])]
    if "--" in options:
        at = options.index("--")
        options, script = options[:at], options[at + 1 :]
    script = [sys.executable, *script]
    sanitizer = os.environ.get("COMPUTE_SANITIZER", "compute-sanitizer")
    cache = {} if os.environ.get("JAX_COMPILATION_CACHE_DIR") else CACHE
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {name: value.format(folder=folder) for name, value in cache.items()}
        print(f"without the tool: {' '.join(script)}", flush=True)
        began = time.perf_counter()
        plain = subprocess.run(script, stdout=subprocess.DEVNULL).returncode
        print(f"exit status {plain}, {time.perf_counter() - began:.0f} s", flush=True)
        return max(plain != 0, watched(tool, sanitizer, options, script))


def watched(tool: str, sanitizer: str, options: list[str], script: list[str]) -> int:
    """Runs the program under the tool. Returns 0 if it finished without reports."""
    command = [sanitizer, "--tool", tool, *TOOLS[tool], *options, *script]
    log = Path(os.environ.get("OUT", ".")) / f"{tool}.txt"
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True)
    print(version.stdout.strip().splitlines()[-1] if version.stdout.strip() else "version unknown")
    print(" ".join(command), flush=True)
    lines = []
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            file.write(line)
            file.flush()
            if not line.startswith(PREFIX.rstrip()):
                print(line, end="", flush=True)
    text, clean = summary("".join(lines))
    print(f"--- {tool}\n{text}\n--- whole output: {log}")
    if process.returncode:
        print(f"exit status {process.returncode}")
    return 0 if clean and process.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
