"""A map of blocks in the general kernels: the blocks of 64 that a tile meets, and the map's word on
a row and a key.

The blocks come as a list that the build of the mask made (docs/internals/mask_format.md, "Block
masks"): how many need the mask, how many need none, then their numbers, those that need it first.
Without a map (`map_heads` 0) steps are those of the row ranges: rows.py.
"""

import triton
import triton.language as tl


@triton.jit
def map_of(map_bits, map_batch, map_heads, mask_b, head, q_len, kv_len, q_block, kv_block):
    """The map of a head, rows of int32 words: bit n of word w is column 32 w + n. And how many
    words a row has."""
    width = tl.cdiv(tl.cdiv(kv_len, kv_block), 32)
    at = tl.where(map_batch > 1, mask_b, 0) * map_heads + tl.where(map_heads > 1, head, 0)
    return map_bits + at * tl.cdiv(q_len, q_block).to(tl.int64) * width, width


@triton.jit
def list_of(entries, map_heads, mask_b, head, tile, tiles, blocks):
    """The list of a tile, of `blocks` entries at most."""
    at = mask_b * map_heads + tl.where(map_heads > 1, head, 0)
    return entries + (at.to(tl.int64) * tiles + tile) * (blocks + 2)


@triton.jit
def steps_of(listed, map_heads, edges, core, STEP: tl.constexpr):
    """Steps with the mask and without it: those of the list, or where there is none those given."""
    mapped = map_heads > 0
    PER: tl.constexpr = 64 // STEP
    with_mask = tl.load(listed, mask=mapped, other=0) * PER
    without = tl.load(listed + 1, mask=mapped, other=0) * PER
    return tl.where(mapped, with_mask, edges), tl.where(mapped, without, core)


@triton.jit
def map_of_tile(
    map_bits, q_entries, map_batch, map_heads, mask_b, head, row, q_len, kv_len, q_block, kv_block,
    steps, core_begin, core_end, STEP: tl.constexpr,
):  # fmt: skip
    """Of a tile of rows: its head's map and the width of that, its list, and how many steps need
    the mask and how many none."""
    this_map, width = map_of(
        map_bits, map_batch, map_heads, mask_b, head, q_len, kv_len, q_block, kv_block
    )
    listed = list_of(
        q_entries, map_heads, mask_b, head, row // 128, tl.cdiv(q_len, 128), tl.cdiv(kv_len, 64)
    )
    edges, core = steps_of(
        listed, map_heads, steps - core_end + core_begin, core_end - core_begin, STEP
    )
    return this_map, width, listed, edges, core


@triton.jit
def step_at(listed, step, steps, map_heads, otherwise, STEP: tl.constexpr):
    """The first row or key of a step of the list, if that has so many `steps`; without a map
    `otherwise`."""
    PER: tl.constexpr = 64 // STEP
    mapped = map_heads > 0
    block = tl.load(listed + 2 + step // PER, mask=mapped & (step < steps), other=0)
    return tl.where(mapped, block * 64 + step % PER * STEP, otherwise)


@triton.jit
def keep_in_map(
    inside, this_map, width, rows, keys, first_key, q_len, q_block, kv_block,
    KEYS: tl.constexpr, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """Of the pairs that are `inside`, (rows, keys) for ROW_AXIS 0, those that the map has. A row
    loads words, not bits.

    KEYS keys from `first_key` on, a multiple of KEYS: their columns lie in KEYS / 32 words, or in 2
    where blocks have no power of two.
    """
    WORDS: tl.constexpr = max(KEYS // 32, 2)
    first_word = first_key // kv_block // 32
    place = tl.expand_dims(keys // kv_block - first_word * 32, ROW_AXIS)
    words = this_map + (rows // q_block).to(tl.int64) * width + first_word
    bits = tl.zeros(inside.shape, tl.int32)
    for w in tl.static_range(WORDS):
        there = rows < tl.where(first_word + w < width, q_len, 0)
        word = tl.expand_dims(tl.load(words + w, mask=there, other=0), 1 - ROW_AXIS)
        bits = tl.where(place // 32 == w, word, bits)
    return inside & ((bits >> place % 32 & 1) != 0)
