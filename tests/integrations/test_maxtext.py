"""packax.integrations.maxtext: attention types, images, the order of context parallelism, MoBA and
the indexer's mask. test_faces.py compares training and chunked prefill with the reference.

Guards against a MaxText keyword that means something else here, and chunks counted from another
position than MaxText's.
"""

import enum
import types

import context
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from lowered import calls, text_of
from maxtext_reference import (
    HEADS,
    IMAGES,
    KINDS,
    KV_HEADS,
    MASKED,
    MOBA,
    RNG,
    B,
    Mesh,
    S,
    close,
    ids_and_positions,
    moba_pairs,
    op,
    pairs,
    reference,
    tensors,
)
from packax.integrations import maxtext
from packax.integrations.maxtext import masks
from tiers import some

AXIS = jax.sharding.PartitionSpec(None, "context", None, None)
SHARDING = packax.AttentionSharding(query=AXIS, key_value=AXIS)
BALANCED = {"context_parallel_load_balance": True, "context_sharding": "context"}


def test_head_dim_of_gemma_4(extension):
    """512 in its global layers, with keys as values: a kernel call on CUDA."""

    def loss(q, k, ids):
        return jnp.sum(op()(q, k, k, ids, model_mode="train").astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct((B, S, n, 512), jnp.bfloat16) for n in (HEADS, KV_HEADS)]
    ids = jax.ShapeDtypeStruct((B, S), jnp.int32)
    targets = [target for target, *_ in calls(text_of(jax.grad(loss), *shapes, ids))]
    assert targets[-2:] == ["packax_forward_v1", "packax_backward_v1"]


@pytest.mark.parametrize(("kind", "size"), some([*KINDS[1:4], KINDS[5]], 3))
def test_bidirectional_mask(kind, size):
    """Runs of True attend in both directions; a run ends at padding and at a document boundary.
    An indexer gets the same pairs as a float mask, with 0 for allowed ones."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    allowed = pairs(kind, size, ids, spans=IMAGES)
    one, images = op(kind, size), jnp.asarray(IMAGES)
    run = jax.jit(lambda *x: one(*x, ids, bidirectional_mask=images))
    close(run(q, k, v), reference(q, k, v, allowed)[0])
    mask = one.generate_attention_mask(q, k, ids, "train", bidirectional_mask=images)
    assert mask.shape == (B, 1, 1, S, S)
    spans = None if kind == "full" else IMAGES
    np.testing.assert_array_equal(mask[:, 0, 0] == 0, pairs(kind, size, ids, spans=spans))
    assert np.all((np.asarray(mask) == 0) | (np.asarray(mask) == np.float32(MASKED)))


def test_the_mask_of_an_indexer_while_decoding_and_of_a_chunk():
    q, k, _ = tensors()
    ids, _ = ids_and_positions()
    mask = op().generate_attention_mask(q[:, :1], k, ids, "autoregressive")
    np.testing.assert_array_equal(mask[:, 0, 0, 0] == 0, ids == 1)
    late = op().generate_attention_mask(q[:, 20:], k, ids, "prefill", np.zeros((B, 20)))
    np.testing.assert_array_equal(late[:, 0, 0] == 0, pairs("global", None, ids)[:, 20:])
    assert op("full").generate_attention_mask(q, k, None, "train") is None


def moba(**config):
    return types.SimpleNamespace(**vars(MOBA), **config)


@pytest.mark.parametrize(("kind", "size"), some([("full", None), ("local_sliding", 13)], 0))
def test_moba_with_an_indexers_mask(kind, size):
    """With segment ids, cap and sinks. MoBA is causal with every type. Rows without a key give
    0."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    kept = RNG.random((B, S, S)) < 0.6
    kept[1, 3] = False
    one = op(kind, size, config=MOBA, attn_logits_soft_cap=2.0)
    mask = jnp.where(kept, 0.0, MASKED)
    run = jax.jit(lambda *x: one(*x[:3], ids, sinks=sinks, indexer_mask=x[3]))
    whole = pairs(kind, size, ids)[:, None]
    allowed = whole & moba_pairs(q, k, 0)
    assert allowed.sum() < HEADS * whole.sum()
    allowed &= kept[:, None]
    close(run(q, k, v, mask), reference(q, k, v, allowed, 2.0, sinks)[0])


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
        out, back = jax.vjp(attend, q, k, v)
        return out, back(jnp.cos(out))

    got, expected = (jax.jit(results, static_argnums=0)(attend) for attend in (ours, fixed))
    close(got[0], reference(q, k, v, allowed)[0])
    jax.tree.map(close, got, expected)


def test_reordered_moba_and_indexer_mask():
    """Any length that 2 * ranks divides; chunks are selected on the sequence in order."""
    check_reordered(36)


@pytest.mark.exhaustive
def test_reordered_and_sharded_moba_and_indexer_mask():
    """On a mesh rows are not moved; chunks are selected on the sequence in order, as above."""
    with jax.set_mesh(context.mesh_of(2, axes=("context",))):
        check_reordered(512, sharding=SHARDING)


def check_reordered(length, **options):
    q, k, v = tensors(length, length)
    ids, positions = ids_and_positions(length)
    kept = RNG.random((B, length, length)) < 0.6
    operands = [maxtext.reorder_sequence(jnp.asarray(x), 2) for x in (q, k, v, ids, positions)]
    indexer = jnp.where(kept, 0.0, MASKED)
    indexer = maxtext.reorder_sequence(maxtext.reorder_sequence(indexer, 2), 2, seq_dim=2)
    one = maxtext.AttentionOp(moba(**BALANCED), Mesh, **options)
    out = jax.jit(lambda *x: one(*x[:5], indexer_mask=x[5]))(*operands, indexer)
    allowed = pairs("global", None, ids, row=positions, col=positions) & kept
    allowed = allowed[:, None] & moba_pairs(q, k, 0)
    out = maxtext.reorder_sequence(out, 2, to_contiguous=True)
    close(out, reference(q, k, v, allowed)[0])


def packed(length=512):
    """Operands and positions in sequence order, with a short last document."""
    q, k, v = tensors(length, length, 0.5)
    ids, positions = ids_and_positions(length)
    ids[0, -40:] = 7
    positions[0, -40:] = np.arange(40)
    return q, k, v, ids, positions


SIZES = {"sliding_window_size": 90, "chunk_attn_window_size": 70}
OF_KIND = {"local_sliding": 90, "chunk": 70, "block_diffusion": 60}


@pytest.mark.parametrize("kind", some(["global", *OF_KIND], 1))
def test_load_balanced_order_over_a_mesh(kind):
    """All operands are reordered as MaxText reorders a batch; inputs_positions hold the
    positions."""
    q, k, v, ids, positions = packed()
    config = types.SimpleNamespace(**BALANCED, causal_block_size=60)
    mesh = context.mesh_of(2, axes=("context",))
    more = {"attention_type": kind, "sharding": SHARDING, "gather_head_groups": 1}
    split = maxtext.AttentionOp(config, mesh, **more, **SIZES)
    reordered = [maxtext.reorder_sequence(jnp.asarray(x), 2) for x in (q, k, v, ids, positions)]
    with jax.set_mesh(mesh):
        out = jax.jit(split)(*reordered)
    out = maxtext.reorder_sequence(out, 2, to_contiguous=True)
    allowed = pairs(kind, OF_KIND.get(kind), ids, row=positions, col=positions)
    close(out, reference(q, k, v, allowed)[0])
    with pytest.raises(ValueError, match="inputs_positions must be given"):
        split(*reordered[:4])


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", [None, SHARDING])
def test_stripes_are_an_order_too(split):
    """TransformerEngine's striped order of tokens: chunks and MoBA, on a mesh and as one
    program."""
    q, k, v, ids, positions = packed()
    mesh = context.mesh_of(2, axes=("context",))
    order = np.argsort(np.arange(512) % 2, kind="stable")
    reordered = [jnp.asarray(x)[:, order] for x in (q, k, v, ids, positions)]
    striped = {"context_parallel_reorder_strategy": "striped"}
    auto = {"packing": True, "context_parallel_strategy": "ring", "hardware": "gpu"}
    auto |= {"context_parallel_reorder_strategy": "auto"}
    for setting, kind in ((striped, "chunk"), (auto, "chunk"), (striped, "global")):
        config = types.SimpleNamespace(**BALANCED, **setting)
        allowed = pairs(kind, 70, ids, row=positions, col=positions)
        if kind == "global":
            config = moba(**BALANCED, **setting)
            allowed = allowed[:, None] & moba_pairs(q, k, 0)
        more = {"attention_type": kind, "sharding": split}
        one = maxtext.AttentionOp(config, mesh, chunk_attn_window_size=70, **more)
        with jax.set_mesh(mesh):
            out = jax.jit(one)(*reordered)
        close(np.asarray(out)[:, np.argsort(order)], reference(q, k, v, allowed)[0])


def test_reorder_sequence():
    """MaxText's own example, its inverse, and packax's plan."""
    x = jnp.arange(8)
    reordered = maxtext.reorder_sequence(x, 2, seq_dim=0)
    np.testing.assert_array_equal(reordered, [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(maxtext.reorder_sequence(reordered, 2, 0, to_contiguous=True), x)
    wide = RNG.standard_normal((2, 1024, 3))
    plan = packax.context_plan(packax.causal(), ranks=4, kind="zigzag", length=1024)
    np.testing.assert_array_equal(maxtext.reorder_sequence(wide, 4), plan.permute(wide))
    assert maxtext.reorder_sequence(None, 2) is None


def test_attention_types_of_maxtext():
    """Its enum, its config's default, and the rule by which block diffusion replaces global."""
    made = maxtext.AttentionOp
    named = enum.Enum("AttentionType", {"CHUNK": "chunk"})
    assert made(attention_type=named.CHUNK, chunk_attn_window_size=3).attention_type == "chunk"
    config = types.SimpleNamespace(attention_type="full")
    assert made(config).attention_type == "full"
    config = types.SimpleNamespace(attention_type="block_diffusion", causal_block_size=4)
    assert made(config, attention_type="global").attention_type == "block_diffusion"
    assert made(config, attention_type="full").attention_type == "full"
    made(num_query_heads=4, max_target_length=99, float32_logits=True)  # no effect
    assert made(attn_logits_soft_cap=0.0).attn_logits_soft_cap is None


def test_numbers_without_a_meaning():
    """sliding_window_size=0 allows no key; pad_kv_total and compress_ratio alone change nothing;
    "mla" is causal."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    assert not np.any(op("local_sliding", 0)(q, k, v, ids))
    out = op("mla")(q, k, v, ids, pad_kv_total=4, compress_ratio=2)
    np.testing.assert_array_equal(out, op()(q, k, v, ids))


def test_segment_ids_of_floats():
    """Equal floats are one document, whatever their value; negative ones and NaN are padding."""
    q, k, v = tensors()
    at = np.minimum(np.arange(S) // 4, 7)[None].repeat(B, 0)
    ids = np.array([0, 0, 1, 2, 3, 4, -1, -1])[at]
    want = reference(q, k, v, pairs("global", None, ids))[0]
    run = jax.jit(op())
    for dtype, largest in ((np.float32, 3e38), (jnp.bfloat16, 5.0)):
        table = [0.0, -0.0, 1.0, 1.5, 2.0**30, largest, -0.5, np.nan]
        close(run(q, k, v, jnp.asarray(table, dtype)[at]), want)
    ids = np.arange(S)[None].repeat(B, 0) % 2
    decode = jax.jit(lambda ids: op()(q[:, :1], *[None] * 4, "autoregressive", ((k, v, ids), None)))
    np.testing.assert_array_equal(decode(np.float32(ids)), decode(ids))


@pytest.mark.parametrize("kind", ["local_sliding", "chunk", "block_diffusion"])
def test_a_type_without_its_size(kind):
    with pytest.raises(ValueError, match=f"attention_type '{kind}' needs a size, but it is None"):
        masks.interval_of(kind, None)
