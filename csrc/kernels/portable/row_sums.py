"""The row statistics of the softmax, which the forward stores and from which the backward computes
probabilities.

Kernels without a bias array store the log-sum-exp, (B, H, Sq), and use logits in base 2. A bias may
be -1e9 or the lowest finite number on all keys of a row: adding the logarithm of a sum to such a
logit rounds the logarithm away, and multiplying the logit by log2(e) may overflow. Kernels with a
bias array therefore use logits in base e and store two numbers per row, (B, H, Sq, 2): the largest
logit, and the logarithm of the sum of exp(logit - largest). A row that attends to nothing has -inf
and the largest finite number, which make every probability 0.

Both forms include the sink. If it takes all the weight of a row, the log-sum-exp is the sink; as
two numbers, the sink and 0, but for a sink of +inf the largest logit and +inf.

Any two numbers with the same sum are valid if the first is no smaller than the largest logit. With
dropout alone, forward_sm90_dropout stores the log-sum-exp and 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-3.4028234663852886e38)
# Values of masked loads, which make every probability 0: the pair (0, inf) as one int64, or inf.
EMPTY_PAIR = tl.constexpr(0x7F800000 << 32)
EMPTY_LSE = tl.constexpr(float("inf"))


class RowSums(NamedTuple):
    """`top`: the largest logit, None if logits are in base 2. `log2`: the base-2 logarithm of the
    sum of exp(logit - top), or of 2^logit if `top` is None."""

    top: tl.tensor
    log2: tl.tensor


@triton.jit
def power(x, bias):
    """2^x, or e^x in kernels with a bias array."""
    if bias is not None:
        x *= LOG2E
    return tl.exp2(x)


@triton.jit
def in_base(x, bias):
    """Converts a natural logarithm to the base of the kernel's logits."""
    if bias is None:
        x *= LOG2E
    return x


@triton.jit
def pointer_to_sums(lse, bias):
    """Pointer to the first row's statistics. Two numbers are addressed as one int64, which takes
    the registers of a single address."""
    if bias is not None:
        lse = lse.to(tl.pointer_type(tl.int64), bitcast=True)
    return lse


@triton.jit
def load_sums(pointers, valid, bias):
    """The raw statistics, for `row_sums`. `valid` is the mask of the load, None for all rows."""
    nothing: tl.constexpr = EMPTY_LSE if bias is None else EMPTY_PAIR
    if valid is None:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=valid, other=nothing)
    return loaded


@triton.jit
def row_sums(loaded, bias):
    """The RowSums of statistics loaded by `load_sums`."""
    if bias is None:
        sums = RowSums(None, loaded * LOG2E)
    else:
        top = loaded.to(tl.int32).to(tl.float32, bitcast=True)
        log = (loaded >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        sums = RowSums(top, log * LOG2E)
    return sums


@triton.jit
def attending(sums):
    """Whether each row attends to any key; false also where a sink of +inf takes all the weight."""
    return tl.abs(sums.log2) != float("inf")


@triton.jit
def probabilities(x, sums, AXIS: tl.constexpr):
    """The probabilities of logits `x`, whose keys are along axis AXIS."""
    log2 = tl.expand_dims(sums.log2, AXIS)
    if sums.top is None:
        p = tl.exp2(x - log2)
    else:
        # Above 0 only where products round differently from the forward's: by 64 at logits of 1e9.
        # The minimum with NaN, of -inf - -inf, is 0, too.
        below = tl.minimum(x - tl.expand_dims(sums.top, AXIS), 0.0)
        p = tl.exp2(below * LOG2E - log2)
    return p


@triton.jit
def sink_of(sinks, sink_batch, b, heads, head):
    """The sink of a head: one more logit in the softmax's denominator. `sinks` has one row of
    heads, or one per batch row. In calls without sinks, `sink_batch` is 0, and the sink -inf."""
    at = tl.where(sink_batch > 1, b, 0).to(tl.int64) * heads + head
    return tl.load(sinks + at, mask=sink_batch > 0, other=float("-inf"))


@triton.jit
def add_sink(m, l, sink, bias):
    """The sums `l` of rows with running maximum `m`, with the sink: `l` if there is none, +inf if
    the sink takes all the weight."""
    return l + power(in_base(sink, bias) - m, bias)


@triton.jit
def store_sums(lse, row_max, first, rows, valid, m, l, sink, attended, bias):
    """Stores the statistics of a forward with running maximum `m` and sum `l` (with the sink), at
    `rows` relative to row `first`. `row_max` gets the largest logit, unless it is None or null."""
    log = tl.log2(l)
    sink_alone = l == float("inf")
    if bias is None:
        natural = tl.where(sink_alone, sink, (m + log) * LN2)
        tl.store(lse + first + rows, tl.where(attended, natural, float("-inf")), mask=valid)
        m *= LN2
    else:
        pair = lse + 2 * (first + rows)
        top = tl.where(sink_alone, tl.where(sink == float("inf"), m, sink), m)
        log = tl.where(sink_alone, sink - top, log * LN2)
        tl.store(pair, tl.where(attended, top, float("-inf")), mask=valid)
        tl.store(pair + 1, tl.where(attended, log, -LEAST), mask=valid)
    if row_max is not None and row_max.to(tl.int64) != 0:
        tl.store(row_max + first + rows, tl.where(attended, m, float("-inf")), mask=valid)
