"""Tiles of the fallback kernels, in 16 bits and in float32: rows of the table (table.py)."""

from __future__ import annotations

from tiles_portable import PORTABLE_TILES

# Kernels for calls with options that change scores, and for head dims up to a compiled one. Options
# are selected at run time, so one variant serves all calls. A step has at most 64 keys (dK/dV:
# rows), since the lists of a block mask have blocks of 64. "hopper", and by proxy "ampere" and
# "small", are the fastest in benchmarks/tune/tune.py on an H200 (docs/experiments.md). Tiles with
# spills are often faster than smaller ones without. "blackwell" has the tiles of the plain kernels,
# which were not timed.
#
# Above 256 (WIDEST), these kernels serve plain calls, too. On 10.x, their tiles have fewer than 64
# rows, for which Triton does not use tcgen05: its accumulators would not fit.
WIDEST = 512
FALLBACK_TILES = {
    "forward_fallback": {
        ("hopper", 64): (64, 64, 3, 4),
        ("hopper", 128): (64, 64, 3, 4),
        ("hopper", 192): (128, 64, 1, 8),
        ("hopper", 256): (128, 64, 1, 8),
        ("hopper", WIDEST): (64, 64, 1, 8),
        ("ampere", 64): (128, 64, 2, 4),
        ("ampere", 128): (128, 64, 2, 8),
        ("ampere", 192): (128, 64, 2, 8),
        ("ampere", 256): (128, 32, 2, 8),
        ("ampere", WIDEST): (64, 32, 2, 8),
        ("small", 64): (128, 64, 2, 4),
        ("small", 128): (128, 64, 2, 8),
        ("small", 192): (128, 64, 1, 8),
        ("small", 256): (128, 32, 1, 8),
        ("small", WIDEST): (32, 32, 2, 8),
        ("blackwell", WIDEST): (32, 32, 2, 8),
    },
    "backward_dkdv_fallback": {
        ("hopper", 64): (64, 64, 2, 4),
        ("hopper", 128): (64, 128, 2, 8),
        ("hopper", 192): (64, 64, 2, 8),
        ("hopper", 256): (64, 64, 2, 8),
        ("hopper", WIDEST): (32, 32, 1, 8),
        ("ampere", 64): (64, 128, 1, 8),
        ("ampere", 128): (64, 32, 2, 4),
        ("ampere", 192): (64, 32, 2, 4),
        ("ampere", 256): (64, 64, 2, 8),
        ("ampere", WIDEST): (32, 32, 1, 8),
        ("small", 64): (64, 128, 1, 8),
        ("small", 128): (64, 64, 1, 8),
        ("small", 192): (64, 32, 2, 8),
        ("small", 256): (32, 32, 2, 8),
        ("small", WIDEST): (16, 16, 1, 8),
        ("blackwell", WIDEST): (16, 16, 1, 8),
    },
    "backward_dq_fallback": {
        ("hopper", 64): (64, 64, 2, 4),
        ("hopper", 128): (64, 64, 2, 4),
        ("hopper", 192): (64, 64, 2, 8),
        ("hopper", 256): (64, 64, 2, 8),
        ("hopper", WIDEST): (64, 32, 1, 8),
        ("ampere", 64): (128, 32, 2, 4),
        ("ampere", 128): (128, 32, 2, 8),
        ("ampere", 192): (64, 64, 2, 8),
        ("ampere", 256): (64, 64, 2, 8),
        ("ampere", WIDEST): (32, 32, 2, 8),
        ("small", 64): (128, 64, 2, 8),
        ("small", 128): (128, 32, 2, 8),
        ("small", 192): (64, 64, 1, 8),
        ("small", 256): (64, 32, 1, 8),
        ("small", WIDEST): (32, 16, 1, 8),
        ("blackwell", WIDEST): (16, 32, 1, 8),
    },
}
for _kernel, _rows in FALLBACK_TILES.items():
    _plain = PORTABLE_TILES[_kernel.removesuffix("_fallback")]
    _rows |= {row: tile for row, tile in _plain.items() if row[0] == "blackwell"}

FALLBACK_KERNELS = (*FALLBACK_TILES, "backward_delta_fallback")

# The same kernels for float32: twice the bytes, so smaller tiles. There are also fewer of them: one
# set serves all of compute capability 8.x (it fits in 99 KiB), 256 also serves 192/128, and larger
# head dims use XLA. f32 multiplies without tensor cores (arithmetic.dot), in the same way on every
# GPU. Chosen for no or few spills, and not timed.
FLOAT32_DIMS = ((64, 64), (128, 128), (256, 256))
FLOAT32_TILES = {
    "f32": {
        "forward_fallback": {64: (64, 32, 2, 8), 128: (64, 32, 2, 8), 256: (32, 16, 2, 8)},
        "backward_dkdv_fallback": {64: (32, 32, 2, 8), 128: (32, 32, 1, 8), 256: (16, 32, 1, 8)},
        "backward_dq_fallback": {64: (32, 32, 2, 8), 128: (32, 32, 2, 8), 256: (16, 32, 1, 8)},
    },
    "tf32": {
        "forward_fallback": {64: (64, 64, 2, 8), 128: (64, 32, 2, 8), 256: (32, 16, 2, 8)},
        "backward_dkdv_fallback": {64: (64, 32, 2, 8), 128: (32, 32, 2, 8), 256: (16, 16, 1, 8)},
        "backward_dq_fallback": {64: (64, 64, 2, 8), 128: (32, 32, 2, 8), 256: (16, 16, 1, 8)},
    },
    "tf32 hopper": {
        "forward_fallback": {64: (128, 64, 1, 8), 128: (128, 32, 1, 8), 256: (32, 16, 2, 8)},
        "backward_dkdv_fallback": {64: (32, 64, 2, 8), 128: (32, 32, 2, 8), 256: (16, 16, 1, 8)},
        "backward_dq_fallback": {64: (64, 64, 2, 8), 128: (64, 32, 2, 8), 256: (16, 16, 1, 8)},
    },
}
