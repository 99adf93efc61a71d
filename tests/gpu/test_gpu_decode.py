"""The decoding cubins on a GPU: `pytest -m gpu tests/gpu/test_gpu_decode.py`."""

from __future__ import annotations

import functools
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
from decoding import CASES, Case

pytestmark = pytest.mark.gpu
SCALE = 0.15
DTYPES = (jnp.bfloat16, jnp.float16)
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (72, 40), (8, 200), (512, 512), (320, 264))
KINDS = itertools.cycle(itertools.product(DIMS, DTYPES))

LONG = {
    "one long row": Case((20011,), capacity=20224, heads=8, kv_heads=2),
    "long and short": Case((9000, 3, 0, 700), capacity=9216, heads=8, kv_heads=8),
    "tall tiles": Case((5003, 66), capacity=5120, q_len=16, heads=8, kv_heads=1),
    "two tiles and a part": Case((2001,), capacity=2048, q_len=13, heads=22, kv_heads=2),
    "long pages": Case((5003, 66), capacity=5120, q_len=3, heads=8, kv_heads=2, page_size=16,
        sinks=True),
    "pages and tall tiles": Case((1500, 66), capacity=1536, q_len=16, heads=8, kv_heads=1,
        page_size=256, soft_cap=3.0),
    "long, left": Case((8000, 200), capacity=8192, q_len=2, heads=8, kv_heads=2,
        window=(1023, 0)),
}  # fmt: skip


def check(case: Case, dtype, tf32: bool = False) -> None:
    x = decoding.cast(decoding.tensors(case), dtype)
    got = decoding.run(case, x, SCALE, "cuda")
    assert got.out.dtype == dtype and got.lse.dtype == jnp.float32
    oracle.check(got, decoding.exact(case, x, SCALE), decoding.plain(case, x, SCALE, tf32))


@pytest.mark.parametrize("dims,dtype", list(zip(DIMS, DTYPES * 4, strict=True)), ids=str)
@pytest.mark.parametrize("name", ["soft cap and sinks", "16 rows", "pages longer than a block"])
def test_head_dims(name, dims, dtype):
    check(CASES[name]._replace(dims=dims), dtype)


@pytest.mark.parametrize(
    "name,kind", [pytest.param(n, k, id=n) for n, k in zip(CASES, KINDS, strict=False)]
)
def test_cases(name, kind):
    check(CASES[name]._replace(dims=kind[0]), kind[1])


@pytest.mark.parametrize("dims", DIMS[:2], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_split_over_the_gpu(name, dims):
    check(LONG[name]._replace(dims=dims), jnp.bfloat16)


@pytest.mark.parametrize("dims", (*DIMS[2:4], (512, 512)), ids=str)
@pytest.mark.parametrize("name", ["one long row", "pages and tall tiles"])
def test_wide_heads_split_over_the_gpu(name, dims):
    check(LONG[name]._replace(dims=dims), jnp.float16)


LENGTHS = {
    "64 sequences": (3000, 0, 1, *[17 * n for n in range(61)]),
    "65 sequences": (3000, 0, 1, *[17 * n for n in range(62)]),
    "long ones last": (0, 17, 640, 2100, 3072),
}


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("name", LENGTHS)
def test_shares_dealt_out_by_length(name, page_size):
    lengths = LENGTHS[name]
    case = Case(lengths, capacity=3072, heads=4, kv_heads=2, dims=(64, 64), page_size=page_size)
    check(case, jnp.bfloat16)


@pytest.mark.parametrize("dims,q_len", [((128, 128), 1), ((64, 64), 16)], ids=str)
def test_scores_beyond_31_bits(dims, q_len):
    """One key has all the weight. Powers of 2 overflow if a fused multiply-add keeps the part that
    rounding removed from the maximum."""
    case = Case((3000, 700), q_len=q_len, capacity=3008, heads=8, kv_heads=2, dims=dims)
    x = decoding.cast(decoding.tensors(case), jnp.bfloat16)
    x = x._replace(query=x.query * 2.0**20, key_cache=x.key_cache * 2.0**20, key=x.key * 2.0**20)
    got, want = decoding.run(case, x, SCALE, "cuda"), decoding.exact(case, x, SCALE)
    np.testing.assert_allclose(np.asarray(got.out, np.float64), want.out, atol=1e-2, rtol=1e-2)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5)


@pytest.mark.parametrize("precision", ["highest", "tensorfloat32"])
@pytest.mark.parametrize(
    "name,dims",
    [
        ("soft cap and sinks", (64, 64)),
        ("16 rows", (128, 128)),
        ("pages longer than a block", (192, 128)),
        ("multi-query", (256, 256)),
        ("pages of 1, left", (72, 40)),
        ("one long row", (128, 128)),
        ("tall tiles", (64, 64)),
        ("pages and tall tiles", (256, 256)),
    ],
)
def test_float32(name, dims, precision):
    """The yardstick is plain jax.numpy in float32; for TF32 with equally rounded operands."""
    case = (CASES | LONG)[name]._replace(dims=dims)
    with jax.default_matmul_precision(precision):
        check(case, jnp.float32, tf32=precision == "tensorfloat32")


FP8_DIMS = ((64, 64), (128, 128), (256, 256), (80, 48))
FP8_LONG = {name: case for name, case in LONG.items() if name != "two tiles and a part"}


def check_fp8(case, kind, dtype):
    """The yardstick is plain attention on the dequantized caches, in the query's dtype."""
    x = decoding.in_fp8(case, decoding.cast(decoding.tensors(case), dtype), kind)
    got = decoding.run(case, x, SCALE, "cuda")
    assert got.out.dtype == dtype and got.lse.dtype == jnp.float32
    oracle.check(got, decoding.exact(case, x, SCALE), decoding.plain(case, x, SCALE))


FP8_KINDS = itertools.cycle(itertools.product(FP8_DIMS, DTYPES, reversed(decoding.SCALES)))


@pytest.mark.parametrize(
    "name,kind", [pytest.param(n, k, id=n) for n, k in zip(CASES, FP8_KINDS, strict=False)]
)
def test_fp8_cases(name, kind):
    dims, dtype, scales = kind
    check_fp8(CASES[name]._replace(dims=dims), scales, dtype)


@pytest.mark.parametrize("dims", FP8_DIMS, ids=str)
@pytest.mark.parametrize("name", FP8_LONG)
def test_fp8_split_over_the_gpu(name, dims):
    """With scales per sequence or page; what no row attends is NaN."""
    check_fp8(FP8_LONG[name]._replace(dims=dims), "rows", jnp.float16)


def test_every_byte_of_fp8():
    """A sequence of one key returns its value: NaN only in its row, -0, subnormals and 448."""
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    value = jnp.asarray(np.repeat(every, 64).reshape(256, 1, 1, 64))
    for q_len in (1, 16):  # both query tiles
        out = jax.jit(functools.partial(packax.decode_attention, implementation="cuda"))(
            jnp.ones((256, q_len, 2, 64), jnp.float16),
            jnp.zeros_like(value),
            value,
            np.ones(256, int),
        )
        want = np.broadcast_to(every.astype(np.float32)[:, None, None], (256, 2, 64))
        np.testing.assert_array_equal(np.asarray(out[:, -1], np.float32), want)


def test_invalid_pages_and_lengths_give_nan_only_in_their_row():
    case = Case((32, 20, 9), q_len=2, capacity=32, page_size=8, dims=(64, 64))
    x = decoding.cast(decoding.tensors(case), jnp.bfloat16)
    good = decoding.run(case, x, SCALE, "cuda")
    table = x.block_table.copy()
    for entry in (-1, x.key_cache.shape[0], 2**31 - 1, -(2**31)):
        table[1, 2] = entry
        lengths = x.lengths + np.array([1, 0, 0], np.int32)
        got = decoding.run(case, x._replace(block_table=table, lengths=lengths), SCALE, "cuda")
        lost = np.array([[False, True], [True, True], [False, False]])
        np.testing.assert_array_equal(np.isnan(np.asarray(got.out, np.float32)).all((2, 3)), lost)
        np.testing.assert_array_equal(np.isnan(got.lse).all(1), lost)
        np.testing.assert_array_equal(got.out[2], good.out[2])


def test_the_same_bits_every_run_and_under_a_graph():
    """A loop of steps, which XLA records as one CUDA graph, equals the steps one by one."""
    case = Case((4000, 70), capacity=4096, heads=8, kv_heads=2, dims=(128, 128))
    x = decoding.cast(decoding.tensors(case), jnp.bfloat16)

    def step(lengths, _):
        out = packax.decode_attention(
            x.query, x.key_cache, x.value_cache, lengths, implementation="cuda"
        )
        return lengths - 7, out

    lengths = jnp.asarray(x.lengths)
    loop = jax.jit(lambda n: jax.lax.scan(step, n, None, length=9)[1])
    first, again = loop(lengths), loop(lengths)
    np.testing.assert_array_equal(first, again)
    for i in range(9):
        np.testing.assert_array_equal(first[i], jax.jit(step)(lengths - 7 * i, None)[1])


def test_vmap_of_queries_over_one_cache():
    case = Case((300, 77), capacity=320, dims=(64, 64))
    x = decoding.cast(decoding.tensors(case), jnp.bfloat16)
    lengths = jnp.stack([jnp.asarray(x.lengths) - i for i in range(3)])
    f = lambda n: packax.decode_attention(  # noqa: E731
        x.query, x.key_cache, x.value_cache, n, implementation="cuda"
    )
    got = jax.jit(jax.vmap(f))(lengths)
    for i in range(3):
        error = jnp.abs((got[i] - jax.jit(f)(lengths[i])).astype(jnp.float32)).max()
        assert error < 0.02
