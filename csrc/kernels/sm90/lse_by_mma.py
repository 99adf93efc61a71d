"""LSE and delta of a block of rows, taken off S and dP by the matrix units (LSE_BY_MMA in
csrc/aot/tiles_sm90.py).

S^T and dP^T have rows along their columns, so each thread needs 16 numbers of each, which it reads
from shared memory in every step: 8 % of what that pipe moves. A product of ones and of three
bfloat16 parts of each number, which are all its 24 bits, ends the sums instead. The producer warp
makes the parts.
"""

from sm90.common import LOG2E, accumulator
from sm90.tiles import load_line
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

COLUMNS = gl.constexpr(16)  # of parts: what one product takes; most are 0
FAR = gl.constexpr(2.0**120)  # an LSE that makes every P 0, and stays finite in parts
LEAST = gl.constexpr(2.0**-100)  # of the scale that LSE is divided by
LANES = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.constexpr_function
def parts_asm(outputs, inputs):
    """Of two rows of a lane: minus its number in three parts, then zeros, 32 bytes a row. All of a
    row is summed, so no swizzle matters.

    Bits are cut off, not rounded, and what is left is exact: 8 bits and 8 bits and 8 bits.
    """
    x, address = inputs
    t = [
        "{ .reg .u32 a; .reg .b32 h, m, l, z; .reg .f32 f, r; mov.b32 z, 0; mov.u32 a, %laneid;"
        f"mad.lo.u32 a, a, 64, {address[0]};"
    ]
    for j, number in enumerate(x):
        t.append(
            f"neg.f32 r, {number}; mov.b32 h, r; and.b32 h, h, 0xFFFF0000; mov.b32 f, h; sub.f32 "
            f"r, r, f;"
            "mov.b32 m, r; and.b32 m, m, 0xFFFF0000; mov.b32 f, m; sub.f32 r, r, f; mov.b32 l, r;"
            "shr.u32 h, h, 16; or.b32 h, h, m; shr.u32 l, l, 16;"
            f"st.shared.v4.b32 [a+{32 * j}], {{h, l, z, z}}; st.shared.v4.b32 [a+{32 * j + 16}], "
            f"{{z, z, z, z}};"
        )
    return " ".join(t) + " fence.proxy.async.shared::cta; bar.warp.sync -1; }"


@gluon.jit
def store_parts(line, tile):
    gl.inline_asm(parts_asm, "f,f,r,~{memory}", (line, tile))


@gluon.jit
def load_row_stats(args, at, slot):
    lines = args.shared.row_stats
    full = args.shared.row_stats_full.index(slot)
    mbarrier.expect(full, 64 * 8)
    load_line(args.row_stats.lse2, lines.lse2.index(slot), at, full)
    load_line(args.row_stats.delta, lines.delta.index(slot), at, full)


@gluon.jit
def lse_scale(scale):
    """`scale` in base 2 as S is multiplied by it. Below 2^-100 no score of less than 2^76 makes a
    difference."""
    return gl.maximum(scale * LOG2E, LEAST)


@gluon.jit
def less(sums, tile):
    """A product that was started, less a number for each row in all of its column."""
    layout: gl.constexpr = accumulator(64)
    ones = gl.full([64, COLUMNS], 1.0, gl.bfloat16, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(ones, tile.permute((1, 0)), sums, is_async=True)
