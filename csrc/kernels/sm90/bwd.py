"""Backward attention on Hopper in Gluon. It computes the same gradients as portable/bwd.py, which
the tests compare it with, in five products instead of seven.

It runs between two small kernels. `backward_preprocess` computes delta and the base-2 LSE, and
clears a float32 dQ. `backward_sm90` sums dK and dV of a tile of keys in registers, and adds to dQ
with the copy engine's bulk reduction. `backward_postprocess` scales and rounds dQ. Deterministic
gradients, and head dims above 128, need no dQ from this kernel: sm90/bwd_dq.py computes it.

A program computes a tile of keys of one key/value head. It has two warp groups, and a producer warp
(sm90/bwd_producer.py) that streams blocks of query rows of the group's heads. Scores are transposed
(keys x rows), so that P^T and dS^T are left operands in registers. How the warp groups divide the
work depends on how much of the registers the sums of dK and dV take:

- A tile of 128 keys, of which each warp group computes 64 (sm90/bwd_consumer.py). The warp groups
  share dS through shared memory (sm90/dq_reduce.py). With DQ 1, each computes half of dQ's columns,
  or some of its chunks (FlashAttention-3, arXiv 2407.08608, section 3.3), of the previous block, so
  that it does not wait for the other's dS of this block. With DQ 2, a third warp group computes dQ.
  With PING_PONG, named barriers make the warp groups take turns at issuing dK, dQ and the next
  scores, so that the softmax of one runs during the products of the other.
- The same without dQ, at 192/128 (sm90/bwd_chunked_consumer.py).
- A tile of 64 keys, for few rows: one warp group computes all gradients, and two programs fit on a
  multiprocessor (sm90/bwd_single_consumer.py). It has only DQ 2, without options.
- A tile of 64 keys, of which one warp group computes dV and the other dK, at 256 and 192/192, and
  with a bias at all head dims (sm90/bwd_split_consumer.py).
- The same in two PARTS, at 512: a program computes 256 columns of dK and of dV, and S and dP over
  all columns. Keys and values take 128 of 227 KiB of shared memory, so a block is 32 rows. Of its
  queries and cotangents, only the program's part of the columns, which a second product also reads,
  has two stages. The rest of the columns has one stage, which is free as soon as the scores have
  been computed. The last 64 columns of the rest of the keys are in the first warp group's
  registers, and the tiles of P overwrite them in shared memory.

The float32 dQ is in the order of the accumulator's registers, which `backward_postprocess` undoes.
The order of additions to it is not fixed, so dQ differs by rounding from run to run.
"""

from sm90.args import (
    BlockMask,
    Dropout,
    Exchange,
    KernelScalars,
    KeyTileArgs,
    KeyTileMask,
    KeyTileShared,
    Maps,
    PairBias,
    Rest,
    RowStats,
    StepRange,
)
from sm90.block_lists import blocks_of_lists
from sm90.bwd_chunked_consumer import consume_chunked
from sm90.bwd_consumer import consume_half
from sm90.bwd_producer import allocate_row_stats, mask_mode_of_tile, produce, tile_of_program
from sm90.bwd_single_consumer import consume_alone
from sm90.bwd_split_consumer import consume_gradients, consume_scores
from sm90.chunked_mma import count
from sm90.config import constants
from sm90.dq_reduce import columns_of_dq, sum_rows
from sm90.lse_by_mma import COLUMNS
from sm90.row_producer import bytes_of_bias
from sm90.tiles import allocate_lines, allocate_tiles, barriers, init_barriers, reset_barriers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    """The W-th consumer warp group."""
    if config.SPLIT:
        if W == 0:
            consume_scores(args, config)
        else:
            consume_gradients(args, config)
    elif config.CHUNKS > config.V_CHUNKS:
        consume_chunked(W, args, config)
    else:
        consume_half(W, args, config)


@gluon.jit
def backward_sm90(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, top, bias, dbias,
    q_ids, kv_ids, q_pos, kv_pos, q_blocks, kv_blocks, kv_order, slopes, block_mask, kv_block_lists,
    dropout_streams, dropout_rows, scale, soft_cap, mask_mode, batch, mask_batch, block_mask_batch,
    block_mask_heads, q_block, kv_block, bias_axes, dropout_threshold, dropout_rows_batch,
    inverse_keep, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    KEYS: gl.constexpr, PARTS: gl.constexpr, PING_PONG: gl.constexpr, SKIP: gl.constexpr,
    DQ: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    REMATERIALIZE: gl.constexpr, LSE_BY_MMA: gl.constexpr, COPY_DQ: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """Tensor maps: query, key, value, dout, dk and dv are (batch, heads, length, dim), with at most
    QK_DIM or V_DIM columns; lse2, delta, lo and hi are one row each. Boxes have 64 rows, in two
    PARTS 32 of query, dout and the row statistics.

    Without `dq_sum` (DQ 0) the kernel computes only dK and dV. Options are as in forward_sm90:
    `soft_cap`, `slopes`, block lists, a bias or dropout. Block lists exist only without `dq_sum`.
    They are of tiles of 128 keys, so a program of 64 keys may visit blocks of rows that attend only
    to the other 64. A bias needs 64 KEYS, and dropout 128. If a bias has an element for every
    logit, `dbias` is its gradient.
    """
    HALVES: gl.constexpr = KEYS // 64
    ROWS: gl.constexpr = 64 // PARTS
    CHUNKS: gl.constexpr = count(QK_DIM // PARTS, QK_CHUNK)
    V_CHUNKS: gl.constexpr = count(V_DIM // PARTS, V_CHUNK)
    config: gl.constexpr = constants(  # of a part: in shared memory, then of products
        QK_DIM=CHUNKS * QK_CHUNK, V_DIM=V_CHUNKS * V_CHUNK,
        QK_COLUMNS=QK_DIM // PARTS, V_COLUMNS=V_DIM // PARTS, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK,
        CHUNKS=CHUNKS, V_CHUNKS=V_CHUNKS, HALVES=HALVES, SPLIT=HALVES == 1 and not DQ, PARTS=PARTS,
        PING_PONG=PING_PONG, SKIP=SKIP, DQ=DQ, REMATERIALIZE=REMATERIALIZE, LSE_BY_MMA=LSE_BY_MMA,
        COPY_DQ=COPY_DQ == 1, TILES=TILES,
        SOFT_CAP=soft_cap is not None, ALIBI=slopes is not None,
        BLOCK_LISTS=block_mask is not None, BIAS_BYTES=bytes_of_bias(bias, query),
        DROPOUT=dropout_streams is not None,
    )  # fmt: skip
    gl.static_assert(
        not (
            LSE_BY_MMA and (config.SOFT_CAP or config.ALIBI or config.BLOCK_LISTS or config.DROPOUT)
        ),
        "scores must be multiplied by a scale alone",
    )
    dtype: gl.constexpr = query.dtype
    row_stats_full = None
    lse_parts = None
    delta_parts = None
    ds = Exchange(None, None, None)
    dq_s = None
    p = Exchange(None, None, None)
    q_rest = Rest(None, None, None, None, None)
    do_rest = q_rest
    pair_bias = None

    if PARTS > 1:
        gl.static_assert(QK_CHUNK == 2 * ROWS, "two tiles of P take the place of a chunk of keys")
        last_s = allocate_tiles(dtype, 1, KEYS, QK_CHUNK)
    q_s = allocate_tiles(dtype, 2 * CHUNKS, ROWS, QK_CHUNK)
    if CHUNKS == 1:  # tiles of equal size are in shared memory in this order
        do_s = allocate_tiles(dtype, 2 * V_CHUNKS, ROWS, V_CHUNK)
    k_s = allocate_tiles(dtype, CHUNKS, KEYS, QK_CHUNK)
    v_s = allocate_tiles(dtype, HALVES * V_CHUNKS, 64, V_CHUNK)
    if CHUNKS > 1:
        do_s = allocate_tiles(dtype, 2 * V_CHUNKS, ROWS, V_CHUNK)
    row_stats = allocate_row_stats(ROWS)
    if LSE_BY_MMA:
        parts: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=32, element_bitwidth=16, rank=2
        )
        lse_parts = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], parts)
        delta_parts = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], parts)
        row_stats_full = barriers(2)
    shared = KeyTileShared(
        q_s, k_s, v_s, do_s, row_stats, lse_parts, delta_parts, row_stats_full,
        kv_full=barriers(HALVES), q_full=barriers(2), q_empty=barriers(2),
        do_full=barriers(2), do_empty=barriers(2),
    )  # fmt: skip
    if PARTS > 1:
        q_rest = Rest(
            left_s=allocate_tiles(dtype, CHUNKS - 1, KEYS, QK_CHUNK), last_s=last_s,
            tiles_s=allocate_tiles(dtype, CHUNKS, ROWS, QK_CHUNK),
            full=barriers(1), empty=barriers(1),
        )  # fmt: skip
        do_rest = Rest(
            left_s=allocate_tiles(dtype, V_CHUNKS, KEYS, V_CHUNK), last_s=None,
            tiles_s=allocate_tiles(dtype, V_CHUNKS, ROWS, V_CHUNK),
            full=barriers(1), empty=barriers(1),
        )  # fmt: skip
        p_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
        p_s = last_s.reinterpret(dtype, [2, KEYS, ROWS], p_tile)
        p = Exchange(p_s, full=barriers(2), empty=barriers(2))
    elif config.SPLIT:
        p = Exchange(allocate_tiles(dtype, 2, KEYS, ROWS), full=barriers(2), empty=barriers(2))
    elif CHUNKS == V_CHUNKS:
        ds_s = None
        if DQ:
            linear: gl.constexpr = gl.NVMMASharedLayout(
                swizzle_byte_width=0, element_bitwidth=32, rank=2
            )
            ds_s = allocate_tiles(dtype, HALVES, KEYS, ROWS)
            DQ_COLUMNS: gl.constexpr = columns_of_dq(0, QK_DIM, QK_CHUNK, DQ)[1]
            dq_s = gl.allocate_shared_memory(gl.float32, [HALVES, DQ_COLUMNS * 2, 32], linear)
        ds = Exchange(ds_s, full=barriers(2), empty=barriers(2))
    if bias is not None:
        BIAS_STAGES: gl.constexpr = 1 if QK_DIM > 128 else 2  # as many as there is room for
        pair_bias = PairBias(
            map=bias, gradient=dbias, top=top, axes=bias_axes,
            tiles_s=allocate_tiles(bias.dtype, BIAS_STAGES, ROWS, KEYS),
            top_s=allocate_lines(gl.float32, BIAS_STAGES, ROWS),
            full=barriers(BIAS_STAGES), empty=barriers(BIAS_STAGES),
        )  # fmt: skip
        init_barriers(BIAS_STAGES, (pair_bias.full, pair_bias.empty), (1, 4))
    READERS: gl.constexpr = 4 if DQ and HALVES == 1 else 8  # warps
    rings = (
        shared.row_stats_full, shared.kv_full, q_rest.full, do_rest.full, q_rest.empty,
        do_rest.empty, shared.q_full, shared.do_full, ds.full, ds.empty, shared.q_empty,
        shared.do_empty, p.full, p.empty,
    )  # fmt: skip
    DS_READERS: gl.constexpr = 4 if DQ == 2 else 8
    arrivals: gl.constexpr = (1, 1, 1, 1, 4, 4, 1, 1, 2, DS_READERS, READERS, READERS, 1, 4)
    init_barriers(2, rings, arrivals)

    scalars = KernelScalars(
        mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap
    )
    blocks = BlockMask(
        block_mask, kv_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block
    )
    earlier = StepRange(0, 0, 0, 0, 0)
    for turn in gl.static_range(TILES):
        if turn > 0:  # all warps have left the previous tile
            gl.static_assert(DQ == 1 and COPY_DQ and not config.BIAS_BYTES)
            reset_barriers(2, rings, arrivals)
        mask = KeyTileMask(q_ids, kv_ids, q_pos, kv_pos, q_blocks, kv_blocks)
        tile, part, q_range, mask = tile_of_program(
            mask, kv_order, scalars, turn, TILES, KEYS, ROWS, PARTS
        )
        if config.BLOCK_LISTS:
            q_range = StepRange(0, blocks_of_lists(blocks, scalars, tile), 0, 0, 0)
        if DQ == 1:  # 1 to 2 % faster; no gain, or slower, in the others
            mode = mask_mode_of_tile(mask, q_range, scalars)
            own_scalars = gl.aggregate_replace(scalars, mask_mode=mode)
        else:
            own_scalars = scalars
        args = KeyTileArgs(
            maps=Maps(query, key, value, dout, None), row_stats=RowStats(lse2, delta, lo, hi),
            dk=dk, dv=dv, mask=mask, shared=shared, tile=tile, q_range=q_range, scalars=own_scalars,
            dq_sum=dq_sum, slopes=slopes, p=p, blocks=blocks, ds=ds, dq_s=dq_s,
            part=part, q_rest=q_rest, do_rest=do_rest, bias=pair_bias, earlier=earlier,
            dropout=Dropout(
                dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch, inverse_keep
            ),
        )  # fmt: skip
        if DQ and HALVES == 1:
            gl.warp_specialize(
                [(consume_alone, (args, config)), (produce, (args, config))],
                [1],
                [PRODUCER_REGISTERS],
            )
        elif DQ == 2:
            third: gl.constexpr = 512 - 2 * CONSUMER_REGISTERS - PRODUCER_REGISTERS
            gl.warp_specialize(
                [
                    (consume, (0, args, config)),
                    (consume, (1, args, config)),
                    (sum_rows, (args, config)),
                    (produce, (args, config)),
                ],
                [4, 4, 1],
                [CONSUMER_REGISTERS, third, PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (consume, (0, args, config)),
                    (consume, (1, args, config)),
                    (produce, (args, config)),
                ],
                [4, 1],
                [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
            )
        earlier = q_range
