"""The cases of decoding as data, for decode.py."""

from __future__ import annotations

import dataclasses

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    q_len: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 0

    @property
    def room(self) -> int:
        return max(self.lengths)

    def bytes(self, dtype: str) -> int:
        """Of the keys and values that some row attends, of a cache in that dtype."""
        return 2 * SIZES[dtype] * sum(self.lengths) * self.kv_heads * self.dim


K = 1024
CASES = (
    Case("1x128k", (128 * K,)),
    Case("8x32k", (32 * K,) * 8),
    Case("64x8k", (8 * K,) * 64),
    Case("8x32k, pages of 16", (32 * K,) * 8, page_size=16),
    Case("8x32k, pages of 256", (32 * K,) * 8, page_size=256),
    Case("8x32k, 4 rows", (32 * K,) * 8, q_len=4),
    Case("8x32k, 16 rows", (32 * K,) * 8, q_len=16),
    Case("1x128k and 31x1k", (128 * K, *(K,) * 31)),
    Case("8x32k, d64", (32 * K,) * 8, heads=64, dim=64),
    Case("8x32k, d512", (32 * K,) * 8, heads=16, kv_heads=2, dim=512),
    Case("8x32k, multi-query", (32 * K,) * 8, kv_heads=1),
)
