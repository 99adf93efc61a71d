"""packax.integrations.maxtext with MoBA and the indexer's mask, against a dense reference.

Guards against chunks counted from another position than MaxText's, in training, chunked prefill,
decoding and the reordered batches of context parallelism.
"""

import types

import context
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jaxprs import count
from maxtext_reference import (
    HEADS,
    MASKED,
    MOBA,
    RNG,
    B,
    Mesh,
    S,
    close,
    ids_and_positions,
    moba_pairs,
    of_heads,
    op,
    pairs,
    tensors,
)
from packax.integrations import maxtext


@pytest.mark.parametrize(
    ("kind", "size", "moba", "indexer"),
    [
        ("global", None, True, False),
        ("full", None, True, True),
        ("local_sliding", 13, True, False),
        ("full", None, False, True),
    ],
)
def test_moba_and_indexer_mask(kind, size, moba, indexer):
    """With segment ids, cap and sinks. MoBA is causal with every type. Rows without a key give
    0."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    kept = RNG.random((B, S, S)) < 0.6
    kept[1, 3] = False
    mask = jnp.where(kept, 0.0, MASKED) if indexer else None
    one = op(kind, size, config=MOBA if moba else None, attn_logits_soft_cap=2.0)
    run = jax.jit(lambda *x: one(*x[:3], ids, sinks=sinks, indexer_mask=x[3]))
    allowed = np.broadcast_to(pairs(kind, size, ids)[:, None], (B, HEADS, S, S))
    whole = allowed.sum()
    allowed = allowed & (moba_pairs(q, k, 0) if moba else True)
    allowed = allowed & (kept[:, None] if indexer else True)
    assert allowed.sum() < whole
    close(run(q, k, v, mask), of_heads(q, k, v, allowed, 2.0, sinks))


def test_moba_in_chunked_prefill_and_its_gradients():
    """Chunks are counted over the whole prompt. The gate has no gradient."""
    before, rows = 13, 10
    q, k, v = tensors(rows, before + rows)
    ids = np.ones((B, before + rows), int)
    previous = np.zeros((B, before, 1))

    allowed = moba_pairs(q, k, before)

    def ours(q, k, v):
        cached = ((k, v, ids), None)
        return op(config=MOBA)(q, *[None] * 4, "prefill", cached, previous_chunk=previous)

    def fixed(q, k, v):
        return packax.flash_attention(q, k, v, packax.masks.block_sparse(allowed, 1), scale=1.0)

    def results(attend):
        def loss(q, k, v):
            out = attend(q, k, v)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    got = results(ours)
    close(got[0][1], of_heads(q, k, v, allowed))
    jax.tree.map(close, got, results(fixed))


def test_moba_and_indexer_mask_while_decoding():
    """Each cache has its part of the mask; MoBA counts chunks in each cache from its end."""
    q, k, v = tensors(1, 20)
    _, k_ar, v_ar = tensors(1, 15)
    ids, ids_ar = np.ones((B, 20), int), np.ones((B, 15), int)
    ids_ar[0, 3] = 0
    kept = RNG.random((B, 1, 35)) < 0.7
    indexer = np.where(kept, 0.0, -2e38).astype(np.float32)
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    cached = ((k, v, ids), (k_ar, v_ar, ids_ar, None))

    def run(q, cached, indexer, moba=MOBA):
        one = op(config=moba, attn_logits_soft_cap=3.0)
        options = {"sinks": sinks, "indexer_mask": indexer}
        return one(q, *[None] * 4, "autoregressive", cached, **options)

    assert count("packax_decode", run, q, cached, indexer) == 2
    active = np.concatenate([ids, ids_ar], 1)[:, None, None] == 1
    chosen = np.concatenate([moba_pairs(q, k, 19), moba_pairs(q, k_ar, 14)], -1) & active
    keys, values = np.concatenate([k, k_ar], 1), np.concatenate([v, v_ar], 1)

    def expected(allowed):
        return of_heads(q, keys, values, np.broadcast_to(allowed, chosen.shape), 3.0, sinks)

    close(jax.jit(run)(q, cached, indexer), expected(chosen & kept[:, None]))
    close(jax.jit(run)(q, cached, None), expected(chosen))
    of_indexer = jax.jit(lambda *x: run(*x, None))(q, cached, indexer)
    close(of_indexer, expected(active & kept[:, None]))


def reordered(length: int):
    """A config, its operands reordered for two ranks with the indexer's mask last, and the expected
    output in sequence order."""
    q, k, v = tensors(length, length)
    ids, positions = ids_and_positions(length)
    kept = RNG.random((B, length, length)) < 0.6
    config = {"context_parallel_load_balance": True, "context_sharding": "context"}
    config = types.SimpleNamespace(**vars(MOBA), **config)
    operands = [maxtext.reorder_sequence(jnp.asarray(x), 2) for x in (q, k, v, ids, positions)]
    indexer = jnp.where(kept, 0.0, MASKED)
    indexer = maxtext.reorder_sequence(maxtext.reorder_sequence(indexer, 2), 2, seq_dim=2)
    allowed = pairs("global", None, ids, row=positions, col=positions) & kept
    return config, [*operands, indexer], of_heads(q, k, v, allowed[:, None] & moba_pairs(q, k, 0))


def test_reordered_moba_and_indexer_mask():
    """Any length that 2 * ranks divides; chunks are selected on the sequence in order."""
    config, operands, expected = reordered(36)
    one = maxtext.AttentionOp(config, Mesh)
    out = jax.jit(lambda *x: one(*x[:5], indexer_mask=x[5]))(*operands)
    close(maxtext.reorder_sequence(out, 2, to_contiguous=True), expected)


@pytest.mark.exhaustive
def test_reordered_and_sharded_moba_and_indexer_mask():
    """On a mesh rows are not moved; chunks are selected on the sequence in order, as above."""
    config, operands, expected = reordered(512)
    spec = jax.sharding.PartitionSpec(None, "context", None, None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    with jax.set_mesh(context.mesh_of(2, axes=("context",))):
        one = maxtext.AttentionOp(config, Mesh, sharding=sharding)
        out = jax.jit(lambda *x: one(*x[:5], indexer_mask=x[5]))(*operands)
        out = maxtext.reorder_sequence(out, 2, to_contiguous=True)
    close(out, expected)
