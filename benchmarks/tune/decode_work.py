"""One case of decoding on the device, for tune_decode.py: inputs, workspace, launches and results.

Keys and values repeat a block with an odd number of rows, so that filling a cache of gigabytes only
takes copies; what no row attends is NaN. The reference is attention by definition in float32, for
some heads of some sequences.
"""

from __future__ import annotations

import ctypes as C
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from cubin import Buffer, Driver, Kernel
from lib.decode_cases import Case
from work import bfloat16, float32

REPEATED = 4099  # rows of keys that repeat
MOST_SPLITS = 128
DEALT = 64  # the most sequences among which shares are divided

Launch = Callable[[], None]


def room_of(case: Case) -> int:
    """Shares of a sequence for which the workspace has room:
    python/packax/_src/ops/lowering.py."""
    rows = case.q_len * (case.heads // case.kv_heads)
    fill = -(-1024 // (len(case.lengths) * case.kv_heads * -(-rows // 64)))
    return max(
        1, min(MOST_SPLITS, -(-case.room // 128), max(fill, case.room // (1024 + 64 * rows)))
    )


def splits_of(multiprocessors: int, case: Case, block: int, dealing: bool) -> tuple[int, bool]:
    """Shares of a sequence, and whether that is an average, divided by length (`dealing`: whether
    the kernel can): csrc/launch/decode_shares.cc."""
    rows, most = case.q_len * (case.heads // case.kv_heads), room_of(case)
    tiles, at_once = -(-rows // block), 2 * multiprocessors
    cheap = min(case.room // (1024 + 64 * rows), most)
    programs = tiles * case.kv_heads * len(case.lengths)

    def busy(splits: int) -> float:
        return programs * splits / at_once / -(-programs * splits // at_once)

    best = max(busy(n) for n in range(1, most + 1))
    splits = next(n for n in range(1, most + 1) if n == most or busy(n) >= 0.95 * best)
    if dealing and cheap > 1 and 1 < len(case.lengths) <= DEALT:
        return splits, True
    return max(splits, min(-(-at_once // (tiles * case.kv_heads)), cheap)), False


class DecodeWork:
    def __init__(self, driver: Driver, case: Case):
        self.driver, self.case = driver, case
        self.buffers: list[Buffer] = []
        batch, q_len, heads, dim = len(case.lengths), case.q_len, case.heads, case.dim
        self.rng = rng = np.random.default_rng(0)
        self.lengths = np.array(case.lengths)
        hi = self.lengths[:, None] - q_len + 1 + np.arange(q_len)[None]
        self.hi = np.maximum(hi, 0).astype(np.int32)
        self.query = bfloat16(rng.standard_normal((batch, q_len, heads, dim), np.float32))
        row = (case.kv_heads, dim)
        self.blocks = [bfloat16(rng.standard_normal((REPEATED, *row),
            np.float32)) for _ in range(2)]  # fmt: skip
        width = -(-case.room // case.page_size) if case.page_size else 0
        self.table = rng.permutation(batch * width).astype(np.int32).reshape(batch, width)
        shape = (batch * width, case.page_size) if case.page_size else (batch, case.room)
        caches = [self._new((*shape, *row), np.uint16) for _ in range(2)]
        for cache, block in zip(caches, self.blocks, strict=True):
            self._fill(cache, block)
        self.room = room_of(case)
        rows = (self.room, batch, q_len, heads)
        self.given: dict[str, Any] = {
            "query": self._put(self.query), "key": caches[0], "value": caches[1],
            "q_lo": self._put(np.zeros_like(self.hi)), "q_hi": self._put(self.hi),
            "block_table": self._put(self.table if width else self.hi),
            "partial": self._new((*rows, dim), np.float32), "sums": self._new(rows, np.float32),
            "out": self._new((batch, q_len, heads, dim), np.uint16),
            "lse": self._new((batch, heads, q_len), np.float32),
            "scale": dim**-0.5, "soft_cap": 0.0, "has_sinks": 0, "batch": batch, "sink_batch": 1,
            "q_len": q_len, "kv_len": width * case.page_size or case.room,
            "pages": batch * width, "page_size": case.page_size, "table_width": width,
            "heads": heads, "kv_heads": case.kv_heads, "qk_eighths": dim // 8,
            "v_eighths": dim // 8,
        }  # fmt: skip
        self.given["sinks"] = self.given["sums"]  # never read

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        self.buffers.append(Buffer(self.driver, shape, dtype))
        return self.buffers[-1]

    def _put(self, host: np.ndarray) -> Buffer:
        return self._new(host.shape, host.dtype).set(np.ascontiguousarray(host))

    def _fill(self, cache: Buffer, block: np.ndarray) -> None:
        """Row r of the cache is row r % REPEATED of the block, where a sequence has a key."""
        room, size = self.case.room, block[0].nbytes
        spans = [(b * room, b * room + n) for b, n in enumerate(self.lengths.tolist())]
        if self.case.page_size:
            spans = [(0, cache.bytes // size)]
        for begin, end in spans:
            while begin < end:
                first = begin % REPEATED
                n = min(end - begin, REPEATED - first)
                to = C.c_uint64(cache.pointer.value + begin * size)
                host = block[first : first + n].ctypes.data_as(C.c_void_p)
                copied = self.driver.cu.cuMemcpyHtoD_v2(to, host, C.c_size_t(n * size))
                self.driver.ok(copied, "cuMemcpyHtoD")
                begin += n

    def splits(self, kernel: Kernel) -> tuple[int, bool]:
        dealing = any(p["name"] == "shares" for p in kernel.meta["params"])
        block = kernel.meta["block"]
        return splits_of(self.driver.multiprocessors, self.case, block, dealing)

    def launch(self, kernel: Kernel, combine: Kernel, splits: int, dealt: bool) -> Launch:
        """Both kernels of a call; `splits` shares of a sequence, on average if they are divided by
        length."""
        case, batch = self.case, len(self.case.lengths)
        given = self.given | {"splits": min(splits, self.room), "shares": 0}
        programs = given["splits"] * batch
        if dealt:
            given |= {"splits": self.room, "shares": splits * batch}
            programs = splits * batch + batch
        tiles = -(-case.q_len * (case.heads // case.kv_heads) // kernel.meta["block"])
        shares = kernel.bind((tiles * case.kv_heads * programs,), given)
        merged = combine.bind((batch * case.q_len * case.heads,), given)

        def run() -> None:
            shares()
            merged()

        return run

    def poison(self) -> None:
        for name in ("out", "lse", "partial", "sums"):
            self.given[name].fill(0xFF)

    def results(self) -> dict[str, np.ndarray]:
        """Float32, rows first: out (batch, q_len, heads, dim), lse (batch, q_len, heads)."""
        out, lse = (self.given[name].get() for name in ("out", "lse"))
        return {"out": float32(out), "lse": np.ascontiguousarray(lse.swapaxes(1, 2))}

    def _rows(self, b: int) -> np.ndarray:
        """The rows of the repeated block that are the keys of a sequence."""
        keys = np.arange(self.lengths[b])
        if not self.case.page_size:
            return (b * self.case.room + keys) % REPEATED
        pages = self.table[b, keys // self.case.page_size].astype(np.int64)
        return (pages * self.case.page_size + keys % self.case.page_size) % REPEATED

    @functools.cached_property
    def reference(self) -> list[tuple[int, slice, np.ndarray, np.ndarray]]:
        """(sequence, heads of a group, output, log-sum-exp) in float32; NaN and -inf in rows that
        attend nothing."""
        case, group = self.case, self.case.heads // self.case.kv_heads
        every = [(b, h) for b in range(len(case.lengths)) for h in range(case.kv_heads)]
        if max(case.lengths) > 1 << 12:
            every = [every[0], every[-1], every[len(every) // 2]]
        found = []
        for b, h in every:
            rows, heads = self._rows(b), slice(h * group, h * group + group)
            k, v = (float32(np.ascontiguousarray(x[rows, h])) for x in self.blocks)
            q = float32(np.ascontiguousarray(self.query[b, :, heads])).reshape(-1, case.dim)
            s = (q @ k.T * np.float32(self.given["scale"])).reshape(case.q_len, group, -1)
            s = np.where(np.arange(len(k)) < self.hi[b][:, None, None], s, -np.inf)
            top = s.max(-1, keepdims=True, initial=-np.inf)
            with np.errstate(all="ignore"):
                p = np.exp(s - top)
                total = p.sum(-1, keepdims=True)
                out = (p.reshape(len(q), -1) @ v).reshape(*s.shape[:2], case.dim) / total
                found.append((b, heads, out, np.where(total > 0, top + np.log(total), -np.inf)[...,
                    0]))  # fmt: skip
        return found

    def error(self) -> float:
        """Largest relative error of a compared head's output and log-sum-exp against float32."""
        got, worst = self.results(), 0.0
        for b, heads, out, lse in self.reference:
            some = self.hi[b] > 0
            if got["out"][b, ~some, heads].any() or (got["lse"][b, ~some, heads] != -np.inf).any():
                return math.inf
            if some.any():
                for x, y in ((got["out"][b, :, heads], out), (got["lse"][b, :, heads], lse)):
                    worst = max(worst, relative(x[some], y[some]))
        return worst

    def free(self) -> None:
        for buffer in self.buffers:
            buffer.free()


def relative(x: np.ndarray, y: np.ndarray) -> float:
    """‖x - y‖ / ‖y‖, infinite if anything is not finite."""
    with np.errstate(all="ignore"):
        found = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    return found if math.isfinite(found) else math.inf


def difference(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest difference of all results; rows that attend nothing have the same -inf."""
    worst = 0.0
    for name, y in want.items():
        some = np.isfinite(y)
        if (got[name][~some] != y[~some]).any():
            return math.inf
        worst = max(worst, relative(got[name][some], y[some]))
    return worst
