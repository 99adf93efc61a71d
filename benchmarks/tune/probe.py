"""Finds the steps of a program that hang or crash, by running all steps in a child process.

A kernel that deadlocks or accesses invalid memory ends the whole process. Found in a child process,
it costs only seconds instead of the rest of the run.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable

BEGIN, END = "@begin ", "@end"


def say_begin(name: str) -> None:
    print(f"{BEGIN}{name}", flush=True)


def say_end() -> None:
    print(END, flush=True)


def fatal_steps(command: Callable[[list[str]], list[str]], seconds: float) -> dict[str, str]:
    """Maps each fatal step to what happened.

    `command(steps)` is the child's command, which skips these steps. The child prints BEGIN and the
    name before each step, and END after the last. A child that prints nothing for `seconds` is
    killed, and the next child skips the current step.
    """
    found: dict[str, str] = {}
    while True:
        child = subprocess.Popen(
            command(list(found)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(child, lines), daemon=True).start()
        step, ended, last, why = None, False, [], "ended the process"
        while True:
            try:
                line = lines.get(timeout=seconds)
            except queue.Empty:
                child.kill()
                why = f"was silent for {seconds:.0f} s"
                break
            if line is None:
                break
            last = [*last, line.rstrip()][-12:]
            if line.startswith(BEGIN):
                step = line.removeprefix(BEGIN).rstrip()
            ended = ended or line.startswith(END)
        child.wait()
        if ended:
            return found
        if step is None or step in found:
            raise RuntimeError(f"the child {why} before it began a step:\n" + "\n".join(last))
        found[step] = why
        print(f"{step} {why}: left out. It said last:", *last[-3:], sep="\n  ", file=sys.stderr)


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)
