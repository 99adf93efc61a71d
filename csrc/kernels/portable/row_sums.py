"""What the forward keeps of the softmax of every row, from which the backward makes probabilities.

Kernels without a bias array keep the log-sum-exp, (B, H, Sq), and take logits in base 2. A bias may
be -1e9 or the least finite number on all keys of a row: the sum of such a logit and the logarithm
of a sum rounds the logarithm away, and its product with log2(e) may overflow. So kernels that may
have one take logits in base e, and keep two numbers apart, (B, H, Sq, 2): the largest logit, and
the logarithm of the sum of exp(logit - largest). A row that attends nothing has -inf and the
largest finite number, from which every probability is 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-3.4028234663852886e38)
# What a row that attends nothing is read as: two numbers at once, 0 and inf, or one.
TWO_OF_NOTHING = tl.constexpr(0x7F800000 << 32)
ONE_OF_NOTHING = tl.constexpr(float("-inf"))


class RowSums(NamedTuple):
    """`top`: the largest logit, None where logits are in base 2; `log2`: the logarithm to base 2 of
    the sum, less that."""

    top: tl.tensor
    log2: tl.tensor


@triton.jit
def power(x, bias):
    """2^x, or e^x in kernels that may have a bias array."""
    if bias is not None:
        x *= LOG2E
    return tl.exp2(x)


@triton.jit
def in_base(x, bias):
    """A natural logarithm, in the base of the kernel's logits."""
    if bias is None:
        x *= LOG2E
    return x


@triton.jit
def pointer_to_sums(lse, bias):
    """To the first row's of all: to both numbers at once, which take the registers of one
    address."""
    if bias is not None:
        lse = lse.to(tl.pointer_type(tl.int64), bitcast=True)
    return lse


@triton.jit
def load_sums(pointers, there, bias):
    """As `row_sums` takes them; `there`: which, or None for all."""
    nothing: tl.constexpr = ONE_OF_NOTHING if bias is None else TWO_OF_NOTHING
    if there is None:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=there, other=nothing)
    return loaded


@triton.jit
def row_sums(loaded, bias):
    if bias is None:
        sums = RowSums(None, loaded * LOG2E)
    else:
        top = loaded.to(tl.int32).to(tl.float32, bitcast=True)
        log = (loaded >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        sums = RowSums(top, log * LOG2E)
    return sums


@triton.jit
def attending(sums):
    """Which rows attend anything."""
    return tl.abs(sums.log2) != float("inf")


@triton.jit
def probabilities(x, sums, AXIS: tl.constexpr):
    """Of logits whose axis AXIS is the keys."""
    log2 = tl.expand_dims(sums.log2, AXIS)
    if sums.top is None:
        p = tl.exp2(x - log2)
    else:
        # Above 0 only where products round otherwise than in the forward: by 64 at logits of 1e9.
        # Of -inf less -inf the smaller is 0, too.
        below = tl.minimum(x - tl.expand_dims(sums.top, AXIS), 0.0)
        p = tl.exp2(below * LOG2E - log2)
    return p


@triton.jit
def store_sums(lse, row_max, first, rows, there, m, l, attended, bias):
    """Of a forward's running maximum and sum, at the rows behind the `first`; `row_max`, None or
    null where nobody asks for it, gets the largest logit."""
    log = tl.log2(l)
    if bias is None:
        tl.store(lse + first + rows, tl.where(attended, (m + log) * LN2, float("-inf")), mask=there)
        m *= LN2
    else:
        pair = lse + 2 * (first + rows)
        tl.store(pair, tl.where(attended, m, float("-inf")), mask=there)
        tl.store(pair + 1, tl.where(attended, log * LN2, -LEAST), mask=there)
    if row_max is not None and row_max.to(tl.int64) != 0:
        tl.store(row_max + first + rows, tl.where(attended, m, float("-inf")), mask=there)
