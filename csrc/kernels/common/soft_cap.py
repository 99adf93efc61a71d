"""Soft caps in the Hopper kernels: tanh of scores, in registers.

With s = q k^T, a capped logit is cap * tanh(s * scale / cap) (Gemma 2, arXiv 2408.00118). Here
scores are replaced with tanh(s * scale / cap). From then on, the kernels use the cap in place of
the scale.

Where |s * scale / cap| is up to 1/2, as it mostly is in trained models, tanh is an odd polynomial.
It takes six multiplications or additions, and leaves the exp unit to the softmax. Elsewhere tanh is
1 - 2 / (1 + e^2x), which takes two more operations of that unit. A warp without such scores skips
this formula. The result for a score never depends on other scores. The polynomial is within 3e-7 of
tanh, and the other formula within 4e-7 given the errors that PTX allows for ex2 and rcp. A logit is
therefore within cap * 4e-7, which is why larger caps are sent to the fallback kernels (kLargestCap
in csrc/launch/select_attention.cc).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# tanh(x) = x * (C0 + C1 x^2 + ...) for |x| up to 1/2: minimax, relative error 5.5e-7
POLYNOMIAL = gl.constexpr((0.99999945, -0.33326314, 0.13190271, -0.04440177))
TWO_LOG2E = gl.constexpr(2.8853900817779268)


@gluon.constexpr_function
def hex_float(x):
    """A float32 literal in PTX."""
    import struct

    return "0f" + struct.pack(">f", float(x)).hex().upper()


@gluon.constexpr_function
def tanh_asm(n):
    """Replaces one thread's scores with tanh(s * k), in place. Operands: n results, n tied scores,
    k. Each warp votes on its branch, so all its lanes must be active."""
    y = [f"${i}" for i in range(n)]
    coefficients = [hex_float(c) for c in POLYNOMIAL.value]
    two_log2e, half = hex_float(TWO_LOG2E.value), hex_float(0.5)
    t = ["{ .reg .f32 a, b<2>, z; .reg .pred p, q;"]
    t += [f"mul.f32 {x}, {x}, ${2 * n};" for x in y]
    t += [f"abs.f32 b{c}, {y[c]};" for c in (0, 1)]
    t += [f"abs.f32 a, {y[i]}; max.f32 b{i & 1}, b{i & 1}, a;" for i in range(2, n)]
    t.append(
        f"max.f32 a, b0, b1; setp.gt.f32 p, a, {half}; vote.sync.any.pred q, p, -1; @q bra FAR;"
    )

    def polynomial(x, result):
        t.append(f"mul.f32 z, {x}, {x}; fma.rn.f32 a, z, {coefficients[3]}, {coefficients[2]};")
        t.append(f"fma.rn.f32 a, a, z, {coefficients[1]}; fma.rn.f32 a, a, z, {coefficients[0]};")
        t.append(f"mul.f32 {result}, {x}, a;")

    for x in y:
        polynomial(x, x)
    t.append("bra DONE; FAR:")
    for x in y:
        polynomial(x, "z")
        t.append(f"abs.f32 a, {x}; setp.gt.f32 p, a, {half}; mul.f32 a, {x}, {two_log2e};")
        t.append(f"ex2.approx.ftz.f32 a, a; add.f32 a, a, {hex_float(1)}; rcp.approx.ftz.f32 a, a;")
        t.append(f"fma.rn.f32 a, a, {hex_float(-2)}, {hex_float(1)}; selp.f32 {x}, a, z, p;")
    return " ".join(t) + " DONE: }"


@gluon.constexpr_function
def tanh_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"])


@gluon.jit
def tanh_of_scores(s, k, N: gl.constexpr):
    """tanh(s * k) of a tile of N columns in `accumulator` layout."""
    constraints: gl.constexpr = tanh_constraints(N // 2)
    return gl.inline_asm(tanh_asm(N // 2), constraints, (s, k), s.type, is_pure=True)
