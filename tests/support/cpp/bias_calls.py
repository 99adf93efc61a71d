"""Valid calls with a bias array or dropout."""

from math import ceil

from cpp.calls import (
    ABSENT,
    BLOCKS,
    Array,
    Call,
    Sizes,
    backward_fallback,
    forward_fallback,
    make_call,
)

THRESHOLD = 3 << 30  # three quarters are dropped
ALL_AXES = 7
SIZES = Sizes()


def bias_of(s, axes=ALL_AXES, dtype="float32"):
    """`axes`: the axes that are not broadcast; bit 0: batch, bit 1: heads, bit 2: rows."""
    sizes = (s.batch, s.heads, s.q_len)
    shape = (n if axes >> bit & 1 else 1 for bit, n in enumerate(sizes))
    return Array(dtype, (*shape, s.kv_len))


def _with_bias(call: Call, s, axes, dtype, threshold, rows_batch, dbias) -> Call:
    bias = ABSENT if axes is None else bias_of(s, axes, dtype)
    dropout = {"dropout_streams": ABSENT, "dropout_rows": ABSENT}
    if threshold:
        dropout = {
            "dropout_streams": Array("uint32", (s.batch, s.heads, 4)),
            "dropout_rows": Array("int32", (rows_batch, s.q_len)),
        }
    lse = {}
    if axes is not None or threshold:
        lse = {"lse": Array("float32", (s.batch, s.heads, s.q_len, 2))}
    operands, results = {**call.operands, "bias": bias, **dropout}, dict(call.results)
    if dbias is None:
        results |= lse
    else:
        operands |= lse
        results["dbias"] = bias if dbias else ABSENT
        if axes is not None and call.attributes["algorithm"] != ("string", "portable"):
            elements = results["workspace"].shape[0] + s.batch * s.heads * 64 * ceil(s.q_len / 64)
            results["workspace"] = Array("float32", (elements,))
    attributes = {**call.attributes, "dropout_threshold": ("int64", threshold)}
    return make_call(call.target, operands, results, attributes)


def forward_bias(
    m, s=SIZES, dims=None, axes=ALL_AXES, dtype="float32", threshold=THRESHOLD, rows_batch=1,
    blocks=BLOCKS, **more,
):  # fmt: skip
    """`axes` None: no bias; `threshold` 0: no dropout."""
    call = forward_fallback(m, s, dims, blocks=blocks, **more)
    return _with_bias(call, s, axes, dtype, threshold, rows_batch, None)


def backward_bias(
    m, s=SIZES, dims=None, axes=ALL_AXES, dtype="float32", threshold=THRESHOLD, rows_batch=1,
    blocks=BLOCKS, dbias=1, **more,
):  # fmt: skip
    call = backward_fallback(m, s, dims, blocks=blocks, **more)
    return _with_bias(call, s, axes, dtype, threshold, rows_batch, dbias)


def bias_alone(direction, m, s=None, dtype_of_bias=None, dims=(32, 24), **more):
    """A call of either pass whose only option is a bias that the `*_bias_alone` kernels support."""
    dtype = dtype_of_bias or {"bf16": "bfloat16", "f16": "float16"}[m.variant["dtype"]]
    alone = {"threshold": 0, "has": (0, 0), "soft_cap": 0.0, "blocks": None}
    if direction == "backward":
        alone["score_grads"] = 0
    make = {"forward": forward_bias, "backward": backward_bias}[direction]
    return make(m, s or Sizes(kv_len=704), dims, **{"dtype": dtype, **alone, **more})
