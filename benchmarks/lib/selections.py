"""Block masks for mask_cases.py, selected as by MoBA's gate or an indexer: for each row, the
earlier keys with the highest scores.

Scores are products of random features of rows and keys. Features change slowly over `alike` rows or
keys, so neighboring rows select similar blocks, as in text; with `alike` 1, they are independent.
The work that a block mask saves depends on this, so results list both the fraction of pairs that it
keeps and the fraction of blocks that the kernels visit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lib.mask_cases import OptionCase, Selection

FEATURES = 32
ROWS, KEYS = 128, 64  # the blocks that the kernels visit or skip
CHUNK = 2048


def tables(case: OptionCase) -> dict[str, np.ndarray]:
    """case.tables(), with "chosen" for a selection: bool, (H or 1, blocks of rows, blocks of
    keys)."""
    if case.selection is None:
        return case.tables()
    return case.tables() | {"chosen": chosen(case, case.selection)}


def chosen(case: OptionCase, of: Selection) -> np.ndarray:
    heads = case.heads if of.by_head else 1
    rows, keys = (
        _features(jax.random.key(seed), (heads, -(-case.seq // size)), of.alike // size)
        for seed, size in ((2, of.rows), (3, of.keys))
    )
    parts = [
        np.asarray(_choose(of, rows[:, at : at + CHUNK], keys, at))
        for at in range(0, rows.shape[1], CHUNK)
    ]
    return np.concatenate(parts, 1)


def _features(key: jax.Array, shape: tuple[int, int], alike: int) -> jax.Array:
    """(heads, number, FEATURES): moving averages over `alike` random features, scaled."""
    alike = max(1, alike)
    x = jax.random.normal(key, (shape[0], shape[1] + alike, FEATURES))
    sums = jnp.cumsum(x, axis=1)
    return (sums[:, alike:] - sums[:, :-alike]) * alike**-0.5


@functools.partial(jax.jit, static_argnums=0)
def _choose(of: Selection, rows: jax.Array, keys: jax.Array, at: Any) -> jax.Array:
    """bool, (heads, rows, keys): the selection for blocks of rows from `at` on."""
    scores = jnp.einsum("hif,hnf->hin", rows, keys, precision="highest")
    first_row = ((at + jnp.arange(rows.shape[1])) * of.rows)[:, None]
    first_key = jnp.arange(keys.shape[1]) * of.keys
    before = first_key < first_row + of.rows
    if of.own:
        scores = jnp.where(first_key + of.keys > first_row, jnp.inf, scores)
    scores = jnp.where(before, scores, -jnp.inf)
    least = jax.lax.top_k(scores, min(of.top, keys.shape[1]))[0][..., -1:]
    return before & (scores >= least)


def pairs(case: OptionCase, of: Selection, chosen: np.ndarray) -> float:
    """The attended pairs per head, averaged over heads, of the block mask joined with causal."""
    first_key, total = np.arange(chosen.shape[2], dtype=np.int32) * of.keys, 0
    for at in range(0, case.seq, CHUNK):
        i = np.arange(at, min(at + CHUNK, case.seq), dtype=np.int32)
        held = np.clip(i[:, None] + 1 - first_key, 0, of.keys)
        for head in chosen:
            total += int(np.sum(held, where=head[i // of.rows], dtype=np.int64))
    return total / len(chosen)


def shares(case: OptionCase, mask: Any, attended: float) -> dict[str, float]:
    """Attended pairs and visited blocks, as fractions of those of causal attention."""
    ends = np.minimum(np.arange(ROWS, case.seq + ROWS, ROWS), case.seq)
    visited = np.asarray(mask.q_block_lists[:, :, :, :2], np.int64).sum((0, 2, 3)).mean()
    return {
        "pairs": attended / (case.seq * (case.seq + 1) / 2),
        "blocks": float(visited / np.sum(-(-ends // KEYS))),
    }
