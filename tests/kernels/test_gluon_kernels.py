"""The Hopper kernels on the CPU (gluon_threads.py), against float64.

Guards against barriers that deadlock or release too early, tiles read before they arrive or after
they are overwritten, blocks that are left out or visited twice, and wrong masks; not against
compiler errors. Candidates of tune.py that have no timings yet are included. Every mask and every
head dim runs each time, all their pairs under `-m exhaustive`.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from paths import AOT

sys.path.insert(0, str(AOT))

import table
from gluon_language import launch
from gluon_problems import HALF, MASKS, TREES, Problem, Statistics, poisoned
from gluon_threads import TensorMap
from tiers import some

SM90 = table.ARCHS["90a"]


def rows_of(x: np.ndarray) -> TensorMap:
    return TensorMap(x.transpose(0, 2, 1, 3))


def planes(x: np.ndarray) -> TensorMap:
    return TensorMap(x.reshape(-1, 1, *x.shape[2:]))


def line(x: np.ndarray) -> TensorMap:
    return TensorMap(x.reshape(1, 1, 1, -1))


def variant_of(kernel: str, dims: tuple[int, int]) -> table.Variant:
    """The variant with the smallest head dims that cover these."""
    tiles = table.SM90_TILES[kernel]
    built = [x for x in table.ALL_DIMS if table.row_of(*x) in tiles]
    dims = min((x for x in built if x[0] >= dims[0] and x[1] >= dims[1]), key=sum)
    return table.sm90(kernel, SM90, "bf16", *dims, "13.4")


def constants(kernel: str, dims: tuple[int, int], changed: dict[str, int]) -> dict[str, int]:
    found = dict(variant_of(kernel, dims).constants)
    assert not set(changed) - set(found)
    return found | changed


def forward(
    p: Problem, changed: dict[str, int], shape: str = "", *, in_turns: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse. `shape`: the end of the name of a kernel for calls of some sizes. in_turns:
    without a counter."""
    out, lse = (
        np.full((p.batch, p.q_len, p.heads, p.v_dim), np.nan, HALF),
        np.full((p.batch, p.heads, p.q_len), np.nan, np.float32),
    )
    kernel = "forward_sm90" + (shape or p.option)
    c = constants(kernel, (p.qk_dim, p.v_dim), changed)
    order = p.mask["q_order_192" if c["WARP_GROUPS"] == 3 else "q_order"]
    extra: dict[str, Any] = {}
    if p.option == "_max_logits":
        extra["row_max"] = np.full_like(lse, np.nan)
    if p.bias is not None:
        lse = np.full((*lse.shape, 2), np.nan, np.float32)
        extra["bias"] = planes(p.bias)
    launch("sm90.fwd", table.FUNCTIONS["sm90.fwd"][0], 3, {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "out": rows_of(out), "lse": lse, **p.sinks_or_none(), **extra,
        **p.masks("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks"),
        **p.masks("q_block_lists"), "q_order": order,
        "counter": np.zeros(0 if in_turns else 1, np.int32), "scale": p.scale, **p.sizes(), **c,
    }, p.seed)  # fmt: skip
    stored = lse
    p.check("out", out)
    if p.bias is not None:
        largest = p.want["top"]
        if p.sinks is None:
            np.testing.assert_allclose(lse[..., 0], largest, atol=1e-4, rtol=1e-6)
        nothing = np.isneginf(largest)
        assert (lse[nothing, 1] == np.finfo(np.float32).max).all()
        lse = np.where(nothing, -np.inf, lse.sum(-1))
    np.testing.assert_allclose(lse, p.want["lse"], atol=1e-4, rtol=1e-6)
    if "row_max" in extra:
        np.testing.assert_allclose(extra["row_max"], p.want["top"], atol=1e-4, rtol=1e-6)
    return out, stored


# For kernels that mask like a plain kernel of the table, and for candidates outside the table.
SOME = ("two rows", "ids that come back", "longer queries")
EVERY = some(itertools.product([(64, 64), (128, 128)], MASKS), 0, 6, 9, 11, 13, 15)
WIDE = (192, 128), (256, 256), (192, 192)
WIDE_FORWARD = (*WIDE, (512, 512))
EVERY += some(itertools.product(WIDE_FORWARD, (*SOME, "one row")), 0, 5, 10, 14)
# Fewer columns than the kernels have.
CLIPPED = (96, 96), (72, 72), (80, 40), (8, 16), (104, 112), (160, 128), (136, 184), (208, 256)
CLIPPED = some(itertools.product(CLIPPED, SOME), *range(0, 24, 5))
EVERY += CLIPPED
# test_backward covers the same masks, so every run has one of them for each head dim.
OF_EACH_DIM = some(itertools.product([(64, 64), (128, 128)], MASKS), 2, 15)
OF_EACH_DIM += some(itertools.product(WIDE, (*SOME, "one row")), 2, 5, 10)
OF_EACH_DIM += CLIPPED


@pytest.mark.parametrize("dims,case", EVERY, ids=str)
def test_forward(dims, case):
    forward(Problem(case, dims), {})


def test_the_simulator_refuses_boxes_that_a_gpu_refuses():
    """TMA reads from multiples of 16 bytes."""
    tensor = TensorMap(np.zeros((1, 1, 4, 64), HALF))
    tensor.box([0, 0, 3, 56], (1, 1, 4, 16))
    with pytest.raises(IndexError, match="begins at column 4: 16 bytes"):
        tensor.box([0, 0, 0, 4], (1, 1, 4, 16))


def test_forward_of_logits_far_below_zero():
    """Logits below -1e30 give the mean."""
    p = Problem("two rows", (64, 64))
    p.query[...], p.key[...], p.scale = 1, -1, 1e32
    p.want, p.plain = p.oracle(), p.oracle(HALF)
    forward(p, {})


@pytest.mark.parametrize("case", some(MASKS, 6))
def test_forward_of_few_tiles(case):
    forward(Problem(case, (64, 64)), {}, "_low_occupancy")


@pytest.mark.parametrize("case", some(MASKS, 0, 6))
def test_forward_of_few_keys(case):
    """Tiles of 64 rows, which halve those of the order."""
    forward(Problem(case, (64, 64)), {}, "_short", in_turns=True)


@pytest.mark.parametrize("case", some(MASKS, 0, 6))
def test_forward_in_turns(case):
    """Without a counter, programs take the same number of tiles, in alternating directions."""
    forward(Problem(case, (96, 96)), {}, in_turns=True)


def launch_keys(
    p: Problem,
    kernel: str,
    changed: dict[str, int],
    stats: Statistics,
    dk: np.ndarray,
    dv: np.ndarray,
    dbias: np.ndarray | None = None,
) -> None:
    """Runs a kernel whose programs are tiles of keys."""
    dims = p.qk_dim, p.v_dim
    variant = variant_of(kernel, dims)
    programs = -(-p.kv_len // 128) * (128 // variant.block) * p.batch * p.kv_heads
    programs *= 2 if kernel in table.PARTS else 1
    pairs = {}
    if p.bias is not None:
        pairs = {"bias": planes(p.bias), "top": line(stats.top)}
    if dbias is not None:
        pairs["dbias"] = planes(dbias)
    launch(variant.source, table.function(kernel, variant.source), programs, {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "dout": rows_of(p.dout),
        "lse2": line(stats.lse2), "delta": line(stats.delta), "lo": line(stats.lo),
        "hi": line(stats.hi),
        "dk": rows_of(dk), "dv": rows_of(dv),
        **({"dq_sum": stats.dq_sum} if "dkdv" not in kernel else {}), **pairs,
        **p.masks("q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks", "kv_blocks", "kv_order",
            "kv_block_lists"),
        "scale": p.scale, **p.sizes(), **constants(kernel, dims, changed),
    }, p.seed)  # fmt: skip


def backward(p: Problem, kernel: str, changed: dict[str, int]) -> None:
    columns = variant_of(kernel + p.option, (p.qk_dim, p.v_dim)).qk_dim
    stats, dk, dv = Statistics(p, columns), poisoned(p.key), poisoned(p.value)
    dbias = poisoned(p.bias) if p.option == "_dbias" else None
    launch_keys(p, kernel + p.option, changed, stats, dk, dv, dbias)
    if dbias is not None:
        p.check("dbias", dbias)
    if kernel == "backward_sm90":
        p.check("dq", stats.dq(p))
    p.check("dk", dk)
    p.check("dv", dv)


@pytest.mark.parametrize("dim,case", some(itertools.product([64, 128], MASKS), *range(2, 9)))
def test_backward(dim, case):
    heads = 4 if case.startswith("longer") else 2  # two key/value heads if there are few tiles
    backward(Problem(case, (dim, dim), heads=heads, kv_heads=heads // 2), "backward_sm90", {})


@pytest.mark.parametrize(
    "dims,case",
    some(itertools.product([(96, 96), (80, 72), (40, 24), (112, 120)], SOME), 0, 4, 8, 9),
    ids=str,
)
def test_backward_of_fewer_columns(dims, case):
    backward(Problem(case, dims, heads=4, kv_heads=2), "backward_sm90", {})


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize(
    "dim,changed",
    [
        *((64, x) for x in ({"SKIP": 0}, {"PING_PONG": 1}, {"DQ": 1}, {"LSE_BY_MMA": 1})),
        *((dim, x) for dim in (96, 128)
            for x in ({"PING_PONG": 0}, {"LSE_BY_MMA": 0}, {"SKIP": 1})),
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


@pytest.mark.parametrize("dims,case", OF_EACH_DIM, ids=str)
def test_keys_and_values_alone(dims, case):
    backward(Problem(case, dims), "backward_dkdv_sm90", {})


@pytest.mark.parametrize("case", some(SOME, 0))
@pytest.mark.parametrize("dim,fold", some([(64, 1), (128, 0)], 0))
def test_keys_and_values_alone_the_other_way(dim, fold, case):
    backward(Problem(case, (dim, dim)), "backward_dkdv_sm90", {"LSE_BY_MMA": fold})


def queries_alone(p: Problem, kernel: str = "backward_dq_sm90") -> None:
    """Programs take tiles until none is left; in parts, each takes half a tile."""
    stats, dq, kernel = Statistics(p), poisoned(p.query), kernel + p.option
    source = table.KERNELS[kernel]
    in_parts = kernel in table.PARTS
    programs = -(-p.q_len // 128) * 2 * p.batch * p.heads if in_parts else 2
    counter = {} if in_parts else {"counter": np.zeros(1, np.int32)}
    of_bias = {} if p.bias is None else {"bias": planes(p.bias), "top": stats.top}
    launch(source, table.function(kernel, source), programs, {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "dout": rows_of(p.dout), "dq": rows_of(dq),
        "lse2": stats.lse2, "delta": stats.delta,
        **p.masks("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks", "q_order",
            "q_block_lists"),
        **counter, **of_bias, "scale": p.scale, **p.sizes(),
        **constants(kernel, (p.qk_dim, p.v_dim), {}),
    }, p.seed)  # fmt: skip
    p.check("dq", dq)


@pytest.mark.parametrize("dims,case", OF_EACH_DIM, ids=str)
def test_queries_alone(dims, case):
    queries_alone(Problem(case, dims))


@pytest.mark.parametrize("case", some(MASKS, 1))
def test_keys_and_values_in_parts(case):
    backward(Problem(case, (512, 512)), "backward_dkdv_sm90_parts", {})


@pytest.mark.parametrize("case", some(MASKS, 4, 7))
def test_queries_in_parts(case):
    queries_alone(Problem(case, (512, 512)), "backward_dq_sm90_parts")


@pytest.mark.parametrize("case", some(("longer queries", "longer keys", "two rows"), 0))
def test_grouped_heads_in_parts(case):
    p = Problem(case, (512, 512), heads=4, kv_heads=2)
    backward(p, "backward_dkdv_sm90_parts", {})
    queries_alone(p, "backward_dq_sm90_parts")


@pytest.mark.parametrize(
    "dims,case", some(itertools.product([(64, 64), *WIDE_FORWARD], SOME), 0, 4)
)
def test_largest_logits(dims, case):
    forward(Problem(case, dims, "_max_logits"), {})


@pytest.mark.parametrize("dim,case", some(itertools.product([64, 128, 256], SOME), 2, 8))
def test_soft_cap(dim, case):
    p = Problem(case, (dim, dim), "_soft_cap")
    forward(p, {})
    backward(p, "backward_dkdv_sm90" if dim == 256 else "backward_sm90", {})
    queries_alone(p)


@pytest.mark.parametrize("dim,case", some(itertools.product([64, 128], SOME), 5))
def test_soft_cap_of_keys_and_values_alone(dim, case):
    backward(Problem(case, (dim, dim), "_soft_cap"), "backward_dkdv_sm90", {})


@pytest.mark.parametrize("dim,case", some(itertools.product([64, 128], SOME), 1))
def test_alibi(dim, case):
    p = Problem(case, (dim, dim), "_alibi", heads=4, kv_heads=2)
    forward(p, {})
    backward(p, "backward_sm90", {})


BIAS_DIMS = (32, 64, 128, 256)


@pytest.mark.parametrize("option", ["_bias", "_float32_bias"])
@pytest.mark.parametrize(
    "dim,case",
    some(itertools.product(BIAS_DIMS, (*SOME, "longer keys", "one row")), 0, 6, 11, 16),
)
def test_bias(dim, case, option):
    batch = 1 if case == "two rows" else 4
    p = Problem(case, (dim, dim), option, heads=4, kv_heads=2, batch=batch)
    forward(p, {})


@pytest.mark.parametrize("option", ["_bias", "_float32_bias"])
@pytest.mark.parametrize("dim,case", some(itertools.product(BIAS_DIMS[:3], MASKS), 1, 12, 21))
def test_backward_with_a_bias(dim, case, option):
    batch = 1 if case == "two rows" else 4
    p = Problem(case, (dim, dim), option, heads=2, kv_heads=1, batch=batch)
    backward(p, "backward_dkdv_sm90", {})
    queries_alone(p)
    shared_gradient(p, parts=2)


def shared_gradient(p: Problem, parts: int) -> None:
    stats, sums = Statistics(p), np.full((parts, *p.bias.shape), np.nan, np.float32)
    kernel = f"backward_shared{p.option.replace('_bias', '_dbias')}"
    tiles = -(-p.q_len // 128) * -(-p.kv_len // 64)
    source = table.KERNELS[kernel]
    launch(source, table.function(kernel, source), tiles * parts * np.prod(p.bias.shape[:2]), {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "dout": rows_of(p.dout),
        "lse2": line(stats.lse2), "delta": line(stats.delta), "top": line(stats.top),
        "bias": p.bias, "dbias_sums": sums, "dbias_parts": parts,
        **p.masks("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks"),
        "scale": p.scale, **p.sizes(), **constants(kernel, (p.qk_dim, p.v_dim), {}),
    }, p.seed)  # fmt: skip
    p.check("shared dbias", sums.sum(0))


@pytest.mark.parametrize("dim,case", some(itertools.product(BIAS_DIMS, MASKS), 1, 13, 20, 26))
def test_bias_with_its_gradient(dim, case):
    backward(Problem(case, (dim, dim), "_dbias", heads=4, kv_heads=2), "backward_dkdv_sm90", {})


OF_BLOCK_LISTS = (64, 64), (128, 128), (192, 128), (256, 256)


@pytest.mark.parametrize(
    "dims,blocks,case",
    some(
        itertools.product(
            OF_BLOCK_LISTS,
            [(64, 64, 2), (1, 2, 1), (256, 128, 2), (8, 32, 2)],
            ["documents", "longer keys", "ids that come back"],
        ),
        0,
        8,
        27,
        41,
    ),
    ids=str,
)
def test_block_masks(dims, blocks, case):
    p = Problem(case, dims, "_block_lists", blocks=blocks)
    forward(p, {})
    backward(p, "backward_dkdv_sm90", {})
    queries_alone(p)


@pytest.mark.parametrize(
    "dims,case",
    some([((64, 64), "prompt and answers"), *itertools.product(OF_BLOCK_LISTS[1:], TREES)], 0, 3),
    ids=str,
)
def test_packed_trees(dims, case):
    """Lists that exclude siblings, full blocks, and the subtree check in partial blocks."""
    p = Problem(case, dims, "_block_lists", heads=4, kv_heads=2)
    assert p.mask["q_block_lists"][..., 1].any() and (p.mask["q_blocks"][:, 4] & 1).any()
    forward(p, {})
    backward(p, "backward_dkdv_sm90", {})
    queries_alone(p)


# The sinks of four heads: none, about as large as a row's logits, all of the weight, infinite.
SINKS = np.float32([-np.inf, 1.5, 3e38, np.inf])
WITH_SINKS = [
    *((option, (64, 64)) for option in ("", "_short", "_max_logits", "_block_lists", "_bias")),
    *((option, (128, 128)) for option in ("_soft_cap", "_alibi", "_float32_bias")),
    *(("", dims) for dims in ((128, 128), (192, 128), (256, 256), (512, 512))),
    ("_low_occupancy", (64, 64)),
]


@pytest.mark.parametrize("option,dims", some(WITH_SINKS, 0, 1, 2, 3, 4), ids=str)
def test_sinks(option, dims):
    """Each batch row has sinks. Rows that attend to nothing have none: their lse is -inf."""
    sinks = np.stack([SINKS, SINKS[::-1] - 4])
    blocks = (64, 64, 4) if option == "_block_lists" else ()
    shape = option if option in ("_low_occupancy", "_short") else ""
    p = Problem("two rows", dims, "" if shape else option, 4, 2, blocks, sinks=sinks)
    assert np.isneginf(p.want["lse"]).any()
    forward(p, {}, shape)


@pytest.mark.parametrize("option", ["", "_bias"])
def test_a_sink_of_minus_infinity_changes_no_bit(option):
    p = Problem("ids that come back", (64, 64), option)
    want = forward(p, {})
    p.sinks = np.full((1, 2), -np.inf, np.float32)
    for a, b in zip(forward(p, {}), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_in_sinks_and_under_a_large_sink():
    """A NaN sink makes the rows of its head NaN. A NaN in a value reaches the rows that attend to
    it, even if the sink takes all the weight."""
    p = Problem("two rows", (64, 64), "", 4, 2, sinks=np.float32([[np.nan, 1, 3e38, 0]]))
    p.value[:, :, 1] = np.nan
    p.check = lambda name, got: None
    p.want["lse"][:, 0] = np.where(np.isneginf(p.want["lse"][:, 1]), -np.inf, np.nan)
    out, _ = forward(p, {})
    some = np.isfinite(p.want["lse"][:, 1])
    nan = np.isnan(out.astype(float)).all(-1).swapaxes(1, 2)
    for head, has in enumerate((True, False, True, True)):
        np.testing.assert_array_equal(nan[:, head], some & has, err_msg=str(head))


def tangents(p: Problem, first: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The tangents of out and lse. `first`: as in Problem.with_tangents."""
    p.with_tangents(first)
    tlse = np.full((p.batch, p.heads, p.q_len), np.nan, np.float32)
    tout = np.full((*p.query.shape[:3], p.v_dim), np.nan, HALF)
    out = np.where(p.attends.any((1, 3))[..., None, None], p.want["out"], 1e30).astype(HALF)
    moving = zip(("tq", "tk", "tv"), p.tangents, strict=True)
    launch("sm90.tangent", "forward_tangent_sm90", -(-p.q_len // 128) * p.batch * p.heads, {
        "query": rows_of(p.query), "key": rows_of(p.key), "value": rows_of(p.value),
        "out": rows_of(out), "lse": p.want["lse"].astype(np.float32), "tlse": tlse,
        **{name: rows_of(x) for name, x in moving}, "tout": rows_of(tout),
        **p.masks("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks",
            "q_order"),
        "scale": p.scale, **p.sizes(),
        **constants("forward_tangent_sm90", (p.qk_dim, p.v_dim), {}),
    }, p.seed)  # fmt: skip
    p.check("tout", tout)
    np.testing.assert_allclose(tlse, p.want["tlse"], atol=2e-4, rtol=2e-5)
    return tout, tlse


@pytest.mark.parametrize(
    "dims,case",
    some(itertools.product([(64, 64), (128, 128), (80, 40)], MASKS), 0, 1, 10, 21),
    ids=str,
)
def test_tangents(dims, case):
    heads = 4 if case.startswith("longer") else 2
    tangents(Problem(case, dims, heads=heads, kv_heads=heads // 2))


@pytest.mark.parametrize("late", [False, True])
def test_a_constant_added_to_the_tangents_of_logits(late):
    """It changes only tlse: tout keeps its accuracy in 16 bits. `late`: no key of the first step
    has a weight above 0."""
    p = Problem("longer keys", (64, 64))
    p.key[..., 0] = 1
    if late:
        p.query[..., 1], p.key[..., 1] = 100, 0
        p.key[:, 256:, :, 1] = -100
    p.want, p.plain = p.oracle(), p.oracle(HALF)
    tangents(p, 256)


def test_tangents_with_sinks():
    """Only out and lse tell that there are sinks."""
    p = Problem("two rows", (64, 64), "", 4, 2, sinks=np.stack([SINKS, SINKS[::-1] - 4]))
    tangents(p)


def test_nan_in_tangents():
    """A NaN in a value reaches the rows that attend to it, and no row that attends to nothing."""
    p = Problem("two rows", (64, 64))
    p.value[:, 150] = np.nan
    p.check = lambda name, got: None
    tout, _ = tangents(p)
    nan = np.isnan(tout.astype(float)).all(3).swapaxes(1, 2)
    assert nan[np.broadcast_to(p.attends[..., 150], nan.shape)].all()
    assert not tout.swapaxes(1, 2)[np.broadcast_to(~p.attends.any(3), nan.shape)].any()
