"""ALiBi (arXiv 2108.12409) in the Hopper kernels, in registers.

The logit of row i and key j is scale * score - slope * |i - j|. Positions are indices, so a thread
reads no array and only needs the distances of its rows from its first column. Calls with arrays of
positions, or that need the gradient of the slopes, run on the fallback kernels.
"""

from common.soft_cap import hex_float
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def biased_asm(n):
    """Turns one thread's scores into logits in base 2, in place. Operands: n results, n tied
    scores, positions of the thread's two rows, position of the tile's first column, scale times
    log2(e), slope times -log2(e).

    Distances are float32, so they are exact up to 2^24.
    """
    rows, start, scale, slope = 2 * n, 2 * n + 2, 2 * n + 3, 2 * n + 4
    t = [
        "{ .reg .u32 q; .reg .s32 d; .reg .f32 far<2>, a; mov.u32 q, %tid.x;"
        " and.b32 q, q, 3; shl.b32 q, q, 1;"
        f"add.u32 q, q, ${start};"
    ]
    t += [f"sub.s32 d, ${rows + r}, q; cvt.rn.f32.s32 far{r}, d;" for r in (0, 1)]
    for i in range(n):
        column = 8 * (i >> 2) + (i & 1)
        t.append(
            f"add.f32 a, far{(i >> 1) & 1}, {hex_float(-column)}; abs.f32 a, a; mul.f32 a, a, "
            f"${slope};"
            f"fma.rn.f32 ${i}, ${i}, ${scale}, a;"
        )
    return " ".join(t) + " }"


@gluon.constexpr_function
def biased_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r", "r", "r", "f", "f"])


@gluon.jit
def add_alibi(s, positions, start, scale2, slope2, N: gl.constexpr):
    """Logits of a tile of N columns in `accumulator` layout. `positions` are those of its rows, and
    its columns begin at position `start`. Rows may be queries and columns keys, or the reverse."""
    constraints: gl.constexpr = biased_constraints(N // 2)
    return gl.inline_asm(
        biased_asm(N // 2), constraints, (s, positions, start, scale2, slope2), s.type, is_pure=True
    )
