"""Loads and launches cubins with only numpy and the CUDA driver, for tuning without a wheel.

It uses one device and one stream. Driver errors raise RuntimeError with the driver's text.
"""

from __future__ import annotations

import ctypes as C
import json
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class Driver:
    """The CUDA driver and the primary context of device 0."""

    def __init__(self) -> None:
        self.cu = C.CDLL("libcuda.so.1")
        device, context, version, processors = C.c_int(), C.c_void_p(), C.c_int(), C.c_int()
        name = C.create_string_buffer(128)
        self.call("cuInit", 0)
        self.call("cuDeviceGet", C.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", C.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuDeviceGetName", name, 128, device)
        self.call("cuDriverGetVersion", C.byref(version))
        self.call("cuDeviceGetAttribute", C.byref(processors), 16, device)
        self.name, self.version = name.value.decode(), version.value
        self.multiprocessors = processors.value

    def call(self, function: str, *arguments: Any, what: str = "") -> None:
        status = getattr(self.cu, function)(*arguments)
        if status:
            text = C.c_char_p()
            self.cu.cuGetErrorString(status, C.byref(text))
            raise RuntimeError(f"{function} {what}: {status} {text.value!r}")

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def events(self, fn: Callable[[], None], calls: int) -> float:
        """Milliseconds per call, measured by events around `calls` calls."""
        start, stop, ms = C.c_void_p(), C.c_void_p(), C.c_float()
        for event in (start, stop):
            self.call("cuEventCreate", C.byref(event), 0)
        self.call("cuEventRecord", start, None)
        for _ in range(calls):
            fn()
        self.call("cuEventRecord", stop, None)
        self.call("cuEventSynchronize", stop)
        self.call("cuEventElapsedTime", C.byref(ms), start, stop)
        for event in (start, stop):
            self.call("cuEventDestroy_v2", event)
        return ms.value / calls

    def interleaved(
        self, launches: Mapping[str, Callable[[], None]], rounds: int, round_ms: float = 25.0
    ) -> dict[str, tuple[float, float, float]]:
        """(median, low, high) in ms. All launches take turns in every round, so that they run at
        the same clocks."""
        calls = {}
        for name, fn in launches.items():
            self.events(fn, 2)
            calls[name] = max(1, min(50, round(round_ms / max(self.events(fn, 2), 1e-3))))
        took: dict[str, list[float]] = {name: [] for name in launches}
        order = list(launches)
        for turn in range(rounds):
            random.Random(turn).shuffle(order)  # so that the previous launch differs by round
            for name in order:
                took[name].append(self.events(launches[name], calls[name]))
        return {name: (float(np.median(t)), min(t), max(t)) for name, t in took.items()}


class Buffer:
    """Device memory with a shape and a numpy dtype (bfloat16 as uint16)."""

    def __init__(self, driver: Driver, shape: tuple[int, ...], dtype: Any, fill: int = 0xFF):
        self.driver, self.shape, self.dtype = driver, shape, np.dtype(dtype)
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self.pointer = C.c_uint64()
        driver.call("cuMemAlloc_v2", C.byref(self.pointer), C.c_size_t(self.bytes))
        self.fill(fill)

    def fill(self, byte: int) -> None:
        """Sets all bytes. 0xFF poisons the buffer: NaN as a float, -1 as an integer."""
        self.driver.call("cuMemsetD8_v2", self.pointer, C.c_ubyte(byte), C.c_size_t(self.bytes))

    def get(self) -> np.ndarray:
        host = np.empty(self.shape, self.dtype)
        to = host.ctypes.data_as(C.c_void_p)
        self.driver.call("cuMemcpyDtoH_v2", to, self.pointer, C.c_size_t(self.bytes))
        return host

    def set(self, host: np.ndarray) -> Buffer:
        assert host.shape == self.shape and host.dtype == self.dtype and host.flags.c_contiguous
        source = host.ctypes.data_as(C.c_void_p)
        self.driver.call("cuMemcpyHtoD_v2", self.pointer, source, C.c_size_t(self.bytes))
        return self

    def free(self) -> None:
        self.driver.call("cuMemFree_v2", self.pointer)


class TensorMap(C.Structure):
    """A CUtensorMap, followed by the sizes that Triton also passes. It must be 64-byte aligned."""

    _fields_ = [("map", C.c_ubyte * 128), ("shape", C.c_int32 * 4), ("strides", C.c_int64 * 4)]


# numpy dtype of a buffer -> CUtensorMapDataType; bfloat16 is stored as uint16
ELEMENTS = {"uint16": 9, "float32": 7, "int32": 3}


def view(shape: tuple[int, ...], box: list[int]) -> list[int]:
    """Heads, rows and columns of a tensor map (docs/internals/kernels.md): those of (rows, heads,
    dim); one row for a flat workspace or, if the box has rows, rows of the box's width."""
    if len(shape) > 1:
        return [shape[1], shape[0], int(np.prod(shape[2:]))]
    return [1, 1, shape[0]] if box[2] == 1 else [1, shape[0] // box[3], box[3]]


def tensor_map(driver: Driver, buffer: Buffer, spec: dict[str, Any]) -> tuple[Any, TensorMap]:
    size, (heads, rows, columns) = buffer.dtype.itemsize, view(buffer.shape, spec["box"])
    storage = C.create_string_buffer(C.sizeof(TensorMap) + 64)
    made = TensorMap.from_buffer(storage, -C.addressof(storage) % 64)
    row = heads * columns
    dims = (C.c_uint64 * 4)(columns, rows, heads, 1)
    strides = (C.c_uint64 * 3)(row * size, columns * size, rows * row * size)
    box = (C.c_uint32 * 4)(*reversed(spec["box"]))
    ones = (C.c_uint32 * 4)(1, 1, 1, 1)
    to, element = C.c_void_p(buffer.pointer.value), ELEMENTS[buffer.dtype.name]
    sizes_and_modes = (dims, strides, box, ones, 0, spec["swizzle"], 2, 0)
    of = f"of {buffer.shape}, {spec}"
    encode = "cuTensorMapEncodeTiled"
    driver.call(encode, C.byref(made), element, 4, to, *sizes_and_modes, what=of)
    if rows * row * size - size + 1 < 128 * 1024 and driver.version <= 13010:
        made.map[10] &= ~(1 << 5)  # bit 21 of the second word, as in csrc/runtime/driver.cc
    made.shape[:] = [1, heads, rows, columns]
    made.strides[:] = [rows * row, columns, row, 1]
    return storage, made


class Kernel:
    """One compiled variant: FOLDER/NAME.cubin and FOLDER/NAME.json."""

    def __init__(self, driver: Driver, record: pathlib.Path):
        self.driver = driver
        self.meta = json.loads(record.read_text())
        image = record.with_suffix(".cubin").read_bytes()
        library, kernel, self.fn = C.c_void_p(), C.c_void_p(), C.c_void_p()
        loaded = (image, None, None, 0, None, None, 0)
        driver.call("cuLibraryLoadData", C.byref(library), *loaded, what=record.stem)
        driver.call("cuLibraryGetKernel", C.byref(kernel), library, self.meta["symbol"].encode())
        driver.call("cuKernelGetFunction", C.byref(self.fn), kernel)
        if self.meta["shared"] > 48 * 1024:
            driver.call("cuFuncSetAttribute", self.fn, 8, self.meta["shared"])

    def bind(self, grid: tuple[int, ...], given: Mapping[str, Any]) -> Callable[[], None]:
        """A function that launches the kernel with these arguments, which are packed by the names
        and types that the build recorded."""
        params = self.meta["params"]
        missing = [p["name"] for p in params if p["name"] not in given]
        if missing:
            raise TypeError(f"{self.meta['kernel']} takes {', '.join(missing)}, not given")
        kinds: dict[str, Callable[[Any], Any]] = {
            "i32": C.c_int32,
            "i64": C.c_int64,
            "f32": C.c_float,
            "ptr": lambda buffer: C.c_uint64(0) if buffer is None else buffer.pointer,
        }
        values: list[Any] = []
        addresses: list[int] = []
        specs = iter(self.meta["tensor_maps"])
        for p in params:
            a = given[p["name"]]
            if p["type"] == "tma":
                storage, made = tensor_map(self.driver, a, next(specs))
                values.append(storage)
                base = C.addressof(made)
                shape, strides = TensorMap.shape.offset, TensorMap.strides.offset
                addresses.append(base)
                addresses += [base + shape + 4 * i for i in range(4)]
                addresses += [base + strides + 8 * i for i in range(4)]
            else:
                values.append(kinds[p["type"]](a))
                addresses.append(C.addressof(values[-1]))
        values += [C.c_uint64(0), C.c_uint64(0)]  # Triton's scratch pointers
        addresses += [C.addressof(v) for v in values[-2:]]
        pointers = (C.c_void_p * len(addresses))(*addresses)
        x, y = (*grid, 1)[:2]
        shape_args = (self.fn, x, y, 1, self.meta["threads"], 1, 1, self.meta["shared"], None)

        def bound(_keep: Any = values) -> None:
            what = self.meta["kernel"]
            self.driver.call("cuLaunchKernel", *shape_args, pointers, None, what=what)

        return bound
