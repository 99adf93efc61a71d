"""A bias array that is added to the logits, loaded tile by tile.

Its shape is (groups, 1 or heads, 1 or q_len, kv_len), and broadcast axes are not expanded. Batch
rows are divided evenly among the groups, in order. `axes` describes it: bits 0, 1 and 2 are set if
it has more than one group, a heads axis and a rows axis, and the higher bits are the number of
batch rows of a group. Its dtype is the kernel's or float32, selected at run time by one branch per
tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

NONE = tl.constexpr(0)  # values of `bias_kind`
OWN_DTYPE = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)


class Bias(NamedTuple):
    """The bias of a batch row. `array` is None in kernels without a bias. `head_step` and
    `row_step` are 0 if the array broadcasts over heads or rows."""

    array: tl.tensor
    first: tl.tensor
    kind: tl.tensor
    head_step: tl.tensor
    row_step: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor


@triton.jit
def bias_of(bias, kind, axes, b, heads, q_len, kv_len):
    """The bias of batch row `b`."""
    if bias is None:
        result = Bias(None, None, None, None, None, None, None)
    else:
        row_step = tl.where((axes & 4) != 0, kv_len, 0).to(tl.int64)
        size = tl.where((axes & 4) != 0, q_len, 1).to(tl.int64) * kv_len
        head_step = tl.where((axes & 2) != 0, size, 0)
        group_step = tl.where((axes & 2) != 0, heads, 1) * size
        first = b // tl.maximum(axes >> 3, 1) * group_step
        result = Bias(bias, first, kind, head_step, row_step, q_len, kv_len)
    return result


@triton.jit
def as_float32(pointer):
    return pointer.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def bias_tile(
    bias, head, first_row, first_key, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """The bias of a tile of logits in base e: rows x keys (ROW_AXIS 0) or keys x rows (ROW_AXIS 1).
    Zeros in calls without a bias, None in kernels without one.

    It is loaded before the scores are computed, so that the product hides the latency. Offsets in a
    tile have 32 bits: C++ rejects longer rows.
    """
    if bias.array is None:
        x = None
    else:
        rows = tl.expand_dims(tl.arange(0, ROWS), 1 - ROW_AXIS)
        keys = tl.expand_dims(tl.arange(0, KEYS), ROW_AXIS)
        first = bias.first + head * bias.head_step + first_row * bias.row_step + first_key
        step = bias.row_step.to(tl.int32)
        left = bias.kv_len - first_key
        in_bounds = rows < bias.q_len - first_row
        if bias.kind is None:  # the compiler sees multiples of 8, and loads 16 bytes at once
            at = bias.array + first // 8 * 8 + (rows * (step // 8 * 8) + keys)
            x = tl.load(at, mask=in_bounds & (keys < left // 8 * 8), other=0.0).to(tl.float32)
        else:
            shape: tl.constexpr = [ROWS, KEYS] if ROW_AXIS == 0 else [KEYS, ROWS]
            x = tl.zeros(shape, tl.float32)
            if bias.kind != NONE:
                at = rows * step + keys
                inside = in_bounds & (keys < left)
                if bias.kind == FLOAT32:
                    x = tl.load(as_float32(bias.array) + first + at, mask=inside, other=0.0)
                else:
                    x = tl.load(bias.array + first + at, mask=inside, other=0.0).to(tl.float32)
    return x
