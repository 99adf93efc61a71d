"""Errors of `sharding=` and `plan=` (context.txt) name the argument, its value and what is
accepted."""

import dataclasses

import errors
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import mesh_of
from jax.sharding import PartitionSpec as P

IDS = np.zeros((2, 512), np.int32)
CAUSAL, DOCUMENTS = packax.causal(), packax.documents(IDS)
SPEC = P("data", "context", "tensor", None)
GOOD = packax.AttentionSharding(query=SPEC, key_value=SPEC)
SHARDING = packax.AttentionSharding(P(None, "x"), P(None, "x"))


def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


def attend(sharding=GOOD, mask=None, query=(2, 512, 4, 8), key=(2, 512, 2, 8), **keywords):
    with jax.set_mesh(mesh_of(2, 2, 2, axes=("data", "context", "tensor"))):
        mask = packax.causal() if mask is None else mask
        mask = mask() if callable(mask) else mask
        return packax.flash_attention(
            zeros(*query), zeros(*key), zeros(*key), mask, sharding=sharding, **keywords
        )


def build(expression=None, shape=(2, 2, 2), **keywords):
    with jax.set_mesh(mesh_of(*shape, axes=("data", "context", "tensor"))):
        expression = packax.documents(IDS) if expression is None else expression
        return packax.create_attention_mask(expression, **keywords)


def of(query=SPEC, key_value=SPEC, **keywords):
    return packax.AttentionSharding(query=query, key_value=key_value, **keywords)


def plan(shards, length=512, batch=1):
    return packax.context_plan(packax.documents(np.zeros((batch, length), np.int32)), ranks=shards)


def local(ids, ranks=4, **keywords):
    expression = packax.causal() & packax.documents(ids)
    return packax.context_plan(expression, ranks=ranks, kind="local", **keywords)


def of_plan(kind, **keywords):
    short = packax.causal() & packax.documents(np.arange(512, dtype=np.int32) // 64)
    order = packax.context_plan(short, ranks=2, kind=kind)
    return build(short, sharding=GOOD, plan=order, **keywords)


def of_built(query, key, ids):
    return packax.flash_attention(query, key, key, packax.create_attention_mask(documents(ids)))


def with_sharding(query, key, ids):
    return packax.flash_attention(query, key, key, documents(ids), sharding=GOOD)


def of_two_ids(query, key, ids):
    """ids as query, ranges as key."""
    ids, starts = query[:, :, 0, 0].astype(np.int32), key[:, :, 0, 0].astype(np.int32)
    return packax.create_attention_mask(
        packax.documents(ids) & packax.masks.ranges(starts, starts)
    ).kv_start


def documents(ids):
    return packax.causal() & packax.documents(ids)


def of_expression(query, key, ids):
    return packax.flash_attention(query, key, key, documents(ids))


def typed(query, key, ids=None, call=of_expression):
    """Types alone: nothing is compiled."""
    mesh = mesh_of(2, 2, 2, kind="Explicit", axes=("data", "context", "tensor"))
    given = ((2, 512, 4, 8), query), ((2, 512, 2, 8), key), ((2, 512), ids or P())
    with jax.set_mesh(mesh):
        jax.eval_shape(call, *(
            jax.ShapeDtypeStruct(
                shape, np.int32 if len(shape) == 2 else np.float32,
                sharding=jax.NamedSharding(mesh, spec),
            )
            for shape, spec in given
        ))  # fmt: skip


def shard(batch, expression=DOCUMENTS):
    with jax.set_mesh(mesh_of(2, 2, 2, axes=("data", "context", "tensor"))):
        packax.context.shard_batch(batch, expression, sharding=GOOD)


def check(mask=None, **batch):
    mask = packax.create_attention_mask(packax.documents(IDS)) if mask is None else mask
    with packax.context.debug_checks():
        packax.context.check_plan(mask, **batch)


ROWS = P("data", "context", "tensor")
PLAN, TWO = plan(2), plan(2, batch=2)
DROPOUT = {"dropout_rate": 0.1, "dropout_key": jax.random.key(3)}


@pytest.mark.parametrize("call,error,said", list(errors.rows("context")), ids=str)
def test_error(call, error, said):
    errors.check(call, error, said, globals())


def test_the_good_calls_are_good():
    mask = build(sharding=GOOD, plan=plan(2))
    assert attend(mask=mask).shape == (2, 512, 4, 8)
    assert build(packax.causal(), q_len=512, kv_len=512, sharding=GOOD).kv_start.shape == (1, 512)


def test_a_bias_needs_places_where_the_sequence_is_cut():
    bias = packax.alibi(np.ones(4), positions=np.arange(512))
    with (
        jax.set_mesh(mesh_of(2, 2, 2, axes=("data", "context", "tensor"))),
        pytest.raises(ValueError, match=r"alibi needs positions and kv_positions.*'context'"),
    ):
        packax.flash_attention(
            *[zeros(2, 512, 4, 8)] * 3, packax.causal(), bias=bias, sharding=GOOD
        )


def test_a_dimension_partly_in_a_shard_map_of_the_user():
    both = P(None, ("data", "context"))
    sharding = dataclasses.replace(GOOD, query=both, key_value=both)

    def local(x):
        return packax.flash_attention(x, x, x, packax.full(), sharding=sharding)

    with jax.set_mesh(mesh_of(2, 2, axes=("data", "context"))):
        mapped = jax.shard_map(
            local, in_specs=P(None, "data"), out_specs=P(None, "data"), axis_names={"data"}
        )
        with pytest.raises(NotImplementedError) as caught:
            jax.jit(mapped)(zeros(1, 512, 1, 8))
    for text in ("sequence axes ('data', 'context')", "partly", "map over all of them or none"):
        assert text in str(caught.value)
