"""Runs the kernels of the mask, of both passes and of decoding in Triton's interpreter.

The arguments are those that the C++ handlers pass. triton_launch.py runs a single kernel.
"""

from __future__ import annotations

import sys
import unittest.mock
from typing import Any

import numpy as np
from mask_checks import kernel_operands
from triton_launch import KERNELS, ceil, guarded, launch


def documents(
    q_ids: np.ndarray,
    kv_ids: np.ndarray,
    q_pos: np.ndarray,
    kv_pos: np.ndarray,
    compare_positions: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch, q_len = q_ids.shape
    kv_len = kv_ids.shape[1]
    table = max(1024, 2 * (1 << (kv_len - 1).bit_length()))
    shift = 32 - (table.bit_length() - 1)
    chunks = ceil(kv_len, 1024)
    workspace = guarded((batch, 5 * table + kv_len + chunks), np.int32)
    lo, hi, segment_checked = (guarded((batch, q_len), np.int32) for _ in range(3))
    launch("documents_init", (chunks, batch), kv_ids, workspace, kv_len, table)
    launch(
        "documents_runs",
        (chunks, batch),
        kv_ids,
        kv_pos,
        workspace,
        compare_positions,
        kv_len,
        table,
        shift,
    )
    launch(
        "documents_rows", (ceil(q_len, 1024), batch), q_ids, kv_ids, q_pos, kv_pos, workspace, lo,
        hi, segment_checked,
        compare_positions, q_len, kv_len, table, shift, kv_len.bit_length(),
    )  # fmt: skip
    return lo, hi, segment_checked


def blocks(
    lo: np.ndarray, hi: np.ndarray, segment_checked: np.ndarray, kv_len: int
) -> tuple[np.ndarray, ...]:
    """q_blocks, kv_blocks, q_order, q_order_192, kv_order."""
    batch, q_len = lo.shape
    nq, nk = ceil(q_len, 64), ceil(kv_len, 64)
    tiles = [ceil(q_len, 128), ceil(q_len, 192), ceil(kv_len, 128)]
    q_blocks = guarded((batch, 5, nq), np.int32)
    kv_blocks = guarded((batch, 4, nk), np.int32)
    orders = [guarded((batch, n), np.int32) for n in tiles]
    launch("blocks_rows", (ceil(nq, 16), batch), lo, hi, segment_checked, q_blocks, q_len, GROUP=16)
    sizes = {"GROUP": 8, "STEP": 256}
    launch("blocks_keys", (ceil(nk, 8), batch), q_blocks, kv_blocks, q_len, kv_len, **sizes)
    grid = (ceil(max(tiles), 8), batch)
    launch("blocks_order", grid, q_blocks, kv_blocks, *orders, q_len, kv_len, **sizes)
    return q_blocks, kv_blocks, *orders


class Operands:
    """The mask operands of the attention kernels, as the FFI handler receives them."""

    def __init__(
        self,
        lo: np.ndarray,
        hi: np.ndarray,
        segment_checked: np.ndarray,
        kv_len: int,
        mask_mode: int = 0,
        ids: tuple[np.ndarray, np.ndarray] | None = None,
        pos: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        self.lo, self.hi, self.kv_len, self.mask_mode = lo, hi, kv_len, mask_mode
        self.q_blocks, self.kv_blocks, self.q_order, _, self.kv_order = blocks(
            lo, hi, segment_checked, kv_len
        )
        q_ids, kv_ids = ids if ids else (lo, lo)
        q_pos, kv_pos = pos if pos else (lo, lo)
        self.rows = (lo, hi, q_ids, kv_ids, q_pos, kv_pos)
        self.batch, self.q_len = lo.shape

    @staticmethod
    def of(mask: Any) -> Operands:
        """The operands of an AttentionMask."""
        operands = Operands.__new__(Operands)
        names = ("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos")
        operands.rows = tuple(kernel_operands(mask)[name] for name in names)
        operands.lo, operands.hi = operands.rows[:2]
        names = ("q_blocks", "kv_blocks", "q_order", "kv_order")
        operands.q_blocks, operands.kv_blocks, operands.q_order, operands.kv_order = (
            np.asarray(getattr(mask, name)) for name in names
        )
        operands.kv_len, operands.mask_mode = mask.kv_len, mask.mask_mode
        operands.batch, operands.q_len = operands.lo.shape
        return operands


def sizes(mask: Operands, query: np.ndarray, key: np.ndarray) -> tuple[int, ...]:
    batch, q_len, heads, _ = query.shape
    return (mask.mask_mode, batch, mask.batch, q_len, key.shape[1], heads, key.shape[2])


UNREAD = np.full(1, np.nan, np.float32)  # in place of an absent array


def with_sink_batch(numbers: tuple[Any, ...], at: int, sinks: np.ndarray | None) -> tuple[Any, ...]:
    """The scalars of a forward, with the number of rows of sinks at index `at`."""
    return (*numbers[:at], 0 if sinks is None else len(sinks), *numbers[at:])


def sizes_of_rows(
    mask: Operands, query: np.ndarray, key: np.ndarray, head_range: range
) -> tuple[int, ...]:
    *first, heads, kv_heads = sizes(mask, query, key)
    return (*first, len(head_range), kv_heads, heads)


def from_head(x: np.ndarray, head_range: range) -> np.ndarray:
    """The array as seen through a pointer to the first of these heads."""
    return x.reshape(-1)[head_range.start * x.shape[3] :]


def forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: Operands,
    scale: float,
    tile: tuple[int, int],
    head_range: range | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`head_range`: the query heads that share the given key and value heads. The other heads of
    out keep the fill of guarded(). `sinks`: (1 or batch, heads)."""
    batch, q_len, heads, qk_dim = query.shape
    head_range = range(heads) if head_range is None else head_range
    v_dim = value.shape[3]
    rows, keys = tile
    out = guarded((batch, q_len, heads, v_dim), query.dtype)
    lse = guarded((batch, len(head_range), q_len), np.float32)
    grid = (batch * len(head_range) * ceil(q_len, 128) * (128 // rows),)
    launch(
        "forward", grid, from_head(query, head_range), key, value, from_head(out, head_range), lse,
        UNREAD if sinks is None else sinks, *mask.rows, mask.q_blocks, mask.q_order, scale,
        *with_sink_batch(sizes_of_rows(mask, query, key, head_range), 3, sinks),
        QK_DIM=qk_dim, V_DIM=v_dim, BLOCK_M=rows, BLOCK_N=keys, STAGES=2, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    return out, lse


def backward(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray, lse: np.ndarray,
    dout: np.ndarray, dlse: np.ndarray | None, mask: Operands, scale: float,
    dkdv_tile: tuple[int, int], dq_tile: tuple[int, int], head_range: range | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """`head_range`: as in forward, for query, out, dout, dq; lse and dlse have only those heads."""
    batch, q_len, all_heads, qk_dim = query.shape
    head_range = range(all_heads) if head_range is None else head_range
    heads = len(head_range)
    kv_len, kv_heads, v_dim = key.shape[1], key.shape[2], value.shape[3]
    delta, row_delta = (guarded((batch, heads, q_len), np.float32) for _ in range(2))
    dq, dk, dv = (
        guarded(query.shape, query.dtype),
        guarded(key.shape, key.dtype),
        guarded(value.shape, value.dtype),
    )
    launch(
        "backward_delta", (ceil(q_len, 32) * heads * batch,), from_head(out, head_range),
        from_head(dout, head_range),
        lse if dlse is None else dlse, delta, row_delta, mask.lo, mask.hi, int(dlse is not None),
        batch, mask.batch, q_len, heads, all_heads, V_DIM=v_dim, ROWS=32,
    )  # fmt: skip
    np.testing.assert_array_equal(row_delta, delta)
    rows, keys = dkdv_tile
    launch(
        "backward_dkdv", (kv_heads * batch * ceil(kv_len, 128) * (128 // keys),),
        from_head(query, head_range), key, value,
        from_head(dout, head_range), lse, delta, dk, dv, *mask.rows, mask.q_blocks, mask.kv_blocks,
        mask.kv_order, scale,
        *sizes_of_rows(mask, query, key, head_range), QK_DIM=qk_dim, V_DIM=v_dim, BLOCK_M=rows,
        BLOCK_N=keys, STAGES=2, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    rows, keys = dq_tile
    launch(
        "backward_dq", (batch * heads * ceil(q_len, 128) * (128 // rows),),
        from_head(query, head_range), key, value,
        from_head(dout, head_range), lse, delta, from_head(dq, head_range), *mask.rows,
        mask.q_blocks, mask.q_order, scale,
        *sizes_of_rows(mask, query, key, head_range),
        QK_DIM=qk_dim, V_DIM=v_dim, BLOCK_M=rows, BLOCK_N=keys, STAGES=2, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    return dq, dk, dv


def decode(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, kv_start: np.ndarray, kv_end: np.ndarray,
    table: np.ndarray | None, sinks: np.ndarray | None, scale: float, soft_cap: float, splits: int,
    *, kernel: str, room: tuple[int, int], tile: tuple[int, int], exact: int | None = None,
    v_parts: int = 1, shares: int = 0, scales: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """`room`: the head dims that the kernel is compiled for. `exact`: 1 for float32 products, 0 for
    TF32, None for exact products on the path of 16-bit operands. `v_parts`: the number of value
    tiles. `shares`: the number of shares to deal out, or 0 for `splits` of every sequence.
    `scales`: (rows, kv_heads), of keys and values in float8_e4m3fn; the query is then in 16 bits
    and `out` in float32."""
    if exact is None:
        arithmetic = sys.modules["portable.arithmetic"]
        with unittest.mock.patch.object(arithmetic, "to_tf32", KERNELS["unrounded"]):
            return decode(
                query, key, value, kv_start, kv_end, table, sinks, scale, soft_cap, splits,
                kernel=kernel, room=room, tile=tile, exact=0, v_parts=v_parts, shares=shares,
                scales=scales,
            )  # fmt: skip
    batch, q_len, heads, qk_dim = query.shape
    first, second, kv_heads, v_dim = value.shape
    pages, page_size, width = (first, second, table.shape[1]) if table is not None else (0, 0, 0)
    kv_len = page_size * width if table is not None else second
    block_m, block_n = tile
    partial = guarded((splits, batch, q_len, heads, v_dim), np.float32)
    sums = guarded((splits, batch, q_len, heads), np.float32)
    out = guarded((batch, q_len, heads, v_dim), np.float32 if scales else query.dtype)
    lse = guarded((batch, heads, q_len), np.float32)
    more, sizes, constants = (), (), {}
    if scales is not None:
        more, sizes = scales, (len(scales[0]), int(query.dtype != np.float16))
        query, key, value = query.view(np.int16), key.view(np.int16), value.view(np.int16)
        constants = {"NATIVE_FP8": 0, "PAGED": int(page_size > 0)}
    programs = shares + batch if shares else batch * splits
    grid = (ceil(q_len * (heads // kv_heads), block_m) * kv_heads * programs,)
    launch(
        kernel, grid, query, key, value, kv_start, kv_end, kv_start if table is None else table,
        *more, kv_start, partial, sums, scale, soft_cap,
        batch, q_len, kv_len, pages, page_size, width, heads, kv_heads, qk_dim // 8, v_dim // 8,
        splits, shares, 0, 0, 0, *sizes,
        QK_DIM=room[0], V_DIM=room[1], BLOCK_M=block_m, BLOCK_N=block_n, STAGES=2,
        FLOAT32_PRODUCTS=exact, V_PARTS=v_parts, **constants,
    )  # fmt: skip
    launch(
        "decode_combine", (batch * q_len * heads,), partial, sums,
        kv_start if sinks is None else sinks, kv_start, kv_end, kv_start, out,
        lse, int(sinks is not None), batch, 1 if sinks is None else len(sinks), q_len, kv_len,
        heads, v_dim // 8, splits, 0, 0, 0,
        V_DIM=room[1], SPLITS=128, STEP=16,
    )  # fmt: skip
    return out, lse


def ragged(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, kv_start: np.ndarray, kv_end: np.ndarray,
    table: np.ndarray, sinks: np.ndarray | None, work: np.ndarray, items: int,
    scale: float, soft_cap: float, tile_rows: int, chunks_elsewhere: int = 0,
    *, kernels: dict[str, tuple[int, int]], room: tuple[int, int],
    scales: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Packed rows. query (1, T, H, D). `kernels`: the tile of each kernel that runs, the tall one
    first if there is one. Products are exact. With chunks_elsewhere, `out` and `lse` are not
    written for their rows."""
    _, rows, heads, qk_dim = query.shape
    pages, page_size, kv_heads, v_dim = value.shape
    group, width = heads // kv_heads, table.shape[1]
    partial = guarded((items, tile_rows, heads, v_dim), np.float32)
    sums = guarded((items, tile_rows, heads), np.float32)
    out = guarded((1, rows, heads, v_dim), np.float32)
    lse = guarded((1, heads, rows), np.float32)
    more, sizes, constants = (), (), {}
    if scales is not None:
        more, sizes = scales, (len(scales[0]), int(query.dtype != np.float16))
        query, key, value = query.view(np.int16), key.view(np.int16), value.view(np.int16)
        constants = {"NATIVE_FP8": 0, "PAGED": 1}
    has_tall, kv_len = len(kernels) - 1, page_size * width
    for kernel, (block_m, block_n) in kernels.items():
        most = tile_rows * group if block_m > 16 or not has_tall else min(16, tile_rows * group)
        arithmetic = sys.modules["portable.arithmetic"]
        with unittest.mock.patch.object(arithmetic, "to_tf32", KERNELS["unrounded"]):
            launch(
                kernel, (ceil(most, block_m) * kv_heads * items,), query, key, value, kv_start,
                kv_end, table, *more, work, partial, sums, scale, soft_cap, 1, rows, kv_len, pages,
                page_size, width, heads, kv_heads, qk_dim // 8, v_dim // 8, 0, 0, tile_rows,
                has_tall, chunks_elsewhere, *sizes, QK_DIM=room[0], V_DIM=room[1],
                BLOCK_M=block_m, BLOCK_N=block_n, STAGES=2, FLOAT32_PRODUCTS=0, V_PARTS=1,
                **constants,
            )  # fmt: skip
    launch(
        "decode_combine", ((5 if chunks_elsewhere else rows) * heads,), partial, sums,
        kv_start if sinks is None else sinks,
        kv_start, kv_end, work, out, lse, int(sinks is not None), 1, 1, rows, kv_len, heads,
        v_dim // 8, 0, tile_rows, chunks_elsewhere, items, V_DIM=room[1], SPLITS=128, STEP=16,
    )  # fmt: skip
    return out, lse


def dealt_shares(
    kv_start: np.ndarray, kv_end: np.ndarray, kv_len: int, shares: int, splits: int, step: int
) -> np.ndarray:
    """(programs, 5): sequence, index of the share, the sequence's number of shares, first key and
    end key, as a program of `decode` computes them."""
    batch, q_len = kv_start.shape
    found = guarded((shares + batch, 5), np.int32)
    sizes = (batch, q_len, kv_len, shares, splits)
    launch("dealt_share", (len(found),), kv_start, kv_end, found, *sizes, STEP=step)
    return found


class Extras:
    """The additional arguments of the fallback kernels: operands, then scalars.

    `block_mask`: bits, the lists of row tiles and of key tiles, and the block sizes."""

    def __init__(self, mask: Operands, scale: float, soft_cap: float = 0.0,
        scales: np.ndarray | None = None,
                 slopes: np.ndarray | None = None, places: tuple[np.ndarray,
                     np.ndarray] | None = None,
                 block_mask: tuple[np.ndarray, np.ndarray, np.ndarray,
                     tuple[int, int]] | None = None):  # fmt: skip
        self.scale, self.soft_cap = scale, soft_cap
        bits, q_block_lists, kv_block_lists, blocks = block_mask or (
            mask.lo,
            mask.lo,
            mask.lo,
            (1, 1),
        )
        self.rows_map, self.keys_map = (bits, q_block_lists), (bits, kv_block_lists)
        self.map = (*(bits.shape[:2] if block_mask else (1, 0)), *blocks)
        placeholder = mask.lo
        self.batches = (
            0 if scales is None else len(scales),
            0 if slopes is None else len(slopes),
        )
        arrays = (scales, slopes, *(places or (None, None)))
        self.operands = tuple(placeholder if x is None else x for x in arrays)


def fallback_sizes(mask: Operands, extras: Extras, query, key, value, *flags: int):
    """The arguments from mask_mode on, with `flags` after it."""
    mask_mode, batch, mask_batch, *lengths = sizes(mask, query, key)
    dims = (query.shape[3], value.shape[3])
    return (mask_mode, *flags, batch, mask_batch, *extras.batches, *extras.map, *lengths, *dims)


def forward_fallback(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: Operands, extras: Extras,
    tile: tuple[int, int], dims: tuple[int, int], sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """`dims`: the head dims that the kernel is compiled for. `sinks`: (1 or batch, heads)."""
    batch, q_len, heads, _ = query.shape
    rows, keys = tile
    out = guarded((batch, q_len, heads, value.shape[3]), query.dtype)
    lse, row_max = (guarded((batch, heads, q_len), np.float32) for _ in range(2))
    launch(
        "forward_fallback", (batch * heads * ceil(q_len, 128) * (128 // rows),), query, key, value,
        out, lse, row_max, UNREAD if sinks is None else sinks,
        *mask.rows, mask.q_blocks, mask.q_order, *extras.rows_map, *extras.operands, extras.scale,
        extras.soft_cap,
        *with_sink_batch(fallback_sizes(mask, extras, query, key, value), 3, sinks),
        QK_DIM=dims[0], V_DIM=dims[1], BLOCK_M=rows, BLOCK_N=keys, STAGES=2, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    return out, lse, row_max


def backward_fallback(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray, lse: np.ndarray,
    dout: np.ndarray, dlse: np.ndarray, mask: Operands, extras: Extras,
    dkdv_tile: tuple[int, int], dq_tile: tuple[int, int], dims: tuple[int, int],
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Returns dq, dk, dv and score_grads."""
    batch, q_len, heads, _ = query.shape
    kv_len, kv_heads, v_dim = key.shape[1], key.shape[2], value.shape[3]
    delta, row_delta = (guarded((batch, heads, q_len), np.float32) for _ in range(2))
    dq, dk, dv = (guarded(x.shape, x.dtype) for x in (query, key, value))
    score_grads = guarded((batch, heads, 2, q_len), np.float32)
    launch(
        "backward_delta_fallback", (ceil(q_len, 32) * heads * batch,), out, dout, dlse, delta,
        row_delta, mask.lo, mask.hi, 1, batch, mask.batch, q_len, heads, v_dim, V_DIM=dims[1],
        ROWS=32,
    )  # fmt: skip
    np.testing.assert_array_equal(row_delta, delta)
    rows, keys = dkdv_tile
    launch(
        "backward_dkdv_fallback", (kv_heads * batch * ceil(kv_len, 128) * (128 // keys),), query,
        key, value, dout,
        lse, delta, dk, dv, *mask.rows, mask.q_blocks, mask.kv_blocks, mask.kv_order,
        *extras.keys_map,
        *extras.operands, extras.scale, extras.soft_cap,
        *fallback_sizes(mask, extras, query, key, value),
        QK_DIM=dims[0], V_DIM=dims[1], BLOCK_M=rows, BLOCK_N=keys, STAGES=2, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    rows, keys = dq_tile
    launch(
        "backward_dq_fallback", (batch * heads * ceil(q_len, 128) * (128 // rows),), query, key,
        value, dout, lse,
        delta, dq, score_grads, *mask.rows, mask.q_blocks, mask.q_order, *extras.rows_map,
        *extras.operands,
        extras.scale, extras.soft_cap, *fallback_sizes(mask, extras, query, key, value, 1),
        QK_DIM=dims[0], V_DIM=dims[1], BLOCK_M=rows, BLOCK_N=keys, STAGES=2, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    return dq, dk, dv, score_grads


def forward_tangent(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray, lse: np.ndarray,
    tangents: tuple[np.ndarray | None, ...], mask: Operands, scale: float, tile: tuple[int, int],
    extras: Extras | None = None, dims: tuple[int, int] = (0, 0),
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """tout and tlse. `tangents`: those of query, key and value, or None. With `extras`, the
    fallback kernel runs, compiled for head dims `dims`."""
    batch, q_len, heads, qk_dim = query.shape
    rows, keys = tile
    tout = guarded((batch, q_len, heads, value.shape[3]), query.dtype)
    tlse = guarded((batch, heads, q_len), np.float32)
    unread = np.full(1, np.nan, np.float32)
    given = [unread if x is None else x for x in tangents]
    kernel, more = "forward_tangent", ((), (scale, *sizes(mask, query, key)))
    dims = dims if extras else (qk_dim, value.shape[3])
    if extras:
        flags = [int(x is not None) for x in tangents]
        scalars = extras.scale, extras.soft_cap
        all_sizes = fallback_sizes(mask, extras, query, key, value, *flags)
        kernel += "_fallback"
        more = (*extras.rows_map, *extras.operands), (*scalars, *all_sizes)
    launch(
        kernel, (batch * heads * ceil(q_len, 128) * (128 // rows),), query, key, value, out, lse,
        *given, tout, tlse, *mask.rows, mask.q_blocks, mask.q_order, *more[0], *more[1],
        QK_DIM=dims[0], V_DIM=dims[1], BLOCK_M=rows, BLOCK_N=keys, STAGES=2, FLOAT32_PRODUCTS=1,
    )  # fmt: skip
    return tout, tlse
