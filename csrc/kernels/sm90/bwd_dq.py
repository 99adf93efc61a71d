"""dQ on Hopper in Gluon without additions to memory, for deterministic gradients. It computes the
same as portable/bwd_dq.py, which the tests compare it with. `backward_dkdv_sm90` (sm90/bwd.py)
computes the other two gradients.

A program computes tiles of 128 rows of one head until none is left, as in forward_sm90. It has two
warp groups of 64 rows each, and a producer warp that draws the next tile and streams its queries
and cotangents, then keys and values. A step has three products: S = Q K^T, dP = dO V^T, and with dS
from registers, dQ += dS K. The scores of the next step run during the third product. Head dims are
divided into chunks of columns, as in sm90/fwd.py. At head dim 256, with tiles of 64 keys, there is
room for two tiles of keys and one of values.
"""

from common.kv_ranges import LOG2E, opaque
from common.soft_cap import tanh_of_scores
from sm90.args import (
    BlockMask,
    Dropout,
    KernelScalars,
    Map,
    Maps,
    Mask,
    Number,
    RowTileArgs,
    RowTileShared,
)
from sm90.block_lists import list_of_rows, mask_of_head
from sm90.chunked_mma import add_products, left_chunks, scores, wait_products, zeros
from sm90.common import (
    accumulator,
    lanes_arrive,
    own_steps,
    rematerialized_zero,
    select_bits,
    warp_arrive,
)
from sm90.config import constants
from sm90.dropout import row_keep_bits, row_numbers, stream_of_head
from sm90.pipeline import (
    apply_mask,
    mask_of_batch_row,
    next_stage,
    ping_pong_pass,
    ping_pong_wait,
    receive_tile,
    skip_blocks,
    stage_of_values,
)
from sm90.row_producer import bytes_of_bias, produce
from sm90.tile_store import store_rows
from sm90.tiles import allocate_lines, allocate_tiles, barriers, init_barriers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)


@gluon.aggregate
class DqArgs(RowTileArgs):
    """top: the largest logits of rows, with a bias."""

    dq: Map
    lse2: Number
    delta: Number
    top: Number


@gluon.constexpr_function
def value_stages(v_dim, block_n, stages):
    """Stages of the ring of values: as many as for keys if there is room."""
    return 1 if v_dim == 256 and block_n == 64 else stages


@gluon.jit
def add_bias(s, bias_s, W: gl.constexpr, stage, scale, top, config: gl.constexpr):
    """Logits in base e, minus the largest logit of their row. See bwd_split_consumer.add_bias."""
    tile = bias_s.index(stage * 2 + W).load(accumulator(config.BLOCK_N))
    return gl.minimum(s * scale + tile.to(gl.float32) - gl.expand_dims(top, 1), 0.0)


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    shared = args.shared
    scalars = args.scalars
    dq = args.dq
    scale = scalars.scale
    q_len = scalars.q_len
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    DO_REGISTERS: gl.constexpr = config.DO_REGISTERS
    SOFT_CAP: gl.constexpr = config.SOFT_CAP
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    CHUNKS: gl.constexpr = config.CHUNKS
    padded = (q_len + 63) // 64 * 64
    BIAS: gl.constexpr = config.BIAS
    if BIAS:
        scale2 = LOG2E
    else:
        scale2 = (scalars.soft_cap if SOFT_CAP else scale) * LOG2E
    dtype: gl.constexpr = dq.dtype
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    q_layout: gl.constexpr = accumulator(QK_CHUNK)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, q_layout, 2)
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    if W == 1:
        ping_pong_pass(1, 2)
    tile = receive_tile(shared, 0, 0)
    while tile.kv_range.steps > 0:
        kv_range = tile.kv_range
        steps = kv_range.steps
        partial = kv_range.partial
        head = tile.head_part
        lanes_arrive(shared.work_empty.index(slot))
        mask_b = gl.where(scalars.mask_batch > 1, tile.b, 0)
        mask = mask_of_batch_row(args.mask, mask_b, scalars)
        rows = tile.row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        # rows past the end get lse2 +inf and delta 0, as rows that attend to nothing have
        in_bounds = rows < q_len
        stat = (tile.b.to(gl.int64) * scalars.heads + head) * padded + rows
        lse = gl.load(args.lse2 + stat, mask=in_bounds, other=float("inf"))
        dl = gl.load(args.delta + stat, mask=in_bounds, other=0.0)
        if BIAS:
            top = gl.load(args.top + stat, mask=in_bounds, other=0.0)
        if config.DROPOUT:
            numbers = row_numbers(args.dropout, tile.b, rows, q_len)
            stream = stream_of_head(args.dropout, tile.b, scalars.heads, head)
        dq_sum = zeros(config.QK_DIM, QK_CHUNK)
        mbarrier.wait(shared.q_full.index(W), q_phase)
        q = left_chunks(shared.q_s, W, config.QK_DIM)
        if DO_REGISTERS:  # halves the reads of shared memory by its product
            do = (shared.do_s.index(W).load(gl.DotOperandLayout(0, s_layout, 2)),)
        else:
            do = left_chunks(shared.do_s, W, V_DIM)
        if BLOCK_LISTS:
            first = 0
            last = partial
            listed, _, _ = list_of_rows(args.blocks, scalars, mask_b, head, tile.row)
            head_mask = mask_of_head(args.blocks, scalars, mask_b, head)
        else:
            first, last = own_steps(
                args.q_blocks, mask_b, tile.row // 64 + W, q_len, kv_range.start, steps, partial,
                BLOCK_N,
            )  # fmt: skip
            head_mask = ()
            stage, phase = skip_blocks(first, W, shared, stage, phase, config)
        end = gl.where(partial == steps, last, steps)
        mbarrier.wait(shared.k_full.index(stage), phase)
        s = scores(q, shared.k_s, stage, zero)
        s = warpgroup_mma_wait(0, deps=(s,))
        for part in gl.static_range(2):  # partial steps, then full steps
            begin = first if part == 0 else gl.maximum(first, partial)
            stop = last if part == 0 else steps
            for i in range(begin, stop):
                v_stage, v_phase = stage_of_values(stage, phase, config)
                if BLOCK_LISTS and part == 0:
                    at = gl.load(listed + i) * BLOCK_N
                mbarrier.wait(shared.v_full.index(v_stage), v_phase)
                if V_DIM > 128:  # tile descriptors hoisted out of the loop would be spilled
                    w = opaque(stage * 0 + W)
                    q_left = left_chunks(shared.q_s, w, config.QK_DIM)
                    do_left = left_chunks(shared.do_s, w, V_DIM)
                else:
                    w = W + rematerialized_zero(i, config.REMATERIALIZE)
                    q_left = left_chunks(shared.q_s, w, config.QK_DIM)
                    do_left = do if DO_REGISTERS else left_chunks(shared.do_s, w, V_DIM)
                dp_token = scores(do_left, shared.v_s, v_stage, zero)
                if config.DROPOUT:
                    keep = row_keep_bits(numbers, stream, kv_range.nth(i, BLOCK_N), args, BLOCK_N)
                if SOFT_CAP:
                    s = tanh_of_scores(s, scale / scalars.soft_cap, BLOCK_N)
                    dtanh = 1.0 - s * s  # the derivative of tanh
                if BIAS:
                    s = add_bias(s, shared.bias_s, W, stage, scale, top, config)
                if part == 0:
                    if not BLOCK_LISTS:
                        at = kv_range.nth(i, BLOCK_N)
                    s = apply_mask(s, rows, at, mask, tile.checked, scalars, head_mask, config)
                p = gl.exp2(s * scale2 - gl.expand_dims(lse, 1))
                if SOFT_CAP and part == 0:  # the derivative at a masked key may be NaN
                    p = gl.where(p == 0.0, 0.0, p * dtanh)
                elif SOFT_CAP:
                    p = p * dtanh
                dp = warpgroup_mma_wait(0, deps=(dp_token,))
                warp_arrive(shared.v_empty.index(v_stage))
                if config.DROPOUT:
                    dp = select_bits(dp, keep, 0.0) * args.dropout.inverse_keep
                ds = p * (dp - gl.expand_dims(dl, 1))
                if part == 0:  # P is 0 at masked pairs, dP may be anything
                    ds = gl.where(p == 0.0, 0.0, ds)
                ds_half = gl.convert_layout(ds.to(dtype), ds_layout)
                ping_pong_wait(W, 2)
                dq_tokens = add_products(ds_half, shared.k_s, stage, dq_sum)
                old = stage
                stage, phase = next_stage(stage, phase, STAGES)
                more = i + 1 < end
                if more:
                    mbarrier.wait(shared.k_full.index(stage), phase)
                # the last step computes its own scores again, and drops them
                s_token = scores(q_left, shared.k_s, gl.where(more, stage, old), zero)
                ping_pong_pass(W, 2)
                dq_sum = wait_products(dq_tokens, CHUNKS, CHUNKS)
                if more:
                    if BIAS:
                        fence_async_shared()  # the loads of the bias tile have finished
                    warp_arrive(shared.k_empty.index(old))
                s = warpgroup_mma_wait(0, deps=(s_token,))
        warp_arrive(shared.k_empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        if not BLOCK_LISTS:
            stage, phase = skip_blocks(steps - end, W, shared, stage, phase, config)
        lo = gl.load(mask.kv_start + rows, mask=in_bounds, other=0)
        hi = gl.load(mask.kv_end + rows, mask=in_bounds, other=0)
        # also true for a NaN, which must reach the result
        attended = gl.where((hi > lo) & (lse != float("inf")), 1, 0)
        attended = gl.convert_layout(attended, gl.SliceLayout(1, q_layout)) != 0
        row = tile.row + W * 64
        store_rows(
            dq, dq_sum, attended, scale, shared.q_s, W * CHUNKS, tile.b, row, head, 0, CHUNKS
        )
        gl.barrier()
        warp_arrive(shared.q_empty.index(W))
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
        tile = receive_tile(shared, slot, slot_phase)
    if W == 0:
        ping_pong_wait(0, 2)


@gluon.jit
def backward_dq_sm90(
    query, key, value, dout, dq, lse2, delta, top, bias,
    kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, counter, block_mask,
    q_block_lists, dropout_streams, dropout_rows, scale, soft_cap, mask_mode, batch, mask_batch,
    block_mask_batch, block_mask_heads, q_block, kv_block, bias_axes, dropout_threshold,
    dropout_rows_batch, inverse_keep, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DO_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
):  # fmt: skip
    """query, key, value, dout and dq are tensor maps (batch, heads, length, dim) with boxes of 64
    or BLOCK_N rows of one head. lse2 and delta are results of backward_preprocess, as is `top` with
    a bias. `counter` is as in forward_sm90, as are the options: `soft_cap`, block lists, `bias` or
    dropout."""
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    V_STAGES: gl.constexpr = value_stages(V_DIM, BLOCK_N, STAGES)
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK,
        CHUNKS=CHUNKS, SLOTS=CHUNKS, V_CHUNKS=V_CHUNKS, V_PARTS=1, DOUT=True,
        WARP_GROUPS=2, BLOCK_N=BLOCK_N, STAGES=STAGES, V_STAGES=V_STAGES,
        DO_REGISTERS=DO_REGISTERS, REMATERIALIZE=REMATERIALIZE,
        NEAR=False, ROWS_FIRST=False, Q_STAGES=1,
        SOFT_CAP=soft_cap is not None, BLOCK_LISTS=block_mask is not None,
        BIAS=bias is not None, BIAS_BYTES=bytes_of_bias(bias, query),
        DROPOUT=dropout_streams is not None,
    )  # fmt: skip
    gl.static_assert(not (DO_REGISTERS and V_CHUNKS > 1), "cotangents in registers are one tile")
    dtype: gl.constexpr = query.dtype
    bias_s = None
    if config.BIAS:
        bias_s = allocate_tiles(bias.dtype, STAGES * 2, 64, BLOCK_N)
    shared = RowTileShared(
        q_s=allocate_tiles(dtype, 2 * CHUNKS, 64, QK_CHUNK),
        do_s=allocate_tiles(dtype, 2 * V_CHUNKS, 64, V_CHUNK),
        k_s=allocate_tiles(dtype, STAGES * CHUNKS, BLOCK_N, QK_CHUNK),
        v_s=allocate_tiles(dtype, V_STAGES * V_CHUNKS, BLOCK_N, V_CHUNK),
        bias_s=bias_s, o_s=None, work_s=allocate_lines(gl.int32, 2, 16),
        q_full=barriers(2), q_empty=barriers(2),
        k_full=barriers(STAGES), k_empty=barriers(STAGES),
        v_full=barriers(V_STAGES), v_empty=barriers(V_STAGES),
        work_full=barriers(2), work_empty=barriers(2),
    )  # fmt: skip
    init_barriers(
        STAGES, (shared.k_full, shared.v_full, shared.k_empty, shared.v_empty), (1, 1, 8, 8)
    )
    init_barriers(
        2, (shared.q_full, shared.q_empty, shared.work_full, shared.work_empty), (1, 4, 1, 256)
    )

    args = DqArgs(
        maps=Maps(query, key, value, dout, bias),
        mask=Mask(kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos),
        blocks=BlockMask(
            block_mask, q_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block
        ),
        scalars=KernelScalars(
            mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap
        ),
        bias_axes=bias_axes, q_blocks=q_blocks, q_order=q_order, counter=counter,
        programs=gl.num_programs(0),
        dropout=Dropout(
            dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch, inverse_keep
        ),
        shared=shared, dq=dq, lse2=lse2, delta=delta, top=top,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume, (0, args, config)), (consume, (1, args, config)), (produce, (args, config))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
