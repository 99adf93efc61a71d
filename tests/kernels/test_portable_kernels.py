"""The Triton kernels in the interpreter: mask integers equal XLA's, attention equals an oracle.

Guards against a kernel that is right only on tidy input: odd lengths, empty rows, segment-checked
rows, tiles of every shape, garbage in padding. The oracle is in float64.
"""

from __future__ import annotations

import itertools

import dense
import jax
import numpy as np
import packax
import pytest
import triton_interpreter as interpreter
from kernel_masks import ATTENTION, IDS3, drawn, mask_of, packed, positions
from packax._src.ops import xla_mask
from tiers import once_each, some

documents = jax.jit(xla_mask.document_ranges, static_argnames="compare_positions")
blocks = jax.jit(xla_mask.block_bounds, static_argnames="kv_len")


def id_cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    cases = {
        "packed": (packed(70, 3, 97, 1, 100, 29), None),
        "padding in the middle and at the end": (packed(40, -30, 77, -9, 100, -63), None),
        "an id comes back": (np.array([5] * 60 + [2] * 30 + [5] * 50 + [9] * 20, np.int32), None),
        "hashed": (
            rng.integers(-(2**31), 2**31 - 1, 40).astype(np.int32).repeat(rng.integers(1, 60, 40)),
            None,
        ),
        "more than one chunk": (packed(700, 1, 1300, -5, 2000, 17), None),
        "one run over chunks": (packed(5000), None),
        "tokens": (np.arange(300, dtype=np.int32), None),
        "all padding": (packed(-130), None),
        "one": (packed(1), None),
        "cross": (packed(30, 50, 40), packed(100, 10, 60, 90)),
        "cross, absent ids": (
            np.array([4] * 10 + [8] * 20, np.int32),
            np.array([3] * 50 + [4] * 9, np.int32),
        ),
    }
    return {name: (q, q if k is None else k) for name, (q, k) in cases.items()}


@pytest.mark.parametrize(
    "kind,case", once_each(["none", "restart", "in pairs", "random", "two limits"], id_cases())
)
def test_documents_equal_those_of_xla(kind: str, case: str) -> None:
    q, kv = id_cases()[case]
    compare = {"none": 0, "two limits": 2}.get(kind, 1)
    kind = "restart" if compare == 2 else kind
    q_pos, kv_pos = (positions(x, kind) if compare else x for x in (q, kv))
    # The second batch row is reversed, so that mixed-up rows show.
    arrays = [np.ascontiguousarray(np.stack([x, x[::-1]])) for x in (q, kv, q_pos, kv_pos)]
    if compare == 2:
        arrays[2] = np.stack([arrays[2] + 1, arrays[2] - 5], axis=1)
    got = interpreter.documents(*arrays, compare)
    want = documents(*arrays, compare_positions=compare)
    for name, a, b in zip(("lo", "hi", "segment_checked"), got, want, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b), err_msg=name)


@pytest.mark.parametrize(
    "kind,lengths",
    once_each(
        ["causal", "random", "monotone"],
        [(1, 1), (64, 64), (65, 200), (300, 130), (1111, 1111), (2500, 70)],
    ),
    ids=str,
)
def test_blocks_equal_those_of_xla(kind: str, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    rng = np.random.default_rng(q_len + kv_len)
    if kind == "causal":
        lo = np.zeros((2, q_len), np.int32)
        hi = np.minimum(np.arange(1, q_len + 1), kv_len).astype(np.int32)[None].repeat(2, 0)
    else:
        lo = rng.integers(0, kv_len, (2, q_len)).astype(np.int32)
        hi = rng.integers(0, kv_len + 1, (2, q_len)).astype(np.int32)
        if kind == "monotone":
            lo, hi = np.sort(lo // 2, axis=1), np.sort(hi, axis=1)
    empty = lo >= hi
    lo, hi = np.where(empty, 0, lo).astype(np.int32), np.where(empty, 0, hi).astype(np.int32)
    tested = (~empty & (rng.random((2, q_len)) < 0.003)).astype(np.int32)
    got = interpreter.blocks(np.ascontiguousarray(lo), np.ascontiguousarray(hi), tested, kv_len)
    want = blocks(lo, hi, tested, kv_len=kv_len)
    names = ("q_blocks", "kv_blocks", "q_order", "q_order_192", "kv_order")
    for name, a, b in zip(names, got, want, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b), err_msg=name)


Tiles = tuple[tuple[int, int], ...]  # for the forward, dkdv and dq


TILES = (
    ((128, 64), (64, 128), (128, 64)),
    ((64, 32), (32, 64), (64, 64)),
    ((128, 128), (128, 64), (128, 32)),
)


@pytest.mark.parametrize(
    "case,tiles", some(itertools.product(ATTENTION, TILES), 0, 10, 14, 15, 22, 29), ids=str
)
def test_attention_equals_the_oracle(case: str, tiles: Tiles) -> None:
    check_attention(case, tiles, 16, 32)


@pytest.mark.parametrize(
    "case,dims",
    some(
        itertools.product(
            ["documents", "checked by position", "longer queries"],
            [(192, 128), (256, 256), (24, 40), (8, 16)],
        ),
        3,
        5,
        10,
    ),
    ids=str,
)
def test_head_dims(case: str, dims: tuple[int, int]) -> None:
    """If a head dim is no power of two, the columns after it belong to the next head. With the
    smallest tiles."""
    check_attention(case, ((64, 32), (32, 32), (32, 64)), *dims)


def check_attention(case: str, tiles: Tiles, *dims: int) -> None:
    expression, q_len, kv_len, heads, kv_heads = ATTENTION[case]
    attends = dense.four_axes(expression.as_array(q_len, kv_len))
    attends = np.broadcast_to(attends, (len(attends), heads, q_len, kv_len))
    mask = mask_of(expression, q_len, kv_len)
    rng = np.random.default_rng(len(case))
    clean, x, idle_rows = drawn(rng, attends, heads, kv_heads, dims, 1e30)
    scale = 1.5 * dims[0] ** -0.5
    expected = dense.dense(clean | {"scale": scale}, attends)
    tensors = x["query"], x["key"], x["value"]
    out, lse = interpreter.forward(*tensors, mask, scale, tiles[0])
    grads = interpreter.backward(
        *tensors, out, lse, x["dout"], x["dlse"], mask, scale, *tiles[1:]
    )  # fmt: skip
    np.testing.assert_allclose(lse, expected["lse"], atol=2e-5, rtol=2e-5)
    for name, got in zip(("out", "dquery", "dkey", "dvalue"), (out, *grads), strict=True):
        np.testing.assert_allclose(got, expected[name], atol=5e-5, rtol=5e-5, err_msg=name)
    assert not out[idle_rows].any() and not grads[0][idle_rows].any()


def with_sinks(out: np.ndarray, lse: np.ndarray, sinks: np.ndarray) -> tuple[np.ndarray, ...]:
    """float64 out and lse with sinks (1 or B, H), from those without, (B, Sq, H, D), (B, H, Sq)."""
    lse, sinks = lse.astype(np.float64), sinks[..., None].astype(np.float64)
    total = np.where(np.isneginf(lse), lse, np.logaddexp(lse, sinks))
    with np.errstate(invalid="ignore"):
        weight = np.where(np.isneginf(lse) | np.isposinf(sinks), 0, np.exp(lse - total))
    return out * weight.swapaxes(1, 2)[..., None], total


@pytest.mark.parametrize("case", ["documents", "three rows", "ranges with empty rows"])
def test_sinks(case: str) -> None:
    """None, about as large as a row's logits, all of the weight, infinite; also for each batch row.
    Rows that attend to nothing have none."""
    expression, q_len, kv_len, _, _ = ATTENTION[case]
    mask = mask_of(expression, q_len, kv_len)
    rng = np.random.default_rng(3)
    query, key, value = (
        rng.standard_normal((mask.batch, n, h, 16)).astype(np.float32)
        for n, h in ((q_len, 4), (kv_len, 2), (kv_len, 2))
    )
    out, lse = interpreter.forward(query, key, value, mask, 0.4, (64, 32))
    sinks = np.float32([-np.inf, 1.5, 3e38, np.inf])
    rows = np.stack([np.roll(sinks, b) - b for b in range(mask.batch)])
    for each in (sinks[None], rows):
        got = interpreter.forward(query, key, value, mask, 0.4, (64, 32), None, each)
        extras = interpreter.Extras(mask, 0.4)
        fallback = interpreter.forward_fallback(
            query, key, value, mask, extras, (64, 32), (16, 16), each
        )
        for found in (got, fallback[:2]):
            for name, a, b in zip(("out", "lse"), found, with_sinks(out, lse, each), strict=True):
                np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-6, err_msg=name)
    none = np.full((1, 4), -np.inf, np.float32)
    for a, b in zip(
        interpreter.forward(query, key, value, mask, 0.4, (64, 32), None, none),
        (out, lse),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_a_head_group_equals_a_separate_call() -> None:
    """Bit for bit; the other heads of out and dq keep their initial content."""
    mask = mask_of(packax.causal() & packax.documents(np.stack([IDS3[0], IDS3[2]])), 200, 200)
    rng = np.random.default_rng(9)

    def draw(heads, dim):
        return rng.standard_normal((2, 200, heads, dim)).astype(np.float32)

    query, key, value, out, dout = (draw(*x) for x in ((6, 16), (1, 16), (1, 32), (6, 32), (6, 32)))
    tiles = ((64, 32), (32, 64), (64, 64))
    group = range(2, 4)
    alone = [np.ascontiguousarray(x[:, :, 2:4]) for x in (query, out, dout)]
    want_out, lse = interpreter.forward(alone[0], key, value, mask, 0.3, tiles[0])
    got_out, got_lse = interpreter.forward(query, key, value, mask, 0.3, tiles[0], group)
    np.testing.assert_array_equal(got_lse, lse)
    dlse = rng.standard_normal(lse.shape).astype(np.float32)
    arguments = dlse, mask, 0.3, *tiles[1:]
    want = interpreter.backward(alone[0], key, value, alone[1], lse, alone[2], *arguments)
    got = interpreter.backward(query, key, value, out, lse, dout, *arguments, group)
    for name, a, b in zip(("out", "dq"), (got_out, got[0]), (want_out, want[0]), strict=True):
        np.testing.assert_array_equal(a[:, :, 2:4], b, err_msg=name)
        assert np.isnan(np.delete(a, group, axis=2)).all(), name
    for name, a, b in zip(("dk", "dv"), got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_a_block_of_rows_that_crosses_the_end_of_a_document_reads_no_row_after_it() -> None:
    """Blocks of 128 rows from row 64 cross the end of a document at row 384: NaNs after it do not
    reach the document."""
    ids = packed(384, 116)
    mask = mask_of(packax.causal() & packax.documents(ids), 500, 500)
    rng = np.random.default_rng(5)
    tensors = [rng.standard_normal((1, 500, 2, 16)).astype(np.float32) for _ in range(4)]
    query, key, value, dout = (
        np.where(np.arange(500)[None, :, None, None] < 384, x, np.nan) for x in tensors
    )
    tiles = ((128, 64), (128, 64), (128, 64))
    got = []
    for q, k, v, do in (tensors, (query, key, value, dout)):
        out, lse = interpreter.forward(q, k, v, mask, 0.3, tiles[0])
        got.append((out, *interpreter.backward(q, k, v, out, lse, do, None, mask, 0.3, *tiles[1:])))
    for name, clean, broken in zip(("out", "dq", "dk", "dv"), *got, strict=True):
        np.testing.assert_array_equal(broken[:, :384], clean[:, :384], err_msg=name)
        assert np.isnan(broken[:, 384:]).any(), name
