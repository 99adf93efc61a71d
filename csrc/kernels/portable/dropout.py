"""Dropout of softmax probabilities with a counter-based generator: no mask is stored, and all
kernels generate the same bits for an element.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps the counter
(key // 4, row, head, batch row) and two words of the caller's random key to four words, one for
each of four neighbouring keys. An element is kept if its word is at least `threshold`. The caller
numbers rows, heads and batch rows, so that the bits do not depend on the sharding. Keys are
numbered by their index in the kernel, which has all keys in order.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """The dropout of a batch row. `streams` has four words per head: two of the random key, the
    number of the batch row and that of the head. `rows` are the numbers of the rows. `threshold` (a
    uint32 in an int32) is 0 in calls without dropout, and None in kernels without it."""

    streams: tl.tensor
    rows: tl.tensor
    threshold: tl.tensor
    inverse_keep: tl.tensor
    q_len: tl.tensor


@triton.jit
def dropout_of(streams, row_numbers, threshold, rows_batch, inverse_keep, b, heads, q_len):
    """The dropout of batch row `b`."""
    if threshold is None:
        result = Dropout(None, None, None, None, None)
    else:
        first = streams + b.to(tl.int64) * heads * 4
        rows = row_numbers + tl.where(rows_batch > 1, b, 0).to(tl.int64) * q_len
        result = Dropout(first, rows, threshold, inverse_keep, q_len)
    return result


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four uint32 words for a counter of four and a key of two uint32 words."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def word_of(pointer):
    return tl.load(pointer).to(tl.uint32, bitcast=True)


@triton.jit
def kept(dropout, head, rows, first_key, KEYS: tl.constexpr, ROW_AXIS: tl.constexpr):
    """Which elements are kept: (rows, KEYS) for ROW_AXIS 0, (KEYS, rows) for ROW_AXIS 1.
    `first_key` is a multiple of 4."""
    stream = dropout.streams + head * 4
    number = tl.load(dropout.rows + rows, mask=rows < dropout.q_len, other=0)
    row = number.to(tl.uint32, bitcast=True)[:, None]
    fours = (first_key // 4 + tl.arange(0, KEYS // 4)).to(tl.uint32)[None, :]
    shape: tl.constexpr = [rows.shape[0], KEYS // 4]
    zero = tl.zeros(shape, tl.uint32)
    w0, w1, w2, w3 = philox(
        fours + zero, row + zero, word_of(stream + 3) + zero, word_of(stream + 2) + zero,
        word_of(stream), word_of(stream + 1),
    )  # fmt: skip
    least = dropout.threshold.to(tl.uint32, bitcast=True)
    even = tl.join((w0 >= least).to(tl.int8), (w2 >= least).to(tl.int8))
    odd = tl.join((w1 >= least).to(tl.int8), (w3 >= least).to(tl.int8))
    keep = tl.reshape(tl.join(even, odd), [rows.shape[0], KEYS]) != 0
    if ROW_AXIS == 1:
        keep = tl.trans(keep)
    return keep


@triton.jit
def negative_where_dropped(
    p, dropout, head, rows, first_key, KEYS: tl.constexpr, ROW_AXIS: tl.constexpr
):
    """The probabilities, negated where they are dropped. The sign of a 0 has no meaning."""
    if dropout.threshold != 0:
        p = tl.where(kept(dropout, head, rows, first_key, KEYS, ROW_AXIS), p, -p)
    return p


@triton.jit
def drop(x, dropout, head, rows, first_key, KEYS: tl.constexpr, ROW_AXIS: tl.constexpr):
    """x where it is kept, otherwise 0. The caller divides by the keep probability."""
    if dropout.threshold is not None and dropout.threshold != 0:
        x = tl.where(kept(dropout, head, rows, first_key, KEYS, ROW_AXIS), x, 0.0)
    return x
