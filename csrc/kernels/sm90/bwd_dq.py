"""dQ on Hopper in Gluon without additions to memory, for deterministic gradients: the same as
backward_dq, its checked twin. sm90/bwd.py's `backward_dkdv_sm90` makes the other two gradients.

A program takes tiles of 128 rows of one head until none is left, as forward_sm90 does: two warp
groups of 64 rows, and a producer warp that draws the next tile and streams its queries and
cotangents, then keys and values. A step is three products: S = Q K^T and dP = dO V^T, then dQ += dS
K with dS from registers. The scores of the next step run under the third product. Head dims are cut
into chunks of columns, as in sm90/fwd.py. At head dim 256 tiles of 64 keys leave room for one tile
of values and two of keys.
"""

from sm90.block_lists import list_of_rows, mask_of_head
from sm90.chunked_mma import add_products, finished, left_chunks, scores, zeros
from sm90.common import (
    LOG2E,
    accumulator,
    key_range,
    lanes_arrive,
    nth_step,
    opaque,
    own_steps,
    place_of_tile,
    position_row,
    rematerialized_zero,
    split,
    warp_arrive,
)
from sm90.config import constants
from sm90.pipeline import (
    after,
    masked,
    ping_pong_pass,
    ping_pong_wait,
    place_of_values,
    receive_tile,
    send_tile_asm,
    skip_blocks,
)
from sm90.soft_cap import tanh_of_scores
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def value_stages(v_dim, block_n, stages):
    """Places for tiles of values: as many as for keys where there is room."""
    v_dim, block_n, stages = (int(getattr(x, "value", x)) for x in (v_dim, block_n, stages))
    return 1 if v_dim == 256 and block_n == 64 else stages


@gluon.jit
def produce(maps, order, mask_args, shared, sizes, config: gl.constexpr):
    q_order, q_blocks, counter = order
    query, dout, key, value = maps
    tiles_s, work_s, full, empty, work_bars = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    q_s, do_s, k_s, v_s = tiles_s
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    work_full, work_empty = work_bars
    batch, mask_batch, q_len, kv_len, heads, kv_heads, programs = sizes
    dtype: gl.constexpr = query.dtype
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    V_STAGES: gl.constexpr = value_stages(V_DIM, BLOCK_N, STAGES)
    group = heads // kv_heads
    tiles = (q_len + 127) // 128
    total = tiles * batch * heads
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    tile = gl.program_id(0)
    while tile < total:
        head, kv_head, b, mask_b, row = place_of_tile(
            tile, q_order, batch, mask_batch, tiles, group, kv_heads, 128, 1
        )
        start, end, full_lo, full_hi, checked = key_range(q_blocks, mask_b, row, q_len, 128)
        steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
        partial = steps - full_end + full_begin
        if config.BLOCK_LISTS:
            listed, partial, full_steps = list_of_rows(mask_args, mask_b, head, row, q_len, kv_len)
            steps = partial + full_steps
            block = gl.load(listed)
        mbarrier.wait(work_empty.index(slot), slot_phase ^ 1)
        msg_slot = work_s.index(slot)
        tile = (msg_slot, row, head, b, start, steps, partial, full_begin, full_end, checked)
        gl.inline_asm(
            send_tile_asm,
            "r,r,r,r,r,r,r,r,r,r,~{memory}",
            tile,
        )
        mbarrier.arrive(work_full.index(slot))
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), q_phase ^ 1)
            mbarrier.expect(q_full.index(w), 64 * (QK_DIM + V_DIM) * 2)
            for c in gl.static_range(CHUNKS):
                q_tile = q_s.index(w * CHUNKS + c)
                q_tile = q_tile.reinterpret(dtype, [1, 64, QK_CHUNK], query.layout)
                at_q = [b, row + w * 64, head * QK_DIM + c * QK_CHUNK]
                tma.async_load(query, at_q, q_full.index(w), q_tile)
            for c in gl.static_range(V_CHUNKS):
                do_tile = do_s.index(w * V_CHUNKS + c)
                do_tile = do_tile.reinterpret(dtype, [1, 64, V_CHUNK], dout.layout)
                at_do = [b, row + w * 64, head * V_DIM + c * V_CHUNK]
                tma.async_load(dout, at_do, q_full.index(w), do_tile)
        for i in range(0, steps):
            if config.BLOCK_LISTS:  # read a step ahead
                at = block * BLOCK_N
                block = gl.load(listed + gl.minimum(i + 1, steps - 1))
            else:
                at = start + nth_step(i, steps, partial, full_begin, full_end) * BLOCK_N
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BLOCK_N * QK_DIM * 2)
            for c in gl.static_range(CHUNKS):
                k_tile = k_s.index(stage * CHUNKS + c)
                k_tile = k_tile.reinterpret(dtype, [1, BLOCK_N, QK_CHUNK], key.layout)
                at_k = [b, at, kv_head * QK_DIM + c * QK_CHUNK]
                tma.async_load(key, at_k, k_full.index(stage), k_tile)
            v_stage, v_phase = place_of_values(stage, phase, V_STAGES, STAGES)
            mbarrier.wait(v_empty.index(v_stage), v_phase ^ 1)
            mbarrier.expect(v_full.index(v_stage), BLOCK_N * V_DIM * 2)
            for c in gl.static_range(V_CHUNKS):
                v_tile = v_s.index(v_stage * V_CHUNKS + c)
                v_tile = v_tile.reinterpret(dtype, [1, BLOCK_N, V_CHUNK], value.layout)
                at_v = [b, at, kv_head * V_DIM + c * V_CHUNK]
                tma.async_load(value, at_v, v_full.index(v_stage), v_tile)
            stage, phase = after(stage, phase, STAGES)
        tile = gl.atomic_add(counter, 1, sem="relaxed") + programs
        slot, slot_phase = after(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
    # a plan of no steps ends the consumers
    mbarrier.wait(work_empty.index(slot), slot_phase ^ 1)
    gl.inline_asm(
        send_tile_asm,
        "r,r,r,r,r,r,r,r,r,r,~{memory}",
        (work_s.index(slot), 0, 0, 0, 0, 0, 0, 0, 0, 0),
    )
    mbarrier.arrive(work_full.index(slot))


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    dq, stats, q_blocks, mask, mask_args, shared, scalars = args
    tiles_s, work_s, full, empty, work_bars = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    DO_REGISTERS: gl.constexpr = config.DO_REGISTERS
    SOFT_CAP: gl.constexpr = config.SOFT_CAP
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    lse2, delta = stats
    q_s, do_s, k_s, v_s = tiles_s
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    work_full, work_empty = work_bars
    mask_mode, mask_batch, q_len, kv_len, heads, scale, soft_cap = scalars
    padded = (q_len + 63) // 64 * 64
    scale2 = (soft_cap if SOFT_CAP else scale) * LOG2E
    dtype: gl.constexpr = dq.dtype
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // config.V_CHUNK
    V_STAGES: gl.constexpr = value_stages(V_DIM, BLOCK_N, STAGES)
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
    mbarrier.wait(work_full.index(0), 0)
    tile = receive_tile(work_s.index(0))
    row, head, b, start, steps, partial, full_begin, full_end, checked = tile
    while steps > 0:
        lanes_arrive(work_empty.index(slot))
        mask_b = gl.where(mask_batch > 1, b, 0)
        mask_row = mask_b.to(gl.int64) * q_len
        mask_key = mask_b.to(gl.int64) * kv_len
        kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos = mask
        mask_here = (
            kv_start + mask_row,
            kv_end + mask_row,
            q_ids + mask_row,
            kv_ids + mask_key,
            q_pos + position_row(mask_row, mask_mode),
            kv_pos + mask_key,
        )
        rows = row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        # rows past the end: lse2 +inf and delta 0 as of a row that attends nothing
        there = rows < q_len
        stat = (b.to(gl.int64) * heads + head) * padded + rows
        lse = gl.load(lse2 + stat, mask=there, other=float("inf"))
        dl = gl.load(delta + stat, mask=there, other=0.0)
        dq_sum = zeros(q_layout, QK_CHUNK, CHUNKS)
        mbarrier.wait(q_full.index(W), q_phase)
        q = left_chunks(q_s, W, CHUNKS)
        if DO_REGISTERS:  # half the reads of shared memory of its product
            do = (do_s.index(W).load(gl.DotOperandLayout(0, s_layout, 2)),)
        else:
            do = left_chunks(do_s, W, V_CHUNKS)
        if BLOCK_LISTS:
            first = 0
            last = partial
            listed, _, _ = list_of_rows(mask_args, mask_b, head, row, q_len, kv_len)
            head_mask = mask_of_head(mask_args, mask_b, head, q_len, kv_len)
        else:
            first, last = own_steps(
                q_blocks, mask_b, row // 64 + W, q_len, start, steps, partial, BLOCK_N
            )
            head_mask = ()
            stage, phase = skip_blocks(first, W, full, empty, stage, phase, V_STAGES, STAGES, 2)
        end = gl.where(partial == steps, last, steps)
        mbarrier.wait(k_full.index(stage), phase)
        s = scores(q, k_s, stage, zero, CHUNKS)
        s = warpgroup_mma_wait(0, deps=(s,))
        for part in gl.static_range(2):  # partial steps, then the full ones
            begin = first if part == 0 else gl.maximum(first, partial)
            stop = last if part == 0 else steps
            for i in range(begin, stop):
                v_stage, v_phase = place_of_values(stage, phase, V_STAGES, STAGES)
                if BLOCK_LISTS and part == 0:
                    at = gl.load(listed + i) * BLOCK_N
                mbarrier.wait(v_full.index(v_stage), v_phase)
                if V_DIM > 128:  # descriptors of tiles, hoisted out of the loop, would be spilled
                    own = opaque(stage * 0 + W)
                    q_left = left_chunks(q_s, own, CHUNKS)
                    do_left = left_chunks(do_s, own, V_CHUNKS)
                else:
                    q_left = left_chunks(
                        q_s, W + rematerialized_zero(i, config.REMATERIALIZE), CHUNKS
                    )
                    do_left = (
                        do
                        if DO_REGISTERS
                        else left_chunks(
                            do_s, W + rematerialized_zero(i, config.REMATERIALIZE), V_CHUNKS
                        )
                    )
                dp_token = scores(do_left, v_s, v_stage, zero, V_CHUNKS)
                if SOFT_CAP:
                    s = tanh_of_scores(s, scale / soft_cap, BLOCK_N)
                    dtanh = 1.0 - s * s  # the derivative of tanh
                if part == 0:
                    if not BLOCK_LISTS:
                        at = start + nth_step(i, steps, partial, full_begin, full_end) * BLOCK_N
                    s = masked(
                        s,
                        rows,
                        at,
                        mask_here,
                        checked,
                        mask_mode,
                        q_len,
                        kv_len,
                        head_mask,
                        BLOCK_N,
                        BLOCK_LISTS,
                    )
                p = gl.exp2(s * scale2 - gl.expand_dims(lse, 1))
                if SOFT_CAP and part == 0:  # the fade of a masked key may be NaN
                    p = gl.where(p == 0.0, 0.0, p * dtanh)
                elif SOFT_CAP:
                    p = p * dtanh
                dp = warpgroup_mma_wait(0, deps=(dp_token,))
                warp_arrive(v_empty.index(v_stage))
                ds = p * (dp - gl.expand_dims(dl, 1))
                if part == 0:  # P is 0 where masked, dP may be anything there
                    ds = gl.where(p == 0.0, 0.0, ds)
                ds_half = gl.convert_layout(ds.to(dtype), ds_layout)
                ping_pong_wait(W)
                dq_tokens = add_products(ds_half, k_s, stage, dq_sum, CHUNKS)
                old = stage
                stage, phase = after(stage, phase, STAGES)
                more = i + 1 < end
                if more:
                    mbarrier.wait(k_full.index(stage), phase)
                # after the last step the scores of this one, again: they are dropped
                s_token = scores(q_left, k_s, gl.where(more, stage, old), zero, CHUNKS)
                ping_pong_pass(W, 2)
                dq_sum = finished(dq_tokens, CHUNKS, CHUNKS)
                if more:
                    warp_arrive(k_empty.index(old))
                s = warpgroup_mma_wait(0, deps=(s_token,))
        warp_arrive(k_empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        if not BLOCK_LISTS:
            stage, phase = skip_blocks(
                steps - end, W, full, empty, stage, phase, V_STAGES, STAGES, 2
            )
        lo = gl.load(kv_start + mask_row + rows, mask=there, other=0)
        hi = gl.load(kv_end + mask_row + rows, mask=there, other=0)
        # of a NaN, too: it must reach the result
        attended = gl.where((hi > lo) & (lse != float("inf")), 1, 0)
        attended = gl.convert_layout(attended, gl.SliceLayout(1, q_layout))
        gl.barrier()
        for c in gl.static_range(CHUNKS):
            # select, not multiply: a row that attends nothing may have met garbage
            result = gl.where(gl.expand_dims(attended, 1) != 0, dq_sum[c] * scale, 0.0)
            q_s.index(W * CHUNKS + c).store(result.to(dtype))
        fence_async_shared()
        gl.barrier()
        for c in gl.static_range(CHUNKS):
            dq_tile = q_s.index(W * CHUNKS + c).reinterpret(dtype, [1, 64, QK_CHUNK], dq.layout)
            tma.async_store(dq, [b, row + W * 64, head * QK_DIM + c * QK_CHUNK], dq_tile)
        tma.store_wait(0)
        gl.barrier()
        warp_arrive(q_empty.index(W))
        slot, slot_phase = after(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
        mbarrier.wait(work_full.index(slot), slot_phase)
        row, head, b, start, steps, partial, full_begin, full_end, checked = receive_tile(
            work_s.index(slot)
        )
    if W == 0:
        ping_pong_wait(0)


@gluon.jit
def backward_dq_sm90(
    query, key, value, dout, dq, lse2, delta,
    kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, counter, block_mask,
    q_block_lists, scale, soft_cap, mask_mode, batch, mask_batch, block_mask_batch,
    block_mask_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DO_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
):  # fmt: skip
    """query, key, value, dout, dq are tensor maps (batch, length, heads * dim) with boxes of 64 or
    BLOCK_N rows of one head; lse2 and delta as backward_preprocess leaves them; counter holds 0 and
    lives as long as the launch. Options as of forward_sm90: `soft_cap` or block lists."""
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK,
        BLOCK_N=BLOCK_N, STAGES=STAGES, DO_REGISTERS=DO_REGISTERS, REMATERIALIZE=REMATERIALIZE,
        SOFT_CAP=soft_cap is not None, BLOCK_LISTS=block_mask is not None,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    get_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    V_STAGES: gl.constexpr = value_stages(V_DIM, BLOCK_N, STAGES)
    gl.static_assert(not (DO_REGISTERS and V_CHUNKS > 1), "cotangents in registers are one tile")
    qk_tile: gl.constexpr = get_layout([64, QK_CHUNK], dtype)
    v_tile: gl.constexpr = get_layout([64, V_CHUNK], dtype)
    tiles_s = (
        gl.allocate_shared_memory(dtype, [2 * CHUNKS, 64, QK_CHUNK], qk_tile),
        gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, 64, V_CHUNK], v_tile),
        gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, BLOCK_N, QK_CHUNK], qk_tile),
        gl.allocate_shared_memory(dtype, [V_STAGES * V_CHUNKS, BLOCK_N, V_CHUNK], v_tile),
    )
    work_s = gl.allocate_shared_memory(gl.int32, [2, 16], line)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], bar)
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for j in gl.static_range(STAGES):
        mbarrier.init(k_full.index(j), 1)
        if j < V_STAGES:
            mbarrier.init(v_full.index(j), 1)
        mbarrier.init(k_empty.index(j), 8)
        if j < V_STAGES:
            mbarrier.init(v_empty.index(j), 8)
    for j in gl.static_range(2):
        mbarrier.init(q_full.index(j), 1)
        mbarrier.init(q_empty.index(j), 4)
        mbarrier.init(work_full.index(j), 1)
        mbarrier.init(work_empty.index(j), 256)

    maps = (query, dout, key, value)
    stats = (lse2, delta)
    mask = (kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos)
    mask_args = (block_mask, q_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block)
    full = (q_full, k_full, v_full)
    empty = (q_empty, k_empty, v_empty)
    shared = (tiles_s, work_s, full, empty, (work_full, work_empty))
    sizes = (batch, mask_batch, q_len, kv_len, heads, kv_heads, gl.num_programs(0))
    if config.SOFT_CAP:
        scalars = (mask_mode, mask_batch, q_len, kv_len, heads, scale, soft_cap)
    else:
        scalars = (mask_mode, mask_batch, q_len, kv_len, heads, scale, scale)
    order = (q_order, q_blocks, counter)
    consumed = (dq, stats, q_blocks, mask, mask_args, shared, scalars)
    gl.warp_specialize(
        [
            (consume, (0, consumed, config)),
            (consume, (1, consumed, config)),
            (produce, (maps, order, mask_args, shared, sizes, config)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
