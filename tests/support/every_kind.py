"""Every kind of mask, built from arrays that vmap may map or that may have symbolic sizes."""

from __future__ import annotations

import numpy as np
import packax

B, S = 3, 14


def documents(a, **more):
    return packax.documents(a["ids"], **more)


def by_positions(a):
    return documents(a, positions=a["positions"])


# Built from arrays (B, S) or (B,), so that vmap can map them or their sizes can be symbolic.
KINDS = {
    "full": lambda a: packax.full(),
    "causal": lambda a: packax.causal(),
    "causal, offset": lambda a: packax.causal(2) & documents(a),
    "causal, an offset of each row": lambda a: packax.causal(a["offset"]),
    "sliding window": lambda a: packax.sliding_window(3, 1),
    "sliding window, left alone": lambda a: packax.sliding_window(4) & documents(a),
    "sliding window, offset": lambda a: packax.sliding_window(4, 2, offset=a["offset"]),
    "sliding window by positions": lambda a: packax.sliding_window(2) & by_positions(a),
    "chunked": lambda a: packax.causal() & packax.chunked(4),
    "chunked by positions": lambda a: packax.chunked(3) & by_positions(a),
    "prefix": lambda a: packax.prefix(a["lengths"]) & documents(a),
    "prefix of each row": lambda a: packax.prefix(a["span_ids"] + 4) & by_positions(a),
    "spans": lambda a: packax.masks.spans(a["span_ids"], packax.sliding_window(3)) & documents(a),
    "documents": lambda a: documents(a),
    "documents by positions": lambda a: packax.causal() & by_positions(a),
    "documents, other ids of keys": lambda a: packax.documents(
        a["ids"], kv_segment_ids=a["span_ids"]
    ),
    "ranges": lambda a: packax.masks.ranges(a["lo"], a["lo"] + a["offset"][:, None]) & documents(a),
    "block sparse": lambda a: packax.masks.block_sparse(a["map"], 1) & by_positions(a),
    "tree": lambda a: packax.masks.tree(a["segments"], a["parents"]) & packax.causal(),
    "tree and window": lambda a: (
        packax.masks.tree(a["segments"], a["parents"]) & packax.sliding_window(3, 1) & documents(a)
    ),
    "shared prefix": lambda a: (
        packax.masks.shared_prefix(a["groups"], a["answers"]) & packax.prefix(a["lengths"])
    ),
    "one or the other": lambda a: packax.causal() & packax.chunked(5) | packax.sliding_window(2),
    "or on one side": lambda a: packax.causal(1) | packax.prefix(a["lengths"]),
}


def arrays(length=S, batch=B, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 3, (batch, length))
    return {
        "ids": ids.astype(np.int32),  # unsorted: ids are compared per element
        "positions": rng.integers(0, 9, (batch, length)).astype(np.int32),
        "span_ids": np.sort(rng.integers(-1, 4, (batch, length))).astype(np.int32),
        "map": rng.random((batch, length, length)) < 0.4,
        "lo": rng.integers(-2, length, (batch, length)).astype(np.int32),
        "lengths": rng.integers(0, max(length, 1), batch).astype(np.int32),
        "offset": rng.integers(1, 5, batch).astype(np.int32),
    } | of_trees(rng, batch, length)


def of_trees(rng, batch, length):
    """A root with two branches, one of which branches again, a second tree, and groups of three."""
    segments = np.sort(rng.integers(0, 7, (batch, length)))
    padded = rng.random((batch, length)) < 0.1
    groups = np.broadcast_to(np.arange(length) // 9, (batch, length))
    answers = np.broadcast_to(np.arange(length) % 9 // 3 - 1, (batch, length))
    trees = {
        "segments": np.where(padded, -1, segments),
        "parents": np.broadcast_to([-1, 0, 1, 1, 0, -1, 5], (batch, 7)),
        "groups": groups,
        "answers": answers,
    }
    return {name: x.astype(np.int32) for name, x in trees.items()}
