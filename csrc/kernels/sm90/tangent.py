"""The tangent of attention on Hopper in Gluon. It computes the same as portable/tangent.py, which
has the formulas, and which the tests compare it with.

A program computes a tile of 128 rows of one head. Its producer warp loads the queries and their
tangents, and then streams tiles of 128 keys through one ring: keys, their tangents, tangents of the
values, values, and after the last step the tile's rows of the output. Each of two consumer warp
groups computes 64 rows, in five products per step: S = q k^T, tS = tq k^T + q tk^T, and with P and
dP from registers, acc += P tv + dP v. P is computed during the products of tS. What is left between
products is short, and overlaps with products of the other warp group. Masked steps come first, then
one loop without a mask.
"""

from common.kv_ranges import LOG2E, key_range, place_of_tile, split
from sm90.args import Buffer, KernelScalars, Map, Mask, Number, RowTile, StepRange
from sm90.common import accumulator, own_steps, quad_sum_asm, rematerialized_zero, warp_arrive
from sm90.config import constants
from sm90.pipeline import apply_mask, mask_of_batch_row, next_stage
from sm90.softmax import half_name, over_row
from sm90.tile_store import store_rows
from sm90.tiles import allocate_tiles, barriers, init_barriers, load_chunks
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.aggregate
class TangentMaps:
    """Tensor maps of arrays and of their tangents."""

    query: Map
    key: Map
    value: Map
    out: Map
    tq: Map
    tk: Map
    tv: Map
    tout: Map


@gluon.aggregate
class TangentShared:
    """q_s and tq_s have one tile per warp group. tiles_s is the ring."""

    q_s: Buffer
    tq_s: Buffer
    tiles_s: Buffer
    q_full: Buffer
    full: Buffer
    empty: Buffer


@gluon.aggregate
class TangentArgs:
    maps: TangentMaps
    shared: TangentShared
    mask: Mask
    tile: RowTile
    scalars: KernelScalars
    q_blocks: Number
    lse: Number
    tlse: Number


@gluon.constexpr_function
def find_centers(n, center, scale):
    """Sets a center that is NaN to the row's sum of P tlogit divided by its sum of P, unless that
    is 0. Warps in which no center is NaN skip it. m: the thread's sums of P tS."""
    t = [f"setp.nan.f32 p{r}, ${center + r}, ${center + r};" for r in (0, 1)]
    t.append("or.pred q, p0, p1; vote.sync.any.pred q, q, -1; @!q bra DONE;")
    for r in (0, 1):
        w = f"w{2 * r}"
        t += over_row(r, "add", "w", [f"${i}" for i in range(n)])
        t.append(f"add.f32 {w}, {w}, w{2 * r + 1};")
        for sum_of_row in (w, f"m{r}"):
            for d in (1, 2):
                t.append(f"shfl.sync.bfly.b32 k, {sum_of_row}, {d}, 31, -1;")
                t.append(f"add.f32 {sum_of_row}, {sum_of_row}, k;")
        t.append(
            f"setp.neu.f32 q, {w}, 0f00000000; and.pred q, q, p{r}; rcp.approx.ftz.f32 {w}, {w};"
            f" mul.f32 m{r}, m{r}, ${scale}; mul.f32 m{r}, m{r}, {w};"
            f" selp.f32 ${center + r}, m{r}, ${center + r}, q;"
        )
    return [*t, "DONE:"]


@gluon.constexpr_function
def step_asm(n, half):
    """One thread's share of a step. Operands: n numbers of P, which become pairs of 16 bits of P
    and of dP by turns; sums of P tlogit (2) and centers (2), which are updated; n numbers of tS and
    its scale. All results are tied to operands, so that nothing is copied."""
    sums, center, ts, scale = n, n + 2, n + 4, 2 * n + 4
    t = ["{ .reg .pred p<2>, q; .reg .f32 w<4>, m<2>, c<2>, d<2>, k; .reg .b32 h<2>;"]
    for r in (0, 1):
        of_row = [i for i in range(n) if (i >> 1) & 1 == r]
        for j in (0, 1):
            first, *others = of_row[j::2]
            w = f"w{2 * r + j}"
            t.append(f"mul.f32 {w}, ${first}, ${ts + first};")
            t += [f"fma.rn.f32 {w}, ${i}, ${ts + i}, {w};" for i in others]
        t.append(f"add.f32 m{r}, w{2 * r}, w{2 * r + 1};")
        t.append(f"fma.rn.f32 ${sums + r}, m{r}, ${scale}, ${sums + r};")
    t += find_centers(n, center, scale)
    for r in (0, 1):
        c = f"${center + r}"
        t.append(f"setp.nan.f32 q, {c}, {c}; neg.f32 c{r}, {c};")
        t.append(f"selp.f32 c{r}, 0f00000000, c{r}, q;")
    for i in range(0, n, 2):
        for j in (0, 1):
            t.append(f"fma.rn.f32 d{j}, ${ts + i + j}, ${scale}, c{(i >> 1) & 1};")
            t.append(f"mul.f32 d{j}, d{j}, ${i + j};")
        t.append(f"cvt.rn.{half}x2.f32 h0, ${i + 1}, ${i}; cvt.rn.{half}x2.f32 h1, d1, d0;")
        t.append(f"mov.b32 ${i}, h0; mov.b32 ${i + 1}, h1;")
    return " ".join(t) + " }"


@gluon.constexpr_function
def step_constraints(n):
    tied = [str(i) for i in range(n + 4)]
    return ",".join(["=f"] * (n + 4) + ["f"] * (n + 1) + tied)


@gluon.constexpr_function
def operand_asm(n, which):
    """Operands: n numbers of 16 bits, then pairs of P and of dP by turns."""
    pairs = ((f"${2 * i}, ${2 * i + 1}", n + 2 * i + which) for i in range(n // 2))
    return " ".join(f"mov.b32 {{{of_pair}}}, ${pair};" for of_pair, pair in pairs)


@gluon.jit
def operand(pairs, which: gl.constexpr, layout: gl.constexpr, dtype: gl.constexpr):
    """P (0) or dP (1) as the left operand of a product."""
    N: gl.constexpr = pairs.shape[1]
    bits = gl.inline_asm(
        operand_asm(N // 2, which), ("=h", "f"), (pairs,),
        gl.distributed_type(gl.int16, [64, N], layout), is_pure=True,
    )  # fmt: skip
    return bits.to(dtype, bitcast=True)


@gluon.jit
def skip_steps(count, shared, stage, phase, STAGES: gl.constexpr):
    """Skips `count` steps: this warp group only releases their tiles."""
    for _i in range(0, count * 4):
        mbarrier.wait(shared.full.index(stage), phase)
        warp_arrive(shared.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    shared = args.shared
    scalars = args.scalars
    tile = args.tile
    kv_range = tile.kv_range
    steps = kv_range.steps
    partial = kv_range.partial
    scale = scalars.scale
    q_len = scalars.q_len
    scale2 = scale * LOG2E
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = args.maps.query.dtype
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    o_layout: gl.constexpr = accumulator(config.DIM)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    mask_b = gl.where(scalars.mask_batch > 1, tile.b, 0)
    mask = mask_of_batch_row(args.mask, mask_b, scalars)
    rows = tile.row + W * 64 + gl.arange(0, 64, row_layout)
    in_bounds = rows < q_len
    first_row = (tile.b.to(gl.int64) * scalars.heads + tile.head_part) * q_len
    lo = gl.load(mask.kv_start + rows, mask=in_bounds, other=0)
    hi = gl.load(mask.kv_end + rows, mask=in_bounds, other=0)
    lse = gl.load(args.lse + first_row + rows, mask=hi > lo, other=float("-inf"))
    lse2 = gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # P is 0 without keys
    first, last = own_steps(
        args.q_blocks, mask_b, tile.row // 64 + W, q_len, kv_range.start, steps, partial, BLOCK_N
    )
    stage = 0
    phase = 0
    stage, phase = skip_steps(first, shared, stage, phase, STAGES)
    acc = gl.zeros([64, config.DIM], gl.float32, o_layout)
    of_lse = gl.full([64], 0.0, gl.float32, row_layout)
    center = gl.full([64], float("nan"), gl.float32, row_layout)  # not found yet
    mbarrier.wait(shared.q_full.index(W), 0)
    for part in gl.static_range(2):  # partial steps, then full steps
        begin = first if part == 0 else gl.maximum(first, partial)
        stop = last if part == 0 else steps
        for i in range(begin, stop):
            tk_stage, tk_phase = next_stage(stage, phase, STAGES)
            tv_stage, tv_phase = next_stage(tk_stage, tk_phase, STAGES)
            v_stage, v_phase = next_stage(tv_stage, tv_phase, STAGES)
            w = W + rematerialized_zero(i, True)
            q = shared.q_s.index(w)
            mbarrier.wait(shared.full.index(stage), phase)
            k_t = shared.tiles_s.index(stage).permute((1, 0))
            s_token = warpgroup_mma(q, k_t, zero, use_acc=False, is_async=True)
            ts_token = warpgroup_mma(shared.tq_s.index(w), k_t, zero, use_acc=False, is_async=True)
            mbarrier.wait(shared.full.index(tk_stage), tk_phase)
            tk_t = shared.tiles_s.index(tk_stage).permute((1, 0))
            ts_token = warpgroup_mma(q, tk_t, ts_token, is_async=True)
            s = warpgroup_mma_wait(2, deps=(s_token,))
            if part == 0:
                at = kv_range.nth(i, BLOCK_N)
                s = apply_mask(s, rows, at, mask, tile.checked, scalars, (), config)
            p = gl.exp2(s * scale2 - gl.expand_dims(lse2, 1))
            mbarrier.wait(shared.full.index(tv_stage), tv_phase)
            ts = warpgroup_mma_wait(0, deps=(ts_token,))
            warp_arrive(shared.empty.index(stage))
            warp_arrive(shared.empty.index(tk_stage))
            if part == 0:  # tS of a masked pair may be anything
                ts = gl.where(p == 0.0, 0.0, ts)
            pairs, of_lse, center = gl.inline_asm(
                step_asm(BLOCK_N // 2, half_name(dtype)), step_constraints(BLOCK_N // 2),
                (ts, scale, p, of_lse, center), (p.type, of_lse.type, center.type), is_pure=True,
            )  # fmt: skip
            tv = shared.tiles_s.index(tv_stage)
            p_half = operand(pairs, 0, p_layout, dtype)
            acc_token = warpgroup_mma(p_half, tv, acc, is_async=True)
            mbarrier.wait(shared.full.index(v_stage), v_phase)
            v = shared.tiles_s.index(v_stage)
            dp = operand(pairs, 1, p_layout, dtype)
            acc_token = warpgroup_mma(dp, v, acc_token, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            warp_arrive(shared.empty.index(tv_stage))
            warp_arrive(shared.empty.index(v_stage))
            stage, phase = next_stage(v_stage, v_phase, STAGES)
    stage, phase = skip_steps(partial - last, shared, stage, phase, STAGES)
    of_lse = gl.inline_asm(quad_sum_asm, ("=&f", "f"), (of_lse,), of_lse.type, is_pure=True)
    attended = lse2 != float("inf")  # true for a NaN, which must reach the result
    gl.store(args.tlse + first_row + rows, gl.where(attended, of_lse, 0.0), mask=in_bounds)
    shift = of_lse - gl.where(center == center, center, 0.0)
    shift = gl.expand_dims(gl.convert_layout(shift, gl.SliceLayout(1, o_layout)), 1)
    attended = gl.convert_layout(gl.where(attended, 1, 0), gl.SliceLayout(1, o_layout)) != 0
    mbarrier.wait(shared.full.index(stage), phase)
    out = shared.tiles_s.index(stage).slice(W * 64, 64, dim=0).load(o_layout)
    result = acc - shift * out.to(gl.float32)
    store_rows(
        args.maps.tout, (result,), attended, 1.0, shared.q_s, W, tile.b, tile.row + W * 64,
        tile.head_part, 0, 1,
    )  # fmt: skip


@gluon.jit
def load_tile(source, b, at, head, shared, stage, phase, config: gl.constexpr):
    """Loads the next tile of the ring. Returns the stage and phase of the one after."""
    mbarrier.wait(shared.empty.index(stage), phase ^ 1)
    full = shared.full.index(stage)
    mbarrier.expect(full, config.BLOCK_N * config.DIM * 2)
    load_chunks(source, b, at, head, full, shared.tiles_s, stage, 1)
    return next_stage(stage, phase, config.STAGES)


@gluon.jit
def produce(args, config: gl.constexpr):
    maps = args.maps
    shared = args.shared
    tile = args.tile
    b = tile.b
    head = tile.head_part
    kv_head = head // (args.scalars.heads // args.scalars.kv_heads)
    for w in gl.static_range(2):
        full = shared.q_full.index(w)
        mbarrier.expect(full, 2 * 64 * config.DIM * 2)
        load_chunks(maps.query, b, tile.row + w * 64, head, full, shared.q_s, w, 1)
        load_chunks(maps.tq, b, tile.row + w * 64, head, full, shared.tq_s, w, 1)
    stage = 0
    phase = 0
    for i in range(0, tile.kv_range.steps):
        at = tile.kv_range.nth(i, config.BLOCK_N)
        stage, phase = load_tile(maps.key, b, at, kv_head, shared, stage, phase, config)
        stage, phase = load_tile(maps.tk, b, at, kv_head, shared, stage, phase, config)
        stage, phase = load_tile(maps.tv, b, at, kv_head, shared, stage, phase, config)
        stage, phase = load_tile(maps.value, b, at, kv_head, shared, stage, phase, config)
    mbarrier.wait(shared.empty.index(stage), phase ^ 1)
    full = shared.full.index(stage)
    mbarrier.expect(full, 128 * config.DIM * 2)
    for w in gl.static_range(2):
        at = tile.row + w * 64
        load_chunks(maps.out, b, at, head, full, shared.tiles_s, stage, 1, w)


@gluon.jit
def forward_tangent_sm90(
    query, key, value, out, lse, tq, tk, tv, tout, tlse, kv_start, kv_end, q_ids, kv_ids, q_pos,
    kv_pos, q_blocks, q_order, scale, mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """query, key, value, out and their tangents are tensor maps (batch, heads, length, dim) with
    boxes of 64 or BLOCK_N rows of one head. lse and tlse are (batch, heads, q_len)."""
    gl.static_assert(QK_DIM == V_DIM and BLOCK_N == 128, "all tiles of the ring have one shape")
    config: gl.constexpr = constants(DIM=QK_DIM, BLOCK_N=BLOCK_N, STAGES=STAGES, BLOCK_LISTS=False)
    dtype: gl.constexpr = query.dtype
    shared = TangentShared(
        q_s=allocate_tiles(dtype, 2, 64, QK_DIM), tq_s=allocate_tiles(dtype, 2, 64, QK_DIM),
        tiles_s=allocate_tiles(dtype, STAGES, BLOCK_N, QK_DIM),
        q_full=barriers(2), full=barriers(STAGES), empty=barriers(STAGES),
    )  # fmt: skip
    init_barriers(STAGES, (shared.full, shared.empty), (1, 8))
    init_barriers(2, (shared.q_full,), (1,))

    tiles = (q_len + 127) // 128
    head, _, b, mask_b, row = place_of_tile(
        gl.program_id(0), q_order, batch, mask_batch, tiles, heads // kv_heads, kv_heads, 128, 1
    )
    start, end, full_lo, full_hi, checked = key_range(q_blocks, mask_b, row, q_len, 128)
    steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
    kv_range = StepRange(start, steps, steps - full_end + full_begin, full_begin, full_end)
    args = TangentArgs(
        maps=TangentMaps(query, key, value, out, tq, tk, tv, tout), shared=shared,
        mask=Mask(kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos),
        tile=RowTile(row, head, b, kv_range, checked),
        scalars=KernelScalars(
            mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, None
        ),
        q_blocks=q_blocks, lse=lse, tlse=tlse,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume, (0, args, config)), (consume, (1, args, config)), (produce, (args, config))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
