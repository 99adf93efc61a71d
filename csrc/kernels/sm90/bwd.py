"""Backward attention on Hopper in Gluon. It computes the same gradients as portable/bwd.py, which
the tests compare it with, in five products instead of seven.

It runs between the two kernels of sm90/bwd_prepost.py. `backward_preprocess` computes delta and the
base-2 LSE, and clears a float32 dQ. `backward_sm90` sums dK and dV of a tile of keys in registers,
and adds to dQ with the copy engine's bulk reduction. `backward_postprocess` scales and rounds dQ.

A program of `backward_sm90` computes 128 keys of one key/value head. It has two warp groups of 64
keys each, and a producer warp that streams blocks of ROWS query rows of the group's heads. Scores
are transposed (keys x rows), so that P^T and dS^T are left operands in registers. The warp groups
share dS through shared memory. With DQ 1, each computes half of dQ's columns (FlashAttention-3,
arXiv 2407.08608, section 3.3), of the previous block, so that it does not wait for the other's dS
of this block. With DQ 2, a third warp group computes dQ. With PING_PONG, named barriers make the
warp groups take turns at issuing dK, dQ and the next scores, so that the softmax of one runs during
the products of the other.

The float32 dQ is in the order of the accumulator's registers, which `backward_postprocess` undoes.
The order of additions to it is not fixed, so dQ differs by rounding from run to run.

The consumer warp groups are in sm90/bwd_consumer.py, the producer in sm90/bwd_producer.py, and the
exchange of dS and dQ in sm90/dq_reduce.py. dK and dV of head dims above 128 have separate kernels:
sm90/bwd_dkdv_d192.py, sm90/bwd_dkdv_d256.py and sm90/bwd_dkdv_parts.py.
"""

from sm90.args import (
    BlockMask,
    Exchange,
    KernelScalars,
    KeyTileMask,
    KeyTileShared,
    Maps,
    RowStats,
    StepRange,
)
from sm90.block_lists import blocks_of_lists
from sm90.bwd_consumer import BackwardArgs, consume
from sm90.bwd_listed_producer import produce_listed
from sm90.bwd_producer import (
    ROWS,
    allocate_row_stats,
    mask_mode_of_tile,
    produce,
    tile_of_program,
)
from sm90.config import constants
from sm90.dq_reduce import sum_rows
from sm90.lse_by_mma import COLUMNS
from sm90.tiles import barriers, init_barriers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
    """Tensor maps: query, key, value, dout, dk and dv are (batch, length, heads * dim); lse2,
    delta, lo and hi are one row each.

    Without `dq_sum` (DQ 0) the kernel computes only dK and dV, for deterministic gradients; dQ is
    in bwd_dq.py. Options are as in forward_sm90: `soft_cap`, `slopes` or block lists. Block lists
    exist only without `dq_sum`.
    """
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK, HALVES=2,
        PING_PONG=PING_PONG, SKIP=SKIP, DQ=DQ, REMATERIALIZE=REMATERIALIZE, LSE_BY_MMA=LSE_BY_MMA,
        SOFT_CAP=soft_cap is not None, ALIBI=slopes is not None,
        BLOCK_LISTS=block_mask is not None,
    )  # fmt: skip
    gl.static_assert(
        not (LSE_BY_MMA and (config.SOFT_CAP or config.ALIBI or config.BLOCK_LISTS)),
        "scores must be multiplied by a scale alone",
    )
    dtype: gl.constexpr = query.dtype
    get_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, QK_DIM], get_layout([ROWS, QK_DIM], dtype))
    do_s = gl.allocate_shared_memory(dtype, [2, ROWS, V_DIM], get_layout([ROWS, V_DIM], dtype))
    k_s = gl.allocate_shared_memory(dtype, [1, 128, QK_DIM], get_layout([128, QK_DIM], dtype))
    v_s = gl.allocate_shared_memory(dtype, [2, 64, V_DIM], get_layout([64, V_DIM], dtype))
    row_stats = allocate_row_stats()
    if DQ:
        linear: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=0, element_bitwidth=32, rank=2
        )
        ds_s = gl.allocate_shared_memory(dtype, [2, 128, ROWS], get_layout([128, ROWS], dtype))
        dq_s = gl.allocate_shared_memory(gl.float32, [2, QK_DIM * DQ, 32], linear)
    else:
        ds_s = None
        dq_s = None
    if LSE_BY_MMA:
        parts: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=32, element_bitwidth=16, rank=2
        )
        lse_parts = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], parts)
        delta_parts = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], parts)
        row_stats_full = barriers(2)
    else:
        lse_parts = None
        delta_parts = None
        row_stats_full = None
    shared = KeyTileShared(
        q_s, k_s, v_s, do_s, row_stats, lse_parts, delta_parts, row_stats_full,
        kv_full=barriers(2), q_full=barriers(2), q_empty=barriers(2),
        do_full=barriers(2), do_empty=barriers(2),
    )  # fmt: skip
    ds = Exchange(ds_s, full=barriers(2), empty=barriers(2))
    init_barriers(
        2,
        (shared.row_stats_full, shared.kv_full, shared.q_full, shared.do_full, ds.full, ds.empty,
            shared.q_empty, shared.do_empty),
        (1, 1, 1, 1, 2, 4 if DQ == 2 else 8, 8, 8),
    )  # fmt: skip

    scalars = KernelScalars(
        mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap
    )
    blocks = BlockMask(
        block_mask, kv_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block
    )
    mask = KeyTileMask(q_ids, kv_ids, q_pos, kv_pos, q_blocks, kv_blocks)
    tile, q_range, mask = tile_of_program(mask, kv_order, scalars, 128)
    if config.BLOCK_LISTS:
        q_range = StepRange(0, blocks_of_lists(blocks, scalars, tile), 0, 0, 0)
    if DQ == 1:  # 1 to 2 % faster; no gain, or slower, in the others
        scalars = gl.aggregate_replace(scalars, mask_mode=mask_mode_of_tile(mask, q_range, scalars))
    args = BackwardArgs(
        maps=Maps(query, key, value, dout, None), row_stats=RowStats(lse2, delta, lo, hi),
        dk=dk, dv=dv, dq_sum=dq_sum, slopes=slopes, blocks=blocks, mask=mask, shared=shared,
        ds=ds, dq_s=dq_s, tile=tile, q_range=q_range, scalars=scalars,
    )  # fmt: skip
    if DQ == 2:
        third: gl.constexpr = 512 - 2 * CONSUMER_REGISTERS - PRODUCER_REGISTERS
        gl.warp_specialize(
            [
                (consume, (0, args, config)),
                (consume, (1, args, config)),
                (sum_rows, (k_s.index(0), args, config)),
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
                (produce_listed if config.BLOCK_LISTS else produce, (args, config)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
