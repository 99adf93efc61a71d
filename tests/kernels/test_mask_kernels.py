"""The kernels that build a mask, in Triton's interpreter: their integers equal XLA's.

Guards against a kernel that is right only on tidy input: odd lengths, padding, an id that comes
back, positions that fall, rows that attend to nothing.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
import triton_interpreter as interpreter
from packax._src.ops import xla_mask
from tiers import once_each


def packed(*lengths: int) -> np.ndarray:
    """Segment ids of one row: the index of each length; a negative length is padding."""
    return np.concatenate(
        [np.full(abs(n), i if n > 0 else -1) for i, n in enumerate(lengths)]
    ).astype(np.int32)


def positions(ids: np.ndarray, kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    if kind == "restart":
        start = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
        return (np.arange(len(ids)) - np.repeat(start, np.diff(np.r_[start, len(ids)]))).astype(
            np.int32
        )
    if kind == "in pairs":
        return np.arange(len(ids), dtype=np.int32) // 2
    return rng.integers(-5, 50, len(ids)).astype(np.int32)


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
