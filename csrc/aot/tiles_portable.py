"""Tiles of the portable kernels of forward and backward: rows of the table (table.py)."""

# kernel -> (kind of tile, larger head dim) -> BLOCK_M, BLOCK_N, STAGES of the mask-free loop,
# warps. "hopper", 64 and 128: the fastest of benchmarks/tune/tune.py on one H200. "ampere", and
# "small" (99 KiB a block) at 64 and 128: the fastest of those tried on an H100 by proxy
# (docs/internals/proxy.md); their forward is another kernel (tiles_sm80.py). The others were never
# timed: the largest that fit with few spills.
PORTABLE_TILES = {
    "forward": {
        ("hopper", 64): (128, 64, 3, 4),
        ("hopper", 128): (128, 128, 3, 8),
        ("hopper", 192): (128, 64, 1, 8),
        ("hopper", 256): (64, 64, 3, 8),
        ("blackwell", 64): (128, 64, 3, 8),
        ("blackwell", 128): (128, 64, 3, 8),
        ("blackwell", 192): (128, 64, 3, 8),
        ("blackwell", 256): (128, 64, 2, 8),
    },
    "backward_dkdv": {
        ("hopper", 64): (128, 64, 2, 4),
        ("hopper", 128): (64, 128, 3, 8),
        ("hopper", 192): (64, 64, 2, 8),
        ("hopper", 256): (32, 64, 2, 8),
        ("blackwell", 64): (64, 128, 2, 8),
        ("blackwell", 128): (64, 64, 2, 8),
        ("blackwell", 192): (64, 64, 2, 8),
        ("blackwell", 256): (32, 64, 2, 8),
        ("ampere", 64): (64, 64, 3, 4),
        ("ampere", 128): (64, 64, 2, 4),
        ("ampere", 192): (64, 32, 2, 4),
        ("ampere", 256): (64, 64, 1, 8),
        ("small", 64): (64, 64, 3, 4),
        ("small", 128): (32, 128, 2, 8),
        ("small", 192): (64, 32, 2, 8),
        ("small", 256): (32, 32, 2, 8),
    },
    "backward_dq": {
        ("hopper", 64): (128, 64, 3, 4),
        ("hopper", 128): (128, 128, 2, 8),
        ("hopper", 192): (64, 64, 2, 8),
        ("hopper", 256): (64, 64, 2, 8),
        ("blackwell", 64): (128, 64, 2, 8),
        ("blackwell", 128): (64, 64, 2, 8),
        ("blackwell", 192): (64, 64, 2, 8),
        ("blackwell", 256): (64, 64, 2, 8),
        ("ampere", 64): (128, 64, 2, 4),
        ("ampere", 128): (128, 64, 2, 8),
        ("ampere", 192): (64, 32, 2, 4),
        ("ampere", 256): (64, 64, 2, 8),
        ("small", 64): (128, 64, 2, 4),
        ("small", 128): (128, 64, 2, 8),
        ("small", 192): (32, 64, 2, 8),
        ("small", 256): (32, 32, 2, 4),
    },
}
