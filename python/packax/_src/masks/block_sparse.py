"""Block masks, an expression for masks that depend on data: MoBA, indexers, any boolean map.

ops/block_lists.py computes which blocks a tile of the kernels visits.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from packax._src.core.arguments import Array, ArrayLike, numpy_of, shown
from packax._src.core.spec import ceil_div
from packax._src.masks.expressions import MaskExpression, Positions, pytree


@pytree("block_mask", static=("block_size", "per_head"))
class BlockSparse(MaskExpression):
    """See `block_sparse`."""

    block_mask: Array  # (NQ, NK), (B, NQ, NK) or (B, H, NQ, NK); vmap may remove leading axes
    block_size: tuple[int, int]
    per_head: bool  # whether block_mask has an axis of heads

    of_rows = False
    once = "combine the arrays into one with the smaller blocks (jnp.repeat), as in first & second"

    @property
    def name(self) -> str:
        return "block_sparse"

    def arguments(self) -> list[str]:
        return [shown(self.block_mask), repr(self.block_size)]

    def arrays(self) -> list[tuple[str, Array, str]]:
        return [("block_mask", self.of_heads(), "batch")]

    def of_heads(self) -> Array:
        """The block mask as (B or 1, H or 1, NQ, NK)."""
        shape = self.block_mask.shape
        heads = shape[-3:-2] if self.per_head else (1,)
        batch = shape[:1] if len(shape) > 2 + self.per_head else (1,)
        return self.block_mask.reshape(*batch, *heads, *shape[-2:])

    def check_sizes(self, q_len: int | None, kv_len: int | None) -> None:
        for n, what, length in ((0, "queries", q_len), (1, "keys", kv_len)):
            have, size = self.block_mask.shape[n - 2], self.block_size[n]
            if length is not None and have != ceil_div(length, size):
                raise ValueError(
                    f"block_mask has shape {self.block_mask.shape}, so {have} blocks of {what}, "
                    f"but {length} {what} are {ceil_div(length, size)} blocks of {size}"
                )

    def _as_array(self, at: Positions) -> Array:
        rows, keys = (
            np.arange(x.shape[-1]) // size
            for x, size in zip((at.q, at.kv), self.block_size, strict=True)
        )
        xp = numpy_of(self.block_mask)
        block_mask = self.of_heads() if self.per_head else self.block_mask
        return xp.take(xp.take(block_mask, rows, axis=-2), keys, axis=-1)


def block_sparse(block_mask: ArrayLike, block_size: int | tuple[int, int]) -> MaskExpression:
    """Query i attends to key j if block_mask[b, h, i // m, j // n] is True.

    It is for masks that depend on the data: mixture of block attention (MoBA, arXiv 2502.13189),
    the keys that an indexer selects, or any boolean map. Attention is exact. In both passes, a
    block of 64 keys is visited only if some query of a tile of 128 attends to a key in it. Blocks
    are counted by indices of queries and keys, even if documents(...) has positions.

    Args:
        block_mask: whether each pair of blocks is attended: bool, (NQ, NK), (B, NQ, NK) or
            (B or 1, H or 1, NQ, NK), where H is the number of query heads, NQ = ceil(Sq / m) and NK
            = ceil(Skv / n). Traced or not; it has no gradient.
        block_size: (m, n), the numbers of queries and keys in a block, or one number for both; any
            positive integers. Only blocks without an attended pair are skipped, so the mask is fast
            if neighboring queries attend to similar blocks.

    Raises:
        ValueError: wrong shape, dtype or size.

    An attention mask stores it as bits, together with two lists of blocks for each of its heads.
    Each list has about one int32 for every 128 x 64 pairs of a query and a key.

    Examples:
        >>> blocks = np.array([[True, False], [True, True]])
        >>> packax.masks.block_sparse(blocks, 2).as_array(3, 4).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 1]])
    """
    if not isinstance(block_mask, jax.Array):
        block_mask = np.array(block_mask)
    empty_batch = block_mask.ndim > 2 and block_mask.shape[0] == 0
    if block_mask.ndim not in (2, 3, 4) or 0 in block_mask.shape[empty_batch:]:
        raise ValueError(
            "block_mask must have shape (query blocks, key blocks), optionally after (batch,) or "
            f"(batch, heads), at least 1 of each but of batch, but has {block_mask.shape}"
        )
    if block_mask.dtype != np.bool_:
        raise ValueError(f"block_mask must be boolean, but has dtype {block_mask.dtype}")
    return BlockSparse(block_mask, _sizes(block_size), block_mask.ndim == 4)


def _sizes(given: Any) -> tuple[int, int]:
    try:
        sizes = (
            tuple(map(operator.index, given)) if np.ndim(given) else (operator.index(given),) * 2
        )
    except TypeError:
        sizes = ()
    if isinstance(given, bool) or len(sizes) != 2 or not all(1 <= size < 2**31 for size in sizes):
        raise ValueError(
            "block_size must be a positive integer below 2**31, or two of them for queries and "
            f"keys, but is {given!r}"
        )
    return sizes[0], sizes[1]
