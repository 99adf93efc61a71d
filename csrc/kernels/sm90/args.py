"""The arguments of the Hopper kernels' functions, by name.

A kernel fills these aggregates once. A field is None in kernels that do not use it.
"""

from sm90.common import nth_step
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

Number = gl.tensor | gl.constexpr  # a number or a pointer
Map = tma.tensor_descriptor | gl.constexpr
Buffer = gl.shared_memory_descriptor | gl.constexpr  # a ring of tiles or of barriers


@gluon.aggregate
class KernelScalars:
    """Numbers of a call."""

    mask_mode: Number
    batch: Number
    mask_batch: Number
    q_len: Number
    kv_len: Number
    heads: Number
    kv_heads: Number
    scale: Number
    soft_cap: Number


@gluon.aggregate
class Maps:
    """Tensor maps of what producers load; `bias`: (planes, q_len, kv_len), one plane for each of
    the bias's batch rows and heads."""

    query: Map
    key: Map
    value: Map
    dout: Map
    bias: Map


@gluon.aggregate
class BlockMask:
    """A block mask and the lists of its blocks (block_lists.py)."""

    block_mask: Number
    lists: Number
    block_mask_batch: Number
    block_mask_heads: Number
    q_block: Number
    kv_block: Number


@gluon.aggregate
class HeadMask:
    """A head's block mask: rows of words, words in a row, and shifts from a row and a key to their
    blocks."""

    words: Number
    width: Number
    q_shift: Number
    kv_shift: Number


@gluon.aggregate
class StepRange:
    """The steps of a tile over keys, or over rows, from `start` on. Full steps are those of
    [full_begin, full_end); the partial ones before and after them need the mask."""

    start: Number
    steps: Number
    partial: Number
    full_begin: Number
    full_end: Number

    @gluon.jit
    def nth(self, i, STEP: gl.constexpr):
        """Where the i-th step begins. Partial steps are taken first."""
        return (
            self.start
            + nth_step(i, self.steps, self.partial, self.full_begin, self.full_end) * STEP
        )

    @gluon.jit
    def nth_partial(self, n):
        """The place of the n-th partial step among all steps."""
        return gl.where(n < self.full_begin, n, n + self.full_end - self.full_begin)


# Tiles of rows: forward and dQ.


@gluon.aggregate
class Mask:
    """The mask's arrays: of the first batch row, or of a tile's."""

    kv_start: Number
    kv_end: Number
    q_ids: Number
    kv_ids: Number
    q_pos: Number
    kv_pos: Number


@gluon.aggregate
class RowTile:
    """What the producer tells the consumers. head_part: the head times V_PARTS, plus the part."""

    row: Number
    head_part: Number
    b: Number
    kv_range: StepRange
    checked: Number


@gluon.aggregate
class RowTileShared:
    """Tiles, and barriers: *_full of tiles that are loaded, *_empty of tiles that are read."""

    q_s: Buffer
    do_s: Buffer
    k_s: Buffer
    v_s: Buffer
    bias_s: Buffer
    o_s: Buffer
    work_s: Buffer
    q_full: Buffer
    k_full: Buffer
    v_full: Buffer
    q_empty: Buffer
    k_empty: Buffer
    v_empty: Buffer
    work_full: Buffer
    work_empty: Buffer


@gluon.aggregate
class RowTileArgs:
    """Of the kernels whose programs draw tiles of rows from `counter`."""

    q_blocks: Number
    mask: Mask
    blocks: BlockMask
    shared: RowTileShared
    scalars: KernelScalars
    maps: Maps
    bias_axes: Number
    q_order: Number
    counter: Number
    programs: Number


# Tiles of keys: dK and dV, and the fused backward.


@gluon.aggregate
class KeyTileMask:
    """The mask's arrays, of a tile's batch row; *_blocks: bounds of blocks of 64 rows or keys."""

    q_ids: Number
    kv_ids: Number
    q_pos: Number
    kv_pos: Number
    q_blocks: Number
    kv_blocks: Number


@gluon.aggregate
class KeyTile:
    """bh: the group's first head among those of all batch rows; padded: rows of a head in the row
    statistics, mask_row: those of the batch rows of the mask before."""

    mask_b: Number
    b: Number
    first_key: Number
    kv_head: Number
    group: Number
    bh: Number
    mask_row: Number
    padded: Number


@gluon.aggregate
class RowStats:
    """Of rows: LSE in base 2, delta, key ranges. Tensor maps, or lines in shared memory."""

    lse2: Map | Buffer
    delta: Map | Buffer
    lo: Map | Buffer
    hi: Map | Buffer


@gluon.aggregate
class KeyTileShared:
    """As RowTileShared; *_parts and row_stats_full: lse_by_mma.py."""

    q_s: Buffer
    k_s: Buffer
    v_s: Buffer
    do_s: Buffer
    row_stats: RowStats
    lse_parts: Buffer
    delta_parts: Buffer
    row_stats_full: Buffer
    kv_full: Buffer
    q_full: Buffer
    q_empty: Buffer
    do_full: Buffer
    do_empty: Buffer


@gluon.aggregate
class Exchange:
    """Tiles that warp groups pass to each other."""

    tiles: Buffer
    full: Buffer
    empty: Buffer


@gluon.aggregate
class PairBias:
    """A bias with an element for every logit: (planes, q_len, kv_len), one plane for each batch row
    and head. `map` and `gradient` are tensor maps of it and of its gradient. With its tile, the
    largest logits of the rows are loaded (`top`, as RowStats)."""

    map: Map
    gradient: Map
    top: Map
    tiles_s: Buffer
    top_s: Buffer
    full: Buffer
    empty: Buffer


@gluon.aggregate
class KeyTileArgs:
    """Of the kernels whose programs compute dK and dV of one tile of keys."""

    maps: Maps
    row_stats: RowStats
    dk: Map
    dv: Map
    mask: KeyTileMask
    shared: KeyTileShared
    tile: KeyTile
    q_range: StepRange
    scalars: KernelScalars
