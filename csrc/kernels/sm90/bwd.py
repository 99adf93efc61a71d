"""Backward attention on Hopper in Gluon: the same gradients as portable/bwd.py, its checked twin,
in five products instead of seven.

It runs between the two kernels of sm90/bwd_prepost.py: `backward_preprocess` makes delta and the
base-2 LSE and clears a float32 dQ; `backward_sm90` adds to it by the copy engine's bulk reduction
while it sums dK and dV of a tile of keys in registers; `backward_postprocess` scales dQ and rounds
it.

A program of `backward_sm90` is 128 keys of one key/value head: two warp groups of 64 keys, and a
producer warp that streams blocks of ROWS query rows of the group's heads. Scores are transposed
(keys x rows), so that P^T and dS^T are left operands in registers. dS of both warp groups meets in
shared memory, and each computes half of dQ's columns (FlashAttention-3, arXiv 2407.08608, section
3.3), of the block before, so that a group does not wait for the other's dS of this block. They take
turns, by named barriers, at issuing dK, dQ and the next scores: the softmax of one runs under the
products of the other.

The float32 dQ is in the order of the accumulator's registers, which only `backward_postprocess`
undoes. Its additions come in any order: dQ differs by rounding from run to run.
sm90/bwd_consumer.py has what a warp group computes, sm90/bwd_producer.py the producer,
sm90/dq_reduce.py what warp groups hand on; dK and dV of head dims above 128 have files of their
own, sm90/bwd_dkdv_d192.py and sm90/bwd_dkdv_d256.py.
"""

from sm90.block_lists import blocks_of_lists
from sm90.bwd_consumer import consume
from sm90.bwd_listed_producer import produce_listed
from sm90.bwd_producer import ROWS, mask_mode_of_tile, produce, tile_of_program
from sm90.config import constants
from sm90.dq_reduce import sum_rows
from sm90.lse_by_mma import COLUMNS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def backward_sm90(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order, slopes, block_mask, kv_block_lists,
    scale, soft_cap, mask_mode, batch, mask_batch, block_mask_batch, block_mask_heads,
    q_block, kv_block, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    PING_PONG: gl.constexpr, SKIP: gl.constexpr, DQ: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
    LSE_BY_MMA: gl.constexpr,
):  # fmt: skip
    """Tensor maps: query, key, value, dout, dk, dv (batch, length, heads * dim); lse2, delta, lo,
    hi as one row each.

    Without `dq_sum` (DQ 0) it makes dK and dV alone, for deterministic gradients; bwd_dq.py has dQ.
    Options as of forward_sm90: `soft_cap`, `slopes` or block lists, of which the last have no
    `dq_sum`.
    """
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK, HALVES=2,
        PING_PONG=PING_PONG, SKIP=SKIP, DQ=DQ, REMATERIALIZE=REMATERIALIZE, LSE_BY_MMA=LSE_BY_MMA,
        SOFT_CAP=soft_cap is not None, ALIBI=slopes is not None,
        BLOCK_LISTS=block_mask is not None,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    row_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, QK_DIM], dtype)
    row_tile_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V_DIM], dtype)
    k_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, QK_DIM], dtype)
    v_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, V_DIM], dtype)
    ds_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, ROWS], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, QK_DIM], row_tile)
    do_s = gl.allocate_shared_memory(dtype, [2, ROWS, V_DIM], row_tile_v)
    k_s = gl.allocate_shared_memory(dtype, [1, 128, QK_DIM], k_tile)
    v_s = gl.allocate_shared_memory(dtype, [2, 64, V_DIM], v_tile)
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    lse_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], line)
    linear: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    if DQ:
        ds_s = gl.allocate_shared_memory(dtype, [2, 128, ROWS], ds_tile)
        dq_s = gl.allocate_shared_memory(
            gl.float32, [2, QK_DIM * (1 if DQ == 1 else 2), 32], linear
        )
    else:  # never touched
        ds_s = q_s
        dq_s = lse_s
    delta_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], line)
    lo_s = gl.allocate_shared_memory(gl.int32, [2, ROWS], line)
    hi_s = gl.allocate_shared_memory(gl.int32, [2, ROWS], line)
    gl.static_assert(
        not (LSE_BY_MMA and (config.SOFT_CAP or config.ALIBI or config.BLOCK_LISTS)),
        "scores must be multiplied by a scale alone",
    )
    if LSE_BY_MMA:
        parts: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=32, element_bitwidth=16, rank=2
        )
        lse_p = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], parts)
        delta_p = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], parts)
        row_stats_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        lse_parts = (lse_p, delta_p, row_stats_full)
    else:
        lse_parts = ()
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(2):
        if LSE_BY_MMA:
            mbarrier.init(row_stats_full.index(j), 1)
        mbarrier.init(kv_full.index(j), 1)
        mbarrier.init(q_full.index(j), 1)
        mbarrier.init(do_full.index(j), 1)
        mbarrier.init(ds_full.index(j), 2)
        mbarrier.init(ds_empty.index(j), 4 if DQ == 2 else 8)
        mbarrier.init(q_empty.index(j), 8)
        mbarrier.init(do_empty.index(j), 8)

    orders = (q_blocks, kv_blocks, kv_order)
    pointers = (q_ids, kv_ids, q_pos, kv_pos)
    sizes = (mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads)
    tile, q_range, mask, own_blocks = tile_of_program(orders, pointers, sizes, 128)

    if config.BLOCK_LISTS:
        mask_args = (
            block_mask,
            kv_block_lists,
            block_mask_batch,
            block_mask_heads,
            q_block,
            kv_block,
        )
        mask_b = gl.where(mask_batch > 1, tile[0], 0)
        listing = (mask_args, mask_b, q_len, kv_len)
        q_range = (0, blocks_of_lists(listing, tile), 0, 0, 0)
    else:
        listing = ()
    maps = (query, key, value, dout)
    row_stats = (lse2, delta, lo, hi)
    grads = (dk, dv, dq_sum)
    tiles_s = (q_s, k_s, v_s, do_s)
    row_stats_s = (lse_s, delta_s, lo_s, hi_s)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty)
    ds_barriers = (ds_full, ds_empty)
    if DQ == 1:  # 1 to 2 % there, nothing or less in the others
        flags = mask[4]
        mask_mode = mask_mode_of_tile(flags, mask_mode, q_range[0], q_range[1], (q_len + 63) // 64)
    if config.SOFT_CAP:
        scalars = (mask_mode, q_len, kv_len, scale, soft_cap)
    else:
        scalars = (mask_mode, q_len, kv_len, scale, scale)
    shared = (tiles_s, row_stats_s, lse_parts, ds_s, dq_s)
    loaded = (tiles_s, row_stats_s)
    consumed = (
        grads, mask, own_blocks, listing, slopes, shared, barriers, ds_barriers, tile, q_range,
    scalars, )  # fmt: skip
    if config.BLOCK_LISTS:
        gl.warp_specialize(
            [
                (consume, (0, consumed, config)),
                (consume, (1, consumed, config)),
                (produce_listed, (maps, row_stats, loaded, barriers, tile, listing, config)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif DQ == 2:
        third: gl.constexpr = 512 - 2 * CONSUMER_REGISTERS - PRODUCER_REGISTERS
        gl.warp_specialize(
            [
                (consume, (0, consumed, config)),
                (consume, (1, consumed, config)),
                (
                    sum_rows,
                    (dq_sum, k_s.index(0), ds_s, dq_s, kv_full, ds_barriers, tile, q_range, config),
                ),
                (produce, (maps, row_stats, loaded, barriers, tile, q_range, lse_parts, scale,
            config)), ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, third, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, consumed, config)),
                (consume, (1, consumed, config)),
                (
                    produce,
                    (maps, row_stats, loaded, barriers, tile, q_range, lse_parts, scale, config),
                ),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
