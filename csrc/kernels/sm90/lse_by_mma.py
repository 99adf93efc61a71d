"""Subtracts LSE and delta of a block of rows from S and dP with the tensor cores (LSE_BY_MMA in
csrc/aot/tiles_sm90.py).

The columns of S^T and dP^T are query rows, so each thread needs 16 LSEs and 16 deltas in every
step. Reading them from shared memory would be 8 % of that pipe's traffic. Instead, the last product
of each sum multiplies a matrix of ones by three bfloat16 parts of each number, which hold all of
its 24 bits. The producer warp computes the parts.
"""

from common.kv_ranges import LOG2E
from sm90.common import accumulator
from sm90.tiles import load_line
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

COLUMNS = gl.constexpr(16)  # of parts per row: K of one product; most are 0
FAR = gl.constexpr(2.0**120)  # upper bound of LSE: makes every P 0, and its parts are finite
LEAST = gl.constexpr(2.0**-100)  # lower bound of the scale that LSE is divided by
LANES = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.constexpr_function
def parts_asm(outputs, inputs):
    """Stores a lane's numbers of two rows, negated and in three parts. Zeros fill each row up to 32
    bytes. The product sums whole rows, so the swizzle does not matter.

    Parts are truncated, not rounded, so the remainders are exact: 8 bits and 8 bits and 8 bits.
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
    """The factor of S in base 2, at least 2^-100. Below that, no score under 2^76 makes a
    difference."""
    return gl.maximum(scale * LOG2E, LEAST)


@gluon.jit
def subtract_stats(sums, tile):
    """Starts a product that subtracts from `sums`, which may still be in flight, the number of each
    row (a column of `sums`)."""
    layout: gl.constexpr = accumulator(64)
    ones = gl.full([64, COLUMNS], 1.0, gl.bfloat16, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(ones, tile.permute((1, 0)), sums, is_async=True)
