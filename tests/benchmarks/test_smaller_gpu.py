"""compare/smaller_gpu.c, which makes FlashAttention-2 use the tiles of a smaller GPU on Hopper,
tested with a stand-in for the CUDA runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from aot_modules import table
from benchmark_scripts import script
from paths import BENCHMARKS

SHIM = BENCHMARKS / "compare" / "smaller_gpu.c"
RUNTIME = """
#include <stddef.h>
typedef struct { unsigned x, y, z; } Dim3;
int asked = 0;
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  *value = 1000 + attribute;
  return device;
}
int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  asked = value;
  return function == NULL ? attribute : 0;
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t bytes, void* stream) {
  return bytes;
}
"""
CALLS = """
import ctypes, sys

runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
program = ctypes.CDLL(None)  # as torch finds them: the first library of the process that has them
value = ctypes.c_int()


class Dim3(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def attribute(n):
    assert program.cudaDeviceGetAttribute(ctypes.byref(value), n, 0) == 0
    return value.value


print(*(attribute(n) for n in (75, 76, 97, 81, 16)))
for used in map(int, sys.argv[2:]):
    program.cudaFuncSetAttribute(None, 8, used)
    dynamic = ctypes.c_int.in_dll(runtime, "asked").value
    program.__getattr__("__cudaPushCallConfiguration").argtypes = [
        Dim3, Dim3, ctypes.c_size_t, ctypes.c_void_p
    ]
    print(dynamic, program.__getattr__("__cudaPushCallConfiguration")(Dim3(), Dim3(), used, None))
program.cudaFuncSetAttribute(None, 9, 70000)
print(ctypes.c_int.in_dll(runtime, "asked").value)
"""


pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def library(source, path):
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, source, "-ldl"], check=True
    )
    return path


@pytest.mark.parametrize("capability,proxy", [("8.0", "80@90"), ("8.6", "86@90")])
def test_attributes_and_launches(capability, proxy, tmp_path):
    """The attributes are the other GPU's, and launches request as much shared memory as packax's.
    Other attributes, other requests and kernels of at most 48 KiB are left unchanged."""
    (tmp_path / "runtime.c").write_text(RUNTIME)
    fake = library(tmp_path / "runtime.c", tmp_path / "libcudart.so.13")
    shim = library(SHIM, tmp_path / "smaller_gpu.so")
    arch = table.find_arch(proxy)
    numbers = f"{capability.replace('.', ' ')} {arch.shared} {arch.multiprocessor}"
    sizes = [1024, 49152, 65536, 81920, 98304]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, fake, *map(str, sizes)],
        env=os.environ | {"LD_PRELOAD": str(shim), "SMALLER_GPU": numbers},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *requests, last = done.stdout.splitlines()
    assert first == f"{numbers} 1016"
    expected = [used if used <= 49152 else arch.asked(used) for used in sizes]
    assert [line.split() for line in requests] == [[str(n)] * 2 for n in expected]
    assert last == "70000"


def test_the_environment_must_hold_four_numbers(tmp_path):
    shim = library(SHIM, tmp_path / "smaller_gpu.so")
    environment = os.environ | {"LD_PRELOAD": str(shim), "SMALLER_GPU": "8 6"}
    done = subprocess.run(["/bin/true"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "four numbers" in done.stderr


def test_the_benchmark_names_the_other_gpu():
    script("""
import contextlib
import attention

with contextlib.ExitStack() as stack:
    assert "LD_PRELOAD" not in attention.fa2_environment("9.0", stack)
    assert attention.fa2_environment("8.0", stack)["SMALLER_GPU"] == "8 0 166912 167936"
    assert attention.fa2_environment("8.6", stack)["SMALLER_GPU"] == "8 6 101376 102400"
""")
