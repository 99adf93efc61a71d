"""merge_attention: several calls over disjoint keys equal one attention, with its gradients.

Guards against a row without keys in one part that poisons the others (exp(-inf - -inf)), a NaN
cotangent of such a row, and an infinite sink in one part.
"""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import parse
from jax.test_util import check_grads
from packings import ids_of, positions_of
from tiers import some

WINDOW, FIRST = 20, 4


IDS = ids_of((0, 60), (1, 3), (2, 37), (-1, 10))
POSITIONS = positions_of(IDS)


def expressions():
    """The recipe of docs/guide/masks.md: a window, and the first tokens of the row's document."""
    start = np.arange(len(IDS)) - POSITIONS
    outside_window = np.clip(POSITIONS - WINDOW, 0, FIRST)
    documents = packax.documents(IDS)
    near = packax.sliding_window(WINDOW) & documents
    return near, packax.masks.ranges(start, start + outside_window) & documents


def attention(a):
    return packax.merge_attention(
        [
            packax.flash_attention(
                a["query"], a["key"], a["value"], mask, scale=0.3, return_lse=True
            )
            for mask in expressions()
        ]
    )


@pytest.mark.parametrize("dtype", some(("float32", "bfloat16"), 0))
def test_first_tokens_and_a_window(dtype):
    near, first = (x.as_array(len(IDS), len(IDS)) for x in expressions())
    index = np.arange(len(IDS))
    same = (IDS[:, None] == IDS) & (IDS != -1)
    recent = (index[:, None] - index <= WINDOW) | (POSITIONS < FIRST)
    allowed = same & (index[:, None] >= index) & recent
    np.testing.assert_array_equal(near | first, allowed)
    assert not (near & first).any()
    call = parse(f"lengths=110x110,dims=16x16,scale=0.3,results=out+lse,dtype={dtype}")
    a = call.arrays()
    got = jax.jit(lambda a: call.step(a, attention))(a)
    assert got["out"].dtype == dtype and got["lse"].dtype == np.float32
    true, plain = dense.true_and_plain(call.operands(a), allowed, dtype)
    assert not (wrong := dense.close(got, true, plain)), wrong


def parts_of(lses, dtype=np.float32):
    """Parts with one row per column of lses, and one head."""
    rng = np.random.default_rng(1)
    lses = jnp.asarray(lses, dtype)
    outs = jnp.asarray(rng.standard_normal((len(lses), 1, lses.shape[1], 1, 3)), dtype)
    return [(out, lse[None, None]) for out, lse in zip(outs, lses, strict=True)]


INF = np.inf


def test_infinite_log_sum_exps():
    """By column: one part empty; all empty; a sink of +inf in one part; the same with the other
    part empty; extreme finite values."""
    parts = parts_of([[0.5, -INF, INF, INF, 3e38], [-INF, -INF, 1.0, -INF, -3e38]])
    (first, first_lse), (second, second_lse) = parts
    full = first_lse[0, 0] == INF  # the sink takes all weight
    first = jnp.where(full[:, None, None], 0, first)
    second = jnp.where((second_lse == -INF)[0, 0, :, None, None], jnp.nan, second)
    parts = [(first, first_lse), (second, second_lse)]  # the output of an empty row is ignored

    def function(parts):
        return packax.merge_attention(parts)

    for apply in (function, jax.jit(function)):
        out, lse = apply(parts)
        np.testing.assert_array_equal(lse[0, 0], np.float32([0.5, -INF, INF, INF, 3e38]))
        wanted = np.asarray(parts[0][0][0]).copy()
        wanted[1:4] = 0
        np.testing.assert_array_equal(out[0], wanted)
    # Cotangents of the row without keys are ignored, whatever their value.
    cotangents = jax.tree.map(jnp.ones_like, (out, lse))
    cotangents = (
        jax.tree.map(lambda x: x.at[..., 1, :, :].set(jnp.nan), cotangents[0]),
        (cotangents[1].at[..., 1].set(jnp.nan)),
    )
    (gradients,) = jax.vjp(function, parts)[1](cotangents)
    for gradient in jax.tree.leaves(gradients):
        assert np.isfinite(gradient).all()
    (dout, dlse), (dout_empty, dlse_empty) = gradients
    np.testing.assert_array_equal(dout[0, :, 0, 0], [1, 0, 1, 1, 1])
    np.testing.assert_array_equal(dlse[0, 0], [1, 0, 1, 1, 1])
    assert not dout_empty.any() and not dlse_empty.any()


@pytest.mark.parametrize("order", some([1, 2], 0))
def test_derivatives(order):
    """First and second, forward and reverse, at rows that are empty in some parts."""
    with jax.enable_x64(True):
        parts = parts_of([[0.5, -INF, 2], [-1.0, 0.3, -INF], [0.1, 0.7, -INF]], np.float64)
        attended = [jnp.isfinite(lse) for _, lse in parts]

        def function(outs, lses):  # numerical differences cannot step away from -inf
            lses = [jnp.where(*x, -INF) for x in zip(attended, lses, strict=True)]
            return packax.merge_attention(list(zip(outs, lses, strict=True)))

        outs, lses = zip(*parts, strict=True)
        check_grads(
            jax.jit(function), (outs, jax.tree.map(jnp.nan_to_num, lses)), order=order, rtol=1e-5
        )


def test_with_decoding_and_sinks():
    """A cache in two halves with the sink in one of them equals decode_attention of the whole
    cache."""
    rng = np.random.default_rng(2)
    query = jnp.asarray(rng.standard_normal((3, 1, 4, 16)), np.float32)
    key, value = (jnp.asarray(rng.standard_normal((3, 40, 2, 16)), np.float32) for _ in "kv")
    lengths, sinks = np.array([40, 25, 3]), jnp.array([0.5, -INF, INF, 2.0])
    wanted = packax.decode_attention(query, key, value, lengths, sinks=sinks, return_lse=True)
    halves = [
        packax.decode_attention(
            query, key[:, part], value[:, part], np.clip(lengths - part.start, 0, 20),
            causal=False, return_lse=True, **options,
        )
        for part, options in ((slice(0, 20), {"sinks": sinks}), (slice(20, 40), {}))
    ]  # fmt: skip
    got = packax.merge_attention(halves)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)
