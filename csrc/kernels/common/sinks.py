"""Attention sinks in the Gluon forwards: one more logit per query head in the denominator of the
softmax, without a value (gpt-oss, arXiv 2508.10925). portable/row_sums.py does the same."""

from common.kv_ranges import LN2, LOG2E
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sink_of(sinks, sink_batch, b, heads, head):
    """The sink of a head. `sinks` has one row of heads, or one per batch row. In calls without
    sinks, `sink_batch` is 0, and the sink -inf."""
    at = gl.where(sink_batch > 1, b, 0).to(gl.int64) * heads + head
    return gl.load(sinks + at, mask=sink_batch > 0, other=float("-inf"))


@gluon.jit
def add_sink(l, m, sink, NATURAL: gl.constexpr):
    """The row sums with the sink: l if there is none, +inf if the sink takes all the weight. `m`
    are the maxima, in base 2 or (NATURAL) in base e."""
    x = (sink - m) * LOG2E if NATURAL else sink * LOG2E - m
    return l + gl.exp2(x)


@gluon.jit
def log_sum_exp(total, m, sink):
    """The natural log-sum-exp of sums from add_sink, for maxima in base 2."""
    return gl.where(total == float("inf"), sink, (m + gl.log2(total)) * LN2)
