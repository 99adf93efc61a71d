"""ALiBi on a GPU. For positions that are indices Hopper has dedicated kernels; positions in arrays
use the fallback kernels. `pytest -m gpu`."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import score_oracle
from gpu_kinds import DTYPES, THREE_ROWS, causal_documents
from gpu_runs import (
    Results,
    Tensors,
    assert_agree,
    assert_identical,
    build,
    has_hopper_kernels,
    poison,
    same_each_run,
    tensors,
)

pytestmark = pytest.mark.gpu

DIMS = (64, 128)
KINDS = [(dtype, dim) for dim in DIMS for dtype in DTYPES]
MASKS = {
    "documents": lambda: causal_documents(THREE_ROWS),  # with padding: some rows attend to nothing
    "window": lambda: packax.sliding_window(90, 20) & packax.documents(THREE_ROWS),
    "full": lambda: packax.documents(np.zeros((1, 500), int)),  # keys on both sides: |i - j|
}


def slopes_of(heads):
    """The paper's slopes, except for one that is zero and one that favours keys far away."""
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    slopes[-1] = -0.01
    slopes[0] = 0.0
    return jnp.asarray(slopes, jnp.float32)


@functools.partial(jax.jit, static_argnames=("scale", "deterministic", "indices"))
def passes(x, mask, slopes, scale=None, deterministic=False, indices=True):
    places = {} if indices else {"positions": jnp.arange(x.query.shape[1])}
    if x.query.shape[1] != x.key.shape[1] and not indices:
        places["kv_positions"] = jnp.arange(x.key.shape[1])

    def attention(query, key, value):
        return packax.flash_attention(
            query, key, value, mask, scale=scale, bias=packax.alibi(slopes, **places),
            return_lse=True, deterministic=deterministic, implementation="cuda",
        )  # fmt: skip

    (out, lse), pullback = jax.vjp(attention, x.query, x.key, x.value)
    return Results(out, lse, *pullback((x.dout, x.dlse)))


def run(x, expression, **static):
    mask = jax.block_until_ready(build(expression, x))
    poison(x)
    return jax.block_until_ready(passes(x, mask, slopes_of(x.query.shape[2]), **static))


def judged(x, got, allowed, scale=None):
    q_len, dim = x.query.shape[1], x.query.shape[3]
    arrays = {"query": x.query, "key": x.key, "value": x.value}
    arrays |= {"scale": jnp.float32(dim**-0.5 if scale is None else scale)}
    arrays |= {"slopes": slopes_of(x.query.shape[2])}
    places = np.arange(q_len)[None], np.arange(x.key.shape[1])[None]
    true, plain, _ = score_oracle.true_and_plain(arrays, allowed, x.dout, x.dlse, places=places)
    got = score_oracle.Results(got.out, got.lse, {"query": got.dq, "key": got.dk, "value": got.dv})
    score_oracle.check(got, true, plain)


@pytest.mark.parametrize("deterministic", (False, True), ids=("", "deterministic"))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype,dim", KINDS)
def test_documents(dtype, dim, mask, deterministic):
    x = tensors(3, 500, 500, 4, 2, dim, dtype)
    expression = MASKS[mask]()
    got = run(x, expression, deterministic=deterministic)
    judged(x, got, expression.as_array(500, 500))


@pytest.mark.parametrize(
    "name,dim",
    [
        *(("causal_long", 64), ("causal_wide", 128), ("causal_tall", 64), ("one_row", 128)),
        *(("gqa_8", 64), ("gqa_4", 128), ("single_tokens", 64), ("all_padding", 128)),
        *(("window_of_any_positions", 64), ("ranges_random", 128), ("ids_reappear", 64)),
    ],
)
def test_cases(name, dim):
    """Different lengths of rows and keys; ALiBi uses indices whatever positions the mask has."""
    case = cases.BY_NAME[name]
    x = Tensors(*case.tensors("bfloat16", dim, dim))
    judged(x, run(x, case.expression()), case.allowed())


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.5])
@pytest.mark.parametrize("dim", [64, 128, 72, 256])
def test_scales_and_head_dims(dim, scale):
    x, expression = tensors(3, 500, 500, 4, 2, dim, "bfloat16"), MASKS["documents"]()
    judged(x, run(x, expression, scale=scale), expression.as_array(500, 500), scale)


@pytest.mark.parametrize("dtype,dim", KINDS)
def test_both_kinds_of_kernels(dtype, dim):
    """They agree much closer than required. On Hopper they are different kernels."""
    x, expression = tensors(3, 500, 500, 4, 2, dim, dtype), MASKS["documents"]()
    got, general = (run(x, expression, indices=indices) for indices in (True, False))
    assert_agree(got, general)
    if has_hopper_kernels():
        assert (np.asarray(got.lse) != np.asarray(general.lse)).any()


@pytest.mark.parametrize("dtype,dim", [("float16", 64), ("bfloat16", 128)])
def test_garbage_in_padding_changes_nothing(dtype, dim):
    padding = (THREE_ROWS == packax.PADDING_SEGMENT_ID)[..., None, None]
    most = float(jnp.finfo(dtype).max)
    clean = tensors(3, 500, 500, 4, 2, dim, dtype)
    four = [
        jnp.where(padding, jnp.asarray(sign * most, dtype), y)
        for sign, y in zip((1, -1, 1, -1), clean[:4], strict=True)
    ]
    dirty = Tensors(*four, jnp.where(padding[:, None, :, 0, 0], 1e30, clean.dlse))
    for mask in ("documents", "window"):
        expected, got = (run(y, MASKS[mask]()) for y in (clean, dirty))
        assert_identical(same_each_run(got, False), same_each_run(expected, False), "padding: ")
        assert np.isfinite(np.asarray(got.dq, np.float32)).all()


def test_long_rows():
    """Far from the diagonal the bias is in the thousands; the LSE stays right in float32."""
    length = 40_000
    x = tensors(1, length, length, 2, 1, 64, "bfloat16")
    got = run(x, packax.causal())
    rows = np.r_[0:3, 17_000:17_003, length - 3 : length]
    allowed = (np.arange(length)[None] <= rows[:, None])[None]
    scores = np.einsum(
        "ihd,jd->hij", *(np.asarray(y, np.float64) for y in (x.query[0, rows], x.key[0, :, 0]))
    )
    far = np.abs(rows[:, None] - np.arange(length)[None])
    logits = scores / 8 - np.asarray(slopes_of(2), np.float64)[:, None, None] * far
    logits = np.where(allowed, logits, -np.inf)
    top = logits.max(-1)
    lse = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    np.testing.assert_allclose(np.asarray(got.lse)[0][:, rows], lse, rtol=2e-6, atol=1e-4)


def test_the_gradient_of_slopes():
    """It uses the fallback backward after Hopper's forward."""
    x, mask = tensors(3, 500, 500, 4, 2, 64, "bfloat16"), MASKS["documents"]()
    mask = build(mask, x)

    def loss(slopes, **places):
        out = packax.flash_attention(
            x.query, x.key, x.value, mask, bias=packax.alibi(slopes, **places)
        )
        return (out * x.dout).astype(jnp.float32).sum()

    indexed = jax.jit(jax.grad(loss))(slopes_of(4))
    placed = jax.jit(lambda s: jax.grad(functools.partial(loss, positions=jnp.arange(500)))(s))
    np.testing.assert_allclose(
        indexed, placed(slopes_of(4)), rtol=2e-2, atol=0.05 * np.abs(indexed).max()
    )
