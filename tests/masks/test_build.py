"""create_attention_mask: its arrays allow exactly the pairs that the expression allows."""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import parse
from mask_checks import check
from packings import positions_of
from tiers import some

# Of several tiles, a part of one, or one row. tests/table compares `as_array` with definitions, and
# test_intervals.py draws expressions over shorter rows.
CASES = [
    "interval=causal,lengths=150x333",
    "interval=causal,lengths=256x256",
    "interval=offset,lengths=190x310",
    "lengths=1x321",
    "interval=causal,selector=packed,lengths=409x409",
    "selector=packed,rows=one mask,lengths=409x409",
    "interval=window 50 3,selector=packed,lengths=409x409",
    "interval=chunked 100,selector=packed,lengths=409x409",
    "interval=prefix,selector=packed,lengths=409x409",
    "interval=spans,selector=packed,lengths=409x409",
    "interval=union 64 30,lengths=409x409",
    "selector=ranges,lengths=190x310",
    "interval=causal,lengths=333x150",
    "interval=causal,lengths=1000x1000",
    "lengths=1x1",
]
SEGMENT_CHECKED = [  # these alone may need the comparison of the ids of every pair
    "interval=causal,selector=documents,lengths=409x409",
    "interval=spans,selector=positions,lengths=409x409",
    "interval=window 15 10,selector=any positions,lengths=409x409",
    "selector=kv ids,lengths=173x300",
    "interval=causal,selector=positions,lengths=101x261",
    "interval=causal,selector=any positions,lengths=333x333",
]
ROWS = [(text, False) for text in CASES] + [(text, True) for text in SEGMENT_CHECKED]


@pytest.mark.parametrize("text,checked", some(ROWS, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16, 17))
def test_arrays(text, checked):
    call = parse(text)
    a = call.arrays()
    mask, expression = call.built(a), call.expression(a)
    check(mask, expression)
    assert bool((np.asarray(mask.q_blocks)[:, 4] & 1).any()) == checked


ODD = np.repeat(np.int32([0, 1, 2, 3, 4, 5, 6]), [1, 17, 128, 63, 131, 64, 5])


def test_leaves_are_as_documented():
    ids = np.stack([ODD, ODD[::-1]])
    kv_ids = np.zeros((1, 300), np.int32)
    mask = packax.create_attention_mask(
        packax.causal()
        & packax.documents(
            ids, kv_segment_ids=kv_ids, positions=ODD, kv_positions=np.zeros(300, np.int32)
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
    ids, positions = ODD, positions_of(ODD)
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


def test_memory_is_linear():
    def temporary(length):
        def build(ids):
            return packax.create_attention_mask(packax.causal() & packax.documents(ids))

        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return jax.jit(build).lower(ids).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1 << 18) < 4.5 * temporary(1 << 16)
