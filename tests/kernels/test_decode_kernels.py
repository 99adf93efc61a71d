"""The decoding kernels in the interpreter, against the definition of decoding in float64.

Guards against shares that overlap, miss keys or have none, tile columns beyond the head dim, and
reads of what no row attends: its values are 1e30 or its block table entry is invalid.
"""

from __future__ import annotations

import itertools
from typing import Any

import decoding
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import triton_interpreter as interpreter
from decoding import CASES, Case
from packax._src import decode
from tiers import marked, once_each, some

SCALE = 0.4
SHORT = {"kernel": "decode", "room": (64, 64), "tile": (16, 32)}
TALL = {"kernel": "decode_tall", "room": (16, 32), "tile": (32, 64), "v_parts": 2}
SMALL = {"room": (64, 64), "tile": (16, 16)}  # for float32


def run(
    case: Case, x: decoding.Tensors, splits: int, scale: float = SCALE, **kernel
) -> decoding.Results:
    lo, hi = decode._ranges(
        x.lengths, x.starts, *(case.window or (None, None)), case.causal, case.q_len
    )
    sinks = None if x.sinks is None else x.sinks[None]
    tensors = [np.ascontiguousarray(y, np.float32) for y in x[:3]]
    if x.key_cache.dtype == jnp.float8_e4m3fn:
        tensors = [np.ascontiguousarray(y) for y in x[:3]]
        rows, _, heads, _ = tensors[1].shape
        scales = [np.float32(1 if s is None else s) for s in (x.key_scale, x.value_scale)]
        shape = (rows if scales[0].ndim == 2 else 1, heads)
        kernel["scales"] = tuple(np.broadcast_to(s, shape).copy() for s in scales)
    ranges = [np.ascontiguousarray(y) for y in (lo, hi)]
    return decoding.Results(
        *interpreter.decode(
            *tensors, *ranges, x.block_table, sinks, scale, case.soft_cap or 0.0, splits, **kernel
        )
    )


def check(case: Case, splits: int, **kernel) -> None:
    x = decoding.tensors(case, seed=len(case.lengths) + splits)
    got, want = run(case, x, splits, **kernel), decoding.exact(case, x, SCALE)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


# These cases also run with tall tiles, dealt shares or an fp8 cache, or are part of another case.
AGAIN = {"16 rows", "causal=False", "starts", "right alone", "pages"}


@pytest.mark.parametrize("name", [marked([name], name not in AGAIN) for name in CASES])
def test_equals_the_definition(name: str) -> None:
    check(CASES[name]._replace(dims=(24, 40)), 3, **SHORT)


@pytest.mark.parametrize(
    "name,parts",
    once_each(["16 rows", "causal=False", "starts by row", "pages of 1, left"], [1, 2]),
)
def test_tall_tiles(name: str, parts: int) -> None:
    """More rows than fit into one tile in the first case, fewer in the others; head dims that fill
    the columns or not, and with two parts, head dims that leave a part empty."""
    dims = {"16 rows": (16, 24), "causal=False": (16, 16)}.get(name, (16, 32))
    check(CASES[name]._replace(heads=6, dims=dims), 2, **TALL | {"v_parts": parts})


@pytest.mark.parametrize(
    "name,kernel",
    some(
        [
            ("16 rows", "decode_tall"),
            ("multi-query", "decode_tall"),
            ("soft cap and sinks", "decode"),
            ("pages longer than a block", "decode"),
        ],
        0,
        2,
    ),
)
def test_float32_is_as_exact_as_plain_float32(name: str, kernel: str) -> None:
    case = CASES[name]._replace(dims=(24, 40))
    x = decoding.tensors(case)
    small = SMALL | ({"tile": (32, 16)} if "_" in kernel else {})
    got = run(case, x, 2, kernel=kernel, exact=1, **small)
    oracle.check(got, decoding.exact(case, x, SCALE), decoding.plain(case, x, SCALE))


@pytest.mark.parametrize("name,kernel", [("soft cap and sinks", SHORT), ("16 rows", TALL)])
def test_tf32_rounds_every_operand_to_11_bits(name: str, kernel: dict) -> None:
    """The log-sum-exp is that of rounded queries and keys; for the output, the probabilities are
    rounded, too."""
    case = CASES[name]._replace(dims=(16, 24))
    x = decoding.tensors(case)

    def rounded(y: np.ndarray) -> np.ndarray:
        bits = np.asarray(y, np.float32).view(np.int32)
        return ((bits + 0x1000) & -0x2000).view(np.float32)

    clean = {"query": rounded(x.query), "key": rounded(x.key), "value": rounded(x.value)}
    want = decoding.exact(case, x._replace(**clean), SCALE)
    got = run(case, x, 2, **kernel, exact=0)
    close = {"atol": 1e-5, "rtol": 1e-6}
    np.testing.assert_allclose(got.lse, want.lse, **close)
    np.testing.assert_allclose(got.out, want.out, atol=2.0**-11 * np.abs(clean["value"]).max())
    assert not np.allclose(decoding.exact(case, x, SCALE).lse, want.lse, **close)


FP8 = {"kernel": "decode_fp8", "room": (64, 64), "tile": (16, 32)}
FP8_CASES = [
    ("soft cap and sinks", "one", jnp.bfloat16),
    ("one row", "heads", jnp.float16),
    ("16 rows", "rows", jnp.bfloat16),
    ("pages", "rows", jnp.bfloat16),
    ("pages longer than a block", "rows", jnp.float16),
    ("pages of 1, left", "none", jnp.bfloat16),
    ("starts by row", "rows", jnp.float16),
]


@pytest.mark.parametrize("name,kind,dtype", some(FP8_CASES, 0, 1, 2, 3, 5))
def test_a_cache_in_fp8(name: str, kind: str, dtype: Any) -> None:
    """As exact as plain attention, in the query's dtype, on the dequantized caches."""
    case = CASES[name]._replace(dims=(32, 48))
    x = decoding.in_fp8(case, decoding.cast(decoding.tensors(case), dtype), kind)
    kernel = FP8
    if name == "16 rows":
        kernel = FP8 | {"kernel": "decode_tall_fp8", "tile": (32, 32)}
    got = run(case, x, 3, **kernel)
    oracle.check(got, decoding.exact(case, x, SCALE), decoding.plain(case, x, SCALE))


@pytest.mark.parametrize("kind,page_size", [("rows", 0), ("rows", 16)])
@pytest.mark.parametrize("size", [2.0**-100, 2.0**-30, 2.0**100])
def test_queries_and_scales_of_many_sizes_over_fp8(kind: str, page_size: int, size: float) -> None:
    """float16 could hold neither the query nor a scaled value. At 2^-120, small elements of the
    query would be subnormal in bfloat16."""
    case = Case((40, 9), heads=2, kv_heads=1, dims=(16, 16), page_size=page_size, capacity=48)
    x = decoding.in_fp8(case, decoding.cast(decoding.tensors(case), jnp.bfloat16), kind)
    small = np.float32(1 / size)
    grown = x._replace(
        query=x.query * jnp.bfloat16(size), key_scale=x.key_scale * small,
        value_scale=x.value_scale * small, value=x.value * small,
    )  # fmt: skip
    got, want = run(case, grown, 2, **FP8), decoding.exact(case, x, SCALE)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-5, rtol=1e-5)
    largest = np.abs(x.value).max()
    np.testing.assert_allclose(got.out * size, want.out, atol=2.0**-10 * largest)


@pytest.mark.parametrize("page_size", [0, 8])
def test_scales_of_fp8_that_are_negative_or_0(page_size: int) -> None:
    case = Case((40, 9), heads=2, kv_heads=1, dims=(16, 16), page_size=page_size, capacity=40)
    x = decoding.in_fp8(case, decoding.cast(decoding.tensors(case), jnp.float16), "rows")
    sign = np.where(np.arange(len(x.key_scale)) % 3, -1, 0)[:, None]
    scales = [np.float32(s * sign) for s in (x.key_scale, x.value_scale)]
    rows = np.arange(40) // page_size if page_size else None
    used = case.allowed().any(1)  # other table entries are invalid
    pages = np.where(used, x.block_table[:, rows], 0) if page_size else np.arange(2)[:, None]
    factor = np.where(used, sign[:, 0][pages], 0)[..., None, None]
    x = x._replace(key=x.key * factor, value=x.value * factor)
    x = x._replace(key_scale=scales[0], value_scale=scales[1])
    want = decoding.exact(case, x, SCALE)
    oracle.check(run(case, x, 2, **FP8), want, decoding.plain(case, x, SCALE))


MANY = tuple(int(n) for n in np.random.default_rng(7).integers(0, 40, 64))
OF_SHARES = [  # lengths or the name of a case, shares of a sequence, shares that are dealt out
    # more shares than steps of keys, and more than decode_combine holds at once
    *itertools.product([(300,), (1, 33)], (1, 7, 128), [0]),
    # empty sequences, shares left over; one sequence alone
    *((lengths, splits, dealt) for lengths in ((300, 0, 17, 129), (1, 290), (5,), (0, 0),
        (*MANY[:63], 300)) for dealt, splits in ((4, 2), (9, 9), (128, 128))),
    # more sequences than shares are dealt to
    ((*MANY, 300), 2, 0),
    *((name, 7, 8) for name in ("starts by row", "pages", "soft cap and sinks", "16 rows")),
]  # fmt: skip


@pytest.mark.parametrize(
    "lengths,splits,dealt",
    some(OF_SHARES, 0, 4, 6, 10, 14, 15, 21, 22, 23, 24, 25),
    ids=lambda x: str(x[:4]) if isinstance(x, tuple) else str(x),
)
def test_shares(lengths: Any, splits: int, dealt: int) -> None:
    """A number of shares for each sequence, or shares that are dealt out by length."""
    if isinstance(lengths, str):
        case = CASES[lengths]._replace(dims=(16, 24))
    else:
        window = (200, 0) if dealt == 9 else None
        case = Case(
            lengths, 2 if dealt else 1, heads=2, kv_heads=1, dims=(8, 8), sinks=not dealt,
            window=window,
        )  # fmt: skip
    check(case, splits, **TALL if lengths == "16 rows" else SHORT, shares=dealt)


@pytest.mark.parametrize(
    "batch,each", some([(1, 1), (2, 33), (3, 1), (17, 4), (64, 1), (64, 2)], 0, 1, 2, 3)
)
def test_every_key_is_dealt_once(batch: int, each: int) -> None:
    """No share is dealt twice, so two programs never write the same sums, and no share is longer
    than necessary."""
    rng = np.random.default_rng()
    step, kv_len, splits = 16, 1 << 12, int(rng.integers(2, 40))
    shares = batch * each
    hi = rng.integers(-3, kv_len + 9, (batch, 3), np.int32) // rng.choice(
        [1, 1, 8, 64, 4096], (batch, 1)
    )
    hi = np.ascontiguousarray(hi, np.int32)
    lo = np.where(rng.random((batch, 3)) < 0.5, 0, hi - rng.integers(-2, 900, hi.shape)).astype(
        np.int32
    )
    found = interpreter.dealt_shares(lo, hi, kv_len, shares, splits, step)
    some = (np.maximum(lo, 0) < hi) & (hi <= kv_len)
    first = np.where(some, np.maximum(lo, 0), kv_len).min(1)
    last = np.where(some, hi, 0).max(1)
    steps = -(-np.maximum(last - first, 0) // step)
    longest = max(-(-steps.sum() // shares), -(-steps.max() // splits), 128 // step)
    real = found[found[:, 0] < batch]
    assert (found[len(real) :, 0] == batch).all() and len({(b, n) for b, n,
        *_ in real.tolist()}) == len(real)  # fmt: skip
    for b in range(batch):
        of_sequence = real[real[:, 0] == b]
        assert 1 <= len(of_sequence) <= splits and (of_sequence[:, 2] == len(of_sequence)).all()
        assert sorted(of_sequence[:, 1]) == list(range(len(of_sequence)))
        times = np.zeros(kv_len, int)
        for begin, stop in of_sequence[:, 3:]:
            times[begin:stop] += 1
            assert begin == stop or stop - begin <= longest * step
        keys = np.arange(kv_len)
        np.testing.assert_array_equal(times, (keys >= first[b]) & (keys < last[b]))


def test_a_sink_of_each_sequence() -> None:
    """vmap produces such sinks."""
    case = Case((40, 9), heads=2, kv_heads=1, dims=(8, 8), sinks=True)
    x = decoding.tensors(case)
    sinks = np.array([[1.0, -2.0], [np.inf, 0.5]], np.float32)
    lo, hi = (np.ascontiguousarray(y) for y in decode._ranges(x.lengths, None, None, None, True, 1))
    tensors = [np.ascontiguousarray(y) for y in x[:3]]
    out, lse = interpreter.decode(*tensors, lo, hi, None, sinks, SCALE, 0.0, 2, **SHORT)
    for b in range(2):
        want = decoding.exact(case, x._replace(sinks=sinks[b]), SCALE)
        for h in range(2):
            if np.isinf(sinks[b, h]):
                assert not out[b, :, h].any() and np.isposinf(lse[b, h]).all()
            else:
                np.testing.assert_allclose(out[b, :, h], want.out[b, :, h], atol=1e-5)
                np.testing.assert_allclose(lse[b, h], want.lse[b, h], atol=1e-5)


def test_invalid_pages_and_lengths_give_nan_only_in_their_row() -> None:
    case = Case((33, 20, 9), q_len=2, capacity=32, page_size=8, dims=(8, 8))
    x = decoding.tensors(case)
    table = x.block_table
    assert table is not None
    table[2] = [table[2, 0], table[2, 1], 2**31 - 1, -(2**31)]  # invalid, but beyond its keys
    table[1, 2] = x.key_cache.shape[0]  # invalid: keys 16 to 23; the rows are at 18 and 19
    out, lse = run(case, x, 2, **SHORT)
    want = decoding.exact(case, x, SCALE)
    lost = np.zeros((3, 2), bool)
    lost[0, 1] = lost[1] = True
    np.testing.assert_array_equal(np.isnan(out).all((2, 3)), lost)
    np.testing.assert_array_equal(np.isnan(lse).all(1), lost)
    np.testing.assert_allclose(out[~lost], want.out[~lost], atol=1e-5)
    np.testing.assert_allclose(lse.swapaxes(1, 2)[~lost], want.lse.swapaxes(1, 2)[~lost], atol=1e-5)


@pytest.mark.parametrize("scale,exact", once_each([-0.4, 0.0, 1e-40, 1e-30, 1e30], [None, 1]))
def test_scales_of_any_size(scale: float, exact: int | None) -> None:
    """Scores times the scale are 0, or so large that one key has all the weight."""
    case = Case((200, 40), heads=2, kv_heads=1, dims=(8, 8))
    x = decoding.tensors(case)
    got, want = run(case, x, 2, **SHORT, exact=exact, scale=scale), decoding.exact(case, x, scale)
    np.testing.assert_allclose(got.out, want.out, atol=3e-6)
    np.testing.assert_allclose(got.lse, want.lse, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("page,shares", once_each([-1, None, 2**31 - 1, -(2**31)], [0, 3]))
def test_a_page_lost_among_keys_that_all_rows_attend(page: int | None, shares: int) -> None:
    case = Case((200, 150), q_len=2, capacity=208, page_size=8, dims=(8, 8))
    x = decoding.tensors(case)
    assert x.block_table is not None
    x.block_table[0, 9] = len(x.key_cache) if page is None else page
    out, lse = run(case, x, 1, **SHORT, shares=shares)
    want = decoding.exact(case, x, SCALE)
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    np.testing.assert_allclose(out[1], want.out[1], atol=1e-5)
    np.testing.assert_allclose(lse[1], want.lse[1], atol=1e-5)


@pytest.mark.parametrize("kernel", [SHORT, TALL])
def test_a_missing_page_reads_no_other(kernel: dict[str, Any]) -> None:
    """With NaN in all other pages, rows without a missing page keep their results."""
    case = Case((24,), q_len=12, capacity=24, page_size=8, heads=8, kv_heads=2, dims=(8, 8))
    x = decoding.tensors(case)
    assert x.block_table is not None
    want = decoding.exact(case, x, SCALE)
    pools = [np.array(pool, np.float32) for pool in (x.key_cache, x.value_cache)]
    free = [n for n in range(len(pools[0])) if n not in x.block_table[0, :2]]
    for pool in pools:
        pool[free] = np.nan
    table = np.array([[*x.block_table[0, :2], -1]], np.int32)
    x = x._replace(key_cache=pools[0], value_cache=pools[1], block_table=table)
    out, lse = run(case, x, 1, **kernel)
    good = np.arange(12, 24) < 16  # positions before the missing page, which starts at key 16
    np.testing.assert_allclose(out[0, good], want.out[0, good], atol=1e-5)
    np.testing.assert_allclose(lse[0][:, good], want.lse[0][:, good], atol=1e-5)
    assert np.isnan(out[0, ~good]).all() and np.isnan(lse[0][:, ~good]).all()


@pytest.mark.parametrize("soft_cap,size", [(0.01, 1000), (1e-30, 1), (30, 1), (1e30, 1)])
def test_soft_caps_far_from_the_scores(soft_cap: float, size: float) -> None:
    """Where 2^x of the tanh overflows, and where 1 - tanh would cancel."""
    case = Case((60,), heads=2, kv_heads=1, dims=(8, 8), soft_cap=soft_cap)
    x = decoding.tensors(case)
    x = x._replace(query=x.query * size)
    got, want = run(case, x, 1, **SHORT), decoding.exact(case, x, SCALE)
    np.testing.assert_allclose(got.out, want.out, atol=3e-6)
    np.testing.assert_allclose(got.lse, want.lse, atol=3e-6)
