"""Named inputs for every implementation: small, of odd sizes, each aimed at one kind of failure."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import packax
from packax._src.masks.expressions import MaskExpression


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    why: str
    expression: Callable[[], MaskExpression]
    q_len: int = 409
    kv_len: int = 409
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1

    def tensors(self, dtype, qk_dim: int = 64, v_dim: int = 64):
        """query, key, value and dout in dtype, dlse (B, H, Sq) in float32; fixed by the name."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def normal(length, heads, dim):
            x = rng.standard_normal((self.batch, length, heads, dim), np.float32)
            return jnp.asarray(x, dtype)

        return (
            normal(self.q_len, self.heads, qk_dim),
            normal(self.kv_len, self.kv_heads, qk_dim),
            normal(self.kv_len, self.kv_heads, v_dim),
            normal(self.q_len, self.heads, v_dim),
            jnp.asarray(rng.standard_normal((self.batch, self.heads, self.q_len), np.float32)),
        )

    def allowed(self) -> np.ndarray:
        """The dense mask: (Sq, Skv), (B or 1, Sq, Skv) or (B or 1, H or 1, Sq, Skv)."""
        return np.asarray(self.expression().as_array(self.q_len, self.kv_len))

    def __str__(self) -> str:
        return self.name


def ids_of(*pieces: tuple[int, int]) -> np.ndarray:
    """Ids from (id, length) pieces."""
    return np.concatenate([np.full(length, value, np.int32) for value, length in pieces])


def positions_of(ids: np.ndarray) -> np.ndarray:
    """Positions that restart at every change of id."""
    starts = np.concatenate([[True], ids[1:] != ids[:-1]])
    index = np.arange(len(ids))
    return (index - np.maximum.accumulate(np.where(starts, index, 0))).astype(np.int32)


# Odd: three whole tiles of 128 and a partial one. A single length lets cases share compilations.
LENGTH = 409
ODD = ids_of((0, 1), (1, 17), (2, 128), (3, 63), (4, 131), (5, 64), (6, 5))
PADDED = ids_of((-1, 3), (0, 70), (-1, 61), (1, 100), (2, 1), (-1, 9), (3, 90), (-1, 75))
BACK = ids_of((7, 90), (8, 40), (7, 65), (9, 1), (8, 100), (-1, 13), (7, 100))
assert len(ODD) == len(PADDED) == len(BACK) == LENGTH
INT32 = np.iinfo(np.int32)


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
    Case("one_row", "one row, many keys", packax.full, 1, 321, heads=8),
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
        heads=4,
        kv_heads=2,
    ),
    Case("one_mask_for_all", "mask batch 1", lambda: _causal_documents(PADDED), batch=3),
    Case("gqa_1", "group 1", lambda: _causal_documents(ODD), heads=3, kv_heads=3),
    Case("gqa_4", "group 4", lambda: _causal_documents(ODD), heads=8, kv_heads=2),
    Case("gqa_8", "group 8", lambda: _causal_documents(ODD), heads=16, kv_heads=2),
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
    Case("cross_positions", "ids and positions of keys", _cross_positions, 101, 261, heads=4),
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


def random_map(seed, size, share, shape=(), lengths=(LENGTH, LENGTH)):
    """A random block mask with this share of blocks allowed, and its block sizes."""
    blocks = [-(-length // of) for length, of in zip(lengths, size, strict=True)]
    return np.random.default_rng(seed).random((*shape, *blocks)) < share, size


def _moba():
    """Each row attends its own block of keys and the top two of the earlier blocks, per head."""
    size, top = 64, 2
    scores = np.random.default_rng(5).random((1, 4, LENGTH, -(-LENGTH // size)))
    own = np.arange(LENGTH)[:, None] // size
    block = np.arange(scores.shape[-1])
    scores = np.where(block < own, scores, -1)
    best = np.sort(scores, axis=-1)[..., -top, None]
    return packax.causal() & packax.masks.block_sparse(
        ((scores >= best) & (block < own)) | (block == own), (1, size)
    )


def _indexer():
    """A mask of single keys, the same for all heads."""
    chosen, size = random_map(6, (1, 1), 0.1, (2,))
    return packax.masks.block_sparse(chosen, size) & packax.causal() & packax.documents(PADDED)


# Masks that only the fallback kernels support, so they are not in CASES.
SPARSE = [
    Case("moba", "rows choose blocks of keys, heads their own", _moba, heads=4, kv_heads=2),
    Case("indexer", "keys one by one, a map for each batch row", _indexer, batch=2, heads=4),
    Case(
        "sparse_tiles",
        "whole tiles, full ones among them; rows that attend nothing",
        lambda: (
            packax.causal() & packax.masks.block_sparse(*random_map(7, (128, 128), 0.5, (1, 2)))
        ),
    ),
    Case(
        "sparse_threes",
        "blocks of odd sizes, on segment-checked rows, in batches and heads",
        lambda: (
            packax.masks.block_sparse(*random_map(8, (3, 5), 0.4, (2, 2)))
            & packax.documents(BACK, positions=positions_of(BACK))
            & packax.sliding_window(70, 9)
        ),
        batch=2,
    ),
    Case(
        "sparse_wide",
        "blocks longer than all there is, another length of keys, one map for documents of a batch",
        lambda: (
            packax.masks.block_sparse(*random_map(9, (100, 512), 0.6, (1, 4), (150, 333)))
            & packax.masks.ranges(*_random_ranges(4, 2, 150, 333))
        ),
        150,
        333,
        batch=2,
        heads=4,
        kv_heads=4,
    ),
]
BY_NAME = {case.name: case for case in CASES + SPARSE}

# Cases that differ from others only in lengths, heads, ids or the order of positions: they run
# under `-m exhaustive`.
AGAIN = {"one_token", "causal_tiles", "causal_long", "causal_tall", "documents_full"}
AGAIN |= {"single_tokens", "gqa_1", "gqa_8", "ids_alternate", "positions_prefix"}
AGAIN |= {"ranges_of_documents", "ranges_of_hulls", "window_of_documents"}
AGAIN |= {"full", "documents_odd", "gqa_4", "hashed_ids", "cross_documents", "positions_restart"}
AGAIN |= {"causal", "one_mask_for_all", "ids_reappear", "positions_fall"}
EACH_TIME = [index for index, case in enumerate(CASES) if case.name not in AGAIN]
assert len(BY_NAME) == len(CASES + SPARSE)
