"""The benchmark cases as data: the board's by name, one more at head dim 64, and 1M tokens."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: int
    peers: bool = True  # timed beside cuDNN; False: packax alone

    @property
    def lengths(self) -> list[int]:
        return document_lengths(self.seq, self.documents)

    @property
    def area(self) -> int:
        """Attended (query, key) pairs of one head, whole batch: causal inside every document."""
        return self.batch * sum(n * (n + 1) // 2 for n in self.lengths)

    @property
    def forward_flops(self) -> float:
        """Two matrix products of 2·D operations a pair; the backward has five."""
        return 4.0 * self.heads * self.head_dim * self.area

    @property
    def backward_flops(self) -> float:
        return 2.5 * self.forward_flops

    def segment_ids(self) -> np.ndarray:
        row = np.repeat(np.arange(1, self.documents + 1, dtype=np.int32), self.lengths)
        return np.broadcast_to(row, (self.batch, self.seq)).copy()


def document_lengths(total: int, count: int, seed: int = 0) -> list[int]:
    """`count` lengths, multiples of 64, that sum to `total`: the gaps between uniformly drawn cuts.

    The draw is numpy's legacy generator: these are the lengths that the peers were measured on.
    """
    if count == 1:
        return [total]
    cuts = np.random.RandomState(seed).choice(np.arange(1, total // 64), count - 1, replace=False)
    edges = [0, *sorted(int(cut) * 64 for cut in cuts), total]
    return [end - start for start, end in itertools.pairwise(edges)]


CASES = (
    Case("causal_16k_d128", 1, 16384, 32, 8, 128, 1),
    Case("docs12_32k_d128", 1, 32768, 32, 8, 128, 12),
    Case("docs12_128k_d128", 1, 131072, 32, 8, 128, 12),
    Case("docs64_32k_d128", 1, 32768, 32, 8, 128, 64),
    Case("docs12_32k_d64", 1, 32768, 32, 8, 64, 12),
    Case("causal_16k_d64", 1, 16384, 32, 8, 64, 1),
    Case("docs12_1m_d64", 1, 1 << 20, 8, 2, 64, 12, peers=False),
)


def select(names: str | None) -> list[Case]:
    """The cases of a comma-separated list (None: all), in the table's order."""
    if names is None:
        return list(CASES)
    wanted = names.split(",")
    known = {case.name for case in CASES}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(
            f"--cases: no case named {', '.join(unknown)}; there are: {', '.join(sorted(known))}"
        )
    return [case for case in CASES if case.name in wanted]
