"""The masks of a local plan's parts: together they equal the expression, for every mask kind.

Guards against limits of the whole sequence applied inside a part, rows that attend in two parts,
and pieces of another rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import CONTEXT, LENGTH, mesh_of
from jax.sharding import PartitionSpec as P
from local_cases import KINDS, ROWS, expression_of
from local_plans import check_local, greedy
from packax._src.context.load_balance import checksum
from tiers import some

LEVELS = {  # by number of levels
    len(axes): packax.AttentionSharding(query=P(None, axes), key_value=P(None, axes))
    for axes in (("host", "gpu"), ("host", "switch", "gpu"))
}


def build(expression, plan, ranks, sharding=CONTEXT, **keywords):
    axes, sizes = ("context",), (ranks,)
    if isinstance(ranks, tuple):
        sharding, axes, sizes = LEVELS[len(ranks)], LEVELS[len(ranks)].query[1], ranks
    with jax.set_mesh(mesh_of(*sizes, axes=axes)):
        return packax.create_attention_mask(expression, sharding=sharding, plan=plan, **keywords)


def piece(mask, specs, rank, sizes):
    """A rank's part, split as the specs say; sizes: of the mesh axes by name."""
    places = dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values())), strict=True))

    def of(x, spec):
        x = np.asarray(x)
        for axis, over in enumerate(spec):
            for name in over if isinstance(over, tuple) else () if over is None else (over,):
                x = np.split(x, sizes[name], axis)[places[name]]
        return x

    return jax.tree.map(of, mask, specs)


def attended(mask, plan):
    """The dense mask in sequence order, assembled from the masks of the parts."""
    ranks = plan.ranks
    batch, rows_per_rank = mask.kv_start.shape[0], plan.length // ranks
    order = np.broadcast_to(plan.order, (batch, plan.length)).reshape(batch, ranks, rows_per_rank)
    found = np.zeros((batch, plan.length, plan.length), bool)
    specs = mask.sharding.mask_specs(mask)
    names = mask.sharding.query[1]
    names = names if isinstance(names, tuple) else (names,)
    sizes = dict(zip(names, plan.levels or (ranks,), strict=True))
    shared = [(groups, rows) for groups, rows in plan.parts if rows > 0]
    for rank in range(ranks):
        parts = [(order[:, rank], order[:, rank], mask.private_part, specs.private_part)]
        for (groups, rows), part, spec in zip(
            shared, mask.shared_parts, specs.shared_parts, strict=True
        ):
            group = rank // (ranks // groups)
            # Hosts are gathered before the ranks inside a host, which puts the inner axes first.
            gathered = order.reshape(batch, groups, ranks // groups, rows_per_rank)[
                :, group, :, :rows
            ]
            inner = [size for size in plan.levels or (ranks,) if size > 1]
            while len(inner) > 1 and np.prod(inner) > ranks // groups:
                inner.pop(0)
            gathered = gathered.reshape(batch, *inner, rows)
            gathered = gathered.transpose(0, *range(len(inner), 0, -1), len(inner) + 1)
            keys = gathered.reshape(batch, -1)
            places = np.broadcast_to(
                piece(part, spec, rank, sizes).kv_plan[:, 1], (batch, keys.shape[1])
            )
            keys = np.take_along_axis(keys, places, 1)
            parts.append((order[:, rank, :rows], keys, part, spec))
        for rows, keys, part, of_part in parts:
            pairs = np.asarray(piece(part, of_part, rank, sizes).as_array())
            for row, at, index, keys_of_row in zip(found, pairs, rows, keys, strict=True):
                assert not (row[index].any(1) & at.any(1)).any(), "a row is in two parts"
                row[np.ix_(index, keys_of_row)] |= at
    return found


@pytest.mark.filterwarnings("ignore:prefix")
@pytest.mark.parametrize("number,kind", some(enumerate(KINDS), 10), ids=KINDS)
def test_parts_are_the_expression(number, kind):
    ranks = (4, 8, (2, 4), (2, 2, 2))[number % 4]
    ids = ROWS[1] if kind == "one mask for all" else ROWS
    plan = greedy(ids, ranks)
    check_local(plan, ids)
    mask = build(expression_of(kind), plan, ranks)
    expected = np.asarray(expression_of(kind).as_array(LENGTH, LENGTH))
    expected = np.broadcast_to(expected, (len(mask.kv_start), LENGTH, LENGTH))
    np.testing.assert_array_equal(attended(mask, plan), expected)
    of_rows = np.take_along_axis(expected, np.asarray(plan.order)[:, :, None], 1)
    np.testing.assert_array_equal(np.asarray(mask.as_array()), of_rows)


LENGTHS = {
    "odd": [33, 1, 1, 30, 7, 64, 12, 3, 3, 17, 29, 40],
    "tokens alone": [1] * 240,
    "one document": [240],
    "one document and tokens": [201] + [1] * 39,
}


@pytest.mark.parametrize("lengths", some(LENGTHS, 0, 1))
def test_any_lengths(lengths):
    """No part has whole tiles, and ranks may need unequal numbers of rows."""
    ids = np.repeat(np.arange(len(LENGTHS[lengths])), LENGTHS[lengths])
    plan = greedy(ids, 4)
    check_local(plan, ids)
    expression = packax.causal() & packax.documents(ids)
    mask = build(expression, plan, 4)
    expected = expression.as_array(240, 240)[None]
    if lengths == "one document":
        assert plan.shared == 60 and mask.private_part is None
        found = np.asarray(mask.as_array())
        np.testing.assert_array_equal(found[0][plan.inverse[0]], expected[0])
        return
    assert (not mask.shared_parts) == (plan.shared == 0) == (lengths == "tokens alone")
    np.testing.assert_array_equal(attended(mask, plan), expected)


def test_padding_alone():
    """Rows without keys may be on any rank."""
    ids = np.full((2, 256), -1)
    ids[1, 5:9] = 3
    plan = greedy(ids, 4)
    mask = build(packax.documents(ids), plan, 4)
    np.testing.assert_array_equal(attended(mask, plan), packax.documents(ids).as_array(256, 256))


def test_all_keys_are_gathered_where_documents_do_not_say_enough():
    """Block masks, no documents, separate ids of keys, replicated keys, or keys in sequence order:
    the mask is built as for any other plan."""
    plan = greedy(ROWS, 4)
    documents = packax.documents(ROWS)
    chosen = packax.masks.block_sparse(np.ones((8, 8), bool), 128)
    replicated = packax.AttentionSharding(query=P(None, "context"), key_value=P())

    def parts(expression, sharding=CONTEXT, **keywords):
        def build():
            return packax.create_attention_mask(
                expression, sharding=sharding, plan=plan, **keywords
            )

        with jax.set_mesh(mesh_of(4, axes=("context",))):
            mask = jax.eval_shape(build)
        return mask.private_part, mask.shared_parts

    for expression, keywords in (
        (documents & chosen, {}),
        (packax.causal(), {"q_len": LENGTH, "kv_len": LENGTH}),
        (packax.documents(ROWS, kv_segment_ids=ROWS), {}),
        (documents, {"sharding": replicated}),
        (documents, {"permuted_keys": False}),
    ):
        private, shared = parts(expression, **keywords)
        assert private is None and not shared, expression
    private, shared = parts(documents)
    assert private is not None and len(shared) == 1
    assert packax.create_attention_mask(documents, plan=plan).private_part is None


def test_a_plan_of_other_documents_is_found_out():
    """plan_mismatch marks exactly the batch rows that differ, wherever one token differs."""
    plan = jax.tree.map(jnp.asarray, greedy(ROWS, 4))
    for place in (0, 512, LENGTH - 1):
        ids = np.array(ROWS)
        ids[3, place] = 1000
        mask = build(packax.causal() & packax.documents(ids), plan, 4)
        np.testing.assert_array_equal(mask.plan_mismatch, [0, 0, 0, 1])
    mask = build(packax.causal() & packax.documents(ROWS), plan, 4)
    np.testing.assert_array_equal(mask.plan_mismatch, [0] * 4)


def test_a_checksum_is_the_same_on_host_and_device():
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**31), 2**31, (64, 999)).astype(np.int32)
    np.testing.assert_array_equal(checksum(ids), jax.jit(checksum)(ids))
    # Ids in another order, with another start, or in runs of another length have different
    # checksums.
    others = [np.arange(999) // n + first for n in range(1, 9) for first in range(-9, 9)]
    sums = checksum(np.array([*others, *(x[::-1] for x in others)], np.int32))
    assert len({*sums.tolist()}) == len(sums)


def test_check_plan_is_about_the_order_alone():
    """A plan of other documents is not a wrong order: the check passes, and its mask has no
    parts."""
    plan, other = greedy(ROWS, 4), np.array(ROWS)
    other[2] = 9
    masks = [build(packax.causal() & packax.documents(ids), plan, 4) for ids in (ROWS, other)]
    assert masks[0].private_part is not None and masks[1].private_part is None
    with packax.context.debug_checks(), jax.set_mesh(mesh_of(4, axes=("context",))):
        packax.context.check_plan(masks[0], segment_ids=plan.permute(ROWS))
        with pytest.raises(ValueError, match="the batch was not permuted"):
            packax.context.check_plan(masks[0], segment_ids=ROWS, positions=np.arange(LENGTH)[None])
        packax.context.check_plan(masks[1], segment_ids=plan.permute(other))


def test_what_a_plan_fetches():
    plan = greedy(ROWS, 4)
    assert plan.fetched == 3 * plan.shared and 0 < plan.shared < 256
    assert packax.context_plan(packax.documents(ROWS), ranks=4).fetched == 3 * 256


def test_a_mask_with_parts_under_vmap_and_in_words():
    mask = build(packax.causal() & packax.documents(ROWS), greedy(ROWS, 4), 4)
    axes = mask.vmap_axes()
    assert axes.private_part.kv_start == axes.shared_parts[0].kv_plan == 0
    inside = jax.tree.map(lambda x: x[0], mask).with_batch()
    (of_row,), (shared,) = inside.shared_parts, mask.shared_parts
    assert of_row.kv_start.shape == (1, shared.kv_start.shape[1])
    assert f"{shared.kv_len} keys are attended by more than one rank" in repr(mask)
