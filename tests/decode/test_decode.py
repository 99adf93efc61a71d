"""decode_attention on the CPU: numbers, transformations, error messages.

Guards against a row that attends to one key too many or too few (lengths, starts, windows, pages),
reads beyond a length, and an avoidable copy of the cache under vmap.
"""

from __future__ import annotations

import doctest
import functools
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decoding import Case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import some

SCALE = 0.4


def test_what_cannot_be_is_nan_in_its_row_alone():
    """A length beyond the capacity, or a table entry that is no page, gives NaN only in the
    affected rows; all others keep their values."""
    case = Case((32, 20, 9), q_len=2, capacity=32, page_size=8)
    x = decoding.tensors(case)
    good = decoding.run(case, x, SCALE)
    # The last row of sequence 0 is at position 32, outside the cache; its first is at 31.
    one_more = x._replace(lengths=x.lengths + np.array([1, 0, 0], np.int32))
    shifted = decoding.run(case._replace(lengths=(33, 20, 9)), one_more, SCALE)
    assert np.isnan(shifted.out[0, 1]).all() and np.isnan(shifted.lse[0, :, 1]).all()
    assert np.isfinite(shifted.out[0, 0]).all()
    np.testing.assert_array_equal(shifted.out[1:], good.out[1:])
    for entry in (-1, x.key_cache.shape[0], 2**31 - 1, -(2**31)):
        table = x.block_table.copy()
        table[1, 2] = entry  # keys 16 to 23; the rows are at 18 and 19
        broken = decoding.run(case, x._replace(block_table=table), SCALE)
        assert np.isnan(broken.out[1]).all() and np.isnan(broken.lse[1]).all()
        for b in (0, 2):
            np.testing.assert_array_equal(broken.out[b], good.out[b])


@pytest.mark.parametrize("entry", [-1, 3])
def test_a_missing_page_reads_no_other(entry):
    """NaN and infinity in the first and last page do not reach rows that do not attend to the
    missing page."""
    key_cache = jnp.asarray([jnp.nan, 1.0, jnp.inf])[:, None, None, None] * jnp.ones((1, 1, 8))
    out, lse = packax.decode_attention(
        jnp.ones((1, 2, 1, 8)), key_cache, key_cache, jnp.array([2]),
        block_table=jnp.array([[1, entry]]), return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0], 1, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, 0], np.sqrt(8), rtol=1e-6)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1])


def test_lengths_of_other_integer_types():
    case = Case((300, 7))
    x = decoding.tensors(case)
    want = decoding.run(case, x, SCALE).out
    small = x._replace(lengths=x.lengths.astype(np.uint16))
    np.testing.assert_array_equal(decoding.run(case, small, SCALE).out, want)
    far = x._replace(lengths=np.array([2**32 - 1, 7], np.uint32))  # must not become -1
    got = decoding.run(case, far, SCALE)
    assert np.isnan(got.out[0]).all()
    np.testing.assert_array_equal(got.out[1], want[1])
    none = decoding.run(case, x._replace(lengths=np.array([-(2**31), -1], np.int32)), SCALE)
    assert not none.out.any() and np.isneginf(none.lse).all()


def test_a_loop_over_a_paged_cache():
    """The docstring's step under scan, against flash_attention of the whole sequences."""
    rng = np.random.default_rng()
    batch, steps, heads, kv_heads, dim, page_size = 2, 11, 4, 2, 8, 4
    q, k, v = (
        jnp.asarray(rng.standard_normal((batch, steps, h, dim)), jnp.float32)
        for h in (heads, kv_heads, kv_heads)
    )
    table = jnp.asarray(rng.permutation(9)[:6].reshape(2, 3), jnp.int32)
    pool = jnp.full((9, page_size, kv_heads, dim), jnp.nan)

    def step(state, token):
        key_cache, value_cache, lengths = state
        query, key, value = (x[:, None] for x in token)
        page = jnp.take_along_axis(table, lengths[:, None] // page_size, axis=1)
        at = page, lengths[:, None] % page_size
        key_cache = key_cache.at[at].set(key, mode="drop")
        value_cache = value_cache.at[at].set(value, mode="drop")
        out = packax.decode_attention(query, key_cache, value_cache, lengths + 1, block_table=table)
        return (key_cache, value_cache, lengths + 1), out[:, 0]

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state, tokens):
        return jax.lax.scan(step, state, tokens)

    tokens = [x.swapaxes(0, 1) for x in (q, k, v)]
    _, got = loop((pool, pool + 0, jnp.zeros(batch, jnp.int32)), tokens)
    got = got.swapaxes(0, 1)
    want = packax.flash_attention(q, k, v, packax.causal())
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)


def test_vmap_twice():
    case = Case((20, 9), capacity=24)
    x = decoding.tensors(case)
    lengths = jnp.arange(6).reshape(2, 3)[..., None] + jnp.array([5, 9])
    f = jax.jit(lambda n: packax.decode_attention(x.query, x.key_cache, x.value_cache, n))
    got = jax.jit(jax.vmap(jax.vmap(f)))(lengths)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(got[i, j], f(lengths[i, j]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("transform", (jax.grad, jax.jacfwd))
def test_no_gradient(transform):
    x = decoding.tensors(Case((7,)))
    loss = lambda q: packax.decode_attention(q, *x[1:4]).sum()  # noqa: E731
    with pytest.raises(NotImplementedError,
        match="ragged_paged_attention have no gradient: differentiate flash_att"):  # fmt: skip
        transform(loss)(x.query)
    stopped = jax.grad(lambda q: loss(jax.lax.stop_gradient(q)) + q.sum())(x.query)
    np.testing.assert_array_equal(stopped, 1)


def test_the_documented_loop_writes_to_no_page_that_is_not_there():
    """A negative table entry is no page; as an index it would count from the end."""
    examples = doctest.DocTestParser().get_examples(packax.decode_attention.__doc__)
    (loop,) = (x.source for x in examples if "def step" in x.source)
    names = {"functools": functools, "jax": jax, "jnp": jnp, "packax": packax}
    exec(loop, names)
    new, cache = jnp.full((2, 1, 1, 8), -1.0), jnp.ones((4, 2, 1, 8))
    table, lengths = jnp.array([[0, -1], [2, 1]]), jnp.array([2, 2])
    out, *caches, _ = names["step"](new, new, new, cache, cache + 0, table, lengths)
    for x in caches:
        np.testing.assert_array_equal(x[:, :, 0, 0], [[1, 1], [-1, 1], [1, 1], [1, 1]])
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize(
    "page_size,mapped", some(itertools.product((0, 16), ("query", "caches")), 0)
)
def test_vmap_with_a_batch_that_is_sharded_in_its_type(page_size, mapped):
    """The mapped axis is placed after a sharded batch axis."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2],
        axis_types=(AxisType.Explicit,))  # fmt: skip
    rng = np.random.default_rng(3)
    query, key, value = (jnp.asarray(rng.normal(size=(4, n, h, 8)), jnp.float32) for n,
        h in ((1, 4), (48, 2), (48, 2)))  # fmt: skip
    lengths, table = jnp.array([48, 1, 30, 17]), None
    if page_size:
        key, value = (x.reshape(12, 16, 2, 8) for x in (key, value))
        table = jnp.asarray(rng.permutation(12).reshape(4, 3), jnp.int32)

    def attend(scale, query, key, value):
        scaled = (
            (query * scale, key, value)
            if mapped == "query"
            else (query, key * scale, value * scale)
        )
        return packax.decode_attention(*scaled, lengths, block_table=table)

    scales = jnp.arange(1.0, 4)
    expected = jnp.stack([attend(s, query, key, value) for s in scales])
    with jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh):
        sharded = jax.sharding.reshard(query, P("data"))
        if not page_size:
            key, value = (jax.sharding.reshard(x, P("data")) for x in (key, value))
            lengths = jax.sharding.reshard(lengths, P("data"))
        got = jax.vmap(attend, (0, None, None, None))(scales, sharded, key, value)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
