"""Block masks in the portable kernels: the list of blocks of 64 that a tile visits, and the mask
bits of rows and keys.

The lists are built with the mask (docs/internals/mask_format.md, "Block masks"). A list holds the
number of partial blocks, the number of full blocks, and then the block indices, partial ones first.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class BlockMask(NamedTuple):
    """A block mask and its block lists, for tiles of rows or tiles of keys.

    `bits` is None in kernels without block masks, and `heads` is 0 in calls without one.
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
    """The block mask of one head. A row has `width` int32 words, and bit n of word w is column
    32 w + n."""

    words: tl.tensor
    width: tl.tensor


@triton.jit
def mask_of_head(mask, mask_b, head):
    if mask.bits is None:
        head_mask = HeadMask(None, None)
    else:
        width = tl.cdiv(tl.cdiv(mask.kv_len, mask.kv_block), 32)
        at = tl.where(mask.batch > 1, mask_b, 0) * mask.heads + tl.where(mask.heads > 1, head, 0)
        words = mask.bits + at * tl.cdiv(mask.q_len, mask.q_block).to(tl.int64) * width
        head_mask = HeadMask(words, width)
    return head_mask


@triton.jit
def list_of_tile(mask, mask_b, head, tile, tiles, blocks):
    """Pointer to the block list of a tile, which has at most `blocks` blocks."""
    at = mask_b * mask.heads + tl.where(mask.heads > 1, head, 0)
    return mask.lists + (at.to(tl.int64) * tiles + tile) * (blocks + 2)


@triton.jit
def counts_of_list(listed, mask, partial, full, STEP: tl.constexpr):
    """The numbers of partial and full steps: from the list, or `partial` and `full` in calls
    without a block mask."""
    valid = mask.heads > 0
    PER: tl.constexpr = 64 // STEP
    listed_partial = tl.load(listed, mask=valid, other=0) * PER
    listed_full = tl.load(listed + 1, mask=valid, other=0) * PER
    return tl.where(valid, listed_partial, partial), tl.where(valid, listed_full, full)


@triton.jit
def listed_place(listed, mask, step, steps, otherwise, STEP: tl.constexpr):
    """The first row or key of a step of the list, which is not read past its `steps` steps;
    `otherwise` in calls without a block mask."""
    PER: tl.constexpr = 64 // STEP
    valid = mask.heads > 0
    block = tl.load(listed + 2 + step // PER, mask=valid & (step < steps), other=0)
    return tl.where(valid, block * 64 + step % PER * STEP, otherwise)


@triton.jit
def keep_in_block_mask(
    inside, mask, head_mask, rows, keys, first_key, KEYS: tl.constexpr, ROW_AXIS: tl.constexpr
):
    """Restricts the mask `inside`, (rows, keys) for ROW_AXIS 0, to the pairs in the block mask.
    Each row loads whole words.

    `first_key` is a multiple of KEYS. The KEYS keys span at most KEYS / 32 words of columns, or 2
    where the block size is not a power of two.
    """
    if mask.bits is not None and mask.heads > 0:
        WORDS: tl.constexpr = max(KEYS // 32, 2)
        first_word = first_key // mask.kv_block // 32
        place = tl.expand_dims(keys // mask.kv_block - first_word * 32, ROW_AXIS)
        words = head_mask.words + (rows // mask.q_block).to(tl.int64) * head_mask.width + first_word
        bits = tl.zeros(inside.shape, tl.int32)
        for w in tl.static_range(WORDS):
            valid = rows < tl.where(first_word + w < head_mask.width, mask.q_len, 0)
            word = tl.expand_dims(tl.load(words + w, mask=valid, other=0), 1 - ROW_AXIS)
            bits = tl.where(place // 32 == w, word, bits)
        inside &= (bits >> place % 32 & 1) != 0
    return inside
