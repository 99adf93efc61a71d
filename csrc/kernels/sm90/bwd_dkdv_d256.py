"""dK and dV on Hopper in Gluon for head dims whose sums do not fit in one warp group's registers
(256, and 192/192), and with a bias at all head dims: the same results as `backward_sm90` of
sm90/bwd.py without dQ.

A program computes 64 keys of one key/value head. One of its two warp groups computes dV, the other
dK (sm90/bwd_split_consumer.py).
"""

from sm90.args import (
    BlockMask,
    Exchange,
    KernelScalars,
    KeyTileMask,
    KeyTileShared,
    Maps,
    PairBias,
    RowStats,
    StepRange,
)
from sm90.block_lists import blocks_of_lists
from sm90.bwd_bias_producer import produce_with_bias
from sm90.bwd_listed_producer import produce_listed
from sm90.bwd_producer import ROWS, allocate_row_stats, produce, tile_of_program
from sm90.bwd_split_consumer import KEYS, SplitArgs, consume_gradients, consume_scores
from sm90.config import constants
from sm90.row_producer import bytes_of_bias
from sm90.tiles import barriers, init_barriers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def backward_dkdv_sm90(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, top, bias, dbias,
    q_ids, kv_ids, q_pos, kv_pos, q_blocks, kv_blocks, kv_order, block_mask, kv_block_lists,
    scale, soft_cap, mask_mode, batch, mask_batch, block_mask_batch, block_mask_heads,
    q_block, kv_block, bias_axes, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
):  # fmt: skip
    """As bwd.backward_sm90 without dQ. Options: `soft_cap`, block lists, or a bias, as in
    forward_sm90. If the bias has an element for every logit, `dbias` is its gradient. Lists are of
    tiles of 128 keys, so a program may visit blocks of rows that attend only to the other 64
    keys."""
    BIAS: gl.constexpr = bias is not None
    BLOCK_LISTS: gl.constexpr = block_mask is not None
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK, CHUNKS=CHUNKS,
        V_CHUNKS=V_CHUNKS, HALVES=1, REMATERIALIZE=REMATERIALIZE, LSE_BY_MMA=False,
        PARTS=1, SOFT_CAP=soft_cap is not None, BIAS_BYTES=bytes_of_bias(bias, query),
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    get_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for
    qk_tile: gl.constexpr = get_layout([64, QK_CHUNK], dtype)
    v_tile: gl.constexpr = get_layout([64, V_CHUNK], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2 * CHUNKS, ROWS, QK_CHUNK], qk_tile)
    k_s = gl.allocate_shared_memory(dtype, [CHUNKS, KEYS, QK_CHUNK], qk_tile)
    v_s = gl.allocate_shared_memory(dtype, [V_CHUNKS, KEYS, V_CHUNK], v_tile)
    do_s = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, ROWS, V_CHUNK], v_tile)
    p_s = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], get_layout([KEYS, ROWS], dtype))
    shared = KeyTileShared(
        q_s, k_s, v_s, do_s, allocate_row_stats(),
        lse_parts=None, delta_parts=None, row_stats_full=None,
        kv_full=barriers(1), q_full=barriers(2), q_empty=barriers(2),
        do_full=barriers(2), do_empty=barriers(2),
    )  # fmt: skip
    p = Exchange(p_s, full=barriers(2), empty=barriers(2))
    pair_bias = None
    if BIAS:
        BIAS_STAGES: gl.constexpr = 1 if QK_DIM > 128 else 2  # as many as there is room for
        line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        bias_tile: gl.constexpr = get_layout([ROWS, KEYS], bias.dtype)
        pair_bias = PairBias(
            map=bias, gradient=dbias, top=top, axes=bias_axes,
            tiles_s=gl.allocate_shared_memory(bias.dtype, [BIAS_STAGES, ROWS, KEYS], bias_tile),
            top_s=gl.allocate_shared_memory(gl.float32, [BIAS_STAGES, ROWS], line),
            full=barriers(BIAS_STAGES), empty=barriers(BIAS_STAGES),
        )  # fmt: skip
        init_barriers(BIAS_STAGES, (pair_bias.full, pair_bias.empty), (1, 4))
    init_barriers(1, (shared.kv_full,), (1,))
    init_barriers(
        2,
        (shared.q_full, shared.do_full, shared.q_empty, shared.do_empty, p.full, p.empty),
        (1, 1, 8, 8, 1, 4),
    )

    scalars = KernelScalars(
        mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap
    )
    mask = KeyTileMask(q_ids, kv_ids, q_pos, kv_pos, q_blocks, kv_blocks)
    tile, q_range, mask = tile_of_program(mask, kv_order, scalars, KEYS)
    blocks = None
    if BLOCK_LISTS:
        blocks = BlockMask(
            block_mask, kv_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block
        )
        q_range = StepRange(0, blocks_of_lists(blocks, scalars, tile), 0, 0, 0)
    args = SplitArgs(
        maps=Maps(query, key, value, dout, None), row_stats=RowStats(lse2, delta, lo, hi),
        dk=dk, dv=dv, mask=mask, shared=shared, p=p, blocks=blocks,
        tile=tile, q_range=q_range, scalars=scalars,
        part=0, q_rest=None, do_rest=None, bias=pair_bias,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume_scores, (args, config)),
            (consume_gradients, (args, config)),
            (
                produce_listed if BLOCK_LISTS else produce_with_bias if BIAS else produce,
                (args, config),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
