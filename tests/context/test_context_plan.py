"""Plans: exact inverses, equal token counts, the same on host and device, and balanced."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import trees
from context import mesh_of
from jax.sharding import PartitionSpec as P
from packax._src.context.load_balance import ContextPlan, _sum_of_top_bits, balanced
from packax._src.masks import planning
from packings import ids_of, positions_of


def plan_of(ids, ranks=2, **keywords):
    return packax.context_plan(packax.causal() & packax.documents(ids), ranks=ranks, **keywords)


def ids_of_lengths(lengths, length):
    """Documents one after another, then padding."""
    ids = np.full((len(lengths), length), -1, np.int32)
    for row, sizes in zip(ids, lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    return ids


def causal_areas(ids):
    """Attended pairs of each row, by the dense mask."""
    allowed = (packax.causal() & packax.documents(ids)).as_array(*ids.shape * 2)
    return np.asarray(allowed).sum(axis=1)


def packed(length, rng):
    """Document lengths as in real data: log-normal, filling the row exactly."""
    lengths = []
    while sum(lengths) < length:
        lengths.append(int(np.clip(rng.lognormal(6, 1.4), 1, length)))
    lengths[-1] -= sum(lengths) - length
    return [n for n in lengths if n]


def test_zigzag():
    plan = packax.context_plan(packax.causal(), ranks=3, kind="zigzag", length=6 * 256)
    np.testing.assert_array_equal(plan.order, [[0, 5, 1, 4, 2, 3]])
    assert (plan.chunk, plan.length, plan.ranks) == (256, 1536, 3)
    load = causal_areas(np.zeros(1536, np.int32))
    np.testing.assert_allclose(plan.permute(load, 0).reshape(3, -1).sum(1), load.sum() / 3)


@pytest.mark.parametrize("ranks,chunk", [(2, None), (4, 128), (8, 256), (1, 128)])
def test_balanced(ranks, chunk):
    """Host, device and traced plans agree; every rank has the same number of chunks, in order, and
    balanced work."""
    length = 4096
    rng = np.random.default_rng(ranks)
    ids = ids_of_lengths([packed(length, rng), [length], [100, 1, 700]], length)
    host = plan_of(ids, ranks, chunk=chunk)
    assert isinstance(host.order, np.ndarray)
    for other in (
        plan_of(jnp.asarray(ids), ranks, chunk=chunk),
        jax.jit(lambda x: plan_of(x, ranks, chunk=chunk))(ids),
    ):
        assert isinstance(other.order, jax.Array)
        np.testing.assert_array_equal(host.order, other.order)
        np.testing.assert_array_equal(host.inverse, other.inverse)
        assert (other.chunk, other.length, other.ranks) == (host.chunk, length, ranks)
    chunks = length // host.chunk
    np.testing.assert_array_equal(np.sort(host.order, axis=1), [np.arange(chunks)] * 3)
    by_rank = host.order.reshape(3, ranks, -1)
    assert np.all(np.diff(by_rank, axis=2) > 0)
    for row, order in zip(ids, host.order, strict=True):
        work = causal_areas(row).reshape(chunks, -1).sum(1)
        load = work[order].reshape(ranks, -1).sum(1)
        # Chunks are dealt in rounds, so two ranks differ by at most the largest chunk.
        assert load.max() - load.min() <= work.max() + 128 * chunks


LENGTH = 1024
DOCUMENTS = np.stack([ids_of((0, LENGTH)), ids_of((3, 500), (1, 20), (-1, 9), (2, 300), (-1, 195))])
POSITIONS = np.stack([positions_of(row) for row in DOCUMENTS])
SPANS = np.where(np.arange(LENGTH) // 32 % 3 == 0, 7, -1)
INDEX = np.arange(LENGTH)
placed = functools.partial(packax.documents, DOCUMENTS, positions=POSITIONS)
TREE = packax.masks.tree(np.repeat([0, 1, 2, 3, 5, -1], [300, 99, 200, 225, 100, 100]),
                         [-1, 0, 1, 0, -1, 4])  # fmt: skip
EXPRESSIONS = {
    "full": packax.full(),
    "causal": packax.causal(),
    "documents": packax.documents(DOCUMENTS),
    "causal documents": packax.causal() & packax.documents(DOCUMENTS),
    "one row": packax.causal() & packax.documents(DOCUMENTS[1]),
    "positions": packax.causal() & placed(),
    "window": packax.sliding_window(100, 7) & packax.documents(DOCUMENTS),
    "window of positions": packax.sliding_window(100, 7) & placed(),
    "chunks of positions": packax.chunked(96) & packax.causal() & placed(),
    "offset": packax.causal(np.array([5, -300])),
    "prefix": packax.prefix(np.array([90, 600])) & packax.documents(DOCUMENTS),
    "prefix of positions": packax.prefix(40) & placed(),
    "spans": packax.masks.spans(SPANS, packax.sliding_window(9)) & packax.documents(DOCUMENTS),
    "spans of positions": packax.masks.spans(SPANS, packax.sliding_window(9)) & placed(),
    "ranges": packax.masks.ranges(INDEX - 70, INDEX + 1) & packax.documents(DOCUMENTS),
    "union": packax.causal() & (packax.sliding_window(50) | packax.chunked(200)),
    "other keys": packax.documents(DOCUMENTS, kv_segment_ids=np.sort(DOCUMENTS)[:, 200:]),
    "map": packax.causal()
    & packax.masks.block_sparse(np.tri(LENGTH // 128, dtype=bool), (128, 128)),
    "tree": TREE,
    "tree and causal": TREE & packax.causal(),
    "tree and chunks": TREE & packax.causal() & packax.chunked(60),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_work_is_what_the_expression_attends(name):
    """Row by row, on the host and on the device; the host computation touches no device."""
    expression = EXPRESSIONS[name]
    kv_len = 824 if name == "other keys" else LENGTH
    expected = np.asarray(expression.as_array(LENGTH, kv_len)).sum(axis=-1)
    expected = np.atleast_2d(expected.reshape(-1, LENGTH))
    on_device = jax.tree.map(jnp.asarray, expression)
    traced = jax.jit(lambda x: planning._keys(x, LENGTH, kv_len))(on_device)
    if name == "map":  # whole blocks of 64 keys for tiles of 128 rows
        expected = np.arange(128, LENGTH + 1, 128).repeat(128)[None]
    host = planning._keys(expression, LENGTH, kv_len)
    assert isinstance(host, np.ndarray)
    for got in (host, traced):
        np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)


def test_balance_of_answers():
    """For a prompt and its answers, ranks get equal work with "balanced", but not with "zigzag"."""
    tree = trees.prompt_and_answers(8192, 16, 512)
    expression = packax.masks.tree(*tree) & packax.causal()
    keys_per_row = packax.masks.tree_positions(expression) + 1

    def most(kind):
        plan = packax.context_plan(expression, ranks=4, kind=kind)
        load = np.asarray(plan.permute(keys_per_row, 0)).reshape(4, -1).sum(1, dtype=np.int64)
        return load.max() / load.mean()

    assert most("balanced") < 1.03 < most("zigzag")


def test_one_rank_moves_nothing():
    """Works for any length, so the same program runs on one device and on several."""
    for kind in ("zigzag", "balanced"):
        plan = packax.context_plan(packax.causal(), ranks=1, kind=kind, length=100)
        np.testing.assert_array_equal(plan.index(), np.arange(100)[None])


def test_the_ranks_of_a_sharding():
    sharding = packax.AttentionSharding(P("data", ("x", "y")), P("data", ("x", "y")))
    expression = packax.causal() & packax.documents(np.zeros((1, 1024), int))
    with jax.set_mesh(mesh_of(1, 2, 2, axes=("data", "x", "y"))):
        plan = packax.context_plan(expression, sharding=sharding)
    assert plan.ranks == 4
    np.testing.assert_array_equal(plan.order, packax.context_plan(expression, ranks=4).order)


def test_default_chunk():
    def chunk(length, ranks):
        return packax.context_plan(packax.causal(), ranks=ranks, length=length).chunk

    assert chunk(131072, 4) == 2048
    assert chunk(131072, 16) == 512
    assert chunk(4096, 8) == 128
    assert chunk(3 * 128 * 4, 4) == 128
    assert chunk(131072 * 3, 16) == 1024  # 24 chunks a rank; chunks of 2048 would leave 12


def test_default_chunk_of_windows():
    """Four chunks a rank, unless halos exceed half of such a chunk, or the keys are not the
    rows."""

    def chunk(expression, ranks, length=131072):
        return packax.context_plan(expression, ranks=ranks, length=length).chunk

    window = packax.sliding_window
    assert chunk(window(511), 2) == chunk(window(4095), 2) == 16384
    assert chunk(window(4095), 4) == 8192
    assert chunk(window(4095), 8) == 1024
    assert chunk(window(2000, 100), 8) == 1024
    assert chunk(window(1900, 100), 8) == 4096
    assert chunk(packax.causal() & packax.chunked(4096), 8) == 4096  # no halos
    ids = np.zeros(131072, np.int32)
    assert chunk(window(511) & packax.documents(ids), 2) == 16384
    crossed = packax.documents(ids, kv_segment_ids=np.zeros(1000, np.int32))
    assert chunk(window(511) & crossed, 2) == 4096


def test_balance_of_long_sequences():
    """Areas of chunks exceed int32. The device has no int64, and computes the same plan."""
    length, rng = 16 * 2**20, np.random.default_rng(0)
    plan = packax.context_plan(packax.causal(), ranks=2, length=length)
    chunks = plan.order.reshape(2, -1).astype(np.int64)
    first, second = chunks.sum(axis=1)
    assert first == second
    sizes = rng.multinomial(length - 40, rng.dirichlet(np.full(40, 0.1))) + 1
    ids = np.repeat(np.arange(40, dtype=np.int32), sizes)
    expression = packax.causal() & packax.documents(ids)
    keys = planning._keys(expression, length, length)
    of_chunks = keys.reshape(64, -1).sum(axis=1, dtype=np.int64)
    host = packax.context_plan(expression, ranks=4)
    load = of_chunks[host.order].reshape(4, -1).sum(axis=1)
    assert load.max() <= load.mean() + of_chunks.max() / 4
    on_device = balanced(4, jnp.asarray(keys), host.chunk)
    np.testing.assert_array_equal(on_device.order, host.order)


@pytest.mark.parametrize("length", [2**24, 2**27, 2**30, 2**31 - 2**20])
@pytest.mark.parametrize("rows", [1, 3])
def test_sums_of_areas_on_the_device(rows, length):
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, length, (rows, 4, 1000)).astype(np.int32)
    tiles[0] >>= 9
    sums = tiles.sum(axis=2, dtype=np.int64)
    shift = [[max(0, int(x.max()).bit_length() - 30)] for x in sums]
    got = jax.jit(_sum_of_top_bits, static_argnums=1)(tiles, length)
    np.testing.assert_array_equal(got, sums >> np.array(shift))


def test_balance_of_real_lengths():
    """What benchmarks/context_plans.py measures, on a few rows."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = packed(32768, rng)
        plan = plan_of(ids_of_lengths([lengths], 32768), 16)
        work = np.concatenate([np.arange(1, n + 1) for n in lengths])
        load = plan.permute(work, 0).reshape(16, -1).sum(1)
        assert load.max() / load.mean() < 1.05


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_permute_is_inverted_exactly(batched, traced):
    rng = np.random.default_rng(0)
    length = 1024
    ids = np.sort(rng.integers(0, 9, (2, length)), axis=1) if batched else ids_of((0, length))
    plan = plan_of(ids, 4, chunk=128)
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
