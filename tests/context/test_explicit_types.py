"""Axes of Explicit type: the operands' types define the layout, without `sharding=`.

Guards against an attention that gathers, or rejects, what the types already define.
"""

import functools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import packax
import pytest
from context import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import some

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 128, 4, 2, 8
NAMES = ("data", "context", "tensor")
QUERY = ("data", "context", "tensor")


def mesh():
    return mesh_of(2, 2, 2, kind="Explicit", axes=NAMES)


def expression(ids):
    return packax.causal() & packax.documents(ids)


def built(query, key, value, ids):
    return packax.flash_attention(query, key, value, packax.create_attention_mask(expression(ids)))


CALLS = {
    "built mask": built,
    "expression": lambda q, k, v, ids: packax.flash_attention(q, k, v, expression(ids)),
}


@pytest.mark.exhaustive
def test_a_plan_without_sharding():
    """Rows of query, key and value in the plan's order, ids in sequence order."""
    rng = np.random.default_rng(1)
    shapes = [(BATCH, 512, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tensors = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    ids = np.sort(rng.integers(-1, 4, (BATCH, 512)), axis=1).astype(np.int32)
    plan = packax.context_plan(expression(ids), ranks=2)

    @jax.jit
    def planned(query, key, value, ids):
        mask = packax.create_attention_mask(expression(ids), plan=plan)
        return packax.flash_attention(query, key, value, mask)

    device_mesh = mesh_of(2, 2, kind="Explicit", axes=("data", "context"))
    with jax.set_mesh(device_mesh):
        args = [jax.device_put(x, P("data", "context")) for x in (*map(plan.permute, tensors), ids)]
        got = plan.unpermute(np.asarray(planned(*args)))
    want = packax.flash_attention(*tensors, expression(ids))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def typed(device_mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(device_mesh, P(*spec)))


def traced(query, key, ids=(), call=CALLS["expression"], trace=jax.eval_shape):
    """Types alone: nothing is compiled."""
    device_mesh = mesh()
    shapes = (BATCH, LENGTH, HEADS, DIM), (BATCH, LENGTH, KV_HEADS, DIM)
    args = typed(device_mesh, shapes[0], *query), *[typed(device_mesh, shapes[1], *key)] * 2
    with jax.set_mesh(device_mesh):
        return trace(call, *args, typed(device_mesh, (BATCH, LENGTH), *ids, dtype=jnp.int32))


def test_what_whole_ids_cost():
    """Resharding the ids moves 4 bytes a token and needs one mask; an expression builds one per
    call."""

    def resharded(query, key, value, ids):
        ids = jax.sharding.reshard(ids, P("data", "context"))
        mask = packax.create_attention_mask(expression(ids))
        return [packax.flash_attention(query, key, value, mask) for _ in range(2)]

    def passed(query, key, value, ids):
        return [packax.flash_attention(query, key, value, expression(ids)) for _ in range(2)]

    assert traced(QUERY, QUERY, ("data",), resharded)[0].sharding.spec == P(*QUERY, None)
    count = functools.partial(jaxprs.count, "packax_documents")
    for call, builds in ((resharded, 1), (passed, 2)):
        assert traced(QUERY, QUERY, ("data",), call, count) == builds


def test_what_types_add_to_sharding():
    """Heads that `sharding=` leaves out, and a mask without heads."""

    def call(query, key, value, ids):
        spec = P("data", "context")
        sharding = packax.AttentionSharding(query=spec, key_value=spec)
        mask = packax.create_attention_mask(expression(ids), sharding=sharding)
        return packax.flash_attention(query, key, value, mask)

    assert traced(QUERY, QUERY, call=call).sharding.spec == P(*QUERY, None)


def test_a_mask_takes_the_layout_of_its_ids():
    device_mesh = mesh()
    with jax.set_mesh(device_mesh):
        ids = typed(device_mesh, (BATCH, LENGTH), "data", "context", dtype=jnp.int32)
        mask = jax.eval_shape(lambda x: packax.create_attention_mask(expression(x)), ids)
    assert mask.sharding.query == P("data", "context")
    assert mask.kv_start.sharding.spec == P("data", "context")


def test_merged_calls_and_their_derivatives():
    """Their types are those of the operands."""

    def merged(query, key, value, ids):
        index = jnp.arange(LENGTH)[None] + 0 * ids
        halves = packax.masks.ranges(0 * index, index // 2), packax.masks.ranges(index // 2, index)
        parts = [packax.flash_attention(query, key, value, x, return_lse=True) for x in halves]
        return packax.merge_attention(parts)[0]

    def second(*x):
        def gradients(*tensors):
            return jax.grad(lambda *y: jnp.sum(merged(*y, x[3]) ** 2), (0, 1, 2))(*tensors)

        return merged(*x), *jax.jvp(gradients, x[:3], x[:3])[1]

    heads = "data", None, "tensor"
    for x in traced(heads, heads, ("data",), second):
        assert x.sharding.spec == P(*heads, None)


def test_axes_of_other_types_say_nothing():
    device_mesh = mesh_of(2, 2, axes=("data", "context"))
    with jax.set_mesh(device_mesh):
        ids = typed(device_mesh, (BATCH, LENGTH), "data", "context", dtype=jnp.int32)
        mask = jax.eval_shape(lambda x: packax.create_attention_mask(expression(x)), ids)
    assert mask.sharding is None


def tokens(seed=0):
    """Ids of a tree in two batch rows, its parents, and one number per token."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(-1, 3, (BATCH, 16)), axis=1).astype(np.int32)
    return ids, np.array([-1, 0, 0], np.int32), rng.integers(0, 99, ids.shape).astype(np.int32)


def placed(x, *dims):
    return jax.device_put(x, NamedSharding(mesh(), P(*dims)))


DIMS = ("data",), (None, "context"), ("data", "context")


@pytest.mark.parametrize("dims", some([(dims,) for dims in DIMS], 2), ids=str)
def test_functions_of_sharded_tokens(dims):
    """Results are sharded as the ids are; lengths become rows that are sharded by batch only."""
    ids, parents, words = tokens()
    weights = (words % 3).astype(np.float32)
    segments, tree = packax.segments, packax.masks.tree

    def every(ids, words, weights):
        return (
            segments.positions(ids),
            segments.from_positions(words % 4, valid=words > 9),
            *segments.next_tokens(words, ids, weights),
            packax.masks.tree_positions(tree(ids, parents)),
            packax.masks.path_predecessors(tree(ids, parents)),
        )

    def sizes(words):
        return segments.from_lengths(words, length=9), segments.from_cu_seqlens(0 * words, 9)

    sharded = tuple(placed(x, *dims) for x in (ids, words, weights))
    for run in (every, jax.jit(every)):
        for x, want in zip(run(*sharded), every(ids, words, weights), strict=True):
            np.testing.assert_array_equal(x, want)
            assert jax.typeof(x).sharding.spec[: len(dims)] == dims
    for x, want in zip(sizes(sharded[1]), sizes(jnp.asarray(words)), strict=True):
        np.testing.assert_array_equal(x, want)
        assert jax.typeof(x).sharding.spec[0] == dims[0]
    runs = np.where(ids < 0, -1, np.arange(BATCH)[:, None])
    found = segments.cu_seqlens(placed(runs, *dims), max_documents=3)
    np.testing.assert_array_equal(found, segments.cu_seqlens(runs, max_documents=3))


def test_new_tokens_of_a_sharded_batch():
    cache, new = np.zeros((2, 8, 2, 4), np.float32), np.ones((BATCH, 1, 2, 4), np.float32)
    row, place = np.array([[0], [1]]), np.array([[2], [7]])
    want = packax.kv_cache.write(cache, new, row, place)
    for dims in (("data", None, "tensor"), ()):
        found = packax.kv_cache.write(
            placed(cache, *dims), placed(new, "data", None, "tensor"), placed(row, "data"), place
        )
        np.testing.assert_array_equal(found, want)
        assert tuple(jax.typeof(found).sharding.spec)[: len(dims)] == dims


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax before 0.9 takes the mesh of auto_axes elsewhere"
)
@pytest.mark.parametrize("dims", [("data",), ("data", "context")], ids=str)
def test_a_plan_of_a_sharded_tree(dims):
    ids = np.repeat(np.array([[0, 1, 2], [0, 0, 1]], np.int32), [300, 100, 112], axis=1)
    parents = np.array([-1, 0, 0], np.int32)

    def plan(ids):
        expression = packax.masks.tree(ids, parents) & packax.causal()
        return packax.context_plan(expression, ranks=2).order

    np.testing.assert_array_equal(jax.jit(plan)(placed(ids, *dims)), plan(ids))
