"""What kernels do to a score before the softmax, and their products.

With s = q k^T of a row at position i and a key at position j:
    capped = cap * tanh(s * scale / cap), or s * scale        (Gemma 2, arXiv 2408.00118)
    logit  = capped - slope * |i - j|                         (ALiBi, arXiv 2108.12409)
All of it is in base 2 (times log2(e)), in kernels that may have a bias array in base e
(row_sums.py).

In the fallback kernels the scale comes from a buffer or a scalar and has any sign, and a program
decides at run time, once for all of its elements, what there is to do: one variant serves all. The
plain kernels know when they are compiled that there is a positive scale and nothing else: what they
have not is None.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.row_sums import LOG2E, in_base

SMALL = tl.constexpr(0.3)


class ScoreMods(NamedTuple):
    """What is done to the scores of a batch row. `scales` is None where the scale is
    positive, `bias_batch` 0 in calls without a bias."""

    scale: tl.tensor
    scales: tl.tensor
    cap: tl.tensor
    bias_batch: tl.tensor


class BiasPositions(NamedTuple):
    """Positions of rows and of keys of a batch row, and how many there are: none in calls without a
    bias."""

    q: tl.tensor
    kv: tl.tensor
    q_count: tl.tensor
    kv_count: tl.tensor


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
def score_mods_of(scale, scales, scales_batch, soft_cap, bias_batch, b, bias):
    """The scale of a batch row, and what is done to its scores. `scales` has 1 or as many as there
    are batch rows; where `scales_batch` is 0, `scale` holds."""
    if scales is not None:
        at = tl.where(scales_batch > 1, b, 0)
        read = tl.load(scales + at, mask=scales_batch > 0, other=0.0)
        scale = tl.where(scales_batch > 0, read, scale)
    cap = None
    if soft_cap is not None:
        cap = in_base(soft_cap, bias)
    return scale, ScoreMods(in_base(scale, bias), scales, cap, bias_batch)


@triton.jit
def slope_of(slopes, bias_batch, b, heads, head, bias):
    """0 in calls without a linear bias."""
    slope = None
    if slopes is not None:
        at = tl.where(bias_batch > 1, b, 0) * heads + head
        slope = in_base(tl.load(slopes + at, mask=bias_batch > 0, other=0.0), bias)
    return slope


@triton.jit
def bias_positions_of(q_bias_pos, kv_bias_pos, bias_batch, b, q_len, kv_len):
    """Those of a batch row."""
    if q_bias_pos is None:
        positions = BiasPositions(None, None, None, None)
    else:
        row = tl.where(bias_batch > 1, b, 0).to(tl.int64)
        q_pos = q_bias_pos + row * q_len
        q_count = tl.where(bias_batch > 0, q_len, 0)
        kv_pos = kv_bias_pos + row * kv_len
        kv_count = tl.where(bias_batch > 0, kv_len, 0)
        positions = BiasPositions(q_pos, kv_pos, q_count, kv_count)
    return positions


@triton.jit
def load_positions(positions, count, index):
    """Those of rows or of keys: 0 from the count-th on."""
    found = None
    if positions is not None:
        found = tl.load(positions + index, mask=index < count, other=0)
    return found


@triton.jit
def distances(positions, other_positions):
    """(N, M) of positions (N,) and (M,)."""
    far = None
    if positions is not None:
        far = tl.abs(positions[:, None] - other_positions[None, :]).to(tl.float32)
    return far


@triton.jit
def logits(s, far, slope, mods):
    """capped and logit of the scores. What else is done to a score, by a row and a key, belongs
    here, and its derivative in through_cap."""
    capped = s * mods.scale
    if mods.cap is not None and mods.cap > 0:
        capped = tanh(capped / mods.cap) * mods.cap
    logit = capped
    if far is not None and mods.bias_batch > 0:
        logit = capped - far * slope
    return capped, logit


@triton.jit
def through_cap(ds, capped, mods):
    """The gradient of s * scale, from that of capped."""
    if mods.cap is not None and mods.cap > 0:
        t = capped / mods.cap
        ds = ds * (1.0 - t * t)
    return ds


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
