"""decode_shared_prefix equals decode_attention, but reads the prefix once per group.

Guards against a prefix key that counts twice or not at all, a group that reads another's pages, and
a sink counted in both parts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import packax
import pytest

PAGE, HEADS, KV_HEADS, DIM = 8, 4, 2, 16


def inputs(groups, of_each, q_len, prefixes, seed=0, dtype=np.float32):
    """Sequences of a group share the pages of the prefix."""
    rng = np.random.default_rng(seed)
    batch, blocks, shared = groups * of_each, 9, 4
    pages = groups * shared + batch * (blocks - shared)
    order = rng.permutation(pages).astype(np.int32)
    table = np.empty((batch, blocks), np.int32)
    for b in range(batch):
        table[b, :shared] = order[b // of_each * shared :][:shared]
        table[b, shared:] = order[groups * shared + b * (blocks - shared) :][: blocks - shared]
    lengths = np.repeat(prefixes, of_each) + rng.integers(q_len, 30, batch)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    query = normal(batch, q_len, HEADS, DIM)
    key, value = (normal(pages, PAGE, KV_HEADS, DIM) for _ in "kv")
    return (query, key, value, lengths.astype(np.int32)), table


@functools.partial(jax.jit, static_argnames="soft_cap")
def both(tensors, prefixes, table, soft_cap=None, sinks=None):
    more = {"soft_cap": soft_cap, "block_table": table, "return_lse": True, "sinks": sinks}
    return (
        packax.decode_shared_prefix(*tensors, prefixes, **more),
        packax.decode_attention(*tensors, **more),
    )


def test_empty_prefixes_and_what_cannot_be():
    """An empty prefix, a prefix that reaches into the new rows, and a negative one."""
    prefixes = np.array([0, 20, -3])
    tensors, table = inputs(3, 2, 1, np.maximum(prefixes, 0))
    lengths = tensors[3].copy()
    lengths[3] = 20  # in a group with a prefix of 20, which would include its new token
    lengths[0] = 0  # attends to nothing
    tensors = (*tensors[:3], lengths)
    (out, lse), (wanted, wanted_lse) = both(tensors, prefixes, table)
    assert np.isnan(out[3]).all() and np.isnan(lse[3]).all()
    assert not np.asarray(out[0]).any() and (np.asarray(lse[0]) == -np.inf).all()
    others = [0, 1, 2, 4, 5]
    np.testing.assert_allclose(out[np.array(others)], wanted[np.array(others)], atol=2e-6)
    np.testing.assert_allclose(lse[np.array(others)], wanted_lse[np.array(others)], rtol=2e-5)


@pytest.mark.parametrize(
    "large", [np.int64(2**32 + 4), np.uint32(2**32 - 1), np.uint64(2**64 - 1), np.int32(2**31 - 1)]
)
def test_numbers_beyond_int32(large):
    """Values saturate and never wrap: such a long prefix does not end before the new rows."""
    tensors, table = inputs(2, 2, 1, [8, 9])
    wanted = packax.decode_attention(*tensors, block_table=table)
    prefixes = np.array([large, 9], large.dtype)
    out = packax.decode_shared_prefix(*tensors, prefixes, block_table=table)
    assert np.isnan(out[:2]).all()
    np.testing.assert_allclose(out[2:], wanted[2:], rtol=2e-5, atol=2e-6)
    # The same with lengths and page indices: results equal those of decode_attention.
    for n, name in ((0, "kv_lengths"), (1, "block_table")):
        arrays = [tensors[3], table]
        arrays[n] = arrays[n].astype(large.dtype)
        arrays[n][-1:] = large
        operands = (*tensors[:3], arrays[0])
        wanted = packax.decode_attention(*operands, block_table=arrays[1])
        out = packax.decode_shared_prefix(*operands, [8, 9], block_table=arrays[1])
        assert np.isnan(wanted[-1]).all(), name
        np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "prefixes,message",
    [
        ([1.5], "prefix_lengths must be an array of integers, but is float"),
        ([[1]], r"prefix_lengths must have shape \(groups,\), .* but has \(1, 1\)"),
        ([1, 2, 3], r"a multiple of the groups .* \(4, 1, 4, 16\), and there are 3 groups"),
    ],
)
def test_errors(prefixes, message):
    tensors, table = inputs(1, 4, 1, [9])
    with pytest.raises(ValueError, match=message):
        packax.decode_shared_prefix(*tensors, prefixes, block_table=table)


@pytest.mark.parametrize(
    "groups,of_each,q_len,parts", [(1, 16, 1, 1), (1, 17, 1, 2), (2, 19, 1, 4), (1, 34, 1, 3)]
)
def test_how_often_a_prefix_is_read(groups, of_each, q_len, parts):
    """Once for each 16 rows, whatever the size of the group."""
    tensors, table = inputs(groups, of_each, q_len, np.full(groups, 32))
    call = functools.partial(packax.decode_shared_prefix, *tensors, [32] * groups)
    traced = jaxprs.equations(jax.make_jaxpr(lambda: call(block_table=table))())
    queries = [x.invars[0].aval.shape for x in traced if x.primitive.name == "packax_decode"]
    rows = [shape[0] for shape in queries]
    assert sorted(rows) == [parts, groups * of_each]
    np.testing.assert_allclose(
        call(block_table=table), packax.decode_attention(*tensors, block_table=table), atol=2e-6
    )
