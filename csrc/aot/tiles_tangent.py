"""Tiles of the kernels for the tangent of attention: rows of the table (table.py)."""

from __future__ import annotations

# Head dims (query and key, value). The plain kernel takes exactly these, the fallback kernel all
# smaller ones, too. A cubin serves all GPUs that can run it and have the same tile.
TANGENT_DIMS = {
    "forward_tangent": ((64, 64), (128, 128)),
    "forward_tangent_fallback": ((64, 64), (128, 128), (256, 256)),
}

# kernel -> (kind of tile, head dim), or (dtype, head dim) for TF32 -> BLOCK_M, BLOCK_N, STAGES of
# the mask-free loop, warps. In float32 without tensor cores, and in TF32 at 256, a tile of 16 x 16
# would spill, so these tangents run in XLA. Chosen for no or few spills, except those of the plain
# kernel on Hopper, which are the fastest on an H200 (docs/experiments.md).
TANGENT_TILES: dict[str, dict[tuple[str, int], tuple[int, int, int, int]]] = {
    "forward_tangent": {
        ("hopper", 64): (64, 64, 3, 4),
        ("hopper", 128): (128, 64, 2, 8),
        ("ampere", 64): (128, 32, 2, 8),
        ("ampere", 128): (128, 32, 2, 8),
        ("small", 64): (128, 32, 2, 8),
        ("small", 128): (128, 32, 2, 8),
        ("blackwell", 64): (64, 64, 2, 4),
        ("blackwell", 128): (64, 64, 2, 8),
    },
    "forward_tangent_fallback": {
        ("hopper", 64): (64, 64, 2, 4),
        ("hopper", 128): (64, 64, 2, 4),
        ("hopper", 256): (64, 32, 2, 8),
        ("ampere", 64): (64, 32, 2, 8),
        ("ampere", 128): (64, 32, 2, 8),
        ("ampere", 256): (32, 32, 1, 8),
        ("small", 64): (64, 32, 2, 8),
        ("small", 128): (64, 32, 2, 8),
        ("small", 256): (32, 32, 1, 8),
        ("blackwell", 64): (64, 64, 2, 4),
        ("blackwell", 128): (64, 64, 2, 8),
        ("blackwell", 256): (32, 32, 1, 8),
        ("tf32", 64): (64, 32, 2, 8),
        ("tf32", 128): (32, 32, 1, 8),
    },
}
