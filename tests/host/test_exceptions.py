"""No C++ exception escapes a target: XLA's FFI is a C interface.

Compiles csrc/ffi/stages.h with jaxlib's headers: needs a C++ compiler, but no build of packax.
"""

import subprocess

import jax.ffi
import pytest
from emitted import COMPILER, emit, write
from paths import ROOT

RESOURCE_EXHAUSTED, INTERNAL, INVALID_ARGUMENT = 8, 13, 3


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_exceptions_become_errors(tmp_path):
    write(tmp_path / "in", "sideways_bf16_64_sm90a")
    emit.emit(tmp_path / "in", tmp_path / "out")
    program = tmp_path / "exceptions"
    includes = (f"-I{x}" for x in (ROOT / "csrc", tmp_path / "out", jax.ffi.include_dir()))
    source = ROOT / "tests/support/cpp/exceptions.cc"
    # Its calls of the driver are unreachable, and are not linked.
    flags = ["-std=c++20", "-O1", "-ffunction-sections", "-Wl,--gc-sections"]
    subprocess.run([COMPILER, *flags, *includes, source, "-o", program], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    said = [
        f"{RESOURCE_EXHAUSTED} no host memory",
        *[f"{INTERNAL} C++ exception"] * 2,
        f"{INVALID_ARGUMENT} packax_decode_v1: it is said",
    ]
    assert lines.splitlines() == [line for line in said for _ in range(2)]
