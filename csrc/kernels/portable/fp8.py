"""Conversion of float8_e4m3fn keys and values, and of the query, to float16 for FP8 decoding.

All products use float16, whatever the query's dtype: float16 represents every float8_e4m3fn
exactly, and a probability with more bits than bfloat16. Each row of the query is scaled by a power
of two so that its largest element fits, and the row's scores are scaled back in float32.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(14)  # exponent of a row's largest element after scaling
LEAST = tl.constexpr(15)  # minimum biased float32 exponent of a row

# Both versions convert two pairs of bytes to two pairs of float16: the first bytes of both pairs,
# and the second bytes. From compute capability 8.9 on there is an instruction:
NATIVE = tl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
# Otherwise exponent and fraction are shifted to their positions in float16. Its exponent bias is 15
# instead of 7, so the result is the number / 256, also for subnormal numbers. NaN, the largest
# magnitude, needs one more bit set.
BITS = tl.constexpr(
    """{
    .reg .b32 x, y, t, n;
    shl.b32 x, $2, 8;
    mov.b32 y, $2;
"""
    + "".join(
        f"""
    and.b32 t, {half}, 0x7f007f00;
    shr.u32 t, t, 1;
    add.u32 n, t, 0x00800080;
    and.b32 n, n, 0x40004000;
    or.b32 t, t, n;
    and.b32 {half}, {half}, 0x80008000;
    or.b32 {half}, {half}, t;"""
        for half in "xy"
    )
    + """
    mov.b32 $0, x;
    mov.b32 $1, y;
    }"""
)


@triton.jit
def unit_of_bytes(IS_NATIVE: tl.constexpr):
    """The factor by which `pairs_to_float16` divides."""
    return 1.0 if IS_NATIVE else 256.0


@triton.jit
def pairs_to_float16(pairs, IS_NATIVE: tl.constexpr):
    """Two float16 tiles, divided by `unit_of_bytes`: the first bytes of all pairs, and the second
    bytes.

    A pair is as wide as a float16, so a tile of pairs is loaded from shared memory directly in the
    operand layout of a product. A single float16 tile would go through shared memory again.
    """
    ASM: tl.constexpr = NATIVE if IS_NATIVE else BITS
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def to_float32(bits, bfloat16):
    """float32 from the bits of bfloat16 (if `bfloat16` is not 0) or float16."""
    return tl.where(
        bfloat16 != 0,
        (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True),
        bits.to(tl.float16, bitcast=True).to(tl.float32),
    )


@triton.jit
def rows_to_float16(bits, bfloat16):
    """Rows of the query, given as two tiles of bits, in float16, and the power of two by which each
    row was divided.

    The rounding error of an element is below 2^-38 of the row's largest element.
    """
    even = to_float32(bits[0], bfloat16)
    odd = to_float32(bits[1], bfloat16)
    largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, LEAST), 254)
    up = ((254 - exponent + LARGEST) << 23).to(tl.float32, bitcast=True)[:, None]
    down = ((exponent - LARGEST) << 23).to(tl.float32, bitcast=True)
    return ((even * up).to(tl.float16), (odd * up).to(tl.float16)), down
