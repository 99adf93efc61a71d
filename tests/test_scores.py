"""flash_attention with what changes scores: sinks. By the same rule as without.

Guards against a term that only the forward has, a gradient that misses a sum, an empty row that
gets a share of something.
"""

import cases
import context
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import score_oracle
from jax.sharding import PartitionSpec as P

CASE = cases.BY_NAME["batch_of_three"]  # groups of two heads, padding, one document


def arrays_of(case, dtype, dims=(16, 16), **others):
    query, key, value, dout, dlse = case.tensors(dtype, *dims)
    arrays = {"query": query, "key": key, "value": value, "scale": jnp.float32(dims[0] ** -0.5)}
    return arrays | others, dout, dlse


def attention_of(mask, **static):
    def attention(arrays):
        arrays = dict(arrays)
        tensors = [arrays.pop(name) for name in ("query", "key", "value")]
        arrays.pop("scale")
        return packax.flash_attention(*tensors, mask, return_lse=True, **arrays, **static)

    return attention


def sinks_of(heads, dtype=jnp.float32):
    return jnp.linspace(-3, 4, heads).astype(dtype)


@pytest.mark.parametrize(
    "name,dtype",
    [("batch_of_three", "float32"), ("ids_reappear", "bfloat16"), ("all_padding", "float16")],
)
def test_sinks(name, dtype):
    case = cases.BY_NAME[name]
    arrays, dout, dlse = arrays_of(case, dtype, sinks=sinks_of(case.heads))
    mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)
    function = jax.jit(lambda x: score_oracle.run(attention_of(mask), x, dout, dlse))
    got = function(arrays)
    true, plain, _ = score_oracle.true_and_plain(arrays, case.allowed(), dout, dlse)
    del got.gradients["scale"]
    score_oracle.check(got, true, plain)


def test_a_sink_of_minus_infinity_is_none():
    arrays, *_ = arrays_of(CASE, "float32")
    mask = packax.create_attention_mask(CASE.expression())
    without = attention_of(mask)(arrays)
    got = attention_of(mask)(arrays | {"sinks": jnp.full(CASE.heads, -jnp.inf)})
    for x, y in zip(got, without, strict=True):
        np.testing.assert_array_equal(x, y)


def test_sinks_under_vmap():
    """Over sinks alone, and over sinks and tensors: as a loop."""
    rng = np.random.default_rng(0)
    tensors = [jnp.asarray(rng.standard_normal((2, 1, 30, 2, 8)), jnp.float32) for _ in range(3)]
    sinks = jnp.asarray([[0.5, -1], [2, 0]], jnp.float32)
    mask = packax.create_attention_mask(packax.causal(), q_len=30, kv_len=30)

    def total(q, k, v, sinks):
        return jnp.sum(packax.flash_attention(q, k, v, mask, sinks=sinks) ** 2)

    gradient = jax.grad(total, (0, 3))
    for axes in ((None, None, None, 0), (0, 0, 0, 0), (0, 0, 0, None)):
        operands = [x[0] if a is None else x for x, a in zip((*tensors, sinks), axes, strict=True)]
        got = jax.jit(jax.vmap(gradient, axes))(*operands)
        for n in range(2):
            one = [x if a is None else x[n] for x, a in zip(operands, axes, strict=True)]
            for x, y in zip(got, gradient(*one), strict=True):
                np.testing.assert_allclose(x[n], y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sinks_on_a_mesh(kind):
    """Split with the heads; their gradients summed over the axes of batch and context."""
    sharding = packax.AttentionSharding(
        query=P("data", "context", "tensor"),
        key_value=P("data", "context", "tensor"),
        head_groups=1,
    )
    mesh = context.mesh_of(2, 2, 2, kind=kind, axes=("data", "context", "tensor"))
    query, key, value, dout, dlse = context.tensors(batch=2, length=256)
    ids = context.ROWS[1:3, 400:656]
    sinks = sinks_of(context.HEADS)

    def results(query, key, value, sinks, sharding):
        mask = packax.create_attention_mask(
            packax.causal() & packax.documents(ids), sharding=sharding
        )

        def attention(*x):
            out, lse = packax.flash_attention(
                *x[:3], mask, sinks=x[3], return_lse=True, sharding=sharding
            )
            return out, jnp.where(jnp.isfinite(lse), lse, 0)

        (out, lse), transpose = jax.vjp(attention, query, key, value, sinks)
        return out, lse, *transpose((dout.astype(out.dtype), dlse))

    expected = jax.jit(results, static_argnums=4)(query, key, value, sinks, None)
    with jax.set_mesh(mesh):
        if kind == "Explicit":
            place = jax.sharding.NamedSharding(mesh, sharding.query)
            query, key, value, dout = (jax.device_put(x, place) for x in (query, key, value, dout))
            dlse = jax.device_put(
                dlse, jax.sharding.NamedSharding(mesh, P("data", "tensor", "context"))
            )
        got = jax.block_until_ready(
            jax.jit(results, static_argnums=4)(query, key, value, sinks, sharding)
        )
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(np.abs(y).max()))


def test_sinks_inside_the_callers_shard_map():
    """A rank of the caller's sees its own sinks; replicated ones get the sum of all ranks' gradients."""
    mesh = context.mesh_of(2, axes=("data",))
    query, key, value, *_ = context.tensors(batch=2, length=64)
    sinks = sinks_of(context.HEADS)

    def total(query, key, value, sinks):
        return jnp.sum(packax.flash_attention(query, key, value, packax.causal(), sinks=sinks) ** 2)

    def mapped(*operands):
        one = jax.shard_map(
            lambda *x: jax.lax.psum(total(*x), "data"),
            mesh=mesh,
            in_specs=(P("data"), P("data"), P("data"), P()),
            out_specs=P(),
        )
        return one(*operands)

    got = jax.jit(jax.grad(mapped, (0, 3)))(query, key, value, sinks)
    expected = jax.grad(total, (0, 3))(query, key, value, sinks)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
