"""packax.integrations.maxtext while decoding, against the reference: both caches, their active
tokens, MoBA, precision.

Guards against reading a key that is not active, a sink that counts twice, and chunks of MoBA that
are counted from another key.
"""

import enum
import functools
import types

import jax
import numpy as np
import pytest
from jaxprs import count
from lowered import calls, text_of
from maxtext_reference import (
    HEADS,
    MOBA,
    RNG,
    B,
    close,
    moba_pairs,
    op,
    pairs,
    reference,
    tensors,
)
from tiers import some


def in_cache(kind, size, ids):
    """The pairs (B, 1, S) of the row and a cache's keys: active ones, by position in the cache."""
    keys = ids.shape[1]
    row = np.full((1, 1), keys - 1)
    row_and_key_ids = np.ones((B, 1), int), np.where(ids == 1, 1, -1)
    kind = kind if kind in ("local_sliding", "chunk") else "full"
    return pairs(kind, size, *row_and_key_ids, row, np.arange(keys)[None])


@pytest.mark.parametrize(
    ("kind", "size"),
    some([("local_sliding", 6), ("chunk", 8), ("global", None), ("full", None)], 0, 1),
)
def test_autoregressive(kind, size):
    """Active tokens of both caches, with positions counted in each; the sink counts once.

    Inactive tokens hold NaN, so a result shows if one is read. One cache is a ring that wrapped
    around, one has a hole, one is empty.
    """
    q, k, v = tensors(1, 20)
    _, k_ar, v_ar = tensors(1, 13)
    ids = (np.arange(20) < np.array([[17], [4]])).astype(int)
    ids[1] = 0  # nothing was prefilled
    ids_ar = np.ones((B, 13), int)
    ids_ar[0, 3:6] = 0  # a ring: the oldest tokens come last
    ids_ar[1, [0, 2, 9]] = 0, 2, -1
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    poisoned = [
        np.where((i == 1)[..., None, None], x, np.nan)
        for x, i in ((k, ids), (v, ids), (k_ar, ids_ar), (v_ar, ids_ar))
    ]
    cached = ((*poisoned[:2], ids), (*poisoned[2:], ids_ar, ids_ar.sum(1)))
    allowed = np.concatenate([in_cache(kind, size, i) for i in (ids, ids_ar)], -1)
    keys, values = np.concatenate([k, k_ar], 1), np.concatenate([v, v_ar], 1)

    def run(q, cached, sink):
        one = op(kind, size, attn_logits_soft_cap=3.0)
        return one(q, None, None, None, None, "autoregressive", cached, sinks=sink)

    assert count("packax_decode", run, q, cached, sinks) == 2
    assert count("packax_forward", run, q, cached, sinks) == 0
    out = jax.jit(run)(q, cached, sinks)
    close(out, reference(q, keys, values, allowed, 3.0, sinks)[0])


def test_autoregressive_other_calls():
    """Without ids all keys are active; several rows, and recorded logits, use flash_attention;
    without active keys the result is 0."""
    q, k, v = tensors(1, 13)
    q3, _, _ = tensors(3, 1)
    ids = np.ones((B, 13), int)
    ids[:, 4:6] = 0

    @jax.jit
    def run(q, q3):
        def call(one, query, *x, **more):
            return one(query, *[None] * 4, "autoregressive", *x, **more)

        recording = op("chunk", 8)
        recorded = call(recording, q, ((k, v, ids), None), record_max_logits=True)
        return (
            call(op(), q, ((k, v, None), None)),
            call(op("local_sliding", 4), q3, ((k, v, ids), None)),
            recorded,
            jax.tree.leaves(recording.max_logits)[0],
            call(op(), q, ((k, v, ids * 0), (k, v, ids * 0, None)), sinks=np.ones(HEADS)),
        )

    everything, rows, recorded, logits, nothing = run(q, q3)
    close(everything, reference(q, k, v, np.ones((B, 1, 13), bool))[0])
    row_and_key_ids = np.ones((B, 3), int), np.where(ids == 1, 1, -1)
    allowed = pairs("local_sliding", 4, *row_and_key_ids, np.arange(3)[None], np.arange(13)[None])
    close(rows, reference(q3, k, v, allowed)[0])
    expected = reference(q, k, v, in_cache("chunk", 8, ids))
    close(recorded, expected[0])
    close(logits, expected[1])
    assert not np.any(nothing)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_where_there_are(extension, dtype):
    """Also float32, where `matmul_precision` selects the precision, as for MaxText's own
    products."""
    shape = jax.ShapeDtypeStruct((B, 20, 2, 64), dtype), jax.ShapeDtypeStruct((B, 20), np.int32)
    query = jax.ShapeDtypeStruct((B, 1, 2, 64), dtype)

    def run(precision, query, kv, ids):
        one = op("global", config=types.SimpleNamespace(matmul_precision=precision))
        return one(query, None, None, None, None, "autoregressive", ((kv, kv, ids), None))

    for precision, exact in (("highest", 1), (Level.DEFAULT, 0)):
        ((target, attributes, *_),) = calls(
            text_of(functools.partial(run, precision), query, *shape)
        )
        assert target == "packax_decode_v1" and attributes["float32_products"] == f"{exact} : i32"


class Level(enum.Enum):  # as in MaxText's configuration
    DEFAULT = "default"


def test_precision_of_training():
    """Of the products of float32 operands, forward and backward."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors()]
    for precision, name in (("highest", "HIGHEST"), (Level.DEFAULT, "DEFAULT")):
        one = op("global", config=types.SimpleNamespace(matmul_precision=precision))
        text = text_of(jax.grad(lambda *x, one=one: one(*x).sum()), *shapes, platforms=("cpu",))
        products = text.count("stablehlo.dot_general")
        assert products and text.count(f"[{name}, {name}]") == products


def test_moba_and_indexer_mask():
    """Each cache has its part of the mask; MoBA counts chunks in each cache from its end."""
    q, k, v = tensors(1, 20)
    _, k_ar, v_ar = tensors(1, 15)
    ids, ids_ar = np.ones((B, 20), int), np.ones((B, 15), int)
    ids_ar[0, 3] = 0
    kept = RNG.random((B, 1, 35)) < 0.7
    indexer = np.where(kept, 0.0, -2e38).astype(np.float32)
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    cached = ((k, v, ids), (k_ar, v_ar, ids_ar, None))

    def run(q, cached, indexer):
        one = op(config=MOBA, attn_logits_soft_cap=3.0)
        options = {"sinks": sinks, "indexer_mask": indexer}
        return one(q, *[None] * 4, "autoregressive", cached, **options)

    assert count("packax_decode", run, q, cached, indexer) == 2
    allowed = np.concatenate([ids, ids_ar], 1)[:, None, None] == 1
    allowed = allowed & np.concatenate([moba_pairs(q, k, 19), moba_pairs(q, k_ar, 14)], -1)
    keys, values = np.concatenate([k, k_ar], 1), np.concatenate([v, v_ar], 1)
    out = jax.jit(run)(q, cached, indexer)
    close(out, reference(q, keys, values, allowed & kept[:, None], 3.0, sinks)[0])
