"""Attention under plain `jit` with sharded inputs: XLA partitions it over batch and heads.

No `shard_map`, no `sharding=`. The compiled program may sum gradients of replicated operands; it
must not gather, permute or exchange anything, and results equal one device's.
"""

import contextlib
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.experimental import serialize_executable
from plain_jit import (
    BATCH,
    CASES,
    MOVES,
    assert_equal,
    both,
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
    query = jnp.asarray(rng.standard_normal((BATCH, 64, 6, 8)), jnp.float32)
    key, value = (jnp.asarray(rng.standard_normal((BATCH, 64, 3, 8)), jnp.float32) for _ in "kv")
    mesh = mesh_of()
    function = jax.jit(both(lambda q, k, v, _: packax.flash_attention(q, k, v, packax.causal())))
    args = (
        put(mesh, query, "data", None, "tensor"),
        put(mesh, key, "data"),
        put(mesh, value, "data"),
    )
    compiled = function.lower(*args, None).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    for x, y in zip(
        jax.tree.leaves(compiled(*args, None)),
        jax.tree.leaves(function(query, key, value, None)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_batch_that_does_not_divide_is_whole():
    mesh = mesh_of()
    query, key, value, ids = (x[:3] for x in tensors())
    function = jax.jit(CASES["documents"])
    args = put(mesh, query, None, None, "tensor"), key, value, ids
    assert_equal(function(*args), function(query, key, value, ids))


@pytest.mark.parametrize(
    "kind,entered",  # JAX requires set_mesh for Explicit axes
    some(
        [
            ("Auto", "set_mesh"),
            ("Auto", "with"),
            ("Auto", "nothing"),
            ("Explicit", "set_mesh"),
            ("Explicit", "nothing"),
        ],
        *(1, 3),
    ),
)
def test_meshes(kind, entered):
    mesh = mesh_of(kind)
    context = {"set_mesh": jax.set_mesh, "with": lambda m: m, "nothing": contextlib.nullcontext}
    args = shard(mesh, *tensors())
    with context[entered](mesh) if entered != "nothing" else contextlib.nullcontext():
        compiled = jax.jit(both(CASES["lse"])).lower(*args).compile()
        assert not set(collectives(compiled)) & set(MOVES)
        got = compiled(*args)
    assert_equal(got, expected("lse", 2))
    gradients, (out, _) = got
    for x in (*gradients, out):
        assert x.sharding.spec[0] == "data" and x.sharding.spec[2] == "tensor", x.sharding


WHOLE_TILES = 128  # a multiple of XLA's tiles, so no operand is padded


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax before 0.9 types what a lowering rule traces"
)
@pytest.mark.parametrize(
    ("name", "sizes", "export"),
    some(
        [
            ("lse", [1, 1], False),
            ("lse", [1, 1], True),
            ("lse", [4, 2], True),
            ("sinks", [1, 1], False),
            ("deterministic", [1, 1], False),
            ("jax.nn's call", [1, 1], False),
        ],
        *(0, 2),
    ),
)
def test_explicit_axes_that_divide_nothing(name, sizes, export):
    """On one device, whose mesh axes have size 1, and in an exported program."""
    args = [x[:, :WHOLE_TILES] for x in tensors()]
    function = jax.jit(both(CASES[name]))
    want = function(*args)
    mesh = mesh_of("Explicit", sizes)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention in an exported program")
        args = shard(mesh, *args)
        got = (jax.export.export(function)(*args).call if export else function)(*args)
    assert_equal(got, want)


def test_vmap_over_a_sharded_axis():
    mesh = mesh_of()
    args = tensors()
    query, key, value, ids = (x[:, None] for x in args)
    function = jax.vmap(CASES["documents"], spmd_axis_name="data")
    sharded = (
        put(mesh, query, "data", None, None, "tensor"),
        *(put(mesh, x, "data", None, None, "tensor") for x in (key, value)),
        put(mesh, ids, "data"),
    )
    compiled = jax.jit(function).lower(*sharded).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    assert_equal(compiled(*sharded)[:, 0], expected("documents", 2)[1])


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
