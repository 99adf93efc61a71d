"""Runs the build-time Triton kernels on the CPU, in Triton's interpreter, on numpy arrays.

The launch arithmetic here (grids, workspace, table sizes) follows docs/internals/kernels.md, as the
C++ launcher does.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import os
import sys
from typing import Any

import numpy as np
import pytest
from aot_modules import table
from paths import KERNEL_DIR


def load_kernels() -> dict[str, Any]:
    """The kernels, decorated for the interpreter. Triton reads TRITON_INTERPRET when it decorates a
    function, including its own functions: the variable is set before Triton's first import and
    restored afterwards, so that it does not leak into a build that a test starts."""
    assert "triton" not in sys.modules, "Triton was imported before the interpreter was chosen"
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(KERNEL_DIR))
    try:
        pytest.importorskip(
            "triton", reason="a build dependency; pip install 'packax[test]' brings it"
        )
        # Otherwise imported lazily; it also reads the variable.
        importlib.import_module("triton.experimental.gluon")
        modules = [
            importlib.import_module(m)
            for m in (
                "common.bwd_preprocess",
                "portable.kv_ranges",
                "portable.fwd",
                "portable.bwd",
                "portable.bwd_dq",
                "portable.bwd_dbias",
                "portable.dbias_of_pairs",
                "portable.tangent",
                "portable.arithmetic",
                "portable.block_lists",
                "mask.segments",
                "mask.block_bounds",
                "portable.decode",
            )
        ]
        modules.append(importlib.import_module("interpreted"))
        importlib.import_module("portable.arithmetic").to_tf32 = modules[-1].to_tf32
        importlib.import_module("portable.decode").pairs_to_float16 = modules[-1].pairs_to_float16
    finally:
        sys.path.pop(0)
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return {name: fn for m in modules for name, fn in vars(m).items()}


KERNELS = load_kernels()


def _watch_pipelines() -> None:
    """Check that loops do not overflow. A compiled loop with stages prefetches for its next steps
    where `begin` plus these steps is below `end`, in int32: if that sum overflows, even a loop
    without iterations reads far out of bounds."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang

    def watched(plain: Any, begin: Any, end: Any = None, step: Any = 1, **options: Any) -> range:
        begin, end = (0, begin) if end is None else (begin, end)
        stages = options.pop("num_stages", 0)
        ahead = int(begin) + int(getattr(stages, "value", stages)) * int(step)
        assert ahead < 2**31, f"a loop from {begin} to {end} looks ahead to {ahead}"
        return plain(begin, end, step)

    def patch_and_watch(fn: Any) -> Any:
        scope = patch(fn)
        if interpreter.tl in fn.__globals__.values():
            interpreter.tl.range = functools.partial(watched, interpreter.tl.range)
        return scope

    interpreter._patch_lang = patch_and_watch


_watch_pipelines()


def _exact_products() -> None:
    """Compute float32 products in float64 and round once: numpy's BLAS can be ten times less exact
    than a GPU, depending on the processor and the size."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    plain = builder.create_dot

    def exact(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            product = a.data.astype(np.float64) @ b.data.astype(np.float64)
            return type(d)(product.astype(np.float32) + d.data, d.dtype.scalar)
        return plain(self, a, b, d, *options)

    builder.create_dot = exact


_exact_products()


def _patch_once_a_launch() -> set[tuple[str, ...]]:
    """Triton patches its language modules anew at every call of a device function, which takes most
    of the time. Patch once for each set of modules that a function sees, and return these sets.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patched: set[tuple[str, ...]] = set()
    patch = interpreter._patch_lang

    @functools.cache
    def modules_of(fn: Any) -> tuple[str, ...]:
        language = [interpreter.tl, interpreter.tl.core]
        seen = [x for x in fn.__globals__.values() if inspect.ismodule(x)]
        return tuple(x.__name__ for x in language if x in seen)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = modules_of(self.fn)
        if modules not in patched:
            patch(self.fn)
            patched.add(modules)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    return patched


_patched = _patch_once_a_launch()


def _keep_numpy_dtypes() -> None:
    """Triton rebuilds a table of numpy dtypes at every load: cache its lookups."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def of_any(kind: Any) -> np.dtype:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else of_scalar(kind.scalar)

    interpreter._get_np_dtype = of_any


_keep_numpy_dtypes()


def _work_less() -> None:
    """Skip what Triton does in every operation without an effect on results: overflow checks of
    integer sums, which only its debug mode reports, and new lists and types for equal sizes."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language, builder = interpreter.tl.core, interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    semantic = interpreter.TritonSemantic
    made = type("made", (language.block_type,), {})  # keeps Triton's __init__
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast

    @functools.cache
    def sizes_of(*shape: int) -> tuple[Any, Any]:
        sizes = language.tuple([language.constexpr(size) for size in shape])
        return sizes, language.constexpr(math.prod(shape))

    @functools.cache
    def block_of(*shape: int) -> tuple[Any, int, str]:
        block = made(language.float32, list(shape))
        return block.shape, block.numel, f"<{block.shape}, "

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (getattr(size, "value", size) for size in shape)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = block_of(*sizes)
        self.name += f"{element_ty}>"

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes_of(*(type.shape.values if type.is_block() else ()))

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_to_another(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        return value if value.dtype is kind else cast(self, value, kind, rounding)

    made.__init__ = language.block_type.__init__
    language.block_type.__init__, language.tensor.__init__ = block_init, init
    semantic.broadcast_impl_value, semantic.cast = of_one_shape, cast_to_another


_work_less()


class Tensor:
    """The part of torch.Tensor that the interpreter uses, over a numpy array."""

    def __init__(self, array: np.ndarray):
        assert array.flags.c_contiguous
        self.array = array
        self.dtype = str(array.dtype)
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def copy_(self, other: Tensor) -> None:
        assert other is self

    def new_empty(self, *_: Any, **__: Any) -> Tensor:
        return self

    def set_(self, *_: Any) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


def launch(kernel: str, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
    """`args`: the arguments that the kernel takes. The function's other parameters are None."""
    _patched.clear()
    function = KERNELS[table.function(kernel, table.KERNELS.get(kernel, ""))]
    absent = table.absent_arguments(kernel)
    names = inspect.signature(function.fn).parameters
    taken = [name for name in names if not name.isupper() and name not in absent]
    given = dict(zip(taken, args, strict=True)) | constants
    given = {name: Tensor(a) if isinstance(a, np.ndarray) else a for name, a in given.items()}
    function[grid](**dict.fromkeys(names) | given)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def guarded(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An output filled with a value that no kernel may leave in it."""
    out = np.empty(shape, dtype)
    out.fill(np.nan if np.issubdtype(out.dtype, np.floating) else -77)
    return out
