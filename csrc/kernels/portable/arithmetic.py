"""Arithmetic shared by the attention and decode kernels: matrix products and tanh."""

import triton
import triton.language as tl
from portable.row_sums import LOG2E

SMALL = tl.constexpr(0.3)


@triton.jit
def tanh(x):
    """tanh to about 2 ulp in float32. Near 0, where 1 - 2 / (1 + e^2x) cancels, it is a Taylor
    polynomial."""
    square = x * x
    small = 62.0 / 2835.0 * square - 17.0 / 315.0
    small = (small * square + 2.0 / 15.0) * square - 1.0 / 3.0
    small = (small * square) * x + x
    large = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return tl.where(tl.abs(x) < SMALL, small, large)


@triton.jit
def to_tf32(x):
    """x rounded to the nearest TF32 number (11 significant bits), ties away from zero. NaN stays
    NaN."""
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def dot(a, b, acc, FLOAT32_PRODUCTS: tl.constexpr):
    """a @ b, added to `acc` unless it is None.

    FLOAT32_PRODUCTS selects float32 products without tensor cores. Otherwise float32 operands are
    rounded to TF32. It does not affect 16-bit operands.
    """
    PRECISION: tl.constexpr = "ieee" if FLOAT32_PRODUCTS else "tf32"
    # tensor cores truncate float32 operands, which has twice the rounding error
    if not FLOAT32_PRODUCTS and a.dtype == tl.float32:
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)
