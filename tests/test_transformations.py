"""jax's transformations of flash_attention beyond grad and jit: forward mode, second derivatives.

docs/transformations.md says what holds. Guards against a tangent that drops a term, a second
derivative of another function than the first one's, an error that does not say what to do.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from packax import lowering
from test_lowering import Extension, abstract

X64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
IDS = cases.ids_of((3, 4), (-1, 1), (5, 3), (3, 2), (-1, 3))  # an id that reappears, padding
LENGTH, HEADS, KV_HEADS, DIM, V_DIM = len(IDS), 4, 2, 4, 3
EXPRESSION = packax.causal() & packax.documents(IDS)
ALLOWED = np.asarray(EXPRESSION.as_array(LENGTH, LENGTH))


@pytest.fixture
def x64():
    with X64(True):
        yield


def random(seed, *lead):
    """query, key, value, sinks in float64."""
    rng = np.random.default_rng(seed)
    shapes = (LENGTH, HEADS, DIM), (LENGTH, KV_HEADS, DIM), (LENGTH, KV_HEADS, V_DIM)
    tensors = [jnp.asarray(rng.standard_normal((*lead, 2, *shape))) for shape in shapes]
    return (*tensors, jnp.asarray(rng.standard_normal((*lead, HEADS))))


def dense(query, key, value, sinks):
    """The same function of its operands in plain jax.numpy; rows of padding have lse 0."""
    group = HEADS // KV_HEADS
    key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    s = jnp.einsum("bihd,bjhd->bhij", query, key) * DIM**-0.5
    terms = jnp.where(ALLOWED, jnp.exp(jnp.where(ALLOWED, s, 0)), 0)
    some = ALLOWED.any(-1)
    total = jnp.where(some, terms.sum(-1) + jnp.exp(sinks)[:, None], 1)
    out = jnp.einsum("bhij,bjhd->bihd", terms / total[..., None], value)
    return out, jnp.log(total)


def ours(query, key, value, sinks, **kwargs):
    mask = packax.create_attention_mask(EXPRESSION)
    out, lse = packax.flash_attention(
        query, key, value, mask, sinks=sinks, return_lse=True, **kwargs
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def scalar(attention):
    """A number that is not linear in out and lse."""

    def loss(*operands):
        out, lse = attention(*operands)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

    return loss


def gradient(attention, argnums=(0, 1, 2, 3)):
    return jax.grad(scalar(attention), argnums)


def gradient_of_gradient(attention, argnums=(0, 1, 2, 3)):
    def penalty(*operands):
        return sum(jnp.sum(jnp.sin(x)) for x in gradient(attention, argnums)(*operands))

    return jax.grad(penalty, (0, 1, 2, 3))


def assert_same(make, *operands):
    """What `make` makes of flash_attention and of the dense one, in float64."""
    got, expected = (jax.jit(make(attention))(*operands) for attention in (ours, dense))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(y).max() > 1e-3
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


def test_forward_mode(x64):
    """All tangents, and one alone: those that are not there are zero."""
    assert_same(lambda f: lambda x, u: jax.jvp(f, x, u), random(0), random(1))
    query, key, value, sinks = random(0)
    assert_same(lambda f: jax.jacfwd(lambda s: f(query, key, value, s)), sinks)
    # Outside jit, too.
    _, (out, _) = jax.jvp(lambda k: ours(query, k, value, sinks), (key,), (value.sum() + key,))
    _, (expected, _) = jax.jvp(
        lambda k: dense(query, k, value, sinks), (key,), (value.sum() + key,)
    )
    np.testing.assert_allclose(out, expected, rtol=1e-8, atol=1e-10)


def test_forward_over_reverse(x64):
    """Hessian-vector products, and a whole Hessian, in the order that jax.hessian takes."""
    assert_same(lambda f: lambda x, u: jax.jvp(gradient(f), x, u), random(0), random(1))
    tensors = random(2)[:3]
    assert_same(lambda f: jax.hessian(lambda s: scalar(f)(*tensors, s)), random(2)[3])


@pytest.mark.parametrize("argnums", [(0, 1, 2, 3), (0,), (1, 3)], ids=str)
def test_reverse_over_reverse(x64, argnums):
    """A penalty on gradients: of all operands, or of some, in all of them."""
    assert_same(lambda f: gradient_of_gradient(f, argnums), *random(3))


def test_second_derivatives_under_vmap(x64):
    """vmap inside and outside of both gradients, over some operands, along other axes than 0."""
    query, key, value, sinks = random(4, 3)
    operands = (query, key[0], jnp.moveaxis(value, 0, 2), sinks)
    axes = (0, None, 2, 0)
    assert_same(lambda f: jax.vmap(gradient_of_gradient(f), in_axes=axes), *operands)
    assert_same(lambda f: gradient_of_gradient(jax.vmap(f, in_axes=axes)), *operands)


def test_second_derivatives_under_scan_and_checkpoint(x64):
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)

    def layers(attention):
        @functools.partial(jax.checkpoint, policy=keep)
        def layer(query, weight, key, value, sinks):
            out, lse = attention(query, key * weight, value, sinks)
            return query.at[..., :V_DIM].add(out), lse

        def scanned(query, key, value, sinks):
            weights = jnp.asarray([0.5, 1.5])
            return jax.lax.scan(lambda q, w: layer(q, w, key, value, sinks), query, weights)

        return scanned

    assert_same(lambda f: gradient_of_gradient(layers(f)), *random(5))


def test_forward_mode_and_second_derivatives_in_context_parallel(x64):
    """Query rows on two ranks, heads on two: keys gathered, gradients summed."""
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh(
        (2, 2), ("context", "heads"), devices=devices, axis_types=(AxisType.Auto,) * 2
    )
    spec = P(None, "context", "heads", None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    ids = cases.ids_of((3, 5), (-1, 1), (5, 3), (3, 2), (-1, 1))
    expression = packax.causal() & packax.documents(ids)
    operands, along = ([x if x.ndim == 1 else x[:, :12] for x in random(seed)] for seed in (6, 7))

    def attention(sharding):
        def call(*operands):
            mask = packax.create_attention_mask(expression, sharding=sharding)
            *tensors, sinks = operands
            out, lse = packax.flash_attention(
                *tensors, mask, sinks=sinks, return_lse=True, sharding=sharding
            )
            return out, jnp.where(jnp.isfinite(lse), lse, 0)

        return call

    def both(sharding):
        f = attention(sharding)
        return lambda x, u: (jax.jvp(gradient(f), x, u), gradient_of_gradient(f)(*x))

    expected = jax.jit(both(None))(tuple(operands), tuple(along))
    with jax.set_mesh(mesh):
        got = jax.jit(both(sharding))(tuple(operands), tuple(along))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


def test_a_third_derivative_says_what_to_do(x64):
    operands = random(8)
    along = random(9)

    def forward(*x):
        return jax.jvp(ours, x, along)[1]

    for function in (
        lambda: jax.jvp(forward, operands, along),
        lambda: jax.grad(lambda *x: jnp.sum(forward(*x)[0]))(*operands),
        lambda: jax.grad(lambda *x: jnp.sum(gradient_of_gradient(ours)(*x)[0]))(*operands),
    ):
        with pytest.raises(NotImplementedError) as error:
            jax.eval_shape(function)
        text = str(error.value)
        assert text.startswith("flash_attention can be differentiated twice, but not in this order")
        assert "Take the gradient first" in text and "jax.hessian(f)" in text


def lower_for_cuda(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_kernels_alone_have_no_forward_mode(monkeypatch):
    """implementation="cubin" means the kernels or an error."""
    monkeypatch.setattr(lowering, "_ext", Extension)
    query, key, value = abstract()
    mask = packax.causal()

    def out(query, key, value):
        return packax.flash_attention(query, key, value, mask, implementation="cubin")

    def gradient(*operands):
        return jax.grad(lambda *x: out(*x).astype(jnp.float32).sum())(*operands)

    lower_for_cuda(gradient, query, key, value)
    for function in (out, gradient):
        with pytest.raises(NotImplementedError, match=r"none for forward-mode derivatives.*=None"):
            lower_for_cuda(lambda *x, f=function: jax.jvp(f, x, x), query, key, value)
