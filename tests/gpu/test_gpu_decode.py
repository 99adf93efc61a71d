"""Decoding on a GPU, of sequences and of packed rows: `pytest -m gpu tests/gpu/test_gpu_decode.py`.

What no row attends, and the queries of rows without keys, are NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import decode_calls
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import IMPOSSIBLE, RaggedCall, impossible, parse
from decode_calls import RAGGED_MIXES as MIXES
from packax._src.ops import packed_rows
from tiers import once_each, some

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16")
DIMS = ("64x64", "128x128", "192x128", "256x256", "72x40", "8x200", "512x512", "320x264")
FP8_DIMS = ("64x64", "128x128", "256x256", "80x48")
FP8 = [f"numbers={x}," for x in reversed(decode_calls.FEATURES["numbers"][1:])]
SHORT = (
    "blocks=75",
    "blocks=75,rows=16",
    "blocks=75,rows=3,window=all",
    "blocks=75,rows=2,heads=3/3",
    "blocks=75,rows=5,heads=8/1",
    "blocks=75,rows=2,starts=of sequences",
    "blocks=75,rows=2,starts=of rows",
    "blocks=75,rows=3,window=31",
    "blocks=75,rows=4,window=both",
    "blocks=75,rows=4,window=right",
    "blocks=75,rows=4,window=huge",
    "blocks=75,rows=2,cap=soft cap,sinks=sinks",
    "blocks=75,rows=4,drafts=trees,sinks=sinks,cap=soft cap",
    "cache=pages,page=16,blocks=20,rows=16,drafts=one tree,starts=of rows",
    "cache=pages,page=16,blocks=20",
    "cache=pages,page=1,blocks=150,rows=2,window=left",
    "cache=pages,page=201,blocks=2,rows=4,sinks=sinks,starts=of sequences",
)
EVERY_DIM = (SHORT[11], SHORT[1], SHORT[-1])
LONG = {
    "row": "batch=1,blocks=5003,heads=8/2",
    "heads": "blocks=2251,heads=8/8",
    "tall tiles": "batch=2,blocks=1251,rows=16,heads=8/1",
    "pages": "batch=2,cache=pages,page=16,blocks=313,rows=3,heads=8/2,sinks=sinks",
    "pages and tall tiles": (
        "batch=2,cache=pages,page=256,blocks=6,rows=16,heads=8/1,cap=soft cap"
    ),
    "window": "batch=2,blocks=2001,rows=2,heads=8/2,window=1023",
}
TILES = "batch=1,blocks=501,rows=13,heads=22/2"  # two tiles and a part
WIDE = (LONG["row"], LONG["pages and tall tiles"])
DEALT = [  # 64 sequences are the most to which shares are dealt by length
    f"batch={batch},page=16,blocks=192,cache={cache}"
    for batch in (64, 65, 5) for cache in ("dense", "pages")
]  # fmt: skip
ROWS = [
    *zip(SHORT, [""] * 17, DIMS * 3, DTYPES * 9, strict=False),
    *((text, "", *kind) for text in EVERY_DIM for kind in zip(DIMS, DTYPES[::-1] * 4, strict=True)),
    *itertools.product([*LONG.values(), TILES], [""], DIMS[:2], DTYPES[:1]),
    *itertools.product(WIDE, [""], (DIMS[2], DIMS[3], DIMS[6]), DTYPES[1:]),
    *some(itertools.product(DEALT, [""], DIMS[:1], DTYPES[:1]), 0, 3),
    *zip(SHORT, FP8 * 5, FP8_DIMS * 5, (*DTYPES, *DTYPES[::-1]) * 5, strict=False),
    *itertools.product(LONG.values(), FP8[:1], FP8_DIMS, DTYPES[1:]),
]


def check(text: str, tf32: bool = False) -> None:
    call = parse(f"decode,{text}")
    a = call.arrays()
    idle = ~call.allowed(a).any((1, 3))[..., None, None]
    dirty = a | {"query": np.where(idle, np.nan, a["query"]).astype(a["query"].dtype)}
    got = jax.jit(call.step)(dirty)
    assert got["out"].dtype == call.dtype and got["lse"].dtype == jnp.float32
    assert not call.wrong(got, a, 0 if call.dtype == "float32" and not tf32 else 2, tf32)


@pytest.mark.parametrize("text,numbers,dims,dtype", ROWS)
def test_equals_the_reference(text, numbers, dims, dtype):
    check(f"{numbers}{text},dims={dims},dtype={dtype}")


FLOAT32 = [
    *zip((SHORT[11], SHORT[1], SHORT[-1], SHORT[4], SHORT[-2]), DIMS[:5], strict=True),
    (LONG["row"], DIMS[1]),
    (LONG["tall tiles"], DIMS[0]),
    (LONG["pages and tall tiles"], DIMS[3]),
]


@pytest.mark.parametrize(
    "text,dims,precision",
    some([(*x, y) for x in FLOAT32 for y in ("highest", "tensorfloat32")], 0, 3, 10, 13, 15),
)
def test_float32(text, dims, precision):
    """For TF32, the yardstick rounds the operands of its products."""
    with jax.default_matmul_precision(precision):
        check(f"{text},dims={dims}", precision == "tensorfloat32")


@pytest.mark.parametrize("text", ["dims=128x128", "rows=16,dims=64x64"])
def test_scores_beyond_31_bits(text):
    """One key has all the weight. Powers of 2 overflow if a fused multiply-add keeps the part that
    rounding removed from the maximum."""
    call = parse(f"decode,batch=2,blocks=752,heads=8/2,scale=0.15,dtype=bfloat16,{text}")
    a = call.arrays()
    a |= {n: a[n] * a[n].dtype.type(2.0**20) for n in ("query", "key")}
    got, (want, _) = jax.jit(call.step)(a), call.references(a)
    np.testing.assert_allclose(np.float32(got["out"]), want["out"], atol=1e-2, rtol=1e-2)
    np.testing.assert_allclose(got["lse"], want["lse"], rtol=1e-5)


def test_every_byte_of_fp8():
    """A sequence of one key returns its value: NaN only in its row, -0, subnormals and 448."""
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    value = np.repeat(every, 64).reshape(256, 1, 1, 64)
    for q_len in (1, 16):  # both query tiles
        query = np.ones((256, q_len, 2, 64), np.float16)
        lengths = np.ones(256, int)
        out = jax.jit(packax.decode_attention)(query, np.zeros_like(value), value, lengths)
        want = np.broadcast_to(every.astype(np.float32)[:, None, None], (256, 2, 64))
        np.testing.assert_array_equal(np.asarray(out[:, -1], np.float32), want)


@pytest.mark.parametrize("entry", IMPOSSIBLE)
def test_what_cannot_be(entry):
    """NaN in the rows that attend to it alone."""
    call, a, lost = impossible(entry, dims="64x64", dtype="bfloat16")
    assert not call.wrong(jax.jit(call.step)(a), a, 2, lost=lost)


def test_the_same_bits_every_run_and_under_a_graph():
    """A loop of steps, which XLA records as one CUDA graph, equals the steps one by one."""
    call = parse("decode,batch=2,blocks=1024,heads=8/2,dims=128x128,dtype=bfloat16")
    a = call.arrays(lengths=np.int32([4000, 70]))

    def step(lengths, _):
        return lengths - 7, call.step(a | {"lengths": lengths})["out"]

    lengths = jax.device_put(a["lengths"])
    loop = jax.jit(lambda n: jax.lax.scan(step, n, None, length=9)[1])
    first, again = loop(lengths), loop(lengths)
    np.testing.assert_array_equal(first, again)
    for i in range(9):
        np.testing.assert_array_equal(first[i], jax.jit(step)(lengths - 7 * i, None)[1])


def test_vmap_of_queries_over_one_cache():
    call = parse("decode,batch=2,blocks=80,dims=64x64,dtype=bfloat16")
    a = call.arrays(lengths=np.int32([300, 77]))
    shared = dict.fromkeys(a) | {"lengths": 0}
    lengths = a["lengths"] - np.arange(3, dtype=np.int32)[:, None]
    got = jax.jit(jax.vmap(call.step, (shared,)))(a | {"lengths": lengths})
    for i, x in enumerate(lengths):
        assert not call.wrong({n: y[i] for n, y in got.items()}, a | {"lengths": x}, 2)


# --- Packed rows


def in_16_bits(n: int, **more: int) -> RaggedCall:
    """The call in a dtype of the kernels, with other head dims."""
    call = parse(MIXES[n])
    dims = ("64x64", "128x128", "16x48", "192x128")[n % (3 if call.numbers != "as query" else 4)]
    dtype = call.dtype if call.dtype != "float32" else DTYPES[n % 2]
    return dataclasses.replace(call, dims=dims, dtype=dtype, **more)


def check_25_mixes(call: RaggedCall) -> int:
    """One program for all of them. How many have a chunk."""
    step = jax.jit(call.step)
    chunks, wrong = 0, []
    for seed in range(25):
        a = call.arrays(seed)
        wrong += [f"{seed}: {line}" for line in call.wrong(step(a), a)]
        chunks += int((np.diff(a["cu_q_lens"]) >= packed_rows.CHUNK).any())
    assert not wrong
    assert step._cache_size() == 1
    return chunks


@pytest.mark.parametrize("n", some(range(len(MIXES)), 0, 1, 3, 5, 8, 11, 12), ids=MIXES.__getitem__)
def test_25_random_mixes(n):
    """36 keys at most, one share of each tile; or 2,800, several shares."""
    check_25_mixes(in_16_bits(n, blocks=(9, 700)[n // 2 % 2]))


CHUNKS = {"mixed": (600, 3), "decoding": (4, 0), "chunk": (800, 1), "more sequences": (130, 1)}


@pytest.mark.parametrize("n", some(range(len(MIXES)), 0, 4, 6, 9, 13), ids=MIXES.__getitem__)
def test_25_random_mixes_with_chunks(n, monkeypatch):
    """Chunks of hundreds of tokens, which Hopper has a kernel for, with decoding sequences, over
    pages of 16 and 32."""
    for mix, size in CHUNKS.items():
        monkeypatch.setitem(decode_calls.MIXES, mix, size)
    monkeypatch.setattr(packed_rows, "CHUNK_PROGRAMS", 1)
    call = in_16_bits(n, page=(16, 32)[n // 2 % 2], blocks=40)
    assert check_25_mixes(call) > 5 or call.mix in ("decoding", "more sequences")


OTHER_PAGES = [*itertools.product((1, 3, 8), DIMS[:2]), (12, "48x40"), (48, "120x128")]


@pytest.mark.parametrize("page,dims", OTHER_PAGES, ids=str)
def test_25_random_mixes_with_chunks_over_other_pages(page, dims, monkeypatch):
    """Hopper's kernel copies rows of pages whose size is not 16 or a larger power of two."""
    monkeypatch.setitem(decode_calls.MIXES, "mixed", CHUNKS["mixed"])
    monkeypatch.setattr(packed_rows, "CHUNK_PROGRAMS", 1)
    options = ("", ",starts=of rows,window=left", ",sinks=sinks,heads=4/1", ",window=both")
    text = f"ragged,dims={dims},dtype={DTYPES[page % 2]}{options[page % 4]}"
    assert check_25_mixes(dataclasses.replace(parse(text), page=page, blocks=-(-650 // page))) > 5


@pytest.mark.parametrize(
    "page_size,heads", once_each([16, 0, 1, 256, 8], [(32, 8), (8, 8), (64, 1)]), ids=str
)
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
        table = rng.permutation(cache[0]).reshape(n, -1).astype(np.int32)
    shapes = (tokens, heads[0], dim), *[(*cache, heads[1], dim)] * 2

    @jax.jit
    def drawn():
        keys = jax.random.split(jax.random.key(0), 3)
        return [jax.random.normal(k, x, "bfloat16") for k, x in zip(keys, shapes, strict=True)]

    query, key, value = drawn()
    attend = functools.partial(packax.ragged_paged_attention, return_lse=True)
    got = jax.jit(attend)(query, key, value, lengths, table, cu)
    exact = functools.partial(attend, implementation="xla", precision="highest")
    in_float32 = jax.jit(lambda x, *more: exact(*(y.astype("float32") for y in x), *more))
    want = in_float32((query, key, value), lengths, table, cu)
    np.testing.assert_allclose(np.float32(got[0]), want[0], atol=2e-2)
    np.testing.assert_allclose(got[1], want[1], atol=2e-3, rtol=1e-3)
    used = np.arange(tokens)
    used = (used < 2) | (used >= cu[-1])
    assert not np.asarray(got[0], np.float32)[used].any()


@pytest.mark.parametrize("wrong,tokens", once_each(["page", "length"], [150, 20]))
def test_what_cannot_be_in_packed_rows(tokens, wrong, monkeypatch):
    """NaN in the rows that read it, not in those before them or of another sequence; in a chunk,
    and in fewer rows."""
    monkeypatch.setattr(packed_rows, "CHUNK_PROGRAMS", 1)
    monkeypatch.setitem(decode_calls.MIXES, "mixed", (2 * tokens + 5, 1))
    call = parse("ragged,batch=2,page=16,blocks=20,heads=8/2,dims=64x64,dtype=bfloat16")
    lengths = np.int32([310 + 20 * (wrong == "length"), 300])
    bounds = np.int32([1, 1 + tokens, 1 + 2 * tokens])
    a = call.arrays(lengths=lengths, cu_q_lens=bounds, num_seqs=np.int32(2))
    lost = np.zeros(len(a["query"]), bool)
    if wrong == "page":
        a["table"][0, 19], lost[tokens - 5 : 1 + tokens] = 42, True  # keys from 304
    else:
        lost[tokens - 9 : 1 + tokens] = True  # the last ten are beyond 320 keys
    assert not call.wrong(jax.jit(call.step)(a), a, lost=lost)
