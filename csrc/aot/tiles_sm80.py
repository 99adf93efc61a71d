"""Tiles of the Gluon kernels with mma.sync and cp.async, for compute capability 8.x, 11.0 and 12.x:
rows of the table (table.py)."""

from __future__ import annotations

# Head dims with kernels only for these GPUs, and no portable ones. Elsewhere such calls are padded.
DIMS = ((96, 96), (192, 192))

# All tiles are the fastest of those tried on an H100 or H200 by proxy (docs/internals/proxy.md).

# kernel -> (kind, head dims of query and value) -> BLOCK_M, BLOCK_N, ROW_WARPS (warps that share
# rows), warps, for calls whose forward is sm80/fwd.py.
FORWARD = {
    "forward": {
        ("ampere", 64, 64): (128, 64, 1, 4),
        ("ampere", 96, 96): (128, 64, 1, 4),
        ("ampere", 128, 128): (128, 64, 1, 4),
        ("ampere", 192, 128): (128, 32, 1, 4),
        ("ampere", 192, 192): (128, 128, 1, 8),
        ("ampere", 256, 256): (128, 64, 2, 8),
        ("small", 64, 64): (128, 64, 1, 4),
        ("small", 96, 96): (128, 64, 1, 4),
        ("small", 128, 128): (128, 32, 1, 4),
        ("small", 192, 128): (128, 32, 1, 4),
        ("small", 192, 192): (128, 64, 1, 8),
        ("small", 256, 256): (128, 32, 1, 8),
    }
}


def _backward(rows: int, keys: int, **changed: int) -> dict[str, int]:
    row = {"BLOCK_M": rows, "BLOCK_N": keys, "STAGES": 2, "DO_STAGES": 2, "V_REGISTERS": 0}
    return row | {"S_WARPS": 2, "KV_WARPS": 2, "DQ_WARPS": 4, "WARPS": 8} | changed


# (kind, head dims) -> constants (explained in sm80/bwd.py). One kernel computes all gradients and
# accumulates dQ in memory. Without a row, and for deterministic gradients, the portable kernels are
# used.
BACKWARD = {
    ("ampere", 64, 64): _backward(64, 64, DQ_WARPS=2, WARPS=4),
    ("ampere", 96, 96): _backward(64, 128, DQ_WARPS=2),
    ("ampere", 128, 128): _backward(64, 128, KV_WARPS=4),
    ("ampere", 192, 128): _backward(32, 128, KV_WARPS=4),
    ("ampere", 192, 192): _backward(64, 64, V_REGISTERS=1, KV_WARPS=4),
    ("ampere", 256, 256): _backward(32, 64, V_REGISTERS=1, KV_WARPS=4),
    ("small", 64, 64): _backward(64, 128, V_REGISTERS=1, DQ_WARPS=2),
    ("small", 96, 96): _backward(64, 128, DO_STAGES=1, V_REGISTERS=1, KV_WARPS=4, DQ_WARPS=2),
    ("small", 128, 128): _backward(64, 64, DO_STAGES=1, V_REGISTERS=1, S_WARPS=4, KV_WARPS=4),
    ("small", 192, 128): _backward(64, 64, STAGES=1, DO_STAGES=1, V_REGISTERS=1, KV_WARPS=4),
    ("small", 192, 192): _backward(64, 64, STAGES=1, DO_STAGES=1, V_REGISTERS=1, KV_WARPS=4),
    ("small", 256, 256): _backward(32, 64, DO_STAGES=1, V_REGISTERS=1, KV_WARPS=4),
}

# With only a soft cap: the same tiles, for the head dims of models that use one. At 128, "ampere"
# has the tile of "small", which was 6 % faster (results/proxy_alibi_h200.json).
_CAPPED = ((64, 64), (128, 128), (256, 256))
FORWARD["forward_sm80_soft_cap"] = {
    (kind, *dims): FORWARD["forward"][kind, *dims]
    for kind in ("ampere", "small")
    for dims in _CAPPED
} | {("ampere", 128, 128): FORWARD["forward"]["small", 128, 128]}
SOFT_CAP_BACKWARD = {row for row in BACKWARD if row[1:] in _CAPPED}
