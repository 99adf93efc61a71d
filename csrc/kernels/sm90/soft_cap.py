"""Soft caps in the Hopper kernels: tanh of scores, in registers.

With s = q k^T a capped logit is cap * tanh(s * scale / cap) (Gemma 2, arXiv 2408.00118). Scores
become tanh here and are from then on in units of the cap, which takes the place of the scale.

Where |s * scale / cap| is up to 1/2, as those of trained models mostly are, an odd polynomial: six
multiplications or additions, while the exp unit has the softmax. Else 1 - 2 / (1 + e^2x), two more
operations of that unit, which a warp without such a score leaves out: what it finds of a score
never hangs on the others beside it. The polynomial is within 3e-7 of tanh, the other within 4e-7 by
the errors that PTX allows its ex2 and rcp; a logit so within cap * 4e-7, which is why the handler
gives larger caps to the fallback kernels (OnSm90 in csrc/ffi/fallback.cc).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# tanh(x) = x * (C0 + C1 x^2 + ...) for |x| up to 1/2: least largest relative error, 5.5e-7
POLYNOMIAL = gl.constexpr((0.99999945, -0.33326314, 0.13190271, -0.04440177))
TWO_LOG2E = gl.constexpr(2.8853900817779268)


@gluon.constexpr_function
def hex_float(x):
    """A float32 as PTX writes it."""
    import struct

    return "0f" + struct.pack(">f", float(x)).hex().upper()


@gluon.constexpr_function
def tanh_asm(n):
    """One thread's scores become tanh(s * k), in their own registers. Operands: n results; n tied
    scores, k. Warps decide apart, so all their lanes must be here."""
    while hasattr(n, "value"):
        n = n.value
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
    while hasattr(n, "value"):
        n = n.value
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"])


@gluon.jit
def tanh_of_scores(s, k, N: gl.constexpr):
    """tanh(s * k) of a tile of N columns in `accumulator` layout."""
    constraints: gl.constexpr = tanh_constraints(N // 2)
    return gl.inline_asm(tanh_asm(N // 2), constraints, (s, k), s.type, is_pure=True)
