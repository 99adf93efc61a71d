"""Soft caps on a GPU. For a scale that is a number, Hopper has dedicated kernels; an array as scale
uses the fallback kernels. `pytest -m gpu`."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
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
    packed,
    poison,
    run,
    same_each_run,
    tensors,
)

pytestmark = pytest.mark.gpu

DIMS = (64, 128, 256)
KINDS = [(dtype, dim) for dim in DIMS for dtype in DTYPES]
CAPS = (2.0, 50.0, 1024.0)
# The factor on some rows (ROWS): their warps compute tanh from the exponential, the others from the
# polynomial.
LOUD = {2.0: 4, 50.0: 30, 1024.0: 600}
ROWS = np.r_[20:46, 200:203, 499]
BACK = np.stack([packed(90, 40, 370), packed(500), packed(64, 436)])
BACK[0, 300:], BACK[2, 400:] = BACK[0, 0], BACK[2, 0]  # ids reappear: segment-checked rows
BACK[1, 460:] = packax.PADDING_SEGMENT_ID
MASKS = (
    lambda: causal_documents(THREE_ROWS),  # with padding: some rows attend to nothing
    lambda: packax.sliding_window(90, 20) & packax.documents(THREE_ROWS),
    lambda: causal_documents(BACK, positions=np.stack([cases.positions_of(ids) for ids in BACK])),
)


def packed_tensors(dtype, dim, loud=1, seed=0) -> Tensors:
    """Inputs for MASKS: a tile of rows, and the blocks of a tile of keys, use both ways to tanh."""
    x = tensors(3, 500, 500, 4, 2, dim, dtype, seed)
    gain = np.where(np.isin(np.arange(500), ROWS), loud, 1)[:, None, None]
    return x._replace(query=x.query * jnp.asarray(gain, dtype))


def judged(x, got, expression, soft_cap, scale=None):
    """Check by the oracle's rule, and again without the loud rows, whose errors hide others."""
    scale = x.query.shape[-1] ** -0.5 if scale is None else scale
    arrays = {"query": x.query, "key": x.key, "value": x.value, "scale": jnp.float32(scale)}
    allowed = expression.as_array(x.query.shape[1], x.key.shape[1])
    true, plain, _ = score_oracle.true_and_plain(arrays, allowed, x.dout, x.dlse, soft_cap=soft_cap)
    got = score_oracle.Results(got.out, got.lse, {"query": got.dq, "key": got.dk, "value": got.dv})
    score_oracle.check(got, true, plain)
    quiet = np.setdiff1d(np.arange(x.query.shape[1]), ROWS)
    if len(quiet):
        score_oracle.check(*(part_of(y, quiet) for y in (got, true, plain)))


def part_of(results, rows):
    query = {"query": np.asarray(results.gradients["query"])[:, rows]}
    out, lse = np.asarray(results.out)[:, rows], np.asarray(results.lse)[:, :, rows]
    return score_oracle.Results(out, lse, query)


def check(x, expression, soft_cap, scale=None, deterministic=False):
    got = run(x, expression, scale, deterministic, soft_cap)
    judged(x, got, expression, soft_cap, scale)
    return got


@pytest.mark.parametrize("cap", range(len(CAPS)), ids=lambda i: f"cap{CAPS[i]:g}")
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda i: f"{KINDS[i][0]}-d{KINDS[i][1]}")
@pytest.mark.parametrize("loud", (False, True), ids=("", "loud"))
def test_packed_documents(kind, cap, loud):
    """Every head dim, dtype and cap, cycling through the masks."""
    x = packed_tensors(*KINDS[kind], LOUD[CAPS[cap]] if loud else 1)
    check(x, MASKS[(kind + cap + loud) % len(MASKS)](), CAPS[cap])


NAMES = (
    *("causal_long", "causal_wide", "causal_tall", "one_row"),
    *("gqa_8", "single_tokens", "all_padding", "window_of_any_positions", "ranges_random"),
)


@pytest.mark.parametrize("name,dim", [(n, DIMS[i % 3]) for i, n in enumerate(NAMES)])
def test_cases(name, dim):
    case = cases.BY_NAME[name]
    check(Tensors(*case.tensors("bfloat16", dim, dim)), case.expression(), 3.0)


@jax.jit
def of_an_array(x: Tensors, mask, scale):
    """Runs the fallback kernels with the cap of `test_both_kinds_of_kernels`."""

    def attention(query, key, value):
        return packax.flash_attention(
            query, key, value, mask, scale=scale, soft_cap=50.0, return_lse=True
        )

    (out, lse), pullback = jax.vjp(attention, x.query, x.key, x.value)
    return Results(out, lse, *pullback((x.dout, x.dlse)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-d{kind[1]}")
def test_both_kinds_of_kernels(kind):
    """They agree much closer than required. On Hopper they are different kernels."""
    x, expression = packed_tensors(*kind, LOUD[50.0]), MASKS[0]()
    mask = jax.block_until_ready(build(expression, x))
    poison(x)
    general = of_an_array(x, mask, jnp.float32(kind[1] ** -0.5))
    judged(x, general, expression, 50.0)
    got = run(x, mask, None, False, 50.0)
    assert_agree(got, general)
    if has_hopper_kernels():
        assert (np.asarray(got.lse) != np.asarray(general.lse)).any()


@pytest.mark.parametrize("dim", DIMS)
def test_deterministic_gradients_have_the_same_bits(dim):
    """With `deterministic=True` they are right and have the same bits in a second run, and in a
    call that requests only some of them."""
    x, expression = packed_tensors("bfloat16", dim, LOUD[50.0]), MASKS[0]()
    first = check(x, expression, 50.0, deterministic=True)
    assert_identical(run(x, expression, None, True, 50.0), first, "second run: ")
    mask = build(expression, x)

    def loss(query, key, value):
        out, lse = packax.flash_attention(query, key, value, mask, soft_cap=50.0, return_lse=True)
        seen = jnp.isfinite(lse)
        return (out * x.dout).astype(jnp.float32).sum() + (jnp.where(seen, lse, 0) * x.dlse).sum()

    for wanted in ((0,), (1, 2)):
        gradient = jax.jit(jax.grad(loss, wanted))
        poison(x)
        got = gradient(x.query, x.key, x.value)
        assert_identical(got, tuple(first[2 + i] for i in wanted), f"gradients of {wanted}: ")


@pytest.mark.parametrize("dtype,dim", [("bfloat16", 64), ("float16", 128), ("bfloat16", 256)])
def test_sinks(dtype, dim):
    x, expression = packed_tensors(dtype, dim), MASKS[0]()
    mask, sinks = build(expression, x), jnp.linspace(-3.0, 4.0, 4)
    arrays = {"query": x.query, "key": x.key, "value": x.value, "sinks": sinks}

    @jax.jit
    def function(arrays, dout, dlse):
        def attention(arrays):
            return packax.flash_attention(**arrays, mask=mask, soft_cap=2.0, return_lse=True)

        return score_oracle.run(attention, arrays, dout, dlse)

    poison(x)
    got = function(arrays, x.dout, x.dlse)
    arrays["scale"] = jnp.float32(dim**-0.5)
    allowed = expression.as_array(500, 500)
    true, plain, _ = score_oracle.true_and_plain(arrays, allowed, x.dout, x.dlse, soft_cap=2.0)
    score_oracle.check(got, true, plain)


@pytest.mark.parametrize(
    "dims,soft_cap,scale",
    [
        (128, 2.0, -0.3),  # the sign is applied to the query
        (64, 2.0, 0.0),
        (64, 1e-3, None),  # tanh is 1 or -1 everywhere
        (128, 5000.0, None),  # this and the next use the fallback kernels
        ((192, 128), 50.0, None),
        (72, 50.0, None),
    ],
)
def test_other_caps_scales_and_head_dims(dims, soft_cap, scale):
    check(packed_tensors("bfloat16", dims), MASKS[2](), soft_cap, scale)


@pytest.mark.parametrize("deterministic", (False, True), ids=("", "deterministic"))
@pytest.mark.parametrize("dtype,dim", [("float16", 64), ("bfloat16", 128), ("bfloat16", 256)])
def test_garbage_in_padding_changes_nothing(dtype, dim, deterministic):
    """Scores in padding overflow to infinities and NaNs, at both ends of the cap."""
    padding = (THREE_ROWS == packax.PADDING_SEGMENT_ID)[..., None, None]
    most = float(jnp.finfo(dtype).max)
    clean = packed_tensors(dtype, dim, LOUD[50.0])
    four = [
        jnp.where(padding, jnp.asarray(sign * most, dtype), y)
        for sign, y in zip((1, -1, 1, -1), clean[:4], strict=True)
    ]
    dirty = Tensors(*four, jnp.where(padding[:, None, :, 0, 0], 1e30, clean.dlse))
    for make in MASKS[:2]:
        expected, got = (run(y, make(), None, deterministic, 50.0) for y in (clean, dirty))
        assert_identical(
            same_each_run(got, deterministic), same_each_run(expected, deterministic), "padding: "
        )
        assert np.isfinite(np.asarray(got.dq, np.float32)).all()
        for y in (got.out, got.dq, got.dk, got.dv):
            assert not np.any(np.asarray(y, np.float32)[padding[..., 0, 0]])


@pytest.mark.parametrize("dtype,dim", [("bfloat16", 64), ("float16", 128), ("bfloat16", 256)])
def test_nan_stays_where_numerics_md_says(dtype, dim):
    x = tensors(1, 884, 884, 4, 2, dim, dtype)
    expression = causal_documents(packed(384, 300, -84, 116))
    expected = run(x, expression, None, True, 50.0)
    broken = np.arange(884) >= 384
    four = (jnp.where(broken[None, :, None, None], jnp.nan, y) for y in x[:4])
    got = run(
        Tensors(*four, jnp.where(broken, jnp.nan, x.dlse)), expression, None, True, 50.0
    )  # fmt: skip
    for name in oracle.Results._fields:
        axis = 2 if name == "lse" else 1
        a, b = (np.take(np.asarray(getattr(y, name)), np.arange(384), axis) for y in (got,
            expected))  # fmt: skip
        assert_identical(a, b, f"{name} of a document that shares no tile with the NaNs: ")
        assert np.isnan(np.asarray(getattr(got, name), np.float32)).any()
