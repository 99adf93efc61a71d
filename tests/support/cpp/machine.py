"""A fresh copy of packax._ext on a fake driver, for the tests of the C++ host code."""

import ctypes
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from aot_modules import arguments_of, compiler, table
from cpp.call_frame import EXECUTE, INITIALIZE, Xla

HERE = Path(__file__).resolve().parent
SPEC = importlib.util.find_spec("packax._ext") if importlib.util.find_spec("packax") else None
COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
needs_extension = pytest.mark.skipif(SPEC is None, reason="packax._ext is not built")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the fake libcuda")


@functools.cache
def signature(kernel):
    """Argument -> type of the kernel's arguments, in order, as its source declares them."""
    parameters = compiler.lower.parameters(kernel, arguments_of(kernel))
    return {p["name"]: p["type"] for p in parameters}


def layout(kernel):
    """The parameter list as the fake driver takes it, including Triton's two scratch pointers."""
    letters = {"ptr": "p", "tma": "t", "f32": "f", "i32": "i"}
    return "".join(letters[kind] for kind in signature(kernel).values()) + "pp"


DRIVER = 12040  # the CUDA version of the fake driver

ELF = b"\x7fELF\x02\x01"  # 64 bits, little endian
EM_CUDA = 190

_serial = itertools.count()


def compile_driver(folder, *flags):
    path = folder / "fake_libcuda.so"
    source = HERE / "fake_libcuda.c"
    more = os.environ.get("CFLAGS", "").split()  # such as a sanitizer's
    command = [COMPILER, "-O1", "-shared", "-fPIC", *more, *flags, source, "-o", path]
    subprocess.run(command, check=True)
    return path


@functools.cache
def outside_cubins():
    """The parts of the extension's file that are neither cubins nor zeros, [(offset, bytes)], and
    the number of cubins."""
    image = Path(SPEC.origin).read_bytes()
    pieces, count, end = [], 0, 0
    begin = image.find(ELF, 1)
    while begin >= 0:
        after = begin + len(ELF)
        if struct.unpack_from("<H", image, begin + 18)[0] == EM_CUDA:
            # Of the segment and section headers: offset, size of an entry, number of entries.
            segments, sections, *sizes = struct.unpack_from("<QQ6xHHHH", image, begin + 32)
            after = begin + max(segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
            pieces.append((end, image[end:begin]))
            end, count = after, count + 1
        begin = image.find(ELF, after)
    pieces.append((end, image[end:]))
    return [(at, piece) for at, piece in pieces if piece.strip(b"\0")], count


def copy_without_cubins(copy):
    """Leaves holes for the cubins: the fake driver does not read them, and 65 MB per test fill a
    disk."""
    with copy.open("wb") as file:
        for offset, piece in outside_cubins()[0]:
            file.seek(offset)
            file.write(piece)


def load_extension(folder, libcuda):
    """Loads a copy of the extension, with separate globals: nothing is opened or loaded yet."""
    copy = folder / Path(SPEC.origin).name
    copy_without_cubins(copy)
    name = f"packax_copy{next(_serial)}._ext"
    loader = importlib.machinery.ExtensionFileLoader(name, str(copy))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    # PACKAX_LIBCUDA is read once, when the driver is first used, which driver() does.
    before = os.environ.get("PACKAX_LIBCUDA")
    os.environ["PACKAX_LIBCUDA"] = str(libcuda)
    try:
        module.driver()
    finally:
        os.environ.pop("PACKAX_LIBCUDA")
        if before is not None:
            os.environ["PACKAX_LIBCUDA"] = before
    return module


@dataclass
class Machine:
    ext: object
    cuda: ctypes.CDLL
    xla: Xla
    variant: dict  # the portable forward for device 0; its dtype and head dims are those of calls

    def has(self, *kernels):
        """Whether the build has kernels for these head dims."""
        return all(self.find(kernel) is not None for kernel in kernels)

    def find(self, kernel, cc=None, driver=DRIVER):
        """The name of the variant with these head dims and dtype, or None."""
        v = self.variant
        dtype = v["dtype"]
        if "_fp8" in kernel:
            dtype = "e4m3"
        elif dtype == "tf32" and kernel in ("backward_delta_fallback", "decode_combine"):
            dtype = "f32"
        key = (dtype, v["qk_dim"], v["v_dim"])
        if kernel.startswith(("documents", "blocks")):
            key = ("any", 0, 0)
        return self.ext.find(kernel, cc or v["cc"], *key, driver)

    def fail(self, function, code):
        self.cuda.fake_fail(function.encode(), code)

    def calls(self, function):
        return self.cuda.fake_calls(function.encode())

    def record(self):
        """Launches and memsets, in order."""
        return [json.loads(line) for line in self.cuda.fake_record().decode().splitlines()]

    def launches(self):
        return [r for r in self.record() if "kernel" in r]

    def run(self, call, stage=EXECUTE):
        """Runs a handler. Returns None or its Failure."""
        capsule = self.ext.registrations()[call.target][
            "initialize" if stage == INITIALIZE else "execute"
        ]
        return self.xla.call(
            capsule, stage, call.operands.values(), call.results.values(), call.attributes
        )

    def row(self, kernel, cc=None, driver=DRIVER):
        name = self.find(kernel, cc, driver)
        return next(r for r in self.ext.variants() if r["name"] == name)


def make_machine(folder, driver, ccs=(None,), choose=lambda machine: True):
    """A machine for the first variant of the forward that the fake driver loads and for which
    `choose(machine)` is true; skips the test if there is none. `ccs`: compute capabilities of the
    devices, None for the variant's."""
    shutil.copy(driver, folder / "libcuda.so.1")
    ext = load_extension(folder, folder / "libcuda.so.1")
    cuda = ctypes.CDLL(str(folder / "libcuda.so.1"))
    cuda.fake_record.restype = ctypes.c_char_p
    forwards = [v for v in ext.variants() if v["kernel"] == "forward" and v["driver"] <= DRIVER]
    machines = (Machine(ext, cuda, Xla(), v) for v in forwards)
    machine = next((m for m in machines if choose(m)), None)
    if machine is None:
        pytest.skip("this build has no such kernel; with PACKAX_ARCHS=all it has")
    variant = machine.variant
    for i, cc in enumerate(ccs):
        cuda.fake_add_device(f"Fake GPU {i}".encode(), cc or variant["cc"], 232448)
    for kernel in table.KERNELS:
        cuda.fake_set_layout(kernel.encode(), layout(kernel).encode())
    return machine
