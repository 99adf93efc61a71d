"""Consumer warp group of programs of 128 keys whose sums almost fill its registers (192/128):
computes dK and dV of 64 keys.

Of a thread's 240 registers, dK and dV take 160, S or dP 32, and P or dS in 16 bits 16. To stay
within the limit, one loop handles masked and other blocks, and branches only where no product is in
flight. dP starts after S has been used, dS is computed from the rounded P
(docs/guide/numerics.md), and the next scores start when only the last chunk of dK is in flight. The
softmax of one warp group runs during the products of the other. Queries, keys and dK are divided
into chunks of QK_CHUNK columns.
"""

from common.kv_ranges import LOG2E
from sm90.block_lists import bits_of_rows, list_of_keys, mask_of_head
from sm90.bwd_producer import ROWS, mask_bits, rows_of_half
from sm90.chunked_mma import add_products, half_of_keys, scores, wait_products, zeros
from sm90.common import accumulator, rematerialized_zero, select_bits, warp_arrive
from sm90.softmax import half_name, unpack
from sm90.tile_store import store_half
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def first_column(operand):
    """Sets a to the address of this thread's first columns in a line of floats in shared memory,
    which begins at the address in `operand`. The thread's next columns are 32 bytes further."""
    thread = ".reg .u32 a; mov.u32 a, %tid.x; and.b32 a, a, 3; shl.b32 a, a, 3;"
    return f"{thread}add.u32 a, a, ${operand};"


@gluon.constexpr_function
def p_asm(half):
    """P = 2^(s * scale2 - lse2) in pairs of 16 bits. It works by octets of columns, so that only
    two numbers of lse2 are in registers at a time.

    Operands: 16 packed P; 32 scores, scale2, shared address of lse2.
    """
    t = [f"{{ .reg .f32 l<2>, e<4>; {first_column(49)}"]
    for o in range(8):
        t.append(f"ld.shared.v2.f32 {{l0, l1}}, [a+{32 * o}]; neg.f32 l0, l0; neg.f32 l1, l1;")
        for k in range(4):
            t.append(f"fma.rn.f32 e{k}, ${16 + 4 * o + k}, $48, l{k & 1};")
            t.append(f"ex2.approx.ftz.f32 e{k}, e{k};")
        for r in (0, 1):
            t.append(f"cvt.rn.{half}x2.f32 ${2 * o + r}, e{2 * r + 1}, e{2 * r};")
    return " ".join(t) + " }"


@gluon.constexpr_function
def ds_asm(half):
    """dS = P * (dP - delta) in pairs of 16 bits, also by octets of columns.

    Operands: 16 packed dS; 32 dP, 16 packed P, shared address of delta.
    """
    t = [f"{{ .reg .f32 d<2>, x<2>, e<2>; .reg .b16 h<2>; {first_column(64)}"]
    for o in range(8):
        t.append(f"ld.shared.v2.f32 {{d0, d1}}, [a+{32 * o}];")
        for r in (0, 1):
            p = f"${48 + 2 * o + r}"
            if half == "bf16":
                t.append(f"shl.b32 x0, {p}, 16; and.b32 x1, {p}, 0xffff0000;")
            else:
                t.append(f"mov.b32 {{h0, h1}}, {p}; cvt.f32.f16 x0, h0; cvt.f32.f16 x1, h1;")
            for c in (0, 1):
                t.append(
                    f"sub.f32 e{c}, ${16 + 4 * o + 2 * r + c}, d{c}; mul.f32 e{c}, e{c}, x{c};"
                )
            t.append(f"cvt.rn.{half}x2.f32 ${2 * o + r}, e1, e0;")
    return " ".join(t) + " }"


@gluon.constexpr_function
def clear_bits_asm():
    """Clears packed values whose bit is 0. Operands: 16 pairs; 16 pairs, bits of
    common.range_bits_asm (2)."""
    t = ["{ .reg .u32 u; .reg .pred p;"]
    for i in range(16):
        low = 1 << (i // 2 * 2)
        t.append(f"and.b32 u, ${32 + i % 2}, {low}; setp.ne.u32 p, u, 0;")
        t.append(f"selp.b32 ${i}, ${16 + i}, 0, p; and.b32 ${i}, ${i}, 0xffff;")
        t.append(f"and.b32 u, ${32 + i % 2}, {2 * low}; setp.ne.u32 p, u, 0;")
        t.append(f"and.b32 u, ${16 + i}, 0xffff0000; @p or.b32 ${i}, ${i}, u;")
    return " ".join(t) + " }"


@gluon.constexpr_function
def constraints(*inputs):
    """Constraints of 16 packed results, and of inputs given as (number, letter)."""
    return ",".join(["=&r"] * 16 + [x for n, x in inputs for _ in range(n)] + ["~{memory}"])


@gluon.jit
def probabilities(s, scale2, lse, half: gl.constexpr):
    packed: gl.constexpr = gl.distributed_type(gl.int32, [64, ROWS // 2], accumulator(ROWS // 2))
    letters: gl.constexpr = constraints((32, "f"), (1, "f"), (1, "r"))
    return gl.inline_asm(p_asm(half), letters, (s, scale2, lse), packed)


@gluon.jit
def score_gradients(dp, p, delta, half: gl.constexpr):
    letters: gl.constexpr = constraints((32, "f"), (16, "r"), (1, "r"))
    return gl.inline_asm(ds_asm(half), letters, (dp, p, delta), p.type)


@gluon.jit
def clear_bits(x, bits):
    letters: gl.constexpr = ("=&r", "r", "r")
    return gl.inline_asm(clear_bits_asm(), letters, (x, bits), x.type, is_pure=True)


@gluon.jit
def begin_scores(stage, phase, k, shared, CHUNKS: gl.constexpr):
    """Starts the scores of the block in `stage`."""
    mbarrier.wait(shared.q_full.index(stage), phase)
    zero = gl.zeros([64, ROWS], gl.float32, accumulator(ROWS))
    return scores(k, shared.q_s, stage, zero)


@gluon.jit
def add_block(
    dk_sum, dv_sum, s, row, head, masked, stage, phase, k, v, keys, args, config: gl.constexpr
):  # fmt: skip
    """Adds a block of rows with scores `s` to dk and dv, and computes the scores of the next block.
    No product is in flight at a branch. `head` is only used with block lists."""
    shared = args.shared
    CHUNKS: gl.constexpr = config.CHUNKS
    scale2 = args.scalars.scale * LOG2E
    dtype: gl.constexpr = shared.q_s.dtype
    half: gl.constexpr = half_name(dtype)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.V_DIM), 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(config.QK_CHUNK), 2)
    zero = gl.zeros([64, ROWS], gl.float32, accumulator(ROWS))
    mbarrier.wait(shared.do_full.index(stage), phase)
    do = shared.do_s.index(stage)
    bits = keys
    if masked:
        bits = mask_bits(keys, row, stage, args)
        if config.BLOCK_LISTS:
            head_mask = mask_of_head(args.blocks, args.scalars, args.tile.mask_b, head)
            bits = bits & bits_of_rows(head_mask, keys, row, args.scalars.q_len)
        s = select_bits(s, bits, float("-inf"))
    p = probabilities(s, scale2, shared.row_stats.lse2.index(stage), half)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    p_half = unpack(p, ROWS, p_layout, dtype)
    dv_token = warpgroup_mma(p_half, do, dv_sum, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = score_gradients(dp, p, shared.row_stats.delta.index(stage), half)
    dv_sum = warpgroup_mma_wait(0, deps=(dv_token,))
    if masked:  # P is 0 at masked pairs, dP may be anything
        ds = clear_bits(ds, bits)
    ds_half = unpack(ds, ROWS, ds_layout, dtype)
    dk_tokens = add_products(ds_half, shared.q_s, stage, dk_sum)
    # only the last chunk overlaps with the next scores: more would not fit the registers
    dk_sum = wait_products(dk_tokens[: CHUNKS - 1], 1, CHUNKS - 1)
    s_token = begin_scores(stage ^ 1, phase ^ stage, k, shared, CHUNKS)
    dk_sum = dk_sum + wait_products(dk_tokens[CHUNKS - 1 :], CHUNKS, 1)
    warp_arrive(shared.do_empty.index(stage))
    warp_arrive(shared.q_empty.index(stage))
    s = warpgroup_mma_wait(0, deps=(s_token,))
    return dk_sum, dv_sum, s


@gluon.jit
def skip_blocks(stage, phase, k, shared, CHUNKS: gl.constexpr):
    """Skips a block of rows without a pair of this warp group's keys. Returns the scores of the
    next block."""
    mbarrier.wait(shared.do_full.index(stage), phase)
    warp_arrive(shared.do_empty.index(stage))
    warp_arrive(shared.q_empty.index(stage))
    token = begin_scores(stage ^ 1, phase ^ stage, k, shared, CHUNKS)
    return warpgroup_mma_wait(0, deps=(token,))


@gluon.jit
def consume_chunked(W: gl.constexpr, args, config: gl.constexpr):
    shared = args.shared
    tile = args.tile
    q_range = args.q_range
    V_DIM: gl.constexpr = config.V_DIM
    CHUNKS: gl.constexpr = config.CHUNKS
    BLOCK_LISTS: gl.constexpr = config.BLOCK_LISTS
    REMATERIALIZE: gl.constexpr = config.REMATERIALIZE
    s_layout: gl.constexpr = accumulator(ROWS)
    keys = tile.first_key + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    zero = gl.zeros([64, ROWS], gl.float32, s_layout)
    dk_sum = zeros(config.QK_COLUMNS, config.QK_CHUNK)
    dv_sum = gl.zeros([64, V_DIM], gl.float32, accumulator(V_DIM))
    mbarrier.wait(shared.kv_full.index(0), 0)
    mbarrier.wait(shared.kv_full.index(1), 0)
    k = half_of_keys(shared.k_s, 0, W, config.QK_COLUMNS)
    v = shared.v_s.index(W)
    if q_range.steps > 0:
        if not BLOCK_LISTS:
            live_start, live_end = rows_of_half(
                args.mask, tile.first_key // 64 + W, args.scalars.kv_len
            )
        mbarrier.wait(shared.q_full.index(0), 0)
        s = warpgroup_mma_wait(0, deps=(scores(k, shared.q_s, 0, zero),))
        stage = 0
        phase = 0
        if BLOCK_LISTS:
            for g in range(0, tile.group):
                head = tile.kv_head * tile.group + g
                listed, partial, full_count = list_of_keys(args.blocks, args.scalars, tile, g)
                for i in range(0, partial + full_count):
                    row = gl.load(listed + i) * ROWS
                    k_left = half_of_keys(
                        shared.k_s, rematerialized_zero(i, REMATERIALIZE), W, config.QK_COLUMNS
                    )
                    v_left = shared.v_s.index(W + rematerialized_zero(i, REMATERIALIZE))
                    dk_sum, dv_sum, s = add_block(
                        dk_sum, dv_sum, s, row, head, i < partial, stage, phase, k_left, v_left,
                        keys, args, config,
                    )  # fmt: skip
                    phase = phase ^ stage
                    stage = stage ^ 1
        else:  # partial blocks of every head, then full blocks
            n = 0
            for i in range(0, q_range.steps * tile.group):
                masked = i < q_range.partial * tile.group
                row = q_range.start + q_range.nth_partial(n) * ROWS
                k_left = half_of_keys(
                    shared.k_s, rematerialized_zero(i, REMATERIALIZE), W, config.QK_COLUMNS
                )
                v_left = shared.v_s.index(W + rematerialized_zero(i, REMATERIALIZE))
                full = i >= q_range.partial * tile.group
                if full | ((row < live_end) & (row + ROWS > live_start)):
                    dk_sum, dv_sum, s = add_block(
                        dk_sum, dv_sum, s, row, (), masked, stage, phase, k_left, v_left, keys,
                        args, config,
                    )  # fmt: skip
                else:
                    s = skip_blocks(stage, phase, k_left, shared, CHUNKS)
                phase = phase ^ stage
                stage = stage ^ 1
                n += 1
                n = gl.where(n == q_range.partial, 0, n)
    gl.barrier()  # dK and dV overwrite this warp group's keys and values
    store_half(W, k, (v,), dk_sum, (dv_sum,), args, CHUNKS, 1)
