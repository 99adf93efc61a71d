"""Tiles of the kernels with a bias array and with dropout: rows of the table (table.py).

They take all that the fallback kernels take. A cubin serves all GPUs that can run it and have the
same tile, and the smallest compiled head dim that covers a request serves it: each is a kernel more
to compile. A step of keys (dK/dV: of rows) is 64 at most: the lists of a block mask count in 64. Of
one stage, they have one loop for all blocks.
"""

from __future__ import annotations

# dtype -> head dims (query and key, value). 192/192 would take as long as 256: Triton's tiles are
# powers of two wide. float32 above 128 would spill kilobytes in the gradient of the bias.
BIAS_DIMS: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("bf16", "f16"), ((64, 64), (128, 128), (256, 256))),
    **dict.fromkeys(("f32", "tf32"), ((128, 128),)),
}

# Their loop is not pipelined, so a tile is BLOCK_M, BLOCK_N and warps. "hopper", and "ampere" and
# "small" by proxy: the fastest of those timed on an H200, if a bias array does not slow them down
# (docs/experiments.md). "blackwell", float32, and backward_dbias on Hopper were not timed.
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

# kernel -> (kind of tile, head dim), or (dtype, head dim) of float32 -> BLOCK_M, BLOCK_N, STAGES,
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
