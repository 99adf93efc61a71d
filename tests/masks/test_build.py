"""create_attention_mask: its arrays allow exactly the pairs that the expression allows."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from mask_checks import check
from tiers import some

# Only these cases may need the comparison of the ids of every pair.
SEGMENT_CHECKED = {
    "ids_reappear",
    "ids_alternate",
    "positions_reappear",
    "positions_fall",
    "ranges_of_hulls",
    "window_of_any_positions",
    "spans_of_positions",
}


@pytest.mark.parametrize("case", some(cases.CASES, *cases.EACH_TIME), ids=str)
def test_cases(case):
    expression = case.expression()
    mask = packax.create_attention_mask(expression, q_len=case.q_len, kv_len=case.kv_len)
    assert mask.kv_start.shape[0] in (1, case.batch)
    check(mask, expression)
    assert bool((np.asarray(mask.q_blocks)[:, 4] & 1).any()) == (case.name in SEGMENT_CHECKED)


def test_leaves_are_as_documented():
    ids = np.stack([cases.ODD, cases.PADDED])
    kv_ids = np.zeros((1, 300), np.int32)
    mask = packax.create_attention_mask(
        packax.causal()
        & packax.documents(
            ids, kv_segment_ids=kv_ids, positions=cases.ODD, kv_positions=np.zeros(300, np.int32)
        )
        & packax.masks.block_sparse(np.ones((1, 6, 9, 38), bool), (50, 8))
    )
    assert type(mask) is packax.AttentionMask  # only masks with a sharding or a plan have more
    assert {
        name: getattr(mask, name).shape
        for name in vars(mask)
        if (name[:2] in ("q_", "kv") or name == "block_mask") and "len" not in name
    } == {
        "kv_start": (2, 409),
        "kv_end": (2, 409),
        "q_ids": (2, 409),
        "q_pos": (2, 409),
        "kv_ids": (2, 300),
        "kv_pos": (2, 300),
        "q_blocks": (2, 5, 7),
        "kv_blocks": (2, 4, 5),
        "q_order": (2, 4),
        "q_order_192": (2, 3),
        "kv_order": (2, 3),
        "block_mask": (1, 6, 9, 2),
        "q_block_lists": (2, 6, 4, 2 + 5),
        "kv_block_lists": (2, 6, 3, 2 + 7),
    }
    assert mask.block_size == (50, 8)
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(mask))
    assert (mask.q_len, mask.kv_len, mask.mask_mode) == (409, 300, 2)


def test_what_is_not_needed_is_not_held():
    ids, positions = cases.ODD, cases.positions_of(cases.ODD)
    one = packax.create_attention_mask(packax.documents(ids, positions=positions))
    assert one.mask_mode == 1 and one.q_pos is None and one.kv_ids is None
    none = packax.create_attention_mask(packax.causal(), q_len=8, kv_len=8)
    assert none.mask_mode == 0 and none.q_ids is None
    # 16 bytes a token, plus the block summaries.
    by_position = packax.create_attention_mask(
        packax.causal() & packax.documents(np.tile(ids, 20), positions=np.tile(positions, 20))
    )
    size = sum(x.nbytes for x in jax.tree.leaves(by_position))
    assert size <= 16.7 * 20 * len(ids)


def test_lengths_come_from_arrays_or_keywords():
    ids = np.zeros(7, np.int32)
    assert packax.create_attention_mask(packax.documents(ids)).kv_len == 7
    cross = packax.documents(ids, kv_segment_ids=np.zeros(9, np.int32))
    mask = packax.create_attention_mask(packax.masks.ranges(ids, ids + 1) & cross, q_len=7)
    assert (mask.q_len, mask.kv_len) == (7, 9)
    mask = packax.create_attention_mask(packax.masks.ranges(ids, ids + 1), kv_len=np.int64(3))
    assert (mask.q_len, mask.kv_len) == (7, 3)


def test_is_a_pytree_that_crosses_jit_scan_and_remat():
    ids = jnp.asarray(np.stack([cases.ODD, cases.PADDED]))

    def build(ids):
        return packax.create_attention_mask(packax.causal() & packax.documents(ids))

    eager, jitted = build(ids), jax.jit(build)(ids)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)

    def body(mask, _):
        return mask, jax.checkpoint(lambda m: m.kv_end.sum())(mask)

    carried, _ = jax.jit(lambda m: jax.lax.scan(body, m, None, length=2))(eager)
    jax.tree.map(np.testing.assert_array_equal, eager, carried)


def test_memory_is_linear():
    def temporary(length):
        def build(ids):
            return packax.create_attention_mask(packax.causal() & packax.documents(ids))

        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return jax.jit(build).lower(ids).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1 << 18) < 4.5 * temporary(1 << 16)
