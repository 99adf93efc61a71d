"""The walk of a tile: the steps over its blocks of keys (for a tile of keys: blocks of rows), and
the pointers to what a step loads.

Partial steps come first and need the mask; full steps do not. Steps cover the row range or, with a
block mask, the entries of a list (block_lists.py).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.block_lists import BlockMask, counts_of_list, list_of_tile, listed_place
from portable.kv_ranges import columns, load_rows, partial_step, size_of


class Steps(NamedTuple):
    """The steps of a tile. `full_begin` and `full_end` are the full steps of the range that begins
    at `start`; they are None if there is only one loop, in which all steps are partial. `steps` is
    the number of steps of the range or, in kernels with lists, of partial steps. `full` is then the
    number of full steps, and `listed` is the list.

    The place of a step encodes its first key (or row), origin + place * unit. Ranges count whole
    steps from `start`, and lists count single keys from 0.
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
    """Pointers to two tiles that are loaded together (keys and values, queries and cotangents),
    their increments from one place to the next, and their head dims (None: those of the kernel)."""

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
    """The walk of tile `tile`, out of `tiles` tiles of 128. Its list has at most `blocks` blocks of
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
    """The first key of a walk, rounded down where needed: dropout generates bits for four keys at a
    time, and kernels for a bias with aligned rows load eight elements at once."""
    aligned = start
    if dropout_threshold is not None:
        aligned = tl.where(dropout_threshold != 0, start // 4 * 4, start)
    elif bias is not None and bias_kind is None:
        aligned = start // 8 * 8
    return aligned


@triton.jit
def in_one_loop(walk):
    """The same walk with all of its steps partial."""
    steps = walk.steps  # without lists, these are all steps
    if walk.listed is not None:
        steps += walk.full
    return Steps(
        walk.start, None, None, steps, None, walk.listed, walk.block_mask, walk.origin, walk.unit
    )


@triton.jit
def partial_steps(walk):
    """The number of partial steps."""
    count = walk.steps
    if walk.listed is None and walk.full_begin is not None:
        count = walk.steps - walk.full_end + walk.full_begin
    return count


@triton.jit
def full_steps(walk):
    """The number of full steps."""
    count = walk.full
    if walk.listed is None:
        count = walk.full_end - walk.full_begin
    return count


@triton.jit
def partial_place(walk, i, STEP: tl.constexpr):
    """The place of the i-th partial step."""
    place = i
    if walk.full_begin is not None:
        place = partial_step(i, walk.full_begin, walk.full_end)
    if walk.listed is not None:
        ranged = walk.start + place * STEP
        place = listed_place(walk.listed, walk.block_mask, i, walk.steps, ranged, STEP)
    return place


@triton.jit
def full_place(walk, i, otherwise, STEP: tl.constexpr):
    """The place of the i-th full step of a list; `otherwise` in calls without a block mask.

    Loops carry the place from one iteration to the next: loads whose address is loaded in the same
    iteration are not pipelined as far ahead.
    """
    step, steps = walk.steps + i, walk.steps + walk.full
    return listed_place(walk.listed, walk.block_mask, step, steps, otherwise, STEP)


@triton.jit
def pointers_of(
    first, second, row, row_heads, qk_dim, v_dim, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Pointers to ROWS rows of both arrays that are `row_heads` heads apart. The first is at the
    index `row`, counted in heads."""
    local = tl.arange(0, ROWS)
    qk = size_of(qk_dim, QK_DIM)
    v = size_of(v_dim, V_DIM)
    first_ptr = first + row * qk + local[:, None] * (row_heads * qk) + columns(QK_DIM)[None, :]
    second_ptr = second + row * v + local[:, None] * (row_heads * v) + columns(V_DIM)[None, :]
    return first_ptr, second_ptr


@triton.jit
def pair_of(pointers, row_heads, qk_dim, v_dim, unit, QK_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """The TilePair of these pointers, with places `unit` rows apart."""
    first_step = unit * row_heads.to(tl.int64) * size_of(qk_dim, QK_DIM)
    second_step = unit * row_heads.to(tl.int64) * size_of(v_dim, V_DIM)
    first, second = pointers
    return TilePair(first, second, first_step, second_step, qk_dim, v_dim)


@triton.jit
def load_pair(pair, place, head, valid, QK_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """Loads both tiles at a place, `head` heads after the first (None: of the first). Rows whose
    mask `valid` (N, 1) is False are 0."""
    first_ptr = pair.first + place * pair.first_step
    if head is not None:
        first_ptr += head * size_of(pair.qk_dim, QK_DIM)
    first = load_rows(first_ptr, valid, pair.qk_dim, QK_DIM)
    second_ptr = pair.second + place * pair.second_step
    if head is not None:
        second_ptr += head * size_of(pair.v_dim, V_DIM)
    second = load_rows(second_ptr, valid, pair.v_dim, V_DIM)
    return first, second
