"""Flax's attention layers with packax inside, against their own attention. Flax is in the `test`
extra. test_faces.py and test_originals.py compare results and gradients of the function.

Guards against dropout that ignores `deterministic` or `broadcast_dropout`, a decode cache that is
counted from another row, and a silent use of Flax's quadratic path.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.integrations import fallback
from tiers import marked
from unwarned import unwarned  # noqa: F401, a fixture

ours = pytest.importorskip("packax.integrations.flax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

BATCH, LENGTH, WIDTH, HEADS = 2, 23, 32, 4
RNG = np.random.default_rng(8)
X = jnp.asarray(RNG.standard_normal((BATCH, LENGTH, WIDTH)), jnp.float32)
IDS = np.stack([np.repeat([3, 1, 2], [9, 8, 6]), np.repeat([0, 7, -1], [2, 15, 6])])
EXPRESSION = packax.causal() & packax.documents(IDS)
DENSE = np.asarray(EXPRESSION.as_array(LENGTH, LENGTH))[:, None]
REAL = (IDS != -1)[..., None]  # rows of padding are the mean of all values in Flax, 0 here
PADDED = nn.make_attention_mask(IDS != -1, IDS != -1)  # under which padding has no key
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}


def same(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6 * max(1, np.abs(y).max(initial=0)))


def same_gradients(x, y):
    """Softmax cancels a bias of the keys, so its gradient is 0 up to rounding."""

    def compare(path, a, b):
        if [getattr(step, "key", None) for step in path][-2:] == ["key", "bias"]:
            np.testing.assert_allclose((a, b), 0, atol=1e-5)
        else:
            same(a, b)

    jax.tree_util.tree_map_with_path(compare, x, y)


def linen(attention_fn=None, **options):
    given = {} if attention_fn is None else {"attention_fn": attention_fn}
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, **given, **options)


@functools.partial(jax.jit, static_argnums=0)
def _linen(layer, parameters, x, mask):
    """Output, and gradients of parameters and x, for rows that are not padding."""

    def loss(parameters, x):
        out = layer.apply(parameters, x, mask=mask) * REAL
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, x)
    return out, gradients


@pytest.fixture(scope="module")
def parameters():
    return jax.jit(linen().init)(jax.random.key(0), X)


BUILT = packax.create_attention_mask(EXPRESSION)
LAYERS = {  # attention_fn, the mask of the call, and Flax's mask
    "built mask": (ours.dot_product_attention, BUILT, DENSE),
    "own mask": (ours.attention_fn(packax.documents(IDS)), packax.causal(), DENSE),
    "Flax's masks": (
        ours.dot_product_attention,
        *(nn.combine_masks(PADDED, nn.make_causal_mask(IDS)),) * 2,
    ),
}


@pytest.mark.parametrize("name", [marked([x], n == 2) for n, x in enumerate(LAYERS)])
def test_layers_of_linen(name, parameters):
    attention, mask, theirs = LAYERS[name]
    got = _linen(linen(attention), parameters, X, mask)
    same_gradients(got, _linen(linen(), parameters, X, theirs))


def nnx_layer(**options):
    return nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), **options)


@nnx.jit
def _nnx(layer, x, mask):
    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x, mask=mask, decode=False) * REAL))

    value, gradients = nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)
    return value, jax.tree.map(lambda x: x, gradients)


@pytest.mark.parametrize("name", [marked([x], n == 0) for n, x in enumerate(LAYERS)])
def test_layers_of_nnx(name):
    attention, mask, theirs = LAYERS[name]
    got = _nnx(nnx_layer(attention_fn=attention), X, mask)
    expected = _nnx(nnx_layer(), X, theirs)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_linen_decodes_with_its_cache(parameters):
    """Step by step over the cache, for which Flax builds a key mask, as with its own attention."""

    @functools.partial(jax.jit, static_argnums=0)
    def decode(layer, parameters, x):
        cache = layer.init(jax.random.key(0), x)["cache"]

        def step(cache, one):
            out, changed = layer.apply(
                {**parameters, "cache": cache}, one[:, None], mutable=["cache"]
            )
            return changed["cache"], out[:, 0]

        return jax.lax.scan(step, cache, x.swapaxes(0, 1))[1]

    mask = packax.sliding_window(3)  # applies to the new row, which is not row 0 of the sequence
    for own, causal in ((ours.attention_fn(), packax.causal()), (ours.attention_fn(mask), mask)):
        got = decode(linen(own, decode=True), parameters, X)
        whole = linen(ours.dot_product_attention).apply(parameters, X, mask=causal)
        same(got.swapaxes(0, 1), whole)


@pytest.mark.exhaustive
def test_linen_scan_over_layers_with_remat():
    """A built mask is a pytree, so nn.remat and nn.scan accept it."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            layer = linen(ours.dot_product_attention)
            return x + layer(nn.LayerNorm()(x), mask=mask), None

    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    blocks = nn.scan(nn.remat(Block), **axes, in_axes=nn.broadcast, length=2)()
    variables = jax.jit(blocks.init)(jax.random.key(0), X, BUILT)

    def plain(variables):
        x = X
        for i in range(2):
            layer = jax.tree.map(lambda p, i=i: p[i], variables["params"])
            x, _ = Block().apply({"params": layer}, x, BUILT)
        return jnp.sum(jnp.sin(x))

    def scanned(variables):
        return jnp.sum(jnp.sin(blocks.apply(variables, X, BUILT)[0]))

    got, expected = (jax.jit(jax.value_and_grad(f))(variables) for f in (scanned, plain))
    same_gradients(got, expected)


def split(batch=(2,), length=9):
    return [jnp.asarray(RNG.standard_normal((*batch, length, 4, 8)), jnp.float32) for _ in range(3)]


def test_dtypes_precision_and_a_rate_without_a_key():
    q, k, v = split()
    attend = ours.dot_product_attention
    half = k.astype(jnp.bfloat16)
    assert attend(q, half, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attend(q, half, v).dtype == jnp.float32
    text = jax.jit(functools.partial(attend, precision="highest")).lower(q, k, v).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    whole = attend(q, k, v)
    for options in ({"dropout_rate": 0.1, "deterministic": True}, {**DROPOUT, "dropout_rate": 0.0}):
        np.testing.assert_array_equal(attend(q, k, v, **options), whole)


def test_arrays_with_is_causal_and_expressions():
    """More batch dimensions, none, a mask of keys or of pairs, and an expression."""
    q, k, v = split((2, 3))
    keys, dense = RNG.random((2, 3, 1, 1, 9)) < 0.7, RNG.random((2, 3, 4, 9, 9)) < 0.7
    dense[..., 0] = keys[..., 0] = True  # no row is without a key
    ids = np.zeros((6, 9), int)
    ids[:, 5:] = np.arange(6)[:, None]
    causal = np.tril(np.ones((9, 9), bool))
    same_ids = (ids[:, :, None] == ids[:, None]).reshape(2, 3, 1, 9, 9)
    theirs = jax.jit(nnx.dot_product_attention)
    for own, mask, whole in (
        (None, keys, keys & causal),
        (packax.documents(ids), dense, dense & causal & same_ids),
    ):
        out = ours.attention_fn(own)(q, k, v, mask=mask, is_causal=True)
        same(out, theirs(q, k, v, mask=jnp.asarray(whole)))
    one = [x[0, 0] for x in (q, k, v)]
    out = ours.dot_product_attention(*one, mask=keys[0, 0].astype(np.float32))
    same(out, theirs(q, k, v, mask=jnp.asarray(keys))[0, 0])


def test_dropout_in_layers(parameters):
    """linen and nnx: other bits for each key, no dropout when deterministic."""
    layer = linen(ours.dot_product_attention, dropout_rate=0.5)

    def apply(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return layer.apply(parameters, X, deterministic=False, rngs=rngs)

    first, again, other = map(apply, (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01
    layer = nnx_layer(attention_fn=ours.dot_product_attention, dropout_rate=0.5, decode=False)
    first, second = (layer(X, deterministic=False, rngs=nnx.Rngs(dropout=4)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - layer(X, deterministic=True)).max() > 0.01


# --- No kernel: Flax's own attention, with one warning.


@pytest.fixture
def no_bias_kernels(monkeypatch):
    """A build without bias kernels, as for head dims above 256."""
    monkeypatch.setattr(
        fallback, "has_kernels", lambda *x, with_bias=False, options=0: not with_bias
    )


FILLED = np.tril(np.ones((LENGTH, LENGTH), bool))  # no row is without a key


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mask": packax.causal(), "bias": X[0, :, :1]}, "a bias, float32 and head dim 8"),
        ({"mask": FILLED, "bias": np.ones((HEADS, 1, LENGTH), np.float32)}, "a bias, "),
        (DROPOUT, "dropout, "),
        ({**DROPOUT, "bias": np.ones((1, 1)), "mask": FILLED}, "a bias and dropout, "),
        ({**DROPOUT, "is_causal": True, "broadcast_dropout": False}, "dropout, "),
        ({"dtype": jnp.complex64}, "dtype complex64"),
        ({"bias": np.ones((1, 1), np.complex64)}, "a bias of dtype complex64"),
        ({"promote_dtype": lambda x, dtype: x}, "promote_dtype"),
        ({**DROPOUT, "force_fp32_for_softmax": True, "dtype": jnp.bfloat16}, "dropout, "),
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general"),
        (
            {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
            "attn_weights_value_einsum and qk_attn_weights_einsum",
        ),
    ],
)
def test_what_only_flax_takes(no_bias_kernels, arguments, reason):
    """Bit for bit: nnx's, or linen's where an argument is linen's."""
    q = X.reshape(BATCH, LENGTH, HEADS, -1)
    with pytest.warns(fallback.FallbackWarning, match=f"attention of Flax with {reason}"):
        out = ours.dot_product_attention(q, q, q, **arguments)
    of_linen = any("einsum" in name or "fp32" in name for name in arguments)
    theirs = {name: x for name, x in arguments.items() if name != "is_causal"}
    if isinstance(arguments.get("mask"), packax.masks.MaskExpression) or "is_causal" in arguments:
        theirs["mask"] = FILLED
    if "mask" in theirs:
        theirs["mask"] = jnp.asarray(theirs["mask"])
    attention = nn.dot_product_attention if of_linen else nnx.dot_product_attention
    np.testing.assert_array_equal(out, attention(q, q, q, **theirs))


def test_layers_with_dense_masks_dropout_and_sown_weights(no_bias_kernels, parameters):
    """As in Flax's own layers, linen and nnx."""
    x = linen(dropout_rate=0.4), linen(ours.dot_product_attention, dropout_rate=0.4)
    rngs = {"dropout": jax.random.key(4)}
    run = functools.partial(
        nn.MultiHeadDotProductAttention.apply, mask=DENSE, deterministic=False, rngs=rngs
    )
    with pytest.warns(fallback.FallbackWarning):
        np.testing.assert_array_equal(run(x[1], parameters, X), run(x[0], parameters, X))
    run = functools.partial(
        nn.MultiHeadDotProductAttention.apply, deterministic=True, mutable=["intermediates"]
    )
    with pytest.warns(fallback.FallbackWarning):
        sown = [run(y, parameters, X, sow_weights=True)[1] for y in x]
    jax.tree.map(np.testing.assert_array_equal, *sown)
    assert jax.tree.leaves(sown)[0].shape == (BATCH, HEADS, LENGTH, LENGTH)
    layers = nnx_layer(), nnx_layer(attention_fn=ours.dot_product_attention)
    outs = [layer(X, mask=DENSE, sow_weights=True, decode=False) for layer in layers]
    np.testing.assert_array_equal(*outs)
    np.testing.assert_array_equal(
        *(jax.tree.leaves(nnx.state(x, nnx.Intermediate)) for x in layers)
    )


class Sown:
    """The part of a module that nnx's attention uses."""

    def sow(self, *what):
        self.what = what


def test_assigned_over_flax(monkeypatch):
    """Flax's own path must not call packax again."""
    q = X.reshape(BATCH, LENGTH, HEADS, -1)
    expected = nnx.dot_product_attention(q, q, q, mask=jnp.asarray(FILLED))
    for place in (nn, nnx, nn.attention, nnx.nn.attention, jax.nn):
        ours_there = packax if place is jax.nn else ours
        monkeypatch.setattr(place, "dot_product_attention", ours_there.dot_product_attention)
    dropped = {**DROPOUT, "module": Sown()}
    with pytest.warns(fallback.FallbackWarning, match="with sown weights"):
        nnx.dot_product_attention(q, q, q, mask=jnp.asarray(FILLED), **dropped)
    same(nnx.dot_product_attention(q, q, q, mask=FILLED), expected)
