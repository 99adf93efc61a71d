"""Load and launch cubins with nothing but numpy and the driver: what tuning needs, before there is a wheel.

Errors of the driver become RuntimeError with its text. One device, one stream.
"""

from __future__ import annotations

import ctypes as C
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np


class Driver:
    """The CUDA driver and the primary context of device 0."""

    def __init__(self) -> None:
        self.cu = C.CDLL("libcuda.so.1")
        self.ok(self.cu.cuInit(0), "cuInit")
        device, context = C.c_int(), C.c_void_p()
        self.ok(self.cu.cuDeviceGet(C.byref(device), 0), "cuDeviceGet")
        self.ok(
            self.cu.cuDevicePrimaryCtxRetain(C.byref(context), device), "cuDevicePrimaryCtxRetain"
        )
        self.ok(self.cu.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        name = C.create_string_buffer(128)
        self.ok(self.cu.cuDeviceGetName(name, 128, device), "cuDeviceGetName")
        self.name = name.value.decode()
        version = C.c_int()
        self.ok(self.cu.cuDriverGetVersion(C.byref(version)), "cuDriverGetVersion")
        self.version = version.value

    def ok(self, status: int, what: str) -> None:
        if status:
            text = C.c_char_p()
            self.cu.cuGetErrorString(status, C.byref(text))
            raise RuntimeError(f"{what}: {status} {text.value!r}")

    def synchronize(self) -> None:
        self.ok(self.cu.cuCtxSynchronize(), "cuCtxSynchronize")

    def milliseconds(self, fn: Callable[[], None], rounds: int, calls: int = 1) -> float:
        """Median over rounds of one call, by events around `calls` of them; twice warmed up."""
        fn()
        fn()
        start, stop = C.c_void_p(), C.c_void_p()
        for event in (start, stop):
            self.ok(self.cu.cuEventCreate(C.byref(event), 0), "cuEventCreate")
        took = []
        for _ in range(rounds):
            self.ok(self.cu.cuEventRecord(start, None), "cuEventRecord")
            for _ in range(calls):
                fn()
            self.ok(self.cu.cuEventRecord(stop, None), "cuEventRecord")
            self.ok(self.cu.cuEventSynchronize(stop), "cuEventSynchronize")
            ms = C.c_float()
            self.ok(self.cu.cuEventElapsedTime(C.byref(ms), start, stop), "cuEventElapsedTime")
            took.append(ms.value / calls)
        return float(np.median(took))


class Buffer:
    """Device memory with the shape and numpy dtype of its contents (bfloat16 as uint16)."""

    def __init__(self, driver: Driver, shape: tuple[int, ...], dtype: Any, fill: int = 0xFF):
        self.driver, self.shape, self.dtype = driver, shape, np.dtype(dtype)
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self.pointer = C.c_uint64()
        driver.ok(
            driver.cu.cuMemAlloc_v2(C.byref(self.pointer), C.c_size_t(self.bytes)), "cuMemAlloc"
        )
        self.fill(fill)

    def fill(self, byte: int) -> None:
        """0xFF poisons: NaN as a float, -1 as an integer."""
        self.driver.ok(
            self.driver.cu.cuMemsetD8_v2(self.pointer, C.c_ubyte(byte), C.c_size_t(self.bytes)),
            "cuMemsetD8",
        )

    def get(self) -> np.ndarray:
        host = np.empty(self.shape, self.dtype)
        self.driver.ok(
            self.driver.cu.cuMemcpyDtoH_v2(
                host.ctypes.data_as(C.c_void_p), self.pointer, C.c_size_t(self.bytes)
            ),
            "cuMemcpyDtoH",
        )
        return host

    def set(self, host: np.ndarray) -> Buffer:
        assert host.shape == self.shape and host.dtype == self.dtype and host.flags.c_contiguous
        self.driver.ok(
            self.driver.cu.cuMemcpyHtoD_v2(
                self.pointer, host.ctypes.data_as(C.c_void_p), C.c_size_t(self.bytes)
            ),
            "cuMemcpyHtoD",
        )
        return self

    def free(self) -> None:
        self.driver.ok(self.driver.cu.cuMemFree_v2(self.pointer), "cuMemFree")


class TensorMap(C.Structure):
    """A CUtensorMap with the sizes that Triton passes behind it; 64-byte aligned inside `storage`."""

    _fields_ = [("map", C.c_ubyte * 128), ("shape", C.c_int32 * 3), ("strides", C.c_int64 * 3)]


def tensor_map(driver: Driver, buffer: Buffer, spec: dict[str, Any]) -> tuple[Any, TensorMap]:
    """The map over a (rows, heads, dim) buffer as (1, rows, heads * dim), of 16-bit elements."""
    rows, columns = buffer.shape[0], int(np.prod(buffer.shape[1:]))
    storage = C.create_string_buffer(C.sizeof(TensorMap) + 64)
    made = TensorMap.from_buffer(storage, -C.addressof(storage) % 64)
    dims = (C.c_uint64 * 3)(columns, rows, 1)
    strides = (C.c_uint64 * 2)(columns * 2, rows * columns * 2)
    box = (C.c_uint32 * 3)(*reversed(spec["box"]))
    ones = (C.c_uint32 * 3)(1, 1, 1)
    status = driver.cu.cuTensorMapEncodeTiled(
        C.byref(made),
        9,
        3,
        C.c_void_p(buffer.pointer.value),
        dims,
        strides,
        box,
        ones,
        0,
        spec["swizzle"],
        2,
        0,
    )
    driver.ok(status, "cuTensorMapEncodeTiled")
    made.shape[:] = [1, rows, columns]
    made.strides[:] = [rows * columns, columns, 1]
    return storage, made


class Kernel:
    """One compiled variant: FOLDER/NAME.cubin beside FOLDER/NAME.json."""

    def __init__(self, driver: Driver, record: pathlib.Path):
        self.driver = driver
        self.meta = json.loads(record.read_text())
        image = record.with_suffix(".cubin").read_bytes()
        library, kernel, self.fn = C.c_void_p(), C.c_void_p(), C.c_void_p()
        driver.ok(
            driver.cu.cuLibraryLoadData(C.byref(library), image, None, None, 0, None, None, 0),
            f"load {record.stem}",
        )
        driver.ok(
            driver.cu.cuLibraryGetKernel(C.byref(kernel), library, self.meta["symbol"].encode()),
            "cuLibraryGetKernel",
        )
        driver.ok(driver.cu.cuKernelGetFunction(C.byref(self.fn), kernel), "cuKernelGetFunction")
        if self.meta["shared"] > 48 * 1024:
            driver.ok(
                driver.cu.cuFuncSetAttribute(self.fn, 8, self.meta["shared"]), "cuFuncSetAttribute"
            )

    def bind(self, grid: tuple[int, ...], *args: Any) -> Callable[[], None]:
        """The launch with its parameters packed."""
        params = self.meta["params"]
        if len(args) != len(params):
            raise TypeError(
                f"{self.meta['kernel']} takes {len(params)} arguments, {len(args)} given"
            )
        kinds = {"i32": C.c_int32, "i64": C.c_int64, "f32": C.c_float}
        values: list[Any] = []
        addresses: list[int] = []
        specs = iter(self.meta["tensor_maps"])
        for a, p in zip(args, params, strict=True):
            if p["type"] == "tma":
                storage, made = tensor_map(self.driver, a, next(specs))
                values.append(storage)
                base = C.addressof(made)
                shape, strides = TensorMap.shape.offset, TensorMap.strides.offset
                addresses.append(base)
                addresses += [base + shape + 4 * i for i in range(3)]
                addresses += [base + strides + 8 * i for i in range(3)]
            else:
                values.append(a.pointer if p["type"] == "ptr" else kinds[p["type"]](a))
                addresses.append(C.addressof(values[-1]))
        values += [C.c_uint64(0), C.c_uint64(0)]  # Triton's scratch pointers
        addresses += [C.addressof(v) for v in values[-2:]]
        pointers = (C.c_void_p * len(addresses))(*addresses)
        x, y = (*grid, 1)[:2]
        launch = self.driver.cu.cuLaunchKernel
        shape_args = (self.fn, x, y, 1, self.meta["threads"], 1, 1, self.meta["shared"], None)

        def bound(_keep: Any = values) -> None:
            self.driver.ok(launch(*shape_args, pointers, None), f"launch {self.meta['kernel']}")

        return bound

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        self.bind(grid, *args)()
