"""Backward attention on Hopper in Gluon: the same gradients as backward.py, its checked twin, in five
products instead of seven.

It runs between the two kernels of hopper_dq.py: `backward_prepare` makes delta and the base-2 LSE and
clears a float32 dQ; `backward_hopper` adds to it by the copy engine's bulk reduction while it sums dK
and dV of a tile of keys in registers; `backward_finish` scales dQ and rounds it.

A program of `backward_hopper` is 128 keys of one key/value head: two warp groups of 64 keys, and a
producer warp that streams blocks of ROWS query rows of the group's heads. Scores are transposed
(keys x rows), so that P^T and dS^T are left operands in registers. dS of both warp groups meets in
shared memory, and each computes half of dQ's columns (FlashAttention-3, arXiv 2407.08608, section
3.3), of the block before, so that a group does not wait for the other's dS of this block.
They take turns, by named barriers, at issuing dK, dQ and the next scores: the softmax of one runs
under the products of the other.

The float32 dQ lies in the order of the accumulator's registers, which only `backward_finish` undoes.
Its additions come in any order: dQ differs by rounding from run to run. hopper_rows.py has the
producer and the additions; dK and dV of head dims above 128 have files of their own, hopper_keys.py and hopper_wide.py.
"""

from hopper import (
    LOG2E,
    accumulator,
    named_barrier,
    nought,
    select_bits,
    warp_arrive,
)
from hopper_cap import tanh_of_scores
from hopper_listed import produce_listed
from hopper_map import bits_of_rows, blocks_of_lists, list_of_keys, map_of
from hopper_rows import (
    ROWS,
    add_staged,
    keys_read,
    mask_bits,
    next_head,
    nth_of_core,
    produce,
    rows_of_half,
    sum_rows,
    tests_of_tile,
    tile_of_program,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def turn_wait(W: gl.constexpr):
    """The warp groups take turns at issuing dK, dQ and the next scores: one's softmax runs under the other's products."""
    gl.inline_asm(named_barrier("sync", 4 + W, 256), "~{memory}", ())


@gluon.jit
def turn_pass(W: gl.constexpr):
    gl.inline_asm(named_barrier("arrive", 5 - W, 256), "~{memory}", ())


@gluon.jit
def step(
    W: gl.constexpr, sums, s, row, i, stage, phase, before, k_part, keys, dq_sum, mask, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, numbers, this_map,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, TURNS: gl.constexpr, DQ: gl.constexpr,
    MASKED: gl.constexpr, LIVE: gl.constexpr, CAPPED: gl.constexpr, MAPPED: gl.constexpr, ANEW: gl.constexpr,
):  # fmt: skip
    """One block of rows, the i-th: adds to dk and dv, hands on dS, adds dQ of the block `before`, makes the next scores.

    LIVE: there may be a pair of this warp group's keys and these rows.
    """
    dk_sum, dv_sum = sums
    q_s, k_s, v_s, do_s = tiles_s
    k_left = k_s.index(nought(i, ANEW)).slice(W * 64, 64, dim=0)
    v_left = v_s.index(W + nought(i, ANEW))
    lse_s, delta_s, lo_s, hi_s = lines_s
    _, q_full, q_empty, do_full, do_empty = bars
    ds_full, ds_empty = ds_bars
    scale, soft_cap = numbers[3:]
    scale2 = (soft_cap if CAPPED else scale) * LOG2E
    dtype: gl.constexpr = q_s.dtype
    PART: gl.constexpr = QK_DIM // 2
    CELLS: gl.constexpr = ROWS * PART
    s_layout: gl.constexpr = accumulator(ROWS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(V_DIM), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(QK_DIM), 2)
    zero = gl.zeros([64, ROWS], gl.float32, s_layout)
    zero_dq = gl.zeros([ROWS, PART], gl.float32, accumulator(PART))
    other = stage ^ 1
    if LIVE:
        lse = lse_s.index(stage).load(gl.SliceLayout(0, s_layout))
    mbarrier.wait(do_full.index(stage), phase)
    if LIVE:
        do_t = do_s.index(stage).permute((1, 0))
        dp_token = warpgroup_mma(v_left, do_t, zero, use_acc=False, is_async=True)
        if CAPPED:
            s = tanh_of_scores(s, scale / soft_cap, ROWS)
            fade = 1.0 - s * s  # the derivative of tanh
        if MASKED:
            bits = mask_bits(keys, row, lo_s.index(stage), hi_s.index(stage), mask, numbers)
            if MAPPED:
                bits = bits & bits_of_rows(this_map, keys, row, numbers[1])
            s = select_bits(s, bits, float("-inf"))
        p = gl.exp2(s * scale2 - lse[None, :])
        p_half = gl.convert_layout(p.to(dtype), p_layout)
        if CAPPED:
            p = p * fade
        dp = warpgroup_mma_wait(0, deps=(dp_token,))
        dv_token = warpgroup_mma(p_half, do_s.index(stage), dv_sum, is_async=True)
        dl = delta_s.index(stage).load(gl.SliceLayout(0, s_layout))
        ds32 = p * (dp - dl[None, :])
        if MASKED:
            ds32 = select_bits(ds32, bits, 0.0)
        ds = ds32.to(dtype)
    else:
        ds = gl.zeros([64, ROWS], dtype, s_layout)
    if DQ:
        free = phase ^ stage if DQ == 1 else phase
        mbarrier.wait(ds_empty.index(stage), free ^ 1)
        ds_s.index(stage).slice(W * 64, 64, dim=0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(stage))
    if TURNS:
        turn_wait(W)
    if LIVE:
        ds_half = gl.convert_layout(ds, ds_layout)
        dk_token = warpgroup_mma(ds_half, q_s.index(stage), dk_sum, is_async=True)
    if DQ == 1:
        mbarrier.wait(ds_full.index(other), phase)
        ds_t = ds_s.index(other).permute((1, 0))
        dq_token = warpgroup_mma(ds_t, k_part, zero_dq, use_acc=False, is_async=True)
        if LIVE:
            dv_sum, dk_sum = warpgroup_mma_wait(1, deps=(dv_token, dk_token))
        warp_arrive(do_empty.index(stage))
        warp_arrive(q_empty.index(stage))
    phase = phase ^ stage
    mbarrier.wait(q_full.index(other), phase)
    q_t = q_s.index(other).permute((1, 0))
    s_token = warpgroup_mma(k_left, q_t, zero, use_acc=False, is_async=True)
    if TURNS:
        turn_pass(W)
    if DQ == 1:
        dq = warpgroup_mma_wait(1, deps=(dq_token,))
        warp_arrive(ds_empty.index(other))
        add_staged(dq, dq_sum + before.to(gl.int64) * CELLS, dq_s.index(W), CELLS)
    else:
        if LIVE:
            dv_sum, dk_sum = warpgroup_mma_wait(1, deps=(dv_token, dk_token))
        warp_arrive(do_empty.index(stage))
        warp_arrive(q_empty.index(stage))
    s = warpgroup_mma_wait(0, deps=(s_token,))
    return dk_sum, dv_sum, s, phase


@gluon.jit
def consume(
    W: gl.constexpr, grads, mask, own_blocks, listing, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, place, range_, numbers,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, TURNS: gl.constexpr, SKIP: gl.constexpr,
    DQ: gl.constexpr, CAPPED: gl.constexpr, MAPPED: gl.constexpr, ANEW: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    dk, dv, dq_sum = grads
    q_s, k_s, v_s, _ = tiles_s
    kv_full, q_full, _, _, _ = bars
    ds_full, _ = ds_bars
    b, first_key, kv_head, group, bh, _mask_row, padded = place
    start, steps, edges, core_begin, core_end = range_
    _element_test, _q_len, kv_len, scale, _soft_cap = numbers
    # of dQ this warp group makes half of the columns
    PART: gl.constexpr = QK_DIM // 2
    CELLS: gl.constexpr = ROWS * PART
    row_blocks = padded // ROWS
    dtype: gl.constexpr = dk.dtype
    s_layout: gl.constexpr = accumulator(ROWS)
    keys = first_key + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    dv_sum = gl.zeros([64, V_DIM], gl.float32, accumulator(V_DIM))
    dk_sum = gl.zeros([64, QK_DIM], gl.float32, accumulator(QK_DIM))
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    k = k_s.index(0).slice(W * 64, 64, dim=0)
    k_part = k_s.index(0).slice(W * PART, PART, dim=1)
    v = v_s.index(W)
    if steps > 0:
        if SKIP:
            own_start, own_end = rows_of_half(own_blocks, first_key // 64 + W, kv_len)
        if TURNS and W == 1:
            turn_pass(1)
        zero = gl.zeros([64, ROWS], gl.float32, s_layout)
        mbarrier.wait(q_full.index(0), 0)
        s = warpgroup_mma(k, q_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if DQ == 1:  # "block -1": adds zero to dQ
            ds_s.index(1).slice(W * 64, 64, dim=0).store(gl.zeros([64, ROWS], dtype, s_layout))
            fence_async_shared()
            mbarrier.arrive(ds_full.index(1))
        stage = 0
        phase = 0
        if MAPPED:
            block_map, mask_b, q_len, _kv_len = listing
            for g in range(0, group):
                head = kv_head * group + g
                listed, masked, core = list_of_keys(
                    block_map, mask_b, head, first_key, q_len, kv_len
                )
                this_map = map_of(block_map, mask_b, head, q_len, kv_len)
                for part in gl.static_range(2):
                    for i in range(0, masked if part == 0 else core):
                        row = gl.load(listed + i) * ROWS if part == 0 else 0
                        dk_sum, dv_sum, s, phase = step(W, (dk_sum, dv_sum), s, row, i, stage, phase, 0, k_part, keys, dq_sum, mask, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, numbers, this_map, QK_DIM, V_DIM, TURNS, DQ, part == 0, True, CAPPED, True, ANEW)  # fmt: skip
                        stage = stage ^ 1
        # of the block before; zeros are added to the first one
        before = (bh * row_blocks + start // ROWS) * 2 + W
        # masked blocks of every head, then the core
        for part in gl.static_range(0 if MAPPED else 2):
            count = edges if part == 0 else core_end - core_begin
            n = 0
            g = 0
            for i in range(0, count * group):
                at = (
                    gl.where(n < core_begin, n, n + core_end - core_begin)
                    if part == 0
                    else nth_of_core(n, core_begin, core_end, DOWN)
                )
                row = start + at * ROWS
                if part == 1:
                    dk_sum, dv_sum, s, phase = step(W, (dk_sum, dv_sum), s, row, i, stage, phase, before, k_part, keys, dq_sum, mask, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, numbers, (), QK_DIM, V_DIM, TURNS, DQ, False, True, CAPPED, False, ANEW)  # fmt: skip
                elif SKIP:
                    if (row < own_end) & (row + ROWS > own_start):
                        dk_sum, dv_sum, s, phase = step(W, (dk_sum, dv_sum), s, row, i, stage, phase, before, k_part, keys, dq_sum, mask, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, numbers, (), QK_DIM, V_DIM, TURNS, DQ, True, True, CAPPED, False, ANEW)  # fmt: skip
                    else:
                        dk_sum, dv_sum, s, phase = step(W, (dk_sum, dv_sum), s, row, i, stage, phase, before, k_part, keys, dq_sum, mask, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, numbers, (), QK_DIM, V_DIM, TURNS, DQ, True, False, CAPPED, False, ANEW)  # fmt: skip
                else:
                    dk_sum, dv_sum, s, phase = step(W, (dk_sum, dv_sum), s, row, i, stage, phase, before, k_part, keys, dq_sum, mask, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, numbers, (), QK_DIM, V_DIM, TURNS, DQ, True, True, CAPPED, False, ANEW)  # fmt: skip
                stage = stage ^ 1
                block = row // ROWS
                before = ((bh + g) * row_blocks + block) * 2 + W
                if DOWN == 2:
                    n, g = next_head(n, g, count, group)
                else:
                    n += 1
                    wrap = n == count
                    n = gl.where(wrap, 0, n)
                    g = gl.where(wrap, g + 1, g)
        if DQ == 1:
            mbarrier.wait(ds_full.index(stage ^ 1), phase)
            ds_t = ds_s.index(stage ^ 1).permute((1, 0))
            zero_dq = gl.zeros([ROWS, PART], gl.float32, accumulator(PART))
            dq = warpgroup_mma(ds_t, k_part, zero_dq, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            add_staged(dq, dq_sum + before.to(gl.int64) * CELLS, dq_s.index(W), CELLS)
            tma.store_wait(0)
        if TURNS and W == 0:
            turn_wait(0)
    # other warp groups may still read this one's keys for their part of dQ
    keys_read("sync", DQ)
    k.store((dk_sum * scale).to(dtype))
    v.store(dv_sum.to(dtype))
    fence_async_shared()
    gl.barrier()
    dk_tile = k_s.index(0).reinterpret(dtype, [1, 128, QK_DIM], dk.layout).slice(W * 64, 64, dim=1)
    tma.async_store(dk, [b, first_key + W * 64, kv_head * QK_DIM], dk_tile)
    dv_tile = v.reinterpret(dtype, [1, 64, V_DIM], dv.layout)
    tma.async_store(dv, [b, first_key + W * 64, kv_head * V_DIM], dv_tile)
    tma.store_wait(0)


@gluon.jit
def tile_of_keys(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    block_map, scale, soft_cap, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    TURNS: gl.constexpr, SKIP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    DQ: gl.constexpr, CAPPED: gl.constexpr, MAPPED: gl.constexpr, ANEW: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """One program of the kernels below."""
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
        dq_s = gl.allocate_shared_memory(gl.float32, [2, QK_DIM * DQ, 32], linear)
    else:  # never touched
        ds_s = q_s
        dq_s = lse_s
    delta_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], line)
    lo_s = gl.allocate_shared_memory(gl.int32, [2, ROWS], line)
    hi_s = gl.allocate_shared_memory(gl.int32, [2, ROWS], line)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(2):
        mbarrier.init(kv_full.index(j), 1)
        mbarrier.init(q_full.index(j), 1)
        mbarrier.init(do_full.index(j), 1)
        mbarrier.init(ds_full.index(j), 2)
        mbarrier.init(ds_empty.index(j), 4 if DQ == 2 else 8)
        mbarrier.init(q_empty.index(j), 8)
        mbarrier.init(do_empty.index(j), 8)

    orders = (q_blocks, kv_blocks, kv_order)
    pointers = (q_ids, kv_ids, q_pos, kv_pos)
    sizes = (element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads)
    place, range_, mask, own_blocks = tile_of_program(orders, pointers, sizes, 128)

    if MAPPED:
        mask_b = gl.where(mask_batch > 1, place[0], 0)
        listing = (block_map, mask_b, q_len, kv_len)
        range_ = (0, blocks_of_lists(listing, place), 0, 0, 0)
    else:
        listing = ()
    maps = (query, key, value, dout)
    lines = (lse2, delta, lo, hi)
    grads = (dk, dv, dq_sum)
    tiles_s = (q_s, k_s, v_s, do_s)
    lines_s = (lse_s, delta_s, lo_s, hi_s)
    bars = (kv_full, q_full, q_empty, do_full, do_empty)
    ds_bars = (ds_full, ds_empty)
    if DQ == 1:  # 1 to 2 % there, nothing or less in the others
        flags = mask[4]
        element_test = tests_of_tile(flags, element_test, range_[0], range_[1], (q_len + 63) // 64)
    numbers = (element_test, q_len, kv_len, scale, soft_cap)
    if MAPPED:
        gl.warp_specialize(
            [
                (consume, (0, grads, mask, own_blocks, listing, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, place, range_, numbers, QK_DIM, V_DIM, TURNS, SKIP, DQ, CAPPED, MAPPED, ANEW, DOWN)),
                (consume, (1, grads, mask, own_blocks, listing, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, place, range_, numbers, QK_DIM, V_DIM, TURNS, SKIP, DQ, CAPPED, MAPPED, ANEW, DOWN)),
                (produce_listed, (maps, lines, tiles_s, lines_s, bars, place, listing, QK_DIM, V_DIM, QK_CHUNK)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    elif DQ == 2:
        gl.warp_specialize(
            [
                (consume, (0, grads, mask, own_blocks, listing, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, place, range_, numbers, QK_DIM, V_DIM, TURNS, SKIP, DQ, CAPPED, MAPPED, ANEW, DOWN)),
                (consume, (1, grads, mask, own_blocks, listing, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, place, range_, numbers, QK_DIM, V_DIM, TURNS, SKIP, DQ, CAPPED, MAPPED, ANEW, DOWN)),
                (sum_rows, (dq_sum, k_s.index(0), ds_s, dq_s, kv_full, ds_bars, place, range_, QK_DIM, DQ, DOWN)),
                (produce, (maps, lines, tiles_s, lines_s, bars, place, range_, QK_DIM, V_DIM, QK_CHUNK, 2, DOWN)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, 512 - 2 * CONSUMER_REGISTERS - PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, grads, mask, own_blocks, listing, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, place, range_, numbers, QK_DIM, V_DIM, TURNS, SKIP, DQ, CAPPED, MAPPED, ANEW, DOWN)),
                (consume, (1, grads, mask, own_blocks, listing, tiles_s, lines_s, ds_s, dq_s, bars, ds_bars, place, range_, numbers, QK_DIM, V_DIM, TURNS, SKIP, DQ, CAPPED, MAPPED, ANEW, DOWN)),
                (produce, (maps, lines, tiles_s, lines_s, bars, place, range_, QK_DIM, V_DIM, QK_CHUNK, 2, DOWN)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def backward_hopper(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    TURNS: gl.constexpr, SKIP: gl.constexpr, DQ: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ANEW: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """Tensor maps: query, key, value, dout, dk, dv (batch, length, heads * dim); lse2, delta, lo, hi as one row each."""
    tile_of_keys(
        query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
        q_blocks, kv_blocks, kv_order,
        (), scale, scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
        QK_DIM, V_DIM, QK_CHUNK, TURNS, SKIP, CONSUMER_REGISTERS, PRODUCER_REGISTERS, DQ, False, False, ANEW, DOWN,
    )  # fmt: skip


@gluon.jit
def backward_dkdv_hopper(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    TURNS: gl.constexpr, SKIP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ANEW: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """`backward_hopper` without dQ, for deterministic gradients: hopper_queries.py makes that."""
    tile_of_keys(
        query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, q_ids, kv_ids, q_pos, kv_pos,
        q_blocks, kv_blocks, kv_order,
        (), scale, scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
        QK_DIM, V_DIM, QK_CHUNK, TURNS, SKIP, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 0, False, False, ANEW, DOWN,
    )  # fmt: skip


@gluon.jit
def backward_hopper_capped(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, soft_cap, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    TURNS: gl.constexpr, SKIP: gl.constexpr, DQ: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ANEW: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """`backward_hopper` with a soft cap (hopper_cap.py): the same as general_backward.py, its checked twin."""
    tile_of_keys(
        query, key, value, dout, lse2, delta, lo, hi, dk, dv, dq_sum, q_ids, kv_ids, q_pos, kv_pos,
        q_blocks, kv_blocks, kv_order,
        (), scale, soft_cap, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
        QK_DIM, V_DIM, QK_CHUNK, TURNS, SKIP, CONSUMER_REGISTERS, PRODUCER_REGISTERS, DQ, True, False, ANEW, DOWN,
    )  # fmt: skip


@gluon.jit
def backward_dkdv_hopper_capped(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order,
    scale, soft_cap, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    TURNS: gl.constexpr, SKIP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ANEW: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """Likewise `backward_dkdv_hopper`."""
    tile_of_keys(
        query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, q_ids, kv_ids, q_pos, kv_pos,
        q_blocks, kv_blocks, kv_order,
        (), scale, soft_cap, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
        QK_DIM, V_DIM, QK_CHUNK, TURNS, SKIP, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 0, True, False, ANEW, DOWN,
    )  # fmt: skip


@gluon.jit
def backward_dkdv_hopper_mapped(
    query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, kv_blocks, kv_order, map_bits, kv_entries,
    scale, element_test, batch, mask_batch, map_batch, map_heads, q_block, kv_block, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr,
    TURNS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ANEW: gl.constexpr,
):  # fmt: skip
    """`backward_dkdv_hopper` with a map of blocks (hopper_map.py): the same as general_backward.py, its checked twin."""
    block_map = (map_bits, kv_entries, map_batch, map_heads, q_block, kv_block)
    tile_of_keys(
        query, key, value, dout, lse2, delta, lo, hi, dk, dv, q_ids, q_ids, kv_ids, q_pos, kv_pos,
        q_blocks, kv_blocks, kv_order,
        block_map, scale, scale, element_test, batch, mask_batch, q_len, kv_len, heads, kv_heads,
        QK_DIM, V_DIM, QK_CHUNK, TURNS, 0, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 0, False, True, ANEW, 0,
    )  # fmt: skip
