"""The walk of a tile: its blocks of keys (of a tile of keys: its blocks of rows), one a step, and
the pointers to what is loaded in a step.

Partial blocks come first and need the mask; full ones do not. Without a block mask steps are those
of the row range; in kernels that may have one they may be entries of a list instead
(block_lists.py).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.block_lists import BlockMask, counts_of_list, list_of_tile, listed_place
from portable.kv_ranges import columns, load_rows, partial_step, size_of


class Steps(NamedTuple):
    """`full_begin` and `full_end` number steps of the range that begins at `start`, None in kernels
    of one loop, whose steps are all partial; `partial` and `full` say how many there are, of the
    list (`listed`) if there is one.

    A place is a key (or row): origin + place * unit. Ranges count whole steps from `start`, lists
    single keys.
    """

    start: tl.tensor
    full_begin: tl.tensor
    full_end: tl.tensor
    steps: tl.tensor
    full: tl.tensor
    listed: tl.tensor
    block_mask: BlockMask
    origin: tl.tensor
    unit: tl.tensor


class TilePair(NamedTuple):
    """Pointers to two tiles that are loaded together (keys and values, queries and cotangents), how
    far on the next place of each is, and their columns (None: those of the kernel)."""

    first: tl.tensor
    second: tl.tensor
    first_step: tl.tensor
    second_step: tl.tensor
    qk_dim: tl.tensor
    v_dim: tl.tensor


@triton.jit
def steps_of(
    start, steps, full_begin, full_end, block_mask, mask_b, head, tile, tiles, blocks,
    STEP: tl.constexpr,
):  # fmt: skip
    """The walk of the tile-th of `tiles` tiles of 128, which meets at most `blocks` blocks of
    64."""
    if block_mask.bits is None:
        walk = Steps(start, full_begin, full_end, steps, None, None, block_mask, start, STEP)
    else:
        listed = list_of_tile(block_mask, mask_b, head, tile, tiles, blocks)
        partial, full = counts_of_list(
            listed, block_mask, steps - full_end + full_begin, full_end - full_begin, STEP
        )
        walk = Steps(start, full_begin, full_end, partial, full, listed, block_mask, 0, 1)
    return walk


@triton.jit
def aligned_start(start, dropout_threshold, bias, bias_kind):
    """The first key of a walk: four neighbours share their bits of dropout, and a kernel for a bias
    of aligned rows reads eight of its elements at once."""
    aligned = start
    if dropout_threshold is not None:
        aligned = tl.where(dropout_threshold != 0, start // 4 * 4, start)
    elif bias is not None and bias_kind is None:
        aligned = start // 8 * 8
    return aligned


@triton.jit
def in_one_loop(walk):
    """The same walk with all of its steps as partial ones."""
    steps = walk.steps  # without lists that is all of them
    if walk.listed is not None:
        steps += walk.full
    return Steps(
        walk.start, None, None, steps, None, walk.listed, walk.block_mask, walk.origin, walk.unit
    )


@triton.jit
def partial_steps(walk):
    """How many steps are partial."""
    count = walk.steps
    if walk.listed is None and walk.full_begin is not None:
        count = walk.steps - walk.full_end + walk.full_begin
    return count


@triton.jit
def full_steps(walk):
    """How many steps are full."""
    count = walk.full
    if walk.listed is None:
        count = walk.full_end - walk.full_begin
    return count


@triton.jit
def partial_place(walk, i, STEP: tl.constexpr):
    """Where the i-th partial step is."""
    place = i
    if walk.full_begin is not None:
        place = partial_step(i, walk.full_begin, walk.full_end)
    if walk.listed is not None:
        ranged = walk.start + place * STEP
        place = listed_place(walk.listed, walk.block_mask, i, walk.steps, ranged, STEP)
    return place


@triton.jit
def full_place(walk, i, otherwise, STEP: tl.constexpr):
    """Where the i-th full step of a list is; `otherwise` without one.

    A loop carries it from step to step: loads of an address loaded in the same one are not
    pipelined as far ahead.
    """
    step, steps = walk.steps + i, walk.steps + walk.full
    return listed_place(walk.listed, walk.block_mask, step, steps, otherwise, STEP)


@triton.jit
def pointers_of(
    first, second, row, row_heads, qk_dim, v_dim, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """To ROWS rows from the row-th on, counted in heads, `row_heads` apart."""
    local = tl.arange(0, ROWS)
    qk = size_of(qk_dim, QK_DIM)
    v = size_of(v_dim, V_DIM)
    first_ptr = first + row * qk + local[:, None] * (row_heads * qk) + columns(QK_DIM)[None, :]
    second_ptr = second + row * v + local[:, None] * (row_heads * v) + columns(V_DIM)[None, :]
    return first_ptr, second_ptr


@triton.jit
def pair_of(pointers, row_heads, qk_dim, v_dim, unit, QK_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """Tiles at these pointers, whose places are `unit` rows apart."""
    first_step = unit * row_heads.to(tl.int64) * size_of(qk_dim, QK_DIM)
    second_step = unit * row_heads.to(tl.int64) * size_of(v_dim, V_DIM)
    first, second = pointers
    return TilePair(first, second, first_step, second_step, qk_dim, v_dim)


@triton.jit
def load_pair(pair, place, head, there, QK_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """Both tiles at a place, of the head-th head from the first on (None: that); rows that are not
    `there` (N, 1) are 0."""
    first_ptr = pair.first + place * pair.first_step
    if head is not None:
        first_ptr += head * size_of(pair.qk_dim, QK_DIM)
    first = load_rows(first_ptr, there, pair.qk_dim, QK_DIM)
    second_ptr = pair.second + place * pair.second_step
    if head is not None:
        second_ptr += head * size_of(pair.v_dim, V_DIM)
    second = load_rows(second_ptr, there, pair.v_dim, V_DIM)
    return first, second
