"""Plans for hosts and their ranks: documents are split inside a host first.

Guards against a document split over two hosts that only one of them gathers, parts larger than
planned, and bytes between hosts that no rank reads.
"""

import functools
import re

import jax
import numpy as np
import packax
import pytest
from context import BATCH, DIM, KV_HEADS, LENGTH, mesh_of, placed, results, tensors
from jax.sharding import PartitionSpec as P
from local_packings import EXPRESSION, ROWS, ids_of, lognormal, random_row
from local_plans import check_local, greedy
from tiers import some

SPEC = P(None, ("host", "gpu"))
SHARDING = packax.AttentionSharding(query=SPEC, key_value=SPEC)


def plan_of(ids, ranks, **keywords):
    expression = packax.causal() & packax.documents(ids)
    return packax.context_plan(expression, ranks=ranks, kind="local", **keywords)


@pytest.mark.parametrize("levels", [(2, 2), (2, 4), (4, 2), (2, 2, 2), (4, 4)])
def test_every_document_is_of_one_part(levels):
    rng = np.random.default_rng(sum(levels))
    for n in range(8):
        ids = np.stack([random_row(rng) for _ in range(2 if n % 4 == 0 else 1)])
        plan = plan_of(ids, levels)
        check_local(plan, ids)
        assert plan.ranks == np.prod(levels) and plan.levels in (levels, ())
        np.testing.assert_array_equal(plan.order, plan_of(ids, levels).order)


def test_almost_nothing_crosses_hosts():
    """128k tokens, documents of about 2,000: a host keeps every document that fits."""
    rng = np.random.default_rng(1)
    length = 1 << 17
    between = []
    for _ in range(3):
        ids = ids_of(lognormal(rng, 2000, length), length)
        plan = plan_of(ids, (4, 8))
        check_local(plan, ids)
        of_one = packax.context_plan(packax.documents(ids), ranks=32)
        between.append(plan.traffic(8, 1)["between"] / of_one.traffic(8, 1)["between"])
    assert np.mean(between) < 0.05


def test_of_one_host_is_of_one_level():
    ids = ids_of([300, 500, 100, 1])
    for ranks in ((1, 4), (4, 1)):
        plan, expected = plan_of(ids, ranks), plan_of(ids, 4)
        assert plan.levels == () and plan.shared == expected.shared
        np.testing.assert_array_equal(plan.order, expected.order)


def test_a_number_is_of_all_ranks():
    """Without sizes per level there is one shared part, also across hosts."""
    ids = ids_of([50] * 40)
    plan = plan_of(ids, (2, 2), shared=0.25)
    assert plan.levels == () and plan.shared == 128


def test_traffic():
    """Rows cross hosts once per rank, and are forwarded inside a host."""
    ids = ids_of([50] * 40)
    plan = plan_of(ids, (2, 2), shared=(128, 256))
    assert plan.levels == (2, 2) and plan.parts == ((1, 128), (2, 256))
    # All ranks: 128 rows from the other host, then 256 from the neighbour. In the host: 256 rows
    # from the neighbour.
    assert plan.traffic(2, 10) == {"inside": 10 * (256 + 256), "between": 10 * 128}
    assert plan.traffic(4, 10) == {"inside": 10 * (128 + 256 + 256), "between": 0}
    assert plan.fetched == 3 * 128 + 256


@pytest.mark.parametrize("ranks", some([((2, 4),), ((4, 2),)], 0))
def test_collectives_move_what_the_plan_says(ranks):
    """Read from the compiled program, by groups of ranks: forward and backward move nothing
    else."""
    plan = greedy(ROWS, ranks)
    assert 0 < plan.shared[0] < plan.shared[1]
    mesh = mesh_of(*ranks, axes=("host", "gpu"))
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(EXPRESSION, sharding=SHARDING, plan=plan)
        inputs = placed(mesh, tensors(), SHARDING)
        function = functools.partial(results, gather_head_groups=1)
        text = jax.jit(function).lower(*inputs, mask).compile().as_text()
    of_row = BATCH * KV_HEADS * DIM
    # (ranks of the group, rows of the result), for keys or values.
    outer, inner = plan.shared
    hosts, gpus = ranks
    gathers = [(hosts, hosts * outer), (gpus, hosts * gpus * outer), (gpus, gpus * inner)]
    # Keys and values in both passes; the CPU compilers of older jax gather once for both.
    expected = [sorted((n, rows * of_row) for n, rows in gathers * times) for times in (4, 2)]
    assert moved(text, "all-gather") in expected
    scatters = [(gpus, hosts * outer), (hosts, outer), (gpus, inner)]
    expected = sorted((n, rows * of_row) for n, rows in scatters * 2)
    assert moved(text, "reduce-scatter") == expected
    assert "all-reduce" not in text and "all-to-all" not in text
    fetched = sum((n - 1) * rows // n for n, rows in gathers)
    traffic = plan.traffic(gpus, 1)
    assert fetched == traffic["inside"] + traffic["between"]


def moved(text, what):
    """(ranks of a group, elements of the result) of each such collective in compiled HLO."""
    found = []
    for line in re.findall(rf"^.* {what}(?:-start)?\(.*$", text, re.MULTILINE):
        (shape,) = re.findall(r"= \(?\w+\[([\d,]*)\]", line)
        found.append((ranks_of(line), int(np.prod([int(n) for n in shape.split(",")]))))
    return sorted(found)


def ranks_of(line):
    """Parses XLA's three notations of groups: mesh axes, an iota, or explicit lists."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return int(np.prod([int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2])]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    return len(re.search(r"replica_groups=\{\{([\d,]*)\}", line)[1].split(","))


def test_levels_of_another_mesh_are_refused():
    plan = greedy(ROWS, (2, 2))
    spec = P(None, "context")
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    with (
        jax.set_mesh(mesh_of(4, axes=("context",))),
        pytest.raises(ValueError, match=r"levels of \(2, 2\) ranks.*have sizes \(4,\)"),
    ):
        packax.create_attention_mask(EXPRESSION, sharding=sharding, plan=plan)
    assert LENGTH // 4 > plan.shared[0] > 0
