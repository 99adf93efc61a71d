"""What the warp groups of `backward_sm90` exchange through shared memory: dS with each other, and
blocks of dQ on their way to the float32 sum.

The sum is in the order of the accumulator's registers (`float4s`; sm90/bwd_postprocess.py undoes
it), so that stores have no bank conflicts and write whole lines, and the copy engine adds one
contiguous range.
"""

from sm90.bwd_producer import ROWS, next_block
from sm90.chunked_mma import (
    count,
    first_columns,
    left_chunks,
    products,
    wait_products,
    width,
)
from sm90.common import named_barrier, warp_arrive
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)


@gluon.constexpr_function
def float4s(x):
    """One thread's registers in fours, each with its offset in bytes from the thread's first float4
    in the sum.

    Layout of the sum, outermost first: groups of 32 columns, warps (2048 bytes each), octets of
    columns, lanes (one float4 each).
    """
    return [
        (i // 16 * 8192 + i // 4 % 4 * 512, ", ".join(x[i : i + 4])) for i in range(0, len(x), 4)
    ]


# t: the offset of a thread's first float4, in bytes
FIRST_FLOAT4 = (
    "{ .reg .u32 t, w; mov.u32 t, %tid.x; and.b32 w, t, 96; and.b32 t, t, 31;"
    " shl.b32 w, w, 6; mad.lo.u32 t, t, 16, w;"
)


@gluon.constexpr_function
def store_registers_asm(outputs, inputs):
    """Each thread stores its registers in shared memory as float4s. The threads of a warp store
    next to each other, without bank conflicts. Operands: chunks, address."""
    *chunks, address = inputs
    x = [register for chunk in chunks for register in chunk]
    t = [FIRST_FLOAT4, f"add.u32 t, t, {address[0]};"]
    for offset, four in float4s(x):
        t.append(f"st.shared.v4.f32 [t+{offset}], {{{four}}};")
    return " ".join(t) + " }"


@gluon.constexpr_function
def by_first_thread(*instructions):
    """Instructions that only the first thread of the warp group executes."""
    t = "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"
    return t + " ".join(f"@p {x};" for x in instructions) + " }"


@gluon.constexpr_function
def arrive_asm():
    return by_first_thread("mbarrier.arrive.shared::cta.b64 _, [$0]")


@gluon.constexpr_function
def bulk_add_asm(size):
    """Adds `size` bytes of shared memory to global memory with the copy engine."""
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    return by_first_thread(f"{add} [$0], [$1], {size}", "cp.async.bulk.commit_group")


@gluon.constexpr_function
def bulk_copy_or_add_asm(size):
    """As bulk_add_asm if the third operand is 0. Copies if it is 1, and does nothing if it is 2."""
    to, places = "global.shared::cta.bulk_group", f"[$0], [$1], {size}"
    t = "{ .reg .pred p, q; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127;"
    t += " setp.eq.u32 p, t, 0; setp.eq.and.s32 q, $2, 0, p;"
    t += f" @q cp.reduce.async.bulk.{to}.add.f32 {places}; setp.eq.and.s32 q, $2, 1, p;"
    return f"{t} @q cp.async.bulk.{to} {places}; @p cp.async.bulk.commit_group; }}"


@gluon.constexpr_function
def registers_constraints(n, letter="f"):
    """Constraints of `n` registers and an address in shared memory."""
    return ",".join([letter] * n + ["r", "~{memory}"])


# t: the swizzled offset of a thread's row of an 8 x 8 matrix: one of its warp's 16 keys (128 bytes
# each), at the first or the second eight columns
MATRIX_ROW = (
    "{ .reg .u32 t, a, b; .reg .b32 p<16>; mov.u32 t, %tid.x; and.b32 a, t, 15;"
    " shl.b32 a, a, 7; and.b32 b, t, 96; shl.b32 b, b, 6;"
    " or.b32 a, a, b; shr.u32 b, t, 4; and.b32 b, b, 1; xor.b32 t, t, b; and.b32 t, t, 7; shl.b32 "
    "t, t, 4; or.b32 t, t, a;"
)


@gluon.constexpr_function
def store_ds_asm(outputs, inputs):
    """Stores 64 keys of dS in a tile of keys x 64 rows with a swizzle of 128 bytes, four 8 x 8
    matrices at a time.

    The tile is aligned to 1024 bytes, so later columns only flip bits of the first columns'
    address.
    """
    x, address = inputs
    t = [MATRIX_ROW, f"add.u32 t, t, {address[0]};"]
    t += [f"mov.b32 p{i}, {{{x[2 * i]}, {x[2 * i + 1]}}};" for i in range(len(x) // 2)]
    for j in range(len(x) // 8):
        four = ", ".join(f"p{4 * j + i}" for i in range(4))
        t.append(
            f"xor.b32 a, t, {32 * j}; stmatrix.sync.aligned.m8n8.x4.shared.b16 [a], {{{four}}};"
        )
    return " ".join(t) + " }"


@gluon.jit
def publish_ds(ds, ds_s, full):
    """Stores this warp group's dS in shared memory. Its first thread arrives at `full` when all of
    it has been stored."""
    gl.inline_asm(store_ds_asm, registers_constraints(ROWS // 2, "h"), (ds, ds_s))
    fence_async_shared()
    gl.barrier()
    gl.inline_asm(arrive_asm(), "r,~{memory}", (full,))


@gluon.jit
def add_staged(
    dq, block, first, stage_s, args, CELLS: gl.constexpr, PENDING: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Adds one warp group's part of a block of rows, in chunks (chunked_mma.py), to the sum of dQ
    from the block's cell `first` on, in register order, through shared memory.

    PENDING: earlier additions that may still read other stages. With COPY_DQ, a program that has
    all tiles of keys copies the first part of a block, so that the sum need not be cleared before,
    and a negative `block` stands for none.
    """
    if config.COPY_DQ:
        if config.TILES == 1:
            copies = args.scalars.kv_len <= 64 * config.HALVES
        else:
            at = gl.maximum(block, 0) % (args.tile.padded // ROWS) - args.earlier.start // ROWS
            copies = (at < 0) | (at >= args.earlier.steps)
        way = gl.where(block < 0, 2, gl.where(copies, 1, 0))
        block = gl.maximum(block, 0)
    at = args.dq_sum + block.to(gl.int64) * (ROWS * config.QK_COLUMNS) + first
    n: gl.constexpr = CELLS // 128
    tma.store_wait(PENDING)
    gl.barrier()
    gl.inline_asm(store_registers_asm, registers_constraints(n), dq + (stage_s,))  # noqa: RUF005
    fence_async_shared()
    gl.barrier()
    if config.COPY_DQ:
        gl.inline_asm(bulk_copy_or_add_asm(CELLS * 4), "l,r,r,~{memory}", (at, stage_s, way))
    else:
        gl.inline_asm(bulk_add_asm(CELLS * 4), "l,r,~{memory}", (at, stage_s))


@gluon.jit
def keys_read(W: gl.constexpr, DQ: gl.constexpr):
    """Warp group W no longer reads the keys. Warp groups 0 and 1 wait for all warp groups that read
    them, each at a separate barrier: synccheck does not support a barrier that is reached from two
    instructions."""
    count: gl.constexpr = 384 if DQ == 2 else 256
    if W != 1:
        gl.inline_asm(named_barrier("arrive", 2, count), "~{memory}", ())
    if W != 0:
        gl.inline_asm(named_barrier("arrive", 1, count), "~{memory}", ())
    if W < 2:
        gl.inline_asm(named_barrier("sync", 1 + W, count), "~{memory}", ())


@gluon.constexpr_function
def columns_of_dq(w, qk_dim, chunk, dq):
    """The first of the columns of dQ that warp group w computes, and their number: half of them if
    they are one chunk, otherwise whole chunks."""
    if dq == 2:
        return 0, qk_dim
    half = qk_dim // 2 if chunk == qk_dim else (qk_dim // chunk + 1) // 2 * chunk
    return w * half, half if w == 0 else qk_dim - half


@gluon.jit
def keys_of_dq(k_s, W: gl.constexpr, QK_DIM: gl.constexpr):
    """The columns of the keys with which warp group W multiplies dS, in chunks."""
    CHUNK: gl.constexpr = k_s.shape[2]
    FIRST: gl.constexpr = columns_of_dq(W, QK_DIM, CHUNK, 1)[0]
    COLUMNS: gl.constexpr = columns_of_dq(W, QK_DIM, CHUNK, 1)[1]
    if CHUNK == QK_DIM:
        keys = (k_s.index(0).slice(FIRST, COLUMNS, dim=1),)
    else:
        keys = ()
        for c in gl.static_range(count(COLUMNS, CHUNK)):
            tile = first_columns(k_s.index(FIRST // CHUNK + c), width(c, COLUMNS, CHUNK))
            keys = keys + (tile,)  # noqa: RUF005
    return keys


@gluon.jit
def sum_rows(args, config: gl.constexpr):
    """The third warp group: computes dQ of every block of rows, from the dS of the other two."""
    QK_COLUMNS: gl.constexpr = config.QK_COLUMNS
    tile = args.tile
    q_range = args.q_range
    CELLS: gl.constexpr = ROWS * QK_COLUMNS
    row_blocks = tile.padded // ROWS
    k = left_chunks(args.shared.k_s, 0, QK_COLUMNS)
    mbarrier.wait(args.shared.kv_full.index(0), 0)
    mbarrier.wait(args.shared.kv_full.index(1), 0)
    g = 0
    n = 0
    for i in range(0, q_range.steps * tile.group):
        stage = i % 2
        in_partial = i < q_range.partial * tile.group
        nth = gl.where(in_partial, q_range.nth_partial(n), q_range.full_begin + n)
        block = q_range.start // ROWS + nth
        mbarrier.wait(args.ds.full.index(stage), (i // 2) & 1)
        ds_t = args.ds.tiles.index(stage).permute((1, 0))
        dq = wait_products(products(ds_t, k), 0, len(k))
        warp_arrive(args.ds.empty.index(stage))
        block += (tile.bh + g) * row_blocks
        add_staged(dq, block, 0, args.dq_s.index(stage), args, CELLS, 1, config)
        n, g = next_block(n, g, in_partial, q_range, tile.group)
    keys_read(2, config.DQ)
    tma.store_wait(0)
