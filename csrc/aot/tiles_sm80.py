"""Tiles of the kernels of mma.sync and cp.async, in Gluon, for GPUs of compute capability 8.x, 11.0
and 12.x: rows of the table (table.py)."""

from __future__ import annotations

# Chosen on a Hopper card, which runs the same instructions: docs/internals/proxy.md says how, and
# benchmarks/results/proxy_h100.json has the numbers.
KINDS = ("ampere", "small")  # of tiles: 164 KiB and 99 KiB of shared memory

# (kind, larger head dim) -> BLOCK_M, BLOCK_N, STAGES (one buffer each of keys and values), warps:
# rows whose forward is sm80/fwd.py. At 64 the compiler of portable/fwd.py does as well.
FORWARD = {
    (kind, dim): tile
    for kind in KINDS
    for dim, tile in ((128, (128, 32, 1, 4)), (192, (128, 32, 1, 4)), (256, (64, 64, 1, 4)))
}

# (kind, larger head dim) -> BLOCK_M, BLOCK_N, STAGES of rows, warps, and of these how many share
# the rows of a tile of dQ. One kernel makes all gradients, and adds dQ up in memory; where there is
# no row, and for deterministic gradients, the portable kernels do.
BACKWARD = {
    ("ampere", 64): (64, 64, 2, 4, 2),
    ("ampere", 128): (64, 128, 2, 8, 4),
    ("ampere", 256): (32, 64, 2, 8, 4),
    ("small", 64): (64, 64, 2, 4, 2),
    ("small", 128): (32, 64, 2, 4, 2),
}
