"""The Hopper kernels on the CPU (gluon_threads.py), against float64.

Guards against barriers that wait for ever or let go too early, tiles read before they are there or
after they are gone, blocks that are left out or met twice, and masks; not against what the compiler
makes of them. Every candidate of tune.py that is not timed yet is here, too. Every mask and every
head dim runs each time, all pairs of them exhaustively.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import ml_dtypes
import numpy as np
import packax
import pytest
from paths import AOT

sys.path.insert(0, str(AOT))

import table
import trees
from cases import ids_of, random_map
from gluon_language import launch
from gluon_threads import TensorMap
from tiers import once_each, some

SM90 = table.ARCHS["90a"]
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


OPERANDS = (
    *("q_lo", "q_hi", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks", "q_order", "q_order_192"),
    *("kv_blocks", "kv_order", "block_mask", "q_block_lists", "kv_block_lists"),
)

TREES = {
    name: (trees.expression(tree, beside), len(tree.ids), len(tree.ids))
    for name, tree, beside in (
        ("prompt and answers", trees.prompt_and_answers(170, 3, 90), "causal"),
        ("deep", trees.of_lengths([130, 70, 1, 100, 60, 80], [-1, 0, 1, 1, 0, -1]), "alone"),
    )
}


class Problem:
    """Random inputs of one call, and float64's results."""

    def __init__(
        self,
        case: str,
        dims: tuple[int, int],
        option: str = "",
        heads: int = 2,
        kv_heads: int = 1,
        blocks: tuple[int, ...] = (),
    ):
        """`option`: what the kernels' names end with. `blocks`: rows and keys of a map's blocks,
        and its heads."""
        expression, self.q_len, self.kv_len = (MASKS | TREES)[case]
        self.heads, self.kv_heads, (self.qk_dim, self.v_dim) = heads, kv_heads, dims
        self.rng = np.random.default_rng()
        if blocks:
            *block_size, block_mask_heads = blocks
            lengths = self.q_len, self.kv_len
            expression &= packax.block_sparse(
                *random_map(None, block_size, 0.4, (1, block_mask_heads), lengths)
            )
        mask = packax.create_attention_mask(expression, q_len=self.q_len, kv_len=self.kv_len)
        self.mask = dict(zip(OPERANDS, (np.array(x) for x in mask.operands()), strict=False))
        self.segment_check = mask.segment_check
        attends = np.asarray(expression.as_array(self.q_len, self.kv_len))
        self.attends = attends.reshape(-1, attends.shape[-3] if blocks else 1, *attends.shape[-2:])
        self.batch = len(self.attends)
        self.seed = int(self.rng.integers(1 << 30))
        self.scale = float(1.3 * self.qk_dim**-0.5)
        self.option = option
        self.extra: dict[str, Any] = {}
        if option == "_soft_cap":
            self.extra = {"soft_cap": 2.0}
        if option == "_alibi":
            self.extra = {"slopes": np.geomspace(0.02, 0.3, heads).astype(np.float32)}
        if option == "_block_lists":
            of = *mask.block_size, mask.block_mask.shape[1]
            sizes = dict(zip(("q_block", "kv_block", "block_mask_heads"), of, strict=True))
            self.extra = {"block_mask_batch": 1, "block_mask": self.mask["block_mask"], **sizes}
        self.query, self.dout = (self.draw(self.q_len, heads, dim) for dim in dims)
        self.key, self.value = (self.draw(self.kv_len, kv_heads, dim) for dim in dims)
        # nobody attends these keys, and these rows attend nothing: what they hold must not matter
        self.key[np.broadcast_to(~self.attends.any((1, 2)), self.key.shape[:2])] = 1e30
        idle = np.broadcast_to(~self.attends.any((1, 3)), self.query.shape[:2])
        self.query[idle], self.dout[idle] = 1e30, 1e30
        self.want, self.plain = self.oracle(), self.oracle(HALF)

    def draw(self, length: int, heads: int, dim: int) -> np.ndarray:
        return self.rng.standard_normal((self.batch, length, heads, dim)).astype(HALF)

    def oracle(self, half: Any = float) -> dict[str, np.ndarray]:
        """In float64, where P, dS and the results are rounded by `half`: as a yardstick tighter
        than oracle.py's, whose logits are of that dtype, too."""
        tensors = self.query, self.key, self.value, self.dout
        q, k, v, do = (
            np.where(np.abs(x.astype(float)) > 1e29, 0, x.astype(float)) for x in tensors
        )
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
        s, fade = self.logits(np.einsum("bqhd,bkhd->bhqk", q, k) * self.scale)
        s = np.where(self.attends, s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), -1e300)
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
        p = p / np.where(total > 0, total, 1)
        rounded = p.astype(half).astype(float)
        out = np.einsum("bhqk,bkhd->bqhd", rounded, v)
        delta = np.einsum("bqhd,bqhd->bhq", do, out)
        dp = np.einsum("bqhd,bkhd->bhqk", do, v) - delta[..., None]
        ds = (p * fade * dp).astype(half).astype(float)
        # docs/guide/numerics.md: above 128 dK is of the rounded P
        wide = max(self.qk_dim, self.v_dim) > 128
        ds_of_keys = (rounded * fade * dp).astype(half).astype(float) if wide else ds
        back = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)  # noqa: E731
        results = {
            "out": out, "dq": np.einsum("bhqk,bkhd->bqhd", ds, k) * self.scale,
            "dk": back(np.einsum("bhqk,bqhd->bkhd", ds_of_keys, q)) * self.scale,
            "dv": back(np.einsum("bhqk,bqhd->bkhd", rounded, do)),
        }  # fmt: skip
        results = {name: x.astype(half).astype(float) for name, x in results.items()}
        return results | {"lse": lse, "delta": delta}

    def logits(self, s: np.ndarray) -> tuple[np.ndarray, Any]:
        """And their derivative by s."""
        if "soft_cap" in self.extra:
            bent = np.tanh(s / self.extra["soft_cap"])
            return bent * self.extra["soft_cap"], 1 - bent**2
        if "slopes" in self.extra:
            far = np.abs(np.arange(self.q_len)[:, None] - np.arange(self.kv_len))
            return s - self.extra["slopes"][:, None, None].astype(float) * far, 1.0
        return s, 1.0

    def sizes(self) -> dict[str, Any]:
        return {
            "segment_check": self.segment_check, "batch": self.batch,
            "mask_batch": len(self.mask["q_lo"]), "q_len": self.q_len,
            "kv_len": self.kv_len, "heads": self.heads, "kv_heads": self.kv_heads, **self.extra,
        }  # fmt: skip

    def masks(self, *names: str) -> dict[str, np.ndarray]:
        """Lists of a map are in it if there is one."""
        return {name: self.mask[name] for name in names if name in self.mask}

    def check(self, name: str, got: np.ndarray) -> None:
        """Twice the error of plain attention; the largest one is of a single number, so four times
        that."""
        want, plain = self.want[name], self.plain[name]
        for norm, times in ((np.linalg.norm, 2), (lambda x: np.abs(x).max(), 4)):
            error, bound = norm(got.astype(float) - want), times * norm(plain - want)
            assert error <= bound + 1e-6, f"{name}: {error}, accepted {bound}"


def rows_of(x: np.ndarray) -> TensorMap:
    return TensorMap(x.reshape(*x.shape[:2], -1))


def line(x: np.ndarray) -> TensorMap:
    return TensorMap(x.reshape(1, 1, -1))


def constants(kernel: str, dims: tuple[int, int], changed: dict[str, int]) -> dict[str, int]:
    found = dict(table.sm90(kernel, SM90, "bf16", *dims, "13.4").constants)
    assert not set(changed) - set(found)
    return found | changed


def poisoned(x: np.ndarray) -> np.ndarray:
    return np.full(x.shape, np.nan, HALF)


def forward(p: Problem, changed: dict[str, int], few: bool = False) -> None:
    out, lse = (
        np.full((p.batch, p.q_len, p.heads, p.v_dim), np.nan, HALF),
        np.full((p.batch, p.heads, p.q_len), np.nan, np.float32),
    )
    kernel = "forward_sm90" + ("_low_occupancy" if few else p.option)
    c = constants(kernel, (p.qk_dim, p.v_dim), changed)
    order = p.mask["q_order_192" if c["WARP_GROUPS"] == 3 else "q_order"]
    launch("sm90.fwd", table.FUNCTIONS["sm90.fwd"], 3, {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "out": rows_of(out), "lse": lse,
        **p.masks("q_lo", "q_hi", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks"),
        **p.masks("q_block_lists"), "q_order": order,
        "counter": np.zeros(1, np.int32), "scale": p.scale, **p.sizes(), **c,
    }, p.seed)  # fmt: skip
    p.check("out", out)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(p.want["lse"]))
    some = np.isfinite(lse)
    np.testing.assert_allclose(lse[some], p.want["lse"][some], atol=1e-4, rtol=1e-6)


# for what has its way of masking from a plain row of the table, or is none
SOME = ("two rows", "ids that come back", "longer queries")
EVERY = once_each([(64, 64), (128, 128)], MASKS)
EVERY += some(itertools.product([(192, 128), (256, 256)], (*SOME, "one row")), 0, 5)


@pytest.mark.parametrize("dims,case", EVERY, ids=str)
def test_forward(dims, case):
    forward(Problem(case, dims), {})


def test_forward_of_logits_far_below_zero():
    """The mean, also below -1e30."""
    p = Problem("two rows", (64, 64))
    p.query[...], p.key[...], p.scale = 1, -1, 1e32
    p.want, p.plain = p.oracle(), p.oracle(HALF)
    forward(p, {})


@pytest.mark.parametrize("case", some(MASKS, 2, 6))
def test_forward_of_few_tiles(case):
    forward(Problem(case, (64, 64)), {}, few=True)


class Statistics:
    """What backward_prepare makes."""

    def __init__(self, p: Problem):
        padded = -(-p.q_len // 64) * 64

        def whole(x: np.ndarray, other: float) -> np.ndarray:
            widths = [(0, 0)] * (x.ndim - 1) + [(0, padded - p.q_len)]
            return np.pad(x, widths, constant_values=other)

        lse2 = np.where(np.isneginf(p.want["lse"]), np.inf, p.want["lse"]) / np.log(2)
        self.lse2 = whole(lse2.astype(np.float32), np.inf)
        self.delta = whole(p.want["delta"].astype(np.float32), 0)
        self.lo, self.hi = whole(p.mask["q_lo"], 0), whole(p.mask["q_hi"], 0)
        self.dq_sum = np.zeros((p.batch, p.heads, padded // 64, p.qk_dim // 32, 64, 32), np.float32)

    def dq(self, p: Problem) -> np.ndarray:
        rows = self.dq_sum.transpose(0, 2, 4, 1, 3, 5).reshape(p.batch, -1, p.heads, p.qk_dim)
        return rows[:, : p.q_len] * p.scale


def launch_keys(
    p: Problem,
    kernel: str,
    changed: dict[str, int],
    stats: Statistics,
    dk: np.ndarray,
    dv: np.ndarray,
) -> None:
    """A kernel whose programs are tiles of keys."""
    dims = p.qk_dim, p.v_dim
    file, keys = table.WIDE.get((kernel, max(dims)), ("sm90.bwd", 128))
    programs = -(-p.kv_len // 128) * (128 // keys) * p.batch * p.kv_heads
    launch(file, table.FUNCTIONS[file], programs, {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "dout": rows_of(p.dout),
        "lse2": line(stats.lse2), "delta": line(stats.delta), "lo": line(stats.lo),
        "hi": line(stats.hi),
        "dk": rows_of(dk), "dv": rows_of(dv),
        **({"dq_sum": stats.dq_sum} if "dkdv" not in kernel else {}),
        **p.masks("q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks", "kv_blocks", "kv_order",
            "kv_block_lists"),
        "scale": p.scale, **p.sizes(), **constants(kernel, dims, changed),
    }, p.seed)  # fmt: skip


def backward(p: Problem, kernel: str, changed: dict[str, int]) -> None:
    stats, dk, dv = Statistics(p), poisoned(p.key), poisoned(p.value)
    launch_keys(p, kernel + p.option, changed, stats, dk, dv)
    if kernel == "backward_sm90":
        p.check("dq", stats.dq(p))
    p.check("dk", dk)
    p.check("dv", dv)


@pytest.mark.parametrize("dim,case", once_each([64, 128], MASKS))
def test_backward(dim, case):
    backward(Problem(case, (dim, dim), heads=4, kv_heads=2), "backward_sm90", {})


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize(
    "dim,changed",
    [
        *((64, x) for x in ({"SKIP": 0}, {"PING_PONG": 1}, {"DQ": 1}, {"LSE_BY_MMA": 1})),
        *((128, x) for x in ({"PING_PONG": 0}, {"LSE_BY_MMA": 0}, {"SKIP": 1})),
    ],
    ids=str,
)  # fmt: skip
def test_candidates_of_the_backward(dim, changed, case):
    backward(Problem(case, (dim, dim)), "backward_sm90", changed)


@pytest.mark.parametrize("fold", [0, 1])
def test_a_broken_row_reaches_the_keys_it_attends(fold):
    p = Problem("causal", (64, 64))
    stats, dk, dv = Statistics(p), np.zeros_like(p.key), np.zeros_like(p.value)
    stats.lse2[0, 1, 100] = np.nan
    launch_keys(p, "backward_sm90", {"LSE_BY_MMA": fold}, stats, dk, dv)
    assert np.isnan(dv[0, :101].astype(float)).all() and np.isnan(dk[0, :101].astype(float)).all()


@pytest.mark.parametrize("dims,case", EVERY, ids=str)
def test_keys_and_values_alone(dims, case):
    backward(Problem(case, dims), "backward_dkdv_sm90", {})


@pytest.mark.parametrize("case", some(SOME, 0))
@pytest.mark.parametrize("dim,fold", [(64, 1), (128, 0)])
def test_keys_and_values_alone_the_other_way(dim, fold, case):
    backward(Problem(case, (dim, dim)), "backward_dkdv_sm90", {"LSE_BY_MMA": fold})


def queries_alone(p: Problem) -> None:
    stats, dq, kernel = Statistics(p), poisoned(p.query), "backward_dq_sm90" + p.option
    launch("sm90.bwd_dq", table.FUNCTIONS["sm90.bwd_dq"], 2, {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "dout": rows_of(p.dout), "dq": rows_of(dq),
        "lse2": stats.lse2, "delta": stats.delta,
        **p.masks("q_lo", "q_hi", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks", "q_order",
            "q_block_lists"),
        "counter": np.zeros(1, np.int32), "scale": p.scale, **p.sizes(),
        **constants(kernel, (p.qk_dim, p.v_dim), {}),
    }, p.seed)  # fmt: skip
    p.check("dq", dq)


@pytest.mark.parametrize("dims,case", EVERY, ids=str)
def test_queries_alone(dims, case):
    queries_alone(Problem(case, dims))


@pytest.mark.parametrize("dim,case", once_each([64, 128, 256], SOME))
def test_soft_cap(dim, case):
    p = Problem(case, (dim, dim), "_soft_cap")
    forward(p, {})
    backward(p, "backward_dkdv_sm90" if dim == 256 else "backward_sm90", {})
    queries_alone(p)


@pytest.mark.parametrize("dim,case", some(itertools.product([64, 128], SOME), 0, 5))
def test_soft_cap_of_keys_and_values_alone(dim, case):
    backward(Problem(case, (dim, dim), "_soft_cap"), "backward_dkdv_sm90", {})


@pytest.mark.parametrize("dim,case", some(itertools.product([64, 128], SOME), 1, 3))
def test_alibi(dim, case):
    p = Problem(case, (dim, dim), "_alibi", heads=4, kv_heads=2)
    forward(p, {})
    backward(p, "backward_sm90", {})


@pytest.mark.parametrize(
    "dim,blocks,case",
    once_each(
        [64, 128],
        [(64, 64, 2), (1, 2, 1), (256, 128, 2), (8, 32, 2)],
        ["documents", "longer keys", "ids that come back"],
    ),
    ids=str,
)
def test_maps_of_blocks(dim, blocks, case):
    p = Problem(case, (dim, dim), "_block_lists", blocks=blocks)
    forward(p, {})
    backward(p, "backward_dkdv_sm90", {})
    queries_alone(p)


@pytest.mark.parametrize("case", some(TREES, 0))
def test_packed_trees(case):
    """Lists that leave siblings out, full blocks, and the test of a key's subtree in the others."""
    p = Problem(case, (128, 128), "_block_lists", heads=4, kv_heads=2)
    assert p.mask["q_block_lists"][..., 1].any() and (p.mask["q_blocks"][:, 4] & 1).any()
    forward(p, {})
    backward(p, "backward_dkdv_sm90", {})
    queries_alone(p)
