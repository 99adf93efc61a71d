"""Block masks in the Hopper kernels: the list of blocks of 64 of each tile, and the mask bits of
rows and keys. (portable/block_lists.py has both for the fallback kernels, and defines a list.)

Sizes of mask blocks are powers of two here, so a mask block is either inside one block of 64 or
contains whole ones, and a thread finds its bits by shifts. csrc/launch/select_attention.cc sends
other sizes to the fallback kernels. A step is one block of the list. Bits are as in
common.range_bits_asm.
"""

from sm90.args import HeadMask
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def shift_of(size):
    """log2 of a power of two."""
    return gl.inline_asm("bfind.u32 $0, $1;", "=r,r", (size,), gl.int32, is_pure=True)


@gluon.jit
def list_of_tile(blocks, mask_b, head, tile, tiles, longest):
    """Pointer to the block numbers of a tile, the number of partial blocks, which come first, and
    the number of full blocks, which follow."""
    heads = blocks.block_mask_heads
    at = mask_b * heads + gl.where(heads > 1, head, 0)
    listed = blocks.lists + (at.to(gl.int64) * tiles + tile) * (longest + 2)
    return listed + 2, gl.load(listed), gl.load(listed + 1)


@gluon.jit
def list_of_rows(blocks, scalars, mask_b, head, row):
    """`list_of_tile` for a tile of 128 rows. An empty list becomes one partial block, which is
    fully masked."""
    tiles = (scalars.q_len + 127) // 128
    listed, partial, full_count = list_of_tile(
        blocks, mask_b, head, row // 128, tiles, (scalars.kv_len + 63) // 64
    )
    return listed, gl.where(partial + full_count == 0, 1, partial), full_count


@gluon.jit
def list_of_keys(blocks, scalars, tile, g):
    """`list_of_tile` for a tile of 128 keys and the g-th head of the group."""
    head = tile.kv_head * tile.group + g
    tiles = (scalars.kv_len + 127) // 128
    longest = (scalars.q_len + 63) // 64
    return list_of_tile(blocks, tile.mask_b, head, tile.first_key // 128, tiles, longest)


@gluon.jit
def blocks_of_lists(blocks, scalars, tile):
    """Number of blocks of rows in the lists of a tile of keys, over all heads of the group."""
    total = 0
    for g in range(0, tile.group):
        _, partial, full_count = list_of_keys(blocks, scalars, tile, g)
        total += partial + full_count
    return total


@gluon.jit
def mask_of_head(blocks, scalars, mask_b, head):
    q_shift = shift_of(blocks.q_block)
    kv_shift = shift_of(blocks.kv_block)
    width = (((scalars.kv_len - 1) >> kv_shift) >> 5) + 1
    heads = blocks.block_mask_heads
    at = gl.where(blocks.block_mask_batch > 1, mask_b, 0) * heads + gl.where(heads > 1, head, 0)
    first = at.to(gl.int64) * (((scalars.q_len - 1) >> q_shift) + 1) * width
    return HeadMask(blocks.block_mask + first, width, q_shift, kv_shift)


@gluon.constexpr_function
def bits_of_keys_asm():
    """Bits of 64 keys for a thread's two rows. Operands: bits (2), words of the first 32 keys (2),
    words of the last 32 keys (2), first key, shift."""
    t = [
        "{ .reg .u32 q, t, b; .reg .pred p; setp.ge.u32 p, $7, 6; @p bra SAME;"
        "mov.u32 q, %tid.x; and.b32 q, q, 3; shl.b32 q, q, 1; add.u32 q, q, $6; mov.b32 $0, 0; "
        "mov.b32 $1, 0;"
    ]
    for o in range(8):
        for j in (0, 1):
            t.append(f"add.u32 t, q, {8 * o + j}; shr.u32 t, t, $7;")
            for r in (0, 1):
                word = 2 + r if o < 4 else 4 + r
                t.append(f"shf.r.wrap.b32 b, ${word}, 0, t; and.b32 b, b, 1;")
                t.append(f"mad.lo.u32 ${r}, b, {1 << (2 * o + j)}, ${r};")
    t.append("bra DONE; SAME: shr.u32 t, $6, $7;")
    for r in (0, 1):
        t.append(f"shf.r.wrap.b32 b, ${2 + r}, 0, t; and.b32 b, b, 1; neg.s32 ${r}, b;")
    return " ".join(t) + " DONE: }"


@gluon.jit
def bits_of_keys(head_mask, rows, first_key, q_len):
    """Bits of the 64 keys from `first_key`, a multiple of 64, for `rows`."""
    kv_shift = head_mask.kv_shift
    width = head_mask.width
    row = head_mask.words + (gl.minimum(rows, q_len - 1) >> head_mask.q_shift).to(gl.int64) * width
    low = gl.load(row + ((first_key >> kv_shift) >> 5))
    high = gl.load(row + gl.minimum(((first_key + 32) >> kv_shift) >> 5, width - 1))
    return gl.inline_asm(
        bits_of_keys_asm(),
        "=&r,=&r,r,r,r,r,r,r",
        (low, high, first_key, kv_shift),
        rows.type,
        is_pure=True,
    )


@gluon.constexpr_function
def bits_of_rows_asm():
    """Bits of 64 rows for a thread's two keys, whose mask blocks are in the same word. Operands:
    bits (2), keys (2), pointers to their word in the mask's first row (2), first row, last row of
    the sequence, bytes per row of words, shifts of rows and keys."""
    t = [
        "{ .reg .u64 a; .reg .u32 q, t, b, w<8>, k<2>; .reg .pred p; mov.b32 $0, 0; mov.b32 $1, 0;"
        "shr.u32 k0, $2, $10; shr.u32 k1, $3, $10; setp.ge.u32 p, $9, 6; @p bra SAME;"
        "mov.u32 q, %tid.x; and.b32 q, q, 3; shl.b32 q, q, 1; add.u32 q, q, $6;"
    ]
    for half in (0, 1):
        columns = [8 * o + j for o in range(4 * half, 4 * half + 4) for j in (0, 1)]
        for i, column in enumerate(columns):
            t.append(f"add.u32 t, q, {column}; min.u32 t, t, $7; shr.u32 t, t, $9;")
            t.append(f"mad.wide.u32 a, t, $8, $4; ld.global.u32 w{i}, [a];")
        for i, column in enumerate(columns):
            bit = 1 << (column // 8 * 2 + column % 8)
            for r in (0, 1):
                t.append(f"shf.r.wrap.b32 b, w{i}, 0, k{r}; and.b32 b, b, 1;")
                t.append(f"mad.lo.u32 ${r}, b, {bit}, ${r};")
    t.append("bra DONE; SAME: shr.u32 t, $6, $9; mad.wide.u32 a, t, $8, $4; ld.global.u32 w0, [a];")
    for r in (0, 1):
        t.append(f"shf.r.wrap.b32 b, w0, 0, k{r}; and.b32 b, b, 1; neg.s32 ${r}, b;")
    return " ".join(t) + " DONE: }"


@gluon.jit
def bits_of_rows(head_mask, keys, first_row, q_len):
    """Bits of the 64 rows from `first_row`, a multiple of 64, for `keys`."""
    q_shift = head_mask.q_shift
    kv_shift = head_mask.kv_shift
    width = head_mask.width
    pointers = head_mask.words + gl.minimum((keys >> kv_shift) >> 5, width - 1)
    return gl.inline_asm(
        bits_of_rows_asm(),
        "=&r,=&r,r,r,l,l,r,r,r,r,r",
        (keys, pointers, first_row, q_len - 1, width * 4, q_shift, kv_shift),
        keys.type,
        is_pure=True,
    )
