"""Twelve threads on four devices, in a C++ program under a sanitizer; `.ci/sanitize` builds it.

The interpreter's lock orders Python threads that call a handler, which hides races from
ThreadSanitizer, and AddressSanitizer cannot tell leaks of handlers from Python's.
"""

import os
import random
import struct
import subprocess

import pytest
from aot_modules import table
from cpp.call_frame import DTYPES
from cpp.calls import CALLS
from cpp.machine import layout, make_machine, needs_compiler, needs_extension
from cpp.made_up import random_call

PROGRAM = os.environ.get("PACKAX_REPLAY")
THREADS, DEVICES, MADE_UP, ROUNDS = 12, 4, 200, 3

pytest_plugins = ("cpp.fixtures",)
pytestmark = [
    needs_extension,
    needs_compiler,
    pytest.mark.skipif(PROGRAM is None, reason="PACKAX_REPLAY names no program"),
]


def lines_of(call):
    """The lines of a call in the format of replay.cc."""
    yield f"call {call.target}"
    for word, arrays in (("operand", call.operands), ("result", call.results)):
        for a in arrays.values():
            sizes = "".join(f" {n}" for n in a.shape)
            yield f"{word} {DTYPES[a.dtype]} {a.address} {len(a.shape)}{sizes}"
    for name, (dtype, value) in sorted(call.attributes.items()):
        if dtype == "string":
            yield f"attribute {name} 0 x{value.encode().hex()}"
        else:
            form = {"float32": "f", "int32": "i", "int64": "q"}[dtype]
            yield f"attribute {name} {DTYPES[dtype]} x{struct.pack(form, value).hex()}"


def test_threads_of_a_program(tmp_path, driver):
    machine = make_machine(tmp_path, driver, choose=lambda m: m.has("forward_sm90"))
    rng = random.Random(0)
    calls = [make(machine) for make in CALLS.values()]
    calls += [random_call(rng, machine) for _ in range(MADE_UP)]
    lines = [f"device {machine.variant['cc']}"] * DEVICES
    lines += [f"layout {kernel} {layout(kernel)}" for kernel in table.KERNELS]
    lines += [line for call in calls for line in lines_of(call)]
    (tmp_path / "calls.txt").write_text("\n".join(lines) + "\n")
    # The sanitizer that is preloaded into Python is linked into the program.
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    env["ASAN_OPTIONS"] = "detect_leaks=1"
    command = [PROGRAM, driver, tmp_path / "calls.txt", str(THREADS), str(ROUNDS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.split()
    assert said[:2] == [str(len(calls)), "calls,"]
    assert int(said[2]) >= len(CALLS) + MADE_UP // 25, done.stdout
