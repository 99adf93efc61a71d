"""The kernels for the tangent of attention in Triton's interpreter: equal to the jvp of a dense
oracle in float64, for every kind of mask, options, head dims, and subsets of the tangents.

Guards against a term that is missing, a tangent read that is not there, garbage in keys and rows
without weight, and rounding errors that grow with a constant that is added to a row's tangents.
"""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import packax
import pytest
import score_oracle
import triton_interpreter as interpreter
from kernel_masks import ATTENTION, mask_of
from tiers import some

TILES = ((64, 64), (128, 32), (32, 32))
SLOPES = 2.0 ** (-8 * np.arange(1, 9) / 8)


def true_tangents(arrays, along, attends, sinks=None, **options):
    """Results of the dense oracle in float64, and their tangents."""
    arrays = arrays | {"scale": np.asarray(arrays["scale"])}
    if sinks is not None:
        arrays = arrays | {"sinks": sinks}
    allowed = attends if attends.ndim == 4 else attends[:, None]

    @jax.jit
    def both(arrays, along):
        attention = functools.partial(score_oracle.dense, allowed=allowed, **options)
        return jax.jvp(lambda some: attention(arrays | some)[:2], (
            {name: arrays[name] for name in along},), (along,))  # fmt: skip

    with score_oracle.x64(True):
        doubles = jax.tree.map(lambda x: np.asarray(x, np.float64), (arrays, along))
        return jax.tree.map(np.asarray, both(*doubles))


def draw_call(case, dims, seed=0):
    """The mask, what it attends, and query, key, value and their tangents. Keys that no row attends
    to, and rows that attend to nothing, are large numbers: their content must not matter."""
    expression, q_len, kv_len, heads, kv_heads = ATTENTION[case]
    attends = np.asarray(expression.as_array(q_len, kv_len))
    attends = attends if attends.ndim == 3 else attends[None]
    rng = np.random.default_rng(seed + len(case))
    shapes = ((q_len, heads, dims[0]), (kv_len, kv_heads, dims[0]), (kv_len, kv_heads, dims[1]))
    given, clean = [], []
    for n in range(6):
        x = rng.standard_normal((len(attends), *shapes[n % 3])).astype(np.float32)
        idle = np.broadcast_to(~attends.any(2 if n % 3 == 0 else 1), x.shape[:2])
        given.append(np.where(idle[..., None, None], np.float32(1e30), x))
        clean.append(np.where(idle[..., None, None], np.float32(0), x))
    return mask_of(expression, q_len, kv_len), attends, given, clean


def check(case, tile, dims, options=None, compiled=(0, 0), has=(True,) * 3, sinks=False):
    mask, attends, given, clean = draw_call(case, dims)
    options = options or {}
    batch, q_len, heads = given[0].shape[:3]
    kv_len = given[1].shape[1]
    rng = np.random.default_rng(5)
    scale = 1.5 * dims[0] ** -0.5
    arrays = dict(zip(("query", "key", "value"), clean, strict=False)) | {"scale": scale}
    of_oracle = {}
    if "soft_cap" in options:
        of_oracle["soft_cap"] = options["soft_cap"]
    slopes = places = scales = extras = None
    if options.get("slopes"):
        slopes = SLOPES[:heads].astype(np.float32)[None]
        places = tuple(rng.integers(-9, n, (1, n)).astype(np.int32) for n in (q_len, kv_len))
        arrays["slopes"], of_oracle["places"] = slopes[0], places
    if options.get("scales"):
        scales = np.full(1, -0.3, np.float32)
        arrays["scale"] = scales[0]
    if compiled != (0, 0):
        soft_cap = options.get("soft_cap", 0.0)
        extras = interpreter.Extras(mask, scale, soft_cap, scales, slopes, places)
    of_sinks = rng.standard_normal(heads).astype(np.float32) if sinks else None
    names = ("query", "key", "value")
    along = {name: x for name, x, h in zip(names, clean[3:], has, strict=True) if h}
    (out, lse), (tout, tlse) = true_tangents(arrays, along, attends, of_sinks, **of_oracle)
    tangents = tuple(x if h else None for x, h in zip(given[3:], has, strict=True))
    got = interpreter.forward_tangent(
        *given[:3], np.where(attends.any(2)[..., None, None], out, 1e30).astype(np.float32),
        lse.astype(np.float32), tangents, mask, scale, tile, extras, compiled,
    )  # fmt: skip
    for name, a, b in zip(("tout", "tlse"), got, (tout, tlse), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5, rtol=5e-5, err_msg=name)
    idle = np.broadcast_to(~attends.any(2), (batch, q_len))
    assert not got[0][idle].any() and not got[1].swapaxes(1, 2)[idle].any()


@pytest.mark.parametrize(
    "case,tile", some(itertools.product(ATTENTION, TILES), 0, 10, 14, 15, 22, 29), ids=str
)
def test_tangents_equal_the_oracle(case, tile):
    check(case, tile, (16, 32))


@pytest.mark.parametrize(
    "case,options,dims,compiled",
    some([
        ("documents", {"soft_cap": 2.0}, (16, 32), (16, 32)),
        ("three rows", {"slopes": True, "scales": True}, (24, 40), (32, 64)),
        ("checked by id", {"slopes": True, "soft_cap": 3.0, "scales": True}, (40, 16), (48, 16)),
        ("longer queries", {}, (8, 56), (64, 64)),
        ("ranges with empty rows", {"scales": True}, (16, 24), (16, 48)),
    ], *(0, 1, 3)),
)  # fmt: skip
def test_fallback_kernel_equals_the_oracle(case, options, dims, compiled):
    check(case, (64, 32), dims, options, compiled)


@pytest.mark.parametrize("has", [x for x in itertools.product((False, True), repeat=3) if any(x)])
def test_absent_tangents_are_not_read(has):
    check("short", (64, 32), (16, 24), {"soft_cap": 2.0}, (16, 32), has)


def test_results_that_include_a_sink():
    check("documents", (64, 32), (16, 16), sinks=True)


def test_a_constant_added_to_the_tangents_of_logits():
    """It changes only tlse: tout keeps its accuracy in 16 bits, even if the constant is large."""
    mask, attends, given, _ = draw_call("documents", (16, 16))
    query, key, value, tq, tk, tv = given
    query, key, value, tq, tk, tv = (
        np.where(np.abs(x) > 1e29, 0, x).astype(np.float16) for x in (query, key, value, tq, tk, tv)
    )
    key[..., 0], tq[..., 0] = 1, 64  # 64 * scale in every tangent of a logit
    along = {"query": tq, "key": tk, "value": tv}
    arrays = {"query": query, "key": key, "value": value, "scale": 1.0}
    (out, lse), (tout, tlse) = true_tangents(arrays, along, attends)
    got_tout, got_tlse = interpreter.forward_tangent(
        query, key, value, out.astype(np.float16), lse.astype(np.float32), (tq, tk, tv), mask, 1.0,
        (64, 32),
    )  # fmt: skip
    np.testing.assert_allclose(got_tlse, tlse, rtol=1e-3, atol=1e-3)
    assert np.abs(got_tout - tout).max() < 2e-3 * np.abs(tout).max()


def test_block_masks():
    """Listed blocks, per head; one row attends to nothing."""
    rng = np.random.default_rng(0)
    blocks = rng.random((1, 2, 4, 4)) < 0.5
    blocks[:, 0, 1] = False
    expression = packax.masks.block_sparse(blocks, (64, 64)) & packax.causal()
    mask = packax.create_attention_mask(expression, q_len=250, kv_len=250)
    operands = interpreter.Operands.of(mask)
    attends = np.asarray(expression.as_array(250, 250))
    draw = lambda: rng.standard_normal((1, 250, 2, 16)).astype(np.float32)  # noqa: E731
    query, key, value, *tangents = (draw() for _ in range(6))
    lists = (np.asarray(x) for x in (mask.block_mask, mask.q_block_lists, mask.kv_block_lists))
    extras = interpreter.Extras(operands, 0.3, block_mask=(*lists, (64, 64)))
    along = dict(zip(("query", "key", "value"), tangents, strict=True))
    arrays = {"query": query, "key": key, "value": value, "scale": 0.3}
    (out, lse), (tout, tlse) = true_tangents(arrays, along, attends)
    assert np.isneginf(lse).any() and np.isfinite(lse).any()
    got = interpreter.forward_tangent(
        query, key, value, out.astype(np.float32), lse.astype(np.float32), tuple(tangents),
        operands, 0.3, (64, 32), extras, (16, 16),
    )  # fmt: skip
    for name, a, b in zip(("tout", "tlse"), got, (tout, tlse), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5, rtol=5e-5, err_msg=name)
