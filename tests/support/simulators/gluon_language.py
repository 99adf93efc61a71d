"""Gluon's language on the CPU, for the warp groups of gluon_threads.py: modules that replace
Triton's, so that a kernel file runs as plain Python.

Inline assembly is replaced by its specification (ASSEMBLY); test_sm90_*.py test the assembly
instruction by instruction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import gluon_threads as threads
import numpy as np
from gluon_threads import (
    DTYPES,
    NamedBarrier,
    Pointer,
    Run,
    Scalar,
    Shared,
    Tile,
    current,
    later,
    load,
    start_warp_group,
    store,
    tile,
)
from paths import KERNEL_DIR
from philox import LOW, philox


class Bits:
    """The columns that a mask allows, evaluated once the number of columns is known."""

    def __init__(self, of: Callable[[int], Any]):
        self.of = of

    def __and__(self, other: Bits) -> Bits:
        return Bits(lambda n: self.of(n) & other.of(n))


def select(condition: Any, a: Any, b: Any) -> Any:
    if np.ndim(condition) == np.ndim(a) == np.ndim(b) == 0:
        chosen = a if condition else b
        return Scalar(chosen) if isinstance(chosen, int) else chosen
    return tile(np.where(condition, a, b))


def extreme(function: Any) -> Any:
    def apply(a: Any, b: Any) -> Any:
        result = function(a, b)
        return result if np.ndim(result) else Scalar(result) if result.dtype.kind == "i" else result

    return apply


class Assembly(str):
    arguments: tuple[Any, ...]


def constexpr_function(function: Any) -> Any:
    """Calls of functions in ASSEMBLY return only their name and arguments, not assembly text."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if function.__name__ not in ASSEMBLY:
            return function(*arguments, **named)
        assembly = Assembly(function.__name__)
        assembly.arguments = arguments
        return assembly

    return call


def inline_asm(
    asm: Any, constraints: Any = "", args: Any = (), result_types: Any = (), is_pure: bool = False
) -> Any:
    if callable(asm):
        return ASSEMBLY[asm.__name__](*args)
    if barrier := re.fullmatch(r"bar\.(sync|arrive) (\d+), (\d+);", asm):
        kind, i, count = barrier[1], int(barrier[2]), int(barrier[3])
        with current.run.changed:
            found = current.run.named.setdefault(i, NamedBarrier())
        return found.arrive(count, kind == "sync", f"named barrier {i}")
    if isinstance(asm, Assembly):
        shape = (result_types.shape,) if asm == "load_asm" else ()
        return ASSEMBLY[asm](*asm.arguments, *args, *shape)
    if "mbarrier.try_wait" in asm:
        return threads.wait(*args)
    if asm.startswith("mbarrier.arrive"):
        return args[0].arrive(32 * current.warps)
    if "mbarrier.arrive" in asm:  # by one lane of every warp, or by one thread
        return args[0].arrive(current.warps if "%laneid" in asm else 1)
    if asm == "cp.async.bulk.wait_group 0;":
        return threads.store_wait(0)
    if asm.startswith("bfind.u32"):
        return Scalar(int(args[0]).bit_length() - 1)
    assert asm == "mov.b32 $0, $1;", asm
    return args[0]


def column(n: int) -> np.ndarray:
    return np.arange(n)[None, :]


def compared(row_values: Any, pointer: Pointer, first: int, end: int, compare: str) -> Bits:
    operation = {"eq": np.equal, "ge": np.greater_equal, "le": np.less_equal}[compare]

    def of(n: int) -> Any:
        at = first + np.arange(n)
        values = load(pointer + at, mask=at < end, other=0)
        return (at < end)[None, :] & operation(values[None, :], row_values[:, None])

    return Bits(of)


def tangent_step(
    half: str, ts: Tile, scale: float, p: Tile, of_lse: Tile, center: Tile
) -> tuple[Tile, Tile, Tile]:
    total, moved = p.sum(1), (p * ts).sum(1) * scale
    center = select(np.isnan(center) & (total != 0), moved / total, center)
    dp = p * (ts * scale - np.nan_to_num(center)[:, None])
    return tile(np.stack([rounded(half, p), rounded(half, dp)], 2)), of_lse + moved, center


def bits_of_keys(low: Any, high: Any, first: int, shift: int) -> Bits:
    def of(n: int) -> Any:
        word = np.where(column(n) < 32, low[:, None], high[:, None])
        return word >> ((first + column(n)) >> shift & 31) & 1 == 1

    return Bits(of)


def bits_of_rows(
    keys: Any, words: Pointer, first: int, last: int, width: int, q_shift: int, kv_shift: int
) -> Bits:
    def of(n: int) -> Any:
        row = np.minimum(first + column(n), last) >> q_shift
        word = load(Pointer(words.data, np.asarray(words.at)[:, None] + row * (width // 4)))
        return word >> ((keys >> kv_shift)[:, None] & 31) & 1 == 1

    return Bits(of)


def kept(rows: Any, keys: Any, stream: Pointer, threshold: int) -> Any:
    """Which pairs dropout keeps."""
    k0, k1, b, head = (int(x) & LOW for x in load(stream + np.arange(4)))
    rows, fours = np.broadcast_arrays(rows, np.asarray(keys) // 4)
    words = philox((fours, rows, head, b), (k0, k1))
    return np.choose(np.broadcast_to(keys % 4, rows.shape), words) >= threshold & LOW


def rounded(half: str, x: Any) -> Tile:
    return x.to(next(dtype for dtype in DTYPES.values() if dtype.name == half))


def softmax(half: str, growth: int, natural: bool, s: Any, m: Any, total: Any, scale2: Any) -> Any:
    before, after = (1.0, scale2) if natural else (scale2, 1.0)
    top = s.max(1) * before
    moved = tile(np.where(top > m + growth, top, m).astype(np.float32))
    p, alpha = np.exp2((s * before - moved[:, None]) * after), np.exp2((m - moved) * after)
    return rounded(half, p), moved, total * alpha + p.sum(1), alpha


def stored_sum(*chunks_and_buffer: Any) -> None:
    """Stores groups of 32 columns one after another; test_sm90_assembly.py tests their layout."""
    *chunks, to = chunks_and_buffer
    x = np.concatenate([np.asarray(chunk) for chunk in chunks], axis=1)
    to.array.reshape(-1)[: x.size] = x.reshape(64, -1, 32).transpose(1, 0, 2).reshape(-1)


def bulk_add(size: int, pointer: Pointer, source: Shared, way: int = 0) -> None:
    def add() -> None:
        at = pointer.indices(None) + np.arange(size // 4)
        before = pointer.data.reshape(-1)[at] if way == 0 else 0
        pointer.data.reshape(-1)[at] = before + source.array.reshape(-1)[: size // 4]

    later(add if way < 2 else lambda: None)


def added(n: int, threads: int, x: Any, pointer: Pointer) -> None:
    """Adds in any order that `loaded` inverts; test_sm90_assembly.py tests the real order."""
    pointer.data.reshape(-1)[pointer.indices(None) + np.arange(x.size)] += np.asarray(x).reshape(-1)


def loaded(n: int, threads: int, pointer: Pointer, shape: tuple[int, ...]) -> Tile:
    return load(pointer + np.arange(np.prod(shape))).reshape(shape)


def parts(line: Any, to: Shared) -> None:
    left, to.array[...] = -np.asarray(line), 0
    for i in range(3):
        part = (left.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        to.array[:, i], left = part, left - part


def zero_rows(rows: int, columns: int, to: Shared, begin: int, end: int) -> None:
    assert to.shape == (rows, columns) and begin >= 0 and end <= rows
    to.array[begin:end] = 0


def send_tile(plan: Shared, *numbers: int) -> None:
    plan.array[: len(numbers)] = numbers


def kept_of_rows(_n: int, rows: Any, stream: Any, first: int, threshold: int) -> Bits:
    assert first % 4 == 0, "a call of Philox has four keys"
    return Bits(lambda n: kept(rows[:, None], first + column(n), stream, threshold))


ASSEMBLY: dict[str, Callable[..., Any]] = {
    "row_bits_asm": lambda n, keys, lo, hi: Bits(
        lambda _n: (lo.array <= keys[:, None]) & (keys[:, None] < hi.array)
    ),
    "range_bits_asm": lambda lo, hi, start: Bits(
        lambda n: (lo[:, None] <= start + column(n)) & (start + column(n) < hi[:, None])
    ),
    "element_bits_asm": lambda n, compare, *operands: compared(*operands, compare),
    "select_bits_asm": lambda s, bits, other: tile(
        np.where(bits.of(s.shape[1]), s, np.float32(other))
    ),
    "softmax_asm": lambda n, *operands: softmax(*operands),
    "rescale_asm": lambda n, *operands: tuple(x * operands[-1][:, None] for x in operands[:-1]),
    "unpack_asm": lambda p: p,
    "quad_sum_asm": lambda x: x,
    "operand_asm": lambda n, which, pairs: pairs[..., which],
    "step_asm": lambda n, *operands: tangent_step(*operands),
    "tanh_asm": lambda n, s, k: np.tanh(s * k),
    "biased_asm": lambda n, s, rows, start, scale, slope: (
        s * scale + slope * np.abs(rows[:, None] - start - column(2 * n)).astype(np.float32)
    ),
    "row_keep_bits_asm": kept_of_rows,
    "key_keep_bits_asm": lambda keys, rows, stream, threshold: Bits(
        lambda _n: kept(rows[None], keys[:, None], stream, threshold)
    ),
    "keep_pairs_asm": lambda p, bits: tile(np.where(bits.of(p.shape[1]), p, np.zeros((), p.dtype))),
    "bits_of_keys_asm": bits_of_keys,
    "bits_of_rows_asm": bits_of_rows,
    "p_asm": lambda half, s, scale2, lse: rounded(half, np.exp2(s * scale2 - lse.array)),
    "ds_asm": lambda half, dp, p, delta: rounded(half, p.astype(np.float32) * (dp - delta.array)),
    "clear_bits_asm": lambda x, bits: tile(np.where(bits.of(x.shape[1]), x, np.zeros((), x.dtype))),
    "store_registers_asm": stored_sum,
    "bulk_add_asm": bulk_add,
    "bulk_copy_or_add_asm": bulk_add,
    "add_asm": added,
    "load_asm": loaded,
    "store_ds_asm": lambda ds, to: to.store(ds),
    "parts_asm": parts,
    "zero_rows_asm": zero_rows,
    "send_tile_asm": send_tile,
    "receive_tile_asm": lambda plan: tuple(Scalar(x) for x in plan.array[:9]),
}


def anything(*_: Any, **__: Any) -> None:
    """Stands for layouts, which are not modelled, and for barriers within a warp group."""


class Constexpr:
    """Returns the value itself: a kernel that runs as plain Python needs no wrapper."""

    def __new__(cls, x: Any) -> Any:
        return x


def checked(condition: bool, message: str = "") -> None:
    assert condition, message


def modules() -> dict[str, types.ModuleType]:
    def module(name: str, **members: Any) -> types.ModuleType:
        result = types.ModuleType(name)
        vars(result).update(members)
        return result

    nvmma = type("NVMMASharedLayout", (), {"get_default_for": anything, "__init__": anything})
    barriers = types.SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=threads.init, wait=threads.wait,
        invalidate=threads.invalidate,
        arrive=lambda b: b.arrive(1),
        expect=lambda b, n: b.arrive(1, n),
    )  # fmt: skip
    copies = types.SimpleNamespace(
        async_load=threads.async_load,
        async_store=threads.async_store,
        store_wait=threads.store_wait,
        tensor_descriptor=threads.TensorMap,
    )
    hopper = module(
        "hopper", mbarrier=barriers, tma=copies, fence_async_shared=threads.fence,
        warpgroup_mma=threads.warpgroup_mma, warpgroup_mma_wait=threads.warpgroup_mma_wait,
    )  # fmt: skip
    ampere = module(
        "ampere", mma_v2=threads.mma,
        async_copy=types.SimpleNamespace(
            async_load=threads.copy_later, commit_group=threads.commit_group,
            wait_group=threads.wait_group, mbarrier_arrive=threads.arrive_when_copied,
        ),
    )  # fmt: skip
    layouts = (
        "BlockedLayout",
        "SwizzledSharedLayout",
        "SliceLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "distributed_type",
    )
    gl = module(
        "gl", **DTYPES, **dict.fromkeys((*layouts, "barrier"), anything),
        constexpr=Constexpr, tensor=Tile, tuple=tuple, shared_memory_descriptor=Shared,
        aggregate_replace=dataclasses.replace,
        static_range=range, static_assert=checked, NVMMASharedLayout=nvmma,
        allocate_shared_memory=threads.allocate, load=load, store=store,
        atomic_add=threads.atomic_add,
        inline_asm=inline_asm, warp_specialize=threads.warp_specialize,
        program_id=lambda _: Scalar(current.run.program_id),
        num_programs=lambda _: Scalar(current.run.programs),
        where=select, minimum=extreme(np.fmin), maximum=extreme(np.fmax), max=lambda x,
        axis: x.max(axis),
        sum=lambda x, axis: x.sum(axis), num_warps=lambda: current.warps,
        exp2=lambda x: np.exp2(x), log2=lambda x: np.log2(x),
        convert_layout=lambda x, _, assert_trivial=False: x,
        expand_dims=lambda x, axis: tile(np.expand_dims(x, axis)),
        arange=lambda a, b, _=None: tile(np.arange(a, b, dtype=np.int32)),
        zeros=lambda shape, dtype, _=None: tile(np.zeros(shape, dtype.numpy)),
        full=lambda shape, x, dtype, _=None: tile(np.full(shape, x).astype(dtype.numpy)),
    )  # fmt: skip
    gluon = module(
        "gluon", jit=lambda f: f, constexpr_function=constexpr_function, language=gl,
        aggregate=dataclasses.dataclass(frozen=True),
    )  # fmt: skip
    names = {"triton.experimental.gluon": gluon, "triton.experimental.gluon.language": gl}
    names |= {"triton.experimental.gluon.language.nvidia.hopper": hopper}
    names |= {"triton.experimental.gluon.language.nvidia.ampere": ampere}
    parents = ("triton", "triton.experimental", "triton.experimental.gluon.language.nvidia")
    return names | {name: module(name) for name in parents}


@contextlib.contextmanager
def in_place_of_triton() -> Iterator[None]:
    ours = {folder.name for folder in KERNEL_DIR.iterdir()}
    others = {n: m for n, m in sys.modules.items() if n.split(".")[0] in {"triton", *ours}}
    for name in others:
        del sys.modules[name]
    sys.modules.update(modules())
    sys.path.insert(0, str(KERNEL_DIR))
    try:
        yield
    finally:
        sys.path.remove(str(KERNEL_DIR))
        for name in [n for n in sys.modules if n.split(".")[0] in {"triton", *ours}]:
            del sys.modules[name]
        sys.modules.update(others)


@functools.cache
def kernel(file: str, name: str) -> Any:
    with in_place_of_triton():
        return getattr(importlib.import_module(file), name)


def launch(file: str, name: str, programs: int, arguments: dict[str, Any], seed: int) -> None:
    """Runs the programs in order. Arrays become Pointers, ints Scalars; TensorMaps stay."""

    def given(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return Pointer(x)
        return Scalar(x) if type(x) is int else np.float32(x) if isinstance(x, float) else x

    function = kernel(file, name)
    absent = dict.fromkeys(set(inspect.signature(function).parameters) - set(arguments))
    assert not any(name.isupper() for name in absent), absent
    for program_id in range(programs):
        start_warp_group(Run(program_id, programs, seed), "the program", 4)
        with np.errstate(all="ignore"):
            function(**absent, **{k: x if k.isupper() else given(x) for k, x in arguments.items()})
