"""ragged_paged_attention on the CPU: random mixes of chunks and decoding, values that are wrong.

Guards against a row that takes another sequence's length or pages, rows between sequences, tiles
that mix sequences, and a program that depends on the mix.
"""

from __future__ import annotations

import functools

import decode_calls
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import RAGGED_MIXES, RaggedCall
from tiers import some


@pytest.mark.parametrize("text", some(RAGGED_MIXES, 0, 5))
def test_25_random_mixes(text):
    """One program for all of them."""
    call = decode_calls.parse(text)
    step = jax.jit(call.step)
    wrong = []
    for seed in range(25):
        a = call.arrays(100 + seed)
        wrong += [f"{seed}: {line}" for line in call.wrong(step(a), a)]
    assert not wrong
    assert step._cache_size() == 1


def test_the_call_of_a_decoding_step():
    """With one new token for each sequence, the result is that of decode_attention."""
    call = RaggedCall(mix="decoding", sinks="sinks", window="left")
    a = call.arrays(1) | {"cu_q_lens": np.arange(5, dtype=np.int32), "num_seqs": np.array([4])}
    out, lse = jax.jit(call.attend)(a)
    want, want_lse = packax.decode_attention(
        a["query"][:, None], a["key"], a["value"], a["lengths"], block_table=a["table"],
        window=(7, 0), sinks=a["sinks"], return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out, want[:, 0], atol=1e-6)
    np.testing.assert_allclose(lse, want_lse[:, :, 0].T, atol=1e-6)


# Sequences of 1, 9 and 2 rows after one row of padding, before three.
CU, LENGTHS = np.array([1, 2, 11, 13], np.int32), np.array([12, 9, 7], np.int32)


@functools.cache
def wrong_values():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((16, 4, 8)).astype(np.float32)
    pages = rng.standard_normal((8, 4, 2, 8)).astype(np.float32)
    table = np.array([[4, 1, 2], [5, 0, 3], [6, 7, -1]], np.int32)
    dense = rng.standard_normal((3, 12, 2, 8)).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="paged")
    def attend(lengths=LENGTHS, table=table, cu=CU, count=3, paged=True):
        cache = pages if paged else dense
        return packax.ragged_paged_attention(
            query, cache, cache, lengths, table if paged else None, cu, count, return_lse=True
        )

    return attend, table


def check(good, got, lost=(), empty=(), other=()):
    """Rows that are NaN, rows that are zeros, rows that may change, and all others the same."""
    for (x, y), nothing in zip(zip(good, got, strict=True), (0, -np.inf), strict=True):
        x, y = (np.moveaxis(np.asarray(z), 0 if z.ndim == 3 else 1, 0) for z in (x, y))
        for n, (before, after) in enumerate(zip(x, y, strict=True)):
            if n in other:
                continue
            want = np.nan if n in lost else nothing if n in empty else before
            np.testing.assert_array_equal(after, np.broadcast_to(want, after.shape), str(n))


@pytest.mark.parametrize("paged", [True, False])
def test_lengths_beyond_the_cache_are_nan_in_their_rows(paged):
    attend, _ = wrong_values()
    good = attend(paged=paged)
    padding = {0, 13, 14, 15}
    check(good, good, empty=padding)
    longer = attend(lengths=LENGTHS + np.array([1, 0, 0], np.int32), paged=paged)
    check(good, longer, lost={1}, empty=padding)
    huge = attend(lengths=np.array([2**31 - 1, 9, 7], np.int32), paged=paged)
    check(good, huge, lost={1}, empty=padding)
    negative = attend(lengths=np.array([-(2**31), 9, -1], np.int32), paged=paged)
    check(good, negative, empty={*padding, 1, 11, 12})
    short = attend(lengths=np.array([12, 9, 1], np.int32), paged=paged)
    check(good, short, empty={*padding, 11}, other={12})


def test_a_page_that_does_not_exist_is_nan_in_the_rows_that_attend_to_it():
    attend, table = wrong_values()
    for entry in (-1, 8, 2**31 - 1, -(2**31)):
        wrong = table.copy()
        wrong[1, 1] = entry  # keys 4 to 7: rows at positions 4 to 8 of 0 to 8
        check(attend(), attend(table=wrong), lost={6, 7, 8, 9, 10}, empty={0, 13, 14, 15})


def test_numbers_and_starts_of_sequences_that_cannot_be():
    """Any number of sequences. Starts that decrease or are out of range: rows belong to one
    sequence or none, and those of sequences before are not affected."""
    attend, _ = wrong_values()
    good = attend()
    for count in (0, 1, -5, 3, 2**31 - 1, np.array([2])):
        kept = int(np.clip(count, 0, 3).reshape(()))
        check(good, attend(count=count), empty=set(range(16)) - {*range(1, CU[kept])})
    far = attend(cu=np.array([1, 2, 11, 2**31 - 1], np.int32))
    check(good, far, empty={0, 11, 12, 13, 14, 15})  # they are before position 0
    back = attend(cu=np.array([1, 2, 11, 5], np.int32))
    check(good, back, empty={0, 11, 12, 13, 14, 15})
    before = attend(cu=np.array([-9, 2, 11, 13], np.int32))
    check(good, before, empty={13, 14, 15}, other={0})
    none = attend(cu=np.full(4, -(2**31), np.int32))
    check(good, none, empty=set(range(16)))


def test_a_ring_of_pages_for_a_window():
    """Pages that left the window are written again. As docs/guide/decoding.md sizes it."""
    window, chunk, page, blocks = 9, 5, 4, 12
    ring = -(-(window + chunk) // page) + 1
    rng = np.random.default_rng(0)
    whole = np.arange(2 * blocks, dtype=np.int32).reshape(2, blocks)
    small = np.arange(2, dtype=np.int32)[:, None] * ring + np.arange(blocks, dtype=np.int32) % ring
    pools = [np.full((n, page, 2, 8), np.nan, np.float32) for n in (whole.size, 2 * ring)]

    @jax.jit
    def step(pool, query, new, table, lens, cu):
        at = packax.kv_cache.token_positions(12, lens, cu)
        pool = packax.kv_cache.write(pool, new, *at, block_table=table)
        out = packax.ragged_paged_attention(
            query, pool, pool, lens, table, cu, window=(window - 1, 0)
        )
        return pool, out

    lens = np.zeros(2, np.int32)
    while (lens < page * blocks - chunk).all():
        counts = rng.integers(0, chunk + 1, 2)
        lens, cu = (x.astype(np.int32) for x in (lens + counts, np.cumsum([1, *counts])))
        query, new = (rng.standard_normal((12, n, 8)).astype(np.float32) for n in (4, 2))
        outs = []
        for n, table in enumerate((whole, small)):
            pools[n], out = step(pools[n], query, new, table, lens, cu)
            outs.append(out)
        np.testing.assert_array_equal(*outs)
        assert np.isfinite(outs[0]).all()


Q, CACHE = jnp.ones((6, 4, 8)), jnp.ones((5, 4, 2, 8))
TABLE, LENS = np.zeros((2, 3), int), np.array([4, 5])


@pytest.mark.parametrize("rows,batch", [(0, 2), (6, 0), (0, 0)])
def test_nothing(rows, batch):
    out, lse = packax.ragged_paged_attention(
        Q[:rows], CACHE, CACHE, LENS[:batch], TABLE[:batch], np.zeros(batch + 1, int),
        return_lse=True,
    )  # fmt: skip
    assert out.shape == (rows, 4, 8) and not out.any()
    assert lse.shape == (4, rows) and (lse == -jnp.inf).all()
