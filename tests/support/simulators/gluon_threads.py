"""Runs Gluon kernels on the CPU, because Gluon has no interpreter: warp groups are Python threads,
tiles are numpy arrays.

Asynchronous operations finish early or late. A wgmma product, a TMA copy or a bulk addition happens
at once or as late as its wait allows, at random, so that a tile that is released too early, or read
before it arrives, changes the results. Barriers that no thread can complete raise a Deadlock, a
product used before its wait a TypeError, an out-of-bounds access an IndexError. Shared memory is
poisoned. A product of Hopper that reads what cp.async wrote needs a fence of its warp group in
between. Layouts, registers, swizzles and other fences are not modelled. gluon_language.py imports
and launches kernels.
"""

from __future__ import annotations

import itertools
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


class Deadlock(Exception):
    pass


class DType:
    def __init__(self, name: str, numpy: Any):
        self.name, self.numpy = name, np.dtype(numpy)


DTYPES = {
    "bfloat16": DType("bf16", ml_dtypes.bfloat16),
    "float16": DType("f16", np.float16),
    "float32": DType("f32", np.float32),
    "int16": DType("i16", np.int16),
    "int32": DType("i32", np.int32),
    "int64": DType("i64", np.int64),
    "uint32": DType("u32", np.uint32),
}
DTYPE_OF = {x.numpy: x for x in DTYPES.values()}


class Scalar(int):
    """An integer in a kernel, with the method `.to`."""

    def to(self, _dtype: DType) -> Scalar:
        return self


def _operator(name: str) -> Any:
    def apply(self: Scalar, *other: Any) -> Any:
        result = getattr(int, name)(self, *other)
        return Scalar(result) if type(result) is int else result

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    for _side in ("", "r"):
        setattr(Scalar, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))


class Tile(np.ndarray):
    """A tensor in registers."""

    def to(self, dtype: DType, bitcast: bool = False) -> Tile:
        if bitcast:
            return self.astype(np.uint32) if dtype.numpy == np.uint32 else self
        return self.astype(dtype.numpy)

    def permute(self, order: tuple[int, ...]) -> Tile:
        return self.transpose(order)

    def split(self) -> tuple[Tile, Tile]:
        left, right = np.moveaxis(self, -1, 0)
        return left, right

    @property
    def type(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(layout=None, shape=self.shape)


def tile(x: Any) -> Tile:
    return np.asarray(x).view(Tile)


class Pointer:
    def __init__(self, data: np.ndarray, at: Any = 0):
        self.data, self.at = data, at

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=DTYPE_OF[self.data.dtype])

    def to(self, dtype: Any) -> int:
        """The address: 0 of an empty array, which stands for a null pointer."""
        return int(self.data.size > 0)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, np.asarray(self.at) + more)

    __radd__ = __add__

    def indices(self, mask: Any) -> Any:
        at = np.asarray(self.at)
        at = at if mask is None else np.where(mask, at, 0)
        if at.size and (at.min() < 0 or at.max() >= self.data.size):
            raise IndexError(f"{at.min()} to {at.max()} of {self.data.size}")
        return at


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
    found = pointer.data.reshape(-1)[pointer.indices(mask)]
    if mask is not None:
        found = np.where(mask, found, np.asarray(other, found.dtype))
    if found.ndim:
        return tile(found)
    return Scalar(found) if found.dtype.kind == "i" else found


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    at = pointer.indices(mask)
    keep = np.broadcast_to(True if mask is None else mask, at.shape)
    pointer.data.reshape(-1)[at[keep]] = np.broadcast_to(x, at.shape)[keep]


class Shared:
    """A view of shared memory."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype, self.shape = array, DTYPE_OF[array.dtype], array.shape

    def index(self, i: int) -> Shared:
        if not 0 <= i < len(self.array):
            raise IndexError(f"{i} of {len(self.array)} buffers")
        return Shared(self.array[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert start + length <= self.array.shape[dim]
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.array.transpose(order))

    def reinterpret(self, dtype: DType, shape: list[int], _layout: Any) -> Shared:
        assert dtype is self.dtype
        view = self.array.reshape(shape)
        assert np.shares_memory(view, self.array)
        return Shared(view)

    def load(self, _layout: Any) -> Tile:
        return tile(self.array.copy())

    def store(self, x: Tile) -> None:
        assert x.shape == self.array.shape and x.dtype == self.array.dtype
        self.array[...] = x


def poison(dtype: DType, shape: list[int]) -> np.ndarray:
    array = np.empty(shape, dtype.numpy)
    array[...] = -7777777 if dtype.numpy.kind == "i" else np.nan
    return array


class TensorMap:
    """(batch, heads, length, columns). Beyond the end, loads return zeros and stores write
    nothing."""

    layout = None

    def __init__(self, array: np.ndarray):
        assert array.ndim == 4
        self.array, self.dtype = array, DTYPE_OF[array.dtype]
        self.shape = tuple(map(Scalar, array.shape))

    def box(self, at: list[int], shape: tuple[int, ...]) -> tuple[Any, Any]:
        """The slices of the array that a box covers, and the slices of the box that these fill."""
        if at[3] * self.array.itemsize % 16:
            raise IndexError(f"a GPU accepts no box that begins at column {at[3]}: 16 bytes")
        ends = [min(a + n, size) for a, n, size in zip(at, shape, self.array.shape, strict=True)]
        covered = tuple(slice(a, max(a, e)) for a, e in zip(at, ends, strict=True))
        return covered, tuple(slice(0, max(e - a, 0)) for a, e in zip(at, ends, strict=True))


class Run:
    """One program. A single lock serves all waits of its warp groups."""

    def __init__(self, program_id: int, programs: int, seed: int):
        self.program_id, self.programs, self.seed = program_id, programs, seed
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.named: dict[int, NamedBarrier] = {}
        self.copies: list[Callable[[], None]] = []  # in flight, which barriers wait for
        self.copied: dict[int, tuple[np.ndarray, int]] = {}  # tiles written by cp.async, and when
        self.clock = itertools.count()
        self.running = 0
        self.waiting: dict[str, tuple[Callable[[], bool], str]] = {}

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Copies in flight complete, in random order, once no thread can continue without them."""
        with self.changed:
            self.waiting[current.name] = done, what
            while not done():
                if self.failure:
                    raise Deadlock("another warp group failed") from self.failure
                if len(self.waiting) < self.running or any(
                    ready() for ready, _ in self.waiting.values()
                ):
                    self.changed.wait()
                elif self.copies:
                    self.copies.pop(current.coin.randrange(len(self.copies)))()
                    self.changed.notify_all()
                else:
                    raise Deadlock(
                        "; ".join(
                            f"{name} waits for {what}" for name, (_, what) in self.waiting.items()
                        )
                    )
            del self.waiting[current.name]


class WarpGroup(threading.local):
    """The state of one warp group."""

    name: str
    warps: int
    run: Run
    coin: random.Random
    products: list[Product]
    stores: list[Callable[[], None]]
    copies: list[Callable[[], None]]  # cp.async copies that are in no group and on no barrier
    groups: list[list[Callable[[], None]]]
    fenced: int  # the time of the last fence


current = WarpGroup()


def start_warp_group(run: Run, name: str, warps: int) -> None:
    current.run, current.name, current.warps = run, name, warps
    current.coin = random.Random(f"{run.seed} {run.program_id} {name}")
    current.products, current.stores = [], []
    current.copies, current.groups, current.fenced = [], [], 0


class NamedBarrier:
    def __init__(self) -> None:
        self.arrived = self.generation = 0

    def arrive(self, threads: int, wait: bool, what: str) -> None:
        with current.run.changed:
            self.arrived += 32 * current.warps
            assert self.arrived <= threads, f"{what}: more threads than it counts"
            before = self.generation
            if self.arrived == threads:
                self.arrived, self.generation = 0, self.generation + 1
                current.run.changed.notify_all()
        if wait:
            current.run.wait(lambda: self.generation != before, what)


class MBarrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, n: int, more: int = 0) -> None:
        with current.run.changed:
            assert self.pending >= n, "more arrivals than the barrier counts"
            self.pending -= n
            self.landed(-more)

    def landed(self, size: int) -> None:
        self.bytes -= size
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            current.run.changed.notify_all()


class Barriers:
    def __init__(self, n: int):
        self.all, self.shape = [MBarrier() for _ in range(n)], (n, 1)

    def index(self, i: int) -> MBarrier:
        return self.all[i]


def init(barrier: MBarrier, count: int) -> None:
    assert not barrier.count, "a barrier that was not initialised, or is invalid again"
    barrier.count = barrier.pending = count


def invalidate(barrier: MBarrier) -> None:
    assert barrier.bytes == 0, "no copy arrives at it later"
    barrier.count = barrier.pending = barrier.phase = 0


def wait(barrier: MBarrier, parity: int) -> None:
    assert parity in (0, 1) and barrier.count, "a parity, of a barrier that was initialised"
    current.run.wait(
        lambda: barrier.phase & 1 != parity,
        f"phase {barrier.phase} of a barrier of {barrier.count}",
    )


def async_load(source: TensorMap, at: list[int], barrier: MBarrier, to: Shared) -> None:
    def copy() -> None:
        covered, part = source.box(at, to.array.shape)
        to.array[...] = 0
        to.array[part] = source.array[covered]
        barrier.landed(to.array.nbytes)

    with current.run.changed:
        if current.coin.random() < 0.5:
            copy()
        else:
            to.array[...] = poison(to.dtype, [1])[0]
            current.run.copies.append(copy)
        current.run.changed.notify_all()


def copy_later(to: Shared, pointer: Pointer, mask: Any = None) -> None:
    """cp.async: happens at once, or when its group or barrier is waited for."""
    run = current.run

    def copy() -> None:
        to.array[...] = load(pointer, mask, 0)
        run.copied[to.array.__array_interface__["data"][0]] = to.array, next(run.clock)

    if current.coin.random() < 0.5:
        copy()
    else:
        to.array[...] = poison(to.dtype, [1])[0]
        current.copies.append(copy)


def commit_group() -> None:
    current.groups.append(current.copies)
    current.copies = []


def wait_group(pending: int) -> None:
    while len(current.groups) > pending:
        for copy in current.groups.pop(0):
            copy()


def arrive_when_copied(barrier: MBarrier, increment_count: bool = True) -> None:
    """cp.async.mbarrier.arrive.noinc: every thread arrives after its copies, now or later."""
    assert not increment_count
    copies, threads = current.copies, 32 * current.warps
    current.copies = []

    def arrive() -> None:
        for copy in copies:
            copy()
        barrier.arrive(threads)

    with current.run.changed:
        if current.coin.random() < 0.5:
            arrive()
        else:
            current.run.copies.append(arrive)
        current.run.changed.notify_all()


def fence() -> None:
    current.fenced = next(current.run.clock)


def mma(a: Tile, b: Tile, sums: Tile) -> Tile:
    assert a.shape[1] == b.shape[0] and a.dtype == b.dtype
    with np.errstate(all="ignore"):
        return tile(sums + np.asarray(a, np.float32) @ np.asarray(b, np.float32))


def later(action: Callable[[], None]) -> None:
    """For actions that read shared memory: now or at any time until `store_wait`."""
    current.stores.append(action)
    if current.coin.random() < 0.5:
        store_wait(0)


def store_wait(pending: int) -> None:
    while len(current.stores) > pending:
        with current.run.changed:
            current.stores.pop(0)()


def async_store(target: TensorMap, at: list[int], source: Shared) -> None:
    def copy() -> None:
        covered, part = target.box(at, source.array.shape)
        target.array[covered] = source.array[part]

    later(copy)


class Product:
    """The token of sums + a b. The operands are read when it is computed, and the token supports no
    other use until it has been waited for."""

    def __init__(self, a: Any, b: Shared, sums: Any):
        self.a, self.b, self.sums = a, b, sums
        self.value: Tile | None = None
        self.finished = False

    def compute(self) -> None:
        a, b = (np.asarray(getattr(x, "array", x)).astype(np.float32) for x in (self.a, self.b))
        sums = self.sums.value if isinstance(self.sums, Product) else self.sums
        with np.errstate(all="ignore"):
            self.value = tile(sums + a @ b)


def compute_products(products: list[Product]) -> None:
    for product in products:
        if product.value is None:
            product.compute()


def warpgroup_mma(
    a: Any, b: Shared, sums: Any, *, use_acc: bool = True, is_async: bool = False
) -> Any:
    left = getattr(a, "array", a)
    assert is_async and left.shape[1] == b.array.shape[0] and left.dtype == b.array.dtype
    for array, when in [*current.run.copied.values()]:
        read = np.may_share_memory(array, left) or np.may_share_memory(array, b.array)
        assert not read or when < current.fenced, "cp.async wrote an operand: fence missing"
    product = Product(a, b, sums if use_acc else np.float32(0))
    current.products.append(product)
    if current.coin.random() < 0.5:
        compute_products(current.products)
    return product


def warpgroup_mma_wait(pending: int, deps: tuple[Any, ...] = ()) -> Any:
    """Products that may still be in flight stay tokens, whether they are computed or not."""
    while len(current.products) > pending:
        product = current.products.pop(0)
        compute_products([product])
        product.finished = True
    done = [x.value if isinstance(x, Product) and x.finished else x for x in deps]
    return done[0] if len(done) == 1 else tuple(done)


def warp_specialize(parts: list[Any], warps: list[int], registers: list[int]) -> None:
    assert len(warps) == len(registers) == len(parts) - 1
    run = current.run
    run.running = len(parts)

    def work(name: str, n: int, function: Any, arguments: Any) -> None:
        start_warp_group(run, name, n)
        try:
            with np.errstate(all="ignore"):
                function(*arguments)
            assert not current.stores and not current.products, "not waited for"
        except BaseException as error:
            run.failure = run.failure or error
        with run.changed:
            run.running -= 1
            run.changed.notify_all()

    threads = [
        threading.Thread(target=work, args=(f"partition {i}", n, *part), daemon=True)
        for i, (n, part) in enumerate(zip([4, *warps], parts, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if run.failure:
        raise run.failure
    assert not run.copies, "loaded, and nobody waited"


def allocate(dtype: DType, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(shape[0]) if len(shape) == 2 else MBarrier()
    return Shared(poison(dtype, shape))


def atomic_add(pointer: Pointer, n: int, sem: str) -> Scalar:
    with current.run.changed:
        before = load(pointer)
        store(pointer, before + n)
    return before
