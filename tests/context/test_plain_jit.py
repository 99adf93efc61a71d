"""Attention under plain `jit` with sharded inputs: XLA partitions it over batch and heads.

No `shard_map`, no `sharding=`. The compiled program may sum gradients of replicated operands; it
must not gather, permute or exchange anything, and results equal one device's.
"""

import dataclasses
import functools
import pickle
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import parse
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packax._src.ops import partitioning, xla_mask
from plain_jit import OF_ROWS, collectives, mesh_of, partitioner, placed, put, specs
from properties.meshes import on_mesh
from properties.values import unequal
from tiers import some

CALL = parse("interval=causal,selector=packed,lengths=192x192,batch=4,results=out+lse")
ARRAYS = CALL.arrays(1)
OF_MESH = OF_ROWS | {"h": "tensor"}, ("data", "tensor")
expected = functools.cache(lambda: jax.jit(CALL.step)(ARRAYS))


def check(got):
    """Bit for bit what one device computes."""
    want = expected()
    assert not unequal(got, {name: want[name] for name in got}, "")


def attention(a):
    return dict(zip(("out", "lse"), CALL.attend(a), strict=True))


def test_key_value_heads_that_do_not_divide():
    """Three heads over two devices: each device takes those that its query heads read."""
    assert not on_mesh(parse("interval=causal,heads=6/3"), "Auto", *OF_MESH)


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_use_shardy_partitioner"), reason="this jax has one partitioner"
)
def test_gspmd():
    """The partitioner before Shardy, as long as JAX has it."""
    with partitioner("gspmd"):
        assert not on_mesh(CALL, "Auto", *OF_MESH)


def test_a_batch_that_does_not_divide_is_whole():
    call = dataclasses.replace(CALL, batch=3)
    a = call.arrays(1)
    query = put(mesh_of(), a["query"], None, None, "tensor")
    step = jax.jit(call.step)
    assert not unequal(step(a | {"query": query}), step(a), "")


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax before 0.9 types what a lowering rule traces"
)
@pytest.mark.parametrize("sizes", some([[1, 1], [4, 2]], 0))
@pytest.mark.filterwarnings("ignore:attention in an exported program")
def test_an_exported_program_of_explicit_axes(sizes):
    call = dataclasses.replace(CALL, lengths="128x128")  # whole tiles of XLA: nothing is padded
    mesh = mesh_of("Explicit", sizes)
    with jax.set_mesh(mesh):
        a = placed(call, mesh)
        got = jax.export.export(jax.jit(call.step))(a).call(a)
    assert not call.wrong(got, call.arrays(1))


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_an_explicit_mesh_that_is_not_set(result):
    """With `AttentionSharding(mesh=)` alone. jax.make_mesh makes explicit axes by default. The zero
    gradient of a result that is not used has no sharding in its type."""
    mesh, spec = mesh_of("Explicit"), P("data", None, "tensor")
    over_mesh = packax.AttentionSharding(query=spec, key_value=spec, mesh=mesh)
    call = dataclasses.replace(CALL, results=("out", "lse")[result])

    def step(a):
        mask = CALL.built(a, sharding=over_mesh)
        return call.step(a, lambda a: CALL.attend(a, mask)[result : result + 1])

    got, unused = jax.jit(step)(placed(CALL, mesh)), ("dlse", "dout")[result]
    assert not CALL.wrong(got, ARRAYS | {unused: 0 * ARRAYS[unused]})


def test_an_eager_shard_map_with_replicated_weights():
    """Without jit. The gradient of a replicated weight is a sum over all devices."""
    weight = np.random.default_rng(2).standard_normal((8, 8)).astype("float32")

    def local(weight, a):
        return CALL.attend(a | {"query": a["query"] @ weight})[0]

    in_specs, heads = (P(), specs(CALL, OF_MESH[0])), P("data", None, "tensor")
    mapped = jax.shard_map(local, mesh=mesh_of(), in_specs=in_specs, out_specs=heads)
    got, want = (
        jax.grad(lambda w, f=f: jnp.sum(jnp.sin(f(w, ARRAYS))))(weight) for f in (mapped, local)
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_a_compiled_program_is_stored():
    """The callbacks with which XLA partitions the attention are not part of a serialized
    executable."""
    mesh = mesh_of()
    a = placed(CALL, mesh)
    compiled = jax.jit(CALL.step).lower(a).compile()
    stored = pickle.dumps(serialize_executable.serialize(compiled))
    devices = mesh.devices.ravel().tolist()
    loaded = serialize_executable.deserialize_and_load(
        *pickle.loads(stored), execution_devices=devices
    )
    assert not unequal(loaded(a), compiled(a), "")


@pytest.mark.parametrize("which", ["query", "key and value"])
def test_a_sharded_sequence_is_an_error(which):
    mesh = mesh_of()
    a = ARRAYS | {name: put(mesh, ARRAYS[name], None, "data") for name in which.split(" and ")}
    message = rf"the sequence axis of {which} is sharded over 'data'.*sharding="
    with pytest.raises(Exception, match=message):
        jax.jit(attention)(a)


def test_a_sharded_sequence_is_gathered_on_request(monkeypatch):
    monkeypatch.setenv(partitioning.SEQUENCE_SWITCH, "gather")
    query = put(mesh_of(), ARRAYS["query"], None, "data")
    with pytest.warns(UserWarning, match="the sequence axis of query is sharded over 'data'"):
        check(jax.jit(lambda a: attention(a))(ARRAYS | {"query": query}))


def test_one_device_has_no_rules():
    text = jax.jit(CALL.step).lower(ARRAYS).as_text()
    assert "CustomSPMDPartitioning" not in text


def test_the_rule_is_in_the_program_for_cuda():
    """In the lowered text: kernels are looked up only when XLA partitions the calls."""
    call = dataclasses.replace(CALL, dtype="bfloat16", dims="16x16")
    traced = jax.jit(call.step).trace(placed(call, mesh_of()))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@CustomSPMDPartitioning") == 4  # documents, blocks, forward, backward
    assert text.count("sdy.sharding_rule") == 4


def test_where_no_kernel_is_what_kernels_alone_read_is_not_made(monkeypatch):
    """Tile orders and block bounds: the XLA path computes the bounds that it reads itself."""

    def fail(*_, **__):
        raise AssertionError("bounds of blocks are made, which no one reads")

    monkeypatch.setattr(xla_mask, "_key_order", fail)
    jax.clear_caches()
    jax.jit(CALL.step).lower(placed(CALL, mesh_of())).compile()


def exported(function, *args):
    return jax.export.export(jax.jit(function), platforms=["cpu"])(*args)


def test_an_exported_program_is_not_divided_and_says_so():
    """A file cannot hold the partitioning functions: the result is right, but the batch is
    gathered."""
    a = placed(CALL, mesh_of())
    with pytest.warns(UserWarning, match="in an exported program for 8 devices: .* sharding="):
        program = exported(attention, a)
    restored = jax.export.deserialize(program.serialize())
    check(jax.jit(restored.call)(a))


def test_an_exported_program_with_sharding_is_divided(recwarn):
    mesh, spec = mesh_of(), P("data", None, "tensor")
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    a = placed(CALL, mesh)
    with jax.set_mesh(mesh):
        program = exported(lambda a: CALL.attend(a, sharding=sharding), a)
        restored = jax.jit(jax.export.deserialize(program.serialize()).call)
        compiled = restored.lower(a).compile()
    assert not collectives(compiled), collectives(compiled)
    assert not [w for w in recwarn if "exported" in str(w.message)]
    check(dict(zip(("out", "lse"), compiled(a), strict=True)))


def test_the_program_says_what_is_computed():
    """The text is more than a pointer, which a persistent cache may leave out of its key."""

    def text(options):
        call = parse(f"interval=causal,batch=4,{options}")
        lowered = jax.jit(call.attend).lower(placed(call, mesh_of())).as_text()
        return re.sub(r'backend_config = "\d+"', "", lowered)

    assert text("scale=0.5") == text("scale=0.5") != text("scale=0.25")
    assert text("cap=2.0") != text("cap=3.0")


def test_a_shard_map_over_all_axes_is_left_alone():
    """Also for a mesh without devices, as jax.export lowers for."""
    mesh, spec = mesh_of().abstract_mesh, P("data")
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for name, x in ARRAYS.items()
    }
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(spec,), out_specs=spec)
    lowered = jax.jit(mapped).trace(shapes).lower(lowering_platforms=("cpu",))
    assert "CustomSPMDPartitioning" not in lowered.as_text()


def test_a_shard_map_over_some_axes_warns_of_the_others():
    mesh, spec = mesh_of(), P("data")
    over = {"in_specs": (spec,), "out_specs": spec, "axis_names": {"data"}}
    with pytest.warns(UserWarning, match="arrays that are sharded over 'tensor' are gathered"):
        check(jax.jit(jax.shard_map(attention, mesh=mesh, **over))(placed(CALL, mesh)))


def test_pages_of_values_that_are_sharded_differently_are_gathered_with_a_warning():
    mesh, pages = mesh_of(), jnp.ones((8, 16, 2, 16))
    key, value = put(mesh, pages, "data"), put(mesh, pages, "tensor")
    query, table = jnp.ones((2, 1, 4, 16)), jnp.asarray([[0, 1], [2, 3]])
    message = "pages of key and value are sharded over 'tensor', but unevenly, or differently"
    with pytest.warns(UserWarning, match=message):
        out = jax.jit(packax.decode_attention)(
            query, key, value, jnp.asarray([20, 9]), block_table=table
        )
    np.testing.assert_allclose(out, 1, rtol=1e-6)
