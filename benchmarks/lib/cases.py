"""The benchmark cases: the board, more head dims, long rows, drawn lengths, short sequences, few
heads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from lib.output import picked


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    documents: int
    peers: bool = True  # False: only packax is timed
    v_dim: int = 0  # of values and output; 0: head_dim
    split: tuple[int, ...] = ()  # the documents' lengths, if they are not drawn
    group: str = "board"
    window: int = 0  # the maximum number of keys per row; 0: no window

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def lengths(self) -> list[int]:
        return list(self.split) or document_lengths(self.seq, self.documents)

    @property
    def area(self) -> int:
        """The attended pairs of one head in the whole batch: causal in each document."""
        short = ((n, min(n, self.window or n)) for n in self.lengths)
        return self.batch * sum(w * (w + 1) // 2 + (n - w) * w for n, w in short)

    @property
    def forward_flops(self) -> float:
        """Two operations per element of a pair: QK^T over the queries' dim, PV over the values'."""
        return 2.0 * self.heads * (self.head_dim + self.value_dim) * self.area

    @property
    def backward_flops(self) -> float:
        """Five products: S, dQ and dK over the queries' dim, dP and dV over the values'."""
        return 2.0 * self.heads * (3 * self.head_dim + 2 * self.value_dim) * self.area

    def least_bytes(self, what: str) -> float:
        """The bytes of 16-bit operands and results and the float32 log-sum-exp, each once."""
        queries, keys = self.batch * self.seq * self.heads, self.batch * self.seq * self.kv_heads
        both = 2 * (self.head_dim + self.value_dim)
        forward = (queries + keys) * both + 4 * queries
        backward = 2 * (queries + keys) * both + 4 * queries
        return {"fwd": forward, "bwd": backward}.get(what, forward + backward)

    def row_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each row attends to, and the key after the last."""
        lo = np.repeat(np.cumsum([0, *self.lengths[:-1]]), self.lengths)
        hi = np.arange(1, self.seq + 1)
        return np.maximum(lo, hi - self.window) if self.window else lo, hi

    def tables(self) -> dict[str, np.ndarray]:
        """The arrays that `scores` reads."""
        return {"ids": self.segment_ids()[0]}

    def scores(self, s: Any, h: Any, i: Any, j: Any, tables: Mapping[str, Any]) -> Any:
        """The scores s of rows i and keys j in heads h, -inf for pairs that are not attended."""
        import jax.numpy as jnp  # not at the top: the tuner runs without jax

        same = tables["ids"][i] == tables["ids"][j]
        return jnp.where(same & (j <= i) & (i - j < (self.window or self.seq)), s, -jnp.inf)

    def sink(self, h: Any, s: Any) -> Any:
        """The additional logit of each row, (..., 0) without sinks."""
        return s[..., :0]

    def segment_ids(self) -> np.ndarray:
        row = np.repeat(np.arange(1, self.documents + 1, dtype=np.int32), self.lengths)
        return np.broadcast_to(row, (self.batch, self.seq)).copy()


def document_lengths(total: int, count: int, seed: int = 0) -> list[int]:
    """`count` multiples of 64 that sum to `total`: the gaps between uniformly drawn cuts.

    It uses numpy's legacy generator, to get the lengths on which the peers were measured.
    """
    if count == 1:
        return [total]
    cuts = np.random.RandomState(seed).choice(np.arange(1, total // 64), count - 1, replace=False)
    edges = [0, *sorted(int(cut) * 64 for cut in cuts), total]
    return [end - start for start, end in itertools.pairwise(edges)]


def drawn_lengths(total: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths as in a corpus: log-normal (sigma 1) with this mean. The last document is cut at the
    end of the row."""
    draw = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        length = round(draw.lognormal(np.log(mean) - 0.5, 1.0))
        lengths.append(min(max(length, 1), left))
    return tuple(lengths)


# Names and sizes are those of /shared/peers/board.json.
BOARD = (
    Case("causal_16k_d128", 1, 16384, 32, 8, 128, 1),
    Case("docs12_32k_d128", 1, 32768, 32, 8, 128, 12),
    Case("docs12_128k_d128", 1, 131072, 32, 8, 128, 12),
    Case("docs64_32k_d128", 1, 32768, 32, 8, 128, 64),
    Case("docs12_32k_d64", 1, 32768, 32, 8, 64, 12),
    Case("causal_16k_d64", 1, 16384, 32, 8, 64, 1),
)
DIMS = (
    Case("causal_16k_d256", 1, 16384, 32, 8, 256, 1, group="dims"),
    Case("docs12_32k_d256", 1, 32768, 32, 8, 256, 12, group="dims"),
    Case("causal_16k_192v128", 1, 16384, 32, 8, 192, 1, v_dim=128, group="dims"),
    Case("docs12_32k_192v128", 1, 32768, 32, 8, 192, 12, v_dim=128, group="dims"),
    Case("causal_16k_d512", 1, 16384, 16, 2, 512, 1, group="dims"),
    Case("docs12_32k_d512", 1, 32768, 16, 2, 512, 12, group="dims"),
)
LONG = (
    Case("causal_32k_d128", 1, 32768, 32, 8, 128, 1, group="long"),
    Case("mha32_causal_32k_d128", 1, 32768, 32, 32, 128, 1, group="long"),
)
LENGTHS = tuple(
    Case(f"mean{mean}_128k_d128", 1, 131072, 32, 8, 128, len(split), split=split, group="lengths")
    for mean, split in ((mean, drawn_lengths(131072, mean)) for mean in (500, 1500, 4000))
)
LARGE = (Case("docs12_1m_d64", 1, 1 << 20, 8, 2, 64, 12, peers=False, group="large"),)

MIXED = (1, 63, 64, 65, 4000, 17, 1, 8191, 300, 129, 128, 127, 2, 19680)  # 32768 rows
ODD = (
    *(Case(f"causal_{n >> 10}k_d{d}", 1, n, 32, 8, d, 1, group="short")
      for d in (64, 128) for n in (1024, 2048, 4096)),
    Case("docs2048x16_d128", 1, 32768, 32, 8, 128, 2048, split=(16,) * 2048, group="short"),
    *(Case(f"docs8192x16_d{d}", 1, 131072, 32, 8, d, 8192, split=(16,) * 8192, group="short")
      for d in (64, 128)),
    Case("docs32kx1_d128", 1, 32768, 32, 8, 128, 32768, split=(1,) * 32768, group="short"),
    Case("batch2048_1row_d128", 2048, 1, 32, 8, 128, 1, group="short"),
    Case("batch1024_49rows_d64", 1024, 49, 16, 16, 64, 1, group="short"),
    Case("heads1_8k_d128", 1, 8192, 1, 1, 128, 1, group="short"),
    Case("heads1_8k_d64", 1, 8192, 1, 1, 64, 1, group="short"),
    *(Case(f"heads{h}_{n >> 10}k_d{d}", 1, n, h, 1, d, 1, group="short")
      for h, n in ((1, 2048), (4, 4096), (1, 16384)) for d in (64, 128)),
    Case("mixed14_32k_d128", 1, 32768, 32, 8, 128, len(MIXED), split=MIXED, group="short"),
    Case("causal_2k_d256", 1, 2048, 32, 8, 256, 1, group="short"),
    Case("causal_2k_192v128", 1, 2048, 32, 8, 192, 1, v_dim=128, group="short"),
)  # fmt: skip
SHARD = (  # the heads of one GPU under tensor parallelism
    *(Case(f"kv1_{name}_d128", 1, seq, 8, 1, 128, documents, group="shard")
      for name, seq, documents in (("causal_4k", 4096, 1), ("causal_16k", 16384, 1),
          ("docs12_32k", 32768, 12), ("docs64_32k", 32768, 64))),
    *(Case(f"mha8_{name}_d128", 1, seq, 8, 8, 128, documents, group="shard")
      for name, seq, documents in (("causal_8k", 8192, 1), ("docs64_32k", 32768, 64))),
)  # fmt: skip
PROXY = (  # with the board, compared with FlashAttention-2 (docs/internals/proxy.md)
    Case("docs12_32k_window1k_d128", 1, 32768, 32, 8, 128, 12, window=1024, group="proxy"),
    Case("docs12_32k_window4k_d64", 1, 32768, 32, 8, 64, 12, window=4096, group="proxy"),
    *(Case(f"mha16_causal_16k_d{d}", 1, 16384, 16, 16, d, 1, group="proxy") for d in (64, 128)),
    *(Case(f"causal_16k_d{d}", 1, 16384, 32, 8, d, 1, group="proxy") for d in (96, 192)),
    *(Case(f"docs12_32k_d{d}", 1, 32768, 32, 8, d, 12, group="proxy") for d in (96, 192)),
)
PADDED = tuple(  # head dims that packax pads to those of Hopper's kernels
    Case(f"{name}_d{d}_padded", 1, seq, 32, 8, d, documents, group="padded")
    for name, seq, documents in (("causal_2k", 2048, 1), ("causal_16k", 16384, 1),
        ("docs12_32k", 32768, 12), ("causal_256", 256, 1)) for d in (96, 80, 32)
)  # fmt: skip
CASES = (*BOARD, *DIMS, *LONG, *LENGTHS, *LARGE, *ODD, *SHARD, *PROXY, *PADDED)


def select(names: str) -> list[Case]:
    return picked(CASES, names, lambda case: case.group)
