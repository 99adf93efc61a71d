"""decode_attention and decode_shared_prefix on the CPU: lengths, pages and prefixes that cannot be,
float8 caches byte by byte, loops over steps. tests/table compares values with the reference.

Guards against reads beyond a length, a prefix that counts twice, and a copy of the cache under
vmap.
"""

from __future__ import annotations

import doctest
import functools

import jax
import jax.numpy as jnp
import jaxprs
import ml_dtypes
import numpy as np
import packax
import pytest
from decode_calls import IMPOSSIBLE, DecodeCall, impossible
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from packax import kv_cache
from tiers import once_each, some

FP8 = jnp.float8_e4m3fn
EVERY = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)


@functools.partial(jax.jit, static_argnums=0)
def run(call, a):
    return call.step(a)


def test_what_cannot_be_is_nan_in_its_row_alone():
    """A length beyond the capacity, or a table entry that is no page. All other pages are NaN."""
    for entry in IMPOSSIBLE:
        call, a, lost = impossible(entry)
        assert not call.wrong(run(call, a), a, lost=lost)


def test_lengths_of_other_integer_types():
    """Numbers that int32 does not hold must not wrap."""
    call = DecodeCall()
    for lengths, dtype in (
        ([36, 20, 9, 3], np.uint16),
        ([2**32 - 1, 20, 9, 3], np.uint32),
        ([-(2**31), -1, 0, -9], np.int32),
    ):
        a = call.arrays(lengths=np.array(lengths, dtype))
        lost = a["lengths"][:, None] > 36
        assert not call.wrong(run(call, a), a, lost=lost)


def test_a_loop_over_a_paged_cache():
    """The docstring's step under scan, against flash_attention of the whole sequences. A negative
    table entry is no page; as an index it would count from the end."""
    examples = doctest.DocTestParser().get_examples(packax.decode_attention.__doc__)
    (loop,) = (x.source for x in examples if "def step" in x.source)
    names = {"functools": functools, "jax": jax, "jnp": jnp, "packax": packax}
    exec(loop, names)
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 11, h, 8)), jnp.float32) for h in (4, 2, 2))
    table = jnp.asarray(rng.permutation(9)[:6].reshape(2, 3), jnp.int32)
    pool = jnp.full((9, 4, 2, 8), jnp.nan)

    def step(state, token):
        query, key, value = (x[:, None] for x in token)
        out, *caches, after = names["step"](query, key, value, *state[:2], table, state[2])
        return (*caches, after), out[:, 0]

    tokens = [x.swapaxes(0, 1) for x in (q, k, v)]
    _, got = jax.lax.scan(step, (pool, pool + 0, jnp.zeros(2, jnp.int32)), tokens)
    want = packax.flash_attention(q, k, v, packax.causal())
    np.testing.assert_allclose(got.swapaxes(0, 1), want, atol=2e-6, rtol=2e-6)
    new, cache = jnp.full((2, 1, 1, 8), -1.0), jnp.ones((4, 2, 1, 8))
    table, lengths = jnp.array([[0, -1], [2, 1]]), jnp.array([2, 2])
    out, *caches, _ = names["step"](new, new, new, cache, cache + 0, table, lengths)
    for x in caches:
        np.testing.assert_array_equal(x[:, :, 0, 0], [[1, 1], [-1, 1], [1, 1], [1, 1]])
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_no_gradient():
    a = DecodeCall().arrays(1)
    arrays = a["key"], a["value"], a["lengths"]
    loss = lambda q: packax.decode_attention(q, *arrays).sum()  # noqa: E731
    for transform in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match="have no gradient: differentiate flash_att"):
            transform(loss)(a["query"])
    stopped = jax.grad(lambda q: loss(jax.lax.stop_gradient(q)) + q.sum())(a["query"])
    np.testing.assert_array_equal(stopped, 1)


@pytest.mark.parametrize("cache,mapped", once_each(["dense", "pages"], ["query", "lengths"]))
def test_vmap_with_a_batch_that_is_sharded_in_its_type(cache, mapped):
    """Mapped twice; the mapped axes are placed after a sharded batch axis."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2],
        axis_types=(AxisType.Explicit,))  # fmt: skip
    call = DecodeCall(cache=cache)
    a = call.arrays(1, lengths=np.int32([36, 6, 30, 17]))

    def changed(n, a):
        return a | {mapped: a[mapped] * (1.0 + n) if mapped == "query" else a[mapped] - n}

    with jax.set_mesh(mesh):
        whole = ("table",) if cache == "dense" else ("key", "value", "table")
        b = {n: jax.device_put(x, P() if n in whole else P("data")) for n, x in a.items()}
        step = jax.vmap(lambda n, a: call.step(changed(n, a)), (0, None))
        got = jax.vmap(step, (0, None))(jnp.arange(6).reshape(2, 3), b)
    for n in range(6):
        each = {name: x.reshape(6, *x.shape[2:])[n] for name, x in got.items()}
        assert not call.wrong(each, changed(n, a))


# --- A prefix that sequences share.


def test_prefixes_that_cannot_be():
    """An empty prefix, one that reaches into the new rows, a negative one, and values beyond int32,
    which saturate and never wrap: such a long prefix does not end before the new rows."""
    call = DecodeCall(cache="prefix of pairs", batch=6)
    lengths, prefixes = np.int32([0, 21, 20, 30, 21, 9]), np.int32([0, 20, 8])
    a = call.arrays(lengths=lengths, prefixes=prefixes)
    for large, last, dtype, lost in (
        (20, -3, np.int32, [2]),  # the new row of sequence 2 is in the prefix
        (2**32 + 4, 8, np.int64, [2, 3]),
        (2**64 - 1, 8, np.uint64, [2, 3]),
    ):
        got = call.step(a | {"prefixes": np.array([0, large, last], dtype)})
        assert not call.wrong(got, a, lost=np.isin(np.arange(6), lost)[:, None])


@pytest.mark.parametrize("groups", [0, 1])
def test_an_empty_batch_with_a_prefix(groups):
    """As in a server without requests: it may have no group, either."""
    query, pages = np.ones((0, 1, 4, 8), np.float32), np.ones((3, 4, 2, 8), np.float32)
    nothing, table = np.zeros(0, int), np.zeros((0, 2), int)
    out, lse = packax.decode_shared_prefix(
        query, pages, pages, nothing, np.zeros(groups, int), block_table=table, return_lse=True
    )
    assert out.shape == (0, 1, 4, 8) and lse.shape == (0, 4, 1)


def test_export_with_a_prefix():
    """The pages may be symbolic; the batch, which the groups divide, may not."""
    batch, pages = jax.export.symbolic_shape("b, p")

    def exported(batch):
        shapes = {"query": (batch, 1, 4, 8), "key": (pages, 4, 2, 8), "value": (pages, 4, 2, 8)}
        arrays = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}
        shapes = {"kv_lengths": (batch,), "prefix_lengths": (1,), "block_table": (batch, 5)}
        arrays |= {name: jax.ShapeDtypeStruct(x, jnp.int32) for name, x in shapes.items()}
        step = jax.jit(lambda x: packax.decode_shared_prefix(**x))
        return jax.export.export(step)(arrays)

    assert exported(2).out_avals[0].shape == (2, 1, 4, 8)
    with pytest.raises(ValueError, match="a known batch and number of groups"):
        exported(batch)


@pytest.mark.parametrize(
    "groups,of_each,parts", some([(2, 19, 4), (1, 16, 1), (1, 17, 2), (1, 34, 3)], 0)
)
def test_how_often_a_prefix_is_read(groups, of_each, parts):
    """Once for each 16 rows, whatever the size of the group."""
    batch, rng = groups * of_each, np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((batch, 1, 4, 8)), jnp.float32)
    key, value = (jnp.asarray(rng.standard_normal((9, 4, 2, 8)), jnp.float32) for _ in "kv")
    lengths, table = rng.integers(17, 33, batch), np.tile(rng.permutation(9)[:8], (batch, 1))

    def call():
        return packax.decode_shared_prefix(
            query, key, value, lengths, [16] * groups, block_table=table
        )

    traced = jaxprs.equations(jax.make_jaxpr(call)())
    rows = [x.invars[0].aval.shape[0] for x in traced if x.primitive.name == "packax_decode"]
    assert sorted(rows) == [parts, batch]
    want = packax.decode_attention(query, key, value, lengths, block_table=table)
    np.testing.assert_allclose(jax.jit(call)(), want, atol=2e-6)


# --- Caches in float8_e4m3fn.


def test_every_byte():
    """A sequence with one key returns its value; a NaN byte affects only its row."""
    value = jnp.asarray(EVERY).reshape(256, 1, 1, 1)
    out = packax.decode_attention(
        jnp.ones((256, 1, 1, 1)), jnp.zeros_like(value), value, np.ones(256, int),
        value_scale=np.float32([3]),
    )  # fmt: skip
    np.testing.assert_array_equal(out.ravel(), 3 * EVERY.astype(np.float32))


@pytest.mark.parametrize(
    "kind,keys", some([("outliers", 1 << 10), ("normal", 1 << 17), ("needle", 1 << 17)], 0)
)
def test_error_of_rounded_caches(kind, keys):
    """The bounds of docs/guide/numerics.md: the error grows neither with the length nor with
    outlier channels."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((n, 128)) for n in (16, keys, keys))
    if kind == "outliers":
        factors = np.array([10, 20, 30, 50])
        channels = rng.permutation(128)[:8]
        key[:, channels[:4]] *= factors
        query[:, channels[:4]] /= factors
        value[:, channels[4:]] *= factors
    if kind == "needle":
        query = 2.2 * key[rng.integers(0, keys, 16)]
    query = query.astype(ml_dtypes.bfloat16).astype(np.float64)
    weights = np.exp(query @ key.T / np.sqrt(128))
    want = weights @ value / weights.sum(1, keepdims=True)

    def error(key, value, **scales):
        caches = (jnp.asarray(x)[None, :, None] for x in (key, value))
        out = packax.decode_attention(
            jnp.asarray(query, jnp.float32)[None, None], *caches, np.array([keys]), **scales
        )
        return np.linalg.norm(out[0, 0] - want) / np.linalg.norm(want)

    scales = [np.abs(x).max() / 448 for x in (key, value)]
    small = [(x / s).astype(FP8) for x, s in zip((key, value), scales, strict=True)]
    assert error(key.astype(np.float32), value.astype(np.float32)) < 1e-5
    assert 0.01 < error(*small, key_scale=scales[0], value_scale=scales[1]) < 0.1


def test_written_rows_are_read():
    """Prompts and a new token, in pages that each have a scale."""
    rng = np.random.default_rng(5)
    new = rng.standard_normal((2, 9, 2, 4)).astype(np.float32)
    table = np.array([[3, 0, 5], [1, 4, 2]])
    scale = np.exp(rng.uniform(-5, 0, (6, 2))).astype(np.float32)
    rows, places = np.mgrid[:2, :9]
    pages = kv_cache.write(
        jnp.zeros((6, 3, 2, 4), FP8), new, rows, places, block_table=table, scale=scale
    )
    read = np.float32(pages)[table] * scale[table][:, :, None, :, None]
    largest = 448 * scale[table][:, :, None, :, None]
    want = np.clip(new.reshape(2, 3, 3, 2, 4), -largest, largest)
    # Half an ulp, which is 1/16 of the value, or half a subnormal step.
    bound = np.maximum(np.abs(want) / 16, largest / 448 * 2.0**-10) * (1 + 1e-6)
    assert (np.abs(read - want) <= bound).all()


def test_written_numbers_are_rounded_as_bytes_are():
    """To the nearest, beyond 448 to 448, NaN to NaN; scales of heads and of one sequence."""
    new = np.array([0.0, -0.0, 1.06, 447, 465, 1e30, -np.inf, np.nan], np.float32)
    write = jax.jit(functools.partial(kv_cache.write, sequence_ids=[[1]], positions=[[0]]))
    cache = jnp.full((2, 1, 1, 8), 2, FP8)
    want = np.clip(new, -448, 448).astype(FP8).astype(np.float32)
    got = np.float32(write(cache, new[None, None, None]))
    np.testing.assert_array_equal(got[0], 2)
    np.testing.assert_array_equal(got[1, 0, 0], want)
    np.testing.assert_array_equal(np.signbit(got[1, 0, 0, :2]), [False, True])
    for scale in (0.5, np.float32([0.5]), np.float32([[np.nan], [0.5]])):
        got = write(cache, new[None, None, None] / 2, scale=scale)
        np.testing.assert_array_equal(np.float32(got[1, 0, 0]), want)
