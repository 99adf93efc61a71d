"""Tiles of the decode kernels: rows of the table (table.py)."""

# kernel -> (kind of tile, larger head dim) -> BLOCK_M (rows of one key/value head's group),
# BLOCK_N, STAGES, warps. 16 rows are the minimum of a matrix product, and 64 that of a warp group.
# Keys and stages are chosen so that, except for the widest heads, at least two programs fit in a
# multiprocessor's shared memory. STAGES 2 needs wgmma; otherwise it is one buffer. "hopper" at 64
# and 128 are the fastest of those timed on an H200 (docs/experiments.md). The others were not
# timed.
DECODE_TILES = {
    "decode": {
        ("hopper", 64): (16, 64, 4, 4),
        ("hopper", 128): (16, 64, 3, 4),
        ("hopper", 192): (16, 32, 3, 4),
        ("hopper", 256): (16, 32, 3, 4),
        ("hopper", 512): (16, 32, 2, 4),
        ("blackwell", 64): (16, 64, 4, 4),
        ("blackwell", 128): (16, 64, 3, 4),
        ("blackwell", 192): (16, 32, 3, 4),
        ("blackwell", 256): (16, 32, 3, 4),
        ("blackwell", 512): (16, 16, 3, 4),
        ("ampere", 64): (16, 64, 3, 4),
        ("ampere", 128): (16, 64, 3, 4),
        ("ampere", 192): (16, 32, 3, 4),
        ("ampere", 256): (16, 32, 3, 4),
        ("ampere", 512): (16, 16, 3, 4),
        ("small", 64): (16, 64, 3, 4),
        ("small", 128): (16, 32, 3, 4),
        ("small", 192): (16, 32, 3, 4),
        ("small", 256): (16, 32, 3, 4),
        ("small", 512): (16, 16, 3, 4),
    },
    "decode_tall": {
        ("hopper", 64): (64, 64, 4, 4),
        ("hopper", 128): (64, 32, 4, 4),
        ("hopper", 192): (64, 32, 4, 8),
        ("hopper", 256): (64, 32, 3, 8),
        ("blackwell", 64): (64, 64, 3, 4),
        ("blackwell", 128): (64, 64, 2, 8),
        ("blackwell", 192): (64, 64, 2, 8),
        ("blackwell", 256): (64, 64, 2, 8),
        ("ampere", 64): (64, 64, 3, 4),
        ("ampere", 128): (64, 32, 3, 4),
        ("ampere", 192): (64, 32, 3, 4),
        ("ampere", 256): (64, 32, 3, 8),
        ("small", 64): (64, 64, 3, 4),
        ("small", 128): (64, 32, 3, 4),
        ("small", 192): (64, 32, 3, 4),
        ("small", 256): (64, 32, 2, 8),
    },
}
# For float32 (tiles_fallback.py explains the differences), with the same number of bytes of keys in
# flight. Chosen to avoid spills, not by times. With TF32 products, `decode` reads at 88 to 103 % of
# a copy's rate (benchmarks/results/decode_float32_h200.json). For more rows, several tiles of
# Hopper's TF32 kernel at 128 were not slower than a tall one (docs/experiments.md), so TF32 has no
# tall ones.
FLOAT32_DECODE_TILES = {
    "f32": {
        "decode": {64: (16, 32, 3, 4), 128: (16, 16, 3, 4), 256: (16, 16, 2, 4)},
        "decode_tall": {64: (32, 32, 3, 4), 128: (32, 32, 2, 8), 256: (32, 16, 2, 8)},
    },
    "f32 hopper": {
        "decode": {64: (16, 32, 4, 4), 128: (16, 32, 3, 4), 256: (16, 16, 3, 4)},
        "decode_tall": {64: (32, 32, 3, 4), 128: (32, 32, 3, 8), 256: (32, 16, 2, 8)},
    },
    "tf32": {
        "decode": {64: (16, 32, 3, 4), 128: (16, 16, 3, 4), 256: (16, 16, 2, 4)},
    },
    "tf32 hopper": {
        "decode": {64: (16, 64, 3, 4), 128: (16, 32, 3, 4), 256: (16, 16, 3, 4)},
    },
}
# For a cache in float8_e4m3fn, and queries of both 16-bit dtypes. The tiles for Hopper at 64 and
# 128, except for the tall one at 64, and for 8.x up to 256 are the fastest of those timed, or
# within 5 % of the fastest in a dense cache (docs/experiments.md). The others were not timed.
# Hopper's tile at 128 has six stages, so that two programs instead of three fit on a
# multiprocessor: decode_shares.cc assumes two. It was not compared with one of four stages. 10.x
# has no tall tiles.
FP8_DIMS = ((64, 64), (128, 128), (256, 256))
FP8_DECODE_TILES = {
    "decode_fp8": {
        ("hopper", 64): (16, 128, 3, 4),
        ("hopper", 128): (16, 64, 6, 4),
        ("hopper", 256): (16, 32, 3, 4),
        ("blackwell", 64): (16, 64, 4, 4),
        ("blackwell", 128): (16, 64, 3, 4),
        ("blackwell", 256): (16, 32, 3, 4),
        **{
            (kind, dim): tile
            for kind in ("ampere", "small")
            for dim, tile in {64: (16, 128, 3, 4), 128: (16, 64, 3, 4), 256: (16, 64, 2, 4)}.items()
        },
    },
    "decode_tall_fp8": {
        ("hopper", 64): (64, 64, 3, 4),
        ("hopper", 128): (32, 64, 3, 4),
        **{(kind, dim): (32, 64, 3, 4) for kind in ("ampere", "small") for dim in (64, 128)},
    },
}
# The same tiles for pages, whose scales multiply every key. They are separate kernels, because a
# combined one would use the registers of this one for both.
FP8_DECODE_TILES |= {f"{kernel}_pages": tiles for kernel, tiles in FP8_DECODE_TILES.items()}
NATIVE_FP8 = ("hopper", "blackwell")  # kinds of tile whose GPUs convert to float16


def value_parts(kernel: str, kind: str, v_dim: int, rows: int) -> int:
    """V_PARTS of csrc/kernels/portable/decode.py. Two parts are for products with mma.sync, where
    they were faster by proxy (docs/experiments.md); with more, the accumulators of a warp's rows do
    not fit in its registers."""
    halves = kernel == "decode_tall" and kind in ("ampere", "small") and v_dim == 2 * rows
    return 2 if halves else 1


# Maximum number of shares that decode_combine merges (csrc/launch/select_decode.cc).
DECODE_SPLITS = 128
DECODE_STEP = 16  # shares that it loads at once
