"""Windows under context parallelism: ranks fetch halos, and results equal one device's.

Guards against a key that a row reads and no rank fetched, a gradient that is not sent back, and
fetched bytes that no rank reads.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import (
    BATCH,
    CONTEXT,
    DIM,
    KV_HEADS,
    LENGTH,
    ROWS,
    assert_same,
    collectives,
    in_order,
    mesh_of,
    moved,
    placed,
    tensors,
)
from context import results as all_results
from jax.sharding import PartitionSpec as P
from packings import positions_of
from paths import DOCS
from tiers import some

DOCUMENTS = packax.documents(ROWS)
CAUSAL = packax.causal()
window, chunked = packax.sliding_window, packax.chunked
UNION = (CAUSAL & chunked(64)) | window(30)


@functools.cache
def plan_of(kind, ranks, chunk=None):
    more = {} if chunk is None else {"chunk": chunk}
    return kind and packax.context_plan(CAUSAL & DOCUMENTS, ranks=ranks, kind=kind, **more)


@pytest.mark.parametrize("chunk", [6, 8, 16])
def test_reach(chunk):
    """For every row of every chunk, by the dense array; and no more rows than necessary need the
    halo."""
    index = np.arange(48)
    expressions = [
        window(5), window(0), window(3, 4), window(100), window(5, offset=2), window(5, offset=-3),
        CAUSAL & chunked(4), CAUSAL & chunked(12), chunked(5), chunked(8, offset=4), chunked(64),
        chunked(3, offset=-7), chunked(8, offset=np.array([1, -5])), CAUSAL & window(9, 9), UNION,
        CAUSAL & packax.causal(offset=3) & window(7, 7), window(7) | chunked(6),
        window(2, 9) & chunked(9),
        packax.masks.ranges(index - 3, index + 9) & window(6, None) & window(None, 2),
        packax.documents(index // 7) & window(4, 4), window(None, 3) & chunked(8),
    ]  # fmt: skip
    first = index - index % chunk
    for expression in expressions:
        allowed = expression.as_array(48, 48)
        allowed = allowed.reshape(-1, 48, 48).any(0)
        before, after = expression.reach(chunk)
        assert before is not None and after is not None
        low = np.where(allowed, index[None], 99).min(1)
        high = np.where(allowed, index[None], -1).max(1)
        assert (first - low <= before).all(), expression
        assert (high - (first + chunk - 1) <= after).all(), expression
        assert ((low >= first) | (index - first < before)).all(), expression


def test_no_reach():
    index = np.arange(8)
    positions = packax.documents(index // 4, positions=index % 4)
    for expression in (
        CAUSAL, packax.full(), window(3, None), window(None, 3), positions & window(3),
        packax.prefix(2) | window(3), packax.masks.ranges(index, index + 1),
        window(2, offset=jnp.int32(1)), packax.masks.spans(index // 2, window(3)),
        packax.masks.block_sparse(np.ones((1, 1), bool), 8) & window(3),
        packax.masks.tree(index // 4, np.array([-1, 0])) & window(3),
    ):  # fmt: skip
        assert None in expression.reach(4), expression


CASES = [  # expression, plan, chunk, ranks, halo keys before and after each chunk, or None
    (window(100) & DOCUMENTS, None, None, 4, (128, 0)),
    (window(150) & DOCUMENTS, "zigzag", None, 4, (256, 0)),
    (window(100) & DOCUMENTS, "balanced", 256, 2, (128, 0)),
    (CAUSAL & chunked(96) & DOCUMENTS, None, None, 8, (128, 0)),
    (CAUSAL & chunked(128) & DOCUMENTS, "zigzag", None, 4, (0, 0)),
    (window(200, 30), None, None, 8, (256, 128)),
    (window(200, 30), "zigzag", None, 4, None),  # would fetch no fewer rows than all
    (window(60, 60) & DOCUMENTS, None, None, 2, (128, 128)),
    (window(5, 70) & DOCUMENTS, "balanced", 512, 2, (128, 128)),
    (UNION & DOCUMENTS, "zigzag", None, 2, (128, 0)),
    (window(100), "balanced", None, 4, None),  # chunks of 128
    (window(700), "zigzag", None, 2, None),
    (packax.masks.block_sparse(np.ones((8, 8), bool), 128) & window(50), None, None, 2, None),
]


@pytest.mark.parametrize("case", some(range(len(CASES)), 2))
def test_equals_one_device_and_moves_halos_alone(case):
    """The bytes of the compiled program match the formula, forward and backward."""
    expression, kind, chunk, ranks, halo = CASES[case]
    plan = plan_of(kind, ranks, chunk)
    lengths = {"q_len": LENGTH, "kv_len": LENGTH}
    expected = jax.jit(all_results)(*tensors(), packax.create_attention_mask(expression, **lengths))
    mesh = mesh_of(ranks, axes=("context",))
    function = functools.partial(all_results, gather_head_groups=1)
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan, **lengths)
        inputs = placed(mesh, moved(plan, tensors()), CONTEXT)
        compiled = jax.jit(function).lower(*inputs, mask).compile()
        got = in_order(plan, jax.block_until_ready(compiled(*inputs, mask)))
    assert_same(got, expected)
    every = LENGTH - LENGTH // ranks
    if halo is None:
        assert mask.halo is None and mask.private_part is None and mask.fetched == every
        return
    assert mask.halo is not None and tuple(mask.halo)[3:5] == halo
    assert mask.fetched < every and (
        not mask.fetched or f"fetches {mask.fetched} keys" in repr(mask)
    )
    found = collectives(compiled.as_text())
    bytes_of = {what: sum(n for name, n in found if name == what) for what, _ in found}
    of_row = BATCH * KV_HEADS * 2 * DIM  # keys and values
    # Forward and backward; the CPU compilers of older jax fetch once for both.
    again = 2 if jax.__version_info__ >= (0, 11) else 1
    if kind == "balanced":
        own_rows = mask.fetched // (ranks - 1)
        assert set(bytes_of) == {"all-gather", "reduce-scatter"}
        assert bytes_of["all-gather"] in [
            n * (mask.fetched + own_rows) * of_row for n in (again, 2)
        ]
        assert bytes_of["reduce-scatter"] == own_rows * of_row
    elif mask.fetched:  # gradients are sent back too
        assert set(bytes_of) == {"collective-permute"}
        moved_rows = bytes_of["collective-permute"] // of_row
        assert moved_rows in [n * mask.fetched for n in (again + 1, 3)]
    else:
        assert not bytes_of


def test_traffic():
    """With four ranks and two hosts, ranks 1 and 2 each have one neighbour on each host."""
    expression = window(100) & packax.documents(np.zeros(4096, np.int32))
    zigzag = packax.context_plan(expression, ranks=4, kind="zigzag")
    assert zigzag.traffic(2, 10, expression) == {"inside": 1280, "between": 1280}
    assert zigzag.traffic(4, 10, expression) == {"inside": 2560, "between": 0}
    assert zigzag.traffic(2, 10, CAUSAL) == zigzag.traffic(2, 10)
    for ranks, permutes in ((2, 1), (4, 2), (8, 2)):  # two ranks send to each other at once
        plan = packax.context_plan(expression, ranks=ranks, kind="zigzag")
        halo = plan.halo(expression)
        sends = [send for send in halo.sends(-1) if not send.is_local]
        assert len(sends) == permutes and halo.fetched == 128 * permutes
        assert plan.traffic(ranks, 1, expression)["inside"] == 128 * permutes
    balanced = packax.context_plan(expression, ranks=4, chunk=256)
    assert balanced.traffic(2, 10, expression) == {"inside": 5120, "between": 10240}
    with pytest.raises(ValueError, match="expression must be a mask expression, but is"):
        zigzag.traffic(2, 10, "window")


def branches(function, *operands):
    """The collectives in each branch of a program's conditionals."""
    found = []

    def visit(jaxpr, names):
        for equation in jaxpr.eqns:
            names.add(equation.primitive.name)
            if equation.primitive.name == "cond":
                for branch in equation.params["branches"]:
                    visit(branch.jaxpr, inside := set())
                    found.append(inside & {"ppermute", "all_gather", "reduce_scatter"})
            else:
                for x in jax.tree.leaves(list(equation.params.values())):
                    if hasattr(inner := getattr(x, "jaxpr", x), "eqns"):
                        visit(inner, names)

    visit(jax.make_jaxpr(function)(*operands).jaxpr, set())
    return found


def test_stacks():
    """A layer selects its mask, and fetches only what that mask needs."""

    def alike_and_stack():
        build = functools.partial(packax.create_attention_mask, sharding=CONTEXT)
        masks = [build(x & DOCUMENTS) for x in (window(100), window(70), window(200), CAUSAL)]
        other = build(window(90) & packax.documents(ROWS, positions=np.arange(LENGTH)))
        for known in masks[0], build(window(90), q_len=LENGTH, kv_len=LENGTH):
            assert packax.masks.stack_masks([known, other])[1].halos_suffice is not None
        return packax.masks.stack_masks(masks[:2])[1], packax.masks.stack_masks(masks)

    def gradients(query, key, value):
        mask = alike_and_stack()[1][0]
        return jax.grad(lambda *x: packax.flash_attention(*x, mask).sum(), (0, 1, 2))(
            query, key, value
        )

    with jax.set_mesh(mesh_of(2, axes=("context",))):
        alike, stack = jax.eval_shape(alike_and_stack)
        assert alike.halo[3:5] == (128, 0) and alike.fetched == 128
        assert len(alike.shared_parts) == 1 and alike.halos_suffice is None
        assert stack.masks.halo == alike.halo and stack.masks.fetched == LENGTH // 2
        kinds = jax.jit(lambda: alike_and_stack()[1].masks.halos_suffice)()
        assert kinds.tolist() == [[1], [1], [0], [0]]
        found = branches(gradients, *tensors()[:3])
    halos, gathers, back = {"ppermute"}, {"all_gather"}, {"all_gather", "reduce_scatter"}
    assert found == [gathers, halos, back, halos]


ONCE = np.where(ROWS[:, :90] == 5, 9, ROWS[:, :90])
ONCE = np.concatenate([ONCE, ROWS[:, 90:]], 1)  # without the id that reappears
IN_ORDER = np.stack([positions_of(row) for row in ONCE])


@pytest.mark.parametrize(
    "kind, ids, positions, suffice",
    [
        ("zigzag", ONCE, IN_ORDER + 7, True),
        *some(
            [
                (None, ONCE, IN_ORDER // 2, False),
                (None, ONCE, 3 * IN_ORDER, True),
                (None, ROWS, IN_ORDER, False),
                ("zigzag", ONCE, IN_ORDER[:, ::-1], False),
                ("balanced", ONCE, IN_ORDER, True),
            ]
        ),
    ],
)
def test_windows_of_positions(kind, ids, positions, suffice):
    """Halos suffice for documents in order; the device checks whether they are."""
    plan = plan_of(kind, 2, 256 if kind == "balanced" else None)
    expected = None
    for sharding in (None, CONTEXT):
        inputs = moved(None if sharding is None else plan, tensors())

        @jax.jit
        def both(ids, positions, *inputs, sharding=sharding):
            expression = window(100) & packax.documents(ids, positions=positions)
            of = None if sharding is None else plan
            mask = packax.create_attention_mask(expression, sharding=sharding, plan=of)
            assert (getattr(mask, "halo", None) is None) == (sharding is None)
            return getattr(mask, "halos_suffice", None), all_results(*inputs, mask)

        with jax.set_mesh(mesh_of(2 if sharding else 1, axes=("context",))):
            halos_suffice, got = jax.block_until_ready(both(ids, positions, *inputs))
        if sharding is None:
            expected = got
    assert halos_suffice.tolist() == [suffice]
    assert_same(in_order(plan, got), expected)


def test_all_devices_take_one_branch():
    """Also if a shard_map gives each device one batch row: a collective waits for all devices."""
    mesh, spec = mesh_of(2, 2, axes=("data", "context")), P("data", "context")
    sharding = packax.AttentionSharding(spec, spec)
    positions = np.stack([IN_ORDER[0], IN_ORDER[0, ::-1]])

    def suffice(ids, positions):
        expression = window(100) & packax.documents(ids, positions=positions)
        return packax.create_attention_mask(expression, sharding=sharding).halos_suffice

    mapped = jax.shard_map(
        suffice, mesh=mesh, in_specs=P("data"), out_specs=P(("data", "context"))
    )  # fmt: skip
    with jax.set_mesh(mesh):
        assert jax.jit(mapped)(ONCE[:2], positions).tolist() == [0] * 4


def test_what_reads_all_keys():
    """A bias array and dropout index keys in sequence order, so they gather all keys."""
    query, key, value, *_ = tensors()
    with jax.set_mesh(mesh_of(2, axes=("context",))):
        mask = packax.create_attention_mask(window(100) & DOCUMENTS, sharding=CONTEXT)
        for more, gathers in (
            ({}, False),
            ({"bias": jnp.zeros((1, 1, 1, LENGTH))}, True),
            ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, True),
        ):
            function = functools.partial(packax.flash_attention, **more)
            text = str(jax.make_jaxpr(function)(query, key, value, mask))
            assert ("all_gather" in text) == gathers != ("ppermute" in text)


@pytest.mark.exhaustive
def test_bytes_of_the_guide():
    """The table of MiB by ranks and windows."""
    page = (DOCS / "guide" / "context_parallelism.md").read_text()
    _, table = page.split("| row | ranks | all keys |")
    lines = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[2:]]
    assert len(lines) == 6
    for row, ranks, every, *windows in lines:
        ids = np.zeros(int(row[:-1]) << 10, np.int32)
        for kind, place in (("zigzag", 0), ("balanced", 1)):
            plan = packax.context_plan(CAUSAL & packax.documents(ids), ranks=int(ranks), kind=kind)
            expressions = [CAUSAL, *(window(n - 1) for n in (128, 512, 1024, 4096))]
            found = [plan.traffic(int(ranks), 4096, x)["inside"] / 2**20 for x in expressions]
            documented = [int(every), *(int(x.split(", ")[place]) for x in windows)]
            assert found == documented, (row, ranks, kind)
