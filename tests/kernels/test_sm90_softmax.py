"""The softmax step of the Hopper forward and its bias, instruction by instruction for a warp: Gluon
has no interpreter.

Guards against a score at another's place or under another row's maximum, a maximum that changes
without the sums, a row that reaches its first key late, lost infinities and NaNs, and a bias of
another row or key.
"""

import re
import sys

import numpy as np
import pytest
from paths import KERNEL_DIR
from ptx_warp import F32, HALVES, LANES, Warp, accumulator

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

from sm90 import alibi, softmax

N = 32  # scores per thread, for 64 keys
UNSET = F32(-1e30)
# (row, key) of each lane's registers, within the warp's 16 rows
ROWS, KEYS = accumulator(N)


def step(scores, m, parts, scale, half="bf16", growth=8, natural=False):
    """scores (16, 64), m (16,), parts (lanes, 2) -> P (16, 64), m, parts, alpha (16,)."""
    thread_rows, pairs = ROWS[:, :3:2], N // 2  # rows of registers 0 and 2
    first = pairs + 6
    values = {f"${first + i}": scores[ROWS, KEYS][:, i].astype(F32) for i in range(N)}
    values |= {f"${first + N + r}": m[thread_rows[:, r]].astype(F32) for r in (0, 1)}
    values |= {f"${first + N + 2 + r}": parts[:, r].astype(F32) for r in (0, 1)}
    values[f"${first + N + 4}"] = np.full(LANES, scale, F32)
    values = Warp().run(softmax.softmax_asm(N, half, growth, natural), values)
    packed = np.stack([values[f"${i}"] for i in range(pairs)], 1).astype(np.uint32)
    p = np.zeros((16, 64))
    for i in range(N):
        bits = (packed[:, i // 2] >> np.uint32(16 * (i % 2))).astype(np.uint16)
        p[ROWS[:, i], KEYS[:, i]] = bits.view(HALVES[half]).astype(float)
    of_rows = []
    for at in (pairs, pairs + 4):
        both = np.stack([values[f"${at + r}"] for r in (0, 1)], 1)
        of_row = np.zeros(16, F32)
        of_row[thread_rows] = both
        np.testing.assert_array_equal(of_row[thread_rows], both, "the four threads of a row")
        of_rows.append(of_row)
    new_l = np.stack([values[f"${pairs + 2 + r}"] for r in (0, 1)], 1)
    return p, of_rows[0], new_l, of_rows[1]


def sum_of(parts):
    """The sums of the rows, from the threads' parts."""
    total = np.zeros(16)
    np.add.at(total, ROWS[:, :3:2], parts.astype(float))
    return total


def checked_step(scores, m, parts, scale, half, growth):
    """Compare a step with the definition: the maximum moves if it would grow by more than `growth`,
    or if there was none."""
    p, new_m, new_l, alpha = step(scores, m, parts, scale, half, growth)
    logits = scores.astype(F32).astype(float) * float(F32(scale))
    top = logits.max(1)
    moved = (top > m.astype(float) + growth) & (top > -np.inf)
    close = (np.abs(top - m - growth) < 1e-3) & (growth > 0)  # rounding may decide either way
    want_m = np.where(moved, top, m.astype(float))
    assert ((np.abs(new_m - want_m) <= 2e-7 * np.abs(want_m)) | close).all()
    less = np.where(scores == -np.inf, 0, logits - new_m.astype(float)[:, None])  # rounded once
    exact = np.where(scores == -np.inf, 0, np.exp2(less))
    rounded = (1e-6 + 1e-7 * np.abs(less)) * exact
    unit = 2.0 ** (-8 if half == "bf16" else -10)
    assert (np.abs(p - exact) <= unit * exact + rounded + 1e-7).all()
    assert (p[scores == -np.inf] == 0).all()
    want_alpha = np.exp2(m.astype(float) - new_m.astype(float))
    np.testing.assert_allclose(alpha, want_alpha, rtol=1e-5, atol=1e-30)
    kept = sum_of(parts) * want_alpha
    error = np.abs(sum_of(new_l) - kept - exact.sum(1))
    assert (error <= rounded.sum(1) + 1e-5 * kept + 1e-6).all()
    return new_m, new_l


def steps_of(rng, kind):
    """The scores of some steps, (16, 64) each."""
    for i in range(6):
        s = rng.standard_normal((16, 64)) * 3
        if kind == "rising":
            s += 12 * i * (np.arange(16)[:, None] % 3 == 0)
        if kind == "one rises":  # one score of the warp
            s[rng.integers(16), rng.integers(64)] += 100 * i
        if kind == "falling":
            s -= 40.0 * i
        if kind == "far below zero":
            s -= 3000
        if kind == "one key":
            s[:, 1:] = -np.inf
        if kind == "late":  # rows whose first key comes in a later step, or never
            s[np.arange(16) % 5 > i] = -np.inf
            s[15] = -np.inf
        yield s.astype(F32)


@pytest.mark.parametrize("growth", [8, 0])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "kind", ["level", "rising", "one rises", "falling", "far below zero", "one key", "late"]
)
def test_steps(kind, half, growth):
    rng = np.random.default_rng()
    scale = float(rng.uniform(0.05, 1.4427))
    m, parts = np.full(16, UNSET), np.zeros((LANES, 2), F32)
    for scores in (s for _ in range(20 if kind == "one rises" else 1) for s in steps_of(rng, kind)):
        m, parts = checked_step(scores, m, parts, scale, half, growth)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row_and_reach_it(broken):
    rng = np.random.default_rng()
    scores = rng.standard_normal((16, 64)).astype(F32)
    m, parts = np.zeros(16, F32), np.zeros((LANES, 2), F32)
    scores[3, 17] = broken
    p, _, new_l, _ = step(scores, m, parts, 1.0)
    total = sum_of(new_l)
    assert not np.isfinite(total[3]) and np.isfinite(np.delete(total, 3)).all()
    assert np.isfinite(np.delete(p, 3, 0)).all()


@pytest.mark.parametrize("start", [0, 64, 1 << 20])
@pytest.mark.parametrize("slope", [0.5, -0.01, 0.0])
def test_bias(start, slope):
    """On both sides of the diagonal, for a warp of the second warp group."""
    rng = np.random.default_rng()
    scores = rng.standard_normal((16, 64)).astype(F32)
    rows = start + rng.permutation(200)[:16]
    scale = F32(0.3)
    values = {f"${i}": scores[ROWS, KEYS][:, i].copy() for i in range(N)}  # tied
    values |= {f"${2 * N + r}": rows[ROWS[:, 2 * r]] for r in (0, 1)}
    values |= {f"${2 * N + 2}": np.full(LANES, start), "%tid.x": 128 + 32 + np.arange(LANES)}
    values |= {f"${2 * N + 3}": np.full(LANES, scale), f"${2 * N + 4}": np.full(LANES, -slope, F32)}
    values = Warp().run(alibi.biased_asm(N), values)
    got = np.zeros((16, 64), F32)
    got[ROWS, KEYS] = np.stack([values[f"${i}"] for i in range(N)], 1)
    far = np.abs(rows[:, None] - (start + np.arange(64)))
    np.testing.assert_allclose(got, scores * scale - slope * far, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [-np.inf, -3.39e38, -1e9, 3.39e38])
def test_logits_that_a_bias_moves_far(hidden):
    """In base e, with a maximum that is a logit: rows with this number at all keys, at some and at
    none, then a second step with ordinary logits."""
    rng = np.random.default_rng()
    scores = rng.standard_normal((16, 64)).astype(F32)
    scores[:5] = hidden
    scores[5:10][rng.random((5, 64)) < 0.5] = hidden
    m, parts = np.full(16, softmax.LEAST.value, F32), np.zeros((LANES, 2), F32)
    total, top = np.zeros(16), m.astype(float)
    for logits in (scores, rng.standard_normal((16, 64)).astype(F32)):
        p, new_m, parts, alpha = step(logits, m, parts, np.log2(np.e), growth=0, natural=True)
        new_top = np.maximum(top, logits.max(1).astype(float))
        np.testing.assert_array_equal(new_m, new_top.astype(F32))
        np.testing.assert_allclose(alpha, np.exp(top - new_top), rtol=1e-5)
        exact = np.exp(logits.astype(float) - new_top[:, None])
        np.testing.assert_allclose(p, exact, rtol=2.0**-8, atol=1e-30)
        total = total * np.exp(top - new_top) + exact.sum(1)
        np.testing.assert_allclose(sum_of(parts), total, rtol=1e-5)
        m, top = new_m, new_top


def test_registers_of_the_assembly_are_those_of_its_constraints():
    for natural in (False, True):
        text = softmax.softmax_asm(N, "bf16", 8, natural)
        named = {int(x) for x in re.findall(r"\$(\d+)", text)}
        assert named == set(range(N // 2 + 6 + N + 5))
