"""Forward attention on Hopper in Gluon: the same results as portable/fwd.py, its checked twin.

A program takes tiles of WARP_GROUPS x 64 rows of one head until none is left. Its producer warp
draws the next tile from a counter, tells the consumers what it is (the plan) and streams queries,
keys and values through TMA, so that a tile's first loads run under the last products of the tile
before. Each warp group of consumers multiplies 64 rows by wgmma: in step i it issues s_i = q k_i^T
and acc += p_(i-1) v_(i-1) together and runs the softmax of step i under the second product
(FlashAttention-3, arXiv 2407.08608, section 3.2); named barriers make the groups take turns at
issuing (section 3.1). Masked steps come first, then one mask-free loop.

Head dims are cut into chunks of columns (chunked_mma.py), one for each power of two and more only
for dims that are none (192): QK_CHUNK columns of queries and keys, V_CHUNK of values and outputs.
Where 64 rows of the output do not fit a warp group's registers (512), a tile is computed V_PARTS
times, each time for another part of the value columns. Each time the scores are computed again.
"""

from sm90.block_lists import list_of_rows
from sm90.common import LOG2E, key_range, nth_step, place_of_tile, split
from sm90.config import constants
from sm90.fwd_consumer import consume, query_slots
from sm90.pipeline import after, send_tile_asm
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def produce(maps, order, mask_args, shared, sizes, config: gl.constexpr):
    q_order, q_blocks, counter = order
    query, key, value = maps
    tiles_s, work_s, full, empty, work_bars = shared
    q_s, k_s, v_s = tiles_s
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    work_full, work_empty = work_bars
    batch, mask_batch, q_len, kv_len, heads, kv_heads, programs = sizes
    dtype: gl.constexpr = query.dtype
    QK_DIM: gl.constexpr = config.QK_DIM
    V_DIM: gl.constexpr = config.V_DIM
    QK_CHUNK: gl.constexpr = config.QK_CHUNK
    WARP_GROUPS: gl.constexpr = config.WARP_GROUPS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    ROWS: gl.constexpr = 64 * WARP_GROUPS
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    SLOTS: gl.constexpr = query_slots(CHUNKS)
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_PARTS: gl.constexpr = config.V_PARTS
    V_CHUNKS: gl.constexpr = V_DIM // V_PARTS // V_CHUNK
    group = heads // kv_heads
    tiles = (q_len + ROWS - 1) // ROWS
    total = tiles * batch * heads * V_PARTS
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    tile = gl.program_id(0)
    while tile < total:
        head, kv_head, b, mask_b, row = place_of_tile(
            tile // V_PARTS, q_order, batch, mask_batch, tiles, group, kv_heads, ROWS, 1
        )
        v_part = tile % V_PARTS
        start, end, full_lo, full_hi, checked = key_range(q_blocks, mask_b, row, q_len, ROWS)
        steps, full_begin, full_end = split(start, end, full_lo, full_hi, BLOCK_N)
        partial = steps - full_end + full_begin
        if config.BLOCK_LISTS:
            listed, partial, full_count = list_of_rows(mask_args, mask_b, head, row, q_len, kv_len)
            steps = partial + full_count
            block = gl.load(listed)
        mbarrier.wait(work_empty.index(slot), slot_phase ^ 1)
        gl.inline_asm(
            send_tile_asm,
            "r,r,r,r,r,r,r,r,r,r,~{memory}",
            (
                work_s.index(slot),
                row,
                head * V_PARTS + v_part,
                b,
                start,
                steps,
                partial,
                full_begin,
                full_end,
                checked,
            ),
        )
        mbarrier.arrive(work_full.index(slot))
        for w in gl.static_range(WARP_GROUPS):
            mbarrier.wait(q_empty.index(w), q_phase ^ 1)
            mbarrier.expect(q_full.index(w), 64 * QK_DIM * 2)
            for c in gl.static_range(CHUNKS):
                q_tile = q_s.index(w * SLOTS + c)
                q_tile = q_tile.reinterpret(dtype, [1, 64, QK_CHUNK], query.layout)
                at_q = [b, row + w * 64, head * QK_DIM + c * QK_CHUNK]
                tma.async_load(query, at_q, q_full.index(w), q_tile)
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
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BLOCK_N * (V_DIM // V_PARTS) * 2)
            for c in gl.static_range(V_CHUNKS):
                v_tile = v_s.index(stage * V_CHUNKS + c)
                v_tile = v_tile.reinterpret(dtype, [1, BLOCK_N, V_CHUNK], value.layout)
                column = (kv_head * V_PARTS + v_part) * (V_DIM // V_PARTS) + c * V_CHUNK
                at_v = [b, at, column]
                tma.async_load(value, at_v, v_full.index(stage), v_tile)
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
def forward_sm90(
    query, key, value, out, lse, row_max,
    kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, counter,
    slopes, block_mask, q_block_lists,
    scale, soft_cap, mask_mode, batch, mask_batch, block_mask_batch, block_mask_heads,
    q_block, kv_block, q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OUT_IN_QUERY: gl.constexpr, V_PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
):  # fmt: skip
    """query, key, value, out are tensor maps (batch, length, heads * dim) with boxes of 64 or
    BLOCK_N rows of one head; counter holds 0 and lives as long as the launch.

    Of the options at most one is given, the arguments of the others are None: `soft_cap`
    (soft_cap.py), `slopes` of ALiBi of indices (alibi.py), block lists (block_lists.py), or
    `row_max`, which gets the largest logit of every row.
    """
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, V_DIM=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK,
        WARP_GROUPS=WARP_GROUPS, BLOCK_N=BLOCK_N, STAGES=STAGES,
        OUT_IN_QUERY=OUT_IN_QUERY, V_PARTS=V_PARTS, REMATERIALIZE=REMATERIALIZE,
        SOFT_CAP=soft_cap is not None, ALIBI=slopes is not None,
        BLOCK_LISTS=block_mask is not None, ROW_MAX=row_max is not None,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    get_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for
    qk_tile: gl.constexpr = get_layout([BLOCK_N, QK_CHUNK], dtype)
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    SLOTS: gl.constexpr = query_slots(CHUNKS)
    V_CHUNKS: gl.constexpr = V_DIM // V_PARTS // V_CHUNK
    v_tile: gl.constexpr = get_layout([BLOCK_N, V_CHUNK], dtype)
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    tiles_s = (
        gl.allocate_shared_memory(dtype, [WARP_GROUPS * SLOTS, 64, QK_CHUNK], qk_tile),
        gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, BLOCK_N, QK_CHUNK], qk_tile),
        gl.allocate_shared_memory(dtype, [STAGES * V_CHUNKS, BLOCK_N, V_CHUNK], v_tile),
    )
    if OUT_IN_QUERY:  # no room: a tile's output takes the place of its queries
        o_s = tiles_s[0].reinterpret(
            dtype, [WARP_GROUPS * SLOTS * QK_CHUNK // V_CHUNK, 64, V_CHUNK], v_tile
        )
    else:
        o_s = gl.allocate_shared_memory(dtype, [WARP_GROUPS * V_CHUNKS, 64, V_CHUNK], v_tile)
    work_s = gl.allocate_shared_memory(gl.int32, [2, 16], line)
    q_full = gl.allocate_shared_memory(gl.int64, [WARP_GROUPS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [WARP_GROUPS, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for j in gl.static_range(WARP_GROUPS):
        mbarrier.init(q_full.index(j), 1)
        mbarrier.init(q_empty.index(j), 4)
    for j in gl.static_range(STAGES):
        mbarrier.init(k_full.index(j), 1)
        mbarrier.init(v_full.index(j), 1)
        mbarrier.init(k_empty.index(j), WARP_GROUPS * 4)
        mbarrier.init(v_empty.index(j), WARP_GROUPS * 4)
    for j in gl.static_range(2):
        mbarrier.init(work_full.index(j), 1)
        mbarrier.init(work_empty.index(j), WARP_GROUPS * 128)

    maps = (query, key, value)
    mask = (kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos)
    mask_args = (block_mask, q_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block)
    full = (q_full, k_full, v_full)
    empty = (q_empty, k_empty, v_empty)
    barriers = (work_full, work_empty)
    sizes = (batch, mask_batch, q_len, kv_len, heads, kv_heads, gl.num_programs(0))
    # what scores are multiplied by before the softmax and in it
    if config.SOFT_CAP:
        first_scale = scale / soft_cap
        scale2 = soft_cap * LOG2E
    else:
        first_scale = scale * LOG2E
        scale2 = 1.0 if config.ALIBI else scale * LOG2E
    scalars = (mask_mode, mask_batch, q_len, kv_len, heads, scale2, first_scale, slopes)
    results = (out, lse, row_max)
    shared = (tiles_s, o_s, work_s, full, empty, barriers)
    consumed = (results, q_blocks, mask, mask_args, shared, scalars)
    loaded = (tiles_s, work_s, full, empty, barriers)
    order = (q_order, q_blocks, counter)
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (0, consumed, config)),
                (consume, (1, consumed, config)),
                (produce, (maps, order, mask_args, loaded, sizes, config)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, consumed, config)),
                (consume, (1, consumed, config)),
                (consume, (2, consumed, config)),
                (produce, (maps, order, mask_args, loaded, sizes, config)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
