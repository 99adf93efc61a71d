"""The kernels that `tune.py build` compiled, and one case on the device.

A case has inputs, mask arrays, workspaces, and the launches of docs/internals/kernels.md. Kernels
get their arguments by name from one namespace. The build records which parameters are tensor maps,
pointers or numbers (csrc/aot/table.py), so kernels may change them without changes here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cubin import Buffer, Driver, Kernel
from lib.cases import Case

Launch = Callable[[], None]
SAMPLED = 8192  # at most this many rows of a case are compared
SM90_BACKWARD = ("backward_preprocess", "backward_sm90", "backward_postprocess")
MASK = ("documents_init", "documents_runs", "documents_rows", "blocks_rows", "blocks_keys",
    "blocks_order")  # fmt: skip
DETERMINISTIC = ("backward_preprocess", "backward_dkdv_sm90", "backward_dq_sm90")
PARTS = ("backward_preprocess", "backward_dkdv_sm90_parts", "backward_dq_sm90_parts")
SM80_BACKWARD = ("backward_preprocess", "backward_sm80", "backward_postprocess_sm80")
# The arguments of kernels with options in a call without options: null pointers, and numbers.
NO_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("row_max", "score_grads", "scales", "slopes", "q_bias_pos", "kv_bias_pos",
        "block_mask", "q_block_lists", "kv_block_lists", "bias", "dropout_streams",
        "dropout_rows", "sinks", "row_delta")),
    **dict.fromkeys(("scales_batch", "bias_batch", "block_mask_batch", "block_mask_heads",
        "has_score_grads", "bias_kind", "bias_axes", "dropout_threshold",
        "dropout_rows_batch", "sink_batch", "choice"), 0),
    "soft_cap": 0.0, "inverse_keep": 1.0, "q_block": 64, "kv_block": 64,
}  # fmt: skip


def plain(kernel: str) -> str:
    """The name of the kernel that computes the same without options."""
    return kernel.removesuffix("_fallback").removesuffix("_bias")


def pair(text: str) -> tuple[int, int]:
    """Parses head dims: 128x64, or 128 for both."""
    qk, _, v = text.partition("x")
    return int(qk), int(v or qk)


class Built:
    """The kernels in a folder, loaded on demand."""

    def __init__(self, driver: Driver, folder: Path):
        self.driver, self.folder = driver, folder
        self.rows = json.loads((folder / "index.json").read_text())
        self.loaded: dict[str, Kernel] = {}

    def kernel(self, row: dict[str, Any]) -> Kernel:
        name = row["file"]
        if name not in self.loaded:
            kernel = Kernel(self.driver, self.folder / "cubins" / f"{name}.json")
            kernel.meta["constants"] = row["constants"]
            self.loaded[name] = kernel
        return self.loaded[name]

    def masks(self) -> dict[str, Kernel]:
        found = {row["kernel"]: row for row in self.rows if row["dims"] == [0, 0]}
        return {name: self.kernel(found[name]) for name in MASK}

    def portable(self, kernel: str, dims: tuple[int, int]) -> Kernel | None:
        """The table's portable kernel, or None."""
        for row in self.rows:
            if (row["kernel"], tuple(row["dims"]), row["label"]) == (kernel, dims, None):
                return self.kernel(row)
        return None

    def candidates(
        self, dims: tuple[int, int], kernels: Sequence[str]
    ) -> dict[str, tuple[str, Kernel]]:
        """Title -> (kernel's name, kernel), the table's tile first. Candidates that need a newer
        driver are omitted."""
        rows = [row for row in self.rows if row["label"] and tuple(row["dims"]) == dims]
        rows = [row for row in rows if row["kernel"] in kernels]
        rows.sort(key=lambda row: row["assembler"], reverse=True)  # newest first, as in C++
        rows.sort(key=lambda row: (kernels.index(row["kernel"]), row["label"] != "table"))
        found = {}
        for row in rows:
            meta = json.loads((self.folder / "cubins" / f"{row['file']}.json").read_text())
            if meta["driver"] <= self.driver.version:
                title = f"{row['kernel']} {row['label']} {row['assembler']}"
                found[title] = (row["kernel"], self.kernel(row))
        return found


def bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float32(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)


class Work:
    def __init__(self, driver: Driver, case: Case, mask_kernels: dict[str, Kernel]):
        self.driver, self.case = driver, case
        rows, heads, kv_heads = case.seq, case.heads, case.kv_heads
        qk, v = case.head_dim, case.value_dim
        self.padded = padded = -(-rows // 64) * 64
        self.buffers: list[Buffer] = []
        lo = case.row_ranges()[0].astype(np.int32)
        self.lo_host = lo
        rng = np.random.default_rng(0)

        def normal(heads: int, dim: int) -> Buffer:
            drawn = rng.standard_normal((rows, heads, dim), np.float32)
            return self._new((rows, heads, dim), np.uint16).set(bfloat16(drawn))

        half, floats = (functools.partial(self._new, dtype=t) for t in (np.uint16, np.float32))
        ints = functools.partial(self._new, dtype=np.int32)
        put = lambda host: ints(host.shape).set(host)  # noqa: E731
        blocks, tiles = padded // 64, -(-rows // 128)
        self.given: dict[str, Any] = {
            "query": normal(heads, qk), "key": normal(kv_heads, qk), "value": normal(kv_heads, v),
            "dout": normal(heads, v), "out": half((rows, heads, v)), "dq": half((rows, heads, qk)),
            "dk": half((rows, kv_heads, qk)), "dv": half((rows, kv_heads, v)),
            "tq": normal(heads, qk), "tk": normal(kv_heads, qk), "tv": normal(kv_heads, v),
            "tout": half((rows, heads, v)), "tlse": floats((heads * rows,)),
            "lse": floats((heads * rows,)), "delta": floats((heads * padded,)),
            "lse2": floats((heads * padded,)), "dq_sum": floats((heads * padded * qk,)),
            "lo": ints((padded,)), "hi": ints((padded,)), "counter": ints((1,)),
            "kv_start": put(lo), "kv_end": put(np.arange(1, rows + 1, dtype=np.int32)),
            "q_blocks": ints((5 * blocks,)), "kv_blocks": ints((4 * blocks,)),
            "q_order": ints((tiles,)), "q_order_192": ints((-(-rows // 192),)),
            "kv_order": ints((tiles,)),
            "scale": qk**-0.5, "mask_mode": 0, "batch": 1, "mask_batch": 1, "has_dlse": 0,
            "clear_dq": 1,
            "q_len": rows, "kv_len": rows, "heads": heads, "kv_heads": kv_heads,
            "row_heads": heads,
        }  # fmt: skip
        # Not read without a segment check or dlse.
        self.given |= dict.fromkeys(("q_ids", "kv_ids", "q_pos", "kv_pos"), self.given["kv_start"])
        self.given["dlse"] = self.given["lse"]
        self.given |= NO_OPTIONS | {"qk_dim": qk, "v_dim": v}
        self.row_sums = floats((2 * heads * rows,))  # for bias kernels, whose LSE has two parts
        self.ranges = dict.fromkeys(("lo", "hi", "segment_checked"))
        self.mask = self._mask_launches(mask_kernels)
        for launch in self.mask.values():
            launch()
        driver.synchronize()

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        self.buffers.append(Buffer(self.driver, shape, dtype))
        return self.buffers[-1]

    def _mask_launches(self, kernels: dict[str, Kernel]) -> dict[str, Launch]:
        """The launches that build a mask, in order."""
        rows = self.case.seq
        slots = max(1024, 2 << (rows - 1).bit_length())
        ints = functools.partial(self._new, dtype=np.int32)
        put = lambda host: ints(host.shape).set(host)  # noqa: E731
        ids = put(np.repeat(np.arange(self.case.documents), self.case.lengths).astype(np.int32))
        positions = put(np.arange(rows, dtype=np.int32) - self.lo_host)
        documents = self.given | {
            "q_ids": ids, "kv_ids": ids, "q_pos": positions, "kv_pos": positions,
            "workspace": ints((5 * slots + rows + -(-rows // 1024),)), "compare_positions": 1,
            "table_size": slots, "table_shift": 33 - slots.bit_length(),
            "search_steps": rows.bit_length(),
            **{name: ints((rows,)) for name in ("lo", "hi", "segment_checked")},
        }  # fmt: skip
        bounds = self.given | {"segment_checked": put(np.zeros(rows, np.int32))}
        sizes = {"blocks_rows": -(-rows // 64), "blocks_keys": -(-rows // 64),
            "blocks_order": -(-rows // 128)}  # fmt: skip
        launches = {}
        for name, kernel in kernels.items():
            grid = (-(-sizes.get(name, rows) // kernel.meta["block"]),)
            launches[name] = kernel.bind(grid, documents if "documents" in name else bounds)
        self.ranges = {name: documents[name] for name in ("lo", "hi", "segment_checked")}
        return launches

    def check_mask(self) -> None:
        """Asserts that the row ranges from ids and positions match the document lengths."""
        lo, hi, segment_checked = (
            self.ranges[name].get() for name in ("lo", "hi", "segment_checked")
        )
        assert (lo == self.lo_host).all() and not segment_checked.any()
        assert (hi == np.arange(1, self.case.seq + 1)).all()

    def grid(self, kernel: Kernel) -> int:
        name, block = plain(kernel.meta["kernel"]), kernel.meta["block"]
        rows, heads, kv_heads = self.case.seq, self.case.heads, self.case.kv_heads
        if name in ("backward_preprocess", "backward_postprocess", "backward_postprocess_sm80"):
            return heads * self.padded // block
        if name == "backward_delta":
            return heads * -(-rows // block)
        if name == "backward_dbias":
            own = kernel.meta["constants"]
            return -(-rows // own["BLOCK_M"]) * -(-rows // own["BLOCK_N"])
        if name in ("backward_sm90", "backward_sm80", "backward_dkdv_sm90", "backward_dkdv"):
            return kv_heads * -(-rows // 128) * (128 // block)
        if name == "backward_dkdv_sm90_parts":
            return kv_heads * -(-rows // 128) * (128 // block) * 2
        if name in ("forward", "forward_tangent", "backward_dq", "backward_dq_sm90_parts"):
            return heads * -(-rows // 128) * (128 // block)
        return heads * -(-rows // block)

    def launch(self, kernel: Kernel, **other: int) -> Launch:
        """The launch of one kernel in this case. Persistent kernels, which take tiles from the
        counter, run at most one program per multiprocessor."""
        given, grid = self.given | other, self.grid(kernel)
        if "bias" in kernel.meta["kernel"]:
            given["lse"] = self.row_sums
        if kernel.meta["kernel"] == "backward_dbias":  # one bias array for all heads
            if "dbias" not in self.given:
                self.given["dbias"] = self._new((self.case.seq, self.case.seq), np.uint16)
            given |= {"dbias": self.given["dbias"], "bias_axes": 4}
        if kernel.meta["block"] == 192:
            given["q_order"] = given["q_order_192"]
        if not any(p["name"] == "counter" for p in kernel.meta["params"]):
            return kernel.bind((grid,), given)
        run = kernel.bind((min(grid, self.driver.multiprocessors),), given)
        counter = given["counter"]

        def clear_and_run() -> None:
            self.driver.call("cuMemsetD32Async", counter.pointer, 0, 1, None)
            run()

        return clear_and_run

    def poison(self, names: Iterable[str]) -> None:
        for name in names:
            self.given[name].fill(0xFF)

    def results(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The results on the host as float32; for long cases every n-th row."""
        step = -(-self.case.seq // SAMPLED) | 1
        found = {}
        for name in names:
            host = self.given[name].get()
            host = host.reshape(self.case.heads, -1).T if name in ("lse", "tlse") else host
            found[name] = float32(np.ascontiguousarray(host[::step]))
        return found

    def forward_error(self) -> float:
        """The largest relative error of the output in 8 random rows, compared with float64."""
        case = self.case
        q, k, v, out = (self.given[n].get() for n in ("query", "key", "value", "out"))
        group, worst = case.heads // case.kv_heads, 0.0
        for i in np.random.default_rng(1).choice(case.seq, 8, replace=False):
            span = slice(self.lo_host[i], i + 1)
            keys, values, rows, got = (float32(x).astype(np.float64) for x in (k[span], v[span],
                q[i], out[i]))  # fmt: skip
            for h in range(case.heads):
                s = keys[:, h // group] @ rows[h] * self.given["scale"]
                p = np.exp(s - s.max())
                o = p @ values[:, h // group] / p.sum()
                worst = max(worst, float(np.linalg.norm(got[h] - o) / np.linalg.norm(o)))
        return worst

    def free(self) -> None:
        for buffer in self.buffers:
            buffer.free()


def difference(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest relative difference of any result; NaN if any is NaN."""
    with np.errstate(all="ignore"):
        each = [np.linalg.norm(got[n] - want[n]) / np.linalg.norm(want[n]) for n in want]
    return float(np.max(each))
