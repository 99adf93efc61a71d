"""Recipes of the guide compute what dense attention, other libraries' layers, or separate
documents compute."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from dense import dense
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packings import ids_of
from pages import BLOCKS, namespace_of
from tiers import some

HEADS, KV_HEADS, DIM = 4, 2, 8


def of_page(name, *defined):
    """What a page defines; with names, after the last block that defines one of these."""
    page = f"docs/guide/{name}.md"
    if not defined:
        return namespace_of(page)
    define = re.compile(rf"^(def )?({'|'.join(defined)})\b", re.MULTILINE)
    last = max(n for n, block in enumerate(BLOCKS[page]) if define.search(block))
    return namespace_of(page)["after"][last]


def normal(*shape):
    return np.random.default_rng(len(shape) + shape[1]).standard_normal(shape).astype(np.float32)


def attended(query, key, value, allowed, **more):
    """Attention of (B, Sq, H, D) over keys (B, Skv, Hkv, D)."""
    arrays = {"query": query, "key": key, "value": value, "scale": query.shape[-1] ** -0.5}
    return dense(arrays | more, allowed)


def out_of_rows(query, key, value, allowed):
    """The output of (Sq, H, D) rows over keys (Skv, Hkv, D)."""
    return attended(query[None], key[None], value[None], allowed)["out"][0]


def test_last_tokens():
    ids = jnp.array([[2, 2, -1, 0], [1, 1, 1, -1]])
    last = of_page("decoding")["last_tokens"](ids, 3)
    np.testing.assert_array_equal(last, [3, 6, 1])


def test_a_ring_buffer(monkeypatch):
    """After prompts shorter and longer than the window; each step equals dense attention."""
    space = of_page("decoding")
    window = 16
    monkeypatch.setitem(space["ring_step"].__globals__, "WINDOW", window)
    lengths, steps = np.array([5, 40, 16]), 20
    total = lengths + steps
    key, value = (normal(3, 64, KV_HEADS, DIM) + n for n in range(2))
    ids = packax.segments.from_lengths(lengths, length=70)[None]
    positions = packax.segments.positions(ids)
    packed = [x[ids, positions] for x in (key, value)]
    empty = jnp.zeros((3, window, KV_HEADS, DIM))
    caches = [space["fill_ring"](empty, x, ids, positions, jnp.asarray(lengths)) for x in packed]
    query, at = normal(3, 64, HEADS, DIM), jnp.asarray(lengths)
    for _ in range(steps):
        rows = np.arange(3)[:, None], np.asarray(at)[:, None]
        new = query[rows], key[rows], value[rows]
        out, *caches, after = space["ring_step"](*new, *caches, at)
        for n, p in enumerate(np.asarray(at)):
            first = max(0, p + 1 - window)
            keys, values = (x[n, first : p + 1] for x in (key, value))
            want = out_of_rows(new[0][n], keys, values, np.ones((1, len(keys)), bool))
            np.testing.assert_allclose(out[n], want, atol=1e-5)
        at = after
    np.testing.assert_array_equal(at, total)


@pytest.mark.parametrize(
    "parents", some([([[-1, 0, 1, 0], [-1, -1, 1, 1]],), ([[-1, 0, 1, 2], [-1, 0, 0, 0]],)], 0)
)
def test_a_draft_tree(parents):
    verify = of_page("decoding")["verify"]
    lengths = np.array([3, 33])
    query, key, value = (normal(2, 4, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    caches = [normal(2, 40, KV_HEADS, DIM) + n for n in range(2)]
    out, *_ = verify(query, key, value, *caches, jnp.asarray(lengths), jnp.array(parents))
    for n, cached in enumerate(lengths):
        allowed = np.eye(4, dtype=bool)
        for i, parent in enumerate(parents[n]):
            if parent >= 0:
                allowed[i] |= allowed[parent]
        both = [
            np.concatenate([c[n, :cached], x[n]]) for c, x in zip(caches, (key, value), strict=True)
        ]
        seen = np.concatenate([np.ones((4, cached), bool), allowed], axis=1)
        np.testing.assert_allclose(out[n], out_of_rows(query[n], *both, seen), atol=1e-5)


def test_draft_trees_in_a_step_of_a_server():
    """A tree, a sequence that decodes, one that reads its prompt, and a tree after a token."""
    space = of_page("decoding")
    kv_lens, counts, drafts = np.array([36, 19, 5, 12]), [4, 1, 4, 3], np.array([4, 0, 0, 2])
    query, key, value = (normal(12, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    pools = [normal(24, space["PAGE"], KV_HEADS, DIM) + n for n in range(2)]
    table, cu = np.random.default_rng(0).permutation(24).reshape(4, 6), np.cumsum([0, *counts])
    out, *pages = space["mixed_step"](
        query, key, value, *(x.copy() for x in pools), kv_lens, table, cu, space["parents"], drafts
    )
    mask = space["tree_mask"](space["parents"])
    at = packax.kv_cache.token_positions(12, kv_lens, cu)
    positions = space["rope_positions"](*at, jnp.asarray(kv_lens), jnp.asarray(drafts), mask)
    np.testing.assert_array_equal(positions, [32, 33, 33, 34, 18, 1, 2, 3, 4, 9, 10, 10])
    for n, (length, count, last) in enumerate(zip(kv_lens, counts, drafts, strict=True)):
        allowed = np.tri(length, dtype=bool)[length - count :]
        allowed[count - last :, length - last :] = mask[n, :last, :last]
        both = [x[table[n]].reshape(-1, *x.shape[2:])[:length] for x in pages]
        rows = slice(cu[n], cu[n + 1])
        np.testing.assert_allclose(out[rows], out_of_rows(query[rows], *both, allowed), atol=1e-5)


def test_packed_groups():
    """Every answer token has the keys and the predecessor that it has after its prompt alone."""
    space = of_page("trees", "groups", "advantages", "group_ids")
    tokens, before = space["packed"].tokens, np.asarray(space["before"])
    array = np.asarray(space["expression"].as_array(512, 512))
    found = []
    for row, at in np.argwhere(space["answer_ids"] >= 0):
        group = space["packed"].segment_ids[row, at]
        path = tokens[row, np.flatnonzero(array[row, at])]
        assert space["positions"][row, at] == len(path) - 1
        assert tokens[row, before[row, at]] == path[-2]
        found.append((row, group, space["answer_ids"][row, at], tuple(path.tolist())))
    paths = {path for *_, path in found}
    for prompt, answers in space["groups"]:
        for answer in answers:
            for n in range(len(answer)):
                assert tuple(np.concatenate([prompt, answer[: n + 1]]).tolist()) in paths
    assert len(found) == sum(len(x) for _, answers in space["groups"] for x in answers)
    assert (space["advantages"] != 0).sum() == len(found) and np.isfinite(space["loss"])


IDS = np.stack([ids_of((0, 300), (1, 212)), ids_of((0, 100), (1, 20), (-1, 9), (2, 383))])
EXPRESSION = packax.causal() & packax.documents(IDS)


def both_passes(attend, mask, *operands):
    out, pullback = jax.vjp(lambda *x: attend(*x, mask), *operands)
    return out, *pullback(jnp.cos(out))


def placed(mesh, spec, kv_heads):
    """query, key and value of the rows of IDS."""
    heads = (HEADS, kv_heads, kv_heads)
    tensors = [normal(2, 512, n, DIM) + 0.1 * i for i, n in enumerate(heads)]
    return tensors, jax.device_put(tensors, NamedSharding(mesh, spec))


def test_ulysses():
    """As on one device, with all-to-all operations and without gathers."""
    ulysses = of_page("context_parallelism")["ulysses"]
    mesh = jax.make_mesh((1, 4), ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2)
    mask = packax.create_attention_mask(EXPRESSION)
    alone, operands = placed(mesh, P("fsdp", "context"), HEADS)
    with jax.set_mesh(mesh):
        step = jax.jit(lambda *x: both_passes(ulysses, mask, *x)).lower(*operands).compile()
        got = step(*operands)
    assert "all-to-all" in step.as_text() and "all-gather" not in step.as_text()
    assert got[0].sharding.is_equivalent_to(operands[0].sharding, 4)
    want = jax.jit(lambda *x: both_passes(packax.flash_attention, mask, *x))(*alone)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_ulysses_with_a_context_axis():
    attend = of_page("context_parallelism")["ulysses_and_gather"]
    mesh = jax.make_mesh((1, 2, 2), ("data", "context", "ulysses"), axis_types=(AxisType.Auto,) * 3)
    spec = P("data", "context", "ulysses")
    sharding = packax.AttentionSharding(spec, spec)
    alone, operands = placed(mesh, P("data", ("context", "ulysses")), KV_HEADS)
    with jax.set_mesh(mesh):
        plan = packax.context_plan(EXPRESSION, sharding=sharding)
        mask = packax.create_attention_mask(EXPRESSION, sharding=sharding, plan=plan)
        got = jax.jit(lambda *x: both_passes(attend, mask, *x))(*plan.permute(operands))
        got = plan.unpermute(got)
    mask = packax.create_attention_mask(EXPRESSION)
    want = jax.jit(lambda *x: both_passes(packax.flash_attention, mask, *x))(*alone)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def images(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shift", some([0, 2], 1))
def test_shifted_windows(shift):
    """Each patch attends to its window of the shifted grid, which ends at the image's borders."""
    space = of_page("vision")
    query, key, value = images(3, 2, 8, 12, HEADS, DIM)
    table = images(7, 7, HEADS)
    bias = space["relative_bias"](table, 4)
    out = space["shifted_windows"](query, key, value, bias, 4, shift)
    rows, columns = np.indices((8, 12)).reshape(2, -1)
    same = [(x[:, None] - shift) // 4 == (x - shift) // 4 for x in (rows, columns)]
    dy, dx = (np.clip(x[:, None] - x, -3, 3) + 3 for x in (rows, columns))
    tensors = (x.reshape(2, 96, HEADS, DIM) for x in (query, key, value))
    want = attended(*tensors, same[0] & same[1], bias=table[dy, dx].transpose(2, 0, 1)[None])
    np.testing.assert_allclose(out, want["out"].reshape(out.shape), atol=1e-5)


def test_images_and_frames():
    """Packed patches have the places of their image; frames, their own and earlier tokens."""
    space = of_page("vision", "rng", "rows", "frame")
    ids = space["packed"].segment_ids
    pieces = [ids == i for i in range(ids.max() + 1)]
    pieces = [(row, here) for piece in pieces for row, here in enumerate(piece) if here.any()]
    shapes = []
    for row, here in pieces:
        patches, (y, x) = space["patches"][row, here], space["places"][row, here].T
        (image,) = (i for i in space["images"] if i[..., 0].size == len(patches))
        np.testing.assert_array_equal(patches, image[y, x])
        shapes.append(image.shape)
    assert len(set(shapes)) == len(space["images"])
    rows, columns = space["rows"], space["columns"]
    near = np.maximum(abs(rows[:, None] - rows), abs(columns[:, None] - columns)) <= 3
    np.testing.assert_array_equal(space["expression"].as_array(1024, 1024), near)
    order = space["order"]
    np.testing.assert_array_equal(space["tiled"].as_array(1024, 1024), near[order][:, order])
    ids = space["frame_ids"]
    causal, recent = (
        np.asarray(space[x].as_array(320, 320)).reshape(320, 320)
        for x in ("frame_causal", "recent")
    )
    np.testing.assert_array_equal(causal, ids[:, None] >= ids)
    np.testing.assert_array_equal(recent, (ids[:, None] >= ids) & (ids[:, None] - ids <= 4))


def test_fine_tuning():
    """Only answers are trained, prompts see themselves, and sums are those of each answer."""
    space = of_page("fine_tuning", "rng", "attention_mask", "prompts", "advantages", "number")
    packed, weights = space["packed"], np.asarray(space["weights"])
    allowed = np.asarray(space["prefix"].as_array(256, 256))
    assert weights.sum() == sum(answer for _, answer in space["lengths"])
    found = 0
    for row, ids in enumerate(packed.segment_ids):
        for n in set(ids[ids >= 0].tolist()):
            tokens = packed.tokens[row, ids == n]
            (length,) = {len(p) for p, a in space["examples"] if np.array_equal([*p, *a], tokens)}
            want = np.zeros(len(tokens))
            want[length - 1 : -1] = 1  # targets that belong to the answer
            np.testing.assert_array_equal(weights[row, ids == n], want)
            at = np.arange(len(tokens))
            want = (at <= at[:, None]) | (at < length)
            np.testing.assert_array_equal(allowed[row][np.ix_(ids == n, ids == n)], want)
            advantage = np.asarray(space["of_targets"])[row, ids == n]
            assert len(set(advantage[length - 1 : -1].tolist())) == 1
            found += 1
    assert found == len(space["examples"])
    sums = jax.vmap(space["sum_by_id"])(weights, packed.segment_ids)
    assert sorted(sums[sums > 0].tolist()) == sorted(a for _, a in space["lengths"])
    np.testing.assert_array_equal(space["positions"][:, :3], [[0, 0, 0], [0, 1, 2]])


def of_biases(page, bias, causal=False):
    """The output, and the bias's gradient of the sum of its squares."""
    tensors = [page[name] for name in ("query", "k", "value")]
    allowed = np.ones((tensors[0].shape[1], tensors[1].shape[1]), bool)
    allowed = np.tril(allowed) if causal else allowed
    out = attended(*tensors, allowed, bias=bias)["out"]
    return out, attended(*tensors, allowed, bias=bias, dout=2 * out)["dbias"]


def test_a_pair_bias():
    page = of_page("biases")
    _, expected = of_biases(page, page["pair_bias"])
    np.testing.assert_allclose(page["gradient"], expected, rtol=1e-4, atol=1e-5)


def test_t5():
    """32 buckets: 16 of one distance each, wider ones up to 128, and the last for all beyond."""
    page = of_page("biases")
    table = jnp.arange(32.0)[:, None]
    buckets = page["t5_bias"](table, 300)[0, 0]
    known = {0: 0, 1: 1, 15: 15, 16: 16, 18: 16, 19: 17, 64: 26, 127: 31, 128: 31, 299: 31}
    assert {far: int(buckets[299, 299 - far]) for far in known} == known
    assert not np.triu(buckets).any()
    table = jax.random.normal(page["key"], (32, 4))
    bias, back = jax.vjp(lambda table: page["t5_bias"](table, 96), table)
    (expected,) = back(jnp.float32(of_biases(page, bias, causal=True)[1]))
    np.testing.assert_allclose(page["table_gradient"], expected, rtol=1e-4, atol=1e-4)


def test_dropout():
    """Some weights are dropped, and the mean over keys stays about the same."""
    page = of_page("biases")
    whole, _ = of_biases(page, np.zeros((1, 1, 1, 1)), causal=True)
    assert page["out"].shape == whole.shape and np.abs(page["out"] - whole).max() > 0.01
    assert abs(float(jnp.mean(page["out"] - whole))) < 0.02


# --- Layers of other libraries.


def test_equinox_rows_of_documents():
    """The Equinox block: no document depends on the one before it, and the output of padding is
    0."""
    pytest.importorskip("equinox")
    namespace = of_page("equinox")
    run, layer, ids = (namespace[name] for name in ("run", "layer", "segment_ids"))
    x = jax.random.normal(jax.random.key(1), (2, 100, 32))
    out = run(layer, x, ids)
    other = run(layer, x.at[0, :40].add(1.0), ids)
    np.testing.assert_array_equal(out[0, 40:], other[0, 40:])
    assert np.abs(out[0, :40] - other[0, :40]).max() > 0.01
    assert not np.any(out[1, 90:])


def test_equinox_is_its_own_attention():
    """Output and gradients equal those of equinox.nn.MultiheadAttention with the same weights."""
    eqx = pytest.importorskip("equinox")
    namespace = of_page("equinox")
    theirs = eqx.nn.MultiheadAttention(4, 32, qk_size=8, vo_size=8, key=jax.random.key(2))
    ours = namespace["Attention"](32, heads=4, kv_heads=4, head_dim=8, key=jax.random.key(3))

    def taking(theirs):
        key_value = jnp.concatenate([theirs.key_proj.weight, theirs.value_proj.weight])
        weights = theirs.query_proj.weight, key_value, theirs.output_proj.weight
        places = lambda m: (m.query.weight, m.key_value.weight, m.out.weight)  # noqa: E731
        return eqx.tree_at(places, ours, weights)

    ids = jnp.asarray([0] * 7 + [1] * 13)
    expression = packax.causal() & packax.documents(ids)
    allowed = expression.as_array(20, 20).reshape(20, 20)
    x = jax.random.normal(jax.random.key(4), (20, 32))

    @eqx.filter_jit
    def both(theirs):
        def of_ours(theirs):
            out = taking(theirs)(x, packax.create_attention_mask(expression))
            return jnp.sum(jnp.sin(out)), out

        def of_theirs(theirs):
            out = theirs(x, x, x, allowed)
            return jnp.sum(jnp.sin(out)), out

        return [eqx.filter_grad(f, has_aux=True)(theirs) for f in (of_ours, of_theirs)]

    (gradients, out), expected = both(theirs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(out, expected[1])
    for x, y in zip(*map(jax.tree.leaves, (gradients, expected[0])), strict=True):
        close(x, y)


def test_keras_rows_of_documents():
    """The Keras block: no document depends on the one before it."""
    pytest.importorskip("keras")
    namespace = of_page("keras")
    model, text, ids = (namespace[name] for name in ("model", "text", "ids"))
    out = model.predict([text, ids], verbose=0)
    other = text.copy()
    other[0, :40] = 49 - text[0, :40]
    moved = model.predict([other, ids], verbose=0)
    np.testing.assert_array_equal(out[0, 40:], moved[0, 40:])
    assert np.abs(out[0, :40] - moved[0, :40]).max() > 0.01


def test_keras_is_its_own_attention():
    """Output and gradients equal those of keras.layers.MultiHeadAttention with the dense mask."""
    keras = pytest.importorskip("keras")
    namespace = of_page("keras")
    ids = jnp.asarray([[0] * 7 + [1] * 13] * 2)
    x = jax.random.normal(jax.random.key(0), (2, 20, 32))
    ours = namespace["PackedAttention"](num_heads=4, key_dim=8)
    theirs = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8)
    ours.build(x.shape, x.shape)
    theirs.build(x.shape, x.shape)
    theirs.set_weights(ours.get_weights())
    allowed = (packax.causal() & packax.documents(ids)).as_array(20, 20).reshape(2, 20, 20)
    weights = [x.value for x in ours.trainable_variables]

    def run(layer, mask):
        def loss(weights, x):
            out, _ = layer.stateless_call(weights, [], x, x, attention_mask=mask)
            return jnp.sum(jnp.sin(out)), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, x)
        return out, gradients

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for x, y in zip(*map(jax.tree.leaves, (run(ours, ids), run(theirs, allowed))), strict=True):
        close(x, y)


def test_keras_layers_as_they_are(monkeypatch):
    """With the page's function in place of jax.nn's, a layer with a dense mask runs on packax."""
    keras = pytest.importorskip("keras")
    monkeypatch.setenv("PACKAX_FALLBACK", "error")
    calls = []

    def attention(*operands, implementation=None, **options):
        calls.append(implementation)
        return packax.dot_product_attention(*operands, **options)

    layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, flash_attention=False)
    x = jax.random.normal(jax.random.key(0), (2, 20, 32))
    mask = {"use_causal_mask": True, "query_mask": jnp.arange(20)[None] < 15}
    expected = layer(x, x, **mask)[:, :15]
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    np.testing.assert_allclose(layer(x, x, **mask)[:, :15], expected, rtol=1e-4, atol=1e-5)
    assert calls == ["xla"]  # which would otherwise select jax.nn's own path


def test_easydel_is_its_own_attention():
    """Logits and gradients of a tiny Llama equal those with EasyDeL's plain attention, without
    padding."""
    pytest.importorskip("easydel")
    namespace = of_page("easydel")
    from flax import nnx

    ids, real = jnp.arange(40)[None], jnp.arange(40)[None] < 33

    def run(name):
        llama = namespace["model"](name)

        def loss(llama):
            logits = llama(input_ids=ids, attention_mask=real).logits[:, :33]
            return jnp.sum(jnp.sin(logits)), logits

        with llama.config.mesh:
            (_, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(llama)
        return [logits, *jax.tree.leaves(gradients)]

    for x, y in zip(run("packax"), run("vanilla"), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)
