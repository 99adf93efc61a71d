"""A fake libcuda that lets benchmarks/tune/tune.py run without a GPU: memory is on the host,
launches are recorded, and kernels write ones.

`install(cubin)` makes cubin.Driver() use it. A kernel whose file name contains "bad" writes twos.
"""

from __future__ import annotations

import ctypes as C
import json
from typing import Any

import numpy as np

WRITES = {  # kernel -> the results that it fills with ones
    "forward": ("out", "lse"),
    "forward_sm90": ("out", "lse"),
    "forward_sm90_low_occupancy": ("out", "lse"),
    "forward_sm90_short": ("out", "lse"),
    "backward_dkdv": ("dk", "dv"),
    "backward_dq": ("dq",),
    "backward_sm90": ("dk", "dv"),
    "backward_postprocess": ("dq",),
    "backward_sm80": ("dk", "dv"),
    "backward_postprocess_sm80": ("dq",),
    "backward_dkdv_sm90": ("dk", "dv"),
    "backward_dq_sm90": ("dq",),
    "backward_dkdv_sm90_parts": ("dk", "dv"),
    "backward_dq_sm90_parts": ("dq",),
}


class Cuda:
    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        self.images: list[dict[str, Any]] = []
        self.maps: list[dict[str, Any]] = []
        self.launches: list[dict[str, Any]] = []
        self.memsets: list[int] = []
        self.time = 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return lambda *_: 0
        raise AttributeError(name)

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _: Any) -> int:
        assert attribute == 16
        value._obj.value = 10
        return 0

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        storage = C.create_string_buffer(size.value + 256)
        at = C.addressof(storage) + -C.addressof(storage) % 256
        self.memory[at], self.sizes[at] = storage, size.value
        pointer._obj.value = at
        return 0

    def cuMemFree_v2(self, pointer: Any) -> int:
        del self.memory[pointer.value], self.sizes[pointer.value]
        return 0

    def cuMemsetD8_v2(self, pointer: Any, byte: Any, size: Any) -> int:
        C.memset(pointer.value, byte.value, size.value)
        return 0

    def cuMemsetD32Async(self, pointer: Any, value: int, count: int, stream: Any) -> int:
        assert (value, count, stream) == (0, 1, None)
        self.memsets.append(pointer.value)
        return 0

    def cuMemcpyDtoH_v2(self, host: Any, pointer: Any, size: Any) -> int:
        C.memmove(host, pointer.value, size.value)
        return 0

    def cuMemcpyHtoD_v2(self, pointer: Any, host: Any, size: Any) -> int:
        C.memmove(pointer.value, host, size.value)
        return 0

    def cuTensorMapEncodeTiled(
        self, made: Any, element: int, rank: int, to: Any, *rest: Any
    ) -> int:
        dims, strides, box = rest[:3]
        assert rank == 3 and C.addressof(made._obj) % 64 == 0 and to.value % 16 == 0
        size = {9: 2, 7: 4, 3: 4}[element]
        assert dims[0] * dims[1] * size <= self.sizes[to.value]
        assert all(s % 16 == 0 for s in strides) and box[0] * size % 16 == 0
        self.maps.append({"address": to.value, "element": element, "sizes": list(dims),
            "box": list(box)})  # fmt: skip
        C.memset(C.addressof(made._obj), 0xFF, 128)
        C.c_uint64.from_address(C.addressof(made._obj)).value = len(self.maps) - 1
        return 0

    def cuLibraryLoadData(self, library: Any, image: bytes, *_: Any) -> int:
        self.images.append(json.loads(image))
        library._obj.value = len(self.images)
        return 0

    def cuLibraryGetKernel(self, kernel: Any, library: Any, symbol: bytes) -> int:
        assert symbol.decode() == self.images[library.value - 1]["kernel"]
        kernel._obj.value = library.value
        return 0

    def cuKernelGetFunction(self, function: Any, kernel: Any) -> int:
        function._obj.value = kernel.value
        return 0

    def cuEventElapsedTime(self, ms: Any, *_: Any) -> int:
        self.time += 1.0
        ms._obj.value = self.time % 7 + 1
        return 0

    def cuLaunchKernel(self, fn: Any, x: int, y: int, z: int, threads: int, *rest: Any) -> int:
        image, addresses = self.images[fn.value - 1], list(rest[4])
        values: dict[str, Any] = {}
        for p in image["params"]:
            at = addresses.pop(0)
            if p["type"] == "tma":
                shape = [C.c_int32.from_address(addresses.pop(0)).value for _ in range(3)]
                strides = [C.c_int64.from_address(addresses.pop(0)).value for _ in range(3)]
                map_ = self.maps[C.c_uint64.from_address(at).value]
                assert shape == [1, *reversed(map_["sizes"][:2])], p
                assert strides == [shape[1] * shape[2], shape[2], 1]
                small = int(np.prod(map_["sizes"])) * (2 if map_["element"] == 9 else 4) < 1 << 17
                assert small == (C.c_uint64.from_address(at + 8).value >> 21 & 1 == 0), p
                values[p["name"]] = map_["address"]
            else:
                kind = {"ptr": C.c_uint64, "i32": C.c_int32, "f32": C.c_float}[p["type"]]
                values[p["name"]] = kind.from_address(at).value
        assert [C.c_uint64.from_address(a).value for a in addresses] == [0, 0]  # scratch
        self.launches.append({"file": image["file"], "kernel": image["kernel"], "grid": (x, y, z),
            **values})  # fmt: skip
        self._run(image, values)
        return 0

    def _run(self, image: dict[str, Any], values: dict[str, Any]) -> None:
        for name in WRITES.get(image["kernel"], ()):
            at = values[name]
            one = 2.0 if "bad" in image["file"] else 1.0
            kind, value = (C.c_float, one) if name == "lse" else (C.c_uint16,
                0x3F80 if one == 1 else 0x4000)  # fmt: skip
            n = self.sizes[at] // C.sizeof(kind)
            np.ctypeslib.as_array((kind * n).from_address(at))[:] = value
        if image["kernel"] == "documents_rows":
            ids = np.ctypeslib.as_array((C.c_int32 * values["q_len"]).from_address(values["q_ids"]))
            first = np.searchsorted(ids, ids)
            for name, result in (
                ("lo", first),
                ("hi", np.arange(1, len(ids) + 1)),
                ("segment_checked", 0),
            ):
                np.ctypeslib.as_array((C.c_int32 * len(ids)).from_address(values[name]))[:] = result


def install(cubin: Any) -> Cuda:
    cuda = Cuda()
    cubin.C = type("ctypes", (), {**vars(C), "CDLL": lambda _: cuda})
    return cuda
