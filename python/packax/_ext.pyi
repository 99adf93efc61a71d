"""XLA FFI handlers of packax and the table of kernels in this build (csrc/module.cc)."""

from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import CapsuleType

class Variant(TypedDict):
    name: str
    kernel: str  # "forward", "documents_init", ...
    arch: str  # "sm_90a"
    cc: int  # 90
    arch_specific: bool  # runs on `cc` only; otherwise on the same major, this minor and above
    driver: int  # the oldest driver that loads it; 12090 is CUDA 12.9
    dtype: str  # "bf16", "f16"; "any" for mask kernels
    qk_dim: int  # 0 for mask kernels
    v_dim: int
    threads: int
    shared: int  # bytes of dynamic shared memory
    block: int  # what one program covers
    # (rows, columns, swizzle) that TMA moves at once, per tensor map among the parameters
    tensor_maps: list[tuple[int, int, int]]
    bytes: int  # of the cubin

class Judgement(TypedDict):
    """Of a call, for the GPUs that may run it (csrc/launch/judge.h)."""

    found: bool  # one of them has kernels, or any other GPU those that all GPUs have
    here: bool  # one of them has kernels
    native: bool  # on all of them, other than fallback kernels take the call
    dims: tuple[int, int] | None  # to which to pad the head dims
    kv_len: int  # to which to pad the keys, for a bias; 0: no padding
    algorithm: str  # of a backward
    # of a backward: its 4-byte elements for each padded query row of the call, for each of the
    # mask, and besides; of documents: those of each batch row, last
    workspace: tuple[int, int, int]
    dbias_parts: int  # sums of the bias gradient behind it, each as large as the bias
    splits: int  # of decoding: shares of the keys for which there is room

class Device(TypedDict):
    ordinal: int
    name: str
    cc: int

class Driver(TypedDict):
    """Either `error`, or `version` (12090 is CUDA 12.9) and `devices`."""

    error: NotRequired[str]
    version: NotRequired[int]
    devices: NotRequired[list[Device]]

def registrations() -> dict[str, dict[str, CapsuleType]]:
    """FFI handlers: target name -> stage -> capsule, as jax.ffi.register_ffi_target takes them."""

def variants() -> list[Variant]:
    """Every kernel in this build."""

def part() -> str:
    """How the build was narrowed, such as "archs 90a, dtypes bf16"; empty: it has every kernel."""

def find(
    kernel: str, cc: int, dtype: str, qk_dim: int, v_dim: int, driver: int = ...
) -> str | None:
    """The name of the kernel that a device of compute capability `cc` would run with a driver for
    CUDA `driver` (12090 is 12.9; default: newer than any), or None."""

def select(
    target: str,
    cc: int,
    multiprocessors: int,
    call: dict[str, Any],
    driver: int = ...,
    table: list[dict[str, Any]] | None = None,
) -> list[tuple[str, str]]:
    """(kernel, variant) of the kernels that a call of a target (core/schema.py) would run
    on such a device, in order; empty: there are none. `call` has the fields of csrc/call/operands.h
    that are not 0, dtype as in the table, and for a backward `deterministic`. `table`: as below."""

def judge(
    target: str,
    call: dict[str, Any],
    gpus: list[int],
    driver: int = ...,
    table: list[dict[str, Any]] | None = None,
) -> Judgement:
    """What lowering must know of a call for GPUs of these compute capabilities, or of any in this
    build if there are none. `table`: rows of another build, of which name, kernel, dtype, head
    dims, cc, arch_specific, shared and driver count."""

def full_build_has(target: str, call: dict[str, Any]) -> bool:
    """Whether a full build has kernels for the call on some GPU."""

def driver() -> Driver:
    """What the CUDA driver of this machine says. Opens libcuda on first use; creates no context."""

def host_times() -> dict[str, tuple[int, int]]:
    """Target name -> (calls, nanoseconds) spent in the execute stage by this process."""

def reset_host_times() -> None:
    """Sets `host_times()` to zero."""

def deal(
    lengths: NDArray[np.int32],
    areas: NDArray[np.int32],
    density: NDArray[np.int32],
    weight: NDArray[np.int32],
    most_tokens: int,
    most_area: int,
    rounds: int,
    end: NDArray[np.int32],
    rank_tokens: NDArray[np.int32],
    rank_areas: NDArray[np.int32],
    owner: NDArray[np.int32],
) -> None:
    """Documents (D,) dealt to ranks by K strategies (context/document_assignment.py); end (K,),
    rank_tokens, rank_areas (K, ranks) and owner (K, D) are changed in place."""
