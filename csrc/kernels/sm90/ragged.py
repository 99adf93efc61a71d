"""Attention of long chunks of new tokens over a cache, on Hopper in Gluon: the forward
(sm90/fwd.py) for packed rows of several sequences. It computes the same as portable/decode.py,
which the tests compare it with.

A tile is up to WARP_GROUPS x 64 rows of one sequence, for one query head. The list of tiles is made
on the device (packax/_src/ops/packed_rows.py): ITEM numbers that say how many tiles there are, then
ITEM for each, which `produce` explains. It has only tiles whose pages exist and whose keys are in
the cache; decode.py computes the other rows.

The producer warp reads page numbers from the block table, and loads PAGE_ROWS keys at once by TMA,
which pages consist of. Keys that no row of a tile attends to are loaded with others of their page.
As they may be NaN, the consumers overwrite their values with zeros in shared memory. A tile may end
in the middle of a warp group's rows, and other rows follow, so results are stored under a mask
instead of by TMA.

With a PAGE_ROWS of 1, pages may have any size. The producer then has four warps, which copy rows by
cp.async, and only those that some row attends to.
"""

from common.kv_ranges import LOG2E, split
from common.sinks import add_sink, log_sum_exp, sink_of
from sm90.args import Map, Number, RowTile, RowTileShared, StepRange
from sm90.block_lists import shift_of
from sm90.chunked_mma import add_products, wait_products, zeros
from sm90.common import (
    accumulator,
    lanes_arrive,
    named_barrier,
    quad_sum_asm,
    range_bits_asm,
    rematerialized_zero,
    select_bits,
    warp_arrive,
)
from sm90.config import constants
from sm90.fwd_consumer import query_slots, scores
from sm90.pipeline import (
    next_stage,
    ping_pong_pass,
    ping_pong_wait,
    previous_stage,
    receive_tile,
    send_tile,
)
from sm90.row_producer import send, send_stop
from sm90.softmax import half_name, rescale, softmax, unpack
from sm90.tiles import allocate_lines, allocate_tiles, barriers, init_barriers, load_chunks
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

ITEM = gl.constexpr(8)  # numbers of an item: packax/_src/ops/packed_rows.py


@gluon.aggregate
class RaggedArgs:
    """`listed`: the list of tiles. `last_page`: the largest number of a page. key and value are
    pointers if PAGE_ROWS is 1."""

    query: Map
    key: Map | Number
    value: Map | Number
    out: Number
    lse: Number
    sinks: Number
    kv_start: Number
    kv_end: Number
    block_table: Number
    listed: Number
    counter: Number
    has_sinks: Number
    rows: Number
    last_page: Number
    page_size: Number
    table_width: Number
    heads: Number
    kv_heads: Number
    v_dim: Number
    scale2: Number
    shared: RowTileShared


@gluon.jit
def page_numbers(table, at, shift, last_entry, args, config: gl.constexpr):
    """The pages of a step's keys, one for each PAGE_ROWS of them."""
    PAGE_ROWS: gl.constexpr = config.PAGE_ROWS
    pages = ()
    for j in gl.static_range(config.BLOCK_N // PAGE_ROWS):
        entry = gl.minimum(at + j * PAGE_ROWS >> shift, last_entry)
        page = gl.minimum(gl.maximum(gl.load(table + entry), 0), args.last_page)
        pages = pages + (page,)  # noqa: RUF005
    return pages


@gluon.jit
def load_pages(
    source, pages, at, shift, head, full, tiles_s, first, CHUNKS: gl.constexpr, ROWS: gl.constexpr
):
    """Loads a tile of keys from `at` on: ROWS from each of `pages`."""
    COLUMNS: gl.constexpr = tiles_s.shape[2]
    for c in gl.static_range(CHUNKS):
        chunk = tiles_s.index(first + c)
        chunk = chunk.reinterpret(source.dtype, [1, 1, tiles_s.shape[1], COLUMNS], source.layout)
        for j in gl.static_range(len(pages)):
            key = at + j * ROWS
            row = key - (key >> shift << shift)
            tma.async_load(
                source, [pages[j], head, row, c * COLUMNS], full, chunk.slice(j * ROWS, ROWS, dim=2)
            )


@gluon.jit
def rows_of_keys(table, at, last, args, config: gl.constexpr):
    """The block table entries of a step's keys, and the keys' rows in their pages. Each thread has
    one. `last` is read again in place of the keys beyond it: no score counts it twice, and it adds
    no NaN that the tile's rows do not get from it anyway."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    keys = gl.minimum(at + gl.arange(0, config.BLOCK_N, layout), last)
    entries = keys // args.page_size
    return gl.load(table + entries), keys - entries * args.page_size


@gluon.jit
def copy_rows(source, found, head, dim, full, tiles_s, first, args, CHUNKS: gl.constexpr):
    """Copies a head's columns of the rows that `rows_of_keys` found, and zeros in place of those
    from `dim` on. A warp copies the 32 rows that its threads found, and whole rows at once."""
    COLUMNS: gl.constexpr = tiles_s.shape[2]
    LANES: gl.constexpr = COLUMNS // 8  # of a row: each copies 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([LANES, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    pages = gl.minimum(gl.maximum(found[0], 0), args.last_page)
    rows = pages * args.page_size + found[1]
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    # unsigned, as that takes one multiplication instead of three
    size = (args.kv_heads * dim).to(gl.uint32).to(gl.int64)
    starts = gl.expand_dims(rows.to(gl.uint32).to(gl.int64) * size, 1)
    for c in gl.static_range(CHUNKS):
        columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)) + c * COLUMNS
        columns = gl.expand_dims(columns, 0)
        pointers = source + head * dim + (starts + columns)
        async_copy.async_load(tiles_s.index(first + c), pointers, mask=columns < dim)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def send_by_warps(shared, slot, phase, tile):
    """row_producer.send, by four warps, which all write the tile. The consumers may empty the slot
    as soon as the first thread has arrived, so no other warp may still wait or write then."""
    mbarrier.wait(shared.work_empty.index(slot), phase ^ 1)
    send_tile(shared.work_s.index(slot), tile)
    gl.barrier()
    mbarrier.arrive(shared.work_full.index(slot))


@gluon.jit
def find_keys(table, at, shift, last, args, config: gl.constexpr):
    """What `load_step` needs to find a step's keys. `last`: the last key, or its block table entry
    if pages are loaded by TMA."""
    if config.PAGE_ROWS == 1:
        found = rows_of_keys(table, at, last, args, config)
    else:
        found = page_numbers(table, at, shift, last, args, config)
    return found


@gluon.jit
def load_step(
    source, found, at, shift, head, dim, full, tiles_s, stage, args, CHUNKS: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Loads the keys or values of a step."""
    if config.PAGE_ROWS == 1:
        copy_rows(source, found, head, dim, full, tiles_s, stage * CHUNKS, args, CHUNKS)
    else:
        mbarrier.expect(full, config.BLOCK_N * 2 * CHUNKS * tiles_s.shape[2])
        load_pages(
            source, found, at, shift, head, full, tiles_s, stage * CHUNKS, CHUNKS, config.PAGE_ROWS
        )


@gluon.jit
def produce(args, config: gl.constexpr):
    """Draws tiles and sends them to the consumers. Loads their queries, keys and values.

    An item of the list is a sequence, the tile's first row, its number of rows, the keys [first,
    end) that some row attends to, and those [full_lo, full_hi) that all rows attend to. For a tile
    without keys, end is 0. To the consumers, a tile's `b` is its number of rows, its `start` the
    first key, and `checked` the end of the keys.
    """
    shared = args.shared
    QK_BYTES: gl.constexpr = 2 * config.QK_DIM
    WARP_GROUPS: gl.constexpr = config.WARP_GROUPS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PAGE_ROWS: gl.constexpr = config.PAGE_ROWS
    group = args.heads // args.kv_heads
    # a table of one page may have pages of any size
    shift = gl.where(args.table_width == 1, 30, shift_of(args.page_size))
    qk_dim = args.query.shape[3] // 8 * 8  # so the compiler knows that rows are 16-byte aligned
    tiles = gl.load(args.listed)
    total = tiles * args.heads
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    nth = gl.program_id(0)
    while nth < total:
        place = nth // group
        kv_head = place // tiles
        head = kv_head * group + nth % group
        item = args.listed + (tiles - place % tiles) * ITEM  # the last rows of a chunk first
        table = args.block_table + gl.load(item).to(gl.int64) * args.table_width
        row = gl.load(item + 1)
        count = gl.load(item + 2)
        first = gl.load(item + 3)
        end = gl.load(item + 4)
        start = first // PAGE_ROWS * PAGE_ROWS
        steps, full_begin, full_end = split(
            start, gl.maximum(end, start + 1), gl.load(item + 5), gl.load(item + 6), BLOCK_N
        )
        partial = steps - full_end + full_begin
        last = gl.maximum(end - 1, 0)
        if PAGE_ROWS > 1:
            last = last >> shift
        numbers = StepRange(first, steps, partial, full_begin, full_end)
        tile = RowTile(row, head, count, numbers, end)
        if PAGE_ROWS == 1:
            send_by_warps(shared, slot, slot_phase, tile)
        else:
            send(shared, slot, slot_phase, tile)
        for w in gl.static_range(WARP_GROUPS):
            mbarrier.wait(shared.q_empty.index(w), q_phase ^ 1)
            full = shared.q_full.index(w)
            mbarrier.expect(full, 64 * QK_BYTES)
            load_chunks(
                args.query, 0, row + w * 64, head, full, shared.q_s, w * config.SLOTS, config.CHUNKS
            )
        kv_range = StepRange(start, steps, partial, full_begin, full_end)
        at = kv_range.nth(0, BLOCK_N)
        found = find_keys(table, at, shift, last, args, config)
        for i in range(0, steps):
            following = kv_range.nth(gl.minimum(i + 1, steps - 1), BLOCK_N)
            # read while this step waits for room
            found_next = find_keys(table, following, shift, last, args, config)
            mbarrier.wait(shared.k_empty.index(stage), phase ^ 1)
            load_step(
                args.key, found, at, shift, kv_head, qk_dim, shared.k_full.index(stage), shared.k_s,
                stage, args, config.CHUNKS, config,
            )  # fmt: skip
            mbarrier.wait(shared.v_empty.index(stage), phase ^ 1)
            load_step(
                args.value, found, at, shift, kv_head, args.v_dim, shared.v_full.index(stage),
                shared.v_s, stage, args, config.V_CHUNKS, config,
            )  # fmt: skip
            at = following
            found = found_next
            stage, phase = next_stage(stage, phase, config.STAGES)
        nth = gl.atomic_add(args.counter, 1, sem="relaxed") + gl.num_programs(0)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
    if PAGE_ROWS == 1:
        no_steps = StepRange(0, 0, 0, 0, 0)
        send_by_warps(shared, slot, slot_phase, RowTile(0, 0, 0, no_steps, 0))
    else:
        send_stop(shared, slot, slot_phase)


@gluon.constexpr_function
def zero_rows_asm(rows, columns):
    """Zeros in rows [begin, end) of a tile of 16-bit elements, by a warp group. Columns of 128
    bytes are stored one after another, and their swizzle permutes only within 128 bytes. Operands:
    address, begin, end."""
    blocks = columns // 64
    stores = " ".join(
        f"st.shared.v4.b32 [a+{rows * 128 * block}], {{z, z, z, z}};" for block in range(blocks)
    )
    return (
        "{ .reg .u32 a, e, z; .reg .pred p; mov.u32 a, %tid.x; and.b32 a, a, 127; mov.b32 z, 0;"
        " shl.b32 a, a, 4; add.u32 a, a, $0; mad.lo.u32 e, $2, 128, $0; mad.lo.u32 a, $1, 128, a;"
        f" LOOP: setp.lt.u32 p, a, e; @!p bra DONE; {stores} add.u32 a, a, 2048; bra LOOP; DONE: }}"
    )


@gluon.jit
def zero_values(at, first, end, shared, stage, phase, config: gl.constexpr):
    """Overwrites the values of a step's keys outside of [first, end) with zeros."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    below = gl.maximum(first - at, 0)
    above = gl.maximum(end - at, 0)
    if config.PAGE_ROWS > 1 and ((below > 0) | (above < BLOCK_N)):
        mbarrier.wait(shared.v_full.index(stage), phase)
        for c in gl.static_range(V_CHUNKS):
            tile = shared.v_s.index(stage * V_CHUNKS + c)
            asm: gl.constexpr = zero_rows_asm(BLOCK_N, config.V_CHUNK)
            gl.inline_asm(asm, "r,r,r,~{memory}", (tile, 0, below))
            gl.inline_asm(asm, "r,r,r,~{memory}", (tile, above, BLOCK_N))
        fence_async_shared()
        gl.barrier()


@gluon.jit
def wait_full(full, phase, config: gl.constexpr):
    """Waits for keys or values, and lets the following products read what cp.async wrote."""
    mbarrier.wait(full, phase)
    if config.PAGE_ROWS == 1:
        fence_async_shared()


@gluon.jit
def apply_ranges(s, rows, end_row, at, args):
    """Sets the scores of keys outside of the rows' ranges to -inf."""
    valid = rows < end_row
    lo = gl.load(args.kv_start + rows, mask=valid, other=0)
    hi = gl.load(args.kv_end + rows, mask=valid, other=0)
    bits = gl.inline_asm(
        range_bits_asm, ("=&r", "r", "r", "r"), (lo, hi, at), lo.type, is_pure=True
    )
    return select_bits(s, bits, float("-inf"))


@gluon.jit
def store_tile(W: gl.constexpr, outputs, args, row, end_row, head, config: gl.constexpr):
    """Stores a warp group's rows below `end_row`, through shared memory, so that a warp writes
    whole rows."""
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    dtype: gl.constexpr = args.out.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V_CHUNK, V_CHUNK // 8], [4, 1], [1, 0])
    gl.barrier()
    for c in gl.static_range(V_CHUNKS):
        args.shared.o_s.index(W * V_CHUNKS + c).store(outputs[c].to(dtype))
    gl.barrier()
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    at = (rows.to(gl.int64) * args.heads + head) * args.v_dim
    columns = gl.arange(0, V_CHUNK, gl.SliceLayout(0, layout))
    for c in gl.static_range(V_CHUNKS):
        column = gl.expand_dims(columns + c * V_CHUNK, 0)
        valid = gl.expand_dims(rows < end_row, 1) & (column < args.v_dim)
        chunk = args.shared.o_s.index(W * V_CHUNKS + c).load(layout)
        gl.store(args.out + (gl.expand_dims(at, 1) + column), chunk, mask=valid)


@gluon.jit
def consume(W: gl.constexpr, args, config: gl.constexpr):
    """As fwd_consumer.consume."""
    shared = args.shared
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    V_CHUNK: gl.constexpr = config.V_CHUNK
    V_CHUNKS: gl.constexpr = config.V_CHUNKS
    dtype: gl.constexpr = args.out.dtype.element_ty
    half: gl.constexpr = half_name(dtype)
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    o_layout: gl.constexpr = accumulator(V_CHUNK)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    if W == 0:
        gl.inline_asm(named_barrier("arrive", 0, 256), "", (), ())
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    q_phase = 0
    tile = receive_tile(shared, 0, 0)
    while tile.kv_range.steps > 0:
        steps = tile.kv_range.steps
        partial = tile.kv_range.partial
        first = tile.kv_range.start
        end = tile.checked
        head = tile.head_part
        end_row = tile.row + tile.b
        kv_range = StepRange(
            first // config.PAGE_ROWS * config.PAGE_ROWS, steps, partial,
            tile.kv_range.full_begin, tile.kv_range.full_end,
        )  # fmt: skip
        lanes_arrive(shared.work_empty.index(slot))
        row = tile.row + W * 64
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        acc = zeros(config.V_DIM, V_CHUNK)
        mbarrier.wait(shared.q_full.index(W), q_phase)

        # the first step has no second product: there is no previous P
        wait_full(shared.k_full.index(stage), phase, config)
        ping_pong_wait(W, 2)
        s = scores(shared.q_s, shared.k_s, W, stage, zero, config)
        ping_pong_pass(W, 2)
        s = warpgroup_mma_wait(0, deps=(s,))
        warp_arrive(shared.k_empty.index(stage))
        at = kv_range.nth(0, BLOCK_N)
        s = apply_ranges(s, rows, end_row, at, args)
        m = gl.full([64], -3e38, gl.float32, gl.SliceLayout(1, s_layout))
        l = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        p, m, l, alpha = softmax(s, m, l, args.scale2, BLOCK_N, half, 8, False)
        zero_values(at, first, end, shared, stage, phase, config)
        stage, phase = next_stage(stage, phase, STAGES)
        for part in gl.static_range(2):  # partial steps, then full steps
            begin = 1 if part == 0 else gl.maximum(partial, 1)
            stop = partial if part == 0 else steps
            for i in range(begin, stop):
                old, old_phase = previous_stage(stage, phase, STAGES)
                if config.PAGE_ROWS == 1:  # a single fence, before this warp group's turn
                    mbarrier.wait(shared.v_full.index(old), old_phase)
                wait_full(shared.k_full.index(stage), phase, config)
                ping_pong_wait(W, 2)
                w = W + rematerialized_zero(i, config.REMATERIALIZE)
                s_token = scores(shared.q_s, shared.k_s, w, stage, zero, config)
                if config.PAGE_ROWS > 1:
                    mbarrier.wait(shared.v_full.index(old), old_phase)
                p_half = unpack(p, BLOCK_N, p_layout, dtype)
                acc_tokens = add_products(p_half, shared.v_s, old, acc)
                ping_pong_pass(W, 2)
                s = warpgroup_mma_wait(V_CHUNKS, deps=(s_token,))
                warp_arrive(shared.k_empty.index(stage))
                if part == 0:
                    at = kv_range.nth(i, BLOCK_N)
                    s = apply_ranges(s, rows, end_row, at, args)
                p, m, l, alpha = softmax(s, m, l, args.scale2, BLOCK_N, half, 8, False)
                acc = wait_products(acc_tokens, 0, V_CHUNKS)
                warp_arrive(shared.v_empty.index(old))
                acc = rescale(acc, alpha, V_CHUNK, V_CHUNKS)
                if part == 0:
                    zero_values(at, first, end, shared, stage, phase, config)
                stage, phase = next_stage(stage, phase, STAGES)
        warp_arrive(shared.q_empty.index(W))
        old, old_phase = previous_stage(stage, phase, STAGES)
        wait_full(shared.v_full.index(old), old_phase, config)
        p_half = unpack(p, BLOCK_N, p_layout, dtype)
        acc_tokens = add_products(p_half, shared.v_s, old, acc)
        l = gl.inline_asm(quad_sum_asm, ("=&f", "f"), (l,), l.type, is_pure=True)
        valid = rows < end_row
        lo = gl.load(args.kv_start + rows, mask=valid, other=0)
        hi = gl.load(args.kv_end + rows, mask=valid, other=0)
        sink = sink_of(args.sinks, args.has_sinks, 0, args.heads, head)
        attended = (l != 0.0) & (hi > gl.maximum(lo, 0))  # true for a NaN
        l = add_sink(l, m, sink, False)
        natural = gl.where(attended, log_sum_exp(l, m, sink), float("-inf"))
        gl.store(args.lse + head.to(gl.int64) * args.rows + rows, natural, mask=valid)
        inverse = gl.where(attended, 1.0 / l, -1.0)
        acc = wait_products(acc_tokens, 0, V_CHUNKS)
        warp_arrive(shared.v_empty.index(old))
        inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o_layout)), 1)
        # select, not multiply: a row that attends to nothing may have summed garbage in full steps
        outputs = ()
        for c in gl.static_range(V_CHUNKS):
            outputs = outputs + (gl.where(inverse < 0.0, 0.0, acc[c] * inverse),)  # noqa: RUF005
        store_tile(W, outputs, args, row, end_row, head, config)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        q_phase = q_phase ^ 1
        tile = receive_tile(shared, slot, slot_phase)


@gluon.jit
def ragged_sm90(
    query, key, value, out, lse, sinks, kv_start, kv_end, block_table, workspace, counter, scale,
    has_sinks, q_len, pages, page_size, table_width, heads, kv_heads, v_eighths, room,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGE_ROWS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
):  # fmt: skip
    """query is a tensor map of (1, heads, q_len, dim) with boxes of 64 rows, and key and value of
    (pages, kv_heads, page_size, dim) with boxes of PAGE_ROWS rows. A page has PAGE_ROWS rows times
    a power of two, or is the only one of its sequence. If PAGE_ROWS is 1, key and value are
    pointers, and pages * page_size is below 2^31. `workspace` is decode.py's, with `room`
    items and the list of tiles at the end. `counter` is 0 at launch. `scale` is positive."""
    CHUNKS: gl.constexpr = QK_DIM // QK_CHUNK
    SLOTS: gl.constexpr = query_slots(CHUNKS)
    V_CHUNKS: gl.constexpr = V_DIM // V_CHUNK
    # of the producer: each thread when its rows have been copied, or one with the number of bytes
    ARRIVALS: gl.constexpr = 128 if PAGE_ROWS == 1 else 1
    gl.static_assert(WARP_GROUPS == 2)
    config: gl.constexpr = constants(
        QK_DIM=QK_DIM, QK_COLUMNS=QK_DIM, QK_CHUNK=QK_CHUNK, V_DIM=V_DIM, V_CHUNK=V_CHUNK,
        CHUNKS=CHUNKS, SLOTS=SLOTS, V_CHUNKS=V_CHUNKS,
        WARP_GROUPS=WARP_GROUPS, BLOCK_N=BLOCK_N, STAGES=STAGES, PAGE_ROWS=PAGE_ROWS,
        REMATERIALIZE=REMATERIALIZE,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    shared = RowTileShared(
        q_s=allocate_tiles(dtype, WARP_GROUPS * SLOTS, 64, QK_CHUNK), do_s=None,
        k_s=allocate_tiles(dtype, STAGES * CHUNKS, BLOCK_N, QK_CHUNK),
        v_s=allocate_tiles(dtype, STAGES * V_CHUNKS, BLOCK_N, V_CHUNK),
        bias_s=None, o_s=allocate_tiles(dtype, WARP_GROUPS * V_CHUNKS, 64, V_CHUNK),
        work_s=allocate_lines(gl.int32, 2, 16),
        q_full=barriers(WARP_GROUPS), q_empty=barriers(WARP_GROUPS),
        k_full=barriers(STAGES), k_empty=barriers(STAGES),
        v_full=barriers(STAGES), v_empty=barriers(STAGES),
        work_full=barriers(2), work_empty=barriers(2),
    )  # fmt: skip
    init_barriers(WARP_GROUPS, (shared.q_full, shared.q_empty), (1, 4))
    init_barriers(
        STAGES,
        (shared.k_full, shared.v_full, shared.k_empty, shared.v_empty),
        (ARRIVALS, ARRIVALS, WARP_GROUPS * 4, WARP_GROUPS * 4),
    )
    init_barriers(2, (shared.work_full, shared.work_empty), (1, WARP_GROUPS * 128))
    args = RaggedArgs(
        query=query, key=key, value=value, out=out, lse=lse, sinks=sinks, kv_start=kv_start,
        kv_end=kv_end, block_table=block_table,
        listed=workspace + 3 * q_len.to(gl.int64) + room.to(gl.int64) * ITEM,
        counter=counter, has_sinks=has_sinks, rows=q_len, last_page=pages - 1, page_size=page_size,
        table_width=table_width, heads=heads, kv_heads=kv_heads, v_dim=v_eighths * 8,
        scale2=scale * LOG2E, shared=shared,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume, (0, args, config)), (consume, (1, args, config)), (produce, (args, config))],
        [4, 4 if PAGE_ROWS == 1 else 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
