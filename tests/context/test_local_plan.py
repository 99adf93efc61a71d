"""Plans of kind "local": whole documents per rank, balanced, with a small shared part, made on the
host."""

import warnings

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import mesh_of
from jax.sharding import PartitionSpec as P
from local_packings import LENGTH, ids_of, lognormal, random_row
from local_plans import check_local
from packax._src.context import local_plan
from tiers import some

RANKS = 4


def plan_of(ids, ranks=RANKS, **keywords):
    expression = packax.causal() & packax.documents(ids)
    return packax.context_plan(expression, ranks=ranks, kind="local", **keywords)


def load_of(plan, ids):
    """Attended pairs of the most loaded rank over the mean, for the worst row."""
    found = []
    for number, row in enumerate(np.atleast_2d(ids)):
        keys = np.zeros(len(row), int)
        for document in np.setdiff1d(row, [-1]):
            keys[row == document] = 1 + np.arange(np.sum(row == document))
        order = np.asarray(plan.order)
        load = keys[order[number % len(order)]].reshape(plan.ranks, -1).sum(1)
        found.append(load.max() / max(load.mean(), 1e-9))
    return max(found)


@pytest.mark.parametrize("seed", some(range(8), 0, 1, 2))
def test_documents_of_private_rows_lie_whole_on_their_rank(seed):
    """Any ids: 40 packings a seed, and batches of four."""
    rng = np.random.default_rng(seed)
    for n in range(10):
        rows = np.stack([random_row(rng) for _ in range(4)])
        ranks = int(rng.choice([2, 4, 8, 16]))
        for ids in (*rows, *([rows] if n % 5 == 0 else [])):
            plan = plan_of(ids, ranks)
            check_local(plan, ids)
            assert 0 <= plan.fetched <= (ranks - 1) * LENGTH // ranks  # what "balanced" fetches
            again = plan_of(ids, ranks)
            np.testing.assert_array_equal(plan.order, again.order)


RUNS = "7x50 2x9 4x20 7x49 8x44 5x29 1x38 3x58 4x29 3x21 5x42 8x32 7x43 8x48"


def test_documents_with_less_area_that_are_longer():
    """No assignment gives a rank more tokens than it has rows."""
    ids = np.concatenate(
        [np.full(int(n), int(document)) for document, n in (x.split("x") for x in RUNS.split())]
    )
    for shift in range(0, 512, 37):
        rolled = np.roll(ids, shift)
        check_local(plan_of(rolled, ranks=2), rolled)


def test_what_does_not_fit_is_balanced():
    """One document over all ranks."""
    ids = np.zeros((1, LENGTH), np.int32)
    expression = packax.causal() & packax.documents(ids)
    plan = plan_of(ids)
    assert plan.shared == LENGTH // RANKS and plan.split is None
    np.testing.assert_array_equal(plan.order, packax.context_plan(expression, ranks=RANKS).index())


def test_areas_beyond_int32():
    rng = np.random.default_rng(5)
    length = 1 << 17
    for mean in (3000, 60000):
        ids = ids_of(lognormal(rng, mean, length), length)
        plan = plan_of(ids, 8)
        check_local(plan, ids)
        assert load_of(plan, ids) <= 1.03


@pytest.mark.parametrize("keywords", [{}, {"shared": 0.5}])
def test_inside_jit_the_error_says_what_to_do(keywords):
    sharding = packax.AttentionSharding(P(None, "x"), P(None, "x"))

    def inputs(ids):
        return packax.context.shard_batch(
            ids, packax.documents(ids), sharding=sharding, kind="local", **keywords
        )

    calls = (lambda ids: plan_of(ids, **keywords), jnp.zeros(512, int)), (inputs, ROW)
    with jax.set_mesh(mesh_of(4, axes=("x",))):
        for call, ids in calls:
            with pytest.raises(ValueError) as caught:
                jax.jit(call)(ids)
            for text in ("plan on the host", "holds an array, int32[", 'use kind="balanced"'):
                assert text in str(caught.value)


ROW = np.zeros((1, LENGTH), np.int32)


@pytest.mark.parametrize(
    "thousands,mean,ranks,share",
    some(
        [
            (128, 500, 4, 0.06),
            (128, 500, 8, 0.12),
            (128, 500, 16, 0.24),
            (128, 2000, 8, 0.41),
            (512, 500, 4, 0.015),
            (512, 500, 16, 0.06),
        ],
        *(1, 3),
    ),
)
def test_fair_and_small(thousands, mean, ranks, share):
    """Fetched shares, relative to an all-gather: bounds from the greedy plan of issue 22, which
    ignores tokens."""
    rng = np.random.default_rng(7)
    length, shares = thousands << 10, []
    for _ in range(6):
        ids = ids_of(lognormal(rng, mean, length), length)
        plan = plan_of(ids, ranks)
        assert load_of(plan, ids) <= 1.03
        shares.append(plan.shared * ranks / plan.length)
    assert np.mean(shares) <= share


def test_short_documents_level_the_ranks():
    """To give ranks equal lengths, a plan splits one of the shortest documents, though most are
    long."""
    length = 1 << 17
    ids = ids_of([300] * 400 + [10] * 1000, length)
    plan = plan_of(ids, 4)
    check_local(plan, ids)
    assert plan.shared == 128  # one tile, the smallest shared part
    for n in range(400):
        assert len({*plan.inverse[0][ids == n] // (length // 4)}) == 1


@pytest.mark.parametrize(
    "expression",
    [
        packax.causal(),
        packax.documents(np.zeros(LENGTH, int), kv_segment_ids=np.zeros(LENGTH, int)),
    ],
)
def test_without_documents_all_is_shared(expression):
    plan = packax.context_plan(expression, ranks=RANKS, kind="local", length=LENGTH)
    assert plan.shared == LENGTH // RANKS
    balanced = packax.context_plan(expression, ranks=RANKS, length=LENGTH)
    np.testing.assert_array_equal(plan.order, balanced.index())


def test_windows_count_what_they_attend():
    """With a window, rows of a long document cost no more than others, so nothing is split."""
    ids = ids_of([500, 400, *[100] * 11])
    window = packax.sliding_window(15) & packax.documents(ids)
    plan = packax.context_plan(window, ranks=RANKS, kind="local")
    check_local(plan, ids)
    assert plan.shared < plan_of(ids).shared


def test_traffic():
    plan = plan_of(ids_of([LENGTH]), 4)
    assert plan.traffic(2, 10) == {"inside": 5120, "between": 10240}
    plan = plan_of(ids_of([50] * 40), 4, shared=128)
    assert plan.traffic(4, 10) == {"inside": 3 * 1280, "between": 0}
    with pytest.raises(ValueError, match="divide the plan's 4 ranks, but is 3"):
        plan.traffic(3, 10)


def test_inputs_take_a_plan_that_was_made_before():
    """As an argument of a jitted step, where ids are traced and no plan can be made."""
    sharding = packax.AttentionSharding(P(None, "x"), P(None, "x"))
    ids = np.stack([ids_of([70] * 28), ids_of([50] * 40)])
    plan = plan_of(ids, 4, shared=256)

    @jax.jit
    def step(plan, ids):
        expression = packax.causal() & packax.documents(ids)
        return packax.context.shard_batch(ids, expression, sharding=sharding, plan=plan)

    with jax.set_mesh(mesh_of(4, axes=("x",))):
        moved, mask, same = step(plan, ids)
        for more in ({"kind": "local"}, {"chunk": 128}, {"shared": 0.5}):
            with pytest.raises(ValueError, match="plan defines the order of tokens"):
                packax.context.shard_batch(
                    ids, packax.documents(ids), sharding=sharding, plan=plan, **more
                )
    np.testing.assert_array_equal(moved, plan.permute(ids))
    np.testing.assert_array_equal(same.order, plan.order)
    np.testing.assert_array_equal(mask.plan_mismatch, [0, 0])


def test_a_shared_part_that_is_too_small_is_said():
    """shared=1 means one row, not all rows; on the host nothing else reports that it does not
    fit."""
    expression = packax.documents(np.zeros((1, 1024), int))  # one document, over two ranks
    with pytest.warns(
        UserWarning, match=r"do not fit a shared part of \d+ of .* 512 tokens.*int is a"
    ):
        plan = packax.context_plan(expression, ranks=2, kind="local", shared=1)
    assert plan.fetched == 512
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert packax.context_plan(expression, ranks=2, kind="local", shared=1.0).fetched == 512
        packax.context_plan(expression, ranks=2, kind="local")


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(local_plan, "ext", None)
    with pytest.raises(NotImplementedError, match='kind="local" needs the extension module'):
        packax.context_plan(packax.causal(), ranks=2, length=512, kind="local")
