"""The online softmax of the Hopper forward, as inline assembly on each thread's registers.

P is packed into pairs of 16 bits immediately, so that three warp groups fit in 160 registers per
thread. Each thread keeps a partial row sum until the end. The maximum is updated only when it grows
by more than 8 in base 2, so that the accumulator is rarely rescaled. (The result is the same,
because p and l share the factor.) Kernels that store the maximum update it whenever it grows.

Register order: see sm90/common.py.
"""

from sm90.common import accumulator
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LEAST = gl.constexpr(-3.4028234663852886e38)


@gluon.constexpr_function
def operands(n):
    """Operand numbers of a softmax step: results m, l and alpha (2 each), which follow P; the first
    score; inputs m and l (2 each) and scale."""
    o = n // 2
    s = o + 6
    inputs = [s + n, s + n + 1], [s + n + 2, s + n + 3], s + n + 4
    return ([o, o + 1], [o + 2, o + 3], [o + 4, o + 5]), s, inputs


@gluon.constexpr_function
def over_row(r, operation, total, scores):
    """Reduces a thread's scores of row r with max or add, in two chains: {total}{2r} and {total}{2r
    + 1}."""
    t, row_scores = [], [x for i, x in enumerate(scores) if (i >> 1) & 1 == r]
    for c in (0, 1):
        part, x = row_scores[c::2], f"{total}{2 * r + c}"
        t.append(f"{operation}.f32 {x}, {part[0]}, {part[1]};")
        t += [f"{operation}.f32 {x}, {x}, {y};" for y in part[2:]]
    return t


@gluon.constexpr_function
def row_maxima(scores):
    """Sets g0 and g1 to the maxima of the two rows, in all threads of a quad."""
    t = []
    for r in (0, 1):
        t += over_row(r, "max", "x", scores)
        t.append(f"max.f32 g{r}, x{2 * r}, x{2 * r + 1};")
    for d in (1, 2):
        t += [f"shfl.sync.bfly.b32 k{r}, g{r}, {d}, 31, -1;" for r in (0, 1)]
        t += [f"max.f32 g{r}, g{r}, k{r};" for r in (0, 1)]
    return t


@gluon.constexpr_function
def exponential(i, half):
    """2^e{i} in place. Every second result is packed together with the previous one."""
    t = [f"ex2.approx.ftz.f32 e{i}, e{i};"]
    if i & 1:
        t.append(f"cvt.rn.{half}x2.f32 ${i // 2}, e{i}, e{i - 1};")
    return t


@gluon.constexpr_function
def row_sums(n, l_in, l_out, a_out):
    """Multiplies l by alpha and adds the exponentials."""
    t = []
    for r in (0, 1):
        t += over_row(r, "add", "w", [f"e{i}" for i in range(n)])
        t.append(
            f"add.f32 w{2 * r}, w{2 * r}, w{2 * r + 1}; fma.rn.f32 ${l_out[r]}, ${l_in[r]}, "
            f"${a_out[r]}, w{2 * r};"
        )
    return t


@gluon.constexpr_function
def softmax_asm(n, half, growth, natural):
    """One thread's share of a softmax step. Operands: n / 2 packed P, m (2), l (2), alpha (2), then
    n scores, m (2), l (2), scale.

    Score register i belongs to row 8 * (i >> 1 & 1). The maximum is reduced over the quad, and
    alpha is the same in all its threads. `growth`: the maximum is updated when it grows by more
    than this, in base 2. `natural`: the maximum is not scaled, and only differences from it are
    multiplied by the scale, so that no large score overflows.
    """
    growth = {0: "0f00000000", 8: "0f41000000"}[growth]
    (m_out, l_out, a_out), s, (m_in, l_in, scale) = operands(n)
    t = [f"{{ .reg .f32 x<4>, w<4>, g<2>, k<2>, e<{n}>; .reg .pred q;"]
    t += row_maxima([f"${s + i}" for i in range(n)])
    for r in (0, 1):
        if not natural:
            t.append(f"mul.f32 g{r}, g{r}, ${scale};")
        t.append(
            f"add.f32 k{r}, ${m_in[r]}, {growth}; setp.gt.f32 q, "
            f"g{r}, k{r};"
            f"selp.f32 ${m_out[r]}, g{r}, ${m_in[r]}, q; sub.f32 k{r}, ${m_in[r]}, ${m_out[r]};"
        )
        if natural:
            t.append(f"mul.f32 k{r}, k{r}, ${scale};")
        t.append(f"ex2.approx.ftz.f32 ${a_out[r]}, k{r}; neg.f32 g{r}, ${m_out[r]};")
    for i in range(n):
        if natural:
            t.append(f"add.f32 e{i}, ${s + i}, g{(i >> 1) & 1}; mul.f32 e{i}, e{i}, ${scale};")
        else:
            t.append(f"fma.rn.f32 e{i}, ${s + i}, ${scale}, g{(i >> 1) & 1};")
        t += exponential(i, half)
    t += row_sums(n, l_in, l_out, a_out)
    return " ".join(t) + " }"


@gluon.constexpr_function
def half_name(dtype):
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.jit
def softmax(
    s, m, l, scale2, N: gl.constexpr, half: gl.constexpr, GROWTH: gl.constexpr,
    NATURAL: gl.constexpr,
):  # fmt: skip
    """Returns P as pairs of 16 bits, the new m, the partial l, and alpha. P is int32 [64, N / 2],
    because 16-bit values carried through the loop would cost a PRMT each."""
    packed: gl.constexpr = gl.distributed_type(gl.int32, [64, N // 2], accumulator(N // 2))
    return gl.inline_asm(
        softmax_asm(N // 2, half, GROWTH, NATURAL),
        ("=&r", "=&f", "=&f", "=&f", "f", "f", "f", "f"),
        (s, m, l, scale2),
        (packed, m.type, l.type, m.type),
        is_pure=True,
    )


@gluon.constexpr_function
def unpack_asm(outputs, inputs):
    (o,) = outputs
    (x,) = inputs
    return " ".join(f"mov.b32 {{{o[2 * i]}, {o[2 * i + 1]}}}, {x[i]};" for i in range(len(x)))


@gluon.jit
def unpack(p, N: gl.constexpr, layout: gl.constexpr, dtype: gl.constexpr):
    bits = gl.inline_asm(
        unpack_asm, ("=h", "r"), (p,), gl.distributed_type(gl.int16, [64, N], layout), is_pure=True
    )
    return bits.to(dtype, bitcast=True)


@gluon.constexpr_function
def rescale_asm(n):
    """acc *= alpha, skipped by warps in which every alpha is 1. Operands: n results, n tied acc,
    alpha (2)."""
    t = [
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000;"
        f" setp.neu.or.f32 p, ${2 * n + 1}, 0f3F800000, p;"
        " vote.sync.any.pred q, p, -1; @!q bra DONE;"
    ]
    t += [f"mul.f32 ${i}, ${i}, ${2 * n + ((i >> 1) & 1)};" for i in range(n)]
    return " ".join(t) + " DONE: }"


@gluon.constexpr_function
def rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f", "f"])


@gluon.constexpr_function
def accumulator_types(columns, chunks):
    return (gl.distributed_type(gl.float32, [64, columns], accumulator(columns)),) * chunks


@gluon.jit
def rescale(sums, alpha, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr):
    """Rescales the chunks (chunked_mma.py) of an accumulator, of COLUMNS columns each."""
    registers: gl.constexpr = COLUMNS * CHUNKS // 2
    constraints: gl.constexpr = rescale_constraints(registers)
    types: gl.constexpr = accumulator_types(COLUMNS, CHUNKS)
    operands = sums + (alpha,)  # noqa: RUF005
    return gl.inline_asm(rescale_asm(registers), constraints, operands, types, is_pure=True)
