"""Inputs for Gluon kernels on the CPU (gluon_threads.py): random calls for a mask, with float64
results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import packax
import trees
from cases import ids_of, random_map
from mask_checks import kernel_operands

HALF = ml_dtypes.bfloat16


IDS = ids_of((0, 70), (1, 3), (2, 197), (3, 1), (4, 100), (-1, 29))
TWO_ROWS = np.stack([IDS, ids_of((-1, 40), (1, 300), (2, 60))])
MASKS = {
    "causal": (packax.causal(), 300, 300),
    "documents": (packax.causal() & packax.documents(IDS), 400, 400),
    "two rows": (packax.causal() & packax.documents(TWO_ROWS), 400, 400),
    "window": (packax.sliding_window(100, 0), 400, 400),
    "ids that come back": (packax.documents(np.arange(260, dtype=np.int32) // 50 % 3), 260, 260),
    "longer keys": (packax.full(), 70, 333),
    "longer queries": (packax.causal(), 333, 70),
    "one row": (packax.full(), 1, 130),
}


TREES = {
    name: (trees.expression(tree, joined), len(tree.ids), len(tree.ids))
    for name, tree, joined in (
        ("prompt and answers", trees.prompt_and_answers(170, 3, 90), "causal"),
        ("deep", trees.of_lengths([130, 70, 1, 100, 60, 80], [-1, 0, 1, 1, 0, -1]), "alone"),
    )
}


class Problem:
    """Random inputs of one call, and its results in float64."""

    def __init__(
        self,
        case: str,
        dims: tuple[int, int],
        option: str = "",
        heads: int = 2,
        kv_heads: int = 1,
        blocks: tuple[int, ...] = (),
        batch: int = 1,
        sinks: np.ndarray | None = None,
    ):
        """`option`: the suffix of the kernels' names. `blocks`: the block sizes of a block mask,
        for rows and keys, and its number of heads. `batch`: of a mask with one batch row. `sinks`:
        (1 or batch, heads), which only the forward takes."""
        expression, self.q_len, self.kv_len = (MASKS | TREES)[case]
        self.heads, self.kv_heads, (self.qk_dim, self.v_dim) = heads, kv_heads, dims
        self.rng = np.random.default_rng()
        if blocks:
            *block_size, block_mask_heads = blocks
            lengths = self.q_len, self.kv_len
            expression &= packax.masks.block_sparse(
                *random_map(None, block_size, 0.4, (1, block_mask_heads), lengths)
            )
        mask = packax.create_attention_mask(expression, q_len=self.q_len, kv_len=self.kv_len)
        self.mask = kernel_operands(mask)
        self.mask_mode = mask.mask_mode
        attends = np.asarray(expression.as_array(self.q_len, self.kv_len))
        self.attends = attends.reshape(-1, attends.shape[-3] if blocks else 1, *attends.shape[-2:])
        self.batch = max(len(self.attends), batch)
        self.attends = np.broadcast_to(self.attends, (self.batch, *self.attends.shape[1:]))
        self.seed = int(self.rng.integers(1 << 30))
        self.scale = float(1.3 * self.qk_dim**-0.5)
        self.option = option
        self.sinks = sinks
        self.extra: dict[str, Any] = {}
        if option == "_soft_cap":
            self.extra = {"soft_cap": 2.0}
        if option == "_alibi":
            self.extra = {"slopes": np.geomspace(0.02, 0.3, heads).astype(np.float32)}
        if option == "_block_lists":
            of = *mask.block_size, mask.block_mask.shape[1]
            sizes = dict(zip(("q_block", "kv_block", "block_mask_heads"), of, strict=True))
            self.extra = {"block_mask_batch": 1, "block_mask": self.mask["block_mask"], **sizes}
        self.bias = None
        if option in ("_bias", "_float32_bias"):
            self.bias = self.random_bias()
        if option == "_float32_bias":
            self.bias = self.bias.astype(np.float32)
        if option == "_dbias":
            self.bias = self.random_bias((self.batch, heads))
        if self.bias is not None:
            axes = sum(1 << i for i in range(3) if self.bias.shape[i] > 1)
            self.extra = {"bias_axes": axes | self.batch // len(self.bias) << 3}
        self.query, self.dout = (self.draw(self.q_len, heads, dim) for dim in dims)
        self.key, self.value = (self.draw(self.kv_len, kv_heads, dim) for dim in dims)
        # The content of keys that no row attends to, and of rows without a key, must not matter.
        self.key[np.broadcast_to(~self.attends.any((1, 2)), self.key.shape[:2])] = 1e30
        idle = np.broadcast_to(~self.attends.any((1, 3)), self.query.shape[:2])
        self.query[idle], self.dout[idle] = 1e30, 1e30
        self.want, self.plain = self.oracle(), self.oracle(HALF)

    def draw(self, length: int, heads: int, dim: int) -> np.ndarray:
        return self.rng.standard_normal((self.batch, length, heads, dim)).astype(HALF)

    def random_bias(self, planes: tuple[int, ...] = ()) -> np.ndarray:
        """(groups, 1 or heads, q_len, kv_len). Some rows and some elements of others are -inf,
        -1e9 or the lowest finite number."""
        groups = [n for n in range(1, self.batch + 1) if self.batch % n == 0]
        planes = planes or tuple(int(self.rng.choice(x)) for x in (groups, (1, self.heads)))
        bias = self.rng.standard_normal((*planes, self.q_len, self.kv_len)).astype(HALF)
        least = ml_dtypes.finfo(HALF).min
        for number in (-np.inf, -1e9, least):
            bias[self.rng.random(bias.shape) < 0.05] = number
            bias[:, :, self.rng.integers(self.q_len)] = number
        return bias

    def oracle(self, half: Any = float) -> dict[str, np.ndarray]:
        """Results in float64, with P, dS and the results rounded to `half`. As a yardstick this is
        tighter than oracle.py's, which computes the logits in that dtype, too."""
        tensors = self.query, self.key, self.value, self.dout
        q, k, v, do = (
            np.where(np.abs(x.astype(float)) > 1e29, 0, x.astype(float)) for x in tensors
        )
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
        s, dtanh = self.logits(np.einsum("bqhd,bkhd->bhqk", q, k) * self.scale)
        s = np.where(self.attends, s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), -1e300)
        p = np.exp(s - top)
        attended = p.sum(-1, keepdims=True) > 0
        sinks = -np.inf if self.sinks is None else self.sinks[..., None, None].astype(float)
        larger = np.where(attended, np.maximum(top, sinks), top)
        p = p * np.exp(top - larger)
        with np.errstate(invalid="ignore", over="ignore"):
            of_sinks = np.where(sinks == larger, 1, np.exp(sinks - larger))
        total = p.sum(-1, keepdims=True) + np.where(attended, of_sinks, 0)
        top = larger
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
        p = p / np.where(total > 0, total, 1)
        rounded = p.astype(half).astype(float)
        out = np.einsum("bhqk,bkhd->bqhd", rounded, v)
        delta = np.einsum("bqhd,bqhd->bhq", do, out)
        dp = np.einsum("bqhd,bkhd->bhqk", do, v) - delta[..., None]
        ds = (p * dtanh * dp).astype(half).astype(float)
        # Above head dim 128, and with a bias, dK uses the rounded P; above 256 dQ also
        # does (docs/guide/numerics.md).
        dim = max(self.qk_dim, self.v_dim)
        of_rounded = (rounded * dtanh * dp).astype(half).astype(float)
        ds_of_keys = of_rounded if dim > 128 or self.bias is not None else ds
        ds_of_rows = of_rounded if dim > 256 else ds
        back = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)  # noqa: E731
        results = {
            "out": out, "dq": np.einsum("bhqk,bkhd->bqhd", ds_of_rows, k) * self.scale,
            "dk": back(np.einsum("bhqk,bqhd->bkhd", ds_of_keys, q)) * self.scale,
            "dv": back(np.einsum("bhqk,bqhd->bkhd", rounded, do)),
            "dbias": ds_of_keys,
        }  # fmt: skip
        if self.bias is not None:  # summed without rounding dS
            groups, heads = self.bias.shape[:2]
            apart = (groups, self.batch // groups, heads, self.heads // heads, *ds.shape[2:])
            results["shared dbias"] = (p * dtanh * dp).reshape(apart).sum((1, 3))
        results = {name: x.astype(half).astype(float) for name, x in results.items()}
        with np.errstate(divide="ignore"):
            log = np.log(total[..., 0])
        return results | {"lse": lse, "delta": delta, "top": s.max(-1), "log": log}

    def with_tangents(self, first: float | None = None) -> None:
        """Draws `tangents` of query, key and value, and adds the results `tout` and `tlse`.
        `first`: the first column of the query's tangent."""
        shapes = (self.q_len, self.heads), *((self.kv_len, self.kv_heads),) * 2
        dims = self.qk_dim, self.qk_dim, self.v_dim
        self.tangents = [self.draw(*shape, dim) for shape, dim in zip(shapes, dims, strict=True)]
        if first is not None:
            self.tangents[0][..., 0] = first
        q, k, v, tq, tk, tv = (
            np.where(np.abs(x.astype(float)) > 1e29, 0, x.astype(float))
            for x in (self.query, self.key, self.value, *self.tangents)
        )
        for x, of in zip(self.tangents, (self.query, self.key, self.key), strict=True):
            x[(of == HALF(1e30)).all((2, 3))] = 1e30
        group = self.heads // self.kv_heads
        k, v, tk, tv = (np.repeat(x, group, 2) for x in (k, v, tk, tv))
        s, ts = (
            sum(np.einsum("bqhd,bkhd->bhqk", a, b) for a, b in pairs) * self.scale
            for pairs in ([(q, k)], [(tq, k), (q, tk)])
        )
        lse = np.where(np.isneginf(self.want["lse"]), np.inf, self.want["lse"])[..., None]
        p = np.where(self.attends, np.exp(np.minimum(s - lse, 0)), 0)
        tlse = (p * ts).sum(-1)
        dp = p * (ts - tlse[..., None])
        for results, half in ((self.want, float), (self.plain, HALF)):
            a, b = (x.astype(half).astype(float) for x in (p, dp))
            tout = np.einsum("bhqk,bkhd->bqhd", a, tv) + np.einsum("bhqk,bkhd->bqhd", b, v)
            results |= {"tout": tout.astype(half).astype(float), "tlse": tlse}

    def logits(self, s: np.ndarray) -> tuple[np.ndarray, Any]:
        """The logits and their derivative by s."""
        if "soft_cap" in self.extra:
            tanh = np.tanh(s / self.extra["soft_cap"])
            return tanh * self.extra["soft_cap"], 1 - tanh**2
        if self.bias is not None:
            # In float32, as in the kernels: added to -1e9, a score is rounded away.
            bias = np.repeat(self.bias, self.batch // len(self.bias), 0)
            added = s.astype(np.float32) + bias.astype(np.float32)
            return added.astype(float), 1.0
        if "slopes" in self.extra:
            far = np.abs(np.arange(self.q_len)[:, None] - np.arange(self.kv_len))
            return s - self.extra["slopes"][:, None, None].astype(float) * far, 1.0
        return s, 1.0

    def sizes(self) -> dict[str, Any]:
        return {
            "mask_mode": self.mask_mode, "batch": self.batch,
            "mask_batch": len(self.mask["kv_start"]), "q_len": self.q_len,
            "kv_len": self.kv_len, "heads": self.heads, "kv_heads": self.kv_heads, **self.extra,
        }  # fmt: skip

    def sinks_or_none(self) -> dict[str, Any]:
        """The kernel arguments of the sinks; without sinks, the array must not be read."""
        if self.sinks is None:
            return {"sinks": np.full(1, np.nan, np.float32), "sink_batch": 0}
        return {"sinks": self.sinks, "sink_batch": len(self.sinks)}

    def masks(self, *names: str) -> dict[str, np.ndarray]:
        """The mask's arrays by name; block lists are included only if the mask has them."""
        return {name: self.mask[name] for name in names if name in self.mask}

    def check(self, name: str, got: np.ndarray) -> None:
        """The error's norm is at most twice that of plain attention; its maximum is at most four
        times, because it depends on a single number."""
        want, plain = self.want[name], self.plain[name]
        for norm, times in ((np.linalg.norm, 2), (lambda x: np.abs(x).max(), 4)):
            error, bound = norm(got.astype(float) - want), times * norm(plain - want)
            assert error <= bound + 1e-6, f"{name}: {error}, accepted {bound}"


def poisoned(x: np.ndarray) -> np.ndarray:
    return np.full(x.shape, np.nan, HALF)


class Statistics:
    """The results of backward_preprocess."""

    def __init__(self, p: Problem, columns: int = 0):
        """`columns`: of the sum of dQ, if the kernel has more than the call."""
        padded = -(-p.q_len // 64) * 64

        def whole(x: np.ndarray, other: float) -> np.ndarray:
            widths = [(0, 0)] * (x.ndim - 1) + [(0, padded - p.q_len)]
            return np.pad(x, widths, constant_values=other)

        lse2 = np.where(np.isneginf(p.want["lse"]), np.inf, p.want["lse"]) / np.log(2)
        self.lse2 = whole(lse2.astype(np.float32), np.inf)
        self.delta = whole(p.want["delta"].astype(np.float32), 0)
        if p.bias is not None:
            top = p.want["top"]
            self.top = whole(np.where(np.isneginf(top), 0, top).astype(np.float32), 0)
            lse2 = np.where(np.isneginf(top), np.inf, p.want["log"] / np.log(2))
            self.lse2 = whole(lse2.astype(np.float32), np.inf)
        self.lo, self.hi = whole(p.mask["kv_start"], 0), whole(p.mask["kv_end"], 0)
        groups = (columns or p.qk_dim) // 32
        self.dq_sum = np.zeros((p.batch, p.heads, padded // 64, groups, 64, 32), np.float32)

    def dq(self, p: Problem) -> np.ndarray:
        rows = self.dq_sum.transpose(0, 2, 4, 1, 3, 5)
        rows = rows.reshape(p.batch, rows.shape[1] * 64, p.heads, -1)
        return rows[:, : p.q_len, :, : p.qk_dim] * p.scale
