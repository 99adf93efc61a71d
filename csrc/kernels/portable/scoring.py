"""How kernels turn scores into logits, and which probabilities they drop.

With s = q k^T of a row at position i and a key at position j:
    capped = cap * tanh(s * scale / cap), or s * scale        (Gemma 2, arXiv 2408.00118)
    logit  = capped - slope * |i - j| + bias                  (ALiBi, arXiv 2108.12409)
Logits are in base 2 (multiplied by log2(e)), but in base e in kernels with a bias array
(row_sums.py).

In the fallback kernels, the scale comes from a buffer or a scalar and may have any sign. A program
selects the options of the call by branches at run time, so one variant serves all calls. The plain
kernels are compiled for a positive scale and no options: all other fields are None.

To add an option, add an argument to the kernels and to `scoring_of`, a field to `Scoring`, and a
line to `logits` with its derivative in `through_cap`. If it loads something for each row and key,
add a field to `Terms`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.arithmetic import tanh
from portable.bias import bias_of, bias_tile
from portable.dropout import dropout_of
from portable.row_sums import in_base


class Positions(NamedTuple):
    """For ALiBi: the positions of the tile's rows (for dK and dV, of its keys), and a pointer to
    the `count` positions of the other axis. `count` is 0 in calls without slopes."""

    tile: tl.tensor
    others: tl.tensor
    count: tl.tensor


class Scoring(NamedTuple):
    """What turns the scores of a query head into logits, and which probabilities are dropped.

    `head` and `slope` come first because `of_head` replaces them. `factor` is `scale` in the base
    of the logits. `scales` is None in kernels with a positive scale, and `bias_batch` is 0 in calls
    without slopes.
    """

    head: tl.tensor
    slope: tl.tensor
    slopes: tl.tensor
    bias_batch: tl.tensor
    positions: Positions
    scale: tl.tensor
    factor: tl.tensor
    scales: tl.tensor
    cap: tl.tensor
    bias: tl.tensor
    dropout: tl.tensor


class Terms(NamedTuple):
    """What is loaded for a tile of scores. It is loaded before the scores are computed, so that the
    product hides the latency."""

    distances: tl.tensor
    bias: tl.tensor


@triton.jit
def slope_of(slopes, bias_batch, b, heads, head, bias):
    """The ALiBi slope of a head: 0 in calls without slopes, None in kernels without slopes."""
    slope = None
    if slopes is not None:
        at = tl.where(bias_batch > 1, b, 0) * heads + head
        slope = in_base(tl.load(slopes + at, mask=bias_batch > 0, other=0.0), bias)
    return slope


@triton.jit
def positions_of(
    q_bias_pos, kv_bias_pos, bias_batch, b, q_len, kv_len, index, ROW_AXIS: tl.constexpr
):
    """The Positions of batch row `b`; `index` are the rows or keys of the tile."""
    if q_bias_pos is None:
        positions = Positions(None, None, None)
    else:
        row = tl.where(bias_batch > 1, b, 0).to(tl.int64)
        q_pos = q_bias_pos + row * q_len
        q_count = tl.where(bias_batch > 0, q_len, 0)
        kv_pos = kv_bias_pos + row * kv_len
        kv_count = tl.where(bias_batch > 0, kv_len, 0)
        if ROW_AXIS == 0:
            at = tl.load(q_pos + index, mask=index < q_count, other=0)
            positions = Positions(at, kv_pos, kv_count)
        else:
            at = tl.load(kv_pos + index, mask=index < kv_count, other=0)
            positions = Positions(at, q_pos, q_count)
    return positions


@triton.jit
def scoring_of(
    scale, scales, scales_batch, soft_cap, slopes, bias_batch, q_bias_pos, kv_bias_pos, bias,
    bias_kind, bias_axes, dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch,
    inverse_keep, b, heads, head, index, q_len, kv_len, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """The Scoring of a batch row and a head. If `head` is None, `of_head` adds it later. `index`
    are the rows (ROW_AXIS 0) or the keys (ROW_AXIS 1) of the tile. `scales` has one element, or one
    per batch row; if `scales_batch` is 0, `scale` is used instead."""
    if scales is not None:
        at = tl.where(scales_batch > 1, b, 0)
        read = tl.load(scales + at, mask=scales_batch > 0, other=0.0)
        scale = tl.where(scales_batch > 0, read, scale)
    cap = None
    if soft_cap is not None:
        cap = in_base(soft_cap, bias)
    factor = in_base(scale, bias)
    slope = None
    if head is not None:
        slope = slope_of(slopes, bias_batch, b, heads, head, bias)
    positions = positions_of(q_bias_pos, kv_bias_pos, bias_batch, b, q_len, kv_len, index, ROW_AXIS)
    added = bias_of(bias, bias_kind, bias_axes, b, heads, q_len, kv_len)
    dropout = dropout_of(
        dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch, inverse_keep, b,
        heads, q_len,
    )  # fmt: skip
    return Scoring(
        head, slope, slopes, bias_batch, positions, scale, factor, scales, cap, added, dropout
    )


@triton.jit
def of_head(scoring, b, heads, head):
    """The Scoring of a batch row, with one of its heads filled in."""
    slope = slope_of(scoring.slopes, scoring.bias_batch, b, heads, head, scoring.bias.array)
    return Scoring(head, slope, *scoring[2:])


@triton.jit
def distances_of(positions, others):
    """The distances (N, M) between the N rows or keys of the tile and M `others`."""
    distances = None
    if positions.tile is not None:
        at = tl.load(positions.others + others, mask=others < positions.count, other=0)
        distances = tl.abs(positions.tile[:, None] - at[None, :]).to(tl.float32)
    return distances


@triton.jit
def terms_of(
    scoring, first_row, first_key, others, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """The Terms of a tile of rows x keys (ROW_AXIS 0) or keys x rows (ROW_AXIS 1); `others` are the
    indices along axis 1."""
    distances = distances_of(scoring.positions, others)
    bias = bias_tile(scoring.bias, scoring.head, first_row, first_key, ROWS, KEYS, ROW_AXIS)
    return Terms(distances, bias)


@triton.jit
def logits(s, terms, scoring):
    """`capped` and `logit`, as defined above, of the scores `s`."""
    capped = s * scoring.factor
    if scoring.cap is not None and scoring.cap > 0:
        capped = tanh(capped / scoring.cap) * scoring.cap
    logit = capped
    if terms.distances is not None and scoring.bias_batch > 0:
        logit = capped - terms.distances * scoring.slope
    if terms.bias is not None:
        logit += terms.bias
    return capped, logit


@triton.jit
def through_cap(ds, capped, scoring):
    """The gradient of s * scale, from the gradient of capped."""
    if scoring.cap is not None and scoring.cap > 0:
        t = capped / scoring.cap
        ds = ds * (1.0 - t * t)
    return ds
