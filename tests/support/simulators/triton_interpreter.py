"""Runs the kernels of masks and of decoding in Triton's interpreter.

The arguments are those that the C++ handlers pass. triton_launch.py runs a single kernel.
"""

from __future__ import annotations

import sys
import unittest.mock

import numpy as np
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
