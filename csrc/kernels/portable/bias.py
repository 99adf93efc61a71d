"""An array that is added to the logits, read tile by tile from where it lies.

It is (1 or batch, 1 or heads, 1 or q_len, kv_len), in the kernel's dtype or in float32: a program
decides at run time, once for all of its elements. Nothing is expanded over the axes that are 1.
"""

from typing import NamedTuple

import triton
import triton.language as tl

NONE = tl.constexpr(0)  # of `bias_kind`
OWN_DTYPE = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)


class Bias(NamedTuple):
    """The bias of a batch row. `array` is None in kernels that never have one; `head_step` and
    `row_step` are 0 where one serves all heads or rows."""

    array: tl.tensor
    first: tl.tensor
    kind: tl.tensor
    head_step: tl.tensor
    row_step: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor


@triton.jit
def bias_of(bias, kind, axes, b, heads, q_len, kv_len):
    """That of a batch row. `axes`: bit 0, it has the batch; bit 1, heads; bit 2, rows."""
    if bias is None:
        made = Bias(None, None, None, None, None, None, None)
    else:
        row_step = tl.where((axes & 4) != 0, kv_len, 0).to(tl.int64)
        size = tl.where((axes & 4) != 0, q_len, 1).to(tl.int64) * kv_len
        head_step = tl.where((axes & 2) != 0, size, 0)
        batch_step = tl.where((axes & 1) != 0, tl.where((axes & 2) != 0, heads, 1), 0) * size
        made = Bias(bias, b * batch_step, kind, head_step, row_step, q_len, kv_len)
    return made


@triton.jit
def as_float32(pointer):
    return pointer.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def bias_tile(
    bias, head, first_row, first_key, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """What is added to a tile of logits in base e: rows x keys (ROW_AXIS 0) or keys x rows
    (ROW_AXIS 1); 0 where there is no bias, None in kernels that never have one.

    It is read before the scores are made, which takes time that the read needs. Offsets in a tile
    have 32 bits: C++ refuses rows of more keys.
    """
    if bias.array is None:
        x = None
    else:
        rows = tl.expand_dims(tl.arange(0, ROWS), 1 - ROW_AXIS)
        keys = tl.expand_dims(tl.arange(0, KEYS), ROW_AXIS)
        first = bias.first + head * bias.head_step + first_row * bias.row_step + first_key
        step = bias.row_step.to(tl.int32)
        left = bias.kv_len - first_key
        there = rows < bias.q_len - first_row
        if bias.kind is None:  # 16 bytes at once: the compiler sees that all are multiples of 8
            at = bias.array + first // 8 * 8 + (rows * (step // 8 * 8) + keys)
            x = tl.load(at, mask=there & (keys < left // 8 * 8), other=0.0).to(tl.float32)
        else:
            shape: tl.constexpr = [ROWS, KEYS] if ROW_AXIS == 0 else [KEYS, ROWS]
            x = tl.zeros(shape, tl.float32)
            if bias.kind != NONE:
                at = rows * step + keys
                inside = there & (keys < left)
                if bias.kind == FLOAT32:
                    x = tl.load(as_float32(bias.array) + first + at, mask=inside, other=0.0)
                else:
                    x = tl.load(bias.array + first + at, mask=inside, other=0.0).to(tl.float32)
    return x
