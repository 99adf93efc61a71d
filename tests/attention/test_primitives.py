"""The primitives alone: shapes, and batching rules against a loop."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax._src.ops.primitives import blocks_p, documents_p
from primitive_calls import arrays_of, assert_maps, backward, forward
from tiers import some


def shapes(function, *shapes_and_dtypes):
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(*x),
        list(shapes_and_dtypes),
        is_leaf=lambda x: type(x) is tuple,
    )
    return [(x.shape, x.dtype.name) for x in jax.eval_shape(function, *structs)]


def ints(*shape):
    return (shape, jnp.int32)


def test_shapes_of_documents():
    operands = (ints(3, 100), ints(3, 200), ints(3, 100), ints(3, 200))
    bind = functools.partial(documents_p.bind, compare_positions=True, implementation=None)
    assert shapes(bind, *operands) == [((3, 100), "int32")] * 3


@pytest.mark.parametrize(
    "q_len,kv_len,expected",
    [
        (1, 1, [(2, 5, 1), (2, 4, 1), (2, 1), (2, 1), (2, 1)]),
        (128, 129, [(2, 5, 2), (2, 4, 3), (2, 1), (2, 1), (2, 2)]),
        (1000, 64, [(2, 5, 16), (2, 4, 1), (2, 8), (2, 6), (2, 1)]),
    ],
)
def test_shapes_of_blocks(q_len, kv_len, expected):
    bind = lambda *x: blocks_p.bind(*x, kv_len=kv_len, implementation=None)  # noqa: E731
    assert shapes(bind, *[ints(2, q_len)] * 3) == [(shape, "int32") for shape in expected]


def mask_shapes(batch=2, q_len=100, kv_len=200):
    rows, keys = ints(batch, q_len), ints(batch, kv_len)
    return {
        **dict.fromkeys(("kv_start", "kv_end", "q_ids", "q_pos"), rows),
        **dict.fromkeys(("kv_ids", "kv_pos"), keys),
        "q_blocks": ints(batch, 5, 2),
        "kv_blocks": ints(batch, 4, 4),
        "q_order": ints(batch, 1),
        "q_order_192": ints(batch, 1),
        "kv_order": ints(batch, 2),
    }


@pytest.mark.parametrize("dtype,lse", [("bfloat16", "float32"), ("float32", "float32")])
def test_shapes_of_forward_and_backward(dtype, lse):
    query, key, value = (2, 100, 8, 16), (2, 200, 4, 16), (2, 200, 4, 24)
    tensors = [(x, dtype) for x in (query, key, value)]
    out = ((2, 100, 8, 24), dtype)
    sums = ((2, 8, 100), lse)
    assert shapes(forward, *tensors, mask_shapes()) == [out, sums]
    for results in ([out, sums, out, sums], [out, sums, out]):  # with dlse, and without
        assert shapes(backward, [*tensors, *results], mask_shapes()) == tensors


def random_ids(rng, *shape):
    return jnp.asarray(np.sort(rng.integers(-1, 5, shape)), jnp.int32)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, None, 0, None), (None, 0, None, 1)])
def test_batching_of_documents(axes):
    rng = np.random.default_rng(0)
    operands = []
    for axis, length in zip(axes, (70, 90, 70, 90), strict=True):
        x = random_ids(rng, 2, length) if axis is None else random_ids(rng, 3, 2, length)
        operands.append(x if axis in (None, 0) else jnp.moveaxis(x, 0, axis))
    assert_maps(
        lambda *x: documents_p.bind(*x, compare_positions=True, implementation=None), operands, axes
    )


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 1)])
def test_batching_of_blocks(axes):
    rng = np.random.default_rng(0)
    lo, hi = np.sort(rng.integers(0, 100, (2, 3, 2, 150)), axis=0).astype(np.int32)
    tested = (rng.random((3, 2, 150)) < 0.01).astype(np.int32)
    lo, hi, tested = jnp.asarray(lo), jnp.maximum(hi, lo + 1), jnp.asarray(tested)
    if axes[1] is None:
        hi = hi.max(0)
        lo = jnp.minimum(lo, hi[None] - 1)
        tested = jnp.moveaxis(tested, 0, 1)
    assert_maps(
        lambda *x: blocks_p.bind(*x, kv_len=100, implementation=None), (lo, hi, tested), axes
    )


@pytest.mark.parametrize(
    "what,mask_batch",
    some([("all", 1), ("query", 1), ("query", 2), ("mask", 2), ("values and ids", 1)], 4),
)
def test_batching_of_attention(what, mask_batch):
    """Any mixture of mapped and unmapped operands, forward and backward."""
    rng = np.random.default_rng(0)

    def mask(*batch):
        ids = np.asarray(random_ids(rng, *batch, mask_batch, 70))

        def build(ids):
            return arrays_of(
                packax.create_attention_mask(
                    packax.causal() & packax.documents(ids, positions=jnp.abs(ids))
                )
            )

        return jax.vmap(build)(ids) if batch else build(jnp.asarray(ids))

    def tensor(mapped, *shape):
        return jnp.asarray(rng.standard_normal((3, *shape) if mapped else shape), jnp.float32)

    every = what == "all"
    query = tensor(every or what == "query", 2, 70, 4, 8)
    key = tensor(every, 2, 70, 2, 8)
    value = tensor(every or what == "values and ids", 2, 70, 2, 8)
    operands = mask(3) if what != "query" else mask()
    if what == "values and ids":  # only the mask's q_ids are mapped
        operands = {n: x if n == "q_ids" else x[0] for n, x in operands.items()}
    tensors = [query, key, value]
    axes = [0 if x.ndim == 5 else None for x in tensors]
    mask_axes = {n: 0 if x.ndim > 2 + n.endswith("blocks") else None for n, x in operands.items()}
    assert_maps(forward, [*tensors, operands], (*axes, mask_axes))

    dout = tensor(True, 2, 70, 4, 8)

    def both(query, key, value, dout, mask):
        out, lse = forward(query, key, value, mask)
        return backward((query, key, value, out, lse, dout), mask)

    assert_maps(both, [*tensors, dout, operands], (*axes, 0, mask_axes))


def test_called_outside_jit():
    ids = jnp.asarray(cases.PADDED[None])
    lo, hi, tested = documents_p.bind(
        ids, ids, ids, ids, compare_positions=False, implementation=None
    )
    blocks = blocks_p.bind(lo, hi, tested, kv_len=409, implementation=None)
    assert [x.shape for x in blocks] == [(1, 5, 7), (1, 4, 7), (1, 4), (1, 3), (1, 4)]
