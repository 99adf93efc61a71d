"""The Python blocks of the pages about other libraries, in order, in a namespace for each page."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from paths import DOCS, LIBRARY_PAGES


@functools.cache
def namespace_of(name):
    """What a page defines, with the `out` of each of its blocks in `outs`."""
    text = (DOCS / "guide" / f"{name}.md").read_text()
    namespace = {"outs": []}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        needed = re.match(r"# needs: (\S+)", block)
        if needed:
            pytest.importorskip(needed[1])
        exec(compile(block, f"block {len(namespace['outs'])} of {name}.md", "exec"), namespace)
        namespace["outs"].append(namespace.pop("out"))
    return namespace


@pytest.mark.parametrize("name", LIBRARY_PAGES)
def test_page(name):
    outs = namespace_of(name)["outs"]
    assert outs
    for out in map(np.asarray, outs):
        assert out.size and np.all(np.isfinite(out))


def test_equinox_rows_of_documents():
    """The Equinox block: no document depends on the one before it, and the output of padding is
    0."""
    pytest.importorskip("equinox")
    namespace = namespace_of("equinox")
    run, layer, ids = (namespace[name] for name in ("run", "layer", "segment_ids"))
    x = jax.random.normal(jax.random.key(1), (2, 100, 32))
    out = run(layer, x, ids)
    other = run(layer, x.at[0, :40].add(1.0), ids)
    np.testing.assert_array_equal(out[0, 40:], other[0, 40:])
    assert np.abs(out[0, :40] - other[0, :40]).max() > 0.01
    assert not np.any(out[1, 90:])


def test_equinox_is_its_own_attention():
    """Output and gradients equal those of equinox.nn.MultiheadAttention with the same weights."""
    eqx = pytest.importorskip("equinox")
    namespace = namespace_of("equinox")
    theirs = eqx.nn.MultiheadAttention(4, 32, qk_size=8, vo_size=8, key=jax.random.key(2))
    ours = namespace["Attention"](32, heads=4, kv_heads=4, head_dim=8, key=jax.random.key(3))

    def taking(theirs):
        key_value = jnp.concatenate([theirs.key_proj.weight, theirs.value_proj.weight])
        weights = theirs.query_proj.weight, key_value, theirs.output_proj.weight
        places = lambda m: (m.query.weight, m.key_value.weight, m.out.weight)  # noqa: E731
        return eqx.tree_at(places, ours, weights)

    ids = jnp.asarray([0] * 7 + [1] * 13)
    expression = packax.causal() & packax.documents(ids)
    allowed = expression.as_array(20, 20).reshape(20, 20)
    x = jax.random.normal(jax.random.key(4), (20, 32))

    @eqx.filter_jit
    def both(theirs):
        def of_ours(theirs):
            out = taking(theirs)(x, packax.create_attention_mask(expression))
            return jnp.sum(jnp.sin(out)), out

        def of_theirs(theirs):
            out = theirs(x, x, x, allowed)
            return jnp.sum(jnp.sin(out)), out

        return [eqx.filter_grad(f, has_aux=True)(theirs) for f in (of_ours, of_theirs)]

    (gradients, out), expected = both(theirs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(out, expected[1])
    for x, y in zip(*map(jax.tree.leaves, (gradients, expected[0])), strict=True):
        close(x, y)


def test_keras_rows_of_documents():
    """The Keras block: no document depends on the one before it."""
    pytest.importorskip("keras")
    namespace = namespace_of("keras")
    model, text, ids = (namespace[name] for name in ("model", "text", "ids"))
    out = model.predict([text, ids], verbose=0)
    other = text.copy()
    other[0, :40] = 49 - text[0, :40]
    moved = model.predict([other, ids], verbose=0)
    np.testing.assert_array_equal(out[0, 40:], moved[0, 40:])
    assert np.abs(out[0, :40] - moved[0, :40]).max() > 0.01


def test_keras_is_its_own_attention():
    """Output and gradients equal those of keras.layers.MultiHeadAttention with the dense mask."""
    keras = pytest.importorskip("keras")
    namespace = namespace_of("keras")
    ids = jnp.asarray([[0] * 7 + [1] * 13] * 2)
    x = jax.random.normal(jax.random.key(0), (2, 20, 32))
    ours = namespace["PackedAttention"](num_heads=4, key_dim=8)
    theirs = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8)
    ours.build(x.shape, x.shape)
    theirs.build(x.shape, x.shape)
    theirs.set_weights(ours.get_weights())
    allowed = (packax.causal() & packax.documents(ids)).as_array(20, 20).reshape(2, 20, 20)
    weights = [x.value for x in ours.trainable_variables]

    def run(layer, mask):
        def loss(weights, x):
            out, _ = layer.stateless_call(weights, [], x, x, attention_mask=mask)
            return jnp.sum(jnp.sin(out)), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, x)
        return out, gradients

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for x, y in zip(*map(jax.tree.leaves, (run(ours, ids), run(theirs, allowed))), strict=True):
        close(x, y)


def test_keras_layers_as_they_are(monkeypatch):
    """With the page's function in place of jax.nn's, a layer with a dense mask runs on packax."""
    keras = pytest.importorskip("keras")
    monkeypatch.setenv("PACKAX_FALLBACK", "error")
    calls = []

    def attention(*operands, implementation=None, **options):
        calls.append(implementation)
        return packax.dot_product_attention(*operands, **options)

    layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, flash_attention=False)
    x = jax.random.normal(jax.random.key(0), (2, 20, 32))
    mask = {"use_causal_mask": True, "query_mask": jnp.arange(20)[None] < 15}
    expected = layer(x, x, **mask)[:, :15]
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    np.testing.assert_allclose(layer(x, x, **mask)[:, :15], expected, rtol=1e-4, atol=1e-5)
    assert calls == ["xla"]  # which would otherwise select jax.nn's own path


def test_easydel_is_its_own_attention():
    """Logits and gradients of a tiny Llama equal those with EasyDeL's plain attention, without
    padding."""
    pytest.importorskip("easydel")
    namespace = namespace_of("easydel")
    from flax import nnx

    ids, real = jnp.arange(40)[None], jnp.arange(40)[None] < 33

    def run(name):
        llama = namespace["model"](name)

        def loss(llama):
            logits = llama(input_ids=ids, attention_mask=real).logits[:, :33]
            return jnp.sum(jnp.sin(logits)), logits

        with llama.config.mesh:
            (_, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(llama)
        return [logits, *jax.tree.leaves(gradients)]

    for x, y in zip(run("packax"), run("vanilla"), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)
