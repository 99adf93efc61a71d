"""Documents and rows: the standard library's own sources, packed at byte level.

A document is one `.py` file as bytes plus an end byte. Rows are filled with whole documents in
random order, each into the fullest row that still holds it; only a document longer than a row is
cut into pieces, and a piece counts as a document.
"""

from __future__ import annotations

import bisect
import dataclasses
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import packax

VOCABULARY = 256
END = 0  # ends every document; the sources hold no zero byte


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows, all (rows, seq_len) int32. Padding: token END, segment -1, position 0."""

    tokens: np.ndarray
    segment_ids: np.ndarray  # from 1 within each row
    positions: np.ndarray  # from 0 within each document
    documents: int
    parts: int  # of `documents`, those that are parts of a file longer than a row

    @property
    def fill(self) -> float:
        return float(np.mean(self.segment_ids != packax.PADDING_SEGMENT_ID))


def standard_library() -> list[bytes]:
    """The sources of this Python's standard library, one document a file, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    documents = []
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            text = path.read_bytes()
            if text and END not in text:
                documents.append(text)
    if not documents:
        raise FileNotFoundError(
            f"no .py files under {root}: this Python's standard library has no sources to train on"
        )
    return documents


def pack(documents: Sequence[bytes], seq_len: int, *, seed: int = 0, limit: int = 0) -> Rows:
    """Packs documents into rows of `seq_len` tokens, in random order.

    Of very many rows only the first `limit` are kept (0: all).
    """
    rng = np.random.default_rng(seed)
    pieces: list[np.ndarray] = []
    parts: list[bool] = []  # is the piece a part of a longer document?
    for document in documents:
        tokens = np.frombuffer(document + bytes([END]), np.uint8)
        pieces.extend(tokens[i : i + seq_len] for i in range(0, len(tokens), seq_len))
        parts.extend([len(tokens) > seq_len] * (len(pieces) - len(parts)))
    order = rng.permutation(len(pieces))
    layout = [order[row] for row in fit([len(pieces[piece]) for piece in order], seq_len)]
    rng.shuffle(layout)
    layout = layout[: limit or None]
    kept = np.concatenate(layout)

    shape = (len(layout), seq_len)
    tokens = np.full(shape, END, np.int32)
    segment_ids = np.full(shape, packax.PADDING_SEGMENT_ID, np.int32)
    positions = np.zeros(shape, np.int32)
    for row, members in enumerate(layout):
        start = 0
        for segment, member in enumerate(members, 1):
            piece = pieces[member]
            place = slice(start, start + len(piece))
            tokens[row, place] = piece
            segment_ids[row, place] = segment
            positions[row, place] = np.arange(len(piece))
            start = place.stop
    return Rows(tokens, segment_ids, positions, len(kept), int(np.sum(np.asarray(parts)[kept])))


def fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit: the indices of `lengths` in rows, each in the fullest row that holds it."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"a document of {length} tokens does not fit in a row of {capacity}")
        place = bisect.bisect_left(free, (length, 0))
        room, row = free.pop(place) if place < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if room > length:
            bisect.insort(free, (room - length, row))
    return rows


def targets(tokens: np.ndarray, segment_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(next token, weight): weight 1 where the next token lies in the same document, else 0."""
    following = np.roll(tokens, -1, axis=1)
    same = np.roll(segment_ids, -1, axis=1) == segment_ids
    same[:, -1] = False
    return following, (same & (segment_ids != packax.PADDING_SEGMENT_ID)).astype(np.float32)
