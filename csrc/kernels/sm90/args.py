"""Arguments that the Hopper kernels pass to their functions, as aggregates.

A kernel fills these aggregates once. A field is None in kernels that do not use it.
"""

from common.kv_ranges import nth_step
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

Number = gl.tensor | gl.constexpr  # a scalar or a pointer
Map = tma.tensor_descriptor | gl.constexpr
Buffer = gl.shared_memory_descriptor | gl.constexpr  # tiles or barriers in shared memory


@gluon.aggregate
class KernelScalars:
    """Scalar arguments of a kernel."""

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
    """Tensor maps of the arrays that producers load. `bias` is (planes, q_len, kv_len)
    (row_producer.plane_of_bias)."""

    query: Map
    key: Map
    value: Map
    dout: Map
    bias: Map


@gluon.aggregate
class BlockMask:
    """A block mask, its shape, and its block lists (block_lists.py)."""

    block_mask: Number
    lists: Number
    block_mask_batch: Number
    block_mask_heads: Number
    q_block: Number
    kv_block: Number


@gluon.aggregate
class HeadMask:
    """The block mask of one head: a pointer to its rows of words, the number of words per row, and
    the shifts from a row or key to its block."""

    words: Number
    width: Number
    q_shift: Number
    kv_shift: Number


@gluon.aggregate
class StepRange:
    """The steps of a tile, over keys or over rows, from key or row `start` on. Steps [full_begin,
    full_end) are full. The others, `partial` in number, need the mask."""

    start: Number
    steps: Number
    partial: Number
    full_begin: Number
    full_end: Number

    @gluon.jit
    def nth(self, i, STEP: gl.constexpr):
        """The first key or row of the step that is processed i-th. Partial steps come first."""
        return (
            self.start
            + nth_step(i, self.steps, self.partial, self.full_begin, self.full_end) * STEP
        )

    @gluon.jit
    def nth_partial(self, n):
        """Index of the n-th partial step among all steps, in ascending order."""
        return gl.where(n < self.full_begin, n, n + self.full_end - self.full_begin)


@gluon.aggregate
class Dropout:
    """See portable/dropout.py. rows_batch: batch rows of `rows`."""

    streams: Number
    rows: Number
    threshold: Number
    rows_batch: Number
    inverse_keep: Number


# Kernels with tiles of rows: forward and dQ.


@gluon.aggregate
class Mask:
    """The mask's arrays, from the first batch row on or from that of a tile."""

    kv_start: Number
    kv_end: Number
    q_ids: Number
    kv_ids: Number
    q_pos: Number
    kv_pos: Number


@gluon.aggregate
class RowTile:
    """A tile that the producer sends to the consumers. head_part: head * V_PARTS + part."""

    row: Number
    head_part: Number
    b: Number
    kv_range: StepRange
    checked: Number


@gluon.aggregate
class RowTileShared:
    """Tiles and barriers in shared memory. *_full: tiles have been loaded; *_empty: tiles have been
    read."""

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
    """Arguments of the kernels whose programs draw tiles of rows from `counter`."""

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
    dropout: Dropout


# Kernels with tiles of keys: dK and dV, and the fused backward.


@gluon.aggregate
class KeyTileMask:
    """The mask's arrays, from the batch row of a tile on. *_blocks: bounds of blocks of 64 rows or
    keys."""

    q_ids: Number
    kv_ids: Number
    q_pos: Number
    kv_pos: Number
    q_blocks: Number
    kv_blocks: Number


@gluon.aggregate
class KeyTile:
    """A tile of keys. bh: first head of the group, counted over all batch rows. padded: rows per
    head in the row statistics. mask_row: first row of the tile's batch row in `lo` and `hi`."""

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
    """Row statistics: LSE in base 2, delta, and key ranges [lo, hi). Tensor maps, or buffers in
    shared memory."""

    lse2: Map | Buffer
    delta: Map | Buffer
    lo: Map | Buffer
    hi: Map | Buffer


@gluon.aggregate
class KeyTileShared:
    """As RowTileShared. *_parts and row_stats_full: see lse_by_mma.py."""

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
    """Tiles that one warp group passes to another."""

    tiles: Buffer
    full: Buffer
    empty: Buffer


@gluon.aggregate
class PairBias:
    """A bias: (planes, q_len, kv_len), with planes as `axes` says. `map` is its tensor map, and
    `gradient` that of its gradient, or None: it exists if the bias has a plane for each batch row
    and head. Each tile is loaded together with the largest logits of its rows (`top`, as in
    RowStats), in one or two stages."""

    map: Map
    gradient: Map
    top: Map
    axes: Number
    tiles_s: Buffer
    top_s: Buffer
    full: Buffer
    empty: Buffer


@gluon.aggregate
class Rest:
    """Columns that only S or dP reads, in kernels that compute gradients in parts. left_s: those of
    the keys or values. tiles_s: those of a block of rows, with a single stage. last_s: the last
    chunk of the keys, which is read into registers before P overwrites it."""

    left_s: Buffer
    last_s: Buffer
    tiles_s: Buffer
    full: Buffer
    empty: Buffer


@gluon.aggregate
class KeyTileArgs:
    """Arguments of backward_sm90, whose programs compute dK and dV of one tile of keys. p and ds:
    P and dS of a block of rows; P is multiplied by the derivative of a soft cap. dq_s: buffers for
    dQ on its way to the sum. part: which of config.PARTS parts of a head's columns the program
    computes. q_rest, do_rest: columns of the other part. earlier: the rows of the program's tile
    before this one."""

    maps: Maps
    row_stats: RowStats
    dk: Map
    dv: Map
    mask: KeyTileMask
    shared: KeyTileShared
    tile: KeyTile
    q_range: StepRange
    scalars: KernelScalars
    dq_sum: Number
    slopes: Number
    p: Exchange
    blocks: BlockMask
    ds: Exchange
    dq_s: Buffer
    part: Number
    q_rest: Rest
    do_rest: Rest
    bias: PairBias | gl.constexpr
    earlier: StepRange
    dropout: Dropout
