"""kvax's block bounds in plain numpy loops, and the pairs that kvax's kernels attend with them.

Written from the description of kvax's mask tensors, without code of packax.kvax. `bounds` was
compared with kvax 0.1.0's mask kernel in Triton's interpreter: all integers were equal.
"""

from __future__ import annotations

import numpy as np

PAD = -1


def bounds(q_pos, q_ids, kv_pos, kv_ids, query_block, kv_block, *, outer, shards=1, skip=True):
    """lower, upper, lower_full, upper_full: (B, 1, query blocks) or (B, shards, key blocks)."""
    k_pos, k_ids = padded(kv_pos, kv_ids, kv_block, np.iinfo(np.int32).max)
    inner_pad = k_ids.shape[1] + 1  # the id of padding queries and keys
    k_ids = np.where(k_ids == PAD, inner_pad, k_ids)
    keys = (blocks(k_pos, kv_block), blocks(k_ids, kv_block))
    parts = []
    for pos, ids in zip(np.split(q_pos, shards, 1), np.split(q_ids, shards, 1), strict=True):
        pos, ids = padded(pos, ids, query_block, -1)
        ids = np.where(ids == PAD, inner_pad, ids)
        queries = (blocks(pos, query_block), blocks(ids, query_block))
        parts.append([of_row(queries, keys, b, outer, inner_pad, skip) for b in range(len(ids))])
    stacked = np.asarray(parts, np.int32)  # (shards, B, blocks, 4)
    if outer == "query":
        joined = np.concatenate(list(stacked), axis=1)[:, None]
    else:
        joined = stacked.transpose(1, 0, 2, 3)
    return tuple(joined[..., n] for n in range(4))


def padded(pos, ids, block, fill):
    missing = ((0, 0), (0, -pos.shape[1] % block))
    return np.pad(pos, missing, constant_values=fill), np.pad(ids, missing, constant_values=PAD)


def blocks(x, size):
    return x.reshape(x.shape[0], -1, size)


def of_row(queries, keys, b, outer, pad, skip):
    query_outer = outer == "query"
    outside, inside = (queries, keys) if query_outer else (keys, queries)
    return [
        of_block(
            outside[0][b, n], outside[1][b, n], inside[0][b], inside[1][b], query_outer, pad, skip
        )
        for n in range(outside[0].shape[1])
    ]


def of_block(out_pos, out_ids, in_pos, in_ids, query_outer, pad, skip):
    if skip and (out_ids == pad).all():
        return 0, 0, 0, 0
    count = len(in_ids)
    lower, upper, lower_full, upper_full = count, 0, count, 0
    for n in range(count):
        q_pos, k_pos = (out_pos, in_pos[n]) if query_outer else (in_pos[n], out_pos)
        attend = in_ids[n].min() <= out_ids.max() and out_ids.min() <= in_ids[n].max()
        attend = attend and q_pos.max() >= k_pos.min()
        attend = attend and not (skip and in_ids[n].min() == pad)
        full = attend and out_ids.min() == out_ids.max() and in_ids[n].min() == in_ids[n].max()
        full = full and q_pos.min() >= k_pos.max()
        if attend:
            lower, upper = min(lower, n), n + 1
        if full:
            lower_full, upper_full = min(lower_full, n), n + 1
    if lower == count:  # no block is attended
        lower = upper
    if lower_full == count:
        lower_full = lower if query_outer else upper
    return lower, upper, lower_full, max(lower_full, upper_full)


def pairs_called_full(lower_full, upper_full, query_block, kv_block, q_len, kv_len):
    """The pairs (q_len, kv_len) that bounds of one row, outer "query", mark as needing no mask."""
    result = np.zeros((q_len, kv_len), bool)
    for n, (first, last) in enumerate(zip(lower_full, upper_full, strict=True)):
        rows = slice(n * query_block, (n + 1) * query_block)
        result[rows, first * kv_block : last * kv_block] = True
    return result
