"""Expressions: `as_array` against the definition, one pair (i, j) at a time."""

import every_kind
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import strategies
from hypothesis import given
from strategies import expression_of


def attends(recipe, b, i, j):
    """The definition for one pair."""
    args, causal, limits = recipe

    def at(name, index):
        x = args[name]
        return int(x[index] if x.ndim == 1 else x[min(b, len(x) - 1), index])

    if limits is not None:
        lo, hi = (int(x[min(b, len(x) - 1), i]) for x in limits)
        if not lo <= j < hi:
            return False
    if args is not None:
        q_id = at("segment_ids", i)
        kv_id = at("kv_segment_ids" if "kv_segment_ids" in args else "segment_ids", j)
        if q_id == packax.PADDING_SEGMENT_ID or q_id != kv_id:
            return False
        if causal and "positions" in args:
            kv_pos = at("kv_positions" if "kv_positions" in args else "positions", j)
            return at("positions", i) >= kv_pos
    return i >= j if causal else True


@given(strategies.expressions())
def test_as_array_is_the_definition(drawn):
    recipe, q_len, kv_len = drawn
    got = np.asarray(expression_of(recipe).as_array(q_len, kv_len))
    assert got.dtype == bool and got.shape[-2:] == (q_len, kv_len)
    got = got if got.ndim == 3 else got[None]
    # The definition is slow in Python: all pairs of small masks, a sample for large ones.
    pairs = list(np.ndindex(q_len, kv_len))
    if q_len * kv_len > 400:
        pairs = np.random.default_rng(0).integers(0, (q_len, kv_len), (400, 2))
    for b in range(len(got)):
        for i, j in pairs:
            assert got[b, i, j] == attends(recipe, b, i, j), (b, i, j)


def test_causal_is_aligned_to_the_first_row_and_key():
    np.testing.assert_array_equal(
        packax.causal().as_array(2, 4), [[True, False, False, False], [True, True, False, False]]
    )


def test_only_minus_one_is_padding():
    ids = np.array([-1, -2, -1, 0, -2], np.int32)
    np.testing.assert_array_equal(
        packax.documents(ids).as_array(5, 5).astype(int),
        [[0] * 5, [0, 1, 0, 0, 1], [0] * 5, [0, 0, 0, 1, 0], [0, 1, 0, 0, 1]],
    )


def test_positions_serve_both_sides_in_self_attention():
    ids, positions = np.zeros(4, np.int32), np.array([0, 1, 0, 1], np.int32)
    once = (packax.causal() & packax.documents(ids, positions=positions)).as_array(4, 4)
    twice = packax.causal() & packax.documents(ids, positions=positions, kv_positions=positions)
    np.testing.assert_array_equal(once, twice.as_array(4, 4))
    assert once[0, 2] and not once[2, 1]  # equal positions attend both ways, to later ones never


def test_only_ids_are_positional():
    """A second positional argument could be mistaken for ids of keys."""
    ids, positions = np.zeros(4, np.int32), np.array([0, 1, 0, 1], np.int32)
    with pytest.raises(TypeError, match="1 positional argument but 2 were given"):
        packax.documents(ids, positions)


def test_positions_without_causal_have_no_effect():
    ids = np.array([0, 0, 1], np.int32)
    with_positions = packax.documents(ids, positions=np.array([2, 1, 0], np.int32))
    np.testing.assert_array_equal(
        with_positions.as_array(3, 3), packax.documents(ids).as_array(3, 3)
    )


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


@pytest.mark.parametrize("kind", every_kind.KINDS)
def test_expressions_are_frozen(kind):
    """They copy the caller's arrays, which may be buffers that a data loader reuses."""
    arrays = {name: np.array(x) for name, x in every_kind.arrays().items()}
    expression = every_kind.KINDS[kind](arrays)
    before = expression.as_array(every_kind.S, every_kind.S)
    for x in arrays.values():
        x[...] = x[::-1].copy()
    np.testing.assert_array_equal(expression.as_array(every_kind.S, every_kind.S), before)
    with pytest.raises(AttributeError):
        expression.lo = 3


@pytest.mark.parametrize("kind", [kind for kind in every_kind.KINDS if kind != "block sparse"])
@pytest.mark.parametrize("to", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_no_rows_and_no_tokens(kind, to):
    for batch, length in ((0, 5), (2, 0), (0, 0)):
        arrays = {name: to(x) for name, x in every_kind.arrays(length, batch).items()}
        expression = every_kind.KINDS[kind](arrays)
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
