"""Runs the kernels of a call of attention on the CPU, on the operands of a `Call` (calls.py):
Triton's in its interpreter, Gluon's in gluon_threads.py.

As in C++, an argument of a kernel is the array or number with its name. Keys that no row attends
to, and rows without a key, hold garbage, and results are filled with what no kernel may leave.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import dense
import jax
import numpy as np
import packax
from aot_modules import arguments_of, table
from calls import RATE, Call
from gluon_language import launch as launch_gluon
from gluon_threads import TensorMap
from kernel_sets import BACKWARD, grid_of
from mask_checks import kernel_operands
from triton_launch import launch

GARBAGE = 1e30
TILES = {"forward": (128, 64), "backward_dkdv": (64, 128), "backward_dq": (64, 32)}
TILES |= {"forward_tangent": (64, 64), "backward_dbias": (64, 64)}
COMPILED = (16, 32, 64, 128, 256, 512)
PROGRAMS = 3  # of persistent kernels, which take several tiles each
UNREAD = np.full(1, np.nan, np.float32)  # in place of an absent array
TANGENTS = {"tq": "query", "tk": "key", "tv": "value"}


def unwritten(shape: Any, dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def kernels_of(family: str) -> list[str]:
    return [f"backward_{name}" for name in BACKWARD[family].split()]


class Simulation:
    """A call, its reference, and the arrays and numbers of its kernels, by name."""

    def __init__(self, call: Call, seed: int = 0, tiles: Any = None, **changed: Any) -> None:
        """`changed`: operands in place of those that the call draws. `tiles`: in place of TILES."""
        self.call, self.seed, self.tiles = call, seed, TILES | (tiles or {})
        self.a = call.arrays(seed) | changed
        self.allowed = call.allowed(self.a)
        q_len, kv_len = call.sizes()
        expression = call.expression(self.a)
        mask = packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)
        batch, _, heads, qk_dim = self.a["query"].shape
        kv_heads, v_dim = self.a["value"].shape[2:]
        self.dtype = self.a["query"].dtype
        idle_rows = ~np.broadcast_to(self.allowed, (batch, heads, q_len, kv_len)).any(3)
        idle_keys = np.broadcast_to(~self.allowed.any((1, 2)), (batch, kv_len))
        self.idle_rows = idle_rows.swapaxes(1, 2)
        for name, idle in (("query", self.idle_rows), ("dout", self.idle_rows),
                ("key", idle_keys), ("value", idle_keys)):  # fmt: skip
            self.a[name] = self.a[name].copy()
            self.a[name][idle] = 0
        self.true, self.plain = call.references(self.a)
        arrays = kernel_operands(mask)
        for name in ("query", "key", "value", "dout"):
            idle = self.idle_rows if name in ("query", "dout") else idle_keys
            arrays[name] = self.a[name].copy()
            arrays[name][idle] = GARBAGE
            if mask.block_size and name in ("key", "value"):  # blocks of 64 that are not read
                unread = [idle[:, n : n + 64].all(1) for n in range(0, kv_len, 64)]
                unread = np.repeat(np.stack(unread, 1), 64, 1)[:, :kv_len]
                arrays[name][unread] = np.nan
        f: dict[str, Any] = {
            "batch": batch, "mask_batch": len(arrays["kv_start"]), "q_len": q_len, "kv_len": kv_len,
            "heads": heads, "kv_heads": kv_heads, "row_heads": heads, "qk_dim": qk_dim,
            "v_dim": v_dim, "mask_mode": mask.mask_mode, "scale": float(qk_dim**-0.5),
            "soft_cap": call.soft_cap or 0.0, "scales_batch": 0, "bias_batch": 0,
            "block_mask_batch": 1, "block_mask_heads": 0, "q_block": 1, "kv_block": 1,
            "bias_kind": 0, "bias_axes": 0, "dropout_threshold": 0, "dropout_rows_batch": 1,
            "inverse_keep": 1.0, "sink_batch": 0, "has_dlse": 1, "has_score_grads": 1,
            "clear_dq": 1, "dbias_parts": 2, "choice": 0,
        }  # fmt: skip
        if "scale" in self.a:
            arrays["scales"], f["scales_batch"] = np.float32([self.a["scale"]]), 1
            f["scale"] = float(self.a["scale"])
        if "slopes" in self.a:
            arrays["slopes"] = np.broadcast_to(self.a["slopes"], (batch, heads)).copy()
            index = (np.arange(n, dtype=np.int32)[None] for n in (q_len, kv_len))
            places = call.places(self.a) or index
            for name, x in zip(("q_bias_pos", "kv_bias_pos"), places, strict=True):
                arrays[name] = np.broadcast_to(x, (batch, x.shape[1])).copy()
            f["bias_batch"] = batch
        if "sinks" in self.a:
            arrays["sinks"], f["sink_batch"] = self.a["sinks"].reshape(-1, heads), 1
        if mask.block_size:
            f["block_mask_batch"], f["block_mask_heads"] = mask.block_mask.shape[:2]
            f["q_block"], f["kv_block"] = mask.block_size
        if "bias" in self.a:
            bias = self.a["bias"]
            f["bias_kind"] = 2 if bias.dtype == np.float32 else 1
            own = sum((n > 1) << axis for axis, n in enumerate(bias.shape[:3]))
            f["bias_axes"] = own | batch // len(bias) << 3
            arrays["bias"], f["dbias"] = bias, bias.shape
            arrays["dbias"] = unwritten(bias.shape, bias.dtype)
            arrays["dbias_sums"] = unwritten((f["dbias_parts"], *bias.shape), np.float32)
        if "seed" in self.a:
            streams = np.empty((batch, heads, 4), np.uint32)
            key = jax.random.key(self.a["seed"])
            streams[..., :2] = np.asarray(jax.random.bits(key, (2,), np.uint32))
            streams[..., 2], streams[..., 3] = np.arange(batch)[:, None], np.arange(heads)
            arrays["dropout_streams"] = streams.view(np.int32)
            arrays["dropout_rows"] = np.arange(q_len, dtype=np.int32)[None]
            f["dropout_threshold"] = int(np.uint32(round(RATE * 2**32)).view(np.int32))
            f["inverse_keep"] = 1 / (1 - RATE)
        self.two = "bias" in self.a or "seed" in self.a
        rows = (batch, heads, q_len)
        arrays["out"] = unwritten((batch, q_len, heads, v_dim), self.dtype)
        arrays["lse"] = unwritten((*rows, 2) if self.two else rows, np.float32)
        for name in ("row_max", "delta", "row_delta", "tlse"):
            arrays[name] = unwritten(rows, np.float32)
        arrays["score_grads"] = unwritten((batch, heads, 2, q_len), np.float32)
        for name, of in (("dq", "query"), ("dk", "key"), ("dv", "value"), ("tout", "out")):
            arrays[name] = unwritten(arrays[of].shape, self.dtype)
        arrays["dlse"] = np.where(idle_rows, np.nan, self.a["dlse"]).astype(np.float32)
        arrays["counter"] = np.zeros(1, np.int32)
        self.arrays, self.fields = arrays, f

    # --- Launches

    def constants(self, kernel: str) -> dict[str, int]:
        """Of a Triton kernel."""
        of = [name for name in self.tiles if kernel.startswith(name)]
        rows, keys = self.tiles[max(of, key=len)] if of else (0, 0)
        exact = kernel in ("forward", "backward_dkdv", "backward_dq", "forward_tangent")
        exact |= kernel == "backward_delta"
        qk_dim, v_dim = (
            n if exact else min(x for x in COMPILED if x >= n)
            for n in (self.fields["qk_dim"], self.fields["v_dim"])
        )
        found = {"QK_DIM": qk_dim, "V_DIM": v_dim, "BLOCK_M": rows, "BLOCK_N": keys}
        found["STAGES"] = 1 if kernel.endswith("bias") else 2  # as in the table
        found |= {"FLOAT32_PRODUCTS": 1, "ROWS": 32, "LSE_IN_TWO": int(self.two)}
        return {name: x for name, x in found.items() if name in arguments_of(kernel)}

    def triton(self, kernel: str) -> None:
        """Triton's interpreter has no bfloat16: tensors are float32 or float16."""
        constants = self.constants(kernel)
        block = constants.get("BLOCK_N" if "dkdv" in kernel else "BLOCK_M", 32)
        names = [name for name in arguments_of(kernel) if not name.isupper()]
        absent = {
            n: self.arrays["kv_start"] if table.POINTERS.get(n) == "i32" else UNREAD for n in names
        }
        given = absent | self.fields | self.arrays
        values = [given[name] for name in names]
        launch(kernel, tuple(grid_of(kernel, self.fields, block)), *values, **constants)

    def gluon(self, variant: Any, **changed: Any) -> None:
        """A variant of the table, with other arrays or constants."""
        kernel, values = variant.kernel, self.fields | self.arrays | changed
        if variant.block == 192:  # the tile size determines the order
            values["q_order"] = values["q_order_192"]
        arguments = {}
        for name in arguments_of(kernel, variant.source):
            if name.isupper():
                continue
            x = values.get(name, UNREAD)
            if name in table.TENSOR_MAPS.get(kernel, {}):
                lines = name in ("lse2", "delta", "lo", "hi", "top")
                shape = (1, 1, 1, -1) if lines else (-1, 1, *x.shape[2:])
                whole = lines or name in ("bias", "dbias")
                x = TensorMap(x.reshape(shape) if whole else x.transpose(0, 2, 1, 3))
            arguments[name] = x
        if "sinks" in arguments and "sinks" not in values:
            arguments["sink_batch"] = 0
        constants = dict(variant.constants)
        constants |= {name: x for name, x in changed.items() if name in constants}
        programs = grid_of(kernel, self.fields, variant.block)[0]
        if "counter" in arguments:
            programs = PROGRAMS
            self.arrays["counter"][:] = 0
        function = table.function(kernel, variant.source)
        launch_gluon(variant.source, function, programs, arguments | constants, self.seed)

    def prepare(self, columns: int = 0) -> None:
        """What backward_preprocess computes, from the forward's results or the reference."""
        f, want = self.fields, self.true
        if np.isnan(self.arrays["out"].astype(np.float32)).all():
            self.arrays["out"] = np.ascontiguousarray(want["out"], self.dtype)
            if not self.two:
                self.arrays["lse"] = want["lse"].astype(np.float32)
        dlse = np.where(np.isneginf(want["lse"]), 0, self.a["dlse"])
        delta = (want["out"] * self.a["dout"].astype(float)).sum(-1).swapaxes(1, 2) - dlse
        lse, top = self.arrays["lse"], None
        if self.two:
            top, lse = lse[..., 0], np.where(np.isneginf(lse[..., 0]), np.inf, lse[..., 1])
            top = np.where(np.isneginf(top), 0, top)
            if "bias" not in self.a:  # with dropout alone
                top, lse = None, top + lse
        lse2 = np.where(np.isneginf(lse), np.inf, lse) / np.log(2)
        found = {"lse2": (lse2, np.inf), "delta": (delta, 0), "lo": (self.arrays["kv_start"], 0)}
        found |= {"hi": (self.arrays["kv_end"], 0)} | ({} if top is None else {"top": (top, 0)})
        padded = -(-f["q_len"] // 64) * 64
        for name, (x, other) in found.items():
            widths = [(0, 0)] * (x.ndim - 1) + [(0, padded - f["q_len"])]
            x = np.pad(x, widths, constant_values=other)
            self.arrays[name] = x.astype(np.int32 if name in ("lo", "hi") else np.float32)
        groups = (columns or f["qk_dim"]) // 32
        shape = (f["batch"], f["heads"], padded // 64, groups, 64, 32)
        self.arrays["dq_sum"] = np.zeros(shape, np.float32)

    def summed_dq(self) -> np.ndarray:
        """What backward_postprocess makes of the sum."""
        rows = self.arrays["dq_sum"].transpose(0, 2, 4, 1, 3, 5)
        rows = rows.reshape(rows.shape[0], rows.shape[1] * 64, rows.shape[3], -1)
        f = self.fields
        return rows[:, : f["q_len"], :, : f["qk_dim"]] * np.float32(f["scale"])

    # --- Checks

    def log_sum_exp(self) -> np.ndarray:
        lse = self.arrays["lse"]
        if not self.two:
            return lse
        top, log = lse[..., 0], lse[..., 1]
        np.testing.assert_array_equal(top == -np.inf, log == np.finfo(np.float32).max)
        return np.where(top == -np.inf, top, top + np.where(top == -np.inf, 0, log))

    def check_forward(self, top: bool = False) -> None:
        found = {"out": self.arrays["out"], "lse": self.log_sum_exp()}
        if top:
            found["top"] = self.arrays["row_max"].max(-1)
        self.check(found)
        empty = np.isneginf(self.true["lse"]).swapaxes(1, 2)
        assert not self.arrays["out"][empty].any()

    def check_backward(self, names: Iterable[str] = ("dq", "dk", "dv"), **found: Any) -> None:
        long = {"dq": "dquery", "dk": "dkey", "dv": "dvalue"}
        found |= {long.get(name, name): self.arrays[name] for name in names}
        self.check(found)
        empty = np.isneginf(self.true["lse"]).swapaxes(1, 2)
        assert "dquery" not in found or not found["dquery"][empty].any()

    def check(self, found: dict[str, Any]) -> None:
        # In float32, exp2 of logits in units of log 2 has up to four times the error of exp.
        factor = self.call.factor if self.call.dtype == "float32" else 2
        # The sums over all pairs are few numbers, whose plain error may be small by luck.
        sums = {name: found.pop(name) for name in ("dscale", "dslopes") if name in found}
        wrong = dense.close(found, self.true, self.plain, factor)
        wrong += dense.close(sums, self.true, self.plain, 2 * factor)
        assert not wrong, wrong

    def score_grads(self) -> dict[str, Any]:
        """The gradients of scale and slopes."""
        sums = self.arrays["score_grads"].sum(-1, dtype=np.float64)
        found = {"dscale": np.float32(sums[:, :, 0].sum())} if "scale" in self.a else {}
        if "slopes" in self.a:
            found["dslopes"] = sums[:, :, 1].sum(0).astype(np.float32)
        return found

    # --- Tangents

    def draw_tangents(self, present: Iterable[str] = TANGENTS, **changed: Any) -> None:
        """Tangents of the operands; out and lse are those of the reference. Sets `slope`, the
        tangents of out and lse by a central difference of the reference."""
        rng = np.random.default_rng(self.seed)
        step, sides = 1e-4, []
        along = {n: rng.standard_normal(self.a[of].shape) for n, of in TANGENTS.items()}
        along = {n: x.astype(self.dtype) for n, x in (along | changed).items() if n in present}
        operands, options = self.call.operands(self.a), self.call.options(self.a)
        for sign in (1, -1):
            moved = {
                TANGENTS[n]: operands[TANGENTS[n]].astype(float) + sign * step * x.astype(float)
                for n, x in along.items()
            }
            sides.append(dense.dense(operands | moved, self.allowed, **options))
        with np.errstate(invalid="ignore"):
            slope = {n: (sides[0][n] - sides[1][n]) / (2 * step) for n in ("out", "lse")}
        self.slope = slope | {"lse": np.where(np.isneginf(self.true["lse"]), 0, slope["lse"])}
        for name, of in TANGENTS.items():
            self.fields[f"has_{name}"] = int(name in along)
            self.arrays[name] = np.full(1, np.nan, self.dtype)
            if name in along:
                idle = np.isin(
                    self.arrays[of].astype(np.float32), [np.float32(self.dtype.type(GARBAGE))]
                )
                self.arrays[name] = np.where(idle, self.dtype.type(GARBAGE), along[name])
        empty = np.isneginf(self.true["lse"])
        out = np.where(empty.swapaxes(1, 2)[..., None], GARBAGE, self.true["out"])
        self.arrays["out"] = np.ascontiguousarray(out, self.dtype)
        self.arrays["lse"] = np.ascontiguousarray(self.true["lse"], np.float32)

    def check_tangents(self) -> None:
        half = self.dtype.itemsize == 2
        for name, of in (("tout", "out"), ("tlse", "lse")):
            got, want = self.arrays[name].astype(float), self.slope[of]
            unit = 2.0**-7 if half and name == "tout" else 5e-5
            error = np.abs(got - want)
            assert np.linalg.norm(error) <= unit * np.linalg.norm(want), name
            assert error.max() <= 4 * unit * np.abs(want).max(), name


@functools.cache
def variant_of(kernel: str, arch: str, dims: tuple[int, int]) -> Any:
    """The 16-bit variant with the smallest head dims that cover these."""
    built = [x for x in table.variants((arch,), ("bf16",)) if x.kernel == kernel]
    built = [x for x in built if x.qk_dim >= dims[0] and x.v_dim >= dims[1]]
    return min(built, key=lambda x: (x.qk_dim + x.v_dim, x.driver))
