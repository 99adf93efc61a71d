"""Hypothesis strategies for masks, with few distinct lengths, so that each shape compiles once."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

LENGTHS = (1, 5, 64, 130)
# Small ids, padding, extremes, ids that share a slot of the tables (1024 slots at these lengths).
IDS = (-1, 0, 1, 2, 3, 1024, 1025, 5 * 1024, -1024, -2, 2**31 - 1, -(2**31))

lengths = st.sampled_from(LENGTHS)


def _fill(values, lengths, total):
    """Runs of values, cut or repeated to the total length."""
    row = np.repeat(np.asarray(values, np.int32), lengths)
    return np.resize(row, total)


@st.composite
def ids(draw, length, batch):
    rows = []
    for _ in range(batch):
        runs = draw(
            st.lists(st.tuples(st.sampled_from(IDS), st.integers(1, 40)), min_size=1, max_size=8)
        )
        rows.append(_fill(*zip(*runs, strict=True), length))
    return np.stack(rows)


@st.composite
def positions(draw, length, batch):
    """Positions that rise in steps of 0 to 2 and now and then fall by 7."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    breaks = draw(st.sampled_from([0.0, 0.02, 0.5]))
    steps = rng.integers(0, 3, (batch, length))
    steps[rng.random((batch, length)) < breaks] = -7
    return (np.cumsum(steps, axis=1) - draw(st.integers(-5, 5))).astype(np.int32)


@st.composite
def bounds(draw, length, kv_len, batch):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.integers(-3, kv_len + 4, (2, batch, length))


@st.composite
def documents(draw, batch=None):
    """Arguments of documents(...), batched or not, for self- or cross-attention."""
    q_len = draw(lengths)
    cross = draw(st.booleans())
    kv_len = draw(lengths) if cross else q_len
    batch = draw(st.sampled_from([1, 2])) if batch is None else batch
    args = {"segment_ids": draw(ids(q_len, batch))}
    if cross:
        args["kv_segment_ids"] = draw(ids(kv_len, batch))
    if draw(st.booleans()):
        args["positions"] = draw(positions(q_len, batch))
        if cross or draw(st.booleans()):
            args["kv_positions"] = draw(positions(kv_len, batch))
    if batch == 1 and draw(st.booleans()):
        args = {name: x[0] for name, x in args.items()}
    return args, q_len, kv_len
