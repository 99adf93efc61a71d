"""create_attention_mask: its arrays allow exactly the pairs that the expression allows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from mask_checks import check
from packings import BACK, LENGTH, ODD, PADDED, ids_of, positions_of
from tiers import marked

INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    why: str
    expression: Callable[[], Any]
    q_len: int = LENGTH
    kv_len: int = LENGTH
    batch: int = 1

    def __str__(self) -> str:
        return self.name


def _causal_documents(ids, **more):
    return packax.causal() & packax.documents(ids, **more)


def _batch_of_three():
    one_document = ids_of((5, LENGTH))
    return np.stack([ODD, PADDED, one_document])


def _hashed():
    # Values 1024, 4096 and 2^20 apart share a slot of the id table's first hash.
    values = [INT32.min, INT32.max, 12, 12 + 1024, 12 + 4096, 12 + (1 << 20), -2, 0, 123456789]
    return ids_of(*((value, 18 + 7 * n) for n, value in enumerate(values)))[:LENGTH]


def _random_ranges(seed, batch, q_len, kv_len):
    rng = np.random.default_rng(seed)
    return rng.integers(-5, kv_len + 5, (2, batch, q_len))


def _window():
    index = np.arange(LENGTH)
    return packax.masks.ranges(index - 50, index + 1)


def _prefix():
    # Positions max(i, 99): the first 100 tokens attend to each other in both directions.
    return _causal_documents(ids_of((0, LENGTH)), positions=np.maximum(np.arange(LENGTH), 99))


def _falling():
    rng = np.random.default_rng(1)
    return _causal_documents(PADDED, positions=rng.integers(0, 60, len(PADDED)))


def _random_positions(seed, end):
    return np.random.default_rng(seed).integers(0, end, LENGTH)


def _images():
    """Adjacent spans of different ids, spans across document ends, and a span of one token."""
    return ids_of((-1, 10), (0, 30), (1, 60), (-1, 5), (0, 1), (-1, 100), (4, 129), (-1, 74))


def _cross():
    return packax.documents(
        ids_of((0, 33), (1, 70), (-1, 10), (3, 60)),
        kv_segment_ids=ids_of((1, 120), (3, 44), (-1, 30), (0, 106)),
    )


def _cross_positions():
    kv_ids = ids_of((1, 130), (2, 131))
    ids = ids_of((2, 50), (1, 51))
    return _causal_documents(
        ids,
        kv_segment_ids=kv_ids,
        positions=positions_of(ids) + 40,
        kv_positions=positions_of(kv_ids),
    )


CASES = [
    Case("one_token", "smallest shapes", packax.causal, 1, 1),
    Case("full", "no mask, partial last tiles", packax.full),
    Case("causal", "no ids", packax.causal),
    Case("causal_tiles", "whole tiles only", packax.causal, 256, 256, batch=2),
    Case("causal_long", "many tiles, mask-free cores", packax.causal, 1000, 1000),
    Case("causal_wide", "Sq < Skv: keys after the last row", packax.causal, 150, 333),
    Case("causal_tall", "Sq > Skv: rows after the last key", packax.causal, 333, 150),
    Case("one_row", "one row, many keys", packax.full, 1, 321),
    Case("documents_odd", "odd lengths", lambda: _causal_documents(ODD)),
    Case("documents_full", "documents both ways", lambda: packax.documents(ODD)),
    Case("padding", "at the start, the middle, the end", lambda: _causal_documents(PADDED)),
    Case("all_padding", "nothing at all", lambda: _causal_documents(ids_of((-1, LENGTH)))),
    Case("single_tokens", "one key per row", lambda: _causal_documents(np.arange(LENGTH))),
    Case(
        "batch_of_three",
        "different documents per row",
        lambda: _causal_documents(_batch_of_three()),
        batch=3,
    ),
    Case("one_mask_for_all", "mask batch 1", lambda: _causal_documents(PADDED), batch=3),
    Case("hashed_ids", "large, negative, colliding", lambda: _causal_documents(_hashed())),
    Case("ids_reappear", "hulls: segment-checked rows", lambda: _causal_documents(BACK)),
    Case("ids_alternate", "tested everywhere", lambda: packax.documents(np.arange(LENGTH) % 2)),
    Case(
        "positions_restart",
        "ordinary positions",
        lambda: _causal_documents(ODD, positions=positions_of(ODD)),
    ),
    Case(
        "positions_reappear",
        "an id that comes back, positions that restart",
        lambda: _causal_documents(BACK, positions=positions_of(BACK)),
    ),
    Case("positions_fall", "positions in any order", _falling),
    Case("positions_prefix", "equal positions: both ways", _prefix),
    Case("cross_documents", "ids of keys, in another order", _cross, 173, 300),
    Case("cross_positions", "ids and positions of keys", _cross_positions, 101, 261),
    Case("window", "ranges, one mask", _window),
    Case(
        "ranges_random",
        "no order at all, outside [0, Skv], empty rows",
        lambda: packax.masks.ranges(*_random_ranges(2, 2, 190, 310)),
        190,
        310,
        batch=2,
    ),
    Case(
        "ranges_of_documents",
        "three narrowings",
        lambda: _window() & _causal_documents(np.arange(LENGTH) // 77),
    ),
    Case(
        "ranges_of_hulls",
        "ranges narrow segment-checked rows until they attend nothing",
        lambda: (
            packax.masks.ranges(np.arange(LENGTH) - 3, np.arange(LENGTH)) & packax.documents(BACK)
        ),
    ),
    Case(
        "causal_offsets",
        "rows that continue a cache, another length in each row of the batch",
        lambda: packax.causal(offset=np.array([120, -7])),
        190,
        310,
        batch=2,
    ),
    Case(
        "window_of_documents",
        "Mistral: both ends are edges",
        lambda: packax.sliding_window(50) & packax.documents(ODD),
    ),
    Case(
        "chunked",
        "Llama 4, padding in chunks",
        lambda: _causal_documents(PADDED) & packax.chunked(100),
    ),
    Case("prefix", "the first keys for all", lambda: packax.prefix(99) & packax.documents(PADDED)),
    Case(
        "spans",
        "Gemma 3's local layers: images wider than the window, cut by documents",
        lambda: packax.masks.spans(_images(), packax.sliding_window(40)) & packax.documents(ODD),
    ),
    Case(
        "union",
        "`|`: the chunk, and never less than a window",
        lambda: (packax.causal() & packax.chunked(64)) | packax.sliding_window(30),
    ),
    Case(
        "window_of_positions",
        "two limits of positions, no row is tested",
        lambda: (
            packax.sliding_window(20, 3) & packax.documents(ODD, positions=2 * positions_of(ODD))
        ),
    ),
    Case(
        "window_of_any_positions",
        "two limits of positions, rows are tested",
        lambda: (
            packax.sliding_window(15, 10)
            & packax.documents(BACK, positions=_random_positions(3, 100))
        ),
        batch=3,
    ),
    Case(
        "spans_of_positions",
        "spans in documents that come back, positions that restart",
        lambda: (
            packax.masks.spans(_images(), packax.causal() & packax.chunked(32))
            & packax.documents(
                np.stack([BACK, ODD]), positions=np.stack([positions_of(BACK), positions_of(ODD)])
            )
        ),
        batch=2,
    ),
]

# Cases that differ from others only in lengths, heads, ids or the order of positions: they run
# under `-m exhaustive`.
AGAIN = {"one_token", "causal_tiles", "causal_long", "causal_tall", "documents_full"}
AGAIN |= {"single_tokens", "ids_alternate", "positions_prefix"}
AGAIN |= {"ranges_of_documents", "ranges_of_hulls", "window_of_documents"}
AGAIN |= {"full", "documents_odd", "hashed_ids", "cross_documents", "positions_restart"}
AGAIN |= {"causal", "one_mask_for_all", "ids_reappear", "positions_fall"}
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


@pytest.mark.parametrize("case", [marked([x], x.name not in AGAIN) for x in CASES], ids=str)
def test_cases(case):
    expression = case.expression()
    mask = packax.create_attention_mask(expression, q_len=case.q_len, kv_len=case.kv_len)
    assert mask.kv_start.shape[0] in (1, case.batch)
    check(mask, expression)
    assert bool((np.asarray(mask.q_blocks)[:, 4] & 1).any()) == (case.name in SEGMENT_CHECKED)


def test_leaves_are_as_documented():
    ids = np.stack([ODD, PADDED])
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
