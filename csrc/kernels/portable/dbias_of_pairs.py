"""The gradient of a bias with one element per logit, and dQ as a product with it.

This gradient is dlogit, without any sum. The kernel of dK and dV (bwd.py) writes it, and dQ is its
product with the keys:

    dq = scale * dbias k

The backward pass therefore computes scores only once. dQ is bitwise equal to that of the dQ kernel,
which also rounds dlogit to the query's dtype before the product.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from portable.arithmetic import dot
from portable.kv_ranges import (
    columns,
    key_range,
    load_rows,
    row_pointers,
    store_rows,
    tile_of_program,
)


class PairGradients(NamedTuple):
    """The columns of dbias for a tile of keys: pointers (keys, rows) for the first rows of the
    first head, the mask `valid` (keys, 1) of keys below kv_len, and sizes. All are None in kernels
    that do not write dbias."""

    pointers: tl.tensor
    valid: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor


@triton.jit
def pair_gradients_of(dbias, b, heads, first_key, q_len, kv_len, ROWS: tl.constexpr, keys):
    """The PairGradients of batch row `b`. Offsets in a tile have 32 bits, as in bias.py."""
    if dbias is None:
        result = PairGradients(None, None, None, None)
    else:
        kv_len = kv_len // 8 * 8  # the compiler sees that rows are 16-byte aligned
        local = tl.arange(0, keys.shape[0])[:, None] + tl.arange(0, ROWS)[None, :] * kv_len
        first = b.to(tl.int64) * heads * q_len * kv_len + first_key
        result = PairGradients(dbias + first + local, (keys < kv_len)[:, None], q_len, kv_len)
    return result


@triton.jit
def store_pairs(grads, x, head, first_row, end):
    """Stores x (keys, rows) in a head's rows from `first_row` on, up to `end`."""
    rows = first_row + tl.arange(0, x.shape[1])
    row = head.to(tl.int64) * grads.q_len + first_row
    pointers = grads.pointers + row * grads.kv_len
    valid = grads.valid & (rows < end)[None, :]
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=valid)


@triton.jit
def clear_pairs(grads, head, begin, end):
    """Stores zeros in rows [begin, end), which no step of the tile visits."""
    zeros = tl.zeros(grads.pointers.shape, tl.float32)
    for first_row in tl.range(begin, end, zeros.shape[1], num_stages=1):
        store_pairs(grads, zeros, head, first_row, end)


@triton.jit
def backward_dq_of_dbias(
    key, dbias, dq, q_blocks, q_order, scale, batch, mask_batch, q_len, kv_len, heads, kv_heads,
    qk_dim, QK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """dQ from dbias (B, H, Sq, Skv). Keys outside the range of the tile's rows are not read: values
    in padding may be infinite."""
    group = heads // kv_heads
    head, kv_head, b, mask_b, row = tile_of_program(
        q_order, batch, mask_batch, tl.cdiv(q_len, 128), group, kv_heads, BLOCK_M
    )
    if row >= q_len:
        return
    start, end, _, _, _ = key_range(q_blocks, mask_b, row, q_len, BLOCK_M)
    local = tl.arange(0, BLOCK_M)
    valid = (row + local < q_len)[:, None]
    cols = tl.arange(0, BLOCK_N)
    aligned = kv_len // 8 * 8  # the compiler sees that rows are 16-byte aligned
    first_row = (b.to(tl.int64) * heads + head) * q_len + row
    ds_ptr = dbias + first_row * aligned + (local[:, None] * aligned + cols[None, :])
    dims = columns(QK_DIM)
    kv_row = b.to(tl.int64) * kv_len * kv_heads + kv_head
    k_ptr = row_pointers(key, kv_row, kv_heads, dims, qk_dim, QK_DIM, BLOCK_N)
    acc = tl.zeros([BLOCK_M, dims.shape[0]], tl.float32)
    # if no row attends to a key, start is INT_MAX, and the pipeline would overflow it
    begin = tl.minimum(start, end) // 8 * 8
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        first_key = first_key // 8 * 8
        keys = first_key + cols
        ds = tl.load(ds_ptr + first_key, mask=valid & (keys < aligned)[None, :], other=0.0)
        read = (keys >= start) & (keys < end)
        k = load_rows(
            k_ptr + first_key.to(tl.int64) * kv_heads * qk_dim, read[:, None], qk_dim, QK_DIM
        )
        acc = dot(ds, k, acc, FLOAT32_PRODUCTS)
    q_row = (b.to(tl.int64) * q_len + row) * heads + head
    dq_rows = row_pointers(dq, q_row, heads, dims, qk_dim, QK_DIM, BLOCK_M)
    store_rows(dq_rows, (acc * scale).to(dq.dtype.element_ty), valid, qk_dim, QK_DIM)
