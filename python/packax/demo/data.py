"""Packs the sources of Python's standard library into rows of bytes.

A document is one `.py` file as bytes plus an end byte. `packax.segments.pack` fills the rows; a
document longer than a row is cut into pieces, and a piece counts as a document.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import packax
from packax import segments

VOCABULARY = 256
END = 0  # ends every document; documents contain no zero byte


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows, all (rows, seq_len) int32. Padding: token END, segment -1, position 0."""

    tokens: np.ndarray
    segment_ids: np.ndarray  # from 0 within each row
    positions: np.ndarray  # from 0 within each document
    documents: int
    parts: int  # how many of `documents` are pieces of a file longer than a row

    @property
    def fill(self) -> float:
        return float(np.mean(self.segment_ids != packax.PADDING_SEGMENT_ID))


def standard_library() -> list[bytes]:
    """The sources of this Python's standard library, one document per file, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    documents = []
    for path in sorted(root.rglob("*.py")):
        # Debian's sitecustomize.py is a link, whose target may be absent.
        if path.is_file() and skipped.isdisjoint(path.relative_to(root).parts):
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

    Only the first `limit` rows are kept (0: all).
    """
    files = [np.frombuffer(document + bytes([END]), np.uint8) for document in documents]
    packed = segments.pack(files, seq_len, padding_token=END)
    kept = np.random.default_rng(seed).permutation(len(packed.tokens))[: limit or None]
    tokens, segment_ids, positions, source = (x[kept] for x in packed)
    sizes = [len(file) for file in files]
    starts = source[(positions == 0) & (source >= 0)]
    parts = np.repeat(np.array(sizes) > seq_len, sizes)[starts]
    return Rows(tokens, segment_ids, positions, len(starts), int(parts.sum()))
