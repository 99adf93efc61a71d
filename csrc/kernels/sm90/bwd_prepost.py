"""What runs before and after backward_sm90: row statistics and a float32 dQ of zeros, then dQ
itself.

Both move memory and nothing else: 14 bytes for every element of the query together.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def backward_preprocess(
    out, dout, lse, dlse, kv_start, kv_end, delta, lse2, lo, hi, top, dq_sum,
    has_dlse, clear_dq, batch, mask_batch, q_len, heads, row_heads,
    V_DIM: tl.constexpr, QK_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Results in rows of P = Sq rounded up to 64, so that TMA finds every block aligned and rows
    past the end empty: delta (B, H, P) = sum(do * out) - dlse; lse2 (B, H, P) = lse * log2(e), +inf
    for an empty row; lo, hi (Bm, P) copies of the row ranges; dq_sum (B, H, P, Dqk) = 0, with
    clear_dq. Rows of out and dout are `row_heads` heads apart, of which this is about `heads`.

    With a bias (top, else None), lse is in two (row_sums.py): top (B, H, P) is a row's largest
    logit, 0 of an empty row, and lse2 the logarithm of the sum relative to it."""
    padded = tl.cdiv(q_len, 64) * 64
    pid = tl.program_id(0)
    head = pid % heads
    tiles = padded // ROWS
    b = pid // heads // tiles
    rows = (pid // heads % tiles) * ROWS + tl.arange(0, ROWS)
    there = rows < q_len
    mask_b = tl.where(mask_batch > 1, b, 0).to(tl.int64)
    start = tl.load(kv_start + mask_b * q_len + rows, mask=there, other=0)
    end = tl.load(kv_end + mask_b * q_len + rows, mask=there, other=0)
    if (head == 0) & (b < mask_batch):
        tl.store(lo + mask_b * padded + rows, start)
        tl.store(hi + mask_b * padded + rows, end)
    attended = end > start
    offset = ((b.to(tl.int64) * q_len + rows) * row_heads + head)[:, None] * V_DIM
    COLUMNS: tl.constexpr = triton.next_power_of_2(V_DIM)
    columns = tl.arange(0, COLUMNS)[None, :]
    offset += columns
    # the cotangent of an empty row is ignored: it is not even read
    read = attended[:, None]
    if COLUMNS != V_DIM:
        read = read & (columns < V_DIM)
    o = tl.load(out + offset, mask=read, other=0.0).to(tl.float32)
    do = tl.load(dout + offset, mask=read, other=0.0).to(tl.float32)
    bh = b.to(tl.int64) * heads + head
    total = tl.sum(o * do, 1)
    if has_dlse != 0:
        total -= tl.load(dlse + bh * q_len + rows, mask=attended, other=0.0)
    if top is None:
        natural = tl.load(lse + bh * q_len + rows, mask=attended, other=float("inf"))
        # a segment-checked row may have met no key: -inf would make p infinite
        natural = tl.where(natural == float("-inf"), float("inf"), natural)
    else:
        pair = lse + 2 * (bh * q_len + rows)
        largest = tl.load(pair, mask=attended, other=0.0)
        natural = tl.load(pair + 1, mask=attended, other=float("inf"))
    at = bh * padded + rows
    if top is not None:
        # of a row whose logits are all -inf the logarithm is so large that it becomes infinite
        tl.store(top + at, tl.where(largest == float("-inf"), 0.0, largest))
    tl.store(delta + at, total)
    tl.store(lse2 + at, natural * 1.4426950408889634)
    if clear_dq != 0:
        cells = dq_sum + (pid // heads % tiles * ROWS + bh * padded) * QK_DIM
        CLEARED: tl.constexpr = (64 if QK_DIM % 64 == 0 else 32) * ROWS  # a power of two
        for i in tl.static_range(QK_DIM * ROWS // CLEARED):
            tl.store(cells + i * CLEARED + tl.arange(0, CLEARED), tl.zeros([CLEARED], tl.float32))


@gluon.constexpr_function
def power_of_two(n):
    while hasattr(n, "value"):
        n = n.value
    return 1 << (int(n) - 1).bit_length()


@gluon.constexpr_function
def sum_shape(columns):
    """Of dq_sum's floats for 64 rows: 32 columns, 16 rows, 8 columns, row, 2 columns, row + 8,
    column."""
    while hasattr(columns, "value"):
        columns = columns.value
    return [int(columns) // 32, 4, 4, 8, 4, 2, 2]


SUM_TO_ROWS = gl.constexpr((1, 5, 3, 0, 2, 4, 6))  # of these axes: the rows', then the columns'


@gluon.jit
def backward_postprocess(
    dq_sum, dq, scale, q_len, heads, row_heads,
    QK_DIM: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """dq = scale * dq_sum, one block of 64 rows of one head. dq_sum is in accumulator order:
    dq_reduce.float4s. `row_heads`: as above, of dq."""
    COLUMNS: gl.constexpr = power_of_two(QK_DIM)
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    rowwise: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    blocks = (q_len + ROWS - 1) // ROWS
    pid = gl.program_id(0)
    bh = pid // blocks
    block = pid % blocks
    b = bh // heads
    head = bh % heads
    r = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, rowwise))
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, rowwise))
    cells = gl.arange(0, ROWS * COLUMNS, flat)
    sums = dq_sum + pid.to(gl.int64) * (ROWS * QK_DIM)
    if COLUMNS == QK_DIM:
        x = gl.load(sums + cells) * scale
    else:
        x = gl.load(sums + cells, mask=cells < ROWS * QK_DIM, other=0.0) * scale
    x = x.to(dq.dtype.element_ty).reshape(sum_shape(COLUMNS))
    x = x.permute(SUM_TO_ROWS).reshape([ROWS, COLUMNS])
    at = ((b.to(gl.int64) * q_len + r) * row_heads + head)[:, None] * QK_DIM + c[None, :]
    there = (r < q_len)[:, None]
    if COLUMNS != QK_DIM:
        there = there & (c < QK_DIM)[None, :]
    gl.store(dq + at, gl.convert_layout(x, rowwise), mask=there)
