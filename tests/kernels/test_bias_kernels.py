"""The Triton kernels with an array bias and with dropout, in the interpreter.

Guards against dropout bits that differ between the kernels of a backward, a bias tile of the wrong
head, a sum over the wrong batch rows, and a loop that starts inside a group of four keys that share
a random word. The oracle is dense, in float64, with automatic gradients and dropout bits by numpy.
"""

from __future__ import annotations

import itertools

import additive_masks
import bias_interpreter as kernels
import jax
import numpy as np
import packax
import philox
import pytest
import score_oracle
import triton_interpreter as interpreter
from aot_modules import table
from kernel_masks import ATTENTION, mask_of, packed
from tiers import some

KEY = jax.random.key(7)
TILES = (64, 64), ((32, 64), (64, 32), 64)
DIMS, COMPILED = (24, 16), (32, 16)
WIDE = [  # head dims of a call, and of its kernel
    ((136, 200), (256, 256)),
    ((192, 128), (256, 256)),
    ((256, 256), (256, 256)),
]


def tiles_above_128(kind):
    """The tiles of the table, in the form of TILES."""
    names = "forward", "backward_dkdv", "backward_dq"
    forward, *others = (table.BIAS_TILES[f"{name}_bias"][kind, 256][:2] for name in names)
    return forward, (*others, table.BIAS_TILES["backward_dbias"][kind, 256][0])


def added_of(shape, dtype, rate, sizes, rng):
    """The bias and dropout operands, as attention.py creates them."""
    batch, heads, q_len, kv_len = sizes
    bias = None
    if shape is not None:
        full = [n if has else 1 for n, has in zip(sizes[:3], shape, strict=True)]
        bias = rng.standard_normal((*full, kv_len)).astype(dtype)
        bias[..., rng.integers(0, kv_len, 3)] = -np.inf
    if not rate:
        return kernels.Added(bias)
    words = np.asarray(jax.random.bits(KEY, (2,), np.uint32))
    streams = np.empty((batch, heads, 4), np.uint32)
    streams[..., :2] = words
    streams[..., 2] = np.arange(batch)[:, None]
    streams[..., 3] = np.arange(heads)
    rows = np.arange(q_len, dtype=np.int32)[None]
    return kernels.Added(bias, streams, rows, round(rate * 2**32))


@pytest.mark.parametrize(
    "case,shape,dtype,rate,soft_cap,tiles",
    some(
        [
            ("three rows", (1, 1, 1), np.float32, 0.0, 0.0, TILES),
            ("documents", (0, 1, 1), np.float16, 0.2, 0.0, TILES),
            ("longer keys", (0, 0, 1), np.float32, 0.0, 2.0, ((32, 32), ((32, 32), (32, 32), 32))),
            ("checked by id", (1, 0, 0), np.float32, 0.3, 0.0, TILES),
            ("ranges with empty rows", None, np.float32, 0.5, 0.0, TILES),
        ],
        1,
    ),
)
def test_bias_and_dropout_equal_the_oracle(case, shape, dtype, rate, soft_cap, tiles):
    check_against_the_oracle(case, shape, dtype, rate, soft_cap, tiles, DIMS, COMPILED)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_sinks(rate):
    """With logits of about 0 and of -1e9, sinks of every size relative to them. Both numbers of lse
    are finite, except in rows that attend to nothing and with an infinite sink."""
    expression, q_len, kv_len, heads, kv_heads = ATTENTION["ranges with empty rows"]
    mask = mask_of(expression, q_len, kv_len)
    attends = np.asarray(expression.as_array(q_len, kv_len))
    attends = attends if attends.ndim == 3 else attends[None]
    batch, heads, kv_heads = len(attends), 8, 4
    rng = np.random.default_rng(4)
    query, key, value = (
        rng.standard_normal((batch, n, h, 16)).astype(np.float32)
        for n, h in ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
    )
    sizes = (batch, heads, q_len, kv_len)
    added = added_of((0, 1, 1), np.float32, rate, sizes, rng)
    least = np.float32(-3.3895314e38)  # of bfloat16
    added.bias[:, :, ::3] = -1e9
    added.bias[:, :, 1::3] = least
    sinks = np.float32([[-np.inf, 0.5, 60, -1e9, least, 3e38, np.inf, 1e4]])
    extras = interpreter.Extras(mask, 0.25)
    out, lse, row_max = kernels.forward(query, key, value, mask, extras, added, TILES[0], (16, 16))
    got, got_lse, got_max = kernels.forward(
        query, key, value, mask, extras, added, TILES[0], (16, 16), sinks
    )
    np.testing.assert_array_equal(got_max, row_max)
    top, log = (lse[..., i].astype(np.float64) for i in (0, 1))
    empty = np.isneginf(top)
    assert empty.any() and not empty.all()
    below = sinks[0].astype(np.float64)[:, None] - np.where(empty, 0, top)
    total = np.logaddexp(np.where(empty, 0, log), below)  # relative to the largest logit
    weight = np.where(empty | np.isposinf(below), 0, np.exp(np.where(empty, 0, log) - total))
    wanted = out * weight.swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=2e-5)
    found = np.where(empty, 0, got_lse[..., 0].astype(np.float64) - np.where(empty, 0, top))
    found += np.where(empty, 0, got_lse[..., 1])
    np.testing.assert_allclose(found, np.where(empty, 0, total), atol=1e-5, rtol=1e-6)
    np.testing.assert_array_equal(got_lse[empty], lse[empty])
    np.testing.assert_array_equal(got_lse[:, 0], lse[:, 0])  # without a sink
    others = np.isfinite(sinks[0]) | np.isneginf(sinks[0])
    assert np.isfinite(got_lse[:, others][~empty[:, others]]).all()


@pytest.mark.parametrize(
    "case,shape,dtype,rate,soft_cap,kind,dims",
    some(
        [
            ("short", (0, 1, 1), np.float32, 0.2, 2.0, "hopper", WIDE[0]),
            ("documents", (0, 1, 1), np.float32, 0.2, 2.0, "hopper", WIDE[0]),
            ("three rows", (1, 0, 0), np.float16, 0.0, 0.0, "small", WIDE[1]),
            ("checked by id", (1, 1, 1), np.float32, 0.3, 0.0, "blackwell", WIDE[2]),
            ("longer keys", (0, 0, 1), np.float16, 0.0, 2.0, "ampere", WIDE[0]),
            ("ranges with empty rows", None, np.float32, 0.5, 0.0, "hopper", WIDE[1]),
        ],
        0,
    ),
)
def test_above_head_dim_128(case, shape, dtype, rate, soft_cap, kind, dims):
    """With the table's tiles; one kernel serves all head dims up to its own."""
    tiles = tiles_above_128(kind)
    check_against_the_oracle(case, shape, dtype, rate, soft_cap, tiles, *dims)


def check_against_the_oracle(case, shape, dtype, rate, soft_cap, tiles, dims, compiled):
    expression, q_len, kv_len, heads, kv_heads = ATTENTION[case]
    attends = np.asarray(expression.as_array(q_len, kv_len))
    attends = attends if attends.ndim == 3 else attends[None]
    mask = mask_of(expression, q_len, kv_len)
    batch = max(len(attends), 2 if shape and shape[0] else 1)
    if batch > len(attends):
        attends = np.repeat(attends, batch, 0)
    rng = np.random.default_rng(len(case))

    def draw(*sizes):
        return rng.standard_normal(sizes).astype(np.float32)

    query, key = draw(batch, q_len, heads, dims[0]), draw(batch, kv_len, kv_heads, dims[0])
    value, dout = draw(batch, kv_len, kv_heads, dims[1]), draw(batch, q_len, heads, dims[1])
    dlse = draw(batch, heads, q_len)
    sizes = (batch, heads, q_len, kv_len)
    added = added_of(shape, dtype, rate, sizes, rng)
    scale = dims[0] ** -0.5
    extras = interpreter.Extras(mask, scale, soft_cap)
    out, lse, row_max = kernels.forward(query, key, value, mask, extras, added, tiles[0], compiled)
    dq, dk, dv, _, dbias = kernels.backward(
        query, key, value, out, lse, dout, dlse, mask, extras, added, tiles[1], compiled
    )
    arrays = {"query": query, "key": key, "value": value, "scale": np.float32(scale)}
    found = {"query": dq, "key": dk, "value": dv}
    if added.bias is not None:
        arrays["bias"] = added.bias.astype(np.float32)
        found["bias"] = dbias
    factors = philox.factors(KEY, rate, sizes) if rate else None
    true, _, largest = score_oracle.true_and_plain(
        arrays, attends[:, None], dout, dlse, soft_cap=soft_cap or None, factors=factors
    )
    close = {"atol": 2e-5, "rtol": 2e-5}
    np.testing.assert_allclose(out, true.out, err_msg="out", **close)
    np.testing.assert_allclose(kernels.log_sum_exp(lse), true.lse, err_msg="lse", **close)
    np.testing.assert_allclose(row_max.max(-1), largest, err_msg="row_max", **close)
    for name, got in found.items():
        more = {"atol": 2e-3, "rtol": 2e-3} if got.dtype == np.float16 else {"atol": 1e-4}
        np.testing.assert_allclose(
            got.astype(np.float32), true.gradients[name], err_msg=name, **{**close, **more}
        )


IDS = np.stack([packed(37, 66, 1, -20, 60, 16), packed(101, 3, 96)])
BOTH_WAYS = packax.documents(IDS)


def check_a_bias_alone(expression, q_len, shape, stages):
    kv_len, heads, kv_heads, dims = 200, 4, 2, (24, 16)
    attends = np.asarray(expression.as_array(q_len, kv_len))
    attends = np.broadcast_to(attends, (2, q_len, kv_len))
    mask = mask_of(expression, q_len, kv_len)
    rng = np.random.default_rng(q_len + stages)
    sizes = (2, heads, q_len, kv_len)

    def draw(*sizes):
        return rng.standard_normal(sizes).astype(np.float32)

    query, key = draw(2, q_len, heads, dims[0]), draw(2, kv_len, kv_heads, dims[0])
    value, dout = draw(2, kv_len, kv_heads, dims[1]), draw(2, q_len, heads, dims[1])
    added = added_of(shape, np.float32, 0, sizes, rng)
    scale = -(dims[0] ** -0.5)  # negative: the largest score is then not the largest logit
    extras = interpreter.Extras(mask, scale, 0.0)
    tiles = (64, 32), (64, 32), (32, 64), 64
    found = kernels.alone(query, key, value, dout, mask, extras, added, tiles, (32, 16), stages)
    arrays = {"query": query, "key": key, "value": value, "scale": np.float32(scale)}
    arrays["bias"] = added.bias
    true, _, _ = score_oracle.true_and_plain(
        arrays, attends[:, None], dout, np.zeros((2, heads, q_len), np.float32)
    )
    found["lse"] = kernels.log_sum_exp(found["lse"])
    expected = {"out": true.out, "lse": true.lse, **true.gradients}
    for name, got in found.items():
        np.testing.assert_allclose(got, expected[name], err_msg=name, atol=1e-4, rtol=2e-5)


@pytest.mark.parametrize(
    "expression,q_len,shape,stages",
    some(
        [
            (packax.causal() & BOTH_WAYS, 200, (0, 1, 1), 2),
            (BOTH_WAYS, 200, (1, 0, 1), 1),
            (packax.full(), 131, (0, 1, 1), 2),
            (packax.causal() & packax.documents(IDS[:1]), 200, (1, 1, 0), 2),
            (packax.causal() & BOTH_WAYS, 200, (1, 1, 1), 2),
            (BOTH_WAYS, 200, (1, 1, 1), 1),
            (packax.sliding_window(40), 131, (1, 1, 1), 2),
        ],
        *(0, 4),
    ),
    ids=lambda x: f"{x}" if isinstance(x, tuple) else None,
)
def test_kernels_for_a_bias_alone_equal_the_oracle(expression, q_len, shape, stages):
    """With documents that start at no multiple of 8: the kernels read 8 keys at once."""
    check_a_bias_alone(expression, q_len, shape, stages)


def test_a_bias_alone_and_tiles_of_rows_that_attend_nothing():
    ids = np.repeat([0, -1], (60, 140))
    check_a_bias_alone(packax.documents(ids), 200, (1, 1, 1), 2)


# Rows with only hidden keys, and hidden blocks at the start of rows and in between.
HIDING = [
    ("left 100", "-inf", packax.full(), 131),
    ("left 64", "least", packax.full(), 131),
    ("both", "-inf", packax.causal() & packax.documents(IDS), 200),
    ("both", "least", packax.causal() & packax.documents(IDS), 200),
    ("rows", "-1e9", packax.causal() & packax.documents(IDS), 200),
    ("both", "most", packax.full(), 131),
]


@pytest.mark.parametrize(
    "case,kind",
    some(itertools.product(HIDING, ["alone", "alone, in each batch row", "with options"]), 1, 11),
    ids=lambda x: " ".join(x[:2]) if isinstance(x, tuple) else x,
)
def test_additive_masks(case, kind):
    batch = 2 if kind.endswith("row") else 1
    check_additive_masks(case, kind.startswith("alone"), TILES, DIMS, COMPILED, batch)


@pytest.mark.parametrize("kind,name,expression,q_len", some(HIDING))
def test_additive_masks_above_head_dim_128(kind, name, expression, q_len):
    case = kind, name, expression, q_len
    check_additive_masks(case, False, tiles_above_128("hopper"), *WIDE[0])


def check_additive_masks(case, alone, tiles, dims, compiled, batch=1):
    """The queries of one batch row are 0: the softmax of equal logits, however large. The bias has
    `batch` batch rows."""
    kind, name, expression, q_len = case
    kv_len, heads, kv_heads = 200, 2, 1
    allowed = np.broadcast_to(np.asarray(expression.as_array(q_len, kv_len)), (2, q_len, kv_len))
    rng = np.random.default_rng(5)

    def draw(*sizes):
        return rng.standard_normal(sizes).astype(np.float32)

    query, key = draw(2, q_len, heads, dims[0]), draw(2, kv_len, kv_heads, dims[0])
    value, dout = draw(2, kv_len, kv_heads, dims[1]), draw(2, q_len, heads, dims[1])
    query[1] = 0
    value_of = additive_masks.values_of(np.float32)[name]
    bias = additive_masks.hiding(kind, value_of, (batch, heads, q_len, kv_len)).astype(np.float32)
    idle = additive_masks.emptied(allowed, bias, (2, heads, q_len))
    dout = np.where(idle.swapaxes(1, 2)[..., None], np.float32(0), dout)  # as shard.py leaves it
    dlse = np.where(idle | alone, np.float32(0), draw(2, heads, q_len))
    arrays = {"query": query, "key": key, "value": value, "scale": np.float32(dims[0] ** -0.5)}
    arrays["bias"] = bias
    true, plain, _ = score_oracle.true_and_plain(arrays, allowed[:, None], dout, dlse)
    for results in (true, plain):
        del results.gradients["scale"]
    mask, added = mask_of(expression, q_len, kv_len), kernels.Added(bias)
    extras = interpreter.Extras(mask, float(arrays["scale"]), 0.0)
    # The query of a row that attends to nothing must not change a gradient.
    query = np.where(idle.swapaxes(1, 2)[..., None], np.float32(1e10), query)
    if alone:
        tiles = (64, 32), (64, 32), (32, 64), 64
        found = kernels.alone(query, key, value, dout, mask, extras, added, tiles, compiled, 2)
    else:
        out, lse, _ = kernels.forward(query, key, value, mask, extras, added, tiles[0], compiled)
        dq, dk, dv, _, dbias = kernels.backward(
            query, key, value, out, lse, dout, dlse, mask, extras, added, tiles[1], compiled
        )
        found = {"out": out, "lse": lse, "query": dq, "key": dk, "value": dv, "bias": dbias}
    out, lse = found.pop("out"), kernels.log_sum_exp(found.pop("lse"))
    got = score_oracle.Results(out, lse, found)
    additive_masks.compare(got, true, plain, idle, kind)
