"""The fallback Triton kernels in the interpreter: score parameters, and head dims between the
compiled ones.

Guards against reads or writes of the next head's columns, a bias that only one loop adds, and a sum
over the wrong rows. The oracle is dense, in float64, with automatic gradients.
"""

from __future__ import annotations

import numpy as np
import packax
import pytest
import score_oracle
import triton_interpreter as interpreter
from kernel_masks import ATTENTION, mask_of
from tiers import some

TILES = ((128, 64), (64, 128), (64, 64))  # of the forward, dkdv and dq
SMALL = ((32, 16), (16, 32), (16, 32))  # for float32 at head dim 256: 1/8 of an order's entry
WIDE = ((32, 32), (16, 16), (16, 32))  # for head dims above 256
WIDE_SM90 = ((64, 32), (32, 16), (64, 32))  # the same for Hopper
SLOPES = 2.0 ** (-8 * np.arange(1, 9) / 8)


@pytest.mark.parametrize(
    "case,options,dims,compiled",
    some([
        ("documents", {"soft_cap": 2.0}, (16, 32), (16, 32)),
        ("three rows", {"slopes": True, "scales": 3}, (24, 40), (32, 64)),
        ("checked by id", {"slopes": True, "soft_cap": 3.0, "scales": 1}, (40, 16), (48, 16)),
        ("longer keys", {"slopes": True, "scales": 1}, (24, 16), (32, 16)),
        ("ranges with empty rows", {"slopes": True, "soft_cap": 1.0, "scales": 1}, (16, 24),
            (16, 48)),
        ("longer queries", {}, (8, 56), (64, 64)),
        ("checked by id", {"tiles": SMALL, "soft_cap": 3.0, "slopes": True}, (16, 16), (16, 16)),
        ("short", {"tiles": WIDE, "soft_cap": 2.0}, (320, 264), (512, 512)),
        ("three rows", {"tiles": WIDE_SM90, "slopes": True}, (24, 16), (32, 16)),
    ], *(0, 2)),
)  # fmt: skip
def test_fallback_kernels_equal_the_oracle(case, options, dims, compiled):
    expression, q_len, kv_len, heads, kv_heads = ATTENTION[case]
    attends = np.asarray(expression.as_array(q_len, kv_len))
    attends = attends if attends.ndim == 3 else attends[None]
    mask = mask_of(expression, q_len, kv_len)
    batch = len(attends)
    rng = np.random.default_rng(len(case))

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    query, key = draw(batch, q_len, heads, dims[0]), draw(batch, kv_len, kv_heads, dims[0])
    value, dout = draw(batch, kv_len, kv_heads, dims[1]), draw(batch, q_len, heads, dims[1])
    dlse = draw(batch, heads, q_len)
    # Keys that no row attends to, and rows that attend to nothing: their content must not matter.
    idle_keys = np.broadcast_to(~attends.any(1), key.shape[:2])
    idle_rows = np.broadcast_to(~attends.any(2), query.shape[:2])
    clean = [x.copy() for x in (query, key, value, dout)]
    for x, idle in ((query, idle_rows), (dout, idle_rows), (key, idle_keys), (value, idle_keys)):
        x[idle] = 1e30
    for x, idle in zip(clean, (idle_rows, idle_keys, idle_keys, idle_rows), strict=True):
        x[idle] = 0

    soft_cap = options.get("soft_cap")
    scale = 1.5 * dims[0] ** -0.5
    scales = (
        np.linspace(-0.6, 0.9, options["scales"]).astype(np.float32)
        if "scales" in options
        else None
    )
    slopes = places = None
    if "slopes" in options:
        slopes = np.tile(SLOPES[:heads].astype(np.float32), (batch, 1))
        slopes += np.arange(batch, dtype=np.float32)[:, None] / 10
        places = tuple(rng.integers(-9, n, (batch, n)).astype(np.int32) for n in (q_len, kv_len))
    extras = interpreter.Extras(mask, scale, soft_cap or 0.0, scales, slopes, places)

    forward_tile, dkdv_tile, dq_tile = options.get("tiles", TILES)
    out, lse, row_max = interpreter.forward_fallback(
        query, key, value, mask, extras, forward_tile, compiled
    )
    *grads, score_grads = interpreter.backward_fallback(
        query, key, value, out, lse, dout, dlse, mask, extras, dkdv_tile, dq_tile, compiled
    )
    for b in range(batch):
        arrays = dict(
            zip(("query", "key", "value"), (x[b : b + 1] for x in clean[:3]), strict=True)
        )
        arrays["scale"] = np.float32(scale) if scales is None else scales[b % len(scales)]
        row_places = None
        if slopes is not None:
            arrays["slopes"], row_places = slopes[b], tuple(x[b : b + 1] for x in places)
        true, plain, largest = score_oracle.true_and_plain(
            arrays, attends[b : b + 1], clean[3][b : b + 1], dlse[b : b + 1], soft_cap=soft_cap,
            places=row_places
        )  # fmt: skip
        close = {"atol": 1e-4, "rtol": 1e-4}
        np.testing.assert_allclose(out[b], true.out[0], err_msg="out", **close)
        np.testing.assert_allclose(lse[b], true.lse[0], err_msg="lse", **close)
        np.testing.assert_allclose(row_max[b].max(-1), largest[0], err_msg="row_max", **close)
        wanted = true.gradients
        if "tiles" in options:  # float32's: as exact as plain float32
            found = dict(zip(("query", "key", "value"), (x[b : b + 1] for x in grads), strict=True))
            got = score_oracle.Results(out[b : b + 1], lse[b : b + 1], found)
            score_oracle.check(got, true, plain)
        for name, got in zip(("query", "key", "value"), grads, strict=True):
            np.testing.assert_allclose(got[b], wanted[name][0], err_msg=name, **close)
        sums = score_grads[b].sum(-1, dtype=np.float64)
        size = np.abs(score_grads[b]).sum()
        np.testing.assert_allclose(
            sums[:, 0].sum(), wanted["scale"], atol=1e-5 * size, err_msg="scale"
        )
        if slopes is not None:
            np.testing.assert_allclose(
                sums[:, 1], wanted["slopes"], atol=1e-5 * size, err_msg="slopes"
            )
    assert not out[idle_rows].any() and not grads[0][idle_rows].any()


def test_slopes_whose_bias_is_infinite():
    """Then all the weight of a row is on the key at its own position."""
    mask = mask_of(packax.full(), 130, 130)
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 130, 1, 16)).astype(np.float32) for _ in range(3))
    places = (np.arange(130, dtype=np.int32)[None],) * 2
    slopes = np.full((1, 1), 1e37, np.float32)
    extras = interpreter.Extras(mask, 0.25, 0.0, np.full(1, 0.25, np.float32), slopes, places)
    out, lse, _ = interpreter.forward_fallback(query, key, value, mask, extras, TILES[0], (16, 16))
    np.testing.assert_allclose(out, value, atol=1e-6)
    zero = np.zeros_like(lse)
    *grads, _ = interpreter.backward_fallback(
        query, key, value, out, lse, value, zero, mask, extras, *TILES[1:], (16, 16)
    )
    for x in grads:
        assert np.isfinite(x).all()


def test_tanh():
    """Within 3 float32 ulp for all magnitudes: no cancellation near 0, no overflow."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-1, 1, 128 * 64 - 4) * 10.0 ** rng.integers(-6, 3, 128 * 64 - 4),
            [0, 1e30, -1e30, 0.3],
        ]
    )
    # Through a kernel: with a single key, the logit is the score.
    mask = mask_of(packax.full(), 8192, 1)
    query = np.zeros((1, 8192, 1, 16), np.float32)
    query[0, :, 0, 0] = x
    key = np.zeros((1, 1, 1, 16), np.float32)
    key[0, 0, 0, 0] = 1
    extras = interpreter.Extras(mask, 1.0, 1.0)
    _, lse, row_max = interpreter.forward_fallback(
        query, key, key, mask, extras, (128, 32), (16, 16)
    )
    for got in (lse, row_max):
        np.testing.assert_allclose(
            got[0, 0], np.tanh(x.astype(np.float32).astype(np.float64)), rtol=6e-7
        )
