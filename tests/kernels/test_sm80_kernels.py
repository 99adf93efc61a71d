"""The kernels that use mma.sync and cp.async, on the CPU (gluon_threads.py), against float64.

Guards against tiles read before they arrive or overwritten while being read, blocks left out or
visited twice, and wrong masks; not against compiler errors.
"""

from __future__ import annotations

import itertools
import re
import sys

import numpy as np
import pytest
from gluon_language import launch
from gluon_problems import HALF, MASKS, Problem, Statistics, poisoned
from paths import AOT, KERNEL_DIR
from tiers import some

sys.path[:0] = [str(AOT), str(KERNEL_DIR)]

import table  # noqa: E402

SOME = ("two rows", "ids that come back", "longer queries")
FORWARD = [((128, 128), case) for case in MASKS]
WIDE = ((192, 128), (256, 256), (96, 96), (192, 192))
FORWARD += [(dims, case) for dims in WIDE for case in (*SOME, "one row")]
ROWS = ("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks")


def constants(kernel, kind, dims):
    """The constants of the kernel's row in the table, and its block."""
    arch = next(arch for arch in table.ARCHS.values() if arch.tiles == kind)
    rows = table.variants((arch.name.removeprefix("sm_"),), ("bf16",), (dims,))
    found = [v for v in rows if v.kernel == kernel]
    assert len(found) == 1 and found[0].source.startswith("sm80.")
    return dict(found[0].constants), found[0].block


def sizes(p):
    return {**p.sizes(), "row_heads": p.heads, "scale": p.scale}


@pytest.mark.parametrize("dims,case", some(FORWARD, 0, 6, 13, 17, 22), ids=str)
def test_forward(dims, case):
    check_forward(Problem(case, dims, heads=4, kv_heads=2), "forward")


def check_forward(p, kernel):
    dims = (p.qk_dim, p.v_dim)
    out = np.full((p.batch, p.q_len, p.heads, p.v_dim), np.nan, HALF)
    lse = np.full((p.batch, p.heads, p.q_len), np.nan, np.float32)
    tile, block = constants(kernel, "ampere", dims)
    programs = -(-p.q_len // 128) * (128 // block) * p.batch * p.heads
    launch("sm80.fwd", "forward", programs, {
        "query": p.query, "key": p.key, "value": p.value, "out": out, "lse": lse,
        **p.sinks_or_none(), **p.masks(*ROWS, "q_order"), **sizes(p), **tile,
    }, p.seed)  # fmt: skip
    p.check("out", out)
    np.testing.assert_allclose(lse, p.want["lse"], atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("option", ["", "_soft_cap"])
def test_sinks(option):
    """None, about as large as a row's logits, all of the weight, infinite; for each batch row."""
    sinks = np.float32([[-np.inf, 1.5, 3e38, np.inf], [np.inf, -2.0, 0.5, -np.inf]])
    p = Problem("two rows", (128, 128), option, heads=4, kv_heads=2, sinks=sinks)
    assert np.isneginf(p.want["lse"]).any()
    check_forward(p, f"forward_sm80{option}" if option else "forward")


BACKWARD = [("ampere", dim, case) for dim in (64, 128) for case in MASKS]
OTHERS = (("ampere", 256), ("small", 128), ("ampere", 96), ("ampere", 192), ("small", 192))
BACKWARD += [(kind, dim, case) for kind, dim in OTHERS for case in SOME]


@pytest.mark.parametrize("kind,dim,case", some(BACKWARD, 2, 4, 9, 14, 18, 21, 24, 26, 30))
def test_backward(kind, dim, case):
    check_backward(Problem(case, (dim, dim), heads=4, kv_heads=2), "backward_sm80", kind)


@pytest.mark.parametrize("case", some(SOME, 0))
def test_values_of_another_head_dim(case):
    p = Problem(case, (192, 128), heads=4, kv_heads=2)
    check_backward(p, "backward_sm80", "ampere")


@pytest.mark.parametrize("stages,case", some(list(itertools.product((1, 2), SOME)), 1, 5))
def test_numbers_of_stages(stages, case):
    """With one stage, a block is copied over the previous one as soon as that has been read."""
    p = Problem(case, (128, 128), heads=4, kv_heads=2)
    check_backward(p, "backward_sm80", "small", STAGES=stages, DO_STAGES=3 - stages)
    check_backward(p, "backward_sm80", "small", STAGES=stages, DO_STAGES=stages, V_REGISTERS=0)


@pytest.mark.parametrize("dim,case", some(list(itertools.product((64, 128), SOME)), 4))
def test_soft_cap(dim, case):
    p = Problem(case, (dim, dim), "_soft_cap", heads=4, kv_heads=2)
    check_forward(p, "forward_sm80_soft_cap")
    check_backward(p, "backward_sm80_soft_cap", "ampere")


def check_backward(p, kernel, kind, **changed):
    stats, dq, dk, dv = Statistics(p), *map(poisoned, (p.query, p.key, p.value))
    dims = (p.qk_dim, p.v_dim)
    tile, block = constants(kernel, kind, dims)
    tile |= changed
    programs = -(-p.kv_len // 128) * (128 // block) * p.batch * p.kv_heads
    launch("sm80.bwd", "backward_sm80", programs, {
        "query": p.query, "key": p.key, "value": p.value, "dout": p.dout,
        "lse2": stats.lse2, "delta": stats.delta, "lo": stats.lo, "hi": stats.hi,
        "dq_sum": stats.dq_sum, "dk": dk, "dv": dv,
        **p.masks(*ROWS[2:], "kv_blocks", "kv_order"), **sizes(p), **tile,
    }, p.seed)  # fmt: skip
    tile, rows = constants("backward_postprocess_sm80", kind, dims)
    launch("sm80.bwd", "backward_postprocess_sm80", stats.lse2.size // rows, {
        "dq_sum": stats.dq_sum, "dq": dq, "scale": p.scale, "q_len": p.q_len, "heads": p.heads,
        "row_heads": p.heads, **tile,
    }, p.seed)  # fmt: skip
    for name, got in (("dq", dq), ("dk", dk), ("dv", dv)):
        p.check(name, got)


@pytest.mark.parametrize("n,threads", [(16, 128), (32, 256)])
def test_partial_sums_are_added_and_loaded_in_the_same_order(n, threads):
    """Both kernels map threads and registers to the elements of a dQ block in the same way."""
    from sm80.bwd import add_asm, load_asm

    texts = [str(getattr(asm(n, threads), "value", asm(n, threads))) for asm in (add_asm, load_asm)]
    places = []
    for text, pattern in zip(
        texts, (r"red\S+ \[p\+(\d+)\], \$(\d+);", r"ld\S+ \$(\d+), \[p\+(\d+)\];"), strict=True
    ):
        assert "mov.u32 t, %tid.x; mul.wide.u32 p, t, 4;" in text and f"add.u64 p, p, ${n};" in text
        places.append({tuple(sorted(map(int, pair))) for pair in re.findall(pattern, text)})
    assert places[0] == places[1] == {(i, i * threads * 4) for i in range(n)}
