"""Tiles of the kernels with a bias array and with dropout: rows of the table (table.py).

They support everything that the fallback kernels support. To limit the number of kernels, a cubin
serves all GPUs that can run it and have the same tile, and a request uses the smallest compiled
head dim that covers it. A step has at most 64 keys (dK/dV: rows), since the lists of a block mask
have blocks of 64. With one stage, kernels have one loop for all blocks.
"""

from __future__ import annotations

# dtype -> head dims (query and key, value). 192/192 would be as slow as 256, because the width of
# Triton's tiles is a power of two. float32 above 128 would spill kilobytes in the bias gradient.
BIAS_DIMS: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("bf16", "f16"), ((64, 64), (128, 128), (256, 256))),
    **dict.fromkeys(("f32", "tf32"), ((128, 128),)),
}

# Their loop is not pipelined, so a tile is BLOCK_M, BLOCK_N and warps. "hopper", and by proxy
# "ampere" and "small", are the fastest of those timed on an H200 that a bias array does not slow
# down (docs/experiments.md). "blackwell", float32, and backward_dbias on Hopper were not timed.
_Tile = tuple[int, int, int]
_OF_HEAD_DIM: dict[str, dict[str, tuple[_Tile, _Tile, _Tile]]] = {  # 64, 128, 256
    "forward_bias": {
        "hopper": ((64, 64, 4), (64, 64, 4), (128, 64, 8)),
        "ampere": ((64, 64, 4), (64, 64, 8), (64, 64, 8)),
        "small": ((64, 64, 4), (64, 64, 8), (64, 64, 8)),
        "blackwell": ((64, 64, 4), (64, 64, 8), (64, 64, 8)),
    },
    "backward_dkdv_bias": {
        "hopper": ((64, 64, 4), (64, 64, 8), (64, 64, 8)),
        "ampere": ((32, 128, 4), (64, 64, 8), (64, 64, 8)),
        "small": ((32, 128, 4), (64, 64, 8), (32, 32, 8)),
        "blackwell": ((64, 64, 8), (64, 64, 8), (32, 32, 8)),
    },
    "backward_dq_bias": {
        "hopper": ((64, 64, 4), (64, 64, 4), (64, 64, 8)),
        "ampere": ((64, 64, 4), (64, 64, 8), (64, 64, 8)),
        "small": ((64, 64, 4), (64, 64, 8), (64, 32, 8)),
        "blackwell": ((64, 64, 8), (64, 64, 8), (64, 32, 8)),
    },
    "backward_dbias": {
        "hopper": ((64, 64, 8), (64, 64, 8), (64, 64, 8)),
        "ampere": ((64, 64, 4), (64, 64, 4), (32, 32, 8)),
        "small": ((64, 64, 4), (64, 64, 4), (32, 32, 8)),
        "blackwell": ((64, 64, 8), (64, 64, 8), (64, 64, 8)),
    },
}

# kernel -> (kind of tile, head dim), or (dtype, head dim) for float32 -> BLOCK_M, BLOCK_N, STAGES,
# warps
BIAS_TILES: dict[str, dict[tuple[str, int], tuple[int, int, int, int]]] = {
    kernel: {
        (kind, dim): (rows, keys, 1, warps)
        for kind, tiles in kinds.items()
        for dim, (rows, keys, warps) in zip((64, 128, 256), tiles, strict=True)
    }
    | {(dtype, 128): (32, 32, 1, 8) for dtype in ("f32", "tf32")}
    for kernel, kinds in _OF_HEAD_DIM.items()
}

# Kernels for Hopper with only a bias array, in the query's dtype and with 16-byte aligned rows, and
# nothing else that changes scores. Kernel -> head dim -> BLOCK_M, BLOCK_N, stages, warps, maximum
# registers per thread (0: the assembler's choice), so that several blocks fit on a multiprocessor.
# Chosen by their times on an H100, and for 256 on an H200 (docs/experiments.md). For the last two
# kernels, no other tiles were timed.
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
