"""Plans: exact inverses, equal token counts, the same on host and device, and balanced."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from cases import ids_of
from packax._src.context.load_balance import ContextPlan

MASK = packax.create_attention_mask(packax.causal(), q_len=256, kv_len=256)


def causal_areas(ids):
    """Attended pairs of each row of the sequence, by the definition."""
    allowed = (packax.causal() & packax.documents(ids)).as_array(*ids.shape * 2)
    return np.asarray(allowed).sum(axis=1)


def packed(length, rng):
    """Documents of real variety: log-normal lengths, and padding at the end."""
    lengths = []
    while sum(lengths) < length:
        lengths.append(int(np.clip(rng.lognormal(6, 1.4), 1, length)))
    lengths[-1] -= sum(lengths) - length
    return [n for n in lengths if n]


def test_head_tail():
    plan = packax.context_plan("head_tail", 3, length=6 * 256)
    np.testing.assert_array_equal(plan.order, [[0, 5, 1, 4, 2, 3]])
    assert (plan.chunk, plan.length, plan.shards) == (256, 1536, 3)
    load = causal_areas(np.zeros(1536, np.int32))
    np.testing.assert_allclose(plan.permute(load, 0).reshape(3, -1).sum(1), load.sum() / 3)


@pytest.mark.parametrize("shards,chunk", [(2, None), (4, 128), (8, 256), (1, 128)])
def test_area(shards, chunk):
    """Host, device and traced plans agree; each rank has as many chunks, in order, and fair work."""
    length = 4096
    rng = np.random.default_rng(shards)
    lengths = [packed(length, rng), [length], [100, 1, 700]]
    host = packax.context_plan("area", shards, lengths=lengths, length=length, chunk=chunk)
    ids = np.full((3, length), -1, np.int32)
    for row, n in zip(ids, lengths, strict=True):
        row[: sum(n)] = np.repeat(np.arange(len(n)), n)
    for other in (
        packax.context_plan("area", shards, segment_ids=ids, chunk=chunk),
        packax.context_plan("area", shards, segment_ids=jnp.asarray(ids), chunk=chunk),
        jax.jit(lambda x: packax.context_plan("area", shards, segment_ids=x, chunk=chunk))(ids),
    ):
        np.testing.assert_array_equal(host.order, other.order)
        np.testing.assert_array_equal(host.inverse, other.inverse)
        assert (other.chunk, other.length, other.shards) == (host.chunk, length, shards)
    chunks = length // host.chunk
    np.testing.assert_array_equal(np.sort(host.order, axis=1), [np.arange(chunks)] * 3)
    by_rank = host.order.reshape(3, shards, -1)
    assert np.all(np.diff(by_rank, axis=2) > 0)
    for row, order in zip(ids, host.order, strict=True):
        work = causal_areas(row).reshape(chunks, -1).sum(1)
        load = work[order].reshape(shards, -1).sum(1)
        # dealing in rounds: no two ranks differ by more than the largest chunk
        assert load.max() - load.min() <= work.max() + 128 * chunks


def test_area_of_a_mask():
    """A causal mask of documents gives the documents' plan; a window's area is its own."""
    length, shards = 2048, 4
    ids = np.repeat(np.arange(3), [1500, 300, 248])
    causal = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    np.testing.assert_array_equal(
        packax.context_plan("area", shards, mask=causal).order,
        packax.context_plan("area", shards, segment_ids=ids).order,
    )
    # All work is in spans that fill every fourth chunk: what knows no areas deals them to one rank.
    spans = np.where(np.arange(length) // 128 % 4 == 0, 7, -1)
    expression = packax.spans(np.stack([spans, spans[::-1]]), packax.sliding_window(9))
    plan = packax.context_plan("area", shards, mask=packax.create_attention_mask(expression))
    traced = jax.jit(
        lambda: packax.context_plan("area", shards, mask=packax.create_attention_mask(expression))
    )()
    np.testing.assert_array_equal(plan.order, traced.order)
    for allowed, order in zip(expression.as_array(length, length), plan.order, strict=True):
        work = allowed.sum(axis=1).reshape(length // plan.chunk, -1).sum(axis=1)
        load = work[order].reshape(shards, -1).sum(axis=1)
        assert load.max() <= 1.05 * load.min()


def test_default_chunk():
    def chunk(length, shards):
        ids = np.zeros(length, np.int32)
        return packax.context_plan("area", shards, segment_ids=ids).chunk

    assert chunk(131072, 4) == 2048
    assert chunk(131072, 16) == 512
    assert chunk(4096, 8) == 128
    assert chunk(3 * 128 * 4, 4) == 128
    assert chunk(131072 * 3, 16) == 1024  # 24 a rank: 2048 would leave 12


def test_balance_of_real_lengths():
    """What benchmarks/context_plans.py measures, on a few rows."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = packed(32768, rng)
        plan = packax.context_plan("area", 16, lengths=lengths)
        work = np.concatenate([np.arange(1, n + 1) for n in lengths])
        load = plan.permute(work, 0).reshape(16, -1).sum(1)
        assert load.max() / load.mean() < 1.05


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_permute_is_inverted_exactly(batched, traced):
    rng = np.random.default_rng(0)
    length = 1024
    ids = np.sort(rng.integers(0, 9, (2, length)), axis=1) if batched else ids_of((0, length))
    plan = packax.context_plan("area", 4, segment_ids=ids, chunk=128)
    assert plan.order.shape == (2 if batched else 1, 8)
    index = np.broadcast_to(np.arange(length), (2, length))
    tree = {
        "tokens": rng.integers(0, 99, (2, length)),
        "positions": index,
        "x": [rng.standard_normal((2, length, 3, 2)).astype(np.float32)],
    }
    if traced:
        moved = jax.jit(lambda plan, tree: plan.permute(tree))(plan, tree)
        back = jax.jit(lambda plan, tree: plan.unpermute(tree))(plan, moved)
    else:
        moved = plan.permute(tree)
        back = plan.unpermute(moved)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(moved))
    assert isinstance(plan, ContextPlan)
    rows = np.broadcast_to(plan.index(), (2, length))
    np.testing.assert_array_equal(moved["positions"], rows)
    for name in ("tokens", "positions"):
        np.testing.assert_array_equal(back[name], tree[name])
        np.testing.assert_array_equal(moved[name], np.take_along_axis(tree[name], rows, 1))
    np.testing.assert_array_equal(back["x"][0], tree["x"][0])
    last = np.moveaxis(tree["x"][0], 1, -1)
    np.testing.assert_array_equal(np.moveaxis(plan.permute(last, -1), -1, 1), moved["x"][0])


def test_permute_is_differentiable():
    plan = packax.context_plan("head_tail", 2, length=512)
    weights = jnp.arange(512.0)[None]
    gradient = jax.grad(lambda x: jnp.sum(plan.permute(x) * weights))(jnp.zeros((1, 512)))
    np.testing.assert_array_equal(gradient, plan.unpermute(weights))


IDS = np.zeros(1024, np.int32)
PLAN = packax.context_plan("area", 2, segment_ids=np.zeros((2, 512), np.int32), chunk=128)
TWO = packax.context_plan("area", 2, lengths=[[512], [100, 412]], chunk=128)


@pytest.mark.parametrize(
    "call,texts",
    [
        (lambda: packax.context_plan("ring", 2, length=512), ['"head_tail" or "area"', "'ring'"]),
        (lambda: packax.context_plan("area", 0, length=512), ["shards must be at least 1", "0"]),
        (
            lambda: packax.context_plan("area", 1.5, length=512),
            ["shards must be an integer", "1.5"],
        ),
        (lambda: packax.context_plan("head_tail", 2), ["length is not known"]),
        (
            lambda: packax.context_plan("area", 2, mask=MASK, segment_ids=np.zeros(256, int)),
            ["give mask, or documents as lengths or segment_ids, not both"],
        ),
        (
            lambda: packax.context_plan("area", 2, mask=packax.causal()),
            ["mask must come from create_attention_mask, but is a Causal"],
        ),
        (
            lambda: packax.context_plan("area", 2, mask=MASK, length=512),
            ["mask has 256 rows, but length says 512"],
        ),
        (
            lambda: packax.context_plan(
                "area", 2, mask=dataclasses.replace(MASK, kv_plan=np.zeros((1, 2, 2), int))
            ),
            ["mask must be in the order of the sequence and whole"],
        ),
        (lambda: packax.context_plan("area", 2, length=512), ["needs the documents"]),
        (
            lambda: packax.context_plan("area", 2, lengths=[512], segment_ids=IDS),
            ["lengths", "segment_ids", "not both"],
        ),
        (
            lambda: packax.context_plan("head_tail", 4, length=1000),
            ["2 * shards * 128 = 1024", "is 1000"],
        ),
        (
            lambda: packax.context_plan("head_tail", 2, length=1024, chunk=128),
            ["length / (2 * shards) = 256", "128 was given"],
        ),
        (
            lambda: packax.context_plan("area", 2, segment_ids=IDS, chunk=100),
            ["chunk must be a multiple of 128, but is 100"],
        ),
        (
            lambda: packax.context_plan("area", 3, segment_ids=IDS),
            ["multiple of chunk * shards = 128 * 3 = 384", "is 1024"],
        ),
        (
            lambda: packax.context_plan("area", 2, segment_ids=IDS, length=512),
            ["segment_ids has 1024 rows, but length says 512"],
        ),
        (
            lambda: packax.context_plan("area", 2, segment_ids=IDS * 1.0),
            ["segment_ids must be integers", "float64"],
        ),
        (lambda: packax.context_plan("area", 2, segment_ids=5), ["segment_ids", "()"]),
        (
            lambda: packax.context_plan("area", 2, lengths=[600], length=512),
            ["lengths sum to 600", "512"],
        ),
        (lambda: packax.context_plan("area", 2, lengths=[-1, 5]), ["lengths must hold", "-1"]),
        (lambda: packax.context_plan("area", 2, lengths=5), ["lengths must hold", "array(5)"]),
        (lambda: PLAN.permute(np.zeros((2, 500))), ["512 rows", "axis 1", "(2, 500)"]),
        (lambda: PLAN.permute({"x": np.zeros(512)}), ["array['x']", "axis 1", "(512,)"]),
        (lambda: TWO.permute(np.zeros((3, 512))), ["plan's batch, 2", "(3, 512)"]),
        (lambda: TWO.permute(np.zeros(512), 0), ["plan's batch, 2", "axis 0"]),
    ],
)
def test_refused(call, texts):
    with pytest.raises(ValueError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("empty", [[], [[]], np.zeros(0, int), [np.zeros(0, int)]], ids=str)
def test_a_row_without_documents_is_padding(empty):
    padding = packax.context_plan("area", 2, segment_ids=np.full((1, 512), -1))
    plan = packax.context_plan("area", 2, lengths=empty, length=512)
    np.testing.assert_array_equal(plan.index(), padding.index())


def test_some_rows_without_documents():
    ids = np.zeros((2, 512), int)
    ids[0] = -1
    plan = packax.context_plan("area", 2, lengths=[[], [512]])
    np.testing.assert_array_equal(
        plan.index(), packax.context_plan("area", 2, segment_ids=ids).index()
    )
