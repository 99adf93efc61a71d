"""The kernel after backward_sm90: scales and rounds a float32 dQ. It is bound by memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def sum_shape(columns):
    """Shape of dq_sum's floats for 64 rows. Axes, outermost first: group of 32 columns, group of 16
    rows, octet of columns, row, pair of columns, row + 8, column."""
    return [columns // 32, 4, 4, 8, 4, 2, 2]


SUM_TO_ROWS = gl.constexpr((1, 5, 3, 0, 2, 4, 6))  # axes of rows, then axes of columns


@gluon.jit
def backward_postprocess(
    dq_sum, dq, scale, q_len, heads, row_heads, qk_dim,
    QK_DIM: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """dq = scale * dq_sum, one block of 64 rows of one head. dq_sum is in the order of accumulator
    registers (dq_reduce.float4s). Rows of dq are `row_heads` heads of qk_dim columns
    apart. qk_dim is at most QK_DIM."""
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
    at = ((b.to(gl.int64) * q_len + r) * row_heads + head)[:, None] * qk_dim + c[None, :]
    in_bounds = (r < q_len)[:, None] & (c < qk_dim)[None, :]
    gl.store(dq + at, gl.convert_layout(x, rowwise), mask=in_bounds)
