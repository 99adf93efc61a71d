"""Biases, dense masks and dropout of Flax's attention on packax's kernels: values, gradients, and
that dropout matches Flax's except for the random bits.

Guards against a bias of another batch row, dropout that keeps too much, scales wrongly or ignores
`deterministic` or `broadcast_dropout`, and a silent use of Flax's quadratic path.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.integrations import fallback

ours = pytest.importorskip("packax.integrations.flax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

BATCH, LENGTH, HEADS, DIM = (2, 3), 24, 4, 8
RNG = np.random.default_rng(8)
Q, K, V = (
    jnp.asarray(RNG.standard_normal((*BATCH, LENGTH, HEADS, DIM)), jnp.float32) for _ in range(3)
)
MASK = RNG.random((*BATCH, HEADS, LENGTH, LENGTH)) < 0.7
MASK[..., 0] = True  # no row is without a key
BIAS = RNG.standard_normal(MASK.shape).astype(np.float32)


@pytest.fixture(autouse=True)
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fallback.FallbackWarning)
        yield


def same(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-6)


def with_gradients(attention, *arrays, **options):
    @jax.jit
    def run(*arrays):
        out, transpose = jax.vjp(lambda *x: attention(*x, **options), *arrays)
        return out, transpose(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    return run(*arrays)


def test_layers_of_flax_with_their_masks():
    """make_causal_mask and make_attention_mask of real tokens, under which padding has no key."""
    real = np.arange(LENGTH) < np.array([[24], [11]])
    mask = nn.combine_masks(nn.make_attention_mask(real, real), nn.make_causal_mask(real))
    x = jnp.asarray(RNG.standard_normal((2, LENGTH, 32)), jnp.float32)
    flax_layer = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    layer = flax_layer.clone(attention_fn=ours.dot_product_attention)
    parameters = jax.jit(flax_layer.init)(jax.random.key(0), x)

    def loss(layer, parameters):
        return jnp.sum(jnp.sin(layer.apply(parameters, x, mask=mask)))

    got, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, y)))(parameters)
        for y in (layer, flax_layer)
    )
    jax.tree.map(same, got, expected)
    theirs = nnx.MultiHeadAttention(HEADS, 32, rngs=nnx.Rngs(0), decode=False)
    expected = nnx.jit(lambda layer: layer(x, mask=mask))(theirs)
    theirs.attention_fn = ours.dot_product_attention
    same(nnx.jit(lambda layer: layer(x, mask=mask))(theirs), expected)


def test_a_bias_with_options_and_built_masks():
    q, k, v = Q[0], K[0], V[0]
    mask = packax.create_attention_mask(packax.causal(), q_len=LENGTH, kv_len=LENGTH)
    bias = jnp.asarray(BIAS[0])
    out = ours.attention_fn(soft_cap=2.0)(q, k, v, bias, mask)
    expected = packax.flash_attention(q, k, v, mask, bias=bias, soft_cap=2.0)
    np.testing.assert_array_equal(out, expected)


# --- Dropout: with unit vectors as values, the output is the weights.

EYE = jnp.broadcast_to(jnp.eye(LENGTH)[None, :, None], (2, LENGTH, HEADS, LENGTH))
DROPOUT = {"dropout_rate": 0.25, "dropout_rng": jax.random.key(3)}


def weights(**options):
    """(batch, heads, rows, keys) after dropout, and without it."""
    run = functools.partial(ours.dot_product_attention, Q[0, :2], K[0, :2], EYE)
    dropped = jax.jit(functools.partial(run, **options))()
    return dropped.swapaxes(1, 2), run().swapaxes(1, 2)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout(broadcast):
    """Kept weights are divided by the keep rate, and their share is close to it. With
    broadcast_dropout, all batch rows and heads share the bits."""
    dropped, whole = weights(**DROPOUT, broadcast_dropout=broadcast)
    kept = np.asarray(dropped != 0)
    np.testing.assert_allclose(dropped, np.where(kept, whole / 0.75, 0), rtol=1e-5)
    draws = kept[0, 0].size if broadcast else kept.size
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / draws)
    shared = (kept == kept[:1, :1]).all()
    assert shared == broadcast and not kept.all()


def test_dropout_by_key():
    one, again, other = (
        weights(dropout_rate=0.25, dropout_rng=jax.random.key(n))[0] for n in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert np.any((one == 0) != (other == 0))


def test_no_dropout():
    for options in ({"deterministic": True}, {"dropout_rate": 0.0}):
        dropped, whole = weights(**{**DROPOUT, **options})
        np.testing.assert_array_equal(dropped, whole)


def test_dropout_has_the_gradients_of_its_bits():
    """Equal to those of Flax's formula with the bits that the output shows, with a bias and a
    mask."""
    bias, mask = jnp.asarray(BIAS[0, :2]), jnp.asarray(MASK[0, :2])
    options = {**DROPOUT, "broadcast_dropout": False}
    kept = weights(**options)[0] != 0

    def dense(q, k, v, bias):
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(DIM) + bias
        p = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(kept, p / 0.75, 0), v)

    x = Q[0, :2], K[0, :2], V[0, :2], bias
    got = with_gradients(ours.dot_product_attention, *x, mask=mask, **options)
    jax.tree.map(same, got, with_gradients(dense, *x))


def test_dropout_in_layers():
    """linen and nnx: other bits for each key, no dropout when deterministic."""
    x = jnp.asarray(RNG.standard_normal((2, LENGTH, 32)), jnp.float32)
    layer = nn.MultiHeadDotProductAttention(
        num_heads=HEADS, dropout_rate=0.5, attention_fn=ours.dot_product_attention
    )
    parameters = layer.init(jax.random.key(0), x, deterministic=True)

    def apply(seed, deterministic=False):
        rngs = {"dropout": jax.random.key(seed)}
        return layer.apply(parameters, x, deterministic=deterministic, rngs=rngs)

    np.testing.assert_array_equal(apply(1), apply(1))
    assert np.abs(apply(1) - apply(2)).max() > 0.01
    flax_layer = layer.clone(attention_fn=nn.dot_product_attention)
    same(apply(1, deterministic=True), flax_layer.apply(parameters, x, deterministic=True))
    nnx_layer = nnx.MultiHeadAttention(
        HEADS,
        32,
        dropout_rate=0.5,
        decode=False,
        rngs=nnx.Rngs(0),
        attention_fn=ours.dot_product_attention,
    )
    first, second = (nnx_layer(x, deterministic=False, rngs=nnx.Rngs(dropout=4)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - nnx_layer(x, deterministic=True)).max() > 0.01
