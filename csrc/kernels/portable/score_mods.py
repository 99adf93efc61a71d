"""What the general kernels do to a score before the softmax, and how they read tiles of any head
dim.

With s = q k^T of a row at place i and a key at place j, all of it in base 2 (times log2(e)):
    capped = cap * tanh(s * scale / cap), or s * scale        (Gemma 2, arXiv 2408.00118)
    logit  = capped - slope * |i - j|                         (ALiBi, arXiv 2108.12409)
The scale comes from a buffer or a scalar and has any sign. A program decides at run time, once for
all of its elements, what there is to do: one variant serves all.
"""

import triton
import triton.language as tl
from portable.kv_ranges import columns

LOG2E = tl.constexpr(1.4426950408889634)
SMALL = tl.constexpr(0.3)


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
def scale_of(scales, scale, scales_batch, b):
    """The scale of a batch row: of the buffer (1 or batch), or the scalar where there is none."""
    at = tl.where(scales_batch > 1, b, 0)
    read = tl.load(scales + at, mask=scales_batch > 0, other=0.0)
    return tl.where(scales_batch > 0, read, scale)


@triton.jit
def slope_of(slopes, bias_batch, b, heads, head):
    """In base 2; 0 where there is no bias."""
    at = tl.where(bias_batch > 1, b, 0) * heads + head
    return tl.load(slopes + at, mask=bias_batch > 0, other=0.0) * LOG2E


@triton.jit
def places_of(places, bias_batch, b, length):
    """The places of a batch row, and how many of them there are: none without a bias."""
    first = tl.where(bias_batch > 1, b, 0).to(tl.int64) * length
    return places + first, tl.where(bias_batch > 0, length, 0)


@triton.jit
def distances(places, other_places):
    """(N, M) of places (N,) and (M,)."""
    return tl.abs(places[:, None] - other_places[None, :]).to(tl.float32)


@triton.jit
def logits(s, far, scale2, cap2, slope2, bias_batch):
    """capped and logit of the scores."""
    capped = s * scale2
    if cap2 > 0:
        capped = tanh(capped / cap2) * cap2
    logit = capped
    if bias_batch > 0:
        logit = capped - far * slope2
    return capped, logit


@triton.jit
def through_cap(ds, capped, cap2):
    """The gradient of s * scale, from that of capped."""
    if cap2 > 0:
        t = capped / cap2
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
def dot(a, b, acc, EXACT: tl.constexpr):
    """a @ b, onto `acc` unless it is None.

    EXACT: products of float32, without tensor cores, else of float32 operands rounded to 11 bits
    (TF32). Neither says anything for operands of 16 bits.
    """
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    if not EXACT and a.dtype == tl.float32:  # tensor cores would cut the rest off: twice the error
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_part(pointers, there, dim, DIM: tl.constexpr):
    """A tile (rows, columns(DIM)) of head dim `dim` up to DIM: 0 in columns past it, and in rows
    that are not `there` (N, 1)."""
    real = columns(DIM)[None, :] < dim
    if there is None:
        tile = tl.load(pointers, mask=real, other=0.0)
    else:
        tile = tl.load(pointers, mask=there & real, other=0.0)
    return tile


@triton.jit
def store_part(pointers, tile, there, dim, DIM: tl.constexpr):
    """The rows that are `there` (N, 1), of a tile (rows, columns(DIM)) of head dim `dim`."""
    tl.store(pointers, tile, mask=there & (columns(DIM)[None, :] < dim))


@triton.jit
def keys_of(
    key, value, b, kv_head, kv_len, kv_heads, qk_dim, v_dim, QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The numbers of KEYS keys, pointers to the first so many keys and values of a head, and how
    far on the next of each is."""
    first = b.to(tl.int64) * kv_len * kv_heads + kv_head
    cols = tl.arange(0, KEYS)
    k_ptr = key + first * qk_dim + cols[:, None] * (kv_heads * qk_dim) + columns(QK_DIM)[None, :]
    v_ptr = value + first * v_dim + cols[:, None] * (kv_heads * v_dim) + columns(V_DIM)[None, :]
    return cols, k_ptr, v_ptr, kv_heads.to(tl.int64) * qk_dim, kv_heads.to(tl.int64) * v_dim
