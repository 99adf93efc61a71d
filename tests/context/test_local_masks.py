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
from local_packings import ROWS
from local_plans import greedy
from packax._src.context.load_balance import checksum

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
