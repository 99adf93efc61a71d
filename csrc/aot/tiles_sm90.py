"""Tiles of the Gluon kernels for Hopper: rows of the table (table.py)."""

from __future__ import annotations

Dims = int | tuple[int, int]
# Head dims (query and key, value) with separate kernels on Hopper. tiles_sm80.py has those of other
# GPUs.
HOPPER_DIMS = ((32, 32), (192, 192))


def row_of(qk_dim: int, v_dim: int) -> Dims:
    """The key of the rows below for these head dims: 192 is 192/128."""
    dims = qk_dim, v_dim
    return dims if dims in HOPPER_DIMS else max(dims)


# These kernels compute the same results as the portable kernels of the same pass, which serve all
# other GPUs. kernel -> head dims (row_of) -> constants:
# - WARP_GROUPS (of 64 rows), BLOCK_N, STAGES of keys and values, ROWS per program.
# - QK_CHUNK: columns of a tile of queries or keys, a power of two. table.py derives V_CHUNK, the
#   same for values.
# - V_PARTS: the number of parts of the value columns. A tile is computed once for each part.
# - KEYS: keys of a program of dK and dV. PARTS: the number of parts of its columns, each of which a
#   program computes (sm90/bwd.py).
# - CONSUMER_REGISTERS, PRODUCER_REGISTERS: registers per thread.
# - Q_STAGES: 2: the queries of the next tile are loaded while those of a tile are in use. EARLY: 1:
#   ranges of rows are read before the queries arrive.
# - COPY_DQ: 1: the first part of a block of dQ is copied instead of added if a program has all
#   tiles of keys (csrc/launch/select_attention.cc then lets less of the sum be cleared).
#   TILES: of keys of a program, one after another.
# - PING_PONG: warp groups issue products in turns, with named barriers, as the forward and dQ
#   always do.
# - REMATERIALIZE: descriptors of operands that never move are recomputed in every step
#   (rematerialized_zero in sm90/common.py), which frees registers and costs some integer
#   instructions. On an H200, it made the backward 1 to 3 % faster, dK and dV 2 % at 128 and 4 to
#   5 % at 192/128, the forward 4 to 5 % at 256 and 0 to 2 % at 128 and 192/128 (with fewer spills).
#   dQ became 0 to 5 % slower, dK and dV at 256 8 to 11 %; at 64 nothing changed
#   (docs/experiments.md).
# - LSE_BY_MMA: tensor cores subtract LSE and delta (sm90/lse_by_mma.py). At 128, it made
#   the backward 0 to 2 % faster, 1 to 3 % with dS by stmatrix, and dK and dV alone 2 to 3 %; at 64,
#   the backward 7 to 9 % slower, and dK and dV alone 3 to 7 % (docs/experiments.md).
SM90_TILES: dict[str, dict[Dims, dict[str, int]]] = {
    "forward_sm90": {
        dim: {
            "QK_CHUNK": chunk,
            **({"V_CHUNK": chunk} if dim == 96 else {}),
            "WARP_GROUPS": groups,
            "BLOCK_N": keys,
            "STAGES": stages,
            "OUT_IN_QUERY": out_in_query,
            "V_PARTS": parts,
            "CONSUMER_REGISTERS": 160 if groups == 3 else 240,
            "PRODUCER_REGISTERS": 32 if groups == 3 else 24,
            "REMATERIALIZE": int(dim not in (64, 96)),
            "SCHEDULER": 0,
            "Q_STAGES": 1,
            "EARLY": 0,
        }
        for dim, chunk, groups, keys, stages, out_in_query, parts in (
            (64, 64, 3, 128, 2, 0, 1),
            (96, 64, 2, 128, 2, 0, 1),
            (128, 128, 2, 128, 2, 0, 1),
            (192, 64, 2, 128, 2, 1, 1),
            (256, 256, 2, 64, 2, 1, 1),
            ((192, 192), 64, 2, 64, 3, 1, 1),
            (512, 256, 2, 32, 2, 1, 2),
        )
    },
    "backward_sm90": {
        dim: {
            "QK_CHUNK": chunk,
            **({"V_CHUNK": chunk} if dim == 96 else {}),
            "KEYS": 128,
            "PARTS": 1,
            **plan,
            "CONSUMER_REGISTERS": consumer,
            "PRODUCER_REGISTERS": 24,
            "REMATERIALIZE": int(dim != 64),
            "LSE_BY_MMA": int(dim != 64),
            "COPY_DQ": 0,
            "TILES": 1,
        }
        for dim, chunk, consumer, plan in (
            # SKIP: a warp group skips masked blocks in which no row attends to its keys. DQ: dQ is
            # computed by no warp group (0), by the two warp groups (1), or by a third one (2). At
            # 64, DQ 2 with SKIP is 12 to 19 % faster than DQ 1. At 128, SKIP gains -3 to 1 %, and
            # PING_PONG 3 to 12 % (docs/experiments.md).
            (64, 64, 200, {"PING_PONG": 0, "SKIP": 1, "DQ": 2}),
            (96, 64, 240, {"PING_PONG": 1, "SKIP": 0, "DQ": 1}),
            (128, 128, 240, {"PING_PONG": 1, "SKIP": 0, "DQ": 1}),
        )
    },
    # Separate kernels for dK and dV, and for dQ, without accumulation in memory: for deterministic
    # gradients, and at 192 and 256 for all calls, where they are 18 to 53 % faster than one kernel
    # of 64 keys. SKIP gains 2 to 14 % of dK and dV. DO_REGISTERS: the cotangents of a tile stay in
    # registers.
    "backward_dq_sm90": {
        dim: {
            "QK_CHUNK": chunk,
            "BLOCK_N": keys,
            "STAGES": stages,
            "DO_REGISTERS": in_registers,
            "CONSUMER_REGISTERS": 240,
            "PRODUCER_REGISTERS": 24,
            "REMATERIALIZE": int(dim == 96),
        }
        for dim, chunk, keys, stages, in_registers in (
            (64, 64, 128, 2, 0),
            (96, 32, 128, 2, 0),
            (128, 128, 128, 2, 0),
            (192, 64, 64, 3, 1),
            (256, 256, 64, 2, 0),
            ((192, 192), 64, 64, 2, 0),
        )
    },
    "backward_preprocess": {dim: {"ROWS": 32} for dim in (64, 96, 128, 192, 256, (192, 192))},
    "backward_postprocess": {dim: {"ROWS": 64} for dim in (64, 96, 128)},
}
SM90_TILES["backward_dkdv_sm90"] = {
    dim: SM90_TILES["backward_sm90"][dim] | {"DQ": 0, "SKIP": 1, "CONSUMER_REGISTERS": 240}
    for dim in (64, 96, 128)
}
SM90_TILES["backward_dkdv_sm90"] |= {
    dim: SM90_TILES["backward_dkdv_sm90"][64]
    | {"QK_CHUNK": 64, "KEYS": 128 if dim == 192 else 64, "REMATERIALIZE": int(dim == 192)}
    for dim in (192, 256, (192, 192))
}


def without_lse_by_mma(tile: dict[str, int]) -> dict[str, int]:
    """LSE_BY_MMA supports only scores that are multiplied by a scale, without options."""
    return tile | {"LSE_BY_MMA": 0} if "LSE_BY_MMA" in tile else tile


# The tangent of the forward, for calls with the tangents of query, key and value (tiles_tangent.py
# has those of other calls). STAGES: tiles of keys, of values and of their tangents, as many as fit.
SM90_TILES["forward_tangent_sm90"] = {
    dim: {
        "BLOCK_N": 128,
        "STAGES": stages,
        "CONSUMER_REGISTERS": 240,
        "PRODUCER_REGISTERS": 24,
    }
    for dim, stages in ((64, 12), (128, 5))
}

# With a soft cap, and the same tiles except for dQ at 64 and 128, where 128 keys of P and of tanh's
# derivative do not fit in registers. 192 has no such kernels, because no model has a soft cap
# there: 192/192 is padded to 256, and the fallback kernels serve 192/128.
SOFT_CAP = {
    f"{kernel}_soft_cap": kernel
    for kernel in (
        "forward_sm90",
        "backward_sm90",
        "backward_dkdv_sm90",
        "backward_dq_sm90",
    )
}
SM90_TILES |= {
    capped: {
        dim: without_lse_by_mma(tile)
        for dim, tile in SM90_TILES[plain].items()
        if dim in (64, 128, 256)
    }
    for capped, plain in SOFT_CAP.items()
}
SM90_TILES["backward_dq_sm90_soft_cap"] |= {
    dim: SM90_TILES["backward_dq_sm90"][dim] | {"BLOCK_N": 64, "STAGES": 3} for dim in (64, 128)
}
# With ALiBi over indices: the kernels of the forward and of the one-kernel backward, for the head
# dims of models that use ALiBi. Other calls use the fallback kernels.
ALIBI = {f"{kernel}_alibi": kernel for kernel in ("forward_sm90", "backward_sm90")}
SM90_TILES |= {
    biased: {dim: without_lse_by_mma(SM90_TILES[plain][dim]) for dim in (64, 128)}
    for biased, plain in ALIBI.items()
}
# With a block mask: a step is a block of 64 in a tile's list, and lists are for tiles of 128.
BLOCK_SPARSE = {
    f"{kernel}_block_lists": kernel
    for kernel in ("forward_sm90", "backward_dkdv_sm90", "backward_dq_sm90")
}
SM90_TILES |= {
    "forward_sm90_block_lists": {
        64: SM90_TILES["forward_sm90"][64]
        | {"BLOCK_N": 64, "STAGES": 4, "WARP_GROUPS": 2}
        | {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24},
        128: SM90_TILES["forward_sm90"][128] | {"BLOCK_N": 64, "STAGES": 4},
        192: SM90_TILES["forward_sm90"][192] | {"BLOCK_N": 64, "STAGES": 4},
        256: SM90_TILES["forward_sm90"][256],
    },
    "backward_dkdv_sm90_block_lists": {
        dim: without_lse_by_mma(SM90_TILES["backward_dkdv_sm90"][dim]) | {"SKIP": 0}
        for dim in (64, 128)
    },
    "backward_dq_sm90_block_lists": {
        dim: SM90_TILES["backward_dq_sm90_soft_cap"][dim] for dim in (64, 128)
    },
}
SM90_TILES["backward_dkdv_sm90_block_lists"] |= {
    192: SM90_TILES["backward_dkdv_sm90"][192],
    256: SM90_TILES["backward_dkdv_sm90"][256] | {"REMATERIALIZE": 1},  # else 192 B of spills
}
SM90_TILES["backward_dq_sm90_block_lists"] |= {
    dim: SM90_TILES["backward_dq_sm90"][dim] for dim in (192, 256)
}
# With dropout, whose bits take registers: two warp groups, and 64 keys in a step of dQ.
DROPOUT = {
    f"{kernel}_dropout": kernel
    for kernel in ("forward_sm90", "backward_sm90", "backward_dkdv_sm90", "backward_dq_sm90")
}
SM90_TILES |= {
    "forward_sm90_dropout": {
        64: SM90_TILES["forward_sm90"][64]
        | {"WARP_GROUPS": 2, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24},
        128: SM90_TILES["forward_sm90"][128],
    },
    "backward_preprocess_dropout": {
        dim: SM90_TILES["backward_preprocess"][dim] | {"LSE_IN_TWO": 1} for dim in (64, 128)
    },
    "backward_dq_sm90_dropout": {
        dim: SM90_TILES["backward_dq_sm90_soft_cap"][dim] for dim in (64, 128)
    },
    **{
        f"{kernel}_dropout": {dim: without_lse_by_mma(SM90_TILES[kernel][dim]) for dim in (64, 128)}
        for kernel in ("backward_sm90", "backward_dkdv_sm90")
    },
}
# With a bias array, whose tiles are loaded with those of the keys. At 64, three warp groups would
# not have enough registers. At 128, shared memory has no room for a separate output.
BIAS = {
    f"{kernel}{dtype}_bias": kernel
    for kernel in ("forward_sm90", "backward_dq_sm90")
    for dtype in ("", "_float32")
}
_NARROW = {"QK_CHUNK": 32, "WARP_GROUPS": 2, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
SM90_TILES["forward_sm90_bias"] = {
    (32, 32): SM90_TILES["forward_sm90"][64] | _NARROW | {"STAGES": 3},
    64: SM90_TILES["forward_sm90"][64]
    | {"WARP_GROUPS": 2, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24},
    128: SM90_TILES["forward_sm90"][128] | {"OUT_IN_QUERY": 1},
    256: SM90_TILES["forward_sm90"][256],
}
# A tile of a float32 bias takes twice the memory, so steps have half as many keys.
SM90_TILES["forward_sm90_float32_bias"] = {
    dim: SM90_TILES["forward_sm90_bias"][dim] | {"BLOCK_N": keys, "STAGES": stages}
    for dim, keys, stages in (((32, 32), 64, 4), (64, 64, 4), (128, 64, 2), (256, 32, 2))
}
# The backward with a bias: separate kernels, of which that of dK and dV has programs of 64 keys at
# all head dims. REGISTERS: per thread at launch, so that two programs fit on a multiprocessor; at
# 64, products would be serialised. At 256, only a bias with one element per logit has such kernels:
# with a float32 bias, that of dK and dV would exceed the shared memory by 16 bytes.
BIAS_BACKWARD_DIMS: tuple[Dims, ...] = ((32, 32), 64, 128, 256)
SM90_TILES["backward_preprocess_dbias"] = dict.fromkeys(
    BIAS_BACKWARD_DIMS, SM90_TILES["backward_preprocess"][256] | {"LSE_IN_TWO": 1}
)
SM90_TILES["backward_dkdv_sm90_dbias"] = dict.fromkeys(
    BIAS_BACKWARD_DIMS, SM90_TILES["backward_dkdv_sm90"][256]
)
SM90_TILES["backward_dkdv_sm90_dbias"][32, 32] = SM90_TILES["backward_dkdv_sm90"][256] | {
    "QK_CHUNK": 32, "CONSUMER_REGISTERS": 104, "REGISTERS": 80,
}  # fmt: skip
SM90_TILES |= {
    f"backward_dkdv_sm90{dtype}_bias": {
        dim: SM90_TILES["backward_dkdv_sm90_dbias"][dim] for dim in BIAS_BACKWARD_DIMS[:3]
    }
    for dtype in ("", "_float32")
}
SM90_TILES |= {
    f"backward_dq_sm90{dtype}_bias": {
        dim: SM90_TILES["backward_dq_sm90"][256] | {"QK_CHUNK": chunk, "STAGES": stages}
        for dim, chunk, stages in (((32, 32), 32, 3), (64, 64, 3), (128, 128, 2))
    }
    for dtype in ("", "_float32")
}
# The gradient of a bias that batch rows share (csrc/kernels/sm90/shared_dbias.py).
SM90_TILES |= {
    f"backward_shared{dtype}_dbias": {
        dim: {
            "QK_CHUNK": chunk,
            "STAGES": stages,
            "CONSUMER_REGISTERS": 240,
            "PRODUCER_REGISTERS": 24,
        }
        for dim, chunk, stages in (((32, 32), 32, 4), (64, 64, 3), (128, 128, 2))
    }
    for dtype in ("", "_float32")
}
SM90_TILES["backward_sum_dbias"] = {dim: {"ELEMENTS": 1024} for dim in BIAS_BACKWARD_DIMS[:3]}
# With the largest logit of each row: the running maximum, which is updated by every larger score.
MAX_LOGITS = {"forward_sm90_max_logits": "forward_sm90"}
SM90_TILES["forward_sm90_max_logits"] = {
    dim: tile for dim, tile in SM90_TILES["forward_sm90"].items() if dim != 96
}
# The plain forward with shorter tiles, for calls with too few tiles to fill the GPU
# (csrc/launch/select_attention.cc).
LOW_OCCUPANCY = {"forward_sm90_low_occupancy": "forward_sm90"}
SM90_TILES["forward_sm90_low_occupancy"] = {
    64: SM90_TILES["forward_sm90"][64]
    | {"WARP_GROUPS": 2, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
}
# The plain forward for tiles of few steps, with one more warp that draws tiles. Tiles of 64 rows,
# steps of 64 keys and at most 80 registers per thread at launch let three programs run on a
# multiprocessor, which hide each other's waits (select_attention.cc has this number). At 128, where
# one program runs, such a warp gained nothing.
SHORT = {"forward_sm90_short": "forward_sm90"}
SM90_TILES["forward_sm90_short"] = {
    64: SM90_TILES["forward_sm90"][64]
    | {"WARP_GROUPS": 1, "BLOCK_N": 64, "STAGES": 3, "SCHEDULER": 1}
    | {"PRODUCER_REGISTERS": 32, "REGISTERS": 80}
}
# The fused backward for few rows, with one consumer warp group (sm90/bwd_single_consumer.py).
SHORT |= {"backward_sm90_short": "backward_sm90"}
SM90_TILES["backward_sm90_short"] = {
    64: SM90_TILES["backward_sm90"][64] | {"KEYS": 64, "SKIP": 0, "REGISTERS": 128}
}
# Changes of plain kernels, which their variants do without: 4 % of a pass and less, except for
# COPY_DQ (docs/experiments.md).
for _kernel, _dim, _changes in (
    ("forward_sm90", 96, {"Q_STAGES": 2, "EARLY": 1}),
    ("forward_sm90", 128, {"Q_STAGES": 2, "EARLY": 1}),
    ("forward_sm90_short", 64, {"Q_STAGES": 2, "EARLY": 1}),
    *(("backward_sm90", dim, {"COPY_DQ": 1}) for dim in (64, 96, 128)),
):
    SM90_TILES[_kernel] |= {_dim: SM90_TILES[_kernel][_dim] | _changes}
# The fused backward for two tiles of keys, both in one program: 8 to 9 % faster at 96, and 9 %
# slower at 128.
SHORT |= {"backward_sm90_pairs": "backward_sm90"}
SM90_TILES["backward_sm90_pairs"] = {96: SM90_TILES["backward_sm90"][96] | {"TILES": 2}}
# Chunks of new tokens over pages. PAGE_ROWS: keys that one TMA copy loads, the smallest page
# (csrc/launch/select_decode.cc); 1: keys are copied by cp.async. The producer needs registers for
# page numbers, or addresses.
SM90_TILES |= {
    kernel: {
        dim: {
            "QK_CHUNK": dim,
            "WARP_GROUPS": 2,
            "BLOCK_N": 128,
            "STAGES": 2,
            "PAGE_ROWS": rows,
            "CONSUMER_REGISTERS": 240 - 8 * more,
            "PRODUCER_REGISTERS": 24 + 16 * more,
            "REMATERIALIZE": int(dim != 64),
        }
        for dim in (64, 128)
    }
    for kernel, rows, more in (
        ("ragged_sm90", 16, 1),
        ("ragged_sm90_large_pages", 64, 0),
        ("ragged_sm90_small_pages", 1, 3),
    )
}
# kernel -> the plain kernel whose function and tensor maps it uses
LIKE_PLAIN = SOFT_CAP | ALIBI | BIAS | BLOCK_SPARSE | DROPOUT | MAX_LOGITS | LOW_OCCUPANCY | SHORT
LIKE_PLAIN |= dict.fromkeys(("ragged_sm90_large_pages", "ragged_sm90_small_pages"), "ragged_sm90")
# Kernels for dK and dV, and for dQ, that compute the columns of a gradient in two parts, for head
# dims at which the accumulators of 64 keys or rows do not fit in one warp group.
SM90_TILES["backward_preprocess"][512] = {"ROWS": 16}  # 32 do not fit in registers
SM90_TILES |= {
    "backward_dkdv_sm90_parts": {512: SM90_TILES["backward_dkdv_sm90"][256] | {"PARTS": 2}},
    "backward_dq_sm90_parts": {
        512: {"QK_CHUNK": 64, "BLOCK_N": 32, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
    },
}
PARTS = ("backward_dkdv_sm90_parts", "backward_dq_sm90_parts")

# Kernels compiled by both assemblers: 13.4 is 2 to 5 % faster on an H200
# (docs/experiments.md), and drivers of CUDA 12 use 12.9.
TWO_ASSEMBLERS = (
    "forward_sm90",
    "backward_sm90",
    "backward_dkdv_sm90",
    "backward_dq_sm90",
    "forward_tangent_sm90",
    "ragged_sm90",
    *LIKE_PLAIN,
    *(f"backward_dkdv_sm90{x}" for x in ("_bias", "_float32_bias", "_dbias")),
    *("backward_shared_dbias", "backward_shared_float32_dbias"),
    *PARTS,
)
# Exceptions, for which 12.9 is as fast, or 1 to 8 % faster; with the largest logits, so that the
# wheel stays small.
ONE_ASSEMBLER: tuple[tuple[str, Dims], ...] = (
    *((f"backward{kernel}_sm90", 96) for kernel in ("", "_dkdv", "_dq")),
    *(("forward_sm90_max_logits", dim) for dim in SM90_TILES["forward_sm90_max_logits"]),
    ("backward_dq_sm90", 192),
    ("backward_dq_sm90", 256),
)
# Constants that differ under ptxas 12.9, which gains 1 to 6 % there.
UNDER_12_9: dict[tuple[str, Dims], dict[str, int]] = {
    ("forward_sm90", 128): {"REMATERIALIZE": 0},
    ("backward_dq_sm90", 128): {"REMATERIALIZE": 1},
    ("backward_dkdv_sm90", 256): {"REMATERIALIZE": 1},
}
