"""Attention under plain `jit` with sharded inputs: XLA partitions it over batch and heads.

No `shard_map`, no `sharding=`. The compiled program may sum gradients of replicated operands; it
must not gather, permute or exchange anything, and results equal one device's.
"""

import functools
import pickle
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packax._src.ops import partitioning, xla_mask
from plain_jit import (
    BATCH,
    CASES,
    DIM,
    HEADS,
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
from tiers import some


def test_key_value_heads_that_do_not_divide():
    """Three heads over two devices: each device takes those that its query heads read."""
    rng = np.random.default_rng(1)
    args = [rng.standard_normal((BATCH, 64, heads, 8)).astype("float32") for heads in (6, 3, 3)]
    mesh = mesh_of()
    function = jax.jit(both(lambda *x: packax.flash_attention(*x[:3], packax.causal())))
    placed = [put(mesh, args[0], "data", None, "tensor"), *(put(mesh, x, "data") for x in args[1:])]
    compiled = function.lower(*placed, None).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    pairs = [jax.tree.leaves(x) for x in (compiled(*placed, None), function(*args, None))]
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_batch_that_does_not_divide_is_whole():
    mesh = mesh_of()
    query, key, value, ids = (x[:3] for x in tensors())
    function = jax.jit(CASES["documents"])
    args = put(mesh, query, None, None, "tensor"), key, value, ids
    assert_equal(function(*args), function(query, key, value, ids))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax before 0.9 types what a lowering rule traces"
)
@pytest.mark.parametrize("sizes", some([[1, 1], [4, 2]], 0))
@pytest.mark.filterwarnings("ignore:attention in an exported program")
def test_an_exported_program_of_explicit_axes(sizes):
    args = [x[:, :128] for x in tensors()]  # whole tiles of XLA: no operand is padded
    function = jax.jit(both(CASES["lse"]))
    want = function(*args)
    mesh = mesh_of("Explicit", sizes)
    with jax.set_mesh(mesh):
        args = shard(mesh, *args)
        assert_equal(jax.export.export(function)(*args).call(*args), want)


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_an_explicit_mesh_that_is_not_set(result):
    """With `AttentionSharding(mesh=)` alone. jax.make_mesh makes explicit axes by default. The zero
    gradient of a result that is not used has no sharding in its type."""
    mesh, spec = mesh_of("Explicit"), P("data", None, "tensor")
    over_mesh = packax.AttentionSharding(query=spec, key_value=spec, mesh=mesh)

    def attention(query, key, value, ids, sharding=over_mesh):
        mask = packax.create_attention_mask(causal_documents(ids), sharding=sharding)
        return packax.flash_attention(query, key, value, mask, return_lse=True)[result]

    got = jax.jit(both(attention))(*shard(mesh, *tensors()))
    assert_equal(got, jax.jit(both(functools.partial(attention, sharding=None)))(*tensors()))


def test_an_eager_shard_map_with_replicated_weights():
    """Without jit. The gradient of a replicated weight is a sum over all devices."""
    weight = np.random.default_rng(2).standard_normal((DIM, DIM)).astype("float32")

    def local(weight, query, *others):
        return CASES["documents"](query @ weight, *others)

    heads = P("data", None, "tensor")
    specs = {"in_specs": (P(), heads, heads, heads, P("data")), "out_specs": heads}
    mapped = jax.shard_map(local, mesh=mesh_of(), **specs)
    got, want = (
        jax.grad(lambda w, f=f: jnp.sum(jnp.sin(f(w, *tensors()))))(weight) for f in (mapped, local)
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_a_compiled_program_is_stored():
    """The callbacks with which XLA partitions the attention are not part of a serialized
    executable."""
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    compiled = jax.jit(both(CASES["documents"])).lower(*args).compile()
    stored = pickle.dumps(serialize_executable.serialize(compiled))
    devices = mesh.devices.ravel().tolist()
    loaded = serialize_executable.deserialize_and_load(
        *pickle.loads(stored), execution_devices=devices
    )
    assert_equal(loaded(*args), compiled(*args))


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


def test_a_shard_map_over_some_axes_warns_of_the_others():
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    specs = {"in_specs": (P("data"),) * 4, "out_specs": P("data"), "axis_names": {"data"}}
    with pytest.warns(UserWarning, match="arrays that are sharded over 'tensor' are gathered"):
        out = jax.jit(jax.shard_map(CASES["documents"], mesh=mesh, **specs))(*args)
    assert_equal(out, expected("documents", 2)[1])


def test_pages_of_values_that_are_sharded_differently_are_gathered_with_a_warning():
    mesh, pages = mesh_of(), jnp.ones((8, 16, 2, DIM))
    key, value = put(mesh, pages, "data"), put(mesh, pages, "tensor")
    query, table = jnp.ones((2, 1, HEADS, DIM)), jnp.asarray([[0, 1], [2, 3]])
    message = "pages of key and value are sharded over 'tensor', but unevenly, or differently"
    with pytest.warns(UserWarning, match=message):
        out = jax.jit(packax.decode_attention)(
            query, key, value, jnp.asarray([20, 9]), block_table=table
        )
    np.testing.assert_allclose(out, 1, rtol=1e-6)
