"""Dropout's random bits in numpy, from the paper: Philox4x32-10 (Salmon et al., 2011)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOW = 0xFFFFFFFF


def philox(counters: Any, key: Any) -> list[np.ndarray]:
    """Four 32-bit words, as uint64, for four counter words and a key of two words."""
    c = [np.asarray(x, np.uint64) for x in counters]
    k = [int(x) for x in key]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = [x >> np.uint64(32) for x in (first, second)]
        low = [x & np.uint64(LOW) for x in (first, second)]
        c = [
            high[1] ^ c[1] ^ np.uint64(k[0]), low[1],
            high[0] ^ c[3] ^ np.uint64(k[1]), low[0],
        ]  # fmt: skip
        k = [(k[0] + 0x9E3779B9) & LOW, (k[1] + 0xBB67AE85) & LOW]
    return c


def kept(key: Any, rate: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """(B, H, Sq, Skv) bool: the probabilities that flash_attention keeps for this dropout_key."""
    words = np.asarray(jax.random.bits(key, (2,), jnp.uint32))
    b, h, i, j = np.meshgrid(*map(np.arange, shape), indexing="ij", sparse=True)
    counters = np.broadcast_arrays(j // 4, i, h, b)
    word = np.choose(np.broadcast_to(j % 4, shape), philox(counters, words))
    return word >= round(rate * 2**32)


def factors(key: Any, rate: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """The factor of each probability: 0 or 1 / (1 - rate)."""
    return kept(key, rate, shape) / (1 - rate)
