"""Tiles of the kernels of decoding: rows of the table (table.py)."""

# kernel -> (kind of tile, larger head dim) -> BLOCK_M (rows of one key/value head's group),
# BLOCK_N, STAGES, warps. 16 rows are the least of a matrix product, 64 one warp group's; keys and
# stages so that, but for the widest heads, two programs or more share a multiprocessor's shared
# memory. STAGES 2 needs wgmma, else it is one buffer. "hopper" of 64 and 128 are the fastest of
# those that were timed on an H200 (docs/experiments.md); the others are not timed.
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
# In float32 (tiles_fallback.py says how it differs): the same bytes of keys in flight. Chosen for
# no spills, not by times. With TF32 products `decode` reads at 88 to 103 % of a copy's rate
# (benchmarks/results/decode_float32_h200.json). For more rows, Hopper's kernel of 128 in several
# tiles was not slower than a tall one (docs/experiments.md), so there are no tall ones.
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
# Of a cache in float8_e4m3fn, for queries of both 16-bit dtypes. Those of Hopper at 64 and 128, but
# for its tall one at 64, and of 8.x up to 256 are the fastest of those that were timed, or within
# 5 % of it in a dense cache (docs/experiments.md); the others were not timed. At 128, Hopper's has
# six stages, so that two programs and not three fit a multiprocessor: decode_shares.cc counts on
# two. They were not compared with the four before. 10.x has no tall tiles.
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
# The same for pages, whose scales multiply every key: in one kernel with the other, both would take
# its registers.
FP8_DECODE_TILES |= {f"{kernel}_pages": tiles for kernel, tiles in FP8_DECODE_TILES.items()}
# What these kernels alone take.
FP8_ARGUMENTS = ("key_scale", "value_scale", "scale_rows", "bfloat16_query")
NATIVE_FP8 = ("hopper", "blackwell")  # kinds of tile whose GPUs convert to float16


def value_parts(kernel: str, kind: str, v_dim: int, rows: int) -> int:
    """V_PARTS of csrc/kernels/portable/decode.py, for products by mma.sync: above two parts, the
    sums of a warp's rows do not fit in its registers. Faster by proxy (docs/experiments.md)."""
    halves = kernel == "decode_tall" and kind in ("ampere", "small") and v_dim == 2 * rows
    return 2 if halves else 1


def absent_arguments(kernel: str) -> tuple[str, ...]:
    """Arguments of a function of csrc/kernels/portable/decode.py that are None in the kernel."""
    return FP8_ARGUMENTS if kernel in DECODE_TILES else ()


# shares of the keys that decode_combine can merge: csrc/launch/select.cc asks for no more
DECODE_SPLITS = 128
DECODE_STEP = 16  # shares that it holds at once
