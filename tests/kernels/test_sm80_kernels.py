"""The kernels of mma.sync and cp.async on the CPU (gluon_threads.py), against float64.

Guards against tiles read before they are there or overwritten while they are read, blocks that are
left out or visited twice, and masks; not against what the compiler makes of them.
"""

from __future__ import annotations

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
FORWARD += [(dims, case) for dims in ((192, 128), (256, 256)) for case in (*SOME, "one row")]
ROWS = ("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks")


def constants(kernel, kind, dims):
    arch = next(arch for arch in table.ARCHS.values() if arch.tiles == kind)
    rows = table.variants((arch.name.removeprefix("sm_"),), ("bf16",), (dims,))
    found = [v for v in rows if v.kernel == kernel]
    assert len(found) == 1 and found[0].source.startswith("sm80.")
    return dict(found[0].constants), found[0].block


def sizes(p):
    return {**p.sizes(), "row_heads": p.heads, "scale": p.scale}


@pytest.mark.parametrize("dims,case", some(FORWARD, *range(0, len(MASKS), 2), 8, 13), ids=str)
def test_forward(dims, case):
    p = Problem(case, dims, heads=4, kv_heads=2)
    out = np.full((p.batch, p.q_len, p.heads, p.v_dim), np.nan, HALF)
    lse = np.full((p.batch, p.heads, p.q_len), np.nan, np.float32)
    tile, block = constants("forward", "ampere", dims)
    programs = -(-p.q_len // 128) * (128 // block) * p.batch * p.heads
    launch("sm80.fwd", "forward", programs, {
        "query": p.query, "key": p.key, "value": p.value, "out": out, "lse": lse,
        **p.masks(*ROWS, "q_order"), **sizes(p), **tile,
    }, p.seed)  # fmt: skip
    p.check("out", out)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(p.want["lse"]))
    some = np.isfinite(lse)
    np.testing.assert_allclose(lse[some], p.want["lse"][some], atol=1e-4)


BACKWARD = [("ampere", dim, case) for dim in (64, 128) for case in MASKS]
BACKWARD += [(kind, dim, case) for kind, dim in (("ampere", 256), ("small", 128)) for case in SOME]


@pytest.mark.parametrize("kind,dim,case", some(BACKWARD, 2, 4, 9, 11, 14, 16, 19))
def test_backward(kind, dim, case):
    p = Problem(case, (dim, dim), heads=4, kv_heads=2)
    stats, dq, dk, dv = Statistics(p), *map(poisoned, (p.query, p.key, p.value))
    tile, block = constants("backward_sm80", kind, (dim, dim))
    programs = -(-p.kv_len // 128) * (128 // block) * p.batch * p.kv_heads
    launch("sm80.bwd", "backward_sm80", programs, {
        "query": p.query, "key": p.key, "value": p.value, "dout": p.dout,
        "lse2": stats.lse2, "delta": stats.delta, "lo": stats.lo, "hi": stats.hi,
        "dq_sum": stats.dq_sum, "dk": dk, "dv": dv,
        **p.masks(*ROWS[2:], "kv_blocks", "kv_order"), **sizes(p), **tile,
    }, p.seed)  # fmt: skip
    tile, rows = constants("backward_postprocess_sm80", kind, (dim, dim))
    launch("sm80.bwd", "backward_postprocess_sm80", stats.lse2.size // rows, {
        "dq_sum": stats.dq_sum, "dq": dq, "scale": p.scale, "q_len": p.q_len, "heads": p.heads,
        "row_heads": p.heads, **tile,
    }, p.seed)  # fmt: skip
    for name, got in (("dq", dq), ("dk", dk), ("dv", dv)):
        p.check(name, got)


@pytest.mark.parametrize("n,threads", [(16, 128), (32, 256)])
def test_sums_take_every_cell_once(n, threads):
    """Both kernels see a block of dQ by thread and register."""
    from sm80.bwd import add_asm, load_asm

    texts = [str(getattr(asm(n, threads), "value", asm(n, threads))) for asm in (add_asm, load_asm)]
    places = []
    for text, pattern in zip(
        texts, (r"red\S+ \[p\+(\d+)\], \$(\d+);", r"ld\S+ \$(\d+), \[p\+(\d+)\];"), strict=True
    ):
        assert "mov.u32 t, %tid.x; mul.wide.u32 p, t, 4;" in text and f"add.u64 p, p, ${n};" in text
        places.append({tuple(sorted(map(int, pair))) for pair in re.findall(pattern, text)})
    assert places[0] == places[1] == {(i, i * threads * 4) for i in range(n)}
