"""block_sparse: its meaning, the lists that the kernels get, attention and gradients in XLA.

Guards against a list that misses a block or marks a partial one as full, a head with another head's
mask, a row without a key whose results are not zero, and an array of Sq x Skv.
"""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax._src.ops import block_lists as block_mask

TILE = 128


def random_map(seed, size, share, shape, lengths):
    """A random block mask with this share of blocks allowed."""
    blocks = [-(-length // of) for length, of in zip(lengths, size, strict=True)]
    return np.random.default_rng(seed).random((*shape, *blocks)) < share


@pytest.mark.parametrize("lead", [(), (1,), (3,), (1, 1), (3, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("size", [4, (3, 50)])
def test_as_array_is_the_definition(lead, size):
    """Maps of all rows and heads, of rows, and of rows and heads. tests/table joins masks."""
    (m, n), lengths = np.broadcast_to(size, 2), (17, 40)
    chosen = random_map(1, (m, n), 0.5, lead, lengths)
    expression = packax.masks.block_sparse(chosen, size) & packax.causal(offset=9)
    i, j = (np.arange(n) for n in lengths)
    wanted = chosen[..., i[:, None] // m, j // n] & (j <= i[:, None] + 9)
    np.testing.assert_array_equal(expression.as_array(*lengths), wanted)


def blocks_of(x, axis, how, fill):
    """Reduces blocks of 64 along an axis with how (any or all)."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % 64)
    x = np.pad(x, pad, constant_values=fill)
    return how(x.reshape(*x.shape[:axis], -1, 64, *x.shape[axis + 1 :]), axis=axis + 1)


def pairs(x, how, fill):
    """Reduces blocks of 64 along axis 2 to tiles of 128."""
    x = np.pad(x, ((0, 0), (0, 0), (0, x.shape[2] % 2), (0, 0)), constant_values=fill)
    return how(x.reshape(*x.shape[:2], -1, 2, x.shape[3]), axis=3)


def listed(lists):
    """Which blocks are listed, and which of them as full; every block number occurs once."""
    number = lists.shape[-1] - 2
    order, (masked, full) = lists[..., 2:], np.moveaxis(lists[..., :2], -1, 0)[..., None]
    np.testing.assert_array_equal(np.sort(order), np.broadcast_to(np.arange(number), order.shape))
    place = np.argsort(order)
    return place < masked + full, (masked <= place) & (place < masked + full)


@pytest.mark.parametrize(
    "lengths,size,heads,share",
    [
        ((300, 300), (1, 1), 2, 0.02),
        ((130, 450), (3, 70), 2, 0.4),
        ((450, 200), (64, 64), 1, 0.8),
        ((513, 300), (128, 256), 2, 0.8),
        ((64, 1), (1000, 7), 1, 0.7),
        ((1, 513), (1, 64), 1, 0.5),
    ],
)
def test_lists(lengths, size, heads, share):
    """Eight masks at once: no block is missed, every block marked full is full, and few blocks are
    listed without need."""
    q_len, kv_len = lengths
    rng = np.random.default_rng(q_len)
    lo = rng.integers(0, kv_len, (8, 1)) + rng.integers(0, 9, (8, q_len))
    lo[:4], hi = np.maximum(lo[:4] - kv_len, 0), rng.integers(1, kv_len + 1, (8, 1)) + 0 * lo
    hi[:4] = kv_len
    hi[3] = np.where(rng.random(q_len) < 0.3, 0, hi[3])  # some rows are empty
    chosen = random_map(1, size, share, (8, heads), lengths)
    expression = packax.masks.block_sparse(chosen, size) & packax.masks.ranges(lo, hi)
    mask = packax.create_attention_mask(expression, kv_len=kv_len)
    allowed = np.asarray(expression.as_array(*lengths))
    hull = np.asarray(packax.masks.ranges(lo, hi).as_array(*lengths))
    q_block_lists, kv_block_lists = np.asarray(mask.q_block_lists), np.asarray(mask.kv_block_lists)
    tiles, key_tiles = (-(-n // TILE) for n in lengths)
    assert (
        q_block_lists.shape == (8, heads, tiles, 2 + -(-kv_len // 64))
        and q_block_lists.dtype == np.int32
    )
    assert kv_block_lists.shape == (8, heads, key_tiles, 2 + -(-q_len // 64))

    any_allowed = blocks_of(blocks_of(allowed, 2, np.any, False), 3, np.any, False)
    empty = ~hull.any(2)[:, None, :, None]  # empty rows do not count for a tile of rows
    visited, full = listed(q_block_lists)
    attended = pairs(any_allowed, np.any, False)
    assert not (attended & ~visited).any()
    full_along_keys = blocks_of(allowed | empty, 3, np.all, False)  # partial last blocks are not
    every = blocks_of(full_along_keys, 2, np.all, True)
    tile_full = pairs(every, np.all, True)
    assert not (full & ~tile_full).any()
    # The lists are exact for rows with one key range.
    one = [0, 1, 2] if q_len < TILE else []
    np.testing.assert_array_equal((full[one] & attended[one]), (tile_full & attended)[one])

    visited, full = listed(kv_block_lists)
    attended = pairs(any_allowed.swapaxes(2, 3), np.any, False)
    assert not (attended & ~visited).any()
    every = blocks_of(blocks_of(allowed, 2, np.all, False), 3, np.all, False).swapaxes(2, 3)
    every = pairs(every, np.all, True)
    assert not (full & ~every).any()
    if size == (64, 64):
        assert full.any() and (full == every)[:3].all()
    if share < 0.1:
        assert visited[:3].mean() > 0.9 and not full.any()  # 1 x 1: hardly any block is empty


def test_bits():
    rng = np.random.default_rng(0)
    for columns in (32, 101):
        chosen = rng.random((2, 5, columns)) < 0.5
        bits = block_mask.packed(jnp.asarray(chosen))
        assert bits.shape == (2, 5, -(-columns // 32)) and bits.dtype == jnp.int32
        got = block_mask.bit(bits, jnp.arange(5), jnp.arange(columns))
        np.testing.assert_array_equal(got, chosen)


def test_memory_is_that_of_the_blocks():
    """Four times the tokens and key blocks take four times the memory, apart from the mask
    itself."""

    def temporary(length):
        def loss(query, key, value, chosen):
            mask = packax.create_attention_mask(
                packax.causal() & packax.masks.block_sparse(chosen, (128, 512)),
                q_len=length,
                kv_len=length,
            )
            return packax.flash_attention(query, key, value, mask).astype(jnp.float32).sum()

        tensor = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)
        chosen = jax.ShapeDtypeStruct((1, 2, length // 128, length // 512), jnp.bool_)
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(tensor, tensor, tensor, chosen)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(1 << 12), temporary(1 << 14)
    assert large < 5 * small and large < 32 * (1 << 20)  # scores of 16k tokens would take 2 GiB


def test_a_mask_without_a_map_has_none_of_its_arrays():
    mask = packax.create_attention_mask(packax.causal(), q_len=9, kv_len=9)
    assert mask.block_size is None
    assert mask.block_mask is None and mask.q_block_lists is None and mask.kv_block_lists is None


@pytest.mark.parametrize("shape", [(0, 4, 4), (0, 2, 4, 4)])
def test_a_batch_of_no_rows(shape):
    x = np.ones((0, 16, 2, 8), np.float32)
    out = packax.flash_attention(x, x, x, packax.masks.block_sparse(np.ones(shape, bool), 4))
    assert out.shape == x.shape
