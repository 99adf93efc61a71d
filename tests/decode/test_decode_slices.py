"""decode_attention over caches sharded along the sequence: each device attends to its slice.

Guards against a gather of the cache, and against lengths, starts and windows counted from the start
of a slice.
"""

import functools
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
from decoding import CASES, Case
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_jit import mesh_of, partitioner
from tiers import some

SCALE = 0.4
RAGGED = Case((300, 0, 76, 1), q_len=2, window=(90, 0), starts=(0, 0, 5, 0), sinks=True)
DENSE = {"ragged": RAGGED} | {name: case for name, case in CASES.items() if not case.page_size}


def attend(case, x, mesh, batch=None, heads=None, kv_heads=None, context="context"):
    """Caches over "context"; no device may have a whole one."""
    operands, keywords = x.arguments()
    cache = P(batch, context, kv_heads)
    specs = (P(batch, None, heads), cache, cache, P(batch))
    function = functools.partial(
        packax.decode_attention, return_lse=True, scale=SCALE, **case.options(), **keywords
    )
    with jax.set_mesh(mesh):
        pairs = zip(operands, specs, strict=True)
        args = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in pairs]
        compiled = jax.jit(function).lower(*args).compile()
        results = decoding.Results(*compiled(*args))
    assert f"[{','.join(map(str, x.key_cache.shape))}]" not in compiled.as_text()
    return results


@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    some(itertools.product(DENSE, [4, 2], ["Auto", "Explicit"]), 0),
)
def test_equals_the_definition(name, devices, kind):
    case = DENSE[name]
    x = decoding.tensors(case)
    got = attend(case, x, mesh_of(kind, (devices,), ("context",)))
    oracle.check(got, decoding.exact(case, x, SCALE), decoding.plain(case, x, SCALE))


@pytest.mark.parametrize(
    ("kind", "kv_heads"),
    some(itertools.product(["Explicit", "Auto"], [1, 2]), 0),
)
def test_with_batch_and_heads(kind, kv_heads):
    """One key/value head for all devices, and one for each device of the heads axis."""
    case = RAGGED._replace(kv_heads=kv_heads)
    x = decoding.tensors(case)
    mesh = mesh_of(kind, (2, 2, 2), ("data", "context", "tensor"))
    got = attend(case, x, mesh, "data", "tensor", "tensor" if kv_heads == 2 else None)
    oracle.check(got, decoding.exact(case, x, SCALE), decoding.plain(case, x, SCALE))


@pytest.mark.parametrize("kind", some(["heads", "rows"], 1))
def test_a_cache_in_fp8(kind):
    """Scales are passed whole; each device reads those of its sequences and heads."""
    x = decoding.in_fp8(RAGGED, decoding.cast(decoding.tensors(RAGGED), jnp.bfloat16), kind)
    mesh = mesh_of("Auto", (2, 2, 2), ("data", "context", "tensor"))
    got = attend(RAGGED, x, mesh, "data", "tensor", "tensor")
    oracle.check(got, decoding.exact(RAGGED, x, SCALE), decoding.plain(RAGGED, x, SCALE))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_over_two_axes(kind):
    x = decoding.tensors(RAGGED)
    mesh = mesh_of(kind, (2, 2), ("data", "context"))
    got = attend(RAGGED, x, mesh, context=("context", "data"))
    oracle.check(got, decoding.exact(RAGGED, x, SCALE), decoding.plain(RAGGED, x, SCALE))


@pytest.mark.exhaustive
def test_half_precision_and_gspmd():
    x = decoding.cast(decoding.tensors(RAGGED), jnp.bfloat16)
    with partitioner("gspmd"):
        got = attend(RAGGED, x, mesh_of("Auto", (4,), ("context",)))
    assert got.out.dtype == jnp.bfloat16 and got.lse.dtype == jnp.float32
    oracle.check(got, decoding.exact(RAGGED, x, SCALE), decoding.plain(RAGGED, x, SCALE))


@pytest.mark.exhaustive
def test_a_length_behind_the_cache_is_nan_in_its_row_alone():
    case = Case((32, 20), q_len=2, capacity=32)
    x = decoding.tensors(case)
    mesh = mesh_of("Auto", (4,), ("context",))
    good = attend(case, x, mesh)
    got = attend(case, x._replace(lengths=x.lengths + np.array([1, 0], np.int32)), mesh)
    assert np.isnan(got.out[0, 1]).all() and np.isnan(got.lse[0, :, 1]).all()
    assert np.isfinite(got.out[0, 0]).all()
    np.testing.assert_array_equal(got.out[1], good.out[1])


@pytest.mark.exhaustive
def test_pages_that_are_sharded_within_are_gathered_with_a_warning():
    """vmap over the lengths only shares one cache, through a table."""
    mesh = mesh_of("Auto", (4,), ("context",))
    x = decoding.tensors(Case((20, 9), capacity=32))
    cache = NamedSharding(mesh, P(None, "context"))
    key, value = (jax.device_put(y, cache) for y in (x.key_cache, x.value_cache))
    lengths = jnp.asarray([[20, 9], [3, 4]])
    decode = jax.jit(jax.vmap(packax.decode_attention, (None, None, None, 0)))
    with pytest.warns(UserWarning, match="pages of key and value are sharded over 'context'"):
        got = decode(x.query, key, value, lengths)
    want = decode(x.query, x.key_cache, x.value_cache, lengths)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


REFUSED = {
    r"query is .*context.*: its sequence axis .* 'context', but .* all new queries": (
        (None, "context"), (), ()),
    r"key is .*: its sequence axis is sharded over 'data', but query is .* batch or heads": (
        ("data",), (None, "data"), ()),
    r"value is .*: its sequence axis .* 'data', but key is .*context.* has another": (
        (), (None, "context"), (None, "data")),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_types_that_disagree(message):
    mesh = mesh_of("Explicit", (2, 2), ("data", "context"))
    shapes = [(2, 4, 4, 8), (2, 32, 2, 8), (2, 32, 2, 8)]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
        for shape, spec in zip(shapes, REFUSED[message], strict=True)
    ]
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(packax.decode_attention, *args, jax.ShapeDtypeStruct((2,), jnp.int32))


@pytest.mark.exhaustive
def test_a_shard_map_over_other_axes():
    mesh = mesh_of("Explicit", (2, 2), ("data", "context"))
    x = decoding.tensors(Case((20, 9), capacity=32))

    @functools.partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def mapped(query, key, value, lengths):
        return packax.decode_attention(query, key, value, lengths)

    with jax.set_mesh(mesh):
        key, value = (jax.device_put(y, P("data", "context")) for y in (x.key_cache, x.value_cache))
        query, lengths = (jax.device_put(jnp.asarray(y), P("data")) for y in (x.query, x.lengths))
        with pytest.raises(ValueError, match=r"key is .*'context', but this is a"):
            jax.eval_shape(mapped, query, key, value, lengths)
