"""Block masks in the portable kernels: the blocks of 64 that a tile meets, and the mask's word on
a row and a key.

The blocks come as a list that the build of the mask made (docs/internals/mask_format.md, "Block
masks"): how many are partial, how many are full, then their numbers, the partial ones first.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class BlockMask(NamedTuple):
    """A block mask, and the lists of tiles of rows or of keys.

    `bits` is None in kernels that never have one, `heads` 0 in calls without one.
    """

    bits: tl.tensor
    lists: tl.tensor
    batch: tl.tensor
    heads: tl.tensor
    q_block: tl.tensor
    kv_block: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor


class HeadMask(NamedTuple):
    """The block mask of a head, rows of `width` int32 words: bit n of word w is column 32 w + n."""

    words: tl.tensor
    width: tl.tensor


@triton.jit
def mask_of_head(mask, mask_b, head):
    if mask.bits is None:
        own = HeadMask(None, None)
    else:
        width = tl.cdiv(tl.cdiv(mask.kv_len, mask.kv_block), 32)
        at = tl.where(mask.batch > 1, mask_b, 0) * mask.heads + tl.where(mask.heads > 1, head, 0)
        words = mask.bits + at * tl.cdiv(mask.q_len, mask.q_block).to(tl.int64) * width
        own = HeadMask(words, width)
    return own


@triton.jit
def list_of_tile(mask, mask_b, head, tile, tiles, blocks):
    """The list of a tile, of `blocks` entries at most."""
    at = mask_b * mask.heads + tl.where(mask.heads > 1, head, 0)
    return mask.lists + (at.to(tl.int64) * tiles + tile) * (blocks + 2)


@triton.jit
def counts_of_list(listed, mask, partial, full, STEP: tl.constexpr):
    """How many steps are partial and how many full: those of the list, or without a block mask
    those given."""
    there = mask.heads > 0
    PER: tl.constexpr = 64 // STEP
    listed_partial = tl.load(listed, mask=there, other=0) * PER
    listed_full = tl.load(listed + 1, mask=there, other=0) * PER
    return tl.where(there, listed_partial, partial), tl.where(there, listed_full, full)


@triton.jit
def listed_place(listed, mask, step, steps, otherwise, STEP: tl.constexpr):
    """The first row or key of a step of the list, if that has so many `steps`; without a block mask
    `otherwise`."""
    PER: tl.constexpr = 64 // STEP
    there = mask.heads > 0
    block = tl.load(listed + 2 + step // PER, mask=there & (step < steps), other=0)
    return tl.where(there, block * 64 + step % PER * STEP, otherwise)


@triton.jit
def keep_in_block_mask(
    inside, mask, own, rows, keys, first_key, KEYS: tl.constexpr, ROW_AXIS: tl.constexpr
):
    """Of the pairs that are `inside`, (rows, keys) for ROW_AXIS 0, those that the block mask has. A
    row loads words, not bits.

    KEYS keys from `first_key` on, a multiple of KEYS: their columns lie in KEYS / 32 words, or in 2
    where blocks have no power of two.
    """
    if mask.bits is not None and mask.heads > 0:
        WORDS: tl.constexpr = max(KEYS // 32, 2)
        first_word = first_key // mask.kv_block // 32
        place = tl.expand_dims(keys // mask.kv_block - first_word * 32, ROW_AXIS)
        words = own.words + (rows // mask.q_block).to(tl.int64) * own.width + first_word
        bits = tl.zeros(inside.shape, tl.int32)
        for w in tl.static_range(WORDS):
            there = rows < tl.where(first_word + w < own.width, mask.q_len, 0)
            word = tl.expand_dims(tl.load(words + w, mask=there, other=0), 1 - ROW_AXIS)
            bits = tl.where(place // 32 == w, word, bits)
        inside &= (bits >> place % 32 & 1) != 0
    return inside
