"""Dropout of the softmax's probabilities, by counters: nothing is stored, and every kernel that
asks for an element's bits makes the same ones.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of the counter
(key // 4, row, head, batch row) and the caller's two words gives four words: those of four
neighbouring keys. An element is kept where its word is `threshold` or more. Rows, heads and batch
rows are numbered by the caller, so that they are the same however a mesh divides them; the keys of
a kernel are all keys, in order.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """`streams`: (batch, heads, 4) words: two of the random key, the batch row, the head. `rows`:
    the numbers of the batch row's rows. `threshold` (a uint32 in an int32) is 0 where nothing is
    dropped, None in kernels that never drop."""

    streams: tl.tensor
    rows: tl.tensor
    threshold: tl.tensor
    inverse_keep: tl.tensor
    q_len: tl.tensor


@triton.jit
def dropout_of(streams, row_numbers, threshold, rows_batch, inverse_keep, b, heads, q_len):
    """That of a batch row."""
    if threshold is None:
        made = Dropout(None, None, None, None, None)
    else:
        first = streams + b.to(tl.int64) * heads * 4
        rows = row_numbers + tl.where(rows_batch > 1, b, 0).to(tl.int64) * q_len
        made = Dropout(first, rows, threshold, inverse_keep, q_len)
    return made


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of uint32, for four counters and two keys of uint32."""
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
    """Which elements are kept, (rows, KEYS) for ROW_AXIS 0, of keys from `first_key` on, a
    multiple of 4."""
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
    found = tl.reshape(tl.join(even, odd), [rows.shape[0], KEYS]) != 0
    if ROW_AXIS == 1:
        found = tl.trans(found)
    return found


@triton.jit
def negative_where_dropped(
    p, dropout, head, rows, first_key, KEYS: tl.constexpr, ROW_AXIS: tl.constexpr
):
    """Probabilities, those that are dropped with a sign; a 0 may have either."""
    if dropout.threshold != 0:
        p = tl.where(kept(dropout, head, rows, first_key, KEYS, ROW_AXIS), p, -p)
    return p


@triton.jit
def drop(x, dropout, head, rows, first_key, KEYS: tl.constexpr, ROW_AXIS: tl.constexpr):
    """x where it is kept, else 0; not divided by the share of what is kept."""
    if dropout.threshold is not None and dropout.threshold != 0:
        x = tl.where(kept(dropout, head, rows, first_key, KEYS, ROW_AXIS), x, 0.0)
    return x
