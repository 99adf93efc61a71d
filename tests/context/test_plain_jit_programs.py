"""Which programs XLA may partition: rules in their text, shard_map, export, errors.

Guards against a program that gathers without a warning.
"""

import re

import jax
import jax.export
import jax.numpy as jnp
import packax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packax._src.ops import partitioning, xla_mask
from plain_jit import (
    CASES,
    MOVES,
    assert_equal,
    both,
    causal_documents,
    collectives,
    expected,
    mesh_of,
    put,
    shard,
    tensors,
)


@pytest.mark.parametrize("which", ["query", "key and value"])
def test_a_sharded_sequence_is_an_error(which):
    mesh = mesh_of()
    query, key, value, ids = tensors()
    if which == "query":
        query = put(mesh, query, None, "data")
    else:
        key, value = (put(mesh, x, None, "data") for x in (key, value))
    message = rf"the sequence axis of {which} is sharded over 'data'.*sharding="
    with pytest.raises(Exception, match=message):
        jax.jit(CASES["documents"])(query, key, value, ids)


def test_a_sharded_sequence_is_gathered_on_request(monkeypatch):
    monkeypatch.setenv(partitioning.SEQUENCE_SWITCH, "gather")
    mesh = mesh_of()
    query, key, value, ids = tensors()
    args = put(mesh, query, None, "data"), key, value, ids
    with pytest.warns(UserWarning, match="the sequence axis of query is sharded over 'data'"):
        out = jax.jit(lambda *x: CASES["documents"](*x))(*args)
    assert_equal(out, expected("documents", 2)[1])


def test_one_device_has_no_rules():
    text = jax.jit(both(CASES["lse"])).lower(*tensors()).as_text()
    assert "CustomSPMDPartitioning" not in text


def test_the_rule_is_in_the_program_for_cuda():
    """In the lowered text: kernels are looked up only when XLA partitions the calls."""
    mesh = mesh_of()
    args = shard(mesh, *(x.astype(jnp.bfloat16) for x in tensors()[:3]), tensors()[3])
    lowered = jax.jit(both(CASES["lse"])).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@CustomSPMDPartitioning") == 4  # documents, blocks, forward, backward
    assert text.count("sdy.sharding_rule") == 4


def test_where_no_kernel_is_what_kernels_alone_read_is_not_made(monkeypatch):
    """Tile orders and block bounds: the XLA path computes the bounds that it reads itself."""

    def fail(*_, **__):
        raise AssertionError("bounds of blocks are made, which no one reads")

    monkeypatch.setattr(xla_mask, "_key_order", fail)
    jax.clear_caches()
    args = shard(mesh_of(), *tensors())
    jax.jit(both(CASES["lse"])).lower(*args).compile()


def exported(function, *args):
    return jax.export.export(jax.jit(function), platforms=["cpu"])(*args)


def test_an_exported_program_is_not_divided_and_says_so():
    """A file cannot hold the partitioning functions: the result is right, but the batch is
    gathered."""
    args = shard(mesh_of(), *tensors())
    with pytest.warns(UserWarning, match="in an exported program for 8 devices: .* sharding="):
        program = exported(CASES["documents"], *args)
    restored = jax.export.deserialize(program.serialize())
    assert_equal(jax.jit(restored.call)(*args), expected("documents", 2)[1])


def test_an_exported_program_with_sharding_is_divided(recwarn):
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    spec = P("data", None, "tensor")
    sharding = packax.AttentionSharding(query=spec, key_value=spec)

    def attention(query, key, value, ids):
        return packax.flash_attention(query, key, value, causal_documents(ids), sharding=sharding)

    with jax.set_mesh(mesh):
        program = exported(attention, *args)
        restored = jax.jit(jax.export.deserialize(program.serialize()).call)
        compiled = restored.lower(*args).compile()
    assert not collectives(compiled), collectives(compiled)
    assert not [w for w in recwarn if "exported" in str(w.message)]
    assert_equal(compiled(*args), expected("documents", 2)[1])


def test_the_program_says_what_is_computed():
    """The text is more than a pointer, which a persistent cache may leave out of its key."""
    mesh = mesh_of()
    query, key, value, _ = shard(mesh, *tensors())

    def text(**options):
        def function(query, key, value):
            return packax.flash_attention(query, key, value, packax.causal(), **options)

        lowered = jax.jit(function).lower(query, key, value).as_text()
        return re.sub(r'backend_config = "\d+"', "", lowered)

    assert text(scale=0.5) == text(scale=0.5)
    assert text(scale=0.5) != text(scale=0.25)
    assert text(soft_cap=2.0) != text(soft_cap=3.0)


def test_a_shard_map_over_all_axes_is_left_alone():
    """Also for a mesh without devices, as jax.export lowers for."""
    mesh = mesh_of().abstract_mesh
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
        for x in tensors()
    ]
    mapped = jax.shard_map(
        CASES["documents"], mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data")
    )
    lowered = jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cpu",))
    assert "CustomSPMDPartitioning" not in lowered.as_text()


def test_gspmd():
    """The partitioner before Shardy, as long as JAX has it."""
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this jax has one partitioner")
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        mesh = mesh_of()
        args = shard(mesh, *tensors())
        compiled = jax.jit(both(CASES["lse"])).lower(*args).compile()
        assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
        assert_equal(compiled(*args), expected("lse", 2))
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def some_axes_mapped(mesh, function):
    return jax.shard_map(
        function, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data"), axis_names={"data"}
    )


def test_a_shard_map_over_some_axes_warns_of_the_others():
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    with pytest.warns(UserWarning, match="arrays that are sharded over 'tensor' are gathered"):
        out = jax.jit(some_axes_mapped(mesh, CASES["documents"]))(*args)
    assert_equal(out, expected("documents", 2)[1])


def test_a_shard_map_over_some_axes_and_sharding_for_the_others():
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    spec = P("data", None, "tensor")
    sharding = packax.AttentionSharding(query=spec, key_value=spec)

    def function(query, key, value, ids):
        return packax.flash_attention(query, key, value, causal_documents(ids), sharding=sharding)

    compiled = jax.jit(some_axes_mapped(mesh, function)).lower(*args).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    assert_equal(compiled(*args), expected("documents", 2)[1])
