"""Shared by the Hopper kernels: accumulator layouts, barriers, and inline assembly.

Inline assembly sees the registers of one thread in the order of `accumulator`: for each octet of
columns (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1), with c = 2 * (lane % 4). P in a
DotOperandLayout has the same order. The elements of a row are in the four threads of a quad.
"""

from common.kv_ranges import BLOCK
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def accumulator(n):
    """Layout of an accumulator of one warp group: 64 rows, n columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def named_barrier(kind, i, threads):
    return f"bar.{kind} {8 + i}, {threads};"  # Triton uses the low numbers


@gluon.jit
def wait(barrier, phase, TOGETHER: gl.constexpr):
    """Waits for the end of the barrier's phase. mbarrier.wait also synchronises the warp group if
    it follows another wait on the same ring, as with TOGETHER."""
    if TOGETHER:
        mbarrier.wait(barrier, phase)
    else:
        gl.inline_asm(
            "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
            " @!p bra.uni WAIT; }",
            "r,r,~{memory}",
            (barrier, phase),
        )


@gluon.jit
def warp_arrive(barrier):
    """One arrival per warp (the barrier counts four per warp group). mbarrier.arrive would
    synchronise the warp group first."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0;"
        " @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        (barrier,),
    )


@gluon.jit
def lanes_arrive(barrier):
    """One arrival per lane (the barrier counts 128 per warp group), after data that every lane
    reads. racecheck only connects a lane's reads with an arrival of the same lane."""
    gl.inline_asm("mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}", (barrier,))


@gluon.jit
def own_steps(q_blocks, mask_b, block, q_len, start, steps, partial, STEP: gl.constexpr):
    """The first and the end of the partial steps that a block of 64 rows of the tile needs, in the
    order of `nth_step`. The other steps have no pair of its rows.

    If there are full steps, all rows attend to them. Then only steps after the full ones are
    skipped, because those before them are processed between the needed ones and the full ones. At
    least one step remains.
    """
    blocks = (q_len + BLOCK - 1) // BLOCK
    at = q_blocks + mask_b.to(gl.int64) * (5 * blocks) + gl.minimum(block, blocks - 1)
    own_start = gl.load(at)
    own_end = gl.load(at + 3 * blocks)
    past = steps - gl.maximum(own_end - start + STEP - 1, 0) // STEP
    first = gl.minimum(gl.maximum(past, 0), steps - 1)
    before = gl.maximum(own_start - start, 0) // STEP
    last = gl.where(partial == steps, gl.maximum(steps - before, first + 1), partial)
    return first, last


@gluon.constexpr_function
def range_bits_asm(outputs, inputs):
    """For each of a thread's two rows, one bit per column of this thread (two per octet): 1 where
    lo[row] <= start + column < hi[row]. Operands: bits (2), lo (2), hi (2), start."""
    (out,) = outputs
    lo, hi, start = inputs
    t = [
        "{ .reg .u32 q, f, g; .reg .s32 a; .reg .b32 h; mov.u32 q, %tid.x; and.b32 q, q, 3;"
        f"shl.b32 q, q, 1; add.u32 q, q, {start[0]};"
    ]
    for r in (0, 1):
        for bound, dst in ((lo[r], out[r]), (hi[r], "h")):
            # number of this thread's columns below the bound: two per whole octet, plus up to two
            # in the next octet
            t.append(
                f"sub.s32 a, {bound}, q; max.s32 a, a, 0; shr.u32 f, a, 3; and.b32 g, a, 7; "
                f"min.u32 g, g, 2;"
                f"mad.lo.u32 f, f, 2, g; shl.b32 {dst}, -1, f;"
            )
        t.append(f"not.b32 h, h; and.b32 {out[r]}, {out[r]}, h;")
    return " ".join(t) + " }"


@gluon.constexpr_function
def element_bits_asm(n, compare):
    """Bits as in `range_bits_asm`, for `column_value compare row_value`. Operands: bits (2), row
    values (2), pointer to the column values, first column, end of the columns.

    The loop is not unrolled, because only segment-checked tiles take this path and it must not cost
    other tiles a register.
    """
    t = [
        "{ .reg .u64 p; .reg .u32 q; .reg .s32 x, c, last; .reg .b32 bit;"
        " .reg .pred in, a; mov.u32 q, %tid.x; and.b32 q, q, 3;"
        f"shl.b32 q, q, 1; add.s32 c, $5, q; add.s32 last, c, {n}; mul.wide.s32 p, c, 4; add.u64 "
        f"p, p, $4;"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 bit, 1; LOOP:"
    ]
    for j in (0, 1):
        t.append(
            f"add.s32 q, c, {j}; setp.lt.s32 in, q, $6; mov.b32 x, 0; @in ld.global.s32 x, "
            f"[p+{4 * j}];"
            f"setp.{compare}.and.s32 a, x, $2, in; @a or.b32 $0, $0, bit;"
            f"setp.{compare}.and.s32 a, x, $3, in; @a or.b32 $1, $1, bit; shl.b32 bit, bit, 1;"
        )
    return (
        " ".join(t) + " add.s32 c, c, 8; add.u64 p, p, 32; setp.lt.s32 a, c, last; @a bra LOOP; }"
    )


@gluon.jit
def element_bits(row_values, columns, first, end, N: gl.constexpr, compare: gl.constexpr):
    return gl.inline_asm(
        element_bits_asm(N, compare),
        "=&r,=&r,r,r,l,r,r",
        (row_values, columns, first, end),
        row_values.type,
        is_pure=True,
    )


@gluon.jit
def rematerialized_zero(step, REMATERIALIZE: gl.constexpr):
    """Returns 0. With REMATERIALIZE, it is computed from the number of a step, so the compiler does
    not know its value and computes addresses that depend on it in every step, from a uniform
    register. Otherwise the compiler computes the addresses of operands that never move before the
    loop, eight per operand. If they do not fit in a warp's 63 uniform registers, they are copied
    from other registers with R2UR before every product. (2^30 blocks of 64 rows would be a query of
    8 TB, so the result is always 0.)"""
    if REMATERIALIZE:
        zero = step >> 30
    else:
        zero = 0
    return zero


@gluon.constexpr_function
def select_bits_asm(outputs, inputs):
    """Replaces the scores whose bit is 0, with two instructions per score. Operands: results,
    scores, bits (2), replacement."""
    (o,) = outputs
    s, bits, other = inputs
    t = ["{ .reg .u32 u; .reg .pred p;"]
    for i in range(len(s)):
        t.append(
            f"and.b32 u, {bits[(i >> 1) & 1]}, {1 << ((i >> 2) * 2 + (i & 1))};"
            f"setp.ne.u32 p, u, 0; selp.f32 {o[i]}, {s[i]}, {other[0]}, p;"
        )
    return " ".join(t) + " }"


@gluon.jit
def select_bits(s, bits, other):
    constraints: gl.constexpr = ("=&f", "f", "r", "f")
    return gl.inline_asm(select_bits_asm, constraints, (s, bits, other), s.type, is_pure=True)


@gluon.constexpr_function
def quad_sum_asm(outputs, inputs):
    """Sum over the four threads of a quad. All four get the result."""
    (o,) = outputs
    (x,) = inputs
    t = ["{ .reg .f32 a;"]
    for i in range(len(o)):
        t.append(
            f"shfl.sync.bfly.b32 a, {x[i]}, 1, 31, -1; add.f32 {o[i]}, a, {x[i]};"
            f"shfl.sync.bfly.b32 a, {o[i]}, 2, 31, -1; add.f32 {o[i]}, {o[i]}, a;"
        )
    return " ".join(t) + " }"
