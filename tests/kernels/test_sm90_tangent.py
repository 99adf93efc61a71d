"""The step of Hopper's tangent kernel, instruction by instruction for a warp: Gluon has no
interpreter.

Guards against a number at another's place or under another row's center, a center that changes, and
a row that reaches its first key late.
"""

import sys

import numpy as np
import pytest
from paths import KERNEL_DIR
from ptx_warp import F32, HALVES, LANES, Warp, accumulator

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

from sm90 import tangent

N = 32  # numbers per thread, for 64 keys
# (row, key) of each lane's registers, within the warp's 16 rows
ROWS, KEYS = accumulator(N)
THREAD_ROWS = ROWS[:, :3:2]  # rows of registers 0 and 2
NAN = F32(np.nan)


def step(p, ts, center, scale, half):
    """P and dP (16, 64), the rows' sums of P tlogit, and their centers."""
    inputs = [*p[ROWS, KEYS].T, *np.ones((2, LANES)), *center[THREAD_ROWS].T, *ts[ROWS, KEYS].T]
    values = {f"${i}": np.asarray(x, F32) for i, x in enumerate([*inputs, np.full(LANES, scale)])}
    values = Warp().run(tangent.step_asm(N, half), values)
    pairs = np.zeros((2, 16, 64))
    for i, (a, b) in enumerate(np.arange(N).reshape(-1, 2)):
        for j in (0, 1):  # the two numbers in a register
            for which, register in enumerate((a, b)):
                bits = values[f"${register}"].view(np.uint32) >> np.uint32(16 * j)
                at = ROWS[:, 2 * i + j], KEYS[:, 2 * i + j]
                pairs[which][at] = bits.astype(np.uint16).view(HALVES[half]).astype(float)
    sums = np.zeros(16)
    np.add.at(sums, THREAD_ROWS, np.stack([values[f"${N + r}"] - 1 for r in (0, 1)], 1))
    found = np.zeros(16, F32)
    both = np.stack([values[f"${N + 2 + r}"] for r in (0, 1)], 1)
    found[THREAD_ROWS] = both
    np.testing.assert_array_equal(found[THREAD_ROWS], both, "the four threads of a row")
    return *pairs, sums, found


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("missing", ["all centers", "some centers", "no center"])
def test_step(missing, half):
    rng = np.random.default_rng()
    p, ts = rng.random((16, 64), F32), 30 + rng.standard_normal((16, 64), F32)
    p[3] = 0  # a row without keys in this step
    center = rng.standard_normal(16).astype(F32)
    lost = {"all centers": np.arange(16) >= 0, "some centers": np.arange(16) % 5 == 3}
    lost = lost.get(missing, np.zeros(16, bool))
    center[lost] = NAN
    scale = F32(0.3)
    p_half, dp_half, sums, found = step(p, ts, center, scale, half)
    tlogit = ts.astype(float) * float(scale)
    np.testing.assert_allclose(sums, (p * tlogit).sum(1), rtol=1e-5)
    with np.errstate(invalid="ignore"):
        mean = np.where(p.any(1), (p * tlogit).sum(1) / p.astype(float).sum(1), np.nan)
    want = np.where(lost, mean, center)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    np.testing.assert_array_equal(p_half, p.astype(HALVES[half]).astype(float))
    dp = p * (tlogit - np.nan_to_num(want)[:, None])
    unit = 2.0 ** (-8 if half == "bf16" else -11)
    np.testing.assert_allclose(dp_half, dp, rtol=2 * unit, atol=1e-4)


def test_nan_reaches_dp():
    p, ts = np.full((16, 64), 0.5, F32), np.ones((16, 64), F32)
    ts[5, 7] = np.nan
    _, dp, sums, _ = step(p, ts, np.full(16, NAN), F32(1), "bf16")
    np.testing.assert_array_equal(np.isnan(sums), np.arange(16) == 5)
    assert np.isnan(dp[5, 7]) and np.isfinite(np.delete(dp, 5, 0)).all()


def test_operands_of_the_products():
    """Pairs of P and of dP take turns in the registers of a step."""
    assert tangent.operand_asm(4, 0) == "mov.b32 {$0, $1}, $4; mov.b32 {$2, $3}, $6;"
    assert tangent.operand_asm(4, 1) == "mov.b32 {$0, $1}, $5; mov.b32 {$2, $3}, $7;"
