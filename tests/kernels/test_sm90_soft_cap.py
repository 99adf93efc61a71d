"""The tanh of soft caps on Hopper, instruction by instruction for a warp, in float32, because Gluon
has no interpreter.

Guards against a wrong coefficient or sign in one of its two branches, a score that ends up in
another's register or depends on its neighbours, and a warp whose threads diverge. ex2 and rcp have
the largest errors that PTX allows.
"""

import sys

import numpy as np
import pytest
from paths import KERNEL_DIR
from ptx_warp import F32, LANES, Warp
from tiers import some

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

from common import soft_cap

NEAR, FAR = 3e-7, 4e-7  # error bounds of the polynomial and of the exponential


def tanh_of(warp, scores, k=1.0):
    """`scores` (lanes, registers): their results."""
    scores = np.asarray(scores, F32)
    n = scores.shape[1]
    values = {f"${i}": scores[:, i].copy() for i in range(n)}  # tied: results start as the scores
    values[f"${2 * n}"] = np.full(LANES, k, F32)
    values = warp.run(soft_cap.tanh_asm(n), values)
    return np.stack([values[f"${i}"] for i in range(n)], 1)


def error_of(got, x):
    return np.abs(got.astype(float) - np.tanh(np.asarray(x, F32).astype(float))).max()


def warps_of(points, registers=16):
    """Shuffled points, so that every warp has scores of all magnitudes."""
    points = np.random.default_rng(0).permutation(np.asarray(points, F32))
    count = len(points) // (LANES * registers)
    return points[: count * LANES * registers].reshape(count, LANES, registers)


def test_scores_up_to_a_half_take_the_polynomial():
    points = np.linspace(-0.5, 0.5, 1 << 17, dtype=F32)
    assert points[0] == -0.5 and points[-1] == 0.5
    for x in warps_of(points):
        warp = Warp(ex2_error=1e6)  # ex2 must not run
        assert error_of(tanh_of(warp, x), x) <= NEAR
        assert "ex2.approx.ftz.f32" not in warp.executed


ERRORS = [(e, r) for e in (-1, 0, 1) for r in (-1, 0, 1)]


@pytest.mark.parametrize("ex2,rcp", some(ERRORS, 8))
def test_larger_scores_take_the_exponential(ex2, rcp):
    """One larger score per warp is enough; small scores in the same warp are also right."""
    points = np.concatenate([np.linspace(-12, 12, 1 << 16), np.linspace(-0.6, 0.6, 1 << 16)])
    for x in warps_of(points):
        assert np.abs(x).max() > 0.5
        warp = Warp(ex2, rcp)
        assert error_of(tanh_of(warp, x), x) <= FAR
        assert "ex2.approx.ftz.f32" in warp.executed


def test_the_border_between_the_two():
    """1/2 and the next float above it take different branches."""
    x = np.full((LANES, 8), 0.5, F32)
    near = tanh_of(Warp(), x)
    for register in range(8):  # any register can decide for the warp
        lane = 31 - 4 * register
        above = x.copy()
        above[lane, register] = np.nextafter(F32(0.5), F32(1)) * F32(-1 if register % 2 else 1)
        warp = Warp()
        far = tanh_of(warp, above)
        assert "rcp.approx.ftz.f32" in warp.executed
        assert error_of(far, above) <= FAR and error_of(near, x) <= NEAR
        assert np.abs(np.abs(far) - near).max() <= NEAR + FAR


def test_a_score_does_not_depend_on_its_neighbours():
    """The same bits in a warp of small scores and next to large ones, infinities and NaN. Otherwise
    padding and other documents would change a row's last bits."""
    rng = np.random.default_rng()
    near = rng.uniform(-0.5, 0.5, (LANES, 16)).astype(F32)
    alone = tanh_of(Warp(1, 1), near)
    for loud in (0.6, 30, np.inf, -np.inf):
        others = rng.random(near.shape) < 0.5
        others[3, 3:5] = True, False
        mixed = np.where(others, rng.choice([-1, 1], near.shape) * F32(loud), near).astype(F32)
        mixed[5, 5] = np.nan
        others[5, 5] = True
        warp = Warp(1, 1)
        got = tanh_of(warp, mixed)
        assert "rcp.approx.ftz.f32" in warp.executed
        np.testing.assert_array_equal(got[~others], alone[~others])


@pytest.mark.parametrize("registers", [2, 32, 64])
@pytest.mark.parametrize("k", [0.125, 1 / 50, 3.0])
def test_every_score_stays_in_its_place_and_is_scaled(registers, k):
    rng = np.random.default_rng()
    for loud in (0.1, 20.0):
        s = (rng.standard_normal((LANES, registers)) * loud).astype(F32)
        assert error_of(tanh_of(Warp(), s, k), s * F32(k)) <= FAR


def test_the_ends():
    """Infinities, overflows and all that rounds to it give 1 or -1; 0 gives 0 in the polynomial."""
    x = np.zeros((LANES, 8), F32)
    assert (tanh_of(Warp(), x) == 0).all()
    x[:, :6] = [np.inf, -np.inf, 3e38, -3e38, 20, -20]
    got = tanh_of(Warp(), x, 8.0)
    np.testing.assert_array_equal(got[:, :6], np.tile(np.array([1, -1] * 3, F32), (LANES, 1)))
    assert np.abs(got).max() <= 1


@pytest.mark.parametrize("loud", [0.4, 3.0])
def test_a_nan_stays_alone(loud):
    """It does not decide the branch, and changes no other score."""
    s = np.linspace(-loud, loud, LANES * 8, dtype=F32).reshape(LANES, 8)
    clean = tanh_of(Warp(), s)
    s[3, 5] = np.nan
    got = tanh_of(Warp(), s)
    assert np.isnan(got[3, 5])
    got[3, 5] = clean[3, 5]
    np.testing.assert_array_equal(got, clean)


def test_results_are_tied_to_scores():
    """Otherwise the branch that is not taken could leave a result register unset."""
    assert soft_cap.tanh_constraints(3) == "=f,=f,=f,0,1,2,f"
