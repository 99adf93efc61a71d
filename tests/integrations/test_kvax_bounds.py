"""kvax's four bounds computed from a mask, integer by integer; where kvax's are wrong, correct
bounds.

Guards against a bound that is off by one block, in other units than kvax's, or of the wrong side.
"""

from __future__ import annotations

import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import kvax_reference as reference
import numpy as np
import pytest
from context import mesh_of
from packax.kvax.ops import create_attention_mask
from packax.kvax.ops.mask_creator import AttentionMask, calculate_mask_sparsity, print_mask
from packax.kvax.utils import FlashAttentionParamsConfig as Params
from packax.kvax.utils import attention_specs, permute_tokens_context_parallelism
from packings import ids_of, positions_of
from tiers import some

ALONE = ((None,) * 4, (None,) * 4)
CONTEXT = (("data", "context", None, None), ("data", None, None, None))
MANY = np.iinfo(np.int32).max

LENGTH = 96
INDEX = np.arange(LENGTH)
ROWS = {
    "one document": (ids_of((0, 96)), INDEX),
    "documents": (ids_of((0, 40), (1, 7), (2, 49)), INDEX),
    "positions that restart": (ids_of((0, 40), (1, 7), (2, 49)), None),
    "padding inside and after": (ids_of((3, 20), (-1, 21), (2, 30), (-1, 25)), INDEX),
    "ids in any order, negative ones": (ids_of((9, 33), (-7, 16), (2, 20), (0, 27)), INDEX),
    "prefix": (ids_of((1, 96)), np.maximum(INDEX, 37)),
    "both ways": (ids_of((1, 50), (2, 46)), np.zeros(LENGTH, int)),
    "nothing but padding": (ids_of((-1, 96)), INDEX),
}
IDS = np.stack([ids for ids, _ in ROWS.values()])
POSITIONS = np.stack([positions_of(ids) if pos is None else pos for ids, pos in ROWS.values()])


def masks(q_pos, q_ids, kv_pos, kv_ids, fwd, bwd, skip=True):
    function = functools.partial(
        create_attention_mask, fwd_params=fwd, bwd_params=bwd, skip_pad_tokens=skip
    )

    @jax.jit
    def run(*tokens):
        masks = function(*tokens, calc_bwd_mask=True)
        return [AttentionMask.unflatten(mask.flatten()) for mask in masks]

    return run(q_pos, q_ids, kv_pos, kv_ids)


def assert_bounds(mask, expected):
    names = ("lower", "upper", "lower_full", "upper_full")
    for name, got, wanted in zip(names, mask.flatten(), expected, strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, wanted, err_msg=name)


def assert_kvax_bounds(got, tokens, fwd, bwd, **keywords):
    forward, dq, dkdv = got
    sizes = (fwd.query_block_size, fwd.kv_block_size)
    assert_bounds(forward, reference.bounds(*tokens, *sizes, outer="query", **keywords))
    sizes = (bwd.query_block_size, bwd.kv_block_size)
    assert_bounds(dkdv, reference.bounds(*tokens, *sizes, outer="kv", **keywords))
    assert_bounds(dq, reference.bounds(*tokens, *sizes[::-1], outer="query", **keywords))


@pytest.mark.parametrize("skip", some([True, False], 0))
def test_equal_kvaxs(skip):
    """All kinds of rows at once; block sizes that differ by side and pass; queries and keys of
    lengths that no block size divides."""
    fwd, bwd = Params(16, 8), Params(8, 32)
    tokens = (POSITIONS, IDS, POSITIONS, IDS)
    if not skip:  # padding then is a document, which reappears in one row, where kvax is wrong
        tokens = tuple(np.delete(x, [*ROWS].index("padding inside and after"), 0) for x in tokens)
    with attention_specs(*ALONE):
        got = masks(*tokens, fwd, bwd, skip)
        assert_kvax_bounds(got, tokens, fwd, bwd, skip=skip)
        some, full = (
            (got[0].upper_bounds - got[0].lower_bounds).any(),
            got[0].upper_full_bounds.any(),
        )
        assert some and full
        short = tuple(x[:, first:last] for x, first, last in zip(
            tokens, (40, 40, 0, 0), (71, 71, 77, 77), strict=True))  # fmt: skip
        got = masks(*short, fwd, bwd, skip)
        assert got[0].lower_bounds.shape[1:] == (1, 2) and got[2].lower_bounds.shape[1:] == (1, 3)
        assert_kvax_bounds(got, short, fwd, bwd, skip=skip)


@pytest.mark.parametrize("permute", some([True, False], 0))
def test_each_context_shard_counts_its_own_blocks(permute):
    fwd, bwd = Params(8, 16), Params(4, 16)
    q_pos, q_ids = POSITIONS, IDS
    mesh = mesh_of(2, 4, axes=("data", "context"))
    with jax.set_mesh(mesh), attention_specs(*CONTEXT):
        if permute:
            q_pos, q_ids = permute_tokens_context_parallelism((q_pos, q_ids))
        got = jax.block_until_ready(masks(q_pos, q_ids, POSITIONS, IDS, fwd, bwd))
    assert got[2].lower_bounds.shape == (8, 4, 6)
    tokens = (np.asarray(q_pos), np.asarray(q_ids), POSITIONS, IDS)
    assert_kvax_bounds(got, tokens, fwd, bwd, shards=4)


def test_default_blocks_without_a_gpu_are_those_of_most_gpus():
    tokens = tuple(np.tile(x, 2) for x in (POSITIONS, IDS, POSITIONS, IDS))
    with attention_specs(*ALONE):
        got = masks(*tokens, None, None)
    assert [mask.lower_bounds.shape for mask in got] == [(8, 1, 3)] * 3


def test_no_block_is_called_full_that_is_not():
    """Ids that reappear: kvax marks the blocks between full ones as full, and attends to them
    unmasked."""
    ids = np.tile(np.repeat([0, 1], 8), 6)[None]
    index = INDEX[None]
    params = Params(8, 8)
    allowed = (ids[0][:, None] == ids[0]) & (INDEX[:, None] >= INDEX)

    def wrong(bounds):
        full = (x[0, 0] for x in bounds)
        return int((reference.pairs_called_full(*full, 8, 8, 96, 96) & ~allowed).sum())

    expected = reference.bounds(index, ids, index, ids, 8, 8, outer="query")
    with attention_specs(*ALONE):
        got = masks(index, ids, index, ids, params, params)
    assert wrong(expected[2:]) > 0, "kvax's own bounds are right here: the case is none"
    assert wrong((got[0].lower_full_bounds, got[0].upper_full_bounds)) == 0
    assert_bounds(got[0], (*expected[:2], got[0].lower_full_bounds, got[0].upper_full_bounds))


def test_ids_above_the_length_are_ids():
    """kvax treats the id kv_len + 1 as padding, and drops blocks of padding and larger ids."""
    params = Params(8, 8)
    small = ids_of((0, 20), (5, 30), (-1, 20), (7, 26))[None]
    large = np.select([small == 5, small == 7], [LENGTH + 1, MANY], small)
    index = INDEX[None]
    expected = reference.bounds(index, small, index, small, 8, 8, outer="query")
    with attention_specs(*ALONE):
        got = masks(index, large, index, large, params, params)
    assert_bounds(got[0], expected)


def dense(mask, inner):
    """0, 1 (partial) or 2 (full) for every block of the first row, one shard after another."""
    lower, upper, lower_full, upper_full = (np.asarray(x)[0] for x in mask.flatten())
    shards, outer = lower.shape
    result = np.zeros((outer, inner), int)
    for row, shard, n in itertools.product(range(outer), range(shards), range(inner // shards)):
        inside = lower[shard, row] <= n < upper[shard, row]
        full = lower_full[shard, row] <= n < upper_full[shard, row]
        result[row, shard * (inner // shards) + n] = int(inside) + int(full)
    return result


def test_sparsity_and_picture(caplog):
    tokens = (POSITIONS[1:3], IDS[1:3], POSITIONS[1:3], IDS[1:3])
    params = Params(8, 16)
    mesh = mesh_of(1, 2, axes=("data", "context"))
    with jax.set_mesh(mesh), attention_specs(*CONTEXT):
        forward, _, dkdv = masks(*tokens, params, params)
    blocks = np.asarray(forward.upper_bounds) - np.asarray(forward.lower_bounds)
    assert calculate_mask_sparsity(forward, 8, 16, 96, 96) == blocks.sum() / (2 * 12 * 6)
    assert 0 < blocks.sum() < 2 * 12 * 6

    for mask, inner in ((forward, 6), (dkdv, 12)):
        with caplog.at_level(logging.INFO, "packax.kvax.ops.mask_creator"):
            print_mask(mask, inner, print_only_first_in_batch=False)
        lines = caplog.messages[-1].splitlines()
        assert lines.pop(0) == "Attention masks:"
        drawn = [line[1:-1:2] for line in lines[: len(lines) // 2] if line.startswith("|")]
        assert [[" ░█".index(c) for c in row] for row in drawn] == dense(mask, inner).tolist()
        assert len(lines) == 2 * (len(drawn) + 2)
    large = jax.tree.map(lambda x: jnp.repeat(x, 9, axis=2) * 30, forward)
    with caplog.at_level(logging.INFO, "packax.kvax.ops.mask_creator"):
        print_mask(large, 180)
        print_mask(large, 180, fit_in_screen=False)
    fits, whole = (message.splitlines()[1:] for message in caplog.messages[-2:])
    assert (len(fits), len(fits[0])) == (2 + 27, 2 + 2 * 60)
    assert (len(whole), len(whole[0])) == (2 + 108, 2 + 2 * 180)
