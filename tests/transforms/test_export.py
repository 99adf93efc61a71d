"""jax.export: programs with known and symbolic sizes, for the CPU and for CUDA, from a machine
without a GPU.

Guards against an exported program that works for one size only, and an error that does not say what
to do.
"""

import contextlib
import importlib.util
import itertools

import context
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from exported import restored
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import Extension
from packax._src.ops import ffi
from tiers import some
from transformed import HEADS, IDS, KV_HEADS, random


def symbolic(dtype, dim, key_length="s"):
    batch, length, kv_length = jax.export.symbolic_shape(f"b, s, {key_length}")
    query = jax.ShapeDtypeStruct((batch, length, HEADS, dim), dtype)
    key = jax.ShapeDtypeStruct((batch, kv_length, KV_HEADS, dim), dtype)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return query, key, key, ids, ids


def test_export_for_cuda(monkeypatch):
    """From a machine without a GPU, with all sizes symbolic; the check of custom calls must be
    disabled."""
    monkeypatch.setattr(ffi, "ext", Extension)

    def gradient(query, key, value, ids, kv_ids):
        mask = packax.create_attention_mask(packax.documents(ids, kv_segment_ids=kv_ids))
        return jax.grad(
            lambda *x: packax.flash_attention(*x, mask).astype(jnp.float32).sum(), (0, 1, 2)
        )(query, key, value)

    query, key, value, ids, _ = symbolic(jnp.bfloat16, 64, "t")
    shapes = query, key, value, ids, jax.ShapeDtypeStruct(key.shape[:2], jnp.int32)
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility"):
        jax.export.export(jax.jit(gradient), platforms=["cuda"])(*shapes)
    program = restored(
        jax.export.export(
            jax.jit(gradient),
            platforms=["cuda", "cpu"],
            disabled_checks=packax.export_checks(),
        )(*shapes)
    )
    text = program.mlir_module()
    assert "@packax_forward_v1" in text and "@packax_backward_v1" in text
    assert program.platforms == ("cuda", "cpu")
    assert [str(x.shape) for x in program.out_avals] == [str(x.shape) for x in shapes[:3]]


def test_masks_as_arguments_of_exported_programs():
    """With known lengths a mask can be an argument; with symbolic ones its leaves can."""

    def attention(query, key, value, mask):
        return packax.flash_attention(query, key, value, mask)

    query, key, value, ids, _ = symbolic(jnp.float32, 8)
    build = lambda ids: packax.create_attention_mask(packax.documents(ids))  # noqa: E731
    shapes = jax.eval_shape(build, ids)
    structure = jax.tree.structure(shapes)

    def from_leaves(query, key, value, leaves):
        return attention(query, key, value, jax.tree.unflatten(structure, leaves))

    program = restored(
        jax.export.export(jax.jit(from_leaves), platforms=["cpu"])(
            query, key, value, jax.tree.leaves(shapes)
        )
    )
    tensors = [np.asarray(x[..., :3].repeat(3, -1)[..., :8], np.float32) for x in random(15)[:3]]
    mask = build(np.stack([IDS, IDS]))
    expected = attention(*tensors, mask)
    got = program.call(*tensors, jax.tree.leaves(mask))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

    export = jax.export.export(jax.jit(attention), platforms=["cpu"])
    whole = restored(export(*tensors, mask))
    np.testing.assert_allclose(whole.call(*tensors, mask), expected, rtol=1e-5, atol=1e-5)
    if importlib.util.find_spec("flatbuffers") is not None:
        with pytest.raises(NotImplementedError, match=r'pass its leaves: see "Transformations" in'):
            export(query, key, value, shapes).serialize()


def test_symbolic_sizes_over_a_mesh_are_refused():
    spec = P("data", "context")
    sharding = packax.AttentionSharding(spec, spec)
    query, key, value, *_ = symbolic(jnp.float32, 8)

    def attention(*tensors):
        return packax.flash_attention(*tensors, packax.causal(), sharding=sharding)

    refused = "with sharding, the batch size of query must be a constant, but is the symbolic"
    mesh = jax.make_mesh((2, 2), ("data", "context"))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=refused):
        jax.export.export(jax.jit(attention), platforms=["cpu"])(query, key, value)


def test_masks_of_a_sharding_as_arguments():
    """A mask's sharding is written with it, unless it has a mesh, which no file can hold."""
    if importlib.util.find_spec("flatbuffers") is None:
        pytest.skip("needs flatbuffers")
    mesh = context.mesh_of(2, axes=("context",))
    spec = P(None, ("context",))
    sharding = packax.AttentionSharding(spec, spec)
    query, key, value, *_ = context.tensors(batch=1, length=256)
    expression = packax.causal() & packax.documents(np.zeros(256, int))
    export = jax.export.export(jax.jit(packax.flash_attention), platforms=["cpu"])
    with jax.set_mesh(mesh):
        mask = jax.block_until_ready(packax.create_attention_mask(expression, sharding=sharding))
        written = export(query, key, value, mask)
        assert restored(written).in_tree == written.in_tree
        sharding = packax.AttentionSharding(spec, spec, mesh=mesh)
        mask = jax.block_until_ready(packax.create_attention_mask(expression, sharding=sharding))
        with pytest.raises(NotImplementedError, match=r"leave mesh= out of AttentionSharding"):
            export(query, key, value, mask).serialize()


@pytest.mark.filterwarnings("ignore:attention in an exported program")
@pytest.mark.parametrize(("kind", "size"), some(itertools.product(["Auto", "Explicit"], [4, 1]), 0))
def test_an_abstract_mesh(kind, size):
    """Programs for a mesh without devices, whether it is set or only in the types of arguments."""
    mesh = AbstractMesh((size,), ("data",), axis_types=(getattr(AxisType, kind),))

    def typed(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data")))

    x, ids = typed((4, 8, 2, 8)), typed((4, 8), jnp.int32)
    blocks = np.tril(np.ones((2, 2, 2), bool))  # for each of two heads

    def every(x, ids):
        def attend(expression, **options):
            return packax.flash_attention(x, x, x, expression, **options)

        mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
        of_batch = packax.create_attention_mask(packax.causal(), q_len=8, kv_len=8)
        return (
            jax.grad(lambda x: packax.flash_attention(x, x, x, mask).sum())(x),
            packax.flash_attention(x, x, x, of_batch),
            packax.dot_product_attention(x, x, x, is_causal=True),
            packax.decode_attention(x[:, :1], x, x, jnp.full(4, 8)),
            packax.dot_product_attention(x, x, x, mask=np.tril(np.ones((8, 8), bool))),
            packax.decode_shared_prefix(
                x[:, :1], pages, pages, jnp.full(4, 9), jnp.array([8]), block_table=table
            ),
            attend(packax.masks.stack_masks([mask, mask])[jnp.int32(1)]),
            attend(packax.masks.tree(ids, jnp.array([-1, 0]))),
            attend(packax.masks.block_sparse(blocks[None], 4), soft_cap=2.0, sinks=jnp.ones(2)),
            packax.merge_attention([attend(packax.causal(), return_lse=True)] * 2)[0],
            jax.jvp(lambda x: packax.flash_attention(x, x, x, mask), (x,), (x,))[1],
        )

    pages, table = jnp.ones((4, 4, 2, 8)), jnp.tile(jnp.arange(4), (4, 1))

    for setting in (contextlib.nullcontext(), jax.sharding.use_abstract_mesh(mesh)):
        with setting:
            exported = jax.export.export(jax.jit(every), platforms=["cpu"])(x, ids)
        assert exported.nr_devices == size
    rng = np.random.default_rng(0)
    given = rng.standard_normal(x.shape).astype(np.float32), np.zeros((4, 8), np.int32)
    devices = jax.make_mesh((size,), ("data",), devices=jax.devices("cpu")[:size])
    placed = [jax.device_put(y, NamedSharding(devices, P("data"))) for y in given]
    for found, wanted in zip(exported.call(*placed), jax.jit(every)(*given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
