"""Tiles of the general kernels, in 16 bits and in float32: rows of the table (table.py)."""

from tiles_portable import PORTABLE_TILES

# Kernels for what changes scores, and for head dims up to a compiled one: which of it is asked for
# they see at run time, so one variant serves all. Tiles of the plain kernels, but on Hopper the
# largest with few spills; nobody has timed them. A step of keys (dK/dV: of rows) is 64 at most: the
# lists of a map of blocks count in 64.
FALLBACK_TILES = {
    kernel: PORTABLE_TILES[plain] | {("hopper", dim): tile for dim, tile in hopper.items()}
    for kernel, plain, hopper in (
        (
            "forward_fallback",
            "forward",
            {64: (128, 64, 3, 8), 128: (64, 64, 3, 4), 192: (128, 64, 1, 8), 256: (64, 64, 2, 8)},
        ),
        (
            "backward_dkdv_fallback",
            "backward_dkdv",
            {64: (64, 64, 2, 8), 128: (64, 64, 2, 8), 192: (32, 64, 2, 8), 256: (32, 32, 2, 8)},
        ),
        (
            "backward_dq_fallback",
            "backward_dq",
            {64: (128, 64, 2, 8), 128: (64, 64, 2, 8), 192: (64, 64, 2, 8), 256: (64, 64, 2, 8)},
        ),
    )
}

# The same kernels for float32: twice the bytes, so smaller tiles. Fewer of them, too: one set for
# all of compute capability 8.x (it fits 99 KiB), and 256 serves what 192/128 would. f32 multiplies
# without tensor cores (logits.dot), the same on every GPU. Chosen for no or few spills; nobody has
# timed them.
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
