"""What a warp group of the Hopper forward (sm90/fwd.py) computes: 64 rows of every tile that the
producer names."""

from sm90.alibi import with_bias
from sm90.block_lists import list_of_rows, mask_of_head
from sm90.chunked_mma import add_products, finished, zeros
from sm90.common import (
    LN2,
    LOG2E,
    accumulator,
    lanes_arrive,
    named_barrier,
    nth_step,
    own_steps,
    position_row,
    quad_sum_asm,
    rematerialized_zero,
    warp_arrive,
)
from sm90.pipeline import (
    after,
    before,
    masked,
    ping_pong_pass,
    ping_pong_wait,
    receive_tile,
    skip_blocks,
)
from sm90.soft_cap import tanh_of_scores
from sm90.softmax import half_name, rescale, softmax, unpack
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def query_slots(chunks):
    """Chunks of a warp group's queries, with empty ones up to a power of two: the output may take
    their place."""
    while hasattr(chunks, "value"):
        chunks = chunks.value
    return 1 << (int(chunks) - 1).bit_length()


@gluon.jit
def scores(q_s, k_s, w, stage, zero, CHUNKS: gl.constexpr, SLOTS: gl.constexpr):
    """q k^T, started."""
    k_t = k_s.index(stage * CHUNKS).permute((1, 0))
    s = warpgroup_mma(q_s.index(w * SLOTS), k_t, zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, CHUNKS):
        k_t = k_s.index(stage * CHUNKS + c).permute((1, 0))
        s = warpgroup_mma(q_s.index(w * SLOTS + c), k_t, s, is_async=True)
    return s


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    results, q_blocks, mask, mask_args, shared, scalars = args
    out, lse, row_max = results
    tiles_s, o_s, work_s, full, empty, work_bars = shared
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    WARP_GROUPS: gl.constexpr = config.WARP_GROUPS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    OUT_IN_QUERY: gl.constexpr = config.OUT_IN_QUERY
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    q_s, k_s, v_s = tiles_s
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    work_full, work_empty = work_bars
    mask_mode, mask_batch, q_len, kv_len, heads, scale2, first_scale, slopes = scalars
    dtype: gl.constexpr = out.dtype
    half: gl.constexpr = half_name(dtype)
    GROWTH: gl.constexpr = 0 if config.ROW_MAX else 8
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    SLOTS: gl.constexpr = query_slots(CHUNKS)
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_PARTS: gl.constexpr = config.V_PARTS
    V_CHUNKS: gl.constexpr = V_DIM // V_PARTS // V_CHUNK
    o_layout: gl.constexpr = accumulator(V_CHUNK)
    OWN_O: gl.constexpr = W * (SLOTS * QK_CHUNK // V_CHUNK if OUT_IN_QUERY else V_CHUNKS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    if W == 0:
        gl.inline_asm(named_barrier("arrive", 0, 256), "", (), ())
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    mbarrier.wait(work_full.index(0), 0)
    row, head_part, b, start, steps, partial, full_begin, full_end, checked = receive_tile(
        work_s.index(0)
    )
    while steps > 0:
        head = head_part // V_PARTS
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
        acc = zeros(o_layout, V_CHUNK, V_CHUNKS)
        if config.ALIBI:
            slope2 = gl.load(slopes + head) * -LOG2E
        mbarrier.wait(q_full.index(W), q_phase)

        if BLOCK_LISTS:
            first = 0
            last = partial
            listed, _, _ = list_of_rows(mask_args, mask_b, head, row, q_len, kv_len)
            head_mask = mask_of_head(mask_args, mask_b, head, q_len, kv_len)
            at = gl.load(listed) * BLOCK_N
        else:
            first, last = own_steps(
                q_blocks, mask_b, row // 64 + W, q_len, start, steps, partial, BLOCK_N
            )
            head_mask = ()
            stage, phase = skip_blocks(
                first, W, full, empty, stage, phase, STAGES, STAGES, WARP_GROUPS
            )
        # the first step has no second product to run beside
        mbarrier.wait(k_full.index(stage), phase)
        ping_pong_wait(W)
        s = scores(q_s, k_s, W, stage, zero, CHUNKS, SLOTS)
        ping_pong_pass(W, WARP_GROUPS)
        s = warpgroup_mma_wait(0, deps=(s,))
        warp_arrive(k_empty.index(stage))
        if config.SOFT_CAP:
            s = tanh_of_scores(s, first_scale, BLOCK_N)
        if not BLOCK_LISTS:
            at = start + nth_step(first, steps, partial, full_begin, full_end) * BLOCK_N
        if config.ALIBI:
            s = with_bias(s, rows, at, first_scale, slope2, BLOCK_N)
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
        m = gl.full([64], -3e38, gl.float32, gl.SliceLayout(1, s_layout))
        l = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        p, m, l, alpha = softmax(s, m, l, scale2, BLOCK_N, half, GROWTH)
        stage, phase = after(stage, phase, STAGES)
        for part in gl.static_range(2):  # partial steps, then the full ones
            begin = first + 1 if part == 0 else gl.maximum(partial, first + 1)
            stop = last if part == 0 else steps
            for i in range(begin, stop):
                old, old_phase = before(stage, phase, STAGES)
                if BLOCK_LISTS and part == 0:
                    at = gl.load(listed + i) * BLOCK_N
                mbarrier.wait(k_full.index(stage), phase)
                ping_pong_wait(W)
                s_token = scores(
                    q_s,
                    k_s,
                    W + rematerialized_zero(i, config.REMATERIALIZE),
                    stage,
                    zero,
                    CHUNKS,
                    SLOTS,
                )
                mbarrier.wait(v_full.index(old), old_phase)
                p_half = unpack(p, BLOCK_N, p_layout, dtype)
                acc_tokens = add_products(p_half, v_s, old, acc, V_CHUNKS)
                ping_pong_pass(W, WARP_GROUPS)
                s = warpgroup_mma_wait(V_CHUNKS, deps=(s_token,))
                warp_arrive(k_empty.index(stage))
                if config.SOFT_CAP:
                    s = tanh_of_scores(s, first_scale, BLOCK_N)
                if not BLOCK_LISTS and (config.ALIBI or part == 0):
                    at = start + nth_step(i, steps, partial, full_begin, full_end) * BLOCK_N
                if config.ALIBI:
                    s = with_bias(s, rows, at, first_scale, slope2, BLOCK_N)
                if part == 0:
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
                p, m, l, alpha = softmax(s, m, l, scale2, BLOCK_N, half, GROWTH)
                acc = finished(acc_tokens, 0, V_CHUNKS)
                warp_arrive(v_empty.index(old))
                acc = rescale(acc, alpha, V_CHUNK, V_CHUNKS)
                stage, phase = after(stage, phase, STAGES)
        if not OUT_IN_QUERY:
            warp_arrive(q_empty.index(W))
        old, old_phase = before(stage, phase, STAGES)
        mbarrier.wait(v_full.index(old), old_phase)
        p_half = unpack(p, BLOCK_N, p_layout, dtype)
        acc_tokens = add_products(p_half, v_s, old, acc, V_CHUNKS)
        l = gl.inline_asm(quad_sum_asm, ("=&f", "f"), (l,), l.type, is_pure=True)
        there = rows < q_len
        lo = gl.load(kv_start + mask_row + rows, mask=there, other=0)
        hi = gl.load(kv_end + mask_row + rows, mask=there, other=0)
        attended = (l != 0.0) & (hi > lo)  # a NaN is attended: it must reach the result
        lse_row = lse + (b.to(gl.int64) * heads + head) * q_len
        natural = gl.where(attended, (m + gl.log2(l)) * LN2, float("-inf"))
        gl.store(lse_row + rows, natural, mask=there)
        if config.ROW_MAX:
            of_row = row_max + (b.to(gl.int64) * heads + head) * q_len + rows
            gl.store(of_row, gl.where(attended, m * LN2, float("-inf")), mask=there)
        inverse = gl.where(attended, 1.0 / l, 0.0)
        tma.store_wait(0)  # the tile before has left o_s
        acc = finished(acc_tokens, 0, V_CHUNKS)
        warp_arrive(v_empty.index(old))
        if not BLOCK_LISTS:
            stage, phase = skip_blocks(
                partial - last, W, full, empty, stage, phase, STAGES, STAGES, WARP_GROUPS
            )
        inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o_layout)), 1)
        # select, not multiply: a row that attends nothing may have met garbage in the full blocks
        outputs = ()
        for c in gl.static_range(V_CHUNKS):
            outputs = outputs + (gl.where(inverse != 0.0, acc[c] * inverse, 0.0),)  # noqa: RUF005
        gl.barrier()
        for c in gl.static_range(V_CHUNKS):
            o_s.index(OWN_O + c).store(outputs[c].to(dtype))
        fence_async_shared()
        gl.barrier()
        for c in gl.static_range(V_CHUNKS):
            o_tile = o_s.index(OWN_O + c).reinterpret(dtype, [1, 64, V_CHUNK], out.layout)
            column = head_part * (V_DIM // V_PARTS) + c * V_CHUNK
            tma.async_store(out, [b, row + W * 64, column], o_tile)
        if OUT_IN_QUERY:
            tma.store_wait(0)
            gl.barrier()
            warp_arrive(q_empty.index(W))
        slot, slot_phase = after(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
        mbarrier.wait(work_full.index(slot), slot_phase)
        row, head_part, b, start, steps, partial, full_begin, full_end, checked = receive_tile(
            work_s.index(slot)
        )
    tma.store_wait(0)
