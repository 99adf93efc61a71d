"""float8_e4m3fn in a kernel, as float16: its bytes exactly, rows of a query times powers of two.

All products are of float16, whatever the query's dtype: float16 holds every float8_e4m3fn, and
more bits of a probability than bfloat16. A row of the query is scaled so that its largest element
fits, and the row's scores are scaled back in float32.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(14)  # the exponent of a row's largest element, in float16
LEAST = tl.constexpr(15)  # exponents of rows, in float32's bits, at least

# Two pairs of bytes to two pairs of float16: the first bytes of both, and the second ones. From
# compute capability 8.9 on the GPU converts:
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
# Otherwise exponent and fraction move to their places in float16, whose exponents have a bias of 15
# and not 7: the number / 256, of subnormal ones, too. NaN, the largest magnitude, needs one bit
# more.
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
    """What `pairs_to_float16` divides by."""
    return 1.0 if IS_NATIVE else 256.0


@triton.jit
def pairs_to_float16(pairs, IS_NATIVE: tl.constexpr):
    """Two tiles of float16, divided by `unit_of_bytes`: the first bytes of all pairs, and the
    second ones.

    Pairs are as wide as float16, so their tile has the layout of a product's operand as it comes
    from shared memory. One tile of float16 would have to pass through shared memory again.
    """
    ASM: tl.constexpr = NATIVE if IS_NATIVE else BITS
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def to_float32(bits, bfloat16):
    """Bits of bfloat16 (`bfloat16` not 0) or float16."""
    return tl.where(
        bfloat16 != 0,
        (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True),
        bits.to(tl.float16, bitcast=True).to(tl.float32),
    )


@triton.jit
def rows_to_float16(bits, bfloat16):
    """Rows in two tiles of bits, as float16; and the power of two that each row was divided by.

    What is lost of an element is below 2^-38 of the row's largest.
    """
    even = to_float32(bits[0], bfloat16)
    odd = to_float32(bits[1], bfloat16)
    largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, LEAST), 254)
    up = ((254 - exponent + LARGEST) << 23).to(tl.float32, bitcast=True)[:, None]
    down = ((exponent - LARGEST) << 23).to(tl.float32, bitcast=True)
    return ((even * up).to(tl.float16), (odd * up).to(tl.float16)), down
