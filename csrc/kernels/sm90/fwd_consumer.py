"""Consumer warp group of the Hopper forward (sm90/fwd.py): computes 64 rows of every tile that the
producer sends."""

from common.kv_ranges import LN2, LOG2E
from common.sinks import add_sink, log_sum_exp, sink_of
from common.soft_cap import tanh_of_scores
from sm90.alibi import add_alibi
from sm90.args import Map, Number, RowTileArgs
from sm90.block_lists import list_of_rows, mask_of_head
from sm90.chunked_mma import first_columns, wait_products, width, zeros
from sm90.common import (
    accumulator,
    lanes_arrive,
    named_barrier,
    own_steps,
    quad_sum_asm,
    rematerialized_zero,
    wait,
    warp_arrive,
)
from sm90.dropout import keep_pairs, row_keep_bits, row_numbers, stream_of_head
from sm90.pipeline import (
    apply_mask,
    mask_of_batch_row,
    next_stage,
    ping_pong_pass,
    ping_pong_wait,
    previous_stage,
    ranges_of_rows,
    receive_tile,
    skip_blocks,
)
from sm90.softmax import LEAST, half_name, rescale, softmax, unpack
from sm90.tile_store import start_store
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def query_slots(chunks):
    """Chunks reserved for a warp group's queries, rounded up to a power of two: the output may use
    the same memory."""
    return 1 << (chunks - 1).bit_length()


@gluon.aggregate
class ForwardArgs(RowTileArgs):
    """first_scale: factor of the scores in a soft cap, ALiBi or a sum with a bias array. scale2:
    factor of the logits in the softmax, which is in base 2; with a bias array, factor of their
    differences from the maximum."""

    out: Map
    lse: Number
    row_max: Number
    sinks: Number
    sink_batch: Number
    slopes: Number
    first_scale: Number
    scale2: Number


@gluon.jit
def q_stage(W: gl.constexpr, slot, config: gl.constexpr):
    """Where a warp group's queries are. With Q_STAGES 2, those of a tile's slot."""
    if config.Q_STAGES == 1:
        stage = W
    else:
        gl.static_assert(not config.OUT_IN_QUERY)
        stage = slot * config.WARP_GROUPS + W
    return stage


@gluon.jit
def columns_of(tiles_s, at, c: gl.constexpr, config: gl.constexpr):
    """The c-th chunk of queries or keys, which is the at-th of tiles_s."""
    return first_columns(tiles_s.index(at), width(c, config.QK_COLUMNS, config.QK_CHUNK))


@gluon.jit
def scores(q_s, k_s, w, stage, zero, config: gl.constexpr):
    """Starts q k^T. As chunked_mma.scores, except that the first key tile comes before the queries:
    at head dim 512, the other order would spill more."""
    CHUNKS: gl.constexpr = config.CHUNKS
    SLOTS: gl.constexpr = config.SLOTS
    k_t = k_s.index(stage * CHUNKS).permute((1, 0))
    s = warpgroup_mma(q_s.index(w * SLOTS), k_t, zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, CHUNKS):
        q = columns_of(q_s, w * SLOTS + c, c, config)
        k = columns_of(k_s, stage * CHUNKS + c, c, config)
        s = warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def add_products(p, v_s, at, sums, BLOCK_N: gl.constexpr, dtype: gl.constexpr):
    """Starts sums + P V. Like chunked_mma.add_products, for P in pairs of 16 bits."""
    CHUNKS: gl.constexpr = len(sums)
    tokens = ()
    for c in gl.static_range(CHUNKS):
        tile = first_columns(v_s.index(at * CHUNKS + c), sums[c].shape[1])
        left = unpack(p, BLOCK_N, gl.DotOperandLayout(0, sums[c].type.layout, 2), dtype)
        tokens = tokens + (warpgroup_mma(left, tile, sums[c], is_async=True),)  # noqa: RUF005
    return tokens


@gluon.jit
def rescaled(sums, alpha):
    CHUNKS: gl.constexpr = len(sums)
    FIRST: gl.constexpr = sums[0].shape[1]
    LAST: gl.constexpr = sums[CHUNKS - 1].shape[1]
    if FIRST == LAST:
        sums = rescale(sums, alpha, FIRST, CHUNKS)
    else:
        gl.static_assert(CHUNKS == 2)
        sums = rescale((sums[0],), alpha, FIRST, 1) + rescale((sums[1],), alpha, LAST, 1)
    return sums


@gluon.jit
def add_bias_tile(s, bias_s, W: gl.constexpr, stage, scale, config: gl.constexpr):
    """Logits in base e: s * scale plus the bias tile that was loaded with the keys."""
    tile = bias_s.index(stage * config.WARP_GROUPS + W).load(accumulator(config.BLOCK_N))
    s = s * scale + tile.to(gl.float32)
    fence_async_shared()  # else an arrival can overtake the loads, and TMA overwrites the tile
    return s


@gluon.jit
def normalized(chunk, inverse):
    """chunk * inverse, or 0 where `inverse` is negative, in rows that attend to nothing. They may
    have summed garbage in full steps."""
    factor = gl.convert_layout(inverse, gl.SliceLayout(1, chunk.type.layout))
    factor = gl.expand_dims(factor, 1)
    return gl.where(factor < 0.0, 0.0, chunk * factor)


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    shared = args.shared
    scalars = args.scalars
    out = args.out
    q_len = scalars.q_len
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    dtype: gl.constexpr = out.dtype
    half: gl.constexpr = half_name(dtype)
    GROWTH: gl.constexpr = 0 if config.ROW_MAX or config.BIAS else 8
    LOWEST: gl.constexpr = LEAST if config.BIAS else -3e38
    LOOPS: gl.constexpr = 1 if config.SCHEDULER else 2
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    FIRST_O: gl.constexpr = W * (
        config.SLOTS * config.QK_CHUNK // V_CHUNK if config.OUT_IN_QUERY else V_CHUNKS
    )
    if W == 0 and config.WARP_GROUPS > 1:
        gl.inline_asm(named_barrier("arrive", 0, 256), "", (), ())
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    tile = receive_tile(shared, 0, 0)
    while tile.kv_range.steps > 0:
        kv_range = tile.kv_range
        steps = kv_range.steps
        partial = kv_range.partial
        head = tile.head_part // config.V_PARTS
        lanes_arrive(shared.work_empty.index(slot))
        mask_b = gl.where(scalars.mask_batch > 1, tile.b, 0)
        mask = mask_of_batch_row(args.mask, mask_b, scalars)
        rows = tile.row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        acc = zeros(config.V_COLUMNS // config.V_PARTS, V_CHUNK)
        if config.ALIBI:
            slope2 = gl.load(args.slopes + head) * -LOG2E
        if config.DROPOUT:
            numbers = row_numbers(args.dropout, tile.b, rows, q_len)
            stream = stream_of_head(args.dropout, tile.b, scalars.heads, head)
        q = q_stage(W, slot, config)
        phase_of_rows = q_phase if config.Q_STAGES == 1 else slot_phase
        ranges = None
        if config.EARLY:
            ranges = ranges_of_rows(rows, mask, q_len)
        else:
            wait(shared.q_full.index(q), phase_of_rows, config.TOGETHER)

        if BLOCK_LISTS:
            first = 0
            last = partial
            listed, _, _ = list_of_rows(args.blocks, scalars, mask_b, head, tile.row)
            head_mask = mask_of_head(args.blocks, scalars, mask_b, head)
            at = gl.load(listed) * BLOCK_N
        elif config.EARLY and config.WARP_GROUPS == 1:  # the steps of the tile
            first = 0
            last = partial
            head_mask = ()
        else:
            first, last = own_steps(
                args.q_blocks, mask_b, tile.row // 64 + W, q_len, kv_range.start, steps, partial,
                BLOCK_N,
            )  # fmt: skip
            head_mask = ()
            stage, phase = skip_blocks(first, W, shared, stage, phase, config)
        # the first step has no second product: there is no previous P
        if config.EARLY:
            wait(shared.q_full.index(q), phase_of_rows, config.TOGETHER)
        wait(shared.k_full.index(stage), phase, config.TOGETHER)
        ping_pong_wait(W, config.WARP_GROUPS)
        s = scores(shared.q_s, shared.k_s, q, stage, zero, config)
        ping_pong_pass(W, config.WARP_GROUPS)
        if config.DROPOUT:
            keep = row_keep_bits(numbers, stream, kv_range.nth(first, BLOCK_N), args, BLOCK_N)
        s = warpgroup_mma_wait(0, deps=(s,))
        if config.BIAS:
            s = add_bias_tile(s, shared.bias_s, W, stage, args.first_scale, config)
        warp_arrive(shared.k_empty.index(stage))
        if config.SOFT_CAP:
            s = tanh_of_scores(s, args.first_scale, BLOCK_N)
        if not BLOCK_LISTS:
            at = kv_range.nth(first, BLOCK_N)
        if config.ALIBI:
            s = add_alibi(s, rows, at, args.first_scale, slope2, BLOCK_N)
        if config.BRANCH:  # in calls of few steps, this one is often full
            if first < partial:
                s = apply_mask(s, rows, at, mask, tile.checked, scalars, head_mask, config, ranges)
        else:
            s = apply_mask(s, rows, at, mask, tile.checked, scalars, head_mask, config, ranges)
        m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, s_layout))
        l = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        p, m, l, alpha = softmax(s, m, l, args.scale2, BLOCK_N, half, GROWTH, config.BIAS)
        if config.DROPOUT:
            p = keep_pairs(p, keep)
        stage, phase = next_stage(stage, phase, config.STAGES)
        # partial steps, then full steps; or all in one loop, which is shorter code
        for part in gl.static_range(LOOPS):
            begin = first + 1 if part == 0 else gl.maximum(partial, first + 1)
            stop = last if part + 1 < LOOPS else steps
            for i in range(begin, stop):
                old, old_phase = previous_stage(stage, phase, config.STAGES)
                if BLOCK_LISTS and part == 0:
                    at = gl.load(listed + i) * BLOCK_N
                wait(shared.k_full.index(stage), phase, config.TOGETHER)
                ping_pong_wait(W, config.WARP_GROUPS)
                w = q + rematerialized_zero(i, config.REMATERIALIZE)
                s_token = scores(shared.q_s, shared.k_s, w, stage, zero, config)
                wait(shared.v_full.index(old), old_phase, config.TOGETHER)
                acc_tokens = add_products(p, shared.v_s, old, acc, BLOCK_N, dtype)
                ping_pong_pass(W, config.WARP_GROUPS)
                if config.DROPOUT:
                    keep = row_keep_bits(numbers, stream, kv_range.nth(i, BLOCK_N), args, BLOCK_N)
                s = warpgroup_mma_wait(V_CHUNKS, deps=(s_token,))
                if config.BIAS:
                    s = add_bias_tile(s, shared.bias_s, W, stage, args.first_scale, config)
                warp_arrive(shared.k_empty.index(stage))
                if config.SOFT_CAP:
                    s = tanh_of_scores(s, args.first_scale, BLOCK_N)
                if not BLOCK_LISTS and LOOPS == 2 and (config.ALIBI or part == 0):
                    at = kv_range.nth(i, BLOCK_N)
                if config.ALIBI:
                    s = add_alibi(s, rows, at, args.first_scale, slope2, BLOCK_N)
                if LOOPS == 1:
                    if i < last:
                        at = kv_range.nth(i, BLOCK_N)
                        s = apply_mask(
                            s, rows, at, mask, tile.checked, scalars, head_mask, config, ranges
                        )
                elif part == 0:
                    s = apply_mask(
                        s, rows, at, mask, tile.checked, scalars, head_mask, config, ranges
                    )
                p, m, l, alpha = softmax(s, m, l, args.scale2, BLOCK_N, half, GROWTH, config.BIAS)
                if config.DROPOUT:
                    p = keep_pairs(p, keep)
                acc = wait_products(acc_tokens, 0, V_CHUNKS)
                warp_arrive(shared.v_empty.index(old))
                acc = rescaled(acc, alpha)
                stage, phase = next_stage(stage, phase, config.STAGES)
        if not config.OUT_IN_QUERY:
            warp_arrive(shared.q_empty.index(q))
        old, old_phase = previous_stage(stage, phase, config.STAGES)
        wait(shared.v_full.index(old), old_phase, config.TOGETHER)
        acc_tokens = add_products(p, shared.v_s, old, acc, BLOCK_N, dtype)
        l = gl.inline_asm(quad_sum_asm, ("=&f", "f"), (l,), l.type, is_pure=True)
        in_bounds = rows < q_len
        lo, hi = ranges_of_rows(rows, mask, q_len) if ranges is None else ranges
        has_keys = hi > lo
        sink = sink_of(args.sinks, args.sink_batch, tile.b, scalars.heads, head)
        attended = (l != 0.0) & has_keys  # true for a NaN, which must reach the result
        l = add_sink(l, m, sink, config.BIAS)
        if config.BIAS:
            pair = args.lse + 2 * ((tile.b.to(gl.int64) * scalars.heads + head) * q_len + rows)
            sink_alone = l == float("inf")
            top = gl.where(sink_alone, gl.where(sink == float("inf"), m, sink), m)
            log = gl.where(sink_alone, sink - top, gl.log2(l) * LN2)
            gl.store(pair, gl.where(attended, top, float("-inf")), mask=in_bounds)
            gl.store(pair + 1, gl.where(attended, log, -LEAST), mask=in_bounds)
        elif config.DROPOUT:
            pair = args.lse + 2 * ((tile.b.to(gl.int64) * scalars.heads + head) * q_len + rows)
            natural = gl.where(attended, log_sum_exp(l, m, sink), float("-inf"))
            gl.store(pair, natural, mask=in_bounds)
            gl.store(pair + 1, gl.where(attended, 0.0, -LEAST), mask=in_bounds)
        else:
            lse_row = args.lse + (tile.b.to(gl.int64) * scalars.heads + head) * q_len
            natural = gl.where(attended, log_sum_exp(l, m, sink), float("-inf"))
            gl.store(lse_row + rows, natural, mask=in_bounds)
        if config.ROW_MAX:
            max_row = args.row_max + (tile.b.to(gl.int64) * scalars.heads + head) * q_len + rows
            gl.store(max_row, gl.where(attended, m * LN2, float("-inf")), mask=in_bounds)
        factor = args.dropout.inverse_keep if config.DROPOUT else 1.0
        inverse = gl.where(attended, factor / l, -1.0)
        tma.store_wait(0)  # the previous output has left o_s
        acc = wait_products(acc_tokens, 0, V_CHUNKS)
        warp_arrive(shared.v_empty.index(old))
        if not BLOCK_LISTS:
            stage, phase = skip_blocks(partial - last, W, shared, stage, phase, config)
        outputs = ()
        for c in gl.static_range(V_CHUNKS):
            outputs = outputs + (normalized(acc[c], inverse),)  # noqa: RUF005
        gl.barrier()
        for c in gl.static_range(V_CHUNKS):
            to = first_columns(shared.o_s.index(FIRST_O + c), outputs[c].shape[1])
            to.store(outputs[c].to(dtype))
        row = tile.row + W * 64
        column = tile.head_part % config.V_PARTS * (config.V_DIM // config.V_PARTS)
        start_store(out, shared.o_s, FIRST_O, tile.b, row, head, column, V_CHUNKS)
        if config.OUT_IN_QUERY:
            tma.store_wait(0)
            gl.barrier()
            warp_arrive(shared.q_empty.index(W))
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
        tile = receive_tile(shared, slot, slot_phase)
    tma.store_wait(0)
