"""Sets XLA flags for the whole suite before jax is imported; subprocesses of tests inherit them.

The sharding tests need eight CPU devices. Most of the suite's time is compiling for the CPU, which
is made cheap here: XLA's older code generator, one LLVM module per program, and few LLVM
optimizations. `python -m packax demo`, `.ci/matrix` and the benchmarks run with XLA's defaults.
"""

from __future__ import annotations

import mmap
import os
import pathlib

# Under `pytest -n`, all workers together use as many numpy threads as there are cores. This must be
# set before numpy is imported, and jaxlib imports it.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    threads = max(1, len(os.sched_getaffinity(0)) // int(workers))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))

import jaxlib


def known(flag: str) -> bool:
    """Whether this jaxlib has the flag: XLA aborts the process on an unknown flag.

    Searches for a separate NUL-terminated string, because the binary's protocol buffer descriptors
    still list the names of removed flags.
    """
    for library in pathlib.Path(jaxlib.__file__).parent.glob("*.so"):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code,
        ):
            if code.find(flag.encode() + b"\0") >= 0:
                return True
    return False


flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
# One LLVM module per program: splitting it into 32 costs more than compiling these small programs.
CHEAP = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
# XLA aborts if a device joins a collective a minute late, as happens on a busy machine.
PATIENT = {"xla_cpu_collective_call_terminate_timeout_seconds": "300"}
chosen = CHEAP | PATIENT
flags += [f"--{f}={value}" for f, value in chosen.items() if f not in flags[0] and known(f)]
os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def of_devices(number: int) -> str:
    """XLA_FLAGS for a process with this number of CPU devices. The last value of a flag counts."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={number}"


# PACKAX_TEST_GPUS="0 1 2 3": each worker of `pytest -n` sees only one of these GPUs.
worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PACKAX_TEST_GPUS", "").split()
if worker and gpus:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]

if not os.path.exists("/dev/nvidiactl"):  # with a GPU, programs are compiled as users do
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# With `pytest -n auto` on a machine with a GPU, many processes share its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
