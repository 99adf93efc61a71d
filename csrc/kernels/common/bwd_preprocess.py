"""The kernel before backward_sm90 and backward_sm80: computes row statistics and clears a float32
dQ. It is bound by memory."""

import triton
import triton.language as tl


@triton.jit
def backward_preprocess(
    out, dout, lse, dlse, kv_start, kv_end, delta, row_delta, lse2, lo, hi, top, dq_sum,
    has_dlse, clear_dq, batch, mask_batch, q_len, heads, row_heads, v_dim,
    V_DIM: tl.constexpr, QK_DIM: tl.constexpr, ROWS: tl.constexpr, LSE_IN_TWO: tl.constexpr,
):  # fmt: skip
    """Results have P = q_len rounded up to 64 rows, so that for TMA every block is aligned and rows
    past the end are empty: delta (B, H, P) = sum(do * out) - dlse; lse2 (B, H, P) = lse * log2(e),
    +inf for an empty row; lo, hi (Bm, P), copies of the row ranges; dq_sum (B, H, P, Dqk) = 0 if
    clear_dq is 1, and if it is 2, in tiles in which no row has keys. row_delta (B, H, Sq) gets
    delta, unless it is null. Rows of out and dout are `row_heads` heads of v_dim columns apart, of
    which this launch computes `heads`. v_dim is at most V_DIM.

    With LSE_IN_TWO, lse has two numbers per row (row_sums.py). With a bias, top (B, H, P) is a
    row's largest logit, 0 for an empty row, and lse2 the logarithm of the sum relative to it. With
    dropout alone, top is None, and lse2 is computed from the sum of both numbers.
    """
    padded = tl.cdiv(q_len, 64) * 64
    pid = tl.program_id(0)
    head = pid % heads
    tiles = padded // ROWS
    b = pid // heads // tiles
    rows = (pid // heads % tiles) * ROWS + tl.arange(0, ROWS)
    in_bounds = rows < q_len
    mask_b = tl.where(mask_batch > 1, b, 0).to(tl.int64)
    start = tl.load(kv_start + mask_b * q_len + rows, mask=in_bounds, other=0)
    end = tl.load(kv_end + mask_b * q_len + rows, mask=in_bounds, other=0)
    if (head == 0) & (b < mask_batch):
        tl.store(lo + mask_b * padded + rows, start)
        tl.store(hi + mask_b * padded + rows, end)
    attended = end > start
    offset = ((b.to(tl.int64) * q_len + rows) * row_heads + head)[:, None] * v_dim
    COLUMNS: tl.constexpr = triton.next_power_of_2(V_DIM)
    columns = tl.arange(0, COLUMNS)[None, :]
    offset += columns
    # the cotangent of an empty row is ignored, and not read
    read = attended[:, None] & (columns < v_dim)
    o = tl.load(out + offset, mask=read, other=0.0).to(tl.float32)
    do = tl.load(dout + offset, mask=read, other=0.0).to(tl.float32)
    bh = b.to(tl.int64) * heads + head
    total = tl.sum(o * do, 1)
    if has_dlse != 0:
        total -= tl.load(dlse + bh * q_len + rows, mask=attended, other=0.0)
    if not LSE_IN_TWO:
        natural = tl.load(lse + bh * q_len + rows, mask=attended, other=float("inf"))
        # a segment-checked row may attend to no key: with lse -inf, p would be infinite
        natural = tl.where(natural == float("-inf"), float("inf"), natural)
    else:
        pair = lse + 2 * (bh * q_len + rows)
        largest = tl.load(pair, mask=attended, other=0.0)
        natural = tl.load(pair + 1, mask=attended, other=float("inf"))
        # if all logits of a row are -inf, its logarithm is so large that lse2 becomes +inf
        largest = tl.where(largest == float("-inf"), 0.0, largest)
    at = bh * padded + rows
    if top is not None:
        tl.store(top + at, largest)
    elif LSE_IN_TWO:
        natural += largest
    tl.store(delta + at, total)
    if row_delta.to(tl.int64) != 0:
        tl.store(row_delta + bh * q_len + rows, total, mask=in_bounds)
    tl.store(lse2 + at, natural * 1.4426950408889634)
    if (clear_dq == 1) | ((clear_dq == 2) & (tl.max(attended.to(tl.int32), 0) == 0)):
        cells = dq_sum + (pid // heads % tiles * ROWS + bh * padded) * QK_DIM
        CLEARED: tl.constexpr = (64 if QK_DIM % 64 == 0 else 32) * ROWS  # a power of two
        for i in tl.static_range(QK_DIM * ROWS // CLEARED):
            tl.store(cells + i * CLEARED + tl.arange(0, CLEARED), tl.zeros([CLEARED], tl.float32))
