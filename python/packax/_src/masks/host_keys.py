"""`keys_on_host`: how many keys each row of a mask visits, in numpy, for plans of data loaders.

The counts match the arrays that build.py makes. Nothing here runs jax, which would hang in the
forked workers of a data loader.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from packax._src.core.spec import BLOCK, INT_MAX, PADDING_SEGMENT_ID, TILE, MaskMode, ceil_div
from packax._src.masks.block_sparse import BlockSparse
from packax._src.masks.documents import Ranges
from packax._src.masks.expressions import (
    MaskExpression,
    Positions,
    batch_of,
    documents_of,
    intervals_of,
)
from packax._src.masks.row_ranges import Document, mask_mode_of
from packax._src.masks.tree import tree_of, tree_rows
from packax._src.ops.block_lists import overlapped

_SLAB = 1 << 24  # pairs of blocks that are in memory at once


def keys_on_host(expression: MaskExpression, length: int, kv_len: int) -> np.ndarray:
    """(B, length) int32: the keys in each row's range, or with block lists, those in the blocks
    that its tile visits, averaged over heads. The expression holds numpy arrays."""
    document = documents_of(expression)
    sides: tuple[Any, ...] = (None,) * 4
    if document is not None:
        sides = (document.q_ids, document.kv_ids, document.q_pos, document.kv_pos)
    of_document = Document(*(None if x is None else np.atleast_2d(x) for x in sides))
    interval, tree = intervals_of(expression), tree_of(expression)
    batch = batch_of(expression)
    end = low = high = None
    ranges = [(part.lo, part.hi) for part in expression.parts() if isinstance(part, Ranges)]
    mode = MaskMode.NO_CHECK
    if tree is not None:
        lo, hi, end = tree_rows((tree, of_document.q_ids), interval)
        ranges.append((lo, hi))
        mode = MaskMode.NO_CHECK if of_document.q_ids is None else MaskMode.IDS
    else:
        if interval.members:
            by_position = of_document.q_pos is not None
            at: Any = np.arange(length, dtype=np.int32)[None]
            at = of_document.q_pos if by_position else at
            of_rows = () if of_document.q_ids is None else (of_document.q_ids,)
            low, high = interval.limits(Positions(at, at, of_rows, by_position))
        mode = mask_mode_of(of_document, low, high)
    shape = batch, length
    lo, hi = np.zeros(shape, np.int32), np.full(shape, kv_len, np.int32)
    if mode >= MaskMode.IDS:
        lo, hi = _ranges_of_documents(of_document, low, high, mode, batch)
    if mode < MaskMode.UPPER_LIMIT:
        if high is not None:
            hi = np.minimum(hi, np.minimum(high, kv_len - 1) + 1)
        if low is not None:
            lo = np.maximum(lo, low)
    for first, last in ranges:
        lo = np.maximum(lo, np.clip(first, 0, kv_len))
        hi = np.minimum(hi, np.clip(last, 0, kv_len))
    lo, hi = (np.where(lo < hi, x, 0) for x in (lo, hi))
    maps = [part for part in expression.parts() if isinstance(part, BlockSparse)]
    if tree is None and not maps:
        return (hi - lo).astype(np.int32)
    block_map = maps[0] if maps else None
    return _visited_keys(lo, hi, end, block_map, kv_len)


def _ranges_of_documents(
    document: Document, low: Any, high: Any, mode: MaskMode, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """The range of keys with each row's id, narrowed by positions where the keys with that id are
    one run of positions that do not decrease; (batch, rows) each."""
    kv_ids, kv_pos = document.keys()
    if mode < MaskMode.UPPER_LIMIT:
        kv_pos = low = high = None

    def of_row(x: Any, row: int) -> Any:
        return None if x is None else x[min(row, len(x) - 1)]

    sides = (document.q_ids, kv_ids, kv_pos, low, high)
    found = [_ranges_of_row(*(of_row(x, row) for x in sides)) for row in range(batch)]
    lo, hi = (np.stack(x) for x in zip(*found, strict=True))
    return lo, hi


def _ranges_of_row(
    q_ids: Any, kv_ids: Any, kv_pos: Any, low: Any, high: Any
) -> tuple[np.ndarray, np.ndarray]:
    values, first, of_key = np.unique(kv_ids, return_index=True, return_inverse=True)
    number = len(values)
    last = np.empty(number, np.int64)
    last[of_key] = np.arange(len(kv_ids))  # of repeated indices, the last one remains
    changes = np.flatnonzero(kv_ids[1:] != kv_ids[:-1]) + 1
    several = np.bincount(of_key[np.append(0, changes)], minlength=number) > 1
    at = np.minimum(np.searchsorted(values, q_ids), number - 1)
    some = (values[at] == q_ids) & (q_ids != PADDING_SEGMENT_ID)
    lo, hi = np.where(some, first[at], 0), np.where(some, last[at] + 1, 0)
    if kv_pos is not None:
        falls = np.flatnonzero((kv_pos[1:] < kv_pos[:-1]) & (kv_ids[1:] == kv_ids[:-1])) + 1
        checked = several | (np.bincount(of_key[falls], minlength=number) > 0)
        narrow = ~checked[at]
        if high is not None:
            hi = np.where(narrow, _first_match(np.greater, kv_pos, high, lo, hi), hi)
        if low is not None:
            lo = np.where(narrow, _first_match(np.greater_equal, kv_pos, low, lo, hi), lo)
    return lo.astype(np.int32), hi.astype(np.int32)


def _first_match(compare: Any, kv_pos: Any, limit: Any, lo: Any, hi: Any) -> Any:
    """The first j in [lo, hi) for which compare(kv_pos[j], limit) is true, or hi, by bisection."""
    left, right = lo, hi
    for _ in range(len(kv_pos).bit_length()):
        middle = (left + right) // 2
        later = compare(kv_pos[np.minimum(middle, len(kv_pos) - 1)], limit)
        open_ = left < right
        left, right = (
            np.where(open_ & ~later, middle + 1, left),
            np.where(open_ & later, middle, right),
        )
    return left


def _visited_keys(
    lo: np.ndarray, hi: np.ndarray, end: Any, block_map: BlockSparse | None, kv_len: int
) -> np.ndarray:
    """BLOCK times the number of blocks of keys that each row's tile visits, averaged over heads."""
    batch, length = lo.shape
    filled = lo < hi
    least = _by_block(np.where(filled, lo, INT_MAX), np.min, INT_MAX)
    most = _by_block(np.where(filled, hi, 0), np.max, 0)
    own: Any = None
    ends: Any = None
    if end is not None:  # a row attends only to keys whose subtree ends after the row
        rows = np.where(filled, np.arange(1, length + 1, dtype=np.int32), INT_MAX)
        own = _by_block(rows, np.min, INT_MAX)
        ends = _by_block(end, np.max, 0)
    maps: Any = None if block_map is None else block_map.of_heads()
    heads = 1 if maps is None else maps.shape[1]
    first = BLOCK * np.arange(ceil_div(kv_len, BLOCK), dtype=np.int32)[None]
    tiles = ceil_div(length, TILE)
    keys = np.empty((batch, tiles), np.int64)
    step = max(1, _SLAB // (2 * first.size))
    for row in range(batch):
        of_row = None if maps is None else maps[min(row, maps.shape[0] - 1)]
        for tile in range(0, tiles, step):
            blocks = slice(2 * tile, 2 * (tile + step))
            low, high = least[row, blocks, None], most[row, blocks, None]
            visited = (low < first + BLOCK) & (first < high)
            if own is not None:
                visited &= own[row, blocks, None] <= ends[min(row, len(ends) - 1)][None]
            count: Any = 0
            for head in range(heads):
                some = visited
                if of_row is not None and block_map is not None:
                    sizes = block_map.block_size
                    some = some & _pooled(of_row[head], sizes, length, kv_len, blocks)
                count = count + _by_tile(some).sum(axis=1)
            keys[row, tile : tile + step] = count // heads * BLOCK + count % heads * BLOCK // heads
    return np.repeat(keys, TILE, axis=1)[:, :length].astype(np.int32)


def _by_block(x: np.ndarray, how: Any, padding: int) -> np.ndarray:
    """The least or the greatest of each block of 64 along the last axis."""
    blocks = ceil_div(x.shape[1], BLOCK)
    x = np.pad(x, ((0, 0), (0, blocks * BLOCK - x.shape[1])), constant_values=padding)
    return how(x.reshape(len(x), blocks, BLOCK), axis=2)


def _by_tile(x: np.ndarray) -> np.ndarray:
    """Whether either block of 64 rows in each tile of 128 is True."""
    x = np.pad(x, ((0, len(x) % 2), (0, 0)))
    return x.reshape(-1, 2, x.shape[1]).any(axis=1)


def _pooled(block_map: Any, sizes: Any, q_len: int, kv_len: int, rows: slice) -> np.ndarray:
    """Whether the block map is True anywhere in each block of 64 of these rows, and of the keys."""
    of_rows, of_keys = overlapped(sizes[0], q_len, np)[rows], overlapped(sizes[1], kv_len, np)
    return block_map[of_rows].any(axis=1)[:, of_keys].any(axis=2)
