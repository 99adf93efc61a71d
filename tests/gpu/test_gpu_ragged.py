"""Packed rows of several sequences on a GPU: `pytest -m gpu tests/gpu/test_gpu_ragged.py`."""

from __future__ import annotations

import dataclasses
import functools

import decode_calls
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import RAGGED_MIXES as MIXES
from packax._src.ops import packed_rows

pytestmark = pytest.mark.gpu
BLOCKS = (9, 700)  # 36 keys at most, one share of each tile; 2,800 keys, several shares


def in_16_bits(text: str, n: int) -> decode_calls.RaggedCall:
    """The call in a dtype of the kernels, with other head dims."""
    call = decode_calls.parse(text)
    dims = ("64x64", "128x128", "16x48", "192x128")[n % (3 if call.numbers != "as query" else 4)]
    dtype = call.dtype if call.dtype != "float32" else ("bfloat16", "float16")[n % 2]
    return dataclasses.replace(call, dims=dims, dtype=dtype, blocks=BLOCKS[n // 2 % 2])


@pytest.mark.parametrize("n", range(len(MIXES)), ids=MIXES.__getitem__)
def test_25_random_mixes(n):
    """One program for all of them."""
    call = in_16_bits(MIXES[n], n)
    step = jax.jit(call.step)
    wrong = []
    for seed in range(25):
        a = call.arrays(seed)
        wrong += [f"{seed}: {line}" for line in call.wrong(step(a), a)]
    assert not wrong
    assert step._cache_size() == 1


CHUNKS = {"mixed": (600, 3), "decoding": (4, 0), "chunk": (800, 1), "more sequences": (130, 1)}


@pytest.mark.parametrize("n", range(len(MIXES)), ids=MIXES.__getitem__)
def test_25_random_mixes_with_chunks(n, monkeypatch):
    """Chunks of hundreds of tokens, which Hopper has a kernel for, with decoding sequences, over
    pages of 16 and 32. What no table names, and what is beyond a length, is NaN."""
    for mix, size in CHUNKS.items():
        monkeypatch.setitem(decode_calls.MIXES, mix, size)
    monkeypatch.setattr(packed_rows, "CHUNK_PROGRAMS", 1)
    call = in_16_bits(MIXES[n], n)
    call = dataclasses.replace(call, page=(16, 32)[n // 2 % 2], blocks=40)
    step = jax.jit(call.step)
    chunks, wrong = 0, []
    for seed in range(25):
        a = call.arrays(seed)
        wrong += [f"{seed}: {line}" for line in call.wrong(step(a), a)]
        chunks += int((np.diff(a["cu_q_lens"]) >= packed_rows.CHUNK).any())
    assert not wrong
    assert step._cache_size() == 1
    assert chunks > 5 or call.mix in ("decoding", "more sequences")


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (64, 1)], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 16, 256])
def test_a_step_of_a_server(page_size, heads):
    """A chunk of hundreds of tokens, many decoding sequences, one with a long cache, and padding:
    the results of blockwise XLA in float32."""
    rng = np.random.default_rng(page_size)
    room, tokens, dim = 4096, 700, 128
    lengths = np.array([1500, 4096, *rng.integers(1, 900, 38), 0, 0], np.int32)
    counts = np.array([600, *[1] * 20, *[3] * 5, *[0] * 16], np.int32)
    cu = np.cumsum([2, *counts]).astype(np.int32)
    n, cache, table = len(lengths), (len(lengths), room), None
    if page_size:
        cache = (n * room // page_size, page_size)
        table = jnp.asarray(rng.permutation(cache[0]).reshape(n, -1), jnp.int32)
    keys = iter(jax.random.split(jax.random.key(0), 3))
    query = jax.random.normal(next(keys), (tokens, heads[0], dim), "bfloat16")
    key, value = (
        jax.random.normal(next(keys), (*cache, heads[1], dim), "bfloat16") for _ in range(2)
    )
    attend = functools.partial(packax.ragged_paged_attention, return_lse=True)
    got = jax.jit(attend)(query, key, value, lengths, table, cu)
    exact = functools.partial(attend, implementation="xla", precision="highest")
    want = jax.jit(exact)(*(x.astype("float32") for x in (query, key, value)), lengths, table, cu)
    np.testing.assert_allclose(np.float32(got[0]), want[0], atol=2e-2)
    np.testing.assert_allclose(got[1], want[1], atol=2e-3, rtol=1e-3)
    used = np.arange(tokens)
    used = (used < 2) | (used >= cu[-1])
    assert not np.asarray(got[0], np.float32)[used].any()


@pytest.mark.parametrize("wrong", ["a page", "a length"])
def test_what_cannot_be_is_nan_in_a_chunk(wrong, monkeypatch):
    """In the rows that read it, not in those before them or in another chunk."""
    monkeypatch.setattr(packed_rows, "CHUNK_PROGRAMS", 1)
    query = jax.random.normal(jax.random.key(0), (600, 8, 64), "bfloat16")
    pages = jax.random.normal(jax.random.key(1), (40, 16, 2, 64), "bfloat16")
    table, lengths = np.arange(40).reshape(2, 20), np.array([310, 300])
    lost = np.zeros(600, bool)
    if wrong == "a page":
        table[0, 10], lost[150:300] = 40, True  # row 150 is at position 160
    else:
        lengths[0], lost[290:300] = 330, True  # the last ten are beyond 320 keys
    attend = jax.jit(functools.partial(packax.ragged_paged_attention, return_lse=True))
    out, lse = attend(query, pages, pages, lengths, table, np.array([0, 300, 600]))
    np.testing.assert_array_equal(np.isnan(np.float32(out)).all((1, 2)), lost)
    np.testing.assert_array_equal(np.isnan(np.float32(out)).any((1, 2)), lost)
    np.testing.assert_array_equal(np.isnan(lse).all(0), lost)


def test_what_cannot_be_is_nan_in_its_row_alone():
    query, pages = jnp.ones((7, 4, 64), "bfloat16"), jnp.ones((6, 4, 2, 64), "bfloat16")
    table, cu = np.array([[0, 1], [2, 9], [3, 4]]), np.array([0, 2, 4, 5])
    out, lse = packax.ragged_paged_attention(
        query, pages, pages, np.array([9, 5, 3]), table, cu, return_lse=True
    )
    lost = np.array([False, True, False, True, False, False, False])
    np.testing.assert_array_equal(np.isnan(np.float32(out)).all((1, 2)), lost)
    np.testing.assert_array_equal(np.isnan(lse).all(0), lost)
    np.testing.assert_array_equal(np.float32(out)[[0, 2, 4]], 1)
    assert not np.float32(out)[5:].any() and np.isneginf(lse[:, 5:]).all()
