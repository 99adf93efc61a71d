"""Settings of XLA for the whole suite, made before jax is imported; processes of tests take them.

Eight CPU devices for the sharding tests. Most of the suite's time is compiling for the CPU, so that
is made cheap: XLA's older code generator, one LLVM module a program, and few optimisations of LLVM.
What XLA does by default is what `python -m packax demo`, `.ci/matrix` and the benchmarks run.
"""

from __future__ import annotations

import mmap
import os
import pathlib

# `pytest -n`: as many threads for numpy's products in all workers together as there are cores. Set
# before numpy is imported, which jaxlib does.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    threads = max(1, len(os.sched_getaffinity(0)) // int(workers))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))

import jaxlib


def known(flag: str) -> bool:
    """Whether this jaxlib has the flag: XLA ends the process over one that it does not know.

    As a separate string: a protocol buffer goes on to list names of flags that are gone.
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
# One LLVM module a program: cutting it into 32 costs more than compiling these small ones.
CHEAP = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
flags += [f"--{f}={value}" for f, value in CHEAP.items() if f not in flags[0] and known(f)]
os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def of_devices(number: int) -> str:
    """XLA_FLAGS of a process with so many CPU devices, as cheap: of a flag the last one counts."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={number}"


# PACKAX_TEST_GPUS="0 1 2 3": each worker of `pytest -n` sees one of these GPUs.
worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PACKAX_TEST_GPUS", "").split()
if worker and gpus:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]

if not os.path.exists("/dev/nvidiactl"):  # on a GPU, programs are as users have them
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# `pytest -n auto` on a machine with a GPU: many processes share its memory
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
