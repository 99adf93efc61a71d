"""Error messages for `sharding=` and `plan=`: the argument, its value and what is accepted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import mesh_of
from jax.sharding import PartitionSpec as P

IDS = np.zeros((2, 512), np.int32)
SPEC = P("data", "context", "tensor", None)
GOOD = packax.AttentionSharding(query=SPEC, key_value=SPEC)


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


@pytest.mark.parametrize(
    "call,texts",
    [
        (lambda: attend(SPEC), ["sharding must be an AttentionSharding", "but is a P"]),
        (lambda: attend(of(query="data")), ["sharding.query must be a PartitionSpec", "'data'"]),
        (lambda: attend(of(P(*"abcde"))), ["sharding.query must have at most 4 entries"]),
        (
            lambda: attend(of(P(P.UNCONSTRAINED))),
            ["sharding.query must hold None, axis names or tuples", "UNCONSTRAINED"],
        ),
        (
            lambda: attend(of(P(None, None, None, "tensor"))),
            ["sharding.query must not shard the head dim", "'tensor'"],
        ),
        (
            lambda: attend(of(P("data", ("context", "data")))),
            ["sharding.query uses the axis 'data' twice"],
        ),
        (
            lambda: attend(of(key_value=P(None, "context"))),
            ["sharding.key_value must have the batch axes of sharding.query, 'data'", "None"],
        ),
        (
            lambda: attend(of(key_value=P("data", "tensor"))),
            ["the sequence axes of sharding.key_value", "'context' as in", "are 'tensor'"],
        ),
        (
            lambda: attend(of(P("data", "context"), P("data", "context", "tensor"))),
            ["the heads axes of sharding.key_value must be None, but are 'tensor'"],
        ),
        (
            lambda: attend(of(P("batch", "context"), P("batch", "context"))),
            ["sharding.query names the axis 'batch'", "'data', 'context', 'tensor'"],
        ),
        (
            lambda: attend(gather_head_groups=0),
            ["None, a positive integer or a tuple of positive integers, not 0"],
        ),
        (
            lambda: attend(gather_head_groups=(1, -1)),
            ["None, a positive integer or a tuple of positive integers, not (1, -1)"],
        ),
        (
            lambda: attend(gather_head_groups=()),
            ["None, a positive integer or a tuple of positive integers, not ()"],
        ),
        (
            lambda: attend(gather_head_groups=2),
            ["must divide the key/value heads of a rank, 1", "add up to them, but is 2"],
        ),
        (
            lambda: attend(gather_head_groups=(1, 1)),
            ["must divide the key/value heads of a rank, 1", "add up to them, but is (1, 1)"],
        ),
        (
            lambda: attend(query=(3, 512, 4, 8), key=(3, 512, 2, 8)),
            ["batch size of query, 3", "'data', 2"],
        ),
        (
            lambda: attend(query=(2, 511, 4, 8)),
            ["length of query, 511", "multiple", "'context', 2"],
        ),
        (
            lambda: attend(key=(2, 511, 2, 8)),
            ["length of key and value, 511", "'context', 2"],
        ),
        (
            lambda: attend(query=(2, 512, 3, 8), key=(2, 512, 3, 8)),
            ["number of heads of query, 3", "'tensor', 2"],
        ),
        (
            lambda: attend(query=(2, 512, 4, 8), key=(2, 512, 1, 8)),
            [
                "number of heads of key and value, 1",
                "'tensor', 2",
                "pass None for heads in sharding.key_value",
            ],
        ),
        (
            lambda: attend(mask=packax.create_attention_mask(packax.documents(IDS))),
            ["sharding must be that of the mask, None", "'context'", "pass it to create_attention"],
        ),
        (
            lambda: attend(of(key_value=P("data")), lambda: build(sharding=GOOD)),
            ["sharding must be that of the mask, AttentionSharding(query=P('data', 'context'"],
        ),
        (
            lambda: packax.flash_attention(
                zeros(2, 512, 4, 8), *[zeros(2, 512, 2, 8)] * 2, build(sharding=GOOD)
            ),
            ["sharding needs a mesh"],
        ),
        (
            lambda: attend(None, build(sharding=GOOD, shape=(1, 4, 1))),
            ["query rows in 4 pieces", "now have size 2", "on the mesh that it is used on"],
        ),
        (
            lambda: build(packax.causal(), q_len=511, kv_len=512, sharding=GOOD),
            ["number of query rows of the mask, 511", "'context', 2"],
        ),
        (
            lambda: build(packax.documents(np.zeros((3, 512), int)), sharding=GOOD),
            ["batch size of the mask, 3", "'data', 2"],
        ),
        (lambda: build(plan="balanced"), ["plan must come from context_plan", "str"]),
        (lambda: build(plan=plan(2, 1024)), ["plan was made for 1024 query rows", "512"]),
        (
            lambda: build(packax.causal(), q_len=512, kv_len=600, plan=plan(2)),
            ["plan permutes 512 rows, but there are 600 keys", "permuted_keys=False"],
        ),
        (
            lambda: build(plan=plan(2, batch=3)),
            ["plan has batch size 3", "batch size 2"],
        ),
        (
            lambda: build(plan=plan(4), sharding=GOOD),
            ["plan was made for 4 ranks", "size 2"],
        ),
        (
            lambda: packax.create_attention_mask(packax.documents(IDS), sharding=GOOD),
            ["sharding needs a mesh", "jax.set_mesh(mesh)", "AttentionSharding(..., mesh=mesh)"],
        ),
        (
            lambda: packax.create_attention_mask(
                packax.documents(IDS), sharding=dataclasses.replace(GOOD, mesh="m")
            ),
            ["sharding.mesh must be a jax.sharding.Mesh, but is 'm'"],
        ),
    ],
)
def test_refused(call, texts):
    with pytest.raises(ValueError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


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
