"""Runs the kernels of masks and of decoding in Triton's interpreter.

The arguments are those that the C++ handlers pass. triton_launch.py runs a single kernel.
"""

from __future__ import annotations

import contextlib
import sys
import unittest.mock

import numpy as np
from aot_modules import arguments_of
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import packed_rows
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
    x: Operands, spec: AttentionSpec, kernels: dict[str, tuple[int, int]], splits: int = 1,
    shares: int = 0, exact: int | None = None, v_parts: int = 1, elsewhere: int = 0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The results of decode_p. `kernels`: the tile of each kernel that runs, the tall one first if
    there are two. `splits`: the shares of each sequence, or at most so many if `shares` are dealt
    out. `exact`: 1 for float32 products, 0 for TF32, None for exact products on the path of 16-bit
    operands. `v_parts`: the number of value tiles. `elsewhere`: whether `out` and `lse` of chunks
    of packed rows are left to another kernel.

    Over a float8 cache, the query is in 16 bits. Other tensors become float32, as do results."""
    arrays = {n: np.ascontiguousarray(y) for n, y in zip(x.names, x.leaves, strict=True)}
    query, value = arrays["query"], arrays["value"]
    batch, q_len, heads, qk_dim = query.shape
    first, second, kv_heads, v_dim = value.shape
    group, paged = heads // kv_heads, "block_table" in arrays
    width = arrays["block_table"].shape[1] if paged else 0
    fp8, sinks = "key_scale" in arrays, arrays.get("sinks")
    f = {
        "scale": float(spec.scale), "soft_cap": float(spec.soft_cap or 0), "batch": batch,
        "q_len": q_len, "kv_len": second * width or second, "pages": first * paged,
        "page_size": second * paged, "table_width": width, "heads": heads, "kv_heads": kv_heads,
        "qk_eighths": qk_dim // 8, "v_eighths": v_dim // 8, "splits": splits, "shares": shares,
        "tile_rows": 0, "has_tall": 0, "chunks_elsewhere": elsewhere, "room": 0,
        "scale_rows": len(arrays["key_scale"]) if fp8 else 0, "has_sinks": int(sinks is not None),
        "bfloat16_query": int(query.dtype != np.float16),
        "sink_batch": 1 if sinks is None else len(sinks),
    }  # fmt: skip
    programs, rows = shares + batch if shares else batch * splits, q_len
    of_shares, merges = (splits, batch, q_len, heads), batch * q_len * heads
    if x.row_bounds is not None:
        of_step = packed_rows.room(q_len, x.row_bounds.shape[1], heads, kv_heads)
        arrays["workspace"] = np.ascontiguousarray(packed_rows.work_list(x))
        programs, rows = of_step.items, of_step.tile_rows
        of_shares, merges = (programs, rows, heads), (5 if elsewhere else q_len) * heads
        f |= {"splits": 0, "tile_rows": rows, "has_tall": len(kernels) - 1, "room": programs}
    for name in ("query", "key", "value"):
        y = arrays[name]
        arrays[name] = y.view(np.int16) if fp8 else y.astype(np.float32)
    arrays |= {"partial": guarded((*of_shares, v_dim), np.float32)}
    arrays |= {"sums": guarded(of_shares, np.float32)}
    arrays |= {"out": guarded((batch, q_len, heads, v_dim), np.float32)}
    arrays |= {"lse": guarded((batch, heads, q_len), np.float32)}
    room = max(16, 1 << (max(qk_dim, v_dim) - 1).bit_length())  # head dims of the kernel

    def run(kernel: str, programs: int, **constants: int | None) -> None:
        names = arguments_of(kernel)
        values = [(f | arrays).get(n, arrays["kv_start"]) for n in names if not n.isupper()]
        launch(kernel, (programs,), *values, **{n: c for n, c in constants.items() if n in names})

    with contextlib.ExitStack() as patches:
        if exact is None:
            patched = sys.modules["portable.arithmetic"], "to_tf32", KERNELS["unrounded"]
            patches.enter_context(unittest.mock.patch.object(*patched))
        for kernel, (block_m, block_n) in kernels.items():
            short = block_m <= 16 and f["has_tall"]
            tiles = ceil(min(16, rows * group) if short else rows * group, block_m)
            run(
                kernel + "_pages" * (fp8 and paged), tiles * kv_heads * programs, QK_DIM=room,
                V_DIM=room, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=2, V_PARTS=v_parts,
                FLOAT32_PRODUCTS=exact or 0, NATIVE_FP8=0 if fp8 else None,
                PAGED=int(paged) if fp8 else None,
            )  # fmt: skip
    run("decode_combine", merges, V_DIM=room, SPLITS=128, STEP=16)
    return arrays["out"], arrays["lse"]


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
