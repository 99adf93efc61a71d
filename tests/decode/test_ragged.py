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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_jit import mesh_of
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


# What is wrong, what it amounts to, and the tokens that are NaN. Sequences of 1, 9 and 2 tokens
# after one token of padding.
BOUNDS, LENGTHS = [1, 2, 11, 13], [12, 9, 7]
WRONG = [
    ({}, {}, []),
    ({"lengths": [13, 9, 7]}, {}, [1]),
    ({"lengths": [2**31 - 1, 9, 7]}, {}, [1]),
    ({"lengths": [-(2**31), 9, -1]}, {}, []),
    ({"lengths": [12, 9, 1]}, {}, []),
    *(({"num_seqs": n}, {"num_seqs": min(max(n, 0), 3)}, []) for n in (0, 1, -5, 2**31 - 1)),
    ({"num_seqs": [2]}, {"num_seqs": 2}, []),
    # tokens belong to one sequence or none, and those of sequences before are not affected
    ({"cu_q_lens": [1, 2, 11, 2**31 - 1]}, {"num_seqs": 2}, []),  # before position 0
    ({"cu_q_lens": [1, 2, 11, 5]}, {"num_seqs": 2}, []),
    ({"cu_q_lens": [-9, 2, 11, 13]}, {"cu_q_lens": [0, 2, 11, 13]}, []),
    ({"cu_q_lens": [-(2**31)] * 4}, {"num_seqs": 0}, []),
    *(({"entry": n}, {}, range(6, 11)) for n in (-1, 11, 2**31 - 1, -(2**31))),
]  # fmt: skip


@pytest.mark.parametrize("cache", ["pages", "dense"])
def test_what_cannot_be(cache):
    call = RaggedCall(cache=cache, batch=3, blocks=3)
    step = jax.jit(call.step)
    usual = {"cu_q_lens": BOUNDS, "lengths": LENGTHS, "num_seqs": 3}
    for given, equal, lost in WRONG:
        # the lengths determine which keys are NaN
        lengths = {n: x for n, x in given.items() if n == "lengths"}
        a = call.arrays(**{n: np.int32(x) for n, x in (usual | lengths | equal).items()})
        b = a | {n: np.int32(x) for n, x in given.items()}
        if "entry" in given:
            if cache == "dense":
                continue
            b["table"] = a["table"].copy()
            b["table"][1, 1] = b.pop("entry")  # keys 4 to 7: the tokens at positions 4 to 8
        wrong = call.wrong(step(b), a, lost=np.isin(np.arange(len(a["query"])), list(lost)))
        assert not wrong, (given, wrong)


# Numbers of drafts, where at most 5 are possible, what they amount to, and the tokens that are NaN.
WRONG_DRAFTS = [
    ([2, 5, 2], [1, 5, 2], [1]),
    ([1, 6, 2], [1, 5, 2], range(2, 11)),
    ([1, 2**31 - 1, 3], [1, 5, 2], range(2, 13)),
    ([-1, 5, -(2**31)], [0, 5, 0], []),
]


@pytest.mark.parametrize("cache", ["pages", "dense"])
def test_drafts_that_cannot_be(cache):
    """Also drafts beyond the cache, and in a page that does not exist: NaN in those that attend to
    them."""
    call = RaggedCall(cache=cache, batch=3, blocks=3, drafts="trees")
    step = jax.jit(call.step)
    usual = {"cu_q_lens": BOUNDS, "lengths": LENGTHS, "num_seqs": 3}
    usual = {name: np.int32(x) for name, x in usual.items()}
    tokens = np.arange(19)
    for given, equal, lost in WRONG_DRAFTS:
        a = call.arrays(**usual, num_drafts=np.int32(equal))
        got = step(a | {"num_drafts": np.int32(given)})
        assert not call.wrong(got, a, lost=np.isin(tokens, list(lost))), given
    mask = np.ones((3, 5, 5), bool)
    mask[1, :3, 1:] = False  # the first three attend to the first, which is in page 1
    usual |= {"drafts": mask, "num_drafts": np.int32([1, 5, 2])}
    a = call.arrays(**usual | {"lengths": np.int32([13, 9, 7])})
    assert not call.wrong(step(a), a, lost=tokens == 1)
    if cache == "pages":
        a = call.arrays(**usual | {"lengths": np.int32([12, 12, 7])})
        a["table"][1, 2] = len(a["key"])  # keys 8 to 11: all but the first draft of sequence 1
        assert not call.wrong(step(a), a, lost=np.isin(tokens, [9, 10]))


@pytest.mark.parametrize("window", ["none", "3"])
def test_drafts_that_attend_to_all_before_them(window):
    """The most drafts that are possible, in chunks, and sequences with fewer: as without a mask."""
    call = RaggedCall(mix="chunk", window=window, sinks="sinks", blocks=30)
    a = call.arrays(cu_q_lens=np.int32([1, 2, 2, 9, 50]), num_seqs=np.int32(4))
    a |= {"query": np.random.default_rng(0).standard_normal((50, 4, 8)).astype(np.float32)}
    wanted = call.step(a)
    drafts = {"drafts": np.tri(64, dtype=bool), "num_drafts": np.int32([1, 0, 5, 40])}
    got = call.step(a | drafts)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], atol=2e-6, rtol=2e-6)


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


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_shard_map_over_some_axes(kind):
    """The heads are mapped. The numbers of rows and keys do not vary, except those of the call."""
    call = RaggedCall(sinks="sinks")
    a = call.arrays(1)
    mesh = mesh_of(kind, (1, 2), ("data", "tensor"))
    specs = {name: P() for name in a} | {"query": P(None, "tensor"), "sinks": P("tensor")}
    specs |= dict.fromkeys(("key", "value"), P(None, None, "tensor"))

    @functools.partial(
        jax.shard_map, in_specs=(specs,), out_specs=(P(None, "tensor"), P("tensor")),
        axis_names={"tensor"},
    )  # fmt: skip
    def mapped(a):
        lengths = a["lengths"] + jax.lax.axis_index("tensor") * 0  # varies
        at = packax.kv_cache.token_positions(len(a["query"]), lengths, a["cu_q_lens"])
        assert at[0].shape == at[1].shape == a["query"].shape[:1]
        return call.attend(a | {"lengths": lengths})

    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in a.items()}
        got = jax.jit(functools.partial(call.step, attend=mapped))(placed)
    assert not call.wrong(got, a)


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
