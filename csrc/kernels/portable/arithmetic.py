"""Arithmetic that attention and decoding share: products, and tanh."""

import triton
import triton.language as tl
from portable.row_sums import LOG2E

SMALL = tl.constexpr(0.3)


@triton.jit
def tanh(x):
    """To about 2 units of float32: a Taylor polynomial where 1 - 2 / (1 + e^2x) would cancel."""
    square = x * x
    small = 62.0 / 2835.0 * square - 17.0 / 315.0
    small = (small * square + 2.0 / 15.0) * square - 1.0 / 3.0
    small = (small * square) * x + x
    large = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return tl.where(tl.abs(x) < SMALL, small, large)


@triton.jit
def to_tf32(x):
    """x rounded to the nearest number of 11 bits; of two as near, to the larger one. A NaN stays
    one."""
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def dot(a, b, acc, FLOAT32_PRODUCTS: tl.constexpr):
    """a @ b, onto `acc` unless it is None.

    FLOAT32_PRODUCTS: products of float32, without tensor cores, else of float32 operands rounded to
    11 bits (TF32). Neither says anything for operands of 16 bits.
    """
    PRECISION: tl.constexpr = "ieee" if FLOAT32_PRODUCTS else "tf32"
    if (
        not FLOAT32_PRODUCTS and a.dtype == tl.float32
    ):  # tensor cores would cut the rest off: twice the error
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)
