"""Operands for MaxText's attention, and the pairs that its dense path attends."""

import types

import dense
import numpy as np
import pytest

pytest.importorskip("flax.nnx")
from packax.integrations import maxtext

B, S, HEADS, KV_HEADS, DIM = 2, 33, 4, 2, 8
RNG = np.random.default_rng(9)


def tensors(rows=S, keys=S, scale=1.5):
    shapes = (B, rows, HEADS, DIM), (B, keys, KV_HEADS, DIM), (B, keys, KV_HEADS, DIM + 4)
    q, k, v = (RNG.standard_normal(shape).astype(np.float32) for shape in shapes)
    return scale * q, k, v


def ids_and_positions(length=S):
    """Two packings: document ids from 1 with MaxText's padding id 0, and one with negative ids."""
    thirds = length // 3
    ids = np.stack([np.r_[[1] * thirds, [2] * thirds, [0] * (length - 2 * thirds)]] * 2)
    ids[1] = np.r_[[5] * (length - 8), [-3] * 4, [-1] * 4]
    starts = np.diff(ids, axis=1, prepend=-99) != 0
    index = np.arange(length)
    return ids, index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def pairs(kind, size, ids, kv_ids=None, row=None, col=None, spans=None):
    """The attended pairs, (B, Sq, Skv). `row`, `col`: token indices of queries and keys, (B or 1,
    length)."""
    row = np.arange(ids.shape[1])[None] if row is None else row
    col = np.arange(ids.shape[1])[None] if col is None else col
    kv_ids = ids if kv_ids is None else kv_ids
    r, c = row[:, :, None], col[:, None, :]
    same = (ids[:, :, None] == kv_ids[:, None]) & (kv_ids >= 0)[:, None]
    allowed = {
        "global": c <= r,
        "mla": c <= r,
        "full": np.ones_like(c <= r),
        "local_sliding": (c <= r) & (c > r - (size or 0)),
        "chunk": (c <= r) & (c // (size or 1) == r // (size or 1)),
        "block_diffusion": c // (size or 1) <= r // (size or 1),
    }[kind]
    if spans is not None:  # two tokens share an image if all tokens between them are image tokens
        for b in range(len(spans)):
            for i in np.flatnonzero(spans[b]):
                for j in np.flatnonzero(spans[b]):
                    inside = spans[b, min(i, j) : max(i, j) + 1].all()
                    allowed = np.broadcast_to(allowed, same.shape).copy()
                    allowed[b, i, j] |= inside
    return allowed & same


def reference(q, k, v, allowed, cap=None, sinks=None):
    """(out, largest logit of each head) with scale 1. A row without a key gives 0."""
    dout = np.zeros((*q.shape[:3], v.shape[3]))
    arrays = {"query": q, "key": k, "value": v, "scale": 1.0, "dout": dout}
    if sinks is not None:
        arrays["sinks"] = sinks
    found = dense.dense(arrays, allowed, soft_cap=cap)
    return found["out"], found["top"]


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def op(kind="global", size=None, config=None, **options):
    sizes = {"local_sliding": "sliding_window_size", "chunk": "chunk_attn_window_size"}
    if kind == "block_diffusion":
        config = types.SimpleNamespace(causal_block_size=size)
    elif kind in sizes:
        options[sizes[kind]] = size
    return maxtext.AttentionOp(config=config, attention_type=kind, **options)


KINDS = [
    ("global", None),
    ("local_sliding", 5),
    ("chunk", 7),
    ("full", None),
    ("mla", None),
    ("block_diffusion", 6),
]

IMAGES = np.zeros((B, S), bool)
IMAGES[0, 2:6] = IMAGES[0, 14:21] = IMAGES[1, 4:9] = IMAGES[1, 10:12] = IMAGES[1, 15:30] = True
MASKED = -0.7 * float(np.finfo(np.float32).max)  # the masked value of an additive mask
MOBA = types.SimpleNamespace(moba=True, moba_chunk_size=6, moba_topk=3)


class Mesh:
    shape = types.MappingProxyType({"data": 1, "context": 2})


def moba_pairs(q, k, before, size=6, count=3):
    """Loop reference: the row's own chunk and the earlier chunks whose mean key scores best."""
    rows, keys = q.shape[1], k.shape[1]
    allowed = np.zeros((B, HEADS, rows, keys), bool)
    for b, h, i in np.ndindex(B, HEADS, rows):
        place = before + i
        means = [
            k[b, at : at + size, h // (HEADS // KV_HEADS)].mean(0) for at in range(0, keys, size)
        ]
        best = sorted(range(place // size), key=lambda n: -float(q[b, i, h] @ means[n]))
        for n in [place // size, *best[: count - 1]]:
            allowed[b, h, i, n * size : min((n + 1) * size, place + 1)] = True
    return allowed
