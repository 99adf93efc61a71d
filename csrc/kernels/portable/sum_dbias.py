"""Adds the parts of the gradient of a bias that sm90/shared_dbias.py computes."""

import triton
import triton.language as tl
from portable.bias import FLOAT32, as_float32


@triton.jit
def sum_dbias(
    dbias, dbias_sums, bias_kind, bias_axes, dbias_parts, batch, q_len, kv_len, heads,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """dbias = the sum of dbias_sums (dbias_parts, *dbias.shape), in dbias's dtype. A program
    computes ELEMENTS of it."""
    planes = batch // (bias_axes >> 3) * tl.where((bias_axes & 2) != 0, heads, 1)
    size = planes.to(tl.int64) * q_len * kv_len
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < size
    total = tl.zeros([ELEMENTS], tl.float32)
    for part in range(dbias_parts):
        total += tl.load(dbias_sums + part * size + at, mask=inside, other=0.0)
    if bias_kind == FLOAT32:
        tl.store(as_float32(dbias) + at, total, mask=inside)
    else:
        tl.store(dbias + at, total.to(dbias.dtype.element_ty), mask=inside)
