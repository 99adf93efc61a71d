"""Block masks on a GPU. `pytest -m gpu`.

`score_checks.check` requests the largest logits and passes the scale as an array, so `test_cases`
runs the fallback kernels. Up to head dim 256, a call with only a block mask runs Hopper's dedicated
kernels if the block sizes are powers of two.
"""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_kinds import DTYPES
from gpu_runs import (
    Results,
    Tensors,
    assert_agree,
    assert_close,
    assert_identical,
    build,
    has_hopper_kernels,
    packed,
    poison,
    run,
    tensors,
)
from score_checks import check

pytestmark = pytest.mark.gpu
WIDE = (128, 128), (192, 128), (256, 256)  # each has its own kernel for dK and dV


@pytest.mark.parametrize(
    "name,dtype,dims,options",
    [
        *((case.name, "bfloat16", (64, 64), {}) for case in cases.SPARSE),
        *((case.name, "float16", (128, 128), {"soft_cap": 3.0}) for case in cases.SPARSE),
        ("moba", "bfloat16", (192, 128), {"slopes": True, "sinks": True}),
        ("sparse_tiles", "bfloat16", (256, 256), {}),
        ("sparse_threes", "bfloat16", (96, 40), {"slopes": True}),
        ("sparse_threes", "bfloat16", (256, 256), {"soft_cap": 3.0}),
        ("indexer", "float32", (64, 64), {}),
    ],
)
def test_cases(name, dtype, dims, options):
    case = cases.BY_NAME[name]
    with jax.default_matmul_precision("highest"):
        check(case, dtype, dims, **options)


@pytest.mark.parametrize("size,share", [((128, 128), 0.4), ((1, 512), 0.3), ((64, 16), 0.1)])
@pytest.mark.parametrize(
    "dims,garbage",
    [
        ((264, 264), jnp.nan),
        *((dims, 1e30) for dims in ((64, 64), (128, 128), (192, 128), (160, 160), (256, 256))),
    ],
)
def test_long_sequences_equal_xla_and_every_time(size, share, dims, garbage):
    """Long lists with full and partial blocks, and garbage in rows that attend to nothing. Every
    run gives the same bits.

    The fallback kernels ignore NaNs in such rows. Those of Hopper ignore finite numbers
    (docs/guide/numerics.md)."""
    length, heads = 4096, 8
    chosen, _ = cases.random_map(1, size, share, (2, heads), (length, length))
    chosen[0, 3, : len(chosen[0, 0]) // 2] = False  # rows that attend to nothing
    expression = packax.causal() & packax.masks.block_sparse(chosen, size)
    mask = packax.create_attention_mask(expression, q_len=length, kv_len=length)
    rng = np.random.default_rng(0)
    qk_dim, v_dim = dims
    query, key, value, dout = (
        jnp.asarray(rng.standard_normal((2, length, n, dim)), jnp.bfloat16)
        for n, dim in ((heads, qk_dim), (2, qk_dim), (2, v_dim), (heads, v_dim))
    )

    @jax.jit
    def step(query, key, value, dout, dlse):
        def of(implementation):
            def attention(*tensors):
                return packax.flash_attention(
                    *tensors, mask, return_lse=True, implementation=implementation
                )

            results, pullback = jax.vjp(attention, query, key, value)
            return *results, *pullback((dout, dlse))

        return of("cuda"), of("xla")

    dlse = jnp.asarray(rng.standard_normal((2, heads, length)), jnp.float32)
    _, (_, lse, *_) = step(query, key, value, dout, dlse)
    idle = (np.asarray(lse) == -np.inf).swapaxes(1, 2)
    assert idle.any()
    query, dout = (jnp.where(idle[..., None], garbage, x).astype(x.dtype) for x in (query, dout))
    got, wanted = step(query, key, value, dout, dlse)
    again, _ = step(query, key, value, dout, dlse)
    for name, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, again, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(z, np.float32), name)
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_array_equal(x == -np.inf, y == -np.inf, name)
        some = y > -np.inf
        size_of = np.abs(y[some]).max()
        np.testing.assert_allclose(x[some], y[some], atol=2.0**-6 * size_of, err_msg=name)


def run_checked(x, expression):
    got = run(x, expression)
    assert_close(x, got, expression.as_array(x.query.shape[1], x.key.shape[1]))
    return got


@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [case.name for case in cases.SPARSE])
def test_cases_with_nothing_else(name, dtype, dims):
    case = cases.BY_NAME[name]
    run_checked(Tensors(*case.tensors(dtype, *dims)), case.expression())


Q_LEN, KV_LEN = 777, 1301
# (rows, keys) of a block, the share of blocks in the block mask, its batch rows and heads
SELECTIONS = [
    ((1, 512), 0.4, (2, 4)),  # MoBA
    ((1, 1), 0.1, (2, 1)),  # an indexer
    ((1, 64), 0.2, (1, 4)),
    ((2, 16), 0.3, (2, 4)),
    ((64, 64), 0.4, (1, 1)),
    ((16, 1), 0.2, (2, 4)),
    ((512, 2), 0.5, (1, 4)),
    ((4096, 128), 0.6, (2, 4)),
    ((32, 4096), 0.6, (2, 1)),
    ((128, 256), 0.5, (2, 4)),
]
IDS = np.stack([packed(300, 250, 227), packed(64, 500, -100, 113)])
KEYS = np.stack([packed(500, 400, 401), packed(200, 700, -200, 201)])
PLACES = [np.stack([cases.positions_of(ids) for ids in y]) for y in (IDS, KEYS)]
JOINED = (
    lambda: packax.full(),
    lambda: packax.causal(offset=KV_LEN - Q_LEN),
    lambda: packax.documents(IDS, kv_segment_ids=KEYS),
    lambda: (
        packax.sliding_window(150, 40)
        & packax.documents(IDS, kv_segment_ids=KEYS, positions=PLACES[0], kv_positions=PLACES[1])
    ),
)


def selection(n, joined=None):
    """A random block mask in which some rows, a whole tile of rows and a tile of keys are empty."""
    size, share, shape = SELECTIONS[n]
    chosen, _ = cases.random_map(n, size, share, shape, (Q_LEN, KV_LEN))
    for axis, block, (begin, end) in ((2, size[0], (256, 384)), (3, size[1], (640, 768))):
        if block <= 128:
            chosen[(slice(None),) * axis + (slice(begin // block, end // block),)] = False
    chosen[0, 0, ::7] = False
    return packax.masks.block_sparse(chosen, size) & (joined or JOINED[0])()


@pytest.mark.parametrize(
    "n", range(len(SELECTIONS)), ids=lambda n: "x".join(map(str, SELECTIONS[n][0]))
)
@pytest.mark.parametrize(
    "joined", range(len(JOINED)), ids=("full", "causal", "documents", "window")
)
@pytest.mark.parametrize("dims", WIDE)
def test_odd_lengths(n, joined, dims):
    """Every size is combined with every mask, with a block mask per head and batch row or a shared
    one; dtypes alternate."""
    x = tensors(2, Q_LEN, KV_LEN, 4, 2, dims, DTYPES[(n + joined) % 2], seed=n)
    got = run_checked(x, selection(n, JOINED[joined]))
    if SELECTIONS[n][0][0] <= 128:
        assert (np.asarray(got.lse)[:, :, 256:384] == -np.inf).all()
        for y in (got.out, got.dq):
            assert not np.asarray(y, np.float32)[:, 256:384].any()
    if SELECTIONS[n][0][1] <= 128:
        for y in (got.dk, got.dv):
            assert not np.asarray(y, np.float32)[:, 640:768].any()


@pytest.mark.parametrize("group", (1, 8))
@pytest.mark.parametrize("q_len,kv_len", [(1, 1), (63, 65), (64, 640), (129, 1), (128, 128)])
@pytest.mark.parametrize("dims", WIDE)
def test_short_sequences(q_len, kv_len, group, dims):
    """A block mask per head, with blocks longer than the sequences."""
    x = tensors(2, q_len, kv_len, 8, 8 // group, dims, "bfloat16")
    for size in ((1, 2), (512, 4096)):
        chosen, _ = cases.random_map(q_len, size, 0.5, (2, 8), (q_len, kv_len))
        run_checked(x, packax.masks.block_sparse(chosen, size))


@jax.jit
def of_an_array(x: Tensors, mask, scale):
    """Runs the fallback kernels, because the scale is an array."""

    def attention(query, key, value):
        return packax.flash_attention(query, key, value, mask, scale=scale, return_lse=True)

    (out, lse), pullback = jax.vjp(attention, x.query, x.key, x.value)
    return Results(out, lse, *pullback((x.dout, x.dlse)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (0, 1, 4))
@pytest.mark.parametrize("dims", WIDE)
def test_both_kinds_of_kernels(n, dtype, dims):
    """They agree much closer than required. On Hopper they are different kernels."""
    x = tensors(2, Q_LEN, KV_LEN, 4, 2, dims, dtype, seed=7)
    mask = jax.block_until_ready(build(selection(n, JOINED[3]), x))
    poison(x)
    general = of_an_array(x, mask, jnp.float32(dims[0] ** -0.5))
    got = run(x, mask)
    assert_agree(got, general)
    if has_hopper_kernels():
        assert (np.asarray(got.lse) != np.asarray(general.lse)).any()


def test_a_negative_scale():
    """The sign is applied to the query."""
    x, expression = tensors(2, Q_LEN, KV_LEN, 4, 2, 128, "bfloat16"), selection(3)
    got = run(x, expression, -0.2)
    assert_close(x, got, expression.as_array(Q_LEN, KV_LEN), -0.2)


@pytest.mark.parametrize("dims", WIDE)
def test_gradients_have_the_same_bits_in_every_run(dims):
    """The gradients have the same bits in a second run, with `deterministic=True`, and in a call
    that requests only some of them."""
    x, expression = tensors(2, Q_LEN, KV_LEN, 4, 2, dims, "bfloat16"), selection(0, JOINED[1])
    mask = build(expression, x)
    first = run_checked(x, expression)
    for deterministic in (False, True):
        assert_identical(run(x, mask, None, deterministic), first, f"{deterministic}: ")

    def loss(query, key, value):
        out, lse = packax.flash_attention(query, key, value, mask, return_lse=True)
        seen = jnp.isfinite(lse)
        return (out * x.dout).astype(jnp.float32).sum() + (jnp.where(seen, lse, 0) * x.dlse).sum()

    for wanted in ((0,), (1, 2)):
        gradient = jax.jit(jax.grad(loss, wanted))
        poison(x)
        got = gradient(x.query, x.key, x.value)
        assert_identical(got, tuple(first[2 + i] for i in wanted), f"gradients of {wanted}: ")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (0, 3, 4))
@pytest.mark.parametrize("dims", WIDE)
def test_finite_garbage_that_nothing_attends_changes_nothing(n, dtype, dims):
    """Garbage in the rows and keys that the mask excludes in all heads: scores there overflow to
    infinities and NaNs."""
    x, expression = tensors(2, Q_LEN, KV_LEN, 4, 2, dims, dtype), selection(n, JOINED[1])
    allowed = np.broadcast_to(np.asarray(expression.as_array(Q_LEN, KV_LEN)), (2, 4, Q_LEN, KV_LEN))
    rows = ~allowed.any(3).swapaxes(1, 2)[..., None]  # (batch, rows, heads, 1)
    keys = ~allowed.any((1, 2))[..., None, None]
    assert rows.any() and not rows.all() and not keys.all()
    most = float(jnp.finfo(dtype).max)
    four = [
        jnp.where(where, jnp.asarray(sign * most, dtype), y)
        for sign, where, y in zip((1, -1, 1, -1), (rows, keys, keys, rows), x[:4], strict=True)
    ]
    dirty = Tensors(*four, jnp.where(rows[..., 0].swapaxes(1, 2), 1e30, x.dlse))
    got = run(dirty, expression)
    assert_identical(got, run(x, expression), "garbage: ")
    for y in (got.out, got.dq):
        assert not np.asarray(y, np.float32)[np.broadcast_to(rows, y.shape)].any()


def test_nan_stays_where_numerics_md_says():
    """NaNs do not spread beyond the blocks of 64 that the block mask visits."""
    x = tensors(1, 896, 896, 4, 2, 128, "bfloat16")
    chosen = np.zeros((7, 7), bool)
    chosen[:3, :3] = chosen[3:, 3:] = True
    expression = packax.masks.block_sparse(chosen, (128, 128))
    expected = run(x, expression)
    broken = np.arange(896) >= 384
    four = (jnp.where(broken[None, :, None, None], jnp.nan, y) for y in x[:4])
    got = run(Tensors(*four, jnp.where(broken, jnp.nan, x.dlse)), expression)
    for name in Results._fields:
        axis = 2 if name == "lse" else 1
        a, b = (np.take(np.asarray(getattr(y, name)), np.arange(384), axis) for y in (got,
            expected))  # fmt: skip
        assert_identical(a, b, f"{name} where no block has a NaN: ")
        assert np.isnan(np.asarray(getattr(got, name), np.float32)).any()
