"""packax.integrations.maxtext against a dense reference, written from what MaxText's dense path says.

The reference is float64 numpy: a boolean of every pair from index comparisons, one softmax.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest

pytest.importorskip("flax.nnx")
from jaxprs import count
from packax.integrations import maxtext

B, S, HEADS, KV_HEADS, DIM = 2, 33, 4, 2, 8
RNG = np.random.default_rng(9)


def tensors(rows=S, keys=S, scale=1.5):
    shapes = (B, rows, HEADS, DIM), (B, keys, KV_HEADS, DIM), (B, keys, KV_HEADS, DIM + 4)
    q, k, v = (RNG.standard_normal(shape).astype(np.float32) for shape in shapes)
    return scale * q, k, v


def ids_and_positions(length=S):
    """Two packings: documents of ids from 1, then MaxText's padding, 0; and negative ids."""
    thirds = length // 3
    ids = np.stack([np.r_[[1] * thirds, [2] * thirds, [0] * (length - 2 * thirds)]] * 2)
    ids[1] = np.r_[[5] * (length - 8), [-3] * 4, [-1] * 4]
    starts = np.diff(ids, axis=1, prepend=-99) != 0
    index = np.arange(length)
    return ids, index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def pairs(kind, size, ids, kv_ids=None, row=None, col=None, spans=None):
    """Which keys are attended, (B, Sq, Skv): `row`, `col` are their places, (B or 1, length)."""
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
    if spans is not None:  # numbered by hand: two tokens are in one image if all between are too
        for b in range(len(spans)):
            for i in np.flatnonzero(spans[b]):
                for j in np.flatnonzero(spans[b]):
                    inside = spans[b, min(i, j) : max(i, j) + 1].all()
                    allowed = np.broadcast_to(allowed, same.shape).copy()
                    allowed[b, i, j] |= inside
    return allowed & same


def reference(q, k, v, allowed, cap=None, sinks=None):
    """(out, largest logit of each head), scale 1; a row of no key gives 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, HEADS // KV_HEADS, 2) for x in (k, v))
    logits = np.einsum("bihd,bjhd->bhij", q, k)
    if cap:
        logits = cap * np.tanh(logits / cap)
    logits = np.where(np.broadcast_to(allowed, (B, *allowed.shape[1:]))[:, None], logits, -np.inf)
    top = logits.max((2, 3))
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*logits.shape[:3], 1))
        logits = np.concatenate([logits, sink], -1)
    high = np.maximum(logits.max(-1, keepdims=True), -1e30)
    p = np.exp(logits - high)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhij,bjhd->bihd", p[..., : k.shape[1]], v), top


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


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_training(kind, size):
    q, k, v = tensors()
    ids, positions = ids_and_positions()
    run = jax.jit(lambda *x: op(kind, size)(*x, ids, positions, "train"))
    close(run(q, k, v), reference(q, k, v, pairs(kind, size, ids))[0])


def test_no_segment_ids_and_ids_of_keys():
    q, k, v = tensors()
    ones = np.ones((B, S), int)
    close(jax.jit(op())(q, k, v), reference(q, k, v, pairs("global", None, ones))[0])
    ids, _ = ids_and_positions()
    kv_ids = np.roll(ids, 3, axis=1)
    out = jax.jit(lambda *x: op("full")(*x, ids, decoder_segment_ids_kv=kv_ids))(q, k, v)
    close(out, reference(q, k, v, pairs("full", None, ids, kv_ids))[0])


IMAGES = np.zeros((B, S), bool)
IMAGES[0, 2:6] = IMAGES[0, 14:21] = IMAGES[1, 4:9] = IMAGES[1, 10:12] = IMAGES[1, 15:30] = True


@pytest.mark.parametrize(("kind", "size"), [*KINDS[1:4], KINDS[5]])
def test_bidirectional_mask(kind, size):
    """A run of True in both directions; one that reaches into padding or a document ends there."""
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
    """Through cap and sinks, against differences of the reference."""
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


@pytest.mark.parametrize(("kind", "size"), [*KINDS[1:3], KINDS[5]])
def test_chunked_prefill(kind, size):
    """Rows 12 to 22 of a prompt: the keys before them are in the cache, ids are of all keys."""
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


def in_cache(kind, size, ids):
    """The keys of a cache that the row attends, (B, 1, S): active ones, by place."""
    keys = ids.shape[1]
    row = np.full((1, 1), keys - 1)
    own = np.ones((B, 1), int), np.where(ids == 1, 1, -1)
    kind = kind if kind in ("local_sliding", "chunk") else "full"
    return pairs(kind, size, *own, row, np.arange(keys)[None])


@pytest.mark.parametrize(
    ("kind", "size"), [("global", None), ("full", None), ("local_sliding", 6), ("chunk", 8)]
)
def test_autoregressive(kind, size):
    """Active tokens of both caches, places counted in each; the sink counts once.

    What is not active holds NaN: a key that is read into a result shows. One cache is a ring that
    went round, one has a hole, one holds nothing.
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
    alone = jax.jit(run)(q, (cached[0], None), None)
    close(alone, reference(q, k, v, in_cache(kind, size, ids), 3.0)[0])


def test_autoregressive_other_calls():
    """No ids: all keys; several rows, and recorded logits: by flash_attention; nothing at all: 0."""
    q, k, v = tensors(1, 13)
    q3, _, _ = tensors(3, 1)
    ids = np.ones((B, 13), int)
    ids[:, 4:6] = 0

    @jax.jit
    def run(q, q3):
        call = lambda one, *x, **more: one(*x[:1], *[None] * 4, "autoregressive", *x[1:], **more)  # noqa: E731
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
    own = np.ones((B, 3), int), np.where(ids == 1, 1, -1)
    allowed = pairs("local_sliding", 4, *own, np.arange(3)[None], np.arange(13)[None])
    close(rows, reference(q3, k, v, allowed)[0])
    expected = reference(q, k, v, in_cache("chunk", 8, ids))
    close(recorded, expected[0])
    close(logits, expected[1])
    assert not np.any(nothing)


MOBA = types.SimpleNamespace(moba=True, moba_chunk_size=6, moba_topk=3)


def moba_pairs(q, k, before, size=6, count=3):
    """By loops: the own chunk, and the best of those before it by the product with their mean."""
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


def of_heads(q, k, v, allowed, *options):
    """`reference` for a mask of each head, (B, H, Sq, Skv)."""
    outs = [reference(q, k, v, allowed[:, h], *options)[0][:, :, h] for h in range(HEADS)]
    return np.stack(outs, 2)


def test_dense_path_is_the_same_attention():
    """implementation="dense" beside the kernels' path, gradients too: cap, sinks, largest logits."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    sinks = RNG.standard_normal(HEADS).astype(np.float32)

    def run(implementation):
        one = op("chunk", 7, implementation=implementation)

        def loss(q, k, v, sinks):
            out = one(q, k, v, ids, sinks=sinks)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, sinks)

    jax.tree.map(close, run("dense"), run(None))


MASKED = -0.7 * float(np.finfo(np.float32).max)  # of an additive mask


@pytest.mark.parametrize("implementation", [None, "dense"])
@pytest.mark.parametrize(
    ("kind", "size", "moba", "indexer"),
    [
        ("global", None, True, False),
        ("full", None, True, True),
        ("local_sliding", 13, True, False),
        ("full", None, False, True),
    ],
)
def test_moba_and_indexer_mask(kind, size, moba, indexer, implementation):
    """Beside segment ids, cap and sinks. MoBA is causal with every type; rows without a key are 0."""
    q, k, v = tensors()
    ids, _ = ids_and_positions()
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    kept = RNG.random((B, S, S)) < 0.6
    kept[1, 3] = False
    mask = jnp.where(kept, 0.0, MASKED) if indexer else None
    options = {"attn_logits_soft_cap": 2.0, "implementation": implementation}
    one = op(kind, size, config=MOBA if moba else None, **options)
    run = jax.jit(lambda *x: one(*x[:3], ids, sinks=sinks, indexer_mask=x[3]))
    allowed = np.broadcast_to(pairs(kind, size, ids)[:, None], (B, HEADS, S, S))
    whole = allowed.sum()
    allowed = allowed & (moba_pairs(q, k, 0) if moba else True)
    allowed = allowed & (kept[:, None] if indexer else True)
    assert allowed.sum() < whole
    close(run(q, k, v, mask), of_heads(q, k, v, allowed, 2.0, sinks))


def test_moba_in_chunked_prefill_and_its_gradients():
    """Chunks are of the whole prompt. The gate has no gradient: as the dense path's."""
    before, rows = 13, 10
    q, k, v = tensors(rows, before + rows)
    ids = np.ones((B, before + rows), int)
    previous = np.zeros((B, before, 1))

    def results(implementation):
        one = op(config=MOBA, implementation=implementation)

        def loss(q, k, v):
            cached = ((k, v, ids), None)
            out = one(q, *[None] * 4, "prefill", cached, previous_chunk=previous)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    got = results(None)
    close(got[0][1], of_heads(q, k, v, moba_pairs(q, k, before)))
    jax.tree.map(close, got, results("dense"))


@pytest.mark.parametrize("implementation", [None, "dense"])
def test_moba_and_indexer_mask_while_decoding(implementation):
    """Of each cache its own part of the mask; MoBA counts in each cache from its end."""
    q, k, v = tensors(1, 20)
    _, k_ar, v_ar = tensors(1, 15)
    ids, ids_ar = np.ones((B, 20), int), np.ones((B, 15), int)
    ids_ar[0, 3] = 0
    kept = RNG.random((B, 1, 35)) < 0.7
    indexer = np.where(kept, 0.0, -2e38).astype(np.float32)
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    cached = ((k, v, ids), (k_ar, v_ar, ids_ar, None))

    def run(q, cached, indexer, moba=MOBA):
        one = op(config=moba, implementation=implementation, attn_logits_soft_cap=3.0)
        options = {"sinks": sinks, "indexer_mask": indexer}
        return one(q, *[None] * 4, "autoregressive", cached, **options)

    if implementation is None:
        assert count("packax_decode", run, q, cached, indexer) == 2
    active = np.concatenate([ids, ids_ar], 1)[:, None, None] == 1
    chosen = np.concatenate([moba_pairs(q, k, 19), moba_pairs(q, k_ar, 14)], -1) & active
    keys, values = np.concatenate([k, k_ar], 1), np.concatenate([v, v_ar], 1)

    def expected(allowed):
        return of_heads(q, keys, values, np.broadcast_to(allowed, chosen.shape), 3.0, sinks)

    close(jax.jit(run)(q, cached, indexer), expected(chosen & kept[:, None]))
    close(jax.jit(run)(q, cached, None), expected(chosen))
    if implementation is None:
        of_indexer = jax.jit(lambda *x: run(*x, None))(q, cached, indexer)
        close(of_indexer, expected(active & kept[:, None]))


class Mesh:
    shape = types.MappingProxyType({"data": 1, "context": 2})


@pytest.mark.parametrize(("kind", "size"), KINDS[:3])
def test_load_balanced_order(kind, size):
    """All operands reordered as MaxText reorders a batch; places are then inputs_positions."""
    length = 512
    q, k, v = tensors(length, length, 0.5)
    ids, positions = ids_and_positions(length)
    ids[0, -40:] = 7  # a last, short document
    positions[0, -40:] = np.arange(40)
    config = types.SimpleNamespace(
        context_parallel_load_balance=True, context_sharding="context", causal_block_size=60
    )
    size = {"local_sliding": 90, "chunk": 70, "block_diffusion": 60}.get(kind)
    sizes = {"sliding_window_size": 90, "chunk_attn_window_size": 70}
    one = maxtext.AttentionOp(config=config, mesh=Mesh, attention_type=kind, **sizes)
    there = [maxtext.reorder_sequence(jnp.asarray(x), 2) for x in (q, k, v, ids, positions)]
    out = maxtext.reorder_sequence(jax.jit(one)(*there), 2, to_contiguous=True)
    allowed = pairs(kind, size, ids, row=positions, col=positions)
    close(out, reference(q, k, v, allowed)[0])
    mesh = jax.make_mesh((1, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("data", "context", None, None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    split = maxtext.AttentionOp(config, mesh, attention_type=kind, sharding=sharding, **sizes)
    with jax.set_mesh(mesh):
        out = jax.jit(split)(*there)
    out = maxtext.reorder_sequence(out, 2, to_contiguous=True)
    close(out, reference(q, k, v, allowed)[0])
    if kind == "chunk":
        plain = maxtext.AttentionOp(
            config=config, mesh=Mesh, attention_type=kind, implementation="dense", **sizes
        )
        out = maxtext.reorder_sequence(jax.jit(plain)(*there), 2, to_contiguous=True)
        close(out, reference(q, k, v, allowed)[0])
    with pytest.raises(ValueError, match="inputs_positions must be given"):
        one(*there[:4])


@pytest.mark.parametrize("implementation", [None, "dense"])
def test_reordered_moba_and_indexer_mask(implementation):
    """Any length that 2 * ranks divide; what is chosen is of the sequence in order."""
    length = 36
    q, k, v = tensors(length, length)
    ids, positions = ids_and_positions(length)
    kept = RNG.random((B, length, length)) < 0.6
    config = {"context_parallel_load_balance": True, "context_sharding": "context"}
    config = types.SimpleNamespace(**vars(MOBA), **config)
    there = [maxtext.reorder_sequence(jnp.asarray(x), 2) for x in (q, k, v, ids, positions)]
    indexer = jnp.where(kept, 0.0, MASKED)
    indexer = maxtext.reorder_sequence(maxtext.reorder_sequence(indexer, 2), 2, seq_dim=2)
    one = maxtext.AttentionOp(config, Mesh, implementation=implementation)
    out = jax.jit(lambda *x: one(*x[:5], indexer_mask=x[5]))(*there, indexer)
    allowed = pairs("global", None, ids, row=positions, col=positions) & kept
    expected = of_heads(q, k, v, allowed[:, None] & moba_pairs(q, k, 0))
    close(maxtext.reorder_sequence(out, 2, to_contiguous=True), expected)
    spec = jax.sharding.PartitionSpec(None, "context", None, None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    with pytest.raises(NotImplementedError, match=r"config.moba must be False and indexer_mask No"):
        maxtext.AttentionOp(config, Mesh, sharding=sharding)(*there)


def test_reorder_sequence():
    """MaxText's own example, its inverse, and packax's plan."""
    x = jnp.arange(8)
    there = maxtext.reorder_sequence(x, 2, seq_dim=0)
    np.testing.assert_array_equal(there, [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(maxtext.reorder_sequence(there, 2, 0, to_contiguous=True), x)
    wide = RNG.standard_normal((2, 1024, 3))
    plan = packax.context_plan("head_tail", 4, length=1024)
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
        ({"attention_type": "local_sliding"}, ValueError, "sliding_window_size must be a positive"),
        ({"attention_type": "chunk", "chunk_attn_window_size": 0}, ValueError, "but is 0"),
        ({"attention_type": "block_diffusion"}, ValueError, "config.causal_block_size must be"),
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


def test_errors_of_the_caches():
    q, k, v = tensors(1, S)
    part = (k, v, np.ones((B, S), int))
    for name in ("previous_chunk", "bidirectional_mask", "decoder_segment_ids_kv"):
        with pytest.raises(ValueError, match=f"{name} must be None in model_mode"):
            op()(q, None, None, None, None, "autoregressive", (part, None), **{name: IMAGES})
    wrong = (k, v, np.ones((B, 5), int))
    with pytest.raises(
        ValueError, match=r"segment ids of a cache must have shape \(2, 33\), as its"
    ):
        op()(q, None, None, None, None, "autoregressive", (wrong, None))
    with pytest.raises(ValueError, match="sinks must have shape"):
        op()(q, None, None, None, None, "autoregressive", (part, None), sinks=np.ones(3))
    with pytest.raises(ValueError, match="heads of query must be a multiple of those of key, but"):
        op(config=MOBA)(q[:, :, :1], None, None, None, None, "autoregressive", (part, None))
    with pytest.raises(ValueError, match="the autoregressive cache is for model_mode"):
        op()(q, None, None, None, None, "prefill", (part, (*part, None)))
