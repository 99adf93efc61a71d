"""Dropout: the same bits as Philox in NumPy, in both passes; depends only on the key; and what is
rejected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import packax
import philox
import pytest

KEY = jax.random.key(5)


def test_philox_is_that_of_the_paper():
    """Known answers from the authors' Random123, for the NumPy version and for the one in XLA."""
    from packax._src.ops import dropout

    known = {
        (0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (0xFFFFFFFF, 0xFFFFFFFF): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    }
    for (counter, key), words in known.items():
        assert tuple(map(int, philox.philox([counter] * 4, [key] * 2))) == words
        words_in_xla = dropout.philox([jnp.uint32(counter)] * 4, [jnp.uint32(key)] * 2)
        assert tuple(map(int, words_in_xla)) == words


def ones(rate, key, length=256, batch=2, heads=4):
    """Attention over values of 1 with equal weights: the scaled share of keys each row keeps, 1 on
    average."""
    query = jnp.zeros((batch, length, heads, 8))
    value = jnp.ones((batch, length, heads, 8))
    return packax.flash_attention(
        query, query, value, packax.full(), dropout_rate=rate, dropout_key=key
    )[..., 0]


def test_the_share_that_is_kept():
    rate = 0.3
    kept = np.asarray(ones(rate, KEY)) * (1 - rate)
    one = np.sqrt(rate * (1 - rate) / 256)  # standard deviation of one row; there are 2048 rows
    assert abs(kept.mean() - (1 - rate)) < 5 * one / np.sqrt(kept.size)
    assert 0.9 < kept.std() / one < 1.1
    for axis in range(3):  # rows, heads and batch rows draw independent bits
        flat = np.moveaxis(kept, axis, 0).reshape(kept.shape[axis], -1)
        assert abs(np.corrcoef(flat[0], flat[1])[0, 1]) < 5 / np.sqrt(flat.shape[1])


def test_it_depends_on_the_key_alone():
    first = ones(0.5, KEY)
    np.testing.assert_array_equal(ones(0.5, KEY), first)
    np.testing.assert_array_equal(ones(0.5, jax.random.key_data(KEY)), first)
    np.testing.assert_array_equal(jax.jit(lambda key: ones(0.5, key))(KEY), first)
    assert (np.asarray(ones(0.5, jax.random.key(6))) != np.asarray(first)).any()
    # A larger batch or more heads do not change the bits of the first rows and heads.
    np.testing.assert_array_equal(ones(0.5, KEY, batch=3, heads=6)[:2, :, :4], first)


def test_without_a_rate_it_is_the_same_program():
    query = jnp.ones((1, 64, 2, 8))

    def text(**more):
        attend = lambda x: packax.flash_attention(x, x, x, packax.causal(), **more)  # noqa: E731
        return jax.jit(attend).lower(query).as_text()

    assert text(dropout_rate=0.0, dropout_key=KEY) == text()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("way", ["out", "gradient", "tangent"])
def test_under_vmap_every_batch_row_has_its_streams(batch, way):
    """The kernels read one stream per batch row, also where no key is mapped."""
    x = jnp.zeros((3, batch, 40, 2, 8))

    def loss(x):
        out = packax.flash_attention(x, x, x, packax.causal(), dropout_rate=0.4, dropout_key=KEY)
        return jnp.sin(out).sum()

    ways = {"out": loss, "gradient": jax.grad(loss), "tangent": lambda x: jax.jvp(loss, (x,), (x,))}
    shapes = [
        (query.aval.shape, extra.aval.shape)
        for equation in jaxprs.equations(jax.make_jaxpr(jax.vmap(ways[way]))(x))
        for query, extra in [(equation.invars[0], x) for x in equation.invars[3:]]
        if equation.primitive.name.startswith(("packax_forward", "packax_backward"))
        and extra.aval.dtype == jnp.uint32
    ]
    assert shapes and all(x == ((3 * batch, 40, 2, 8), (3 * batch, 2, 4)) for x in shapes), shapes


def test_heads_that_a_shard_map_does_not_cut():
    """`sharding=` names an axis of the caller's shard_map along which the tensors are equal: every
    device has all heads."""
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices("cpu")[:2])
    spec = jax.sharding.PartitionSpec(None, None, "tensor")
    x = np.random.default_rng(0).standard_normal((1, 32, 4, 8)).astype(np.float32)

    def attend(x, **more):
        return packax.flash_attention(
            x, x, x, packax.causal(), dropout_rate=0.3, dropout_key=KEY, **more
        )

    whole = jax.sharding.PartitionSpec()
    sharding = packax.AttentionSharding(spec, spec)
    mapped = jax.shard_map(
        lambda x: attend(x, sharding=sharding), mesh=mesh, in_specs=whole, out_specs=whole
    )
    np.testing.assert_array_equal(jax.jit(mapped)(x), jax.jit(attend)(x))
