"""Runs the kernels with an array bias and with dropout in Triton's interpreter."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton_interpreter as interpreter
from triton_launch import ceil, guarded, launch


class Added(NamedTuple):
    """The arrays of a bias and of dropout, in the format of docs/internals/ffi.md."""

    bias: np.ndarray | None = None
    streams: np.ndarray | None = None  # (B, H, 4) uint32
    rows: np.ndarray | None = None  # (1 or B, Sq) int32
    threshold: int = 0

    def pointers(self, placeholder: np.ndarray) -> tuple[np.ndarray, ...]:
        streams = None if self.streams is None else self.streams.view(np.int32)
        bias = self.bias
        if bias is None:
            bias = placeholder.view(np.float32)
        return tuple(placeholder if x is None else x for x in (bias, streams, self.rows))

    @property
    def inverse_keep(self) -> float:
        return 1 / (1 - self.threshold / 2**32)

    def numbers(self, batch: int) -> tuple[int, ...]:
        kind = axes = 0
        if self.bias is not None:
            kind = 2 if self.bias.dtype == np.float32 else 1
            axes = sum((size > 1) << axis for axis, size in enumerate(self.bias.shape[:3]))
            axes |= batch // len(self.bias) << 3
        bits = int(np.uint32(self.threshold).view(np.int32))
        return kind, axes, bits, 1 if self.rows is None else len(self.rows)


def _call(mask: Any, extras: Any, added: Added, tensors: Any, *flags: int) -> tuple[Any, ...]:
    """The kernel arguments from the score parameters on."""
    mask_mode, *rest = interpreter.fallback_sizes(mask, extras, *tensors)
    return (
        *extras.operands, *added.pointers(mask.lo), extras.scale, extras.soft_cap,
        added.inverse_keep, mask_mode, *flags, *added.numbers(len(tensors[0])), *rest,
    )  # fmt: skip


def _alone(mask: Any, extras: Any, added: Added, tensors: Any) -> tuple[Any, ...]:
    """The same for the kernels that support only a bias."""
    mask_mode, *rest = interpreter.fallback_sizes(mask, extras, *tensors)
    axes = added.numbers(len(tensors[0]))[1]
    return added.bias, extras.scale, mask_mode, axes, *rest[:2], *rest[-6:]


def alone(
    query, key, value, dout, mask, extras, added: Added, tiles, dims, stages, sinks=None
) -> dict[str, np.ndarray]:
    """Both passes with the kernels that support only a bias, chosen as in C++. `tiles`: one each
    for the forward, dK/dV and dQ, and the side of the square dbias tile."""
    batch, q_len, heads, _ = query.shape
    kv_len, kv_heads = key.shape[1:3]
    tensors = (query, key, value)
    out = guarded((batch, q_len, heads, value.shape[3]), query.dtype)
    lse, delta = (guarded(n, np.float32) for n in ((batch, heads, q_len, 2), (batch, heads, q_len)))
    dq, dk, dv, dbias = (guarded(x.shape, x.dtype) for x in (*tensors, added.bias))
    arguments = _alone(mask, extras, added, tensors)
    of_forward = interpreter.with_sink_batch(arguments, 6, sinks)

    def constants(rows: int, keys: int) -> dict[str, int]:
        return {
            "QK_DIM": dims[0], "V_DIM": dims[1], "BLOCK_M": rows, "BLOCK_N": keys,
            "STAGES": stages, "FLOAT32_PRODUCTS": 1,
        }  # fmt: skip

    def rows_grid(rows: int) -> tuple[int]:
        return (batch * heads * ceil(q_len, 128) * (128 // rows),)

    launch(
        "forward_bias_alone", rows_grid(tiles[0][0]), *tensors, out, lse,
        interpreter.UNREAD if sinks is None else sinks, *mask.rows, mask.q_blocks, mask.q_order,
        *of_forward, **constants(*tiles[0]),
    )  # fmt: skip
    launch(
        "backward_delta_fallback", (ceil(q_len, 32) * heads * batch,), out, dout, lse, delta,
        delta, mask.lo, mask.hi, 0, batch, mask.batch, q_len, heads, value.shape[3], V_DIM=dims[1],
        ROWS=32,
    )  # fmt: skip
    of_backward = (*tensors, dout, lse, delta)
    keys = tiles[1][1]
    sizes = dbias.shape
    whole = sizes[:3] == (batch, heads, q_len)
    launch(
        f"backward_dkdv_{'dbias' if whole else 'bias'}_alone",
        (kv_heads * batch * ceil(kv_len, 128) * (128 // keys),),
        *of_backward, dk, dv, *([dbias] if whole else []), *mask.rows, mask.q_blocks,
        mask.kv_blocks, mask.kv_order, *arguments, **constants(*tiles[1]),
    )  # fmt: skip
    if whole:
        of_dq = constants(*tiles[2])
        del of_dq["V_DIM"]
        launch(
            "backward_dq_of_dbias_alone", rows_grid(tiles[2][0]), key, dbias, dq, mask.q_blocks,
            mask.q_order, extras.scale, batch, mask.batch, q_len, kv_len, heads, kv_heads,
            query.shape[3], **of_dq,
        )  # fmt: skip
    else:
        side = tiles[3]
        launch(
            "backward_dq_bias_alone", rows_grid(tiles[2][0]), *of_backward, dq, *mask.rows,
            mask.q_blocks, mask.q_order, *arguments, **constants(*tiles[2]),
        )  # fmt: skip
        launch(
            "backward_dbias_alone",
            (sizes[0] * sizes[1] * ceil(sizes[2], side) * ceil(kv_len, side),), *of_backward,
            dbias, *mask.rows, mask.q_blocks, *arguments, **constants(side, side),
        )  # fmt: skip
    return {"out": out, "lse": lse, "query": dq, "key": dk, "value": dv, "bias": dbias}


def log_sum_exp(lse: np.ndarray) -> np.ndarray:
    """(B, H, Sq) from the kernels' pairs (B, H, Sq, 2)."""
    top, log = lse[..., 0], lse[..., 1]
    np.testing.assert_array_equal(top == -np.inf, log == np.finfo(np.float32).max)
    return np.where(top == -np.inf, top, top + np.where(top == -np.inf, 0, log))


def forward(
    query, key, value, mask, extras, added: Added, tile, dims, sinks=None
) -> tuple[np.ndarray, ...]:
    """out, lse (B, H, Sq, 2) and row_max. `dims`: the head dims that the kernel is compiled for."""
    batch, q_len, heads, _ = query.shape
    rows, keys = tile
    out = guarded((batch, q_len, heads, value.shape[3]), query.dtype)
    lse = guarded((batch, heads, q_len, 2), np.float32)
    row_max = guarded((batch, heads, q_len), np.float32)
    launch(
        "forward_bias", (batch * heads * ceil(q_len, 128) * (128 // rows),), query, key, value,
        out, lse, row_max, interpreter.UNREAD if sinks is None else sinks, *mask.rows,
        mask.q_blocks, mask.q_order, *extras.rows_map,
        *interpreter.with_sink_batch(_call(mask, extras, added, (query, key, value)), -12, sinks),
        QK_DIM=dims[0], V_DIM=dims[1], BLOCK_M=rows, BLOCK_N=keys, STAGES=1, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    return out, lse, row_max


def backward(
    query, key, value, out, lse, dout, dlse, mask, extras, added: Added, tiles, dims
) -> tuple[np.ndarray | None, ...]:
    """dq, dk, dv, score_grads and dbias. `tiles`: for dkdv and dq, and the side of dbias's."""
    batch, q_len, heads, _ = query.shape
    kv_len, kv_heads = key.shape[1:3]
    delta = guarded((batch, heads, q_len), np.float32)
    dq, dk, dv = (guarded(x.shape, x.dtype) for x in (query, key, value))
    score_grads = guarded((batch, heads, 2, q_len), np.float32)
    tensors = (query, key, value)
    launch(
        "backward_delta_fallback", (ceil(q_len, 32) * heads * batch,), out, dout, dlse, delta,
        delta, mask.lo, mask.hi, 1, batch, mask.batch, q_len, heads, value.shape[3],
        V_DIM=dims[1], ROWS=32,
    )  # fmt: skip

    def constants(rows: int, keys: int) -> dict[str, int]:
        return {
            "QK_DIM": dims[0], "V_DIM": dims[1], "BLOCK_M": rows, "BLOCK_N": keys, "STAGES": 1,
            "FLOAT32_PRODUCTS": 1,
        }  # fmt: skip

    rows, keys = tiles[0]
    launch(
        "backward_dkdv_bias", (kv_heads * batch * ceil(kv_len, 128) * (128 // keys),), *tensors,
        dout, lse, delta, dk, dv, *mask.rows, mask.q_blocks, mask.kv_blocks, mask.kv_order,
        *extras.keys_map, *_call(mask, extras, added, tensors), **constants(rows, keys),
    )  # fmt: skip
    rows, keys = tiles[1]
    launch(
        "backward_dq_bias", (batch * heads * ceil(q_len, 128) * (128 // rows),), *tensors, dout,
        lse, delta, dq, score_grads, *mask.rows, mask.q_blocks, mask.q_order, *extras.rows_map,
        *_call(mask, extras, added, tensors, 1), **constants(rows, keys),
    )  # fmt: skip
    dbias = None
    if added.bias is not None:
        side = tiles[2]
        dbias = guarded(added.bias.shape, added.bias.dtype)
        sizes = added.bias.shape
        launch(
            "backward_dbias", (sizes[0] * sizes[1] * ceil(sizes[2], side) * ceil(kv_len, side),),
            *tensors, dout, lse, delta, dbias, *mask.rows, mask.q_blocks, extras.rows_map[0],
            *_call(mask, extras, added, tensors), **constants(side, side),
        )  # fmt: skip
    return dq, dk, dv, score_grads, dbias
