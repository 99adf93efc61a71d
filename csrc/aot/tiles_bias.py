"""Tiles of the kernels with a bias array and with dropout: rows of the table (table.py).

They take all that the fallback kernels take. One set serves all GPUs that can run the same cubin,
so tiles of compute capability 8.0 fit the 99 KiB of 8.6, and the smallest compiled head dim that
covers a request serves it: each is a kernel more to compile. A step is 64 rows or keys at most: the
lists of a block mask count in 64. Of one stage, they have one loop for all blocks.
"""

from __future__ import annotations

# dtype -> head dims (query and key, value). 192/192 would take as long as 256: Triton's tiles are
# powers of two wide. float32 above 128 would spill kilobytes in the gradient of the bias.
BIAS_DIMS: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("bf16", "f16"), ((64, 64), (128, 128), (256, 256))),
    **dict.fromkeys(("f32", "tf32"), ((128, 128),)),
}

# kernel -> (kind of tile or dtype of float32, head dim) -> BLOCK_M, BLOCK_N, stages (their loop is
# not pipelined), warps
_KINDS = ("hopper", "blackwell", "ampere", "small")
BIAS_TILES: dict[str, dict[tuple[str, int], tuple[int, int, int, int]]] = {
    kernel: {(kind, dim): tile for kind in _KINDS for dim, tile in rows.items()}
    | {(dtype, 128): tile for dtype, tile in of_float32.items()}
    for kernel, rows, of_float32 in (
        (
            "forward_bias",
            {64: (64, 64, 1, 4), 128: (64, 64, 1, 8)},
            {"f32": (32, 32, 1, 8), "tf32": (32, 32, 1, 8)},
        ),
        (
            "backward_dkdv_bias",
            {64: (64, 64, 1, 8), 128: (64, 64, 1, 8)},
            {"f32": (32, 32, 1, 8), "tf32": (32, 32, 1, 8)},
        ),
        (
            "backward_dq_bias",
            {64: (64, 64, 1, 8), 128: (64, 64, 1, 8)},
            {"f32": (32, 32, 1, 8), "tf32": (32, 32, 1, 8)},
        ),
        (
            "backward_dbias",
            {64: (64, 64, 1, 8), 128: (64, 64, 1, 8)},
            {"f32": (32, 32, 1, 8), "tf32": (32, 32, 1, 8)},
        ),
    )
}

# Of 256: the largest of those tried with no or few spills in the loop, and no stores of them there
# (docs/experiments.md). They were not timed. "ampere" and "small" are the same, so they share
# PTX, and 10.x has that PTX where a tile has under 64 rows or keys.
_WIDE_TILES = {
    "forward_bias": {"hopper": (64, 64), "blackwell": (64, 64), "ampere": (64, 32)},
    "backward_dkdv_bias": {"hopper": (32, 64), "blackwell": (32, 32), "ampere": (32, 32)},
    "backward_dq_bias": {"hopper": (64, 32), "blackwell": (64, 32), "ampere": (64, 16)},
    "backward_dbias": {"hopper": (64, 64), "blackwell": (64, 64), "ampere": (32, 32)},
}
for _kernel, _tiles in _WIDE_TILES.items():
    _of_kinds = _tiles | {"small": _tiles["ampere"]}
    BIAS_TILES[_kernel] |= {(kind, 256): (*tile, 1, 8) for kind, tile in _of_kinds.items()}

# Those for Hopper with a bias array alone: of the query's dtype, in rows that begin at 16 bytes,
# and nothing else that changes scores. Kernel -> head dim -> BLOCK_M, BLOCK_N, stages, warps, most
# registers a thread (0: the assembler's choice), so that several blocks fit a multiprocessor.
# Chosen by their times on an H100, of 256 on an H200 (docs/experiments.md). Of the last two
# kernels, no other tiles have been timed.
BIAS_ALONE_TILES: dict[str, dict[int, tuple[int, int, int, int, int]]] = {
    "forward_bias_alone": {
        64: (64, 64, 3, 4, 168),
        128: (64, 64, 2, 4, 0),
        256: (128, 64, 2, 8, 0),
    },
    "backward_dkdv_bias_alone": {
        64: (64, 64, 2, 4, 0),
        128: (64, 64, 2, 4, 0),
        256: (64, 64, 2, 8, 0),
    },
    "backward_dq_bias_alone": {
        64: (64, 64, 2, 4, 168),
        128: (64, 64, 2, 4, 0),
        256: (128, 64, 1, 8, 0),
    },
    "backward_dbias_alone": {
        64: (64, 64, 1, 8, 128),
        128: (64, 64, 1, 8, 128),
        256: (64, 64, 1, 8, 0),
    },
    "backward_dkdv_dbias_alone": {
        64: (64, 64, 2, 4, 0),
        128: (64, 64, 2, 4, 0),
        256: (64, 64, 2, 8, 0),
    },
    "backward_dq_of_dbias_alone": {
        64: (128, 64, 3, 4, 0),
        128: (128, 64, 3, 8, 0),
        256: (128, 64, 3, 8, 0),
    },
}
