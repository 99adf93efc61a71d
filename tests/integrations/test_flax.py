"""Flax's attention layers with packax inside, against their own attention. Flax is in the `test`
extra."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.integrations import fallback

ours = pytest.importorskip("packax.integrations.flax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

BATCH, LENGTH, WIDTH, HEADS = 2, 23, 16, 4
RNG = np.random.default_rng(8)
X = jnp.asarray(RNG.standard_normal((BATCH, LENGTH, WIDTH)), jnp.float32)
IDS = np.stack([np.repeat([3, 1, 2], [9, 8, 6]), np.repeat([0, 7, -1], [2, 15, 6])])
EXPRESSION = packax.causal() & packax.documents(IDS)
DENSE = np.asarray(EXPRESSION.as_array(LENGTH, LENGTH))[:, None]
REAL = (IDS != -1)[..., None]  # rows of padding are the mean of all values in Flax, 0 here


def same(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


def same_gradients(x, y):
    """Softmax cancels a bias of the keys, so its gradient is 0 up to rounding."""

    def compare(path, a, b):
        if [getattr(step, "key", None) for step in path][-2:] == ["key", "bias"]:
            np.testing.assert_allclose((a, b), 0, atol=1e-5)
        else:
            same(a, b)

    jax.tree_util.tree_map_with_path(compare, x, y)


# --- linen.


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


def test_linen_with_a_mask_of_the_call(parameters):
    expected = _linen(linen(), parameters, X, DENSE)
    got = _linen(
        linen(ours.dot_product_attention), parameters, X, packax.create_attention_mask(EXPRESSION)
    )
    jax.tree.map(same, got, expected)


def test_linen_with_a_mask_of_its_own(parameters):
    expected = _linen(linen(), parameters, X, DENSE)
    layer = linen(ours.attention_fn(packax.documents(IDS)))
    jax.tree.map(same, layer.apply(parameters, X, mask=packax.causal()) * REAL, expected[0])


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

    same(
        decode(linen(ours.dot_product_attention, decode=True), parameters, X),
        decode(linen(decode=True), parameters, X),
    )
    mask = packax.sliding_window(3)  # applies to the new row, which is not row 0 of the sequence
    got = decode(linen(ours.attention_fn(mask), decode=True), parameters, X)
    whole = linen(ours.dot_product_attention).apply(parameters, X, mask=mask)
    same(got.swapaxes(0, 1), whole)


def test_linen_scan_over_layers_with_remat():
    """A built mask is a pytree, so nn.remat and nn.scan accept it."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            layer = linen(ours.dot_product_attention)
            return x + layer(nn.LayerNorm()(x), mask=mask), None

    blocks = nn.scan(
        nn.remat(Block),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=2,
    )()
    mask = packax.create_attention_mask(EXPRESSION)
    variables = jax.jit(blocks.init)(jax.random.key(0), X, mask)

    @jax.jit
    def run(variables):
        return jax.value_and_grad(lambda p: jnp.sum(jnp.sin(blocks.apply(p, X, mask)[0])))(
            variables
        )

    def plain(variables):
        x = X
        for i in range(2):
            layer = jax.tree.map(lambda p, i=i: p[i], variables["params"])
            normal = nn.LayerNorm().apply({"params": layer["LayerNorm_0"]}, x)
            attention_parameters = {"params": layer["MultiHeadDotProductAttention_0"]}
            x = x + linen(ours.dot_product_attention).apply(attention_parameters, normal, mask=mask)
        return jnp.sum(jnp.sin(x))

    value, gradients = run(variables)
    expected, others = jax.jit(jax.value_and_grad(plain))(variables)
    same(value, expected)
    same_gradients(gradients, others)


# --- nnx.


def nnx_layer(**options):
    return nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), **options)


@nnx.jit
def _nnx(layer, x, mask):
    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x, mask=mask, decode=False) * REAL))

    value, gradients = nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)
    return value, jax.tree.map(lambda x: x, gradients)


def test_nnx_with_a_mask_of_the_call():
    expected = _nnx(nnx_layer(), X, DENSE)
    layer = nnx_layer(attention_fn=ours.dot_product_attention)
    got = _nnx(layer, X, packax.create_attention_mask(EXPRESSION))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        same(x, y)


def test_nnx_is_causal_and_keys():
    """Arguments passed to the function directly: nnx passes is_causal and a mask of keys."""
    q, k, v = (jnp.asarray(RNG.standard_normal((2, 3, 9, 4, 8)), jnp.float32) for _ in range(3))
    keys = RNG.random((2, 3, 1, 1, 9)) < 0.7
    keys[..., 0] = True  # no row is without a key
    from flax.nnx.nn import attention

    causal = np.tril(np.ones((9, 9), bool))
    same(
        ours.dot_product_attention(q, k, v, mask=keys, is_causal=True),
        attention.dot_product_attention(q, k, v, mask=keys & causal),
    )
    one = [x[0, 0] for x in (q, k, v)]  # no batch
    same(
        ours.dot_product_attention(*one, mask=keys[0, 0].astype(np.float32)),
        attention.dot_product_attention(*one, mask=keys[0, 0]),
    )


def test_dtype_and_options():
    q, k, v = (jnp.asarray(RNG.standard_normal((2, 9, 4, 8)), jnp.float32) for _ in range(3))
    out = ours.dot_product_attention(
        q, k.astype(jnp.bfloat16), v, dtype=jnp.bfloat16, precision="highest"
    )
    assert out.dtype == jnp.bfloat16
    out = ours.dot_product_attention(q, k.astype(jnp.bfloat16), v)
    assert out.dtype == jnp.float32
    text = jax.jit(ours.dot_product_attention, static_argnames="precision").lower(
        q, k, v, precision="highest"
    )
    assert "precision = [HIGHEST, HIGHEST]" in text.as_text()
    scaled = ours.attention_fn(packax.causal(), scale=1.0)(q, k, v)
    np.testing.assert_array_equal(
        scaled, packax.flash_attention(q, k, v, packax.causal(), scale=1.0)
    )
    assert np.abs(scaled - ours.attention_fn(packax.causal())(q, k, v)).max() > 0.01


# --- No kernel: Flax's own attention, with one warning.


@pytest.fixture
def unwarned(monkeypatch):
    """No warning was given before, and PACKAX_FALLBACK is unset."""
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.delenv("PACKAX_FALLBACK", raising=False)


@pytest.fixture
def no_bias_kernels(monkeypatch):
    """A build without bias kernels, as for head dims above 256."""
    monkeypatch.setattr(
        fallback, "has_kernels", lambda *x, with_bias=False, options=0: not with_bias
    )


FILLED = np.tril(np.ones((LENGTH, LENGTH), bool))  # no row is without a key
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mask": packax.causal(), "bias": X[0, :, :1]}, "a bias, float32 and head dim 4"),
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
def test_what_only_flax_takes(unwarned, no_bias_kernels, arguments, reason):
    """Results and gradients bit for bit: nnx's, or linen's where an argument is linen's."""
    q = X.reshape(BATCH, LENGTH, HEADS, -1)
    with pytest.warns(fallback.FallbackWarning, match=f"attention of Flax with {reason}"):
        out, transpose = jax.vjp(lambda q: ours.dot_product_attention(q, q, q, **arguments), q)
    of_linen = any("einsum" in name or "fp32" in name for name in arguments)
    mask = arguments.get("mask")
    theirs = {name: x for name, x in arguments.items() if name != "is_causal"}
    if isinstance(mask, packax.masks.MaskExpression) or (mask is None and "is_causal" in arguments):
        theirs["mask"] = FILLED
    attention = nn.dot_product_attention if of_linen else nnx.dot_product_attention
    if "mask" in theirs:
        theirs["mask"] = jnp.asarray(theirs["mask"])
    expected, back = jax.vjp(lambda q: attention(q, q, q, **theirs), q)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(transpose(jnp.cos(out))[0], back(jnp.cos(expected))[0])


def test_layers_with_dense_masks_dropout_and_sown_weights(unwarned, no_bias_kernels, parameters):
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
    sown = [run(y, parameters, X, sow_weights=True)[1] for y in x]
    jax.tree.map(np.testing.assert_array_equal, *sown)
    assert jax.tree.leaves(sown)[0].shape == (BATCH, HEADS, LENGTH, LENGTH)
    layers = nnx_layer(), nnx_layer(attention_fn=ours.dot_product_attention)
    for layer in layers:
        layer.out = layer(X, mask=DENSE, sow_weights=True, decode=False)
    np.testing.assert_array_equal(layers[0].out, layers[1].out)
    np.testing.assert_array_equal(
        *(jax.tree.leaves(nnx.state(x, nnx.Intermediate)) for x in layers)
    )


class Sown:
    """The part of a module that nnx's attention uses."""

    def sow(self, *what):
        self.what = what


def test_assigned_over_flax(unwarned, monkeypatch):
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


def test_expressions_with_dense_masks():
    """With more batch dimensions, a dense mask, is_causal and an expression of attention_fn."""
    q, k, v = (jnp.asarray(RNG.standard_normal((2, 3, 9, 4, 8)), jnp.float32) for _ in range(3))
    dense = RNG.random((2, 3, 4, 9, 9)) < 0.7
    dense[..., 0] = True
    ids = np.zeros((6, 9), int)
    ids[:, 5:] = np.arange(6)[:, None]
    whole = dense & np.tril(np.ones((9, 9), bool))
    whole &= (ids[:, :, None] == ids[:, None]).reshape(2, 3, 1, 9, 9)
    out = ours.attention_fn(packax.documents(ids))(q, k, v, mask=dense, is_causal=True)
    same(out, nnx.dot_product_attention(q, k, v, mask=jnp.asarray(whole)))


@pytest.mark.exhaustive
def test_export_with_symbolic_sizes():
    def run(query, key, mask):
        return ours.dot_product_attention(query, key, key, mask=mask, is_causal=True)

    rng = np.random.default_rng(3)
    query, key = (jnp.asarray(rng.standard_normal((3, 70, h, 8)), jnp.float32) for h in (4, 2))
    x = query, key, rng.random((3, 1, 1, 70)) < 0.7
    batch, length = jax.export.symbolic_shape("b, s")
    sizes = {3: batch, 70: length}
    shapes = [jax.ShapeDtypeStruct([sizes.get(n, n) for n in y.shape], y.dtype) for y in x]
    program = jax.export.export(jax.jit(run))(*shapes)
    np.testing.assert_allclose(program.call(*x), jax.jit(run)(*x), rtol=1e-5, atol=1e-6)


def test_a_sink_takes_all_the_weight_of_a_row_without_keys():
    x = jnp.asarray(RNG.standard_normal((1, 4, 1, 8)), jnp.float32)
    mask = jnp.asarray([[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], bool)[None, None]
    got = ours.attention_fn(sinks=jnp.ones(1))(x, x, x, mask=mask)
    logits = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", x, x) / 8**0.5, -jnp.inf)
    logits = jnp.concatenate([logits, jnp.ones((1, 1, 4, 1))], -1)
    same(got, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits)[..., :-1], x))


def test_a_rate_without_a_key_in_evaluation():
    q = X.reshape(BATCH, LENGTH, HEADS, -1)
    out = ours.dot_product_attention(q, q, q, dropout_rate=0.1, deterministic=True)
    np.testing.assert_array_equal(out, ours.dot_product_attention(q, q, q))
