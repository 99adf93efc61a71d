"""Pack documents into rows, and check that no document in a row attends to another.

    python examples/pack_documents.py

Needs only packax; runs on a CPU or a GPU. The other examples import `pack` and `batches`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import packax
from packax import segments


class Rows(NamedTuple):
    """Arrays of (rows, length)."""

    tokens: np.ndarray
    segment_ids: np.ndarray  # 0, 1, 2, ... in each row; -1: padding
    positions: np.ndarray  # from 0 in each document
    targets: np.ndarray  # the next token of the same document
    weights: np.ndarray  # 1, or 0 without a target


def pack(documents: list[np.ndarray], length: int) -> Rows:
    tokens, segment_ids, positions, _ = segments.pack(documents, length)
    return Rows(tokens, segment_ids, positions, *segments.next_tokens(tokens, segment_ids))


def sources(count: int = 200) -> list[np.ndarray]:
    """Documents that come with every Python: modules of the standard library, as bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    return [text for text in texts if len(text)]


def batches(rows: Rows, size: int, steps: int, seed: int = 0) -> Iterator[Rows]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.integers(0, len(rows.tokens), size)
        yield Rows(*(x[chosen] for x in rows))


def planned(batch: Rows, ranks: int) -> tuple[Rows, np.ndarray, packax.context.ContextPlan]:
    """For context parallelism over `ranks` GPUs: the batch in a plan's order, its ids in their
    original order (the mask is built from those and the plan), and the plan. Plain numpy, for a
    data loader."""
    expression = packax.causal() & packax.documents(batch.segment_ids)
    plan = packax.context_plan(expression, ranks=ranks, kind="local")
    return plan.permute(batch), batch.segment_ids, plan


def main() -> None:
    length, heads, dim = 1024, 2, 64
    rows = pack(sources(60), length)
    print(segments.check_packing(*rows[1:4], tokens=rows.tokens, weights=rows.weights))

    # For a model on two GPUs, the loader passes on a plan with each batch.
    batch = next(batches(rows, size=1, steps=1))
    moved, segment_ids, plan = planned(batch, ranks=2)
    np.testing.assert_array_equal(plan.unpermute(moved.tokens), batch.tokens)
    assert segment_ids is batch.segment_ids
    print(f"with two GPUs, each fetches {plan.fetched} of the other's {length // 2} keys")

    # The row with the most documents, attended as a whole and document by document.
    row = int(np.argmax(rows.segment_ids.max(1)))
    ids = rows.segment_ids[row]
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (
        jax.random.normal(k, (1, length, heads, dim)).astype(jnp.bfloat16) for k in keys
    )
    attend = jax.jit(packax.flash_attention)
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    together = np.asarray(attend(query, key, value, mask), np.float32)
    for document in range(min(3, ids.max() + 1)):
        (place,) = np.nonzero(ids == document)
        one = packax.create_attention_mask(packax.causal(), q_len=len(place), kv_len=len(place))
        alone = attend(query[:, place], key[:, place], value[:, place], one)
        difference = np.abs(together[:, place] - np.asarray(alone, np.float32)).max()
        print(f"document {document}, {len(place)} tokens: largest difference {difference:.1e}")
        assert difference < 0.02
    assert not together[:, ids == packax.PADDING_SEGMENT_ID].any()


if __name__ == "__main__":
    main()
