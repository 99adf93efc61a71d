"""Expressions: `as_array` against the definition, one pair (i, j) at a time."""

import jax.numpy as jnp
import numpy as np
import packax
import pytest
from calls import INTERVALS, LABELS, SELECTORS, Call
from tiers import some


def test_only_ids_are_positional():
    """A second positional argument could be mistaken for ids of keys."""
    ids, positions = np.zeros(4, np.int32), np.array([0, 1, 0, 1], np.int32)
    with pytest.raises(TypeError, match="1 positional argument but 2 were given"):
        packax.documents(ids, positions)


def test_and_in_any_order_and_nesting():
    ids = np.array([0, 0, 1, 1], np.int32)
    a, b, c = (
        packax.causal(),
        packax.documents(ids, positions=ids),
        packax.masks.ranges(ids, ids + 3),
    )
    first = ((a & b) & c).as_array(4, 4)
    np.testing.assert_array_equal(first, (c & (b & a)).as_array(4, 4))
    np.testing.assert_array_equal(first, (a & (c & a) & (packax.full() & b)).as_array(4, 4))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"])
def test_integer_dtypes_of_numpy(dtype):
    ids = np.array([0, 0, 100], dtype)
    np.testing.assert_array_equal(
        packax.documents(ids).as_array(3, 3), packax.documents([0, 0, 100]).as_array(3, 3)
    )


def test_ranges_of_any_integer_saturate():
    huge = np.iinfo(np.uint64).max
    expression = packax.masks.ranges(np.zeros(2, np.uint64), np.array([huge, 1], np.uint64))
    np.testing.assert_array_equal(expression.as_array(2, 3), [[True] * 3, [True, False, False]])
    unsigned = packax.masks.ranges(jnp.zeros(2, jnp.uint32), jnp.array([2**32 - 1, 1], jnp.uint32))
    np.testing.assert_array_equal(unsigned.as_array(2, 3), [[True] * 3, [True, False, False]])


KINDS = [Call(interval=kind) for kind in INTERVALS]
KINDS += [Call(interval="window", selector=kind) for kind in SELECTORS]


@pytest.mark.parametrize("call", KINDS, ids=str)
def test_expressions_are_frozen(call):
    """They copy the caller's arrays, which may be buffers that a data loader reuses."""
    arrays = call.arrays()
    expression = call.expression(arrays)
    before = expression.as_array(33, 33)
    for x in arrays.values():
        x[...] = x[::-1].copy()
    np.testing.assert_array_equal(expression.as_array(33, 33), before)
    with pytest.raises(AttributeError):
        expression.lo = 3


# Of jax, every operation compiles a program.
@pytest.mark.parametrize("call", [x for x in KINDS if "block" not in x.selector], ids=str)
@pytest.mark.parametrize("to", some([np.asarray, jnp.asarray], 0), ids=["numpy", "jax"])
def test_no_rows_and_no_tokens(call, to):
    for batch, length in ((0, 5), (2, 0), (0, 0)):
        sizes = {"b": batch, "q": length, "k": length}
        arrays = {
            name: to(x[tuple(slice(sizes.get(at)) for at in LABELS[name])])
            for name, x in call.arrays().items()
        }
        expression = call.expression(arrays)
        dense = expression.as_array(length, length)
        assert dense.dtype == bool and dense.shape[-2:] == (length, length)
        assert dense.ndim == 2 or dense.shape[0] in (1, batch)
        if any(hasattr(part, "segments") for part in expression.parts()):
            assert packax.masks.tree_positions(expression).shape == (batch, length)
            assert packax.masks.path_predecessors(expression).shape == (batch, length)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_integer_dtypes_of_jax_alone(dtype):
    ids = np.array([0, 0, 7])
    for small in (jnp.asarray(ids, dtype), ids.astype(jnp.dtype(dtype))):
        np.testing.assert_array_equal(
            packax.documents(small).as_array(3, 3), packax.documents(ids).as_array(3, 3)
        )
