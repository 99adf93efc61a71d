"""What the interpreter has no word for, inline assembly: the same in its own."""

import triton
import triton.language as tl


@triton.jit
def to_tf32(x):
    """For logits.to_tf32: half of the last bit kept is added to the magnitude, the rest is cut off."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)
