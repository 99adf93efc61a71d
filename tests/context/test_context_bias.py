"""A bias array, and dropout, on fake CPU devices: results equal one device's, down to the dropout
bits.

Guards against a gradient that misses the sum over an axis, rows numbered by their index on a rank,
and dropout streams numbered by a rank's local batch rows and heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import CONTEXT, DIM, mesh_of
from jax.sharding import PartitionSpec as P

BATCH, LENGTH, HEADS, KV_HEADS = 2, 512, 4, 2
KEY = jax.random.key(3)
IDS = np.repeat(np.arange(3), (200, 190, 122)).astype(np.int32)
EXPRESSION = packax.causal() & packax.documents(IDS)


def inputs(shape, dtype=jnp.float32):
    """query, key, value, cotangent and bias."""
    rng = np.random.default_rng(0)

    def normal(*size):
        return jnp.asarray(rng.standard_normal(size), dtype)

    tensors = [normal(BATCH, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return *tensors, normal(*shape, LENGTH)


def results(query, key, value, dout, bias, mask, rate, **more):
    def attend(*x):
        *tensors, bias = x
        return packax.flash_attention(
            *tensors, mask, bias=bias, dropout_rate=rate, dropout_key=KEY, **more
        )

    out, transpose = jax.vjp(attend, query, key, value, bias)
    return out, *transpose(dout)


def close(got, wanted):
    for name, x, y in zip(("out", "dq", "dk", "dv", "dbias"), got, wanted, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=5e-5, rtol=5e-5, err_msg=name)


@pytest.mark.exhaustive
def test_a_shard_map_of_the_callers():
    """Over batch and heads; packax takes the global indices from sharding=."""
    whole = inputs((1, HEADS, LENGTH))
    wanted = jax.jit(lambda *x: results(*x, packax.create_attention_mask(EXPRESSION), 0.3))(*whole)
    sharding = packax.AttentionSharding(
        query=P("data", None, "tensor"), key_value=P("data", None, "tensor")
    )
    tensor, of_bias = P("data", None, "tensor"), P(None, "tensor")

    def attend(query, key, value, bias):
        mask = packax.create_attention_mask(EXPRESSION)
        return packax.flash_attention(
            query, key, value, mask, bias=bias, dropout_rate=0.3, dropout_key=KEY,
            sharding=sharding,
        )  # fmt: skip

    with jax.set_mesh(mesh_of(2, 2, axes=("data", "tensor"))):
        mapped = jax.shard_map(attend, in_specs=(tensor, tensor, tensor, of_bias), out_specs=tensor)
        query, key, value, dout, bias = whole
        out, transpose = jax.vjp(jax.jit(mapped), query, key, value, bias)
        got = jax.block_until_ready((out, *transpose(dout)))
    close(got, wanted)


def test_what_plans_do_not_say():
    query, key, value, _, bias = inputs((1, 1, LENGTH))
    short = packax.causal() & packax.documents(np.arange(LENGTH, dtype=np.int32) // 64)
    local = packax.context_plan(short, ranks=2, kind="local")
    with jax.set_mesh(mesh_of(1, 1, 2, 1)):
        mask = packax.create_attention_mask(short, sharding=CONTEXT, plan=local)
        assert mask.private_part is not None
        with pytest.raises(NotImplementedError, match="a bias array cannot be used with a plan"):
            packax.flash_attention(query, key, value, mask, bias=bias)
        with pytest.raises(NotImplementedError, match="dropout cannot be used with a plan"):
            packax.flash_attention(query, key, value, mask, dropout_rate=0.1, dropout_key=KEY)
    plan = packax.context_plan(EXPRESSION, ranks=2, kind="balanced")
    mask = packax.create_attention_mask(EXPRESSION, plan=plan, permuted_keys=False)
    with pytest.raises(NotImplementedError, match="permutes only the queries"):
        packax.flash_attention(query, key, value, mask, dropout_rate=0.1, dropout_key=KEY)
