"""Results of the cubins on a GPU, for small calls and past 2^31 elements. `pytest -m gpu`; more in
test_gpu_*.py."""

from __future__ import annotations

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_kinds import DIMS, DTYPES, THREE_ROWS, WIDE, causal_documents, name_of
from gpu_runs import (
    Results,
    Tensors,
    assert_close,
    build,
    packed,
    passes,
    run,
    tensors,
)
from packax._src.ops import lowering

pytest_plugins = ("gpu_fixtures",)
pytestmark = pytest.mark.gpu


def check_case(case, dtype, dims):
    x = Tensors(*case.tensors(dtype, *dims))
    assert_close(x, run(x, case.expression()), case.allowed())


@pytest.mark.parametrize("dims", DIMS[:2], ids=lambda dims: f"d{dims[0]}")
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_cases(case, dtype, dims):
    check_case(case, dtype, dims)


WIDE_KINDS = itertools.cycle((dtype, dims) for dims in WIDE for dtype in DTYPES)


@pytest.mark.parametrize(
    "case,kind",
    [
        pytest.param(case, kind, id=f"{case}-{name_of(kind)}")
        for case, kind in zip(cases.CASES, WIDE_KINDS, strict=False)
    ],
)
def test_wide_cases(case, kind):
    """Every case once, cycling through the head dims and dtypes."""
    check_case(case, *kind)


@pytest.mark.parametrize(
    "heads,kv_heads",
    ((8, 8), (8, 2), (8, 1), (16, 4)),
    ids=("gqa1", "gqa4", "gqa8", "more tiles than multiprocessors"),
)
def test_three_rows_of_different_documents(heads, kv_heads, kind):
    """At head dim 64, calls with few tiles use another forward (LowOccupancy in csrc/launch)."""
    dtype, dims = kind
    x = tensors(3, 500, 500, heads, kv_heads, dims, dtype)
    expression = causal_documents(THREE_ROWS)
    assert_close(x, run(x, expression), expression.as_array(500, 500))


@pytest.mark.parametrize("length,heads,kv_heads", ((1100, 8, 1), (2049, 6, 2)))
def test_groups_of_heads_in_parts(length, heads, kv_heads, kind):
    """There are so few programs that the backward splits groups of heads (ops/lowering.py)."""
    dtype, dims = kind
    x = tensors(1, length, length, heads, kv_heads, dims, dtype)
    assert lowering.parts_of_group(x.query, x.key) > 1
    expression = causal_documents(np.arange(length) // 700)
    assert_close(x, run(x, expression), expression.as_array(length, length))


@pytest.mark.parametrize("q_len,kv_len", ((1, 1), (49, 49), (7, 100)))
@pytest.mark.parametrize("own", (False, True), ids=("one for all", "one each"))
def test_many_short_rows_of_a_batch(q_len, kv_len, own, kind):
    """The kernels get them as one row of documents (ops/lowering.py)."""
    dtype, dims = kind
    batch = 257
    x = tensors(batch, q_len, kv_len, 4, 2, dims, dtype)
    assert lowering.worth_packing(x.query, x.key)
    expression = packax.causal()
    if own:
        rng = np.random.default_rng(q_len)
        ids, kv_ids = (rng.integers(-1, 2, (batch, n)) for n in (q_len, kv_len))
        expression = packax.documents(ids, kv_segment_ids=kv_ids)
    assert_close(x, run(x, expression), expression.as_array(q_len, kv_len))


@pytest.mark.parametrize("q_len,kv_len", ((1, 700), (700, 1), (130, 515), (515, 130)))
@pytest.mark.parametrize("kind", ("full", "causal", "documents", "ranges"))
def test_query_and_key_lengths_differ(q_len, kv_len, kind, dtype):
    rng = np.random.default_rng(1)
    lo = rng.integers(-5, kv_len + 5, (2, q_len)).astype(np.int32)
    expression = {
        "full": packax.full(),
        "causal": packax.causal(),
        "documents": packax.documents(
            rng.integers(-1, 3, (2, q_len)), kv_segment_ids=rng.integers(-1, 3, (2, kv_len))
        ),
        "ranges": packax.masks.ranges(lo, lo + rng.integers(0, 200, (2, q_len), np.int32)),
    }[kind]
    x = tensors(2, q_len, kv_len, 4, 2, 64, dtype)
    assert_close(x, run(x, expression), expression.as_array(q_len, kv_len))


@pytest.mark.parametrize("first", range(1, 301, 25))
def test_every_length_to_300(first):
    for length in range(first, first + 25):
        dims = DIMS[next((i for i, n in ((3, 13), (2, 11), (1, 7)) if length % n == 0), 0)]
        x = tensors(1, length, length, 2, 1, dims, "bfloat16", seed=length)
        cut = (length * 5) // 11
        ids = packed(*(n for n in (cut, length - cut) if n))
        expression = causal_documents(ids)
        try:
            allowed = expression.as_array(length, length)
            assert_close(x, run(x, expression), allowed, pad=325)
        except AssertionError as error:
            raise AssertionError(f"length {length}: {error}") from error


@pytest.mark.parametrize("scale", (0.0, -0.3, 2.5))
def test_scale(scale, dtype):
    x = tensors(1, 200, 200, 2, 2, 64, dtype)
    expression = causal_documents(packed(90, 110))
    assert_close(x, run(x, expression, scale), expression.as_array(200, 200), scale)


def test_ids_and_positions_of_any_shape(kind):
    dtype, dims = kind
    rng = np.random.default_rng(2)
    ids = rng.choice(np.array([-(2**31), -2, -1, 0, 5, 2**31 - 1], np.int32), (2, 333))
    positions = rng.integers(-50, 50, (2, 333)).astype(np.int32)
    x = tensors(2, 333, 333, 36, 9, dims, dtype)  # more tiles than multiprocessors
    expression = causal_documents(ids, positions=positions)
    assert_close(x, run(x, expression), expression.as_array(333, 333))


@pytest.mark.parametrize("ordered", (False, True), ids=("tested", "ordered"))
def test_two_limits_of_positions(kind, ordered, deterministic):
    """Windows of positions over several tiles: the segment check with and without a lower limit."""
    dtype, dims = kind
    rng = np.random.default_rng(7)
    ids = np.stack([packed(300, 1, -40, 359), packed(-7, 64, 200, 429)])
    positions = rng.integers(0, 500, ids.shape).astype(np.int32)
    if ordered:
        positions = np.sort(positions, axis=1)
    x = tensors(2, 700, 700, 4, 2, dims, dtype)
    expression = packax.sliding_window(60, 25) & packax.documents(ids, positions=positions)
    got = run(x, expression, deterministic=deterministic)
    assert_close(x, got, expression.as_array(700, 700))


def test_xla_and_cubin_agree_on_the_gpu():
    x = tensors(3, 500, 500, 8, 2, 128, "bfloat16")
    mask = build(causal_documents(THREE_ROWS), x)
    for got, expected in zip(run(x, mask), passes(x, mask, None, "xla"), strict=True):
        got, expected = (np.asarray(y, np.float32) for y in (got, expected))
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        difference = np.linalg.norm(got[finite] - expected[finite])
        assert difference <= 1e-2 * np.linalg.norm(expected[finite])


# --- Size


def test_offsets_past_two_to_the_31():
    """2 x 132,096 x 64 x 128 elements: the last document and heads equal a call with only these."""
    free = jax.devices()[0].memory_stats()["bytes_limit"]
    if free < 60e9:
        pytest.skip(f"needs 60 GB of GPU memory, there are {free / 1e9:.0f}")
    length, document, heads = 132096, 1024, 64
    x = tensors(2, length, length, heads, heads, 128, "bfloat16")
    assert x.query.size > 2**31
    ids = np.repeat(np.arange(length // document), document).astype(np.int32)
    mask = build(causal_documents(ids), x)
    got = passes(x, mask, None, "cuda")
    alone = jnp.tri(document, dtype=bool)[None]
    for batch, start in ((0, 0), (1, length - document)):
        rows = slice(start, start + document)

        def part(y, batch=batch, rows=rows):
            return y[batch : batch + 1, rows, -2:]

        def sums(y, batch=batch, rows=rows):
            return y[batch : batch + 1, -2:, rows]

        few = type(x)(*map(part, x[:4]), sums(x.dlse))
        few_got = Results(part(got.out), sums(got.lse), *map(part, got[2:]))
        assert_close(few, few_got, alone)
    del got, x
