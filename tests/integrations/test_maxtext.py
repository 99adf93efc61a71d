"""packax.integrations.maxtext against a dense reference: training, chunked prefill, the order of
context parallelism, errors.

Guards against a MaxText keyword that means something else here.
"""

import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from lowered import calls, text_of
from maxtext_reference import (
    DIM,
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
    of_heads,
    op,
    pairs,
    reference,
    tensors,
)
from packax.integrations import maxtext
from packax.integrations.maxtext import masks
from tiers import some


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_training(kind, size):
    q, k, v = tensors()
    ids, positions = ids_and_positions()
    run = jax.jit(lambda *x: op(kind, size)(*x, ids, positions, "train"))
    close(run(q, k, v), reference(q, k, v, pairs(kind, size, ids))[0])


def test_head_dim_of_gemma_4(extension):
    """512 in its global layers, with keys as values: right on the CPU, and a kernel call on
    CUDA."""
    q, k = (RNG.standard_normal((B, S, n, 512)).astype(np.float32) for n in (HEADS, KV_HEADS))
    q *= 512**-0.5
    ids, _ = ids_and_positions()
    run = jax.jit(lambda *x: op()(*x, ids, model_mode="train"))
    close(run(q, k, k), reference(q, k, k, pairs("global", None, ids))[0])

    def loss(q, k):
        return jnp.sum(op()(q, k, k, ids, model_mode="train").astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k)]
    targets = [target for target, *_ in calls(text_of(jax.grad(loss), *shapes))]
    assert targets[-2:] == ["packax_forward_v1", "packax_backward_v1"]


def test_no_segment_ids_and_ids_of_keys():
    q, k, v = tensors()
    ones = np.ones((B, S), int)
    close(jax.jit(op())(q, k, v), reference(q, k, v, pairs("global", None, ones))[0])
    ids, _ = ids_and_positions()
    kv_ids = np.roll(ids, 3, axis=1)
    out = jax.jit(lambda *x: op("full")(*x, ids, decoder_segment_ids_kv=kv_ids))(q, k, v)
    close(out, reference(q, k, v, pairs("full", None, ids, kv_ids))[0])


@pytest.mark.parametrize(("kind", "size"), some([*KINDS[1:4], KINDS[5]], 0, 3))
def test_bidirectional_mask(kind, size):
    """Runs of True attend in both directions; a run ends at padding and at a document boundary."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    run = jax.jit(lambda *x: op(kind, size)(*x, ids, bidirectional_mask=jnp.asarray(IMAGES)))
    out = run(q, k, v)
    close(out, reference(q, k, v, pairs(kind, size, ids, spans=IMAGES))[0])


@pytest.mark.parametrize(("cap", "sink"), [(None, True), (2.0, False)])
def test_soft_cap_sinks_and_largest_logits(cap, sink):
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    sinks = RNG.standard_normal(HEADS).astype(np.float32) + 1 if sink else None

    @jax.jit
    def run(q, k, v):
        one = op("local_sliding", 9, attn_logits_soft_cap=cap)
        out = one(q, k, v, ids, sinks=sinks, record_max_logits=True)
        return out, jax.tree.leaves(one.max_logits)[0]

    expected = reference(q, k, v, pairs("local_sliding", 9, ids), cap, sinks)
    for x, y in zip(run(q, k, v), expected, strict=True):
        close(x, y)
    assert op(attn_logits_soft_cap=0.0).attn_logits_soft_cap is None


def test_gradients():
    """With cap and sinks, against finite differences of the reference."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    dout = RNG.standard_normal((B, S, HEADS, DIM + 4))
    one = op("chunk", 7, attn_logits_soft_cap=3.0)
    operands = (q, k, v, sinks)

    def loss(q, k, v, sinks):
        return jnp.sum(one(q, k, v, ids, sinks=sinks) * dout)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*operands)
    allowed = pairs("chunk", 7, ids)
    for number, gradient in enumerate(gradients):
        way = RNG.standard_normal(operands[number].shape)

        def moved(step, number=number, way=way):
            x = [np.asarray(x, np.float64) for x in operands]
            x[number] = x[number] + step * way
            return np.sum(reference(*x[:3], allowed, 3.0, x[3])[0] * dout)

        expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
        np.testing.assert_allclose(
            np.sum(np.float64(gradient) * way), expected, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize(("kind", "size"), some([*KINDS[1:3], KINDS[5]], 1, 2))
def test_chunked_prefill(kind, size):
    """Rows 12 to 22 of a prompt: earlier keys are in the cache, and ids cover all keys."""
    before, rows = 12, 11
    q, k, v = tensors(rows, before + rows)
    ids, _ = ids_and_positions(before + rows)
    previous = np.zeros((B, before, 1))

    @jax.jit
    def run(q, k, v):
        cached = ((k, v, ids), None)
        return op(kind, size)(q, None, None, None, None, "prefill", cached, previous_chunk=previous)

    out = run(q, k, v)
    row, col = np.arange(before, before + rows)[None], np.arange(before + rows)[None]
    allowed = pairs(kind, size, ids[:, before:], ids, row, col)
    close(out, reference(q, k, v, allowed)[0])


@pytest.mark.parametrize(("kind", "size"), some(KINDS[:3], 0))
def test_load_balanced_order(kind, size):
    """All operands are reordered as MaxText reorders a batch; inputs_positions hold the
    positions."""
    length = 512
    q, k, v = tensors(length, length, 0.5)
    ids, positions = ids_and_positions(length)
    ids[0, -40:] = 7  # a short last document
    positions[0, -40:] = np.arange(40)
    config = types.SimpleNamespace(
        context_parallel_load_balance=True, context_sharding="context", causal_block_size=60
    )
    size = {"local_sliding": 90, "chunk": 70, "block_diffusion": 60}.get(kind)
    sizes = {"sliding_window_size": 90, "chunk_attn_window_size": 70}
    one = maxtext.AttentionOp(config=config, mesh=Mesh, attention_type=kind, **sizes)
    reordered = [maxtext.reorder_sequence(jnp.asarray(x), 2) for x in (q, k, v, ids, positions)]
    out = maxtext.reorder_sequence(jax.jit(one)(*reordered), 2, to_contiguous=True)
    allowed = pairs(kind, size, ids, row=positions, col=positions)
    close(out, reference(q, k, v, allowed)[0])
    mesh = jax.make_mesh((1, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("data", "context", None, None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    split = maxtext.AttentionOp(
        config, mesh, attention_type=kind, sharding=sharding, gather_head_groups=1, **sizes
    )
    with jax.set_mesh(mesh):
        out = jax.jit(split)(*reordered)
    out = maxtext.reorder_sequence(out, 2, to_contiguous=True)
    close(out, reference(q, k, v, allowed)[0])
    with pytest.raises(ValueError, match="inputs_positions must be given"):
        one(*reordered[:4])


@pytest.mark.exhaustive
def test_export_with_symbolic_sizes():
    q, k, v = tensors()
    ids, _ = ids_and_positions()

    def run(q, k, v, ids, images):
        one = op("local_sliding", 9, attn_logits_soft_cap=3.0)
        return one(q, k, v, ids, bidirectional_mask=images)

    x = q, k, v, ids.astype(np.int32), IMAGES
    batch, length = jax.export.symbolic_shape("b, s")
    shapes = [jax.ShapeDtypeStruct((batch, length, *y.shape[2:]), y.dtype) for y in x]
    program = jax.export.export(jax.jit(run))(*shapes)
    close(program.call(*x), jax.jit(run)(*x))


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
    with pytest.raises(ValueError, match=r"tensor has 8 places .* multiple of 2 \* cp_size = 6"):
        maxtext.reorder_sequence(x, 3, seq_dim=0)


def test_attention_types_of_maxtext():
    """Its enum, its config's default, and the rule by which block diffusion replaces global."""
    enum = types.SimpleNamespace(value="chunk")
    assert (
        maxtext.AttentionOp(attention_type=enum, chunk_attn_window_size=3).attention_type == "chunk"
    )
    config = types.SimpleNamespace(attention_type="full")
    assert maxtext.AttentionOp(config).attention_type == "full"
    config = types.SimpleNamespace(attention_type="block_diffusion", causal_block_size=4)
    assert maxtext.AttentionOp(config, attention_type="global").attention_type == "block_diffusion"
    assert maxtext.AttentionOp(config, attention_type="full").attention_type == "full"
    maxtext.AttentionOp(num_query_heads=4, max_target_length=99, float32_logits=True)  # no effect


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_type": "ring"}, ValueError, "attention_type must be one of global, local_s"),
        ({"attention_type": "compressed"}, NotImplementedError, '"compressed" has no kernel'),
        ({"attention_type": "local_sliding"}, ValueError, "sliding_window_size must be an int"),
        ({"attention_type": "chunk", "chunk_attn_window_size": 0}, ValueError, "but is 0"),
        ({"attention_type": "block_diffusion"}, ValueError, "config.causal_block_size must be"),
        (
            {"config": types.SimpleNamespace(moba=True, moba_topk=2)},
            ValueError,
            "config.moba needs config.moba_chunk_size$",
        ),
        ({"dropout_rate": 0.1}, NotImplementedError, "dropout_rate must be 0"),
        ({"kv_quant": object()}, NotImplementedError, "kv_quant must be None"),
        ({"use_ragged_attention": True}, NotImplementedError, "use_ragged_attention must be False"),
        ({"window": 3}, TypeError, "AttentionOp has no argument window"),
    ],
)
def test_errors_of_the_op(options, error, message):
    with pytest.raises(error, match=message):
        maxtext.AttentionOp(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"indexer_mask": np.zeros((B, S, S), bool)},
            ValueError,
            r"indexer_mask must be floating point of shape \(2, 33, 33\), but is bool of shape",
        ),
        ({"compressed_kv": 0}, NotImplementedError, "compressed_kv must be None"),
        ({"model_mode": "decode"}, ValueError, 'model_mode must be "train", "prefill" or'),
        (
            {"model_mode": "prefill"},
            ValueError,
            'cached_values must hold the prefill cache in "pre',
        ),
        (
            {"decoder_segment_ids_kv": np.ones((B, S), int)},
            ValueError,
            "without decoder_segment_ids",
        ),
        (
            {"bidirectional_mask": IMAGES, "previous_chunk": np.zeros((B, 3))},
            NotImplementedError,
            "bidirectional_mask is for self-attention",
        ),
    ],
)
def test_errors_of_a_call(options, error, message):
    with pytest.raises(error, match=message):
        op()(*tensors(), **options)


def test_a_window_of_none_and_numbers_without_a_meaning():
    """sliding_window_size=0 allows no key; pad_kv_total and compress_ratio alone change nothing."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    assert not np.any(op("local_sliding", 0)(q, k, v, ids))
    out = op()(q, k, v, ids, pad_kv_total=4, compress_ratio=2)
    np.testing.assert_array_equal(out, op()(q, k, v, ids))


def test_segment_ids_of_floats():
    """Equal floats are one document, whatever their value; negative ones and NaN are padding."""
    q, k, v = tensors()
    table = np.array([0.0, -0.0, 1.0, 1.5, 2.0**30, 3e38, -0.5, np.nan], np.float32)
    floats = table[np.minimum(np.arange(S) // 4, 7)][None].repeat(B, 0)
    ids = np.array([0, 0, 1, 2, 3, 4, -1, -1])[np.minimum(np.arange(S) // 4, 7)][None].repeat(B, 0)
    for dtype in (np.float32, jnp.bfloat16):
        numbers = jnp.asarray(floats, dtype)
        if dtype is jnp.bfloat16:
            numbers = jnp.where(numbers > 1e38, 5.0, numbers).astype(dtype)
        close(jax.jit(op())(q, k, v, numbers), reference(q, k, v, pairs("global", None, ids))[0])
    ids = np.arange(S)[None].repeat(B, 0) % 2
    expected = jax.jit(maxtext_decoding)(q, k, v, ids)
    np.testing.assert_array_equal(jax.jit(maxtext_decoding)(q, k, v, np.float32(ids)), expected)


def maxtext_decoding(q, k, v, ids):
    return op()(q[:, :1], *[None] * 4, "autoregressive", ((k, v, ids), None))


@pytest.mark.exhaustive
def test_stripes_are_an_order_too():
    """TransformerEngine's striped order of tokens: chunks and MoBA, on a mesh and as one
    program."""
    length = 512
    q, k, v = tensors(length, length, 0.5)
    ids, positions = ids_and_positions(length)
    mesh = jax.make_mesh((1, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("data", "context", None, None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    order = np.argsort(np.arange(length) % 2, kind="stable")
    reordered = [jnp.asarray(x)[:, order] for x in (q, k, v, ids, positions)]
    common = {"context_parallel_load_balance": True, "context_sharding": "context"}
    auto = {"packing": True, "context_parallel_strategy": "ring", "hardware": "gpu"}
    configs = (
        {**common, "context_parallel_reorder_strategy": "striped"},
        {**common, "context_parallel_reorder_strategy": "auto", **auto},
    )
    chunks = reference(q, k, v, pairs("chunk", 70, ids, row=positions, col=positions))[0]
    allowed = pairs("global", None, ids, row=positions, col=positions)[:, None]
    of_moba = of_heads(q, k, v, allowed & moba_pairs(q, k, 0))
    for config in configs:
        for split in (None, sharding):
            for kind, more, expected in (
                ("chunk", {}, chunks),
                ("global", vars(MOBA), of_moba),
            ):
                one = maxtext.AttentionOp(
                    types.SimpleNamespace(**config, **more),
                    mesh,
                    attention_type=kind,
                    chunk_attn_window_size=70,
                    sharding=split,
                )
                with jax.set_mesh(mesh):
                    out = jax.jit(one)(*reordered)
                close(np.asarray(out)[:, np.argsort(order)], expected)
                if config is configs[1]:
                    break  # both configs give the same setting


@pytest.mark.parametrize(("kind", "size"), some(KINDS, 1, 4, 5))
def test_the_mask_that_an_indexer_asks_for(kind, size):
    """A float mask with 0 for allowed pairs."""
    q, k, _ = tensors()
    ids, _ = ids_and_positions()
    mask = op(kind, size).generate_attention_mask(
        q, k, ids, "train", bidirectional_mask=jnp.asarray(IMAGES)
    )
    spans = None if kind == "full" else IMAGES
    assert mask.shape == (B, 1, 1, S, S)
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
    for options in ({"compressed_mask": 0}, {"pad_kv_total": 3}):
        with pytest.raises(NotImplementedError, match="compressed_mask must be None and pad_kv_"):
            op().generate_attention_mask(q, k, ids, "train", **options)
    with pytest.raises(ValueError, match='attention_type must be that of the op, "global", "glo'):
        op().generate_attention_mask(q, k, ids, "train", attention_type="chunk")


@pytest.mark.parametrize("kind", ["local_sliding", "chunk", "block_diffusion"])
def test_a_type_without_its_size(kind):
    with pytest.raises(ValueError, match=f"attention_type '{kind}' needs a size, but it is None"):
        masks.interval_of(kind, None)
